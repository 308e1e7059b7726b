"""The picture of a study over several tasks: how far each arm is from the first one, task by task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smallbert.measuring.findings import BEYOND, Pair
from smallbert.report.convergence import LINES
from smallbert.report.figure import COLOURS, new_figure, strip_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR = 1.0  # points; differences up to this are drawn to scale, larger ones ever more tightly
ROW, LINE = 0.42, 0.12  # inches a task, and an arm of it where there are many
LEGEND, LETTERS = 0.2, 80  # inches a line of the legend, and the letters that fit into one


def draw_differences(pairs: Sequence[Pair]) -> "Figure":
    """Differences from the first arm over paired seeds, with bars of two standard errors; x where runs diverged."""
    first = pairs[0].one.arm
    pairs = [pair for pair in pairs if pair.one.arm == first]
    tasks, arms = (
        list(dict.fromkeys(names)) for names in zip(*((p.one.task, p.other.arm) for p in pairs), strict=True)
    )
    columns = max(1, min(len(arms), LETTERS // (max(map(len, arms)) + 6)))
    above = 0.33 + LEGEND * -(-len(arms) // columns)
    height = 0.92 + above + max(ROW, LINE * (len(arms) + 1)) * len(tasks)
    figure = new_figure((7.6, height))
    axes = figure.add_axes((0.13, 0.75 / height, 0.84, 1 - (0.75 + above) / height))
    for number, arm in enumerate(arms):
        shift = (number - (len(arms) - 1) / 2) * 0.7 / max(len(arms), 2)
        colour = LINES[(number + 1) % len(LINES)]
        axes.plot([], [], "o", color=colour, markersize=5, label=arm)
        for pair in (pair for pair in pairs if pair.other.arm == arm):
            _draw_pair(axes, pair, tasks.index(pair.one.task) + shift, colour)
    axes.axvline(0, color=COLOURS["ink"], linewidth=1)
    ends = [abs(p.paired.value or 0) + BEYOND * (p.paired.error or 0) for p in pairs]
    if max(ends, default=0) > 8 * LINEAR:
        axes.set_xscale("symlog", linthresh=LINEAR)
        ticks = [tick for tick in (1, 3, 10, 30, 100) if tick <= 2 * max(ends)]
        ticks = sorted({0, *ticks, *(-tick for tick in ticks)})
        low, high = axes.get_xlim()
        axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
        axes.set_xlim(low * 1.15 if low < 0 else low, high * 1.15)
        axes.minorticks_off()
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    strip_frame(axes, "x", "" if len(arms) > 1 else f"{arms[0]} against {first}")
    scale = ", drawn ever tighter beyond 1" if axes.get_xscale() == "symlog" else ""
    marks = "; x: some diverged and are counted with their scores" if any(map(_diverged, pairs)) else ""
    label = f"points from {first}{scale}\nbars are two standard errors over seeds{marks}"
    axes.set_xlabel(label, fontsize=8.5, color=COLOURS["ink"])
    if len(arms) > 1:
        axes.legend(frameon=False, fontsize=8.5, ncols=columns, loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    return figure


def _draw_pair(axes: "Axes", pair: Pair, y: float, colour: str) -> None:
    """One difference; where runs diverged, their scores are in it and its sign is another."""
    mean = pair.paired
    if mean.value is None:
        axes.text(0, y, " no two runs to compare", fontsize=7, va="center", color=colour)
        return
    look: dict[str, Any] = {"fmt": "x" if _diverged(pair) else "o", "markersize": 5, "capsize": 2.5, "elinewidth": 1.2}
    axes.errorbar([mean.value], [y], xerr=[BEYOND * (mean.error or 0.0)], color=colour, **look)


def _diverged(pair: Pair) -> bool:
    return pair.one.count("diverged") + pair.other.count("diverged") > 0
