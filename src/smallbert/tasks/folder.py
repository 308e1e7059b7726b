"""A user's own task: one file, or a folder with train.* and dev.* or test.*; columns given, or guessed and said."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from smallbert.errors import UserError
from smallbert.tasks.derived import hold_out
from smallbert.tasks.reading import READERS, Columns, check_columns, read_columns
from smallbert.tasks.squad import check_answers
from smallbert.tasks.task import KINDS, Row, Split, Task, flat, in_order, is_bio, label_ids, make_task, numbers

STEMS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
HELD_OUT, SEED = 0.1, 0  # a lone file is always cut the same way
FEW = 20  # classes, which may be those of any small file
SHORT = 3  # words, as names of classes have at most

# Names tried in this order, upper or lower case; two names side by side are a pair of texts.
PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question", "context"),
    ("question", "sentence"),
    ("query", "passage"),
)
TEXTS: tuple[str, ...] = (
    "text", "sentence", "review", "words", "tokens", "content", "comment", "body",
    "message", "document", "tweet", "headline", "description", "title", "question", "query",
    "input", "phrase", "utterance",
)  # fmt: skip
LABELS: tuple[str, ...] = (
    "label", "labels", "target", "class", "category", "gold_label", "sentiment", "score",
    "stars", "rating", "tags", "ner_tags", "pos_tags", "answers", "intent", "topic",
    "tag", "polarity", "y", "is_duplicate",
)  # fmt: skip
IDS = ("id", "idx", "guid")


def load(path: Path, *, text: str | None, pair: str | None, label: str | None, kind: str | None) -> Task:
    """Read a user's own data, check it and say in the note whatever was guessed or decided for them."""
    if kind is not None and kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        raise UserError(
            f"'{kind}' is not a kind of task; known are: {', '.join(KINDS)}" + (f"; {near[0]}?" if near else "")
        )
    files = _find(path)
    tables = {split: _join(group) for split, group in files.items()}
    first = next(iter(files))
    given = {"text": text, "pair": pair, "label": label}
    chosen, notes = _choose(files[first][0], list(tables[first]), given)
    for split, group in files.items():
        check_columns(group[0], list(tables[split]), [name for name in chosen.values() if name])
    if kind is None:
        texts, values = tables[first][chosen["text"]], tables[first][chosen["label"]]
        kind = _guess_kind(texts, values)
        if kind == "classify":
            pairs = tables[first].get(chosen["pair"]) or [""] * len(texts)
            _doubt_classes(files[first][0], chosen, list(zip(texts, pairs, strict=True)), values)
        many = f", {_count(values)} different ones" if kind == "classify" else ""
        notes.append(f"kind '{kind}' guessed from the labels{many}")
    where = {split: str(group[0]) for split, group in files.items()}
    splits, labels = _encode(kind, tables, chosen, where)
    if "dev" not in splits and "train" in splits:
        splits["train"], splits["dev"] = hold_out(splits["train"], HELD_OUT, SEED, kind)
        notes.append(f"our own split by seed {SEED}: {len(splits['train']):,} train, {len(splits['dev']):,} dev rows")
    paths = [file for group in files.values() for file in group]
    unanswerable = kind == "answer" and any(not each["text"] for split in splits.values() for each in split.labels)
    name = path.stem if path.is_file() else path.resolve().name
    row = Row(kind, _metrics(kind, labels), "a user's own data")
    return make_task(name, row, labels, splits, paths, notes, unanswerable=unanswerable)


def _find(path: Path) -> dict[str, list[Path]]:
    if path.is_file():
        return {"train": [path]}
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in READERS)
    found = {}
    for split, stems in STEMS.items():
        exact = [file for file in files if file.stem.lower() in stems]
        if len(exact) > 1:
            names = ", ".join(file.name for file in exact)
            raise UserError(f"{path} holds more than one {split} file: {names}; leave one of them")
        shards = [file for file in files if re.fullmatch(rf"({'|'.join(stems)})-\d+-of-\d+", file.stem.lower())]
        if exact or shards:
            found[split] = exact or shards
    if not found:
        there = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise UserError(f"{path} holds no train.*, dev.* or test.* ending in {' '.join(READERS)}; there is: {there}")
    return found


