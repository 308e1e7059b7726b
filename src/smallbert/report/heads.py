"""What was found about attention heads: tables for the terminal and for Markdown, and one picture.

All take {"importance": head_importance(…) or None, "attention": attention_summaries(…) or None, "missing": {…}}, where
`missing` may say why there is no importance.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.report.figure import COLOURS, font_name, new_figure, to_png
from smallbert.report.table import NONE, three_digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

SMALL, LEFT, TOP, BOTTOM = 1.75, 0.35, 0.5, 0.5  # inches: the side of a small map, and room around all of them
BETWEEN = 0.68, 0.6  # inches between maps, across and down
SOME = 10  # so many of the most and of the least important heads are named
TITLES = {  # in the picture, and over a column
    "to_sep": ("to [SEP]", "[SEP]"),
    "to_cls": ("to [CLS]", "[CLS]"),
    "to_itself": ("to itself", "itself"),
    "to_previous": ("to the token before", "before"),
    "to_next": ("to the token after", "after"),
    "distance": ("tokens away", "away"),
    "entropy": ("entropy, nats", "entropy"),
    "entropy_share": ("entropy, share of uniform", "of uniform"),
}
READING = (
    "[SEP], [CLS], itself, before and after (the tokens next to it) are shares of attention; away is the mean distance "
    "in tokens; entropy is in nats, and of uniform is its share of that of uniform attention to the whole text."
)


def rank(importance: dict[str, Any]) -> list[tuple[int, int]]:
    """All heads as (layer, head), both from 0, the most important first.

    >>> rank({"importance": [[0.1, 0.3], [0.2, 0.0]]})
    [(0, 1), (1, 0), (0, 0), (1, 1)]
    """
    values = importance["importance"]
    places = [(layer, head) for layer, row in enumerate(values) for head in range(len(row))]
    return sorted(places, key=lambda place: (-values[place[0]][place[1]], place))


def head_rows(found: dict[str, Any], some: int = SOME) -> list[dict[str, str]]:
    """The most and the least important heads, a row each, with what they attend to."""
    importance, attention = found["importance"], found["attention"]
    if importance is None:
        return []
    shown, digits = list(enumerate(rank(importance), 1)), _digits(importance)
    rows = []
    for place, (layer, head) in shown if len(shown) <= 2 * some else shown[:some] + shown[-some:]:
        value, error, ablated = importance["importance"][layer][head], importance["error"], importance["ablated"]
        row = {"rank": str(place), "layer": str(layer + 1), "head": str(head + 1)}
        row["importance"] = f"{value:.{digits}f}" + (f" ± {error[layer][head]:.{digits}f}" if error else "")
        row["in its layer"] = f"{importance['normalised'][layer][head]:.2f}"
        if ablated:
            row[f"{ablated['metric']} without"] = f"{ablated['without'][layer][head]:.1f}"
        rows.append(row | {TITLES[name][1]: f"{attention[name][layer][head]:.2f}" for name in _shown(attention)})
    return rows


def layer_rows(found: dict[str, Any]) -> list[dict[str, str]]:
    """Each layer's heads taken together, a row a layer, and what even attention would give."""
    attention, importance = found["attention"], found["importance"]
    rows = []
    for layer in range((attention or importance)["layers"]):
        row = {"layer": str(layer + 1)}
        if importance is not None:
            row["importance"] = f"{_mean(importance['importance'][layer]):.{_digits(importance)}f}"
        rows.append(row | {TITLES[name][1]: f"{_mean(attention[name][layer]):.2f}" for name in _shown(attention)})
    if attention:
        even = {TITLES[name][1]: f"{attention['even'][name]:.2f}" for name in _shown(attention)}
        rows.append({"layer": "even", **({"importance": NONE} if importance else {}), **even})
    return rows


def head_table(found: dict[str, Any]) -> "Table | None":
    """The most and the least important heads for a terminal; none where no importance was measured."""
    rows = head_rows(found)
    few = len(rows) < 2 * SOME
    title = "all heads by importance" if few else f"the {SOME} most and the {SOME} least important heads"
    return _rich(rows, title) if rows else None


def layer_table(found: dict[str, Any]) -> "Table":
    """What each layer's heads attend to, for a terminal."""
    return _rich(layer_rows(found), "means over the heads of a layer")


def markdown(found: dict[str, Any]) -> str:
    """Both tables as Markdown, with what must be known to read them."""
    importance, attention = found["importance"], found["attention"]
    lines = []
    if importance:
        lines.append(
            f"Head importance on {importance['task']} ({importance['split']}, {importance['examples']:,} examples): "
            "the mean over examples of |d loss / d gate|, ± its standard error. Layers and heads count from 1."
        )
        ablated = importance["ablated"]
        if ablated:
            lines[-1] += f" With all heads {ablated['metric']} is {ablated['score']:.1f} ± {ablated['stderr']:.1f}."
        lines.append(_markdown_table(head_rows(found)))
    else:
        lines.append(f"Head importance was not measured: {found['missing'].get('importance', 'not asked for')}.")
    if attention:
        where = f"{attention['task']} ({attention['split']})" if attention["task"] else "texts"
        lines.append(
            f"Attention on {where}, {attention['examples']:,} examples, {attention['tokens']:,} tokens; the mean over "
            f"tokens that attend and over a layer's heads. {READING}"
        )
        lines.append(_markdown_table(layer_rows(found)))
        lines += [f"- {TITLES[name][0]}: none, {why}" for name, why in attention["missing"].items()]
    notes = dict.fromkeys(note for part in (importance, attention) if part for note in part["notes"])
    return "\n\n".join([*lines, *(f"- {note}" for note in notes)]) + "\n"


