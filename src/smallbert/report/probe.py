"""What probing found: a table, a page, and a picture of layers against tasks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smallbert.machine.files import write_json, write_text
from smallbert.probing.features import file_name
from smallbert.report.figure import to_png

if TYPE_CHECKING:
    from rich.table import Table

NONE = "-"
Entry = dict[str, Any]

SHORT = 5.0  # points below the best layer at which a mixture was not trained well enough to be read


class Column(NamedTuple):
    """One column: its heading, the part it needs, what it means, and how to read it out of a task's entry."""

    heading: str
    part: str
    about: str
    read: Callable[[Entry], str]


def _best(entry: Entry) -> Entry:
    return dict(entry["layers"]["layers"][entry["layers"]["best"]])


def _pm(value: float, error: float | None) -> str:
    return f"{value:.1f}" if error is None else f"{value:.1f} ± {error:.1f}"


def _score(score: Entry) -> str:
    return _pm(score["value"], score["stderr"])


def _spread(found: Entry) -> str:
    return _pm(found["mean"], found["sd"])


def _expected(entry: Entry) -> str:
    value = entry["mixture"]["cumulative"]["expected_layer"]
    return NONE if value is None else f"{value:.1f}"


COLUMNS = (
    Column(
        "chance",
        "",
        "The score of always predicting train's most frequent label.",
        lambda e: f"{e['chance']:.1f}" if "chance" in e else NONE,
    ),
    Column(
        "best layer",
        "layers",
        "The layer whose linear probe scores highest; 0 is the embedding output. It is chosen on the rows that score "
        "it, so any layer within its error bar may be the best.",
        lambda e: str(e["layers"]["best"]),
    ),
    Column(
        "its score", "layers", "The score of that layer, ± its standard error.", lambda e: _score(_best(e)["score"])
    ),
    Column(
        "last layer",
        "layers",
        "The score of the last layer's probe.",
        lambda e: _score(e["layers"]["layers"][-1]["score"]),
    ),
    Column(
        "selectivity",
        "layers",
        "The best layer's score minus that of the same probe on a control task, where each distinct text has one "
        "random label. On unseen texts no probe can predict these, so where texts do not repeat, this is about the "
        "score minus chance.",
        lambda e: _score(_best(e)["selectivity"]),
    ),
    Column(
        "mixture",
        "mixture",
        "The score of a linear probe on a learned mixture of all layers, ± the standard deviation over seeds.",
        lambda e: _spread(e["mixture"]["score"]),
    ),
    Column(
        "centre",
        "mixture",
        "The centre of gravity of the mixture's shares: the mean layer number. In brackets where it "
        "means nothing: K near 0, or all on one layer.",
        lambda e: _centre(e["mixture"]["plain"]),
    ),
    Column(
        "K bits",
        "mixture",
        "How far the shares are from uniform, KL(shares || uniform) in bits. It grows with the regularisation of the "
        "classifier (`strength` in probe.json), so compare it between tasks with care.",
        lambda e: f"{e['mixture']['plain']['bits']['mean']:.2f}",
    ),
    Column(
        "centre, by norm",
        "mixture",
        "The same centre after each share is multiplied by the mean length of its layer's vectors.",
        lambda e: _centre(e["mixture"]["corrected"]),
    ),
    Column(
        "expected layer",
        "mixture",
        "Where mixtures over layers 0 to l gain: the sum of l times the gain of l over the sum of all gains. None "
        "where the whole gain is within its noise.",
        _expected,
    ),
)


def _centre(found: Entry) -> str:
    text = _spread(found["gravity"])
    return f"({text})" if found["says"] else text


def shown_columns(result: Entry) -> list[Column]:
    """The columns of the parts that were done."""
    return [column for column in COLUMNS if not column.part or column.part in result["parts"]]


