"""Budgets: limits such as `size<=25MB latency<=5ms accuracy>=90`, and what a card breaks of them."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smallbert.errors import UserError
from smallbert.measuring.card import Card, number, reason
from smallbert.recipes.registry import suggest


class Measure(NamedTuple):
    """A number of a card that a budget can limit: its units, the unit it is shown in, where its reasons are kept."""

    units: dict[str, float]
    shown_in: str
    path: str


_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
MEASURES = {
    "size": Measure(_SIZES, "MB", "bytes.total"),
    "latency": Measure({"us": 1e-3, "ms": 1.0, "s": 1e3}, "ms", "latency.p50_ms"),
    "parameters": Measure(_COUNT, "M", "parameters.total"),
    "macs": Measure(_COUNT, "M", "macs.value"),
    "throughput": Measure({"": 1.0, "/s": 1.0}, "/s", "throughput"),
}
ALIASES = {"bytes": "size", "params": "parameters", "ms": "latency", "speed": "latency", "acc": "accuracy"}
METRICS = ("score", "accuracy", "f1", "mcc", "pearson", "spearman", "em")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_BROKEN = {"<=": "over", ">=": "under", "<": "not under", ">": "not over"}
_LIMIT = re.compile(
    r"\s*([A-Za-z_]\w*)\s*(<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)"  # name, sign, number
    r"\s*((?:[A-Za-z]+|/s|%)(?!\w|\s*[<>]))?"  # a unit, which is not the name of the next limit
    r"(?:[,;\s]+|$)"
)


class Limit(NamedTuple):
    """One limit in base units (bytes, milliseconds, counts, 0-100)."""

    name: str
    sign: str
    value: float

    def __str__(self) -> str:
        """The limit as a user writes it, for example size<=25MB."""
        return f"{self.name}{self.sign}{show(self.name, self.value).replace(' ', '')}"

    def holds(self, value: float | None) -> bool:
        """Whether a measured number keeps to the limit; one that was not measured does not."""
        return value is not None and _COMPARE[self.sign](value, self.value)

    def excess(self, value: float | None) -> float:
        """By which share of the limit a number breaks it; 0 if it does not, infinite if it was not measured."""
        if value is None:
            return float("inf")
        return 0.0 if self.holds(value) else abs(value - self.value) / max(abs(self.value), 1e-9)


@dataclass(frozen=True)
class Budget:
    """Limits a card must keep to, all of them.

    >>> str(Budget.parse("size<=25MB accuracy>=0.9"))
    'size<=25MB accuracy>=90'
    """

    limits: tuple[Limit, ...] = ()

    @classmethod
    def parse(cls, text: str, metrics: Sequence[str] = ()) -> "Budget":
        """Read limits separated by spaces or commas; `metrics` are names of scores beyond the usual ones."""
        limits, place = [], 0
        text = text.replace("≤", "<=").replace("≥", ">=").strip()
        while place < len(text):
            found = _LIMIT.match(text, place)
            if found is None:
                rest = text[place:].split()[0]
                raise UserError(
                    f"cannot read {rest!r} in the budget {text!r}; write e.g. size<=25MB latency<=5ms accuracy>=90"
                )
            name, sign, digits, unit = found.groups(default="")
            limits.append(_limit(name, sign, digits, unit, (*METRICS, *metrics)))
            place = found.end()
        if not limits:
            raise UserError("the budget is empty; write e.g. size<=25MB latency<=5ms accuracy>=90")
        return cls(tuple(limits))

    def __str__(self) -> str:
        """The budget as a user writes it."""
        return " ".join(map(str, self.limits))

    def in_words(self) -> str:
        """The budget as a sentence holds it, for example: size ≤ 25 MB and latency ≤ 5 ms."""
        signs = {"<=": "≤", ">=": "≥"}
        return " and ".join(
            f"{one.name} {signs.get(one.sign, one.sign)} {show(one.name, one.value)}" for one in self.limits
        )

    def fits(self, card: Card) -> bool:
        """Whether the card keeps to every limit."""
        return not self.why_not(card)

    def why_not(self, card: Card) -> list[str]:
        """What the card breaks, one phrase a limit; empty if it fits.

        >>> budget.why_not(card)
        ['its size of 30.2 MB is over 25 MB']
        """
        return [_broken(limit, card) for limit in self.limits if not limit.holds(number(card, limit.name))]

    def excess(self, card: Card) -> float:
        """By how much the card breaks the budget, in shares of the limits added up."""
        return sum(limit.excess(number(card, limit.name)) for limit in self.limits)


def show(name: str, value: float) -> str:
    """A number as people read it, for example 25.3 MB, 4.1 ms, 22.7 M or 90.5."""
    measure = MEASURES.get(name)
    if measure is None:
        return f"{value:.4g}"
    amount = value / measure.units[measure.shown_in.lower()]
    return f"{amount:.3g} {measure.shown_in}" if amount < 1000 else f"{amount:,.0f} {measure.shown_in}"


def _limit(name: str, sign: str, digits: str, unit: str, metrics: Sequence[str]) -> Limit:
    name, value = ALIASES.get(name.lower(), name.lower()), float(digits)
    if name in metrics:
        if unit not in ("", "%"):
            raise UserError(
                f"{name}{sign}{digits}{unit}: a score has no unit {unit!r}; write {name}{sign}90 or {name}{sign}0.90"
            )
        if value > 100 and sign.startswith(">"):
            raise UserError(f"{name}{sign}{digits}{unit} cannot be kept: no {name} is above 100")
        return Limit(name, sign, value if unit or abs(value) > 1 else value * 100)  # 0.90 and 90 mean the same
    if name not in MEASURES:
        names = [*MEASURES, *metrics]
        raise UserError(f"a budget has no measure called {name!r}.{suggest(name, names)}")
    units = MEASURES[name].units
    if unit.lower() not in units:
        examples = ", ".join(f"{name}{sign}{digits}{written}" for written in _written_units(name))
        raise UserError(
            f"{name}{sign}{digits}{unit} has {'no' if not unit else 'an unknown'} unit; write one of: {examples}"
        )
    if value < 0:
        raise UserError(f"{name}{sign}{digits}{unit} cannot be kept: a {name} is never below 0")
    return Limit(name, sign, value * units[unit.lower()])


def _written_units(name: str) -> tuple[str, ...]:
    return ("B", "kB", "MB", "GB", "KiB", "MiB", "GiB") if name == "size" else tuple(u for u in MEASURES[name].units)


def _broken(limit: Limit, card: Card) -> str:
    value = number(card, limit.name)
    if value is None:
        metric = card["headline"] if limit.name == "score" else limit.name
        path = MEASURES[limit.name].path if limit.name in MEASURES else f"scores.{metric}"
        return f"its {limit.name} was not measured ({reason(card, path) or 'no reason is given'})"
    return f"its {limit.name} of {show(limit.name, value)} is {_BROKEN[limit.sign]} {show(limit.name, limit.value)}"