def draw(found: dict[str, Any], path: Path | str) -> None:
    """Draw heat maps of layers and heads into a PNG: importance on the left, what heads attend to on the right."""
    to_png(figure_of(found), path)


def figure_of(found: dict[str, Any]) -> "Figure":
    """The picture: one large map for importance, small ones for attention, each on a scale of its own from 0."""
    importance, attention = found["importance"], found["attention"]
    panels = [(TITLES[name][0], attention[name], attention["even"][name]) for name in _shown(attention)]
    across, down = -(-len(panels) // 2), min(2, len(panels))
    large = 2 * SMALL + BETWEEN[1] if importance or down == 2 else SMALL
    start = LEFT + (large + BETWEEN[0] if importance else 0)
    wide, high = start + across * (SMALL + BETWEEN[0]), TOP + large + BOTTOM
    figure = new_figure((wide, high))

    def axes_at(left: float, top: float, width: float, height: float) -> "Axes":
        return figure.add_axes((left / wide, (high - top - height) / high, width / wide, height / high))

    def panel(values: list[list[float]], left: float, top: float, size: float, title: str, about: str) -> "Axes":
        axes = axes_at(left, top, size, size)
        _heat(axes, axes_at(left + size + 0.06, top, 0.06, size), values, title, about)
        return axes

    if importance:
        about = f"{importance['task']}, {importance['examples']:,} examples; mean of |d loss / d gate|"
        panel(importance["importance"], LEFT, TOP, large, "importance of each head", about)
    for number, (title, values, even) in enumerate(panels):
        row, column = divmod(number, across)
        left, top = start + column * (SMALL + BETWEEN[0]), TOP + row * (SMALL + BETWEEN[1])
        axes = panel(values, left, top, SMALL, title, f"even: {even:.2g}")
        if column:
            axes.set_yticklabels([])
        if row + 1 < down:
            axes.set_xticklabels([])
    look: dict[str, Any] = {"fontsize": 8.5, "color": COLOURS["muted"], "fontfamily": font_name()}
    told = "across: heads; up: layers, the last at the top; both count from 1"
    told += "; each map has its own scale; uniform: the same attention to every token of the text" if panels else ""
    figure.text(LEFT / wide, 0.1 / high, told, **look)
    return figure


def _heat(axes: "Axes", bar: "Axes", values: list[list[float]], title: str, about: str) -> None:
    """One map, and beside it the scale of its colours, from 0 to the largest value."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("heat", [COLOURS["rule"], COLOURS["accent"], COLOURS["ink"]])
    most = max(max(row) for row in values)
    drawn = axes.pcolormesh(values, cmap=shades, vmin=0, vmax=most or 1, edgecolors=COLOURS["paper"], linewidth=0.6)
    for axis, count in ((axes.xaxis, len(values[0])), (axes.yaxis, len(values))):
        step = -(-count // 12)
        axis.set_ticks([number + 0.5 for number in range(0, count, step)], [str(n + 1) for n in range(0, count, step)])
    axes.tick_params(colors=COLOURS["muted"], labelsize=6.5, length=0, pad=2, labelfontfamily=font_name())
    axes.figure.colorbar(drawn, cax=bar, ticks=[0, most]).outline.set_visible(False)
    bar.set_yticklabels(["0", three_digits(most)])
    bar.tick_params(colors=COLOURS["muted"], labelsize=7, length=0, pad=2, labelfontfamily=font_name())
    for spine in axes.spines.values():
        spine.set_visible(False)
    spot: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontfamily": font_name()}
    axes.annotate(title, (0, 1), (0, 15), fontsize=9.5, color=COLOURS["ink"], **spot)
    axes.annotate(about, (0, 1), (0, 5), fontsize=7.5, color=COLOURS["muted"], **spot)


def _shown(attention: dict[str, Any] | None) -> list[str]:
    return [name for name in TITLES if attention and attention[name] is not None]


def _digits(importance: dict[str, Any]) -> int:
    """So many decimals that the largest importance has three digits: 0.0525, and 0.0011 beneath it."""
    most = max(max(row) for row in importance["importance"])
    return max(0, 2 - math.floor(math.log10(most))) if most > 0 else 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _markdown_table(rows: Sequence[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---:"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rich(rows: Sequence[dict[str, str]], title: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in rows[0]:
        table.add_column(heading, justify="right", no_wrap=heading == "importance")
    before = 0
    for row in rows:
        rank = int(row.get("rank", 0))
        if rank > before + 1 > 1:
            table.add_section()
        table.add_row(*row.values())
        before = rank
    return table
