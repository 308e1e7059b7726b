"""Two models side by side: sentences and tables for the terminal, Markdown and the page, and the files of it all."""

import html
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smallbert.errors import UserError
from smallbert.machine.files import write_json, write_text
from smallbert.measuring.findings import p_value
from smallbert.report.errors_sheets import HALVES, SIDES, WIDE, Facts, sheets
from smallbert.report.figure import to_png
from smallbert.report.sheets import NONE

SHORT = 280  # characters of a text in a list of examples
CAUTION = (
    "This compares two trained models, not two ways of making them: another training seed may reverse the result; "
    "`smallbert study` runs several."
)


def sentences(found: Facts) -> list[str]:
    """What was found, in words, the test first."""
    said, overlap = [f"{found['test']['sentence']} ({found['test']['name']})."], found["overlap"]
    one, other = _positives(found)
    unit = "words" if found["kind"] == "tag" else "examples"
    if one and other:
        share = f"{one['share_said']:.1f} % of the {unit}, B for {other['share_said']:.1f} %"
        said.append(f"A predicts {one['label']} for {share}; {one['share_true']:.1f} % really are.")
    if "both" in overlap:
        either = 100 * (1 - overlap["neither"] / found["examples"])
        told = f"Both are right on {overlap['both_right']:.1f} %, at least one on {either:.1f} %"
        said.append(f"{told}; they agree on {overlap['agree']:.1f} % of the {unit}.")
    else:
        told = f"A is nearer on {overlap['a_nearer']:,} examples, B on {overlap['b_nearer']:,}"
        said.append(told + (f", {overlap['equal']:,} are equal." if overlap["equal"] else "."))
    lengths = [model["lengths"]["tokens"] for model in found["models"]]
    unlike = [(side, facts) for side, facts in zip(SIDES, lengths, strict=True) if _is_unlike(facts["p"])]
    right, wrong = HALVES.get(found["kind"], ("right", "wrong"))
    for side, facts in unlike:
        longer = "longer" if facts["wrong"] > facts["right"] else "shorter"
        told = f"{facts['wrong']:.1f} tokens against {facts['right']:.1f} of the {right} ones"
        said.append(f"{side}'s {wrong} examples are {longer}: {told} (Welch's t test, {_p(facts['p'])}).")
    if not unlike:
        said.append(
            f"Neither model's {right} and {wrong} examples differ in their number of tokens by more than chance."
        )
    return said


def example_lines(found: Facts, short: int | None = SHORT) -> list[tuple[str, list[str]]]:
    """Each example on which the two differ most: what is true and what both say, and its texts, cut if `short`."""
    made = []
    for one in found["most_different"]:
        sides = ", ".join(f"{side} predicts {_said(one[side.lower()], found['kind'])}" for side in SIDES)
        texts = [" ".join(text) if isinstance(text, list) else " ".join(text.split()) for text in _texts(one)]
        cut = [text if short is None or len(text) <= short else f"{text[: short - 1].rstrip()}…" for text in texts]
        made.append((f"{one['id']}: {_shown(one['true'])} is true; {sides}", cut))
    return made


def legend(found: Facts) -> list[str]:
    """Which model is A and which is B."""
    return [
        f"{side}: {model['name']}" + (f", {model['recipe']}" if model.get("recipe") else "")
        for side, model in zip(SIDES, found["models"], strict=True)
    ]


def render(found: Facts) -> list[Any]:
    """Everything for a terminal."""
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.text import Text

    from smallbert.report.sheets import render_sheet

    facts, *others = sheets(found)
    shown: list[Any] = [*legend(found), "", render_sheet(facts)]
    narrow = [sheet for sheet in others if len(sheet.columns) <= WIDE + 1]  # a wide one would push these apart
    shown += [render_sheet(sheet) for sheet in others if sheet not in narrow]
    shown.append(Columns([render_sheet(sheet) for sheet in narrow], padding=(0, 4)))
    shown += [*sentences(found), *(f"Note: {note}." for note in found["notes"]), CAUTION]
    examples = example_lines(found)
    if examples:
        shown += ["", f"Where they differ most, in brackets {_measure(found)}:"]
    for number, (told, texts) in enumerate(examples, 1):
        shown.append(Text(f"{number}  {told}", style="bold"))
        shown += [Padding(Text(text), (0, 0, 0, 3)) for text in texts]
    return shown


