"""One kind of schedule for every dial: densities, loss weights, temperatures, thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

SHAPES = {
    "constant": lambda share: 1.0,
    "linear": lambda share: share,
    "cubic": lambda share: 1 - (1 - share) ** 3,
}


@dataclass(frozen=True)
class Schedule:
    """A value that moves from `start` to `end` while the phase goes from `begin` to `finish` (shares of its steps).

    Schedule(1.0, 0.1, begin=0.1, finish=0.7, shape="cubic").at(0.0)  ->  1.0
    """

    start: float
    end: float
    begin: float = 0.0
    finish: float = 1.0
    shape: str = "linear"
    stairs: int = 0  # so many equal steps instead of a smooth way
    before: float | None = None  # the value until `begin`, where that is another than `start`: a drop to begin with
    after: float | None = None  # the value from `finish` on, where that is another than `end`

    def at(self, progress: float) -> float:
        """The value when this share of the phase's steps is done."""
        if self.before is not None and progress < self.begin:
            return self.before
        if self.after is not None and progress >= self.finish:
            return self.after
        span = self.finish - self.begin
        share = min(max((progress - self.begin) / span, 0.0), 1.0) if span > 0 else float(progress >= self.finish)
        if self.stairs:
            share = int(share * self.stairs + 1e-9) / self.stairs
        moved = SHAPES[self.shape](share)
        return self.start * (1 - moved) + self.end * moved  # exactly `end` at the end


def constant(value: float) -> Schedule:
    """A value that stays."""
    return Schedule(value, value, shape="constant")


@dataclass(frozen=True)
class Product:
    """The product of several schedules: what some methods say together."""

    said: tuple[Schedule, ...]

    def at(self, progress: float) -> float:
        """The value when this share of the phase's steps is done."""
        return prod(schedule.at(progress) for schedule in self.said)

    @property
    def is_off(self) -> bool:
        """Whether it is zero from beginning to end."""
        return any(schedule.start == 0 and schedule.end == 0 for schedule in self.said)


def warmup_then_linear(progress: float, warmup: float) -> float:
    """The usual learning-rate factor: up to one during the warm-up share, then down to zero in a straight line."""
    return progress / warmup if progress < warmup else max(0.0, (1.0 - progress) / max(1.0 - warmup, 1e-9))
