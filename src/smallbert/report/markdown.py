"""The overview of a results folder as one Markdown page: a table a topic, and the command behind every row."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from smallbert.errors import UserError
from smallbert.machine.files import write_text
from smallbert.measuring.card import Card, number
from smallbert.measuring.groups import group_cards, short_names, status_of
from smallbert.measuring.shelf import load_cards

OPENING = """# Results

One folder per topic: one card (JSON) per model, one record per benchmark, or a study with a page of its own. This page
is made from them by `smallbert report results --markdown`; nothing in it is typed by hand. Scores are 0 to 100, on dev
unless a command has `--split`; after ± is the standard deviation over seeds, or the standard error of a single run.
Every file holds the command that makes it again; where one has no `--data`, SMALLBERT_DATA says where the files are.
"""


def write_overview(folder: Path | str) -> Path:
    """Write README.md into a results folder, from the cards and benchmark records in its topics."""
    path = Path(folder) / "README.md"
    write_text(path, render_overview(folder))
    return path


def render_overview(folder: Path | str) -> str:
    """The text of that page."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no results folder {str(folder)!r}")
    parts = [OPENING]
    for topic in sorted(path for path in folder.iterdir() if path.is_dir()):
        studies = sorted(path.parent for path in topic.rglob("study.json"))
        cards = [card for card in load_cards(topic) if not studies]
        records = _records(topic)
        probes = sorted(path.parent for path in topic.rglob("probe.json"))
        errors = sorted(path.parent for path in topic.rglob("errors.json"))
        if cards or records or studies or probes or errors:
            parts.append(f"## {topic.name.replace('_', ' ')}\n")
        parts += [_study(study, folder) for study in studies] + [_probe(probe, folder) for probe in probes]
        parts += [_errors(pair, folder) for pair in errors]
        if cards:
            parts.append(
                _table([row for task in sorted({card["task"] for card in cards}) for row in _rows(cards, task)])
            )
            parts.append(_commands(dict.fromkeys(card["command"] for card in cards if card["command"])))
            parts.append(_fine_print(cards))
        for record in records:
            alone = {key: value for key, value in record.items() if key not in ("benchmark", "command", "note")}
            rows = record.get("rows", [alone])  # a record of one measurement is its own row
            flat = [{key: str(value) for key, value in row.items() if type(value) is not dict} for row in rows]
            parts.append(_table(flat))
            parts.append(_commands([record["command"]]))
            parts.append(f"On {_machine(record)}.\n")
    if len(parts) == 1:
        raise UserError(f"{folder} holds no cards and no benchmark records")
    return "\n".join(part for part in parts if part)


def _study(study: Path, folder: Path) -> str:
    """What a study found, and where its tables and pictures are."""
    found = json.loads((study / "study.json").read_text(encoding="utf-8"))
    where = (study / "study.md").relative_to(folder).as_posix()
    return f"[{where}]({where}), {len(found['runs'])} runs. {' '.join(found['sentences'])}\n\n" + _commands(
        [found["command"]]
    )


def _probe(probe: Path, folder: Path) -> str:
    found = json.loads((probe / "probe.json").read_text(encoding="utf-8"))
    where, tasks = (probe / "probe.md").relative_to(folder).as_posix(), ", ".join(t["task"] for t in found["tasks"])
    return f"[{where}]({where}): what the layers of {found['model']} know, on {tasks}.\n\n" + _commands(
        [found["command"]]
    )


def _errors(pair: Path, folder: Path) -> str:
    found = json.loads((pair / "errors.json").read_text(encoding="utf-8"))
    where, names = (pair / "errors.md").relative_to(folder).as_posix(), [model["name"] for model in found["models"]]
    told = f"A is {names[0]}, B is {names[1]}, on {found['task']}. {found['test']['sentence']}"
    return f"[{where}]({where}): {told}.\n\n" + _commands([found["command"]])


def _records(topic: Path) -> list[dict[str, Any]]:
    read = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(topic.glob("*.json")))
    return [record for record in read if "benchmark" in record]


def _rows(cards: Sequence[Card], task: str) -> list[dict[str, str]]:
    """One row a model of a task, with every metric; the first is the one that ranks."""
    own = [card for card in cards if card["task"] == task]
    groups = group_cards(own)
    rows = []
    for name, group in zip(short_names(groups), groups, strict=True):
        members = [
            c for c in own if c["status"] == "ok" and c["recipe"] == group["recipe"] and c["model"] == group["model"]
        ]
        metrics = (group["scores"] or {}) if members else {}  # runs that learned nothing have no mean
        scores = [f"{metric} {_spread([c['scores'][metric] for c in members])}" for metric in metrics]
        size, time = number(group, "size"), number(group, "latency")
        row = {"task": task, "model": group["model"], "recipe": name, "scores": ", ".join(scores) or "-"}
        row |= {"seeds": ", ".join(map(str, group["runs"]["seeds"])), "runs": status_of(group)}
        rows.append(row | {"MB": _whole(size, 1e6), "ms, one CPU thread": _whole(time, 1)})
    return rows


def _whole(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _spread(scores: list[dict[str, float]]) -> str:
    values = [score["value"] for score in scores]
    error = stdev(values) if len(values) > 1 else scores[0]["stderr"]
    return f"{fmean(values):.1f} ± {error:.1f}"


def _table(rows: Sequence[dict[str, str]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))  # a control may lack what it does not have
    lines = [keys, ["---"] * len(keys), *[[row.get(key, "") for key in keys] for row in rows]]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _commands(commands: Any) -> str:
    return "```bash\n" + "".join(f"{command}\n" for command in commands) + "```\n"


def _fine_print(cards: Sequence[Card]) -> str:
    """What must be known to compare these scores with others, each said once."""
    notes = dict.fromkeys(f"{card['task']}: {card['task_note']}" for card in cards if card["task_note"])
    trained = dict.fromkeys(
        note for card in cards for note in (card["trained"] or {}).get("notes", []) if note.startswith("packed")
    )
    whys = dict.fromkeys(f"{card['task']}, seed {card['seed']}: {card['why']}" for card in cards if card["why"])
    machines = dict.fromkeys(_machine(card) for card in cards)
    lines = [*notes, *trained, *whys, *(f"On {machine}." for machine in machines)]
    return "".join(f"- {line}\n" for line in lines)


def _machine(card: dict[str, Any]) -> str:
    machine, versions = card["machine"], card["versions"]
    device = machine.get("gpu") or machine.get("cpu") or "an unnamed machine"
    return f"{device}, torch {versions.get('torch')}, transformers {versions.get('transformers')}"
