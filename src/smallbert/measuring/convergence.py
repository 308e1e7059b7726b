"""How much sooner one arm of a study gets where another ends, where the length of training is varied."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from smallbert.measuring.findings import ENDS, Cell, compare_cells
from smallbert.measuring.statistics import Crossing, Mean, first_reached, mean_of


class Convergence(NamedTuple):
    """How much sooner one arm reaches the plateau of another, which is the other's mean at the largest value."""

    task: str
    one: str
    other: str
    plateau: Mean
    one_at: Crossing | None
    other_at: Crossing | None
    diverged: str = ""  # so many of so many runs, which count with the scores they have
    rising: bool = False  # whether the plateau is none: the last step up is more than two of its standard errors

    @property
    def factor(self) -> float | None:
        """How many times as long `one` takes; None where one never gets there."""
        return None if self.one_at is None or self.other_at is None else self.one_at.x / self.other_at.x

    @property
    def sentence(self) -> str:
        """All of it in words."""
        if self.plateau.value is None or self.one_at is None:
            return f"{self.task}: {self.one} has no plateau, since no run at the largest number of epochs ended ok."
        error = self.plateau.error or 0.0
        less = f" less its standard error {error:.1f}" if error else ", one seed" if self.plateau.n == 1 else ""
        what = f"{self.one}'s {'last score, still rising' if self.rising else 'plateau'}"
        start = f"{self.task}: {self.other} reaches {what} ({self.plateau.value:.1f}{less})"
        end = f"; {self.diverged} runs diverged and count with their scores." if self.diverged else "."
        if self.other_at is None:
            return f"{start} never within the range, {self.one} after {_epochs(self.one_at)}{end}"
        bound = {(True, False): "at most ", (False, True): "at least "}.get(
            (self.one_at.at_most, self.other_at.at_most)
        )
        both = self.one_at.at_most and self.other_at.at_most
        factor = "no factor, since both reach it at the first" if both else f"factor {bound or ''}{self.factor:.2f}"
        return f"{start} after {_epochs(self.other_at)}, {self.one} after {_epochs(self.one_at)}: {factor}{end}"


def _epochs(crossing: Crossing) -> str:
    many = f"{crossing.x:.3g}"
    return f"{'at most ' if crossing.at_most else ''}{many} {'epoch' if many == '1' else 'epochs'}"


def find_convergence(cells: Sequence[Cell]) -> list[Convergence]:
    """For every two arms of a task, how soon each reaches the first one's plateau less its standard error."""
    found = []
    for task in dict.fromkeys(cell.task for cell in cells):
        lines: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.task == task:
                lines.setdefault(cell.arm, []).append(cell)
        for one, other in combinations(lines, 2):
            *_, before, last = [None, *sorted(lines[one], key=lambda cell: float(cell.value))]
            plateau = last.all if last.survivors.n else mean_of([])
            height = math.inf if plateau.value is None else plateau.value - (plateau.error or 0.0)
            one_at, other_at = (first_reached(_line(lines[arm]), height) for arm in (one, other))
            both = [cell for arm in (one, other) for cell in lines[arm]]
            lost, ended = (sum(cell.count(*statuses) for cell in both) for statuses in (("diverged",), ENDS))
            rising = before is not None and compare_cells(before, last).is_higher
            diverged = f"{lost} of {ended}" if lost else ""
            found.append(Convergence(task, one, other, plateau, one_at, other_at, diverged, rising))
    return found


def _line(cells: Sequence[Cell]) -> list[tuple[float, float]]:
    return [(float(cell.value), cell.all.value) for cell in cells if cell.all.value is not None]
