"""What the runs of a study say: each arm on its own, every two arms against each other, and who gets there sooner."""

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from smallbert.measuring.pruned import Left, mean_left
from smallbert.measuring.statistics import (
    Mean,
    fisher_exact,
    mean_of,
    sign_flip,
    t_tail,
    wilson_interval,
)

ENDS = ("ok", "diverged")  # how a run ends that was not prevented from ending
SURE = 0.05  # Fisher's p below which one arm is said to diverge more often
BEYOND = 2.0  # standard errors from which on a difference is marked
FEW = 8  # arms up to which each is spoken of, and compared with every other
HIGHEST = 3  # that are named of more


class Result(NamedTuple):
    """How one run ended: ok, diverged, failed, or not run (yet)."""

    task: str
    arm: str
    value: Any
    seed: int
    status: str
    score: float | None = None
    why: str | None = None
    seconds: float | None = None
    left: Left | None = None
    size: float | None = None  # bytes of its folder


class Cell(NamedTuple):
    """All runs of one arm on one task, and at one value where a setting is varied."""

    task: str
    arm: str
    value: Any
    runs: tuple[Result, ...]

    def scores(self, survivors: bool = False) -> dict[int, float]:
        """Seed -> score of the runs that have one; of survivors, those that did not diverge."""
        known = ENDS[:1] if survivors else ENDS
        return {run.seed: run.score for run in self.runs if run.status in known and run.score is not None}

    @property
    def survivors(self) -> Mean:
        """The mean over runs that went well."""
        return mean_of(self.scores(survivors=True).values())

    @property
    def all(self) -> Mean:
        """The mean over runs with a score, diverged ones with the score they really have."""
        return mean_of(self.scores().values())

    def count(self, *statuses: str) -> int:
        """How many runs ended so."""
        return sum(run.status in statuses for run in self.runs)

    @property
    def left(self) -> Left | None:
        """The mean share of weights that are left."""
        return mean_left(run.left for run in self.runs)

    @property
    def is_pruned(self) -> bool:
        """Whether weights were taken out."""
        return self.left is not None and self.left.is_pruned

    @property
    def size(self) -> float | None:
        """The mean number of bytes."""
        return mean_of(run.size for run in self.runs if run.size is not None).value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share that diverges; None where no run has ended."""
        ended = self.count(*ENDS)
        return wilson_interval(self.count("diverged"), ended) if ended else None


class Pair(NamedTuple):
    """One arm against another: `other` minus `one` throughout."""

    one: Cell
    other: Cell
    survivors: float | None  # difference of means
    all: float | None
    fisher: float | None  # p that both diverge equally often
    paired: Mean  # over seeds where both have a score
    flips: float | None  # p of those differences
    paired_survivors: Mean  # over seeds where neither diverged

    @property
    def is_beyond(self) -> bool:
        """Whether the survivors' paired difference is more than two of its standard errors from zero."""
        value, error = self.paired_survivors.value, self.paired_survivors.error
        return value is not None and error is not None and abs(value) > BEYOND * error

    @property
    def is_higher(self) -> bool:
        """Whether `other` is higher by more than two standard errors of the difference over seeds, all runs counted."""
        value, error = self.paired.value, self.paired.error
        return value is not None and error is not None and value > BEYOND * error

    @property
    def sign(self) -> int:
        """1 where `other` is better, -1 where it is worse: it diverges less or more often, or scores beyond errors."""
        if self.fisher is not None and self.fisher < SURE:
            return 1 if self.one.count("diverged") > self.other.count("diverged") else -1
        return 0 if not self.is_beyond else 1 if (self.paired_survivors.value or 0.0) > 0 else -1


def gather(results: Iterable[Result]) -> list[Cell]:
    """The runs by task, value and arm, in the order in which these came."""
    cells: dict[tuple[str, str, Any], list[Result]] = {}
    for result in results:
        cells.setdefault((result.task, result.arm, result.value), []).append(result)
    return [Cell(task, arm, value, tuple(runs)) for (task, arm, value), runs in cells.items()]


def pair_up(cells: Sequence[Cell]) -> list[Pair]:
    """Every two arms of the same task and value, the one named first as the one compared with."""
    places = dict.fromkeys((cell.task, cell.value) for cell in cells)
    return [
        compare_cells(one, other)
        for place in places
        for one, other in combinations([cell for cell in cells if (cell.task, cell.value) == place], 2)
    ]


def compare_cells(one: Cell, other: Cell) -> Pair:
    """All that can be said about two arms."""
    ended = [cell.count(*ENDS) for cell in (one, other)]
    diverged = [cell.count("diverged") for cell in (one, other)]
    fisher = fisher_exact(diverged[0], ended[0], diverged[1], ended[1]) if all(ended) else None
    paired = _paired(one, other, survivors=False)
    return Pair(
        one,
        other,
        _minus(other.survivors.value, one.survivors.value),
        _minus(other.all.value, one.all.value),
        fisher,
        mean_of(paired),
        sign_flip(paired),
        mean_of(_paired(one, other, survivors=True)),
    )


def _paired(one: Cell, other: Cell, survivors: bool) -> list[float]:
    ours, theirs = one.scores(survivors), other.scores(survivors)
    return [theirs[seed] - ours[seed] for seed in ours if seed in theirs]


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def marks_by_chance(pairs: Iterable[Pair]) -> float:
    """How many of these would be marked if no arm differed: with few seeds two standard errors are soon passed."""
    return sum(t_tail(BEYOND, pair.paired_survivors.n - 1) for pair in pairs if pair.paired_survivors.n > 1)


