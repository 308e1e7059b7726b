"""A study's picture of what smaller costs: the mean score of each arm against the bytes of its folder."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smallbert.measuring.findings import Cell
from smallbert.report.plot import Point, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART = 1.2  # times the smallest arm that the largest must be, or there is nothing to see


def have_sizes(cells: Sequence[Cell]) -> bool:
    """Whether arms differ enough in size to be drawn against it."""
    sizes = [cell.size for cell in cells if cell.size is not None]
    return len(sizes) > 1 and max(sizes) > APART * min(sizes)


def points_of(cells: Sequence[Cell]) -> list[Point]:
    """The arms that have a score and a size, marked where no smaller one scores higher."""
    known = [(cell, size / 1e6, mean) for cell in cells if (size := cell.size) and (mean := cell.all.value) is not None]
    return [
        Point(
            cell.arm,
            size,
            score,
            cell.all.sd or 0.0,
            on_frontier=not any(less <= size and higher > score for _, less, higher in known),
            is_baseline=cell is cells[0],
        )
        for cell, size, score in known
    ]


def draw_sizes(cells: Sequence[Cell], metric: str) -> "Figure":
    """Arms with a score and a size, a line through those that no smaller one beats; bars are deviations over seeds."""
    return draw(points_of(cells), "MB on disk", f"{metric}, {cells[0].task}")