def to_markdown(found: Facts, drawn: bool = True) -> str:
    """Everything as one page."""
    parts = [f"# {found['models'][0]['name']} and {found['models'][1]['name']} on {found['task']}"]
    parts += ["\n".join(f"- {_escape(line)}" for line in legend(found)), *map(_escape, sentences(found)), CAUTION]
    parts += ["![Every example under both models](errors.png)"] if drawn else []
    for sheet in sheets(found):
        lines = [sheet.columns, ["---", *["---:"] * (len(sheet.columns) - 1)], *sheet.rows]
        table = "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)
        parts += [f"## {sheet.title}", table, *(["; ".join(sheet.notes)] if sheet.notes else [])]
    examples = example_lines(found, 4 * SHORT)
    if examples:
        parts += ["## Where they differ most", f"In brackets {_measure(found)}."]
    for number, (told, texts) in enumerate(examples, 1):
        parts.append("\n".join([f"{number}. {_escape(told)}", *(f"   > {_escape(text)}\n" for text in texts)]).rstrip())
    notes = [*found["notes"], *([found["note"]] if found["note"] else [])]
    parts += ["\n".join(f"- {_escape(note)}" for note in notes)] if notes else []
    parts += [f"```bash\n{found['command']}\n```"] if found.get("command") else []
    return "\n\n".join(parts) + "\n"


def write_errors(found: Facts, out: Path | str) -> list[Path]:
    """Write errors.json, errors.md and, where matplotlib is there, errors.png; give their paths."""
    from smallbert.report.errors_plot import draw

    out, drawn = Path(out), find_spec("matplotlib") is not None
    write_json(out / "errors.json", found)
    write_text(out / "errors.md", to_markdown(found, drawn))
    if drawn:
        to_png(draw(found), out / "errors.png")
    return [out / f"errors.{kind}" for kind in ("json", "md", *(["png"] if drawn else []))]


def load_errors(folder: Path | str) -> list[Facts]:
    """What was found about every two models below a folder, sorted by the names of the files."""
    found = []
    for path in sorted(Path(folder).rglob("errors.json")):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} cannot be read: {error}; make it again or move it away") from error
        if isinstance(read, dict) and read.get("errors") == 1:  # else it is somebody else's file
            found.append(read)
    return found


def page_section(found: Facts, prefix: str) -> Facts:
    """What the page shows of two models; names in its picture start with `prefix`."""
    from smallbert.report.errors_plot import draw
    from smallbert.report.plot import to_svg

    names = " and ".join(model["name"] for model in found["models"])
    first, *more = sentences(found)
    return {
        "id": prefix,
        "title": f"{names} on {found['task']}",
        "legend": legend(found),
        "answer": first,
        "sentences": [*more, *(f"Note: {note}." for note in found["notes"]), CAUTION.replace("`", "")],
        "picture": to_svg(draw(found), [], prefix, f"every example of {found['task']} under {names}"),
        "sheets": sheets(found),
        "examples": example_lines(found),
        "measure": _measure(found),
        "caption": f"Every example is a dot, placed by {_measure(found)}; the diagonal is where both do equally well, "
        "and overlapping dots are merged into a larger one.",
        "command": found["command"],
    }


def _positives(found: Facts) -> tuple[Facts | None, Facts | None]:
    if found["positive"] is None:
        return None, None
    place = found["labels"].index(found["positive"])
    one, other = (model["classes"][place] for model in found["models"])
    return one, other


def _measure(found: Facts) -> str:
    return {
        "classify": "the probability of the true class",
        "regress": "the distance from the truth",
        "tag": "the share of words tagged right",
        "answer": "F1 with the nearest true answer",
    }[found["kind"]]


def _said(side: Facts, kind: str) -> str:
    """What a model said, and how good it was: "equivalent (0.03)"."""
    told = {"classify": f"{side['good']:.2f}", "regress": f"off by {-side['good']:.2f}"}
    told |= {"tag": f"{100 * side['good']:.0f} % right", "answer": f"F1 {100 * side['good']:.0f}"}
    return f"{_shown(side['said'])} ({told[kind]})"


def _shown(label: Any) -> str:
    if isinstance(label, list):
        return " / ".join(NONE if each is None else str(each) for each in label) or "no answer"
    return f"{label:.2f}" if isinstance(label, float) else str(label) or "no answer"


def _texts(example: Facts) -> list[Any]:
    return [text for text in (example["text"], example["pair"]) if text]


def _is_unlike(p: float | None) -> bool:
    return p is not None and p < 0.05


def _p(p: float) -> str:
    return f"p {'' if p < 0.0001 else '= '}{p_value(p)}"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