def _join(files: list[Path]) -> Columns:
    columns = read_columns(files[0])
    for file in files[1:]:
        more = read_columns(file)
        check_columns(file, list(more), columns)
        columns = {name: values + more[name] for name, values in columns.items()}
    return columns


def _choose(path: Path, names: list[str], given: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """The columns to use as {"text": …, "pair": … or "", "label": …}, and a note on those that were guessed."""
    check_columns(path, names, [name for name in given.values() if name])
    lower = {name.lower().strip(): name for name in reversed(names)}
    chosen = {role: name or "" for role, name in given.items()}

    def free(wanted: tuple[str, ...]) -> str:
        return next((lower[name] for name in wanted if name in lower and lower[name] not in chosen.values()), "")

    if not chosen["label"]:
        chosen["label"] = free(LABELS)
    if not chosen["text"] and not chosen["pair"]:
        two = next((two for two in PAIRS if all(free((name,)) for name in two)), None)
        chosen["text"], chosen["pair"] = (lower[two[0]], lower[two[1]]) if two else (free(TEXTS), "")
    elif not chosen["text"]:
        chosen["text"] = free(TEXTS + tuple(name for two in PAIRS for name in two))
    for role in ("text", "label"):  # of two columns the other one is the one that is not known by name
        rest = [name for name in names if name not in chosen.values()]
        if not chosen[role] and len(names) == 2 and len(rest) == 1:
            chosen[role] = rest[0]
        if not chosen[role]:
            known = ", ".join(names)
            raise UserError(f"cannot tell the {role} column of {path}: its columns are {known}; write --{role} NAME")
    used = [name for name in chosen.values() if name]
    if len(set(used)) < len(used):
        raise UserError(f"{path}: one column is used twice ({', '.join(used)}); give each of text, pair, label its own")
    guessed = [f"{role} column '{name}'" for role, name in chosen.items() if name and not given[role]]
    return chosen, [f"guessed by name: {', '.join(guessed)}"] if guessed else []


def _guess_kind(texts: list[Any], labels: list[Any]) -> str:
    if isinstance(labels[0], dict):
        return "answer"
    if isinstance(texts[0], list):
        return "tag"
    try:
        found = [float(label) for label in labels]
    except (TypeError, ValueError):
        return "classify"
    fractions = any(not value.is_integer() for value in found if math.isfinite(value))
    return "regress" if fractions and len(set(found)) > min(10, len(found) / 2) else "classify"


def _doubt_classes(path: Path, chosen: Mapping[str, str], texts: list[tuple[Any, Any]], labels: list[Any]) -> None:
    """Refuse to guess that labels are classes where they are plainly texts or numbers; who says so may have them."""
    text, label, classes, different = chosen["text"], chosen["label"], _count(labels), _count(texts)
    if classes <= FEW:
        return
    words = median(len(str(value).split()) for value in labels)
    swapped = f"if the two were mixed up, write --text {quote(label)} --label {quote(text)}"
    signs = [
        (classes > different and not chosen["pair"], f"and '{text}' only {different:,}: {swapped}"),
        (classes > different, f"in only {different:,} different text{'s' * (different > 1)}"),
        (
            4 * classes > len(labels) and words > SHORT,
            f"in {len(labels):,} rows, most of several words: if it holds the texts, choose by --text and --label",
        ),
        (
            2 * classes > len(labels) and all(re.fullmatch(r"-?\d+", _class_name(value)) for value in labels),
            f"all numbers, in {len(labels):,} rows: if numbers are to be predicted, write --kind regress",
        ),
    ]
    if sign := next((said for seen, said in signs if seen), None):
        raise UserError(
            f"{path}: column '{label}' has {classes:,} different labels, {sign}; if these are classes all the same, "
            "write --kind classify"
        )


def _count(values: list[Any]) -> int:
    return len(set(map(_class_name, values)))


def _encode(
    kind: str, tables: Mapping[str, Columns], chosen: Mapping[str, str], where: Mapping[str, str]
) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Each table as a split, and the class names: those of train, in order."""
    splits = {}
    for split, table in tables.items():
        texts = [_text(value, kind == "tag", where[split], row) for row, value in enumerate(table[chosen["text"]], 1)]
        pairs = table.get(chosen["pair"])
        pairs = pairs and [_text(value, False, where[split], row) for row, value in enumerate(pairs, 1)]
        if kind == "answer" and not pairs:
            raise UserError(f"{where[split]}: kind answer needs the contexts too; write --pair NAME")
        labels = table[chosen["label"]]
        for row, value in enumerate(labels, 1):
            if value is None or str(value).strip().lower() in ("", "nan"):
                raise UserError(f"{where[split]}, row {row}: no value in the label column '{chosen['label']}'")
        ids = next(([str(value) for value in table[name]] for name in IDS if name in table), [])
        ids = ids if len(set(ids)) == len(texts) else [str(row) for row in range(len(texts))]
        splits[split] = Split(texts, pairs, LABEL_READERS[kind](labels, where[split]), ids)
    if kind == "answer":
        for split, each in splits.items():
            check_answers(each.pairs or [], each.labels, where[split])
    if kind not in ("classify", "tag"):
        return splits, ()
    classes = in_order(flat(next(iter(splits.values()))))
    code = _code_words if kind == "tag" else lambda split, classes, where: label_ids(split.labels, classes, where)
    return {
        name: dataclasses.replace(split, labels=code(split, classes, where[name])) for name, split in splits.items()
    }, classes


def _text(value: Any, words: bool, where: str, row: int) -> Any:
    if words and isinstance(value, str):
        return value.split()
    if words and isinstance(value, list):
        return [str(word) for word in value]
    if isinstance(value, str | int | float) and not words and value == value:
        return str(value)
    wanted = "a list of words" if words else 'a text (an empty one is written "")'
    raise UserError(f"{where}, row {row}: {value!r:.60} where {wanted} is needed")


def _class_name(value: Any) -> str:
    """A label as written, but 1.0 as 1, since programs that know missing numbers write whole numbers so."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", str(value).strip())


