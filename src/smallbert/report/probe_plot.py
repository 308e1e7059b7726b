"""The picture of a probe: tasks down, layers across, the darker the more a layer knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smallbert.report.figure import COLOURS, PNG_DPI, font_name, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL, HIGH = 0.46, 0.36  # inches
LEFT, RIGHT, TITLE, FOOT = 1.15, 0.75, 0.62, 0.42
MARGIN = 0.12
WIDEST = 13.0  # of the cells
TICKS, PAD = 9, 5  # points: names of tasks and layers, and how far they stand from the cells
LONGEST = 60  # letters of a model's name
PALE = 0.55  # of the way to full colour; above this numbers are written light on dark


def draw(result: dict[str, Any]) -> Figure:
    """Draw the frozen scores of every layer, and below them the shares of the mixture, where they were computed."""
    depth = result["layers"] + 1
    cell = min(CELL, (WIDEST - LEFT - RIGHT) / depth)
    cells = LEFT + RIGHT + cell * depth
    # Names of tasks may take more room than is left for them, and of a model with few layers the words above the cells
    # are wider than these; how wide they are is known once drawn.
    first, last = _ends(_draw(result, cell, LEFT, cells))
    more = max(0.0, MARGIN - first)
    return _draw(result, cell, LEFT + more, more + max(cells, last + MARGIN))


def _draw(result: dict[str, Any], cell: float, left: float, wide: float) -> Figure:
    panels = [panel for part, panel in (("layers", _scores), ("mixture", _shares)) if part in result["parts"]]
    tasks, depth = result["tasks"], result["layers"] + 1
    each = TITLE + HIGH * len(tasks) + FOOT
    tall = each * len(panels) + 0.45
    figure = new_figure((wide, tall))
    title = f"What the layers of {_short(result['model'], LONGEST)} know"
    _write(figure.text, MARGIN / wide, 1 - 0.3 / tall, title, 12.5, weight="bold")
    for place, panel in enumerate(panels):
        bottom = tall - 0.45 - place * each - TITLE - HIGH * len(tasks)
        axes = figure.add_axes((left / wide, bottom / tall, cell * depth / wide, HIGH * len(tasks) / tall))
        panel(axes, result, cell)
    return figure


def _ends(figure: Figure) -> tuple[float, float]:
    """Where words begin and end, in inches from the left edge."""
    figure.set_dpi(PNG_DPI)  # letters are a little wider or narrower at another
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels()))]
    boxes = [text.get_window_extent() for text in texts]
    return min(box.x0 for box in boxes) / PNG_DPI, max(box.x1 for box in boxes) / PNG_DPI


def _scores(axes: Axes, result: dict[str, Any], cell: float) -> None:
    rows = [[layer["score"]["value"] for layer in entry["layers"]["layers"]] for entry in result["tasks"]]
    values = np.array(rows)
    low = np.array([[entry["chance"]] for entry in result["tasks"]])
    high = values.max(1, keepdims=True)
    known = ((values - low) / np.where(high > low, high - low, 1)).clip(0, 1)
    # Squared, since layers differ most near the top; chance stays pale and the best full.
    _grid(axes, result, known**2, [[f"{value:.0f}" for value in row] for row in rows], "accent", cell)
    for row, entry in enumerate(result["tasks"]):
        _box(axes, entry["layers"]["best"], row)
        _write(axes.text, values.shape[1] - 0.35, row, f"{entry['chance']:.0f}", 8.5, "muted", va="center")
    _name_column(axes, "chance")
    how = "first token" if result["pool"] == "first" else "mean over tokens"
    _heading(axes, "Score of a linear probe on each layer", f"frozen, {how}; pale is chance, full the best of the row")


def _shares(axes: Axes, result: dict[str, Any], cell: float) -> None:
    found = [entry["mixture"]["plain"] for entry in result["tasks"]]
    shares = 100 * np.array([each["shares"] for each in found])
    written = [[f"{share:.0f}" for share in row] for row in shares]
    _grid(axes, result, shares / shares.max(), written, "ink", cell)
    for row, each in enumerate(found):
        centre, sure = each["gravity"]["mean"], each["says"] is None
        axes.plot(
            centre,
            row + 0.36,
            marker="^",
            markersize=6,
            color=COLOURS["accent"] if sure else COLOURS["paper"],
            markeredgecolor=COLOURS["accent"],
            markeredgewidth=0.8,
            clip_on=False,
            zorder=5,
        )
        _write(axes.text, shares.shape[1] - 0.35, row, f"{each['bits']['mean']:.2f}", 8.5, "muted", va="center")
    _name_column(axes, "K bits")
    hollow = "; hollow where shares are uniform or on one layer" if any(each["says"] for each in found) else ""
    _heading(axes, "Share of each layer in a learned mixture, percent", f"triangle: centre of gravity{hollow}")


def _grid(
    axes: Axes, result: dict[str, Any], shade: np.ndarray, cells: list[list[str]], role: str, wide: float
) -> None:
    """Coloured cells with numbers in them, tasks on the left, layer numbers below."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("probe", [COLOURS["paper"], COLOURS[role]])
    axes.pcolormesh(
        np.arange(shade.shape[1] + 1) - 0.5,
        np.arange(shade.shape[0] + 1) - 0.5,
        0.04 + 0.9 * shade,
        cmap=colours,
        vmin=0,
        vmax=1,
        edgecolors=COLOURS["paper"],
        linewidth=1.5,
    )
    axes.set_xlim(-0.5, shade.shape[1] - 0.5)
    axes.set_ylim(shade.shape[0] - 0.5, -0.5)
    size = 9.0 if wide > 0.4 else 7.5
    for row, texts in enumerate(cells):
        for place, text in enumerate(texts):
            colour = "paper" if shade[row, place] > PALE else "ink"
            _write(axes.text, place, row, text, size, colour, ha="center", va="center")
    axes.set_xticks(range(shade.shape[1]), ["emb", *map(str, range(1, shade.shape[1]))])
    axes.set_yticks(range(shade.shape[0]), [_short(entry["task"]) for entry in result["tasks"]])
    axes.tick_params(length=0, pad=PAD, labelsize=TICKS, colors=COLOURS["ink"], labelfontfamily=font_name())
    axes.tick_params(axis="x", colors=COLOURS["muted"])
    for side in axes.spines.values():
        side.set_visible(False)


def _box(axes: Axes, place: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((place - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor=COLOURS["ink"], linewidth=1.6, zorder=4)
    )


def _heading(axes: Axes, title: str, below: str) -> None:
    inch = 1 / HIGH
    _write(axes.text, -0.5, -0.5 - 0.34 * inch, title, 10, "ink", weight="bold")
    _write(axes.text, -0.5, -0.5 - 0.12 * inch, below, 8.5, "muted")


def _name_column(axes: Axes, name: str) -> None:
    """Say below the numbers at the right what they are, in line with the numbers of the layers."""
    (_, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    _write(axes.text, right + 0.15, bottom + PAD / 72 / HIGH, name, TICKS, "muted", va="top")


def _short(name: str, most: int = 14) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _write(text: Any, x: float, y: float, words: str, size: float, role: str = "ink", **look: Any) -> None:
    text(x, y, words, fontsize=size, color=COLOURS[role], fontfamily=font_name(), parse_math=False, **look)
