"""Pictures of what `watch` wrote down while a run trained: step by step and layer by layer."""

import math
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.measuring.card import Card
from smallbert.report.figure import COLOURS, new_figure, strip_frame, to_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Look = dict[str, Any]
SMALL = 1e-12
# What is drawn of each look: its name, a title, and whether numbers are shown by their size (powers of ten).
PANELS = (
    ("spread", "spread over texts of a hidden state's first token, as a share of its size", True),
    ("gradients", "gradient of the loss for it", True),
    ("mixture", "its share in the mixture", False),
)


def draw_watch(looks: Sequence[Look], title: str) -> "Figure":
    """Accuracy, or else loss, and density over the steps; below them hidden states by steps, the last state on top."""
    steps, values = [look["step"] for look in looks], [look["value"] for look in looks]
    panels = [panel for panel in PANELS if panel[0] in values[0]]
    height = 1.9 + 1.75 * len(panels)
    figure = new_figure((8.4, height))
    rows = figure.subplots(len(panels) + 1, 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.5})[:, 0]
    figure.subplots_adjust(left=0.07, right=0.9, top=1 - 0.5 / height, bottom=0.5 / height)
    _draw_lines(rows[0], steps, values, title)
    for axes, (name, about, by_size) in zip(rows[1:], panels, strict=True):
        _draw_states(figure, axes, steps, [value[name] for value in values], about, by_size)
    rows[-1].set_xlabel("step", fontsize=9, color=COLOURS["ink"])
    return figure


def write_watches(cards: Iterable[Card], out: Path) -> list[Path]:
    """Draw the first run of each recipe that was watched; gives the pictures' paths."""
    drawn: dict[str, Path] = {}
    for card in cards if find_spec("matplotlib") else ():
        looks = (card["trained"] or {}).get("traces", {}).get("watch")
        name = card["preset"] or card["recipe"]
        if looks and name not in drawn:
            drawn[name] = out / f"watch-{re.sub(r'[^A-Za-z0-9]+', '-', name)[:40].strip('-')}.png"
            to_png(draw_watch(looks, f"{name[:60]}: {card['task']}, seed {card['seed']}"), drawn[name])
    return list(drawn.values())


def _draw_lines(axes: "Axes", steps: list[int], values: list[Look], title: str) -> None:
    lines: dict[str, list[Any]] = {
        "accuracy": [value.get("accuracy") for value in values],
        "largest class predicted": [value.get("largest") for value in values],
        "weights kept": [100 * sum(v["kept"]) / len(v["kept"]) if "kept" in v else None for v in values],
    }
    colours = (COLOURS["ink"], COLOURS["accent"], COLOURS["other"])
    for (name, line), colour in zip(lines.items(), colours, strict=True):
        if None not in line:
            axes.plot(steps, line, color=colour, linewidth=1.4, label=f"{name}, %")
    losses = [value["loss"] for value in values]
    if axes.lines or None in losses:
        axes.set_ylim(0, 104)
    else:  # a phase that guesses words, or numbers, has no classes to be right about
        axes.plot(steps, losses, color=COLOURS["ink"], linewidth=1.4, label="loss")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98))
    strip_frame(axes, "y", title, labels=8)


def _draw_states(
    figure: "Figure", axes: "Axes", steps: list[int], table: list[list[float | None]], about: str, by_size: bool
) -> None:
    def shown(value: float | None) -> float:
        if value is None or (by_size and value == 0):  # a first token's embedding is the same in every text
            return math.nan
        return math.log10(max(value, SMALL)) if by_size else value

    grid = [[shown(row[state]) for row in table] for state in range(len(table[0]))]
    wide = (steps[1] - steps[0]) / 2 if len(steps) > 1 else 0.5  # a look stands in the middle of its cell
    edges = [steps[0] - wide, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + wide]
    mesh = axes.pcolormesh(edges, [n - 0.5 for n in range(len(grid) + 1)], grid, cmap="viridis", rasterized=True)
    bar = figure.colorbar(mesh, cax=axes.inset_axes((1.012, 0.0, 0.012, 1.0)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=0, colors=COLOURS["muted"])
    if by_size:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"1e{value:.0f}" if abs(value - round(value)) < 1e-6 else "")
    axes.set_yticks(range(0, len(grid), max(1, (len(grid) - 1) // 4)))
    strip_frame(axes, None, about, labels=8)