def _tags(values: list[Any], where: str) -> list[list[str]]:
    lists = [value.split() if isinstance(value, str) else value for value in values]
    for row, value in enumerate(lists, 1):
        if not isinstance(value, list):
            raise UserError(f"{where}, row {row}: {value!r:.60} where a list of tags, one a word, is needed")
    return [[_class_name(tag) for tag in tags] for tags in lists]


def _answers(values: list[Any], where: str) -> list[dict[str, list[Any]]]:
    for row, value in enumerate(values, 1):
        if not isinstance(value, dict) or not all(isinstance(value.get(key), list) for key in ("text", "answer_start")):
            form = '{"text": ["…"], "answer_start": [0]}'
            raise UserError(f"{where}, row {row}: {value!r:.60} where answers like {form} are needed")
    return [{"text": value["text"], "answer_start": value["answer_start"]} for value in values]


def _code_words(split: Split, classes: tuple[str, ...], where: str) -> list[list[int]]:
    coded = []
    for row, (words, tags) in enumerate(zip(split.texts, split.labels, strict=True), 1):
        if len(words) != len(tags):
            raise UserError(f"{where}, row {row}: {len(words)} words and {len(tags)} tags; give one tag a word")
        coded.append(label_ids(tags, classes, f"{where}, sentence {row}"))
    return coded


def _metrics(kind: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    if kind == "classify":
        return ("accuracy", "f1") if len(labels) == 2 else ("accuracy",)
    if kind == "tag":
        return ("f1", "accuracy") if is_bio(labels) else ("accuracy",)
    return ("pearson", "spearman") if kind == "regress" else ("f1", "em")


LABEL_READERS: dict[str, Callable[[list[Any], str], list[Any]]] = {
    "classify": lambda values, _: [_class_name(value) for value in values],
    "regress": numbers,
    "tag": _tags,
    "answer": _answers,
}
