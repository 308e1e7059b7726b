"""What a benchmark found, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smallbert.onnxfile.exactness import INEXACT
from smallbert.report.figure import COLOURS, font_name, new_figure, strip_frame, to_png

WORDS = ("model", "runs in")
HEADINGS = (
    *(*WORDS, "MB", "score", "batch", "tokens", "threads"),
    *("p50 ms", "p95 ms", "p99 ms", "texts/s", "faster"),
)
SETTINGS = ("batch", "tokens", "threads")


def bench_table(record: dict[str, Any]) -> Any:
    """A line for every model at every setting; a setting that is the same everywhere stands below the table."""
    from rich import box
    from rich.table import Table

    rows = [_cells(row, record) for row in record["rows"]]
    alike = {name: rows[0][name] for name in SETTINGS if len({row[name] for row in rows}) == 1}
    hidden = {*alike, *(() if record["headline"] else ("score",))}
    looks: dict[str, Any] = {"pad_edge": False, "collapse_padding": True, "caption_justify": "left"}
    table = Table(box=box.SIMPLE_HEAD, caption=_caption(record, alike), **looks)
    for name in (name for name in HEADINGS if name not in hidden):
        heading = record["headline"] if name == "score" else name
        # A name is looked for in folders and commands, so it stays whole; what runs it may take several lines.
        table.add_column(heading, justify="left" if name in WORDS else "right", no_wrap=name != "runs in")
    for row in rows:
        table.add_row(*(row[name] for name in HEADINGS if name not in hidden))
    return table


def _cells(row: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """The text under each heading, of one model at one setting."""
    about = record["variants"][row["name"]]
    score = f"{about['scores'][record['headline']]['value']:.1f}" if record["headline"] else ""
    runs = about["runs"] + (f", {about['precision']}" if about.get("precision") else "")
    settings = [str(row[name]) for name in ("batch", "length", "threads")]
    times = [f"{row[f'p{share}_ms']:.2f}" for share in (50, 95, 99)]
    speeds = [f"{row['texts_per_second']:,.0f}", f"{row['faster']:.2f}x"]
    texts = [row["name"], runs, f"{about['bytes'] / 1e6:,.1f}", score, *settings, *times, *speeds]
    return dict(zip(HEADINGS, texts, strict=True))


def _caption(record: dict[str, Any], alike: dict[str, str]) -> str:
    """The settings of all lines, of how many calls the percentiles are, and which scores to mistrust."""
    few, many = (choose(row["repeats"] for row in record["rows"]) for choose in (min, max))
    # Of few calls, p99 is next to the slowest one.
    calls = f"Percentiles are of {few:,}{'' if few == many else f' to {many:,}'} timed calls per line."
    settings = ", ".join(_SETTING[name](value) for name, value in alike.items())
    lines = [f"All lines: {settings}."] * bool(alike) + [calls]
    return "\n".join([*lines, *[INEXACT] * any(not one["exact"] for one in record["variants"].values())])


_SETTING = {
    "batch": lambda value: f"batch {value}",
    "tokens": lambda value: f"{value} tokens",
    "threads": lambda value: f"{value} thread{'s' * (value != '1')}",
}


def draw_bench(record: dict[str, Any], path: Path | str) -> None:
    """Time of a batch, a bar a model, a panel a setting; the thin line reaches to the 95th percentile."""
    from matplotlib import rc_context

    with rc_context({"font.family": font_name()}):
        _draw(record, path)


def _draw(record: dict[str, Any], path: Path | str) -> None:
    names = list(record["variants"])
    settings = list(dict.fromkeys((row["batch"], row["length"], row["threads"]) for row in record["rows"]))
    chosen = (record["choice"] or {}).get("name")
    high = 0.26 * len(names) + 0.55
    figure = new_figure((7.2, high * len(settings) + 0.2))
    whole = high * len(settings) + 0.2
    for number, (batch, length, threads) in enumerate(settings):
        bottom = 1 - (number + 1) * high / whole + 0.12 / whole
        axes = figure.add_axes((0.24, bottom, 0.6, (high - 0.45) / whole))
        rows = {row["name"]: row for row in record["rows"] if _setting(row) == (batch, length, threads)}
        for place, name in enumerate(names):
            row, colour = rows[name], COLOURS["accent"] if name == chosen else COLOURS["ink"]
            axes.barh(place, row["p50_ms"], height=0.62, color=colour, alpha=0.9)
            axes.plot([row["p50_ms"], row["p95_ms"]], [place, place], color=COLOURS["muted"], linewidth=1.2)
            label = f"{row['p50_ms']:.3g} ms, {row['faster']:.3g}x"
            look: dict[str, Any] = {"va": "center", "fontsize": 8, "color": COLOURS["ink"], "annotation_clip": False}
            axes.annotate(label, (row["p95_ms"], place), (5, 0), textcoords="offset points", **look)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, max(row["p95_ms"] for row in rows.values()))
        axes.set_xticks([])
        title = f"batch {batch}, {length} tokens, {threads} thread{'s' * (threads > 1)}"
        strip_frame(axes, None, title if number else f"{title}: median time, line to p95, times faster")
    to_png(figure, path)


def _setting(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["batch"], row["length"], row["threads"]
