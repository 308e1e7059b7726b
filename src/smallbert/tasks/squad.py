"""SQuAD 1.1 and 2.0 from their official JSON files."""

import json
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.tasks.reading import find_folder, read_text
from smallbert.tasks.task import Row, Split, Task, make_task

ROWS: dict[str, Row] = {
    "squad": Row("answer", ("f1", "em"), "Which words of a paragraph answer a question (SQuAD 1.1)?"),
    "squad2": Row("answer", ("f1", "em"), "Which words answer a question, if any do (SQuAD 2.0)?"),
}
VERSIONS = {"squad": "v1.1", "squad2": "v2.0"}
OFFICIAL = {"squad": {"train": 87_599, "dev": 10_570}, "squad2": {"train": 130_319, "dev": 11_873}}
PLACES = ("squad", "SQuAD", "squad2", ".")


def load(name: str, data: Path | str | None) -> Task:
    """Read one of these tasks; a missing train file only means that the task cannot be trained on."""
    files = {split: f"{split}-{VERSIONS[name]}.json" for split in OFFICIAL[name]}
    folder = find_folder(name, data, PLACES, files.values())
    paths = {split: folder / file for split, file in files.items() if (folder / file).is_file()}
    splits = {split: _read(path) for split, path in paths.items()}
    notes = [
        f"{split} has {len(splits[split]):,} questions, the official one {count:,}"
        for split, count in OFFICIAL[name].items()
        if split in splits and len(splits[split]) != count
    ]
    return make_task(name, ROWS[name], (), splits, paths.values(), notes, unanswerable=name == "squad2")


def _read(path: Path) -> Split:
    questions: list[str] = []
    contexts: list[str] = []
    labels: list[dict[str, list[Any]]] = []
    ids: list[str] = []
    try:
        for article in json.loads(read_text(path))["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    answers = [] if asked.get("is_impossible") else asked["answers"]
                    questions.append(asked["question"])
                    contexts.append(paragraph["context"])
                    ids.append(asked["id"])
                    texts = [answer["text"] for answer in answers]
                    labels.append({"text": texts, "answer_start": [answer["answer_start"] for answer in answers]})
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}); the file may be cut off") from None
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a SQuAD file: {error} is missing; it holds data, paragraphs, qas, answers"
        ) from None
    check_answers(contexts, labels, str(path))
    return Split(questions, contexts, labels, ids)


def check_answers(contexts: list[str], labels: list[dict[str, list[Any]]], where: str) -> None:
    """Raise an error for the first answer that is not in its context where it says it is."""
    for row, (context, answers) in enumerate(zip(contexts, labels, strict=True), 1):
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            if context[start : start + len(text)] != text:
                raise UserError(f"{where}, row {row}: the answer '{text}' is not in its context at character {start}")
