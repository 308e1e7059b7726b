"""The GLUE tasks and SNLI from their official files, where a quote is a character and only a tab separates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smallbert.tasks.reading import find_folder, first_file, read_plain
from smallbert.tasks.task import Row, Split, Task, label_ids, make_task, numbers


@dataclass(frozen=True)
class GlueRow(Row):
    """Where one task's files are, what its columns are called and how many rows the official files have."""

    folder: str
    text: str
    label: str
    official: Mapping[str, int]
    labels: tuple[str, ...] = ()  # in the order of the hub, which published models follow
    values: tuple[str, ...] = ()  # what the file writes for them, where that differs
    pair: str | None = None
    number: str | None = None
    header: tuple[str, ...] | None = None
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip_ragged: bool = False
    caution: str = ""


NLI = ("entailment", "neutral", "contradiction")
TRAIN_DEV = {"train": ("train.tsv",), "dev": ("dev.tsv",)}

ROWS: dict[str, GlueRow] = {
    "sst2": GlueRow(
        kind="classify",
        metrics=("accuracy",),
        about="Is a phrase of a film review positive?",
        folder="SST-2",
        text="sentence",
        label="label",
        labels=("negative", "positive"),
        values=("0", "1"),
        official={"train": 67_349, "dev": 872},
    ),
    "cola": GlueRow(
        kind="classify",
        metrics=("mcc", "accuracy"),
        about="Is a sentence grammatical?",
        folder="CoLA",
        header=("source", "label", "mark", "sentence"),
        text="sentence",
        label="label",
        labels=("unacceptable", "acceptable"),
        values=("0", "1"),
        official={"train": 8_551, "dev": 1_043},
    ),
    "mrpc": GlueRow(
        kind="classify",
        metrics=("accuracy", "f1"),
        about="Do two news sentences say the same?",
        folder="MRPC",
        text="#1 String",
        pair="#2 String",
        label="Quality",
        labels=("not_equivalent", "equivalent"),
        values=("0", "1"),
        official={"train": 3_668, "dev": 408},
    ),
    "stsb": GlueRow(
        kind="regress",
        metrics=("pearson", "spearman"),
        about="How similar are two sentences, from 0 to 5?",
        folder="STS-B",
        text="sentence1",
        pair="sentence2",
        label="score",
        number="index",
        official={"train": 5_749, "dev": 1_500},
    ),
    "qqp": GlueRow(
        kind="classify",
        metrics=("accuracy", "f1"),
        about="Do two questions ask the same?",
        folder="QQP",
        text="question1",
        pair="question2",
        label="is_duplicate",
        number="id",
        labels=("not_duplicate", "duplicate"),
        values=("0", "1"),
        official={"train": 363_846, "dev": 40_430},
        skip_ragged=True,  # the official train file itself has a few broken lines, which everybody leaves out
        caution="so this is not the GLUE split, and dev scores are not GLUE dev scores",
    ),
    "mnli": GlueRow(
        kind="classify",
        metrics=("accuracy",),
        about="Does the first sentence entail the second, contradict it or neither (matched genres)?",
        folder="MNLI",
        text="sentence1",
        pair="sentence2",
        label="gold_label",
        number="index",
        labels=NLI,
        official={"train": 392_702, "dev": 9_815},
        files={"train": ("train.tsv", "train_subset*.tsv"), "dev": ("dev_matched.tsv",)},
    ),
    "qnli": GlueRow(
        kind="classify",
        metrics=("accuracy",),
        about="Does a sentence hold the answer to a question?",
        folder="QNLI",
        text="question",
        pair="sentence",
        label="label",
        number="index",
        labels=("entailment", "not_entailment"),
        official={"train": 104_743, "dev": 5_463},
        files={"train": ("train.tsv", "train_rebuilt.tsv"), "dev": ("dev.tsv",)},
    ),
    "rte": GlueRow(
        kind="classify",
        metrics=("accuracy",),
        about="Does the first text entail the second (small data)?",
        folder="RTE",
        text="sentence1",
        pair="sentence2",
        label="label",
        number="index",
        labels=("entailment", "not_entailment"),
        official={"train": 2_490, "dev": 277},
    ),
    "snli": GlueRow(
        kind="classify",
        metrics=("accuracy",),
        about="Does an image caption entail a sentence, contradict it or neither?",
        folder="SNLI",
        text="sentence1",
        pair="sentence2",
        label="gold_label",
        number="pairID",
        labels=NLI,
        official={"train": 549_367, "dev": 9_842, "test": 9_824},
        files={
            "train": ("train.tsv", "snli_1.0_train.txt", "train_100k.tsv"),
            "dev": ("dev.tsv", "snli_1.0_dev.txt"),
            "test": ("test.tsv", "snli_1.0_test.txt"),
        },
    ),
}


def load(name: str, data: Path | str | None) -> Task:
    """Read one of these tasks from the folder that holds its files."""
    row = ROWS[name]
    patterns = row.files or TRAIN_DEV
    names = dict.fromkeys((row.folder, row.folder.lower(), name, row.folder.replace("-", "")))
    places = [*(f"{top}/{each}" for top in ("glue", "GLUE") for each in names), *names, "."]
    folder = find_folder(name, data, places, [each for group in patterns.values() for each in group])
    paths = {split: path for split, group in patterns.items() if (path := first_file(folder, group))}
    splits, notes = {}, []
    for split, path in paths.items():
        splits[split], left_out = _read(row, path)
        if len(splits[split]) != row.official[split]:
            counts = f"{len(splits[split]):,} rows, official {row.official[split]:,}"
            counts += f", {left_out:,} broken or without gold label left out" if left_out else ""
            notes.append(f"{split} is {path.name}, not the official {split} ({counts})")
    if notes:
        notes.append(row.caution)
    if "test" in splits and "dev" not in splits:
        splits["dev"] = splits.pop("test")
        notes.append(f"there is no dev file: dev is {paths['test'].name}")
    return make_task(name, row, row.labels, splits, paths.values(), notes)


def _read(row: GlueRow, path: Path) -> tuple[Split, int]:
    needed = [column for column in (row.text, row.pair, row.label) if column]
    columns, left_out = read_plain(path, row.header, needed, row.skip_ragged)
    if row.labels == NLI and "-" in columns[row.label]:  # annotators did not agree: left out by everybody
        gold = [at for at, label in enumerate(columns[row.label]) if label != "-"]
        left_out += len(columns[row.label]) - len(gold)
        columns = {name: [values[at] for at in gold] for name, values in columns.items()}
    labels, known = columns[row.label], row.values or row.labels
    split = Split(
        texts=columns[row.text],
        pairs=columns[row.pair] if row.pair else None,
        labels=label_ids(labels, known, str(path)) if known else numbers(labels, str(path)),
        ids=columns.get(row.number or "") or [str(at) for at in range(len(labels))],
    )
    return split, left_out