def conclude(cells: Sequence[Cell], setting: str | None = None) -> str:
    """What a study found, in plain words."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    if setting is not None:  # where a setting is varied, its last value speaks
        values = list(dict.fromkeys(cell.value for cell in cells))
        last = max(values) if are_numbers(values) else values[-1]
        cells = [cell for cell in cells if cell.value == last]
    said = _on_many(cells, tasks) if len(tasks) > 1 else _on_one(cells)
    absent = sum(cell.count("failed", "not run") for cell in cells)
    said += f"; {absent} of {sum(len(cell.runs) for cell in cells)} runs failed or were not run" if absent else ""
    if len(tasks) == 1 and len(cells) > 1 and all(len(cell.runs) == 1 for cell in cells):
        said += "; one seed each, so nothing is tested"
    return f"{'' if setting is None else f'at {setting} = {last}: '}{said}."


def _on_one(cells: Sequence[Cell]) -> str:
    said = [f"{cell.arm}: {_scored(cell)}" for cell in cells]
    if len(cells) > FEW:  # all of them would be a page
        first, *rest = sorted(cells[1:], key=lambda cell: math.inf if cell.all.value is None else -cell.all.value)
        cells = [cells[0], first, *rest[: HIGHEST - 1]]
        named = [f"{cell.arm} with {_scored(cell)}" for cell in cells[1:]]
        said = [said[0], f"highest of the {len(rest) + 1} others: {', '.join(named)}"]
    for cell in cells[1:]:
        pair, against = compare_cells(cells[0], cell), f" {cell.arm} against {cells[0].arm}" if len(cells) > 2 else ""
        if len(cell.runs) > 1 and cells[0].count("diverged") + cell.count("diverged") and pair.fisher is not None:
            said.append(f"Fisher's exact p{against} = {p_value(pair.fisher)}")
        elif pair.paired.error is not None and pair.paired.value is not None and pair.flips is not None:
            error = f"{pair.paired.value:+.2f} ± {pair.paired.error:.2f} over {pair.paired.n} paired seeds"
            said.append(f"difference{against} {error} (standard error; p = {p_value(pair.flips)})")
    return "; ".join(said)


def _scored(cell: Cell) -> str:
    ended, diverged = cell.count(*ENDS), cell.count("diverged")
    if len(cell.runs) == 1 and ended:
        return f"{brief(cell.all)}{', diverged' * diverged}"
    return f"{brief(cell.all)} ({diverged} of {ended} diverged)" if ended else "no run finished"


def _on_many(cells: Sequence[Cell], tasks: Sequence[str]) -> str:
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    of = {(cell.task, cell.arm): cell for cell in cells}
    pairs = {arm: [compare_cells(of[task, arms[0]], of[task, arm]) for task in tasks] for arm in arms[1:]}
    every = [pair for own in pairs.values() for pair in own]
    tested = sum(pair.paired_survivors.n > 1 for pair in every)
    how = ", beyond two standard errors of survivors or in how often it diverges" if tested else ""
    said = [f"Against {arms[0]}{how}: " + "; ".join(_beside(arm, own) for arm, own in pairs.items())] * bool(pairs)
    if tested:
        chance = f"about {marks_by_chance(every):.1f} would differ so by chance alone"
        said.append(f"of {tested} comparisons tested, {chance}")
    elif every:
        said.append("one seed each, so nothing is tested")
    runs = {arm: [run for cell in cells if cell.arm == arm for run in cell.runs] for arm in arms}
    whole = [Cell("", arm, None, tuple(own)) for arm, own in runs.items()]
    if any(cell.count("diverged") for cell in whole):
        said.append(", ".join(f"{c.arm}: {c.count('diverged')} of {c.count(*ENDS)} diverged" for c in whole))
    return "; ".join(said) or f"{arms[0]} on {len(tasks)} tasks"


def _beside(arm: str, pairs: Sequence[Pair]) -> str:
    """How one arm does against the first: on how many tasks it is better and worse, or by how much with one seed."""
    if all(pair.paired_survivors.n < 2 for pair in pairs):
        gains = ", ".join(_gain(pair) for pair in pairs if pair.paired_survivors.n)
        return f"{arm} {gains}" if gains else f"{arm} has no paired seed"
    counts = []
    for word, sign in (("better", 1), ("worse", -1)):
        own = [pair for pair in pairs if pair.sign == sign]
        counts.append(f"{word} on {len(own)}" + (f" ({', '.join(map(_gain, own))})" if own else ""))
    return f"{arm} is {' and '.join(counts)} of {len(pairs)} tasks"


def _gain(pair: Pair) -> str:
    if pair.fisher is not None and pair.fisher < SURE:
        one, other = (f"{cell.count('diverged')} of {cell.count(*ENDS)}" for cell in (pair.one, pair.other))
        return f"{pair.one.task}, {other} diverged against {one}"
    return f"{pair.one.task} {pair.paired_survivors.value:+.1f}"


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether values can stand on an axis."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def brief(mean: Mean, digits: int = 1) -> str:
    """A mean and its standard deviation as text.

    >>> brief(Mean(85.23, 0.61, 10))
    '85.2 ± 0.6'
    """
    if mean.value is None:
        return "none"
    return f"{mean.value:.{digits}f}" + ("" if mean.sd is None else f" ± {mean.sd:.{digits}f}")


def p_value(p: float) -> str:
    """A probability with as many digits as it is worth.

    >>> p_value(0.000714), p_value(0.0625)
    ('0.0007', '0.062')
    """
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.001 else f"{p:.3f}"