def render_table(result: Entry) -> Table:
    """The table for a terminal: one row a task."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = shown_columns(result)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("task", overflow="fold")
    for column in columns:
        table.add_column(column.heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for entry in result["tasks"]:
        table.add_row(Text(entry["task"]), *(Text(column.read(entry)) for column in columns))
    return table


def warnings(result: Entry) -> list[str]:
    """What must be said beside the numbers, each once."""
    said = []
    for entry in result["tasks"]:
        name = entry["task"]
        if entry.get("repeated"):
            count, rows = entry["repeated"], entry["rows"]["score"]
            said.append(f"{name}: {count:,} of {rows:,} texts scored on {entry['scored_on']} are in train too")
        if "mixture" in entry:
            mixture = entry["mixture"]
            said += [f"{name}: {why}" for why in (mixture["plain"]["says"], mixture["cumulative"]["why"]) if why]
            best = max(layer["score"]["value"] for layer in entry["layers"]["layers"]) if "layers" in entry else 0.0
            if mixture["score"]["mean"] < best - SHORT:
                reached = f"{mixture['score']['mean']:.1f} against {best:.1f}"
                said.append(f"{name}: the mixture scores below the best layer ({reached}); conclude no depth from it")
            if mixture.get("edge"):
                said.append(f"{name}: the best strength tried, C = {mixture['strength']:g}, is at the end of its list")
        if "layers" in entry:
            late = [str(layer["layer"]) for layer in entry["layers"]["layers"] if not layer["converged"]]
            said += [f"{name}: the probe of layer {', '.join(late)} reached its limit of steps"] if late else []
        said += [f"{name}: {entry[part]['why']}" for part in ("heads", "attention") if entry.get(part, {}).get("why")]
    return list(dict.fromkeys(said))


def render_markdown(result: Entry, drawn: bool = True) -> str:
    """The page: what was asked, the table, every layer's score, what the columns mean."""
    columns = shown_columns(result)
    lines = [
        f"# Probing {result['model']}",
        "",
        f"{result['layers']} layers; one vector a text, pooled by {result['pool']}; the model is frozen. "
        f"Seeds {', '.join(map(str, result['seeds']))}.",
        "",
        *(["![Layers against tasks](probe.png)", ""] if drawn and {"layers", "mixture"} & set(result["parts"]) else []),
        *_table(
            ["task", *(column.heading for column in columns)],
            [[entry["task"], *(column.read(entry) for column in columns)] for entry in result["tasks"]],
        ),
        "",
        *(f"- **{column.heading}**: {column.about}" for column in columns),
    ]
    numbers = [str(layer) for layer in range(result["layers"] + 1)]
    wide: dict[str, tuple[str, Callable[[Entry], list[float]]]] = {
        "Score of each layer": ("layers", lambda e: [layer["score"]["value"] for layer in e["layers"]["layers"]]),
        "Score on the control task": (
            "layers",
            lambda e: [layer["control"]["value"] for layer in e["layers"]["layers"]],
        ),
        "Share of each layer in the mixture, percent": (
            "mixture",
            lambda e: [100 * share for share in e["mixture"]["plain"]["shares"]],
        ),
        "The same, corrected for the length of vectors": (
            "mixture",
            lambda e: [100 * share for share in e["mixture"]["corrected"]["shares"]],
        ),
        "Score of the mixture over layers 0 to l": ("mixture", lambda e: e["mixture"]["cumulative"]["scores"]),
    }
    for title, (part, read) in wide.items():
        if part in result["parts"]:
            cells = [[entry["task"], *(f"{value:.1f}" for value in read(entry))] for entry in result["tasks"]]
            lines += ["", f"## {title}", "", *_table(["task", *numbers], cells)]
    lines += ["", "## How", ""]
    for part in ("layers", "mixture"):
        used = dict.fromkeys(entry[part]["classifier"] for entry in result["tasks"] if part in entry)
        lines += [f"- {part}: {classifier}" for classifier in used]
    for entry in result["tasks"]:
        told = [entry["note"]] if entry["note"] else []
        if "rows" in entry:
            fit, choose, score = (f"{entry['rows'][role]:,}" for role in ("fit", "choose", "score"))
            told.insert(0, f"trained on {fit} rows, settings {entry['chosen']} ({choose})")
            told.insert(0, f"{entry['metric']} on {entry['scored_on']} ({score} rows)")
        lines.append(f"- {entry['task']}: {'; '.join(told)}")
    lines += [*(f"- {warning}" for warning in warnings(result)), "", "```bash", result["command"], "```", ""]
    return "\n".join(lines)


def _table(heading: list[str], rows: list[list[str]]) -> list[str]:
    every = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in every]


def head_findings(entry: Entry) -> Entry | None:
    """What was found about attention heads on one task, as report.heads reads it; None if nothing was."""
    found: Entry = {"missing": {}}
    for name, part in (("importance", "heads"), ("attention", "attention")):
        given = entry.get(part)
        found[name] = given if given and not given["why"] else None
        if given and given["why"]:
            found["missing"][name] = given["why"]
    return found if found["importance"] or found["attention"] else None


def write_probe(result: Entry, out: Path | str) -> list[Path]:
    """Write probe.json, probe.md and, where matplotlib is there, pictures; give the names of what was written."""
    from smallbert.report import heads
    from smallbert.report.probe_plot import draw

    out = Path(out)
    pictures: dict[str, Callable[[Path], None]] = {}
    if {"layers", "mixture"} & set(result["parts"]):
        pictures["probe.png"] = lambda path: to_png(draw(result), path)
    found = {entry["task"]: heads_found for entry in result["tasks"] if (heads_found := head_findings(entry))}
    for task, each in found.items():
        pictures[f"heads-{file_name(task)}.png"] = lambda path, each=each: heads.draw(each, path)  # type: ignore[misc]
    drawn = find_spec("matplotlib") is not None
    text = render_markdown(result, drawn)
    for task, each in found.items():
        picture = f"![Heads on {task}](heads-{file_name(task)}.png)\n\n" if drawn else ""
        text += f"\n## Attention heads: {task}\n\n{picture}{heads.markdown(each)}"
    write_json(out / "probe.json", result)
    write_text(out / "probe.md", text)
    for name, paint in pictures.items() if drawn else ():
        paint(out / name)
    return [out / name for name in ("probe.json", "probe.md", *(pictures if drawn else ()))]
