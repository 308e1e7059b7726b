"""The ten probing tasks in SentEval's format: split, label and sentence on a line, all splits in one file."""

from pathlib import Path

from smallbert.tasks.reading import find_folder, read_plain
from smallbert.tasks.task import Row, Split, Task, in_order, label_ids, make_task

FILES: dict[str, tuple[str, str]] = {
    "length": ("sentence_length", "How long is a sentence, in six bins?"),
    "content": ("word_content", "Which word of a given list is in a sentence?"),
    "depth": ("tree_depth", "How deep is the sentence's parse tree?"),
    "top": ("top_constituents", "Which constituents are at the top of the parse tree?"),
    "bshift": ("bigram_shift", "Were two neighbouring words swapped?"),
    "tense": ("past_present", "Is the main verb past or present?"),
    "subj": ("subj_number", "Is the subject singular or plural?"),
    "obj": ("obj_number", "Is the object singular or plural?"),
    "somo": ("odd_man_out", "Was a word replaced by another?"),
    "coord": ("coordination_inversion", "Were two joined clauses swapped?"),
}
ROWS: dict[str, Row] = {name: Row("classify", ("accuracy",), about) for name, (_, about) in FILES.items()}
SPLITS = {"tr": "train", "va": "dev", "te": "test"}
OFFICIAL = {"train": 100_000, "dev": 10_000, "test": 10_000}
PLACES = ("probing/xprobe", "probing/rebuilt", "probing", "xprobe", "rebuilt", "senteval", "SentEval/probing", ".")


def load(name: str, data: Path | str | None) -> Task:
    """Read one of these tasks; its classes are the labels found in the file."""
    file = f"{FILES[name][0]}.txt"
    folder = find_folder(name, data, PLACES, [file])
    path = folder / file
    columns, _ = read_plain(path, ("split", "label", "sentence"))
    label_ids(columns["split"], list(SPLITS), f"{path} (first column)")  # refuses a split that is none of the three
    rows: dict[str, list[int]] = {split: [] for split in SPLITS.values()}
    for row, mark in enumerate(columns["split"]):
        rows[SPLITS[mark]].append(row)
    classes = in_order(columns["label"][row] for row in rows["train"] or range(len(columns["label"])))
    whole = Split(
        texts=columns["sentence"],
        pairs=None,
        labels=label_ids(columns["label"], classes, str(path)),
        ids=[str(row) for row in range(len(columns["label"]))],
    )
    splits = {split: whole.take(chosen) for split, chosen in rows.items() if chosen}
    counts = {split: len(examples) for split, examples in splits.items()}
    note = ""
    if counts != OFFICIAL:
        size = " / ".join(f"{count:,}" for count in counts.values())
        note = f"{folder.resolve().name}/{file} ({size} rows) is not SentEval's own file: not comparable with papers"
    return make_task(name, ROWS[name], classes, splits, [path], [note])
