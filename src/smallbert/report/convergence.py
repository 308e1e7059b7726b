"""Pictures of a study: every run as a dot, the means over them, against a setting that was varied or arm by arm."""

import textwrap
from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from smallbert.measuring.findings import Cell, are_numbers
from smallbert.report.figure import COLOURS, new_figure, strip_frame
from smallbert.report.plot import WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("#1d1c1a", "#b3362b", "#2f6690", "#5b8c5a", "#c98a2b", "#7a5195", "#77726a", "#3aa6a0", "#d16ba5", "#8a5a44")
APART = 0.012  # of the width of the picture, by which arms stand apart at one value
SPREAD = 0.13  # of the room of an arm, over which its runs are spread


def draw_study(cells: Sequence[Cell], metric: str, setting: str | None, chance: float | None = None) -> "Figure":
    """The score of one task's runs against the setting that was varied, or against the arm where none was."""
    figure = new_figure(WIDE)
    axes = figure.add_axes((0.075, 0.13, 0.9, 0.77))
    place, ticks, labels = _places(cells, setting)
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    for number, arm in enumerate(arms):
        _draw_arm(axes, [cell for cell in cells if cell.arm == arm], LINES[number % len(LINES)], place, setting)
    if chance is not None and chance > axes.get_ylim()[0]:
        axes.axhline(chance, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
        look: dict[str, Any] = {"fontsize": 8, "color": COLOURS["muted"], "va": "bottom", "ha": "right"}
        axes.text(0.997, chance, "guessing", transform=axes.get_yaxis_transform(), **look)
    _frame(axes, ticks, labels, f"{metric}, {cells[0].task}", setting)
    of = "" if setting is not None else " of survivors"  # trained too shortly is a point of the line, not a failure
    bars = f", bars mean ± sd{of}" if any(cell.all.n > 1 for cell in cells) else ""
    note = f"dots are runs{bars}" + (", x diverged" if any(map(_diverged, cells)) else "")
    axes.set_title(note, loc="right", fontsize=8.5, color=COLOURS["muted"])
    if setting is not None:
        axes.legend(frameon=False, fontsize=9, loc="best")
    return figure


def _diverged(cell: Cell) -> int:
    return cell.count("diverged")


def _places(
    cells: Sequence[Cell], setting: str | None
) -> tuple[Callable[[Cell, float], float], list[float], list[str]]:
    """Where on the axis the runs of a cell stand (the second number spreads them), and the ticks with their labels."""
    arms, values = (list(dict.fromkeys(each)) for each in (map(lambda c: c.arm, cells), map(lambda c: c.value, cells)))
    if setting is None:
        return lambda cell, aside: arms.index(cell.arm) + aside * SPREAD, list(range(len(arms))), arms
    spots = {value: float(value) if are_numbers(values) else float(values.index(value)) for value in values}
    step = (max(spots.values()) - min(spots.values()) or 1.0) * APART
    middle = (len(arms) - 1) / 2  # arms stand beside each other, so that none hides another
    ticks = sorted(spots.values())
    names = [str(value) for value in sorted(values, key=spots.__getitem__)]
    return lambda cell, aside: spots[cell.value] + (arms.index(cell.arm) - middle) * step, ticks, names


def _draw_arm(
    axes: "Axes", cells: Sequence[Cell], colour: str, place: Callable[[Cell, float], float], setting: str | None
) -> None:
    for cell in cells:
        runs = [(run.score, run.status == "diverged") for run in cell.runs if run.score is not None]
        for number, (score, bad) in enumerate(runs):
            aside = 2 * number / (len(runs) - 1) - 1 if len(runs) > 1 else 0.0
            style: dict[str, Any] = {
                "marker": "x" if bad else "o",
                "markersize": 6 if bad else 4.5,
                "linestyle": "none",
            }
            alpha = 0.8 if bad else 0.3
            above = 5 if bad else 3  # a mean over diverged runs alone must not hide that they diverged
            axes.plot(place(cell, aside), score, color=colour, alpha=alpha, zorder=above, **style)
    means = [(place(cell, 0.0), cell.survivors if setting is None else cell.all) for cell in cells]
    good = sorted((x, mean.value, nan if mean.sd is None else mean.sd) for x, mean in means if mean.value is not None)
    look: dict[str, Any] = {"color": colour, "capsize": 3, "linewidth": 1.6, "elinewidth": 1.1, "zorder": 4}
    if setting is None:
        look |= {"linestyle": "none", "marker": "_", "markersize": 26, "markeredgewidth": 2}
    else:
        look |= {"marker": "o", "markersize": 6, "markerfacecolor": COLOURS["paper"], "label": cells[0].arm}
    if good:
        xs, heights, bars = zip(*good, strict=True)
        axes.errorbar(xs, heights, bars, **look)


def _frame(axes: "Axes", ticks: list[float], labels: list[str], title: str, setting: str | None) -> None:
    wide = max(9, 84 // len(labels))  # letters that have room below a tick
    wrapped = ["\n".join(textwrap.wrap(label, wide, max_lines=3, placeholder=" …")) for label in labels]
    axes.set_xticks(ticks, wrapped)
    room = 0.5 if setting is None else (max(ticks) - min(ticks) or 1.0) * 0.06
    axes.set_xlim(min(ticks) - room, max(ticks) + room)
    strip_frame(axes, "y", title)
    if setting is not None:
        axes.set_xlabel(setting, fontsize=9.5, color=COLOURS["ink"])
