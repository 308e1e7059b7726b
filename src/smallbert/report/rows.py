"""A study in rows: an arm's name in full, every run as a dot, the mean of survivors, the share of weights left."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smallbert.measuring.findings import Cell
from smallbert.report.figure import COLOURS, new_figure, strip_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = 0.27  # inches an arm
LETTER = 0.068  # inches of a name


def draw_rows(cells: Sequence[Cell], metric: str) -> "Figure":
    """The scores of one task's runs, arm below arm, with a line down from where the first arm stands."""
    names = [cell.arm for cell in cells]
    wide, high = 8.6, 0.9 + ROW * len(cells)
    left = min(0.55, (0.3 + LETTER * max(map(len, names))) / wide)
    shares = [f"{100 * cell.left.layers:.1f} %" if cell.left else "" for cell in cells]
    shares *= any(cell.is_pruned for cell in cells)
    figure = new_figure((wide, high))
    axes = figure.add_axes((left, 0.35 / high, (0.89 if shares else 0.97) - left, 1 - 0.85 / high))
    look: dict[str, Any]
    for row, cell in enumerate(cells):
        colour = COLOURS["ink" if row == 0 else "accent"]
        runs = [(run.score, run.status == "diverged") for run in cell.runs if run.score is not None]
        for score, bad in runs:
            look = {"marker": "x" if bad else "o", "markersize": 5 if bad else 4.5}
            axes.plot(score, row, color=colour, alpha=0.8 if bad or len(runs) == 1 else 0.35, zorder=3, **look)
        mean = cell.survivors
        if mean.value is not None and mean.n > 1:
            look = {"color": colour, "markersize": 11, "markeredgewidth": 2, "elinewidth": 1.1, "capsize": 2.5}
            axes.errorbar([mean.value], [row], xerr=[mean.sd or 0.0], fmt="|", zorder=4, **look)
    if cells[0].survivors.value is not None:
        axes.axvline(cells[0].survivors.value, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    strip_frame(axes, "x", f"{metric}, {cells[0].task}", 8.5)
    bars = ", bars mean ± sd" if any(cell.survivors.n > 1 for cell in cells) else ""
    crosses = f"{' of survivors' if bars else ''}, x diverged" if any(cell.count("diverged") for cell in cells) else ""
    axes.set_title(f"dots are runs{bars}{crosses}", loc="right", fontsize=8, color=COLOURS["muted"])
    look = {"fontsize": 8.5, "color": COLOURS["muted"], "va": "center_baseline", "ha": "right"}
    for row, share in enumerate(shares):
        axes.text(1 + 0.09 / (0.89 - left), row, share, transform=axes.get_yaxis_transform(), **look)
    if shares:
        axes.text(1 + 0.09 / (0.89 - left), -1.08, "left", transform=axes.get_yaxis_transform(), **look)
    return figure
