"""The picture of a study over several tasks: how far each arm is from the first one, task by task."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError
from smallbert.measuring.findings import BEYOND, Pair
from smallbert.report.convergence import LINES
from smallbert.report.plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINEAR = 1.0  # points; differences up to this are drawn to scale, larger ones ever more tightly
ROW = 0.42  # inches a task


def draw_differences(pairs: Sequence[Pair]) -> "Figure":
    """Differences from the first arm, over seeds where neither diverged, with bars of two standard errors."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("figures need matplotlib; run: pip install -e '.[report]'") from error
    first = pairs[0].one.arm
    pairs = [pair for pair in pairs if pair.one.arm == first]
    tasks, arms = (
        list(dict.fromkeys(names)) for names in zip(*((p.one.task, p.other.arm) for p in pairs), strict=True)
    )
    height = 1.3 + ROW * len(tasks)
    figure = Figure(figsize=(7.6, height), dpi=100, facecolor=COLOURS["paper"])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.13, 0.62 / height, 0.84, 1 - 1.15 / height))
    for number, arm in enumerate(arms):
        own = [pair for pair in pairs if pair.other.arm == arm and pair.paired_survivors.value is not None]
        shift = (number - (len(arms) - 1) / 2) * 0.7 / max(len(arms), 2)
        look: dict[str, Any] = {"fmt": "o", "markersize": 5, "capsize": 2.5, "elinewidth": 1.2, "label": arm}
        axes.errorbar(
            [pair.paired_survivors.value or 0.0 for pair in own],
            [tasks.index(pair.one.task) + shift for pair in own],
            xerr=[BEYOND * (pair.paired_survivors.error or 0.0) for pair in own],
            color=LINES[(number + 1) % len(LINES)],
            **look,
        )
    axes.axvline(0, color=COLOURS["ink"], linewidth=1)
    ends = [abs(p.paired_survivors.value or 0) + BEYOND * (p.paired_survivors.error or 0) for p in pairs]
    if max(ends, default=0) > 8 * LINEAR:
        axes.set_xscale("symlog", linthresh=LINEAR)
        ticks = [tick for tick in (1, 3, 10, 30, 100) if tick <= 2 * max(ends)]
        ticks = sorted({0, *ticks, *(-tick for tick in ticks)})
        low, high = axes.get_xlim()
        axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
        axes.set_xlim(low, high)
        axes.minorticks_off()
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_facecolor("none")
    axes.grid(axis="x", color=COLOURS["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="both", colors=COLOURS["muted"], labelsize=9, length=0)
    unknown = sum(pair.paired_survivors.value is None for pair in pairs)
    rest = f"; {unknown} not drawn: one of the two always diverged" if unknown else ""
    axes.set_xlabel(
        f"points from {first}; bars are two standard errors over seeds{rest}", fontsize=9, color=COLOURS["ink"]
    )
    if len(arms) > 1:
        axes.legend(frameon=False, fontsize=8.5, ncols=len(arms), loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    else:
        axes.set_title(f"{arms[0]} against {first}", loc="left", fontsize=10, color=COLOURS["ink"])
    return figure
