"""Budgets: limits such as `size<=25MB latency<=5ms accuracy>=90`, and the best card within them."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from smallbert.errors import UserError
from smallbert.measuring.card import Card, number, reason
from smallbert.measuring.groups import group_cards, score_of, short_names, standard_error, status_of
from smallbert.measuring.outcomes import are_paired, is_clearly_better
from smallbert.recipes.registry import did_you_mean, known

PLAINLY = 1.1  # times a size or time; a smaller gain does not make another model worth a look
GAINS = {"smaller": "size", "faster": "latency"}
ALIKE = 1.02  # sizes this near are one size: a few bytes of another config file decide nothing


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


class Choice(NamedTuple):
    """The card to take (None if none can be) and one sentence that says which and why."""

    card: Card | None
    sentence: str


def best(cards: Sequence[Card], budget: Budget | None = None) -> Choice:
    """The best headline score within the budget, or the smallest, then the fastest, of those that may be as good.

    Those are within one standard error of it, and not behind it by more than chance where cards say which examples
    each gets right. The sentence names a model near the chosen one that is smaller or faster, and whether it is behind.

    >>> best(cards, Budget.parse("size<=25MB")).sentence
    'drop_layers(3) | distill is the best within size ≤ 25 MB: accuracy 88.4 at 22.1 MB and 2.2 ms.'
    """
    rows = group_cards(cards)
    tasks = sorted({card["task"] for card in rows})
    if len(tasks) > 1:
        raise UserError(
            f"cards of several tasks ({', '.join(tasks)}) cannot be ranked together; give those of one task"
        )
    names = dict(zip(map(id, rows), short_names(rows), strict=True))
    good = [card for card in rows if card["status"] == "ok" and number(card, "score") is not None]
    if not good:
        ended = ", ".join(f"{names[id(card)]}: {status_of(card)}" for card in rows) or "there are no cards"
        return Choice(None, f"No model can be chosen, since no run ended ok ({ended}).")
    within = f" within {budget.in_words()}" if budget else f" of {len(rows)}" if len(rows) > 1 else ""
    fitting = [card for card in good if budget is None or budget.fits(card)]
    if budget is not None and not fitting:
        near = min(good, key=lambda card: (budget.excess(card), len(budget.why_not(card)), -_score(card)))
        broken = ", and ".join(budget.why_not(near))
        return Choice(None, f"No model is{within}; the nearest is {_told(near, names)}, but {broken}.")
    top = max(fitting, key=lambda card: (_score(card), -_size(card)))
    level = [card for card in fitting if _is_near(card, top) and not is_clearly_better(top, card)]
    smallest = min(map(_size, level))
    alike = [card for card in level if _size(card) <= smallest * ALIKE]
    chosen = min(alike, key=lambda card: (number(card, "latency") or float("inf"), -_score(card), _size(card)))
    sentence = f"{names[id(chosen)]} is the best{within}: {_told(chosen)}"
    if chosen is not top:
        sentence += f"; {names[id(top)]} has {_score(top):.1f}, which is within one standard error "
        sentence += f"({standard_error(top):.1f})"
        if gains := _gains(chosen, top):
            sentence += f", and {names[id(chosen)]} is {' and '.join(gains)}"
    others = [card for card in fitting if card is not top and card is not chosen and _may_be_equal(card, chosen)]
    sentence += f"{_doubt(chosen, others, names, silent=chosen is not top)}."
    if status_of(chosen) != "ok" and chosen["runs"]["ok"] < chosen["runs"]["n"]:
        sentence += f" Of its runs {status_of(chosen)}."
    return Choice(chosen, sentence)


def _is_near(card: Card, other: Card) -> bool:
    """Whether a score is no further behind another than one standard error of that one."""
    return _score(card) >= _score(other) - standard_error(other)


def _may_be_equal(card: Card, chosen: Card) -> bool:
    """Whether a model is worth a look beside the chosen one: near it, or behind by chance, not by unsteady seeds."""
    alone = all(row["runs"]["ok"] == 1 for row in (card, chosen)) and are_paired(card, chosen)
    return _is_near(card, chosen) or (alone and not is_clearly_better(chosen, card))


def _doubt(chosen: Card, others: Sequence[Card], names: dict[int, str], silent: bool) -> str:
    """The best of the models beside the chosen one that are plainly smaller or faster, and whether it is behind.

    Where there is none, the best of all that may be as good, unless one that scores higher was named (`silent`).
    """
    others = sorted(others, key=_score, reverse=True)
    for card in others:
        if gains := _gains(card, chosen, PLAINLY):
            behind = is_clearly_better(chosen, card)
            how = "behind by more than chance, but" if behind else f"{_alike(chosen, card)}, and"
            return f"; {_told(card, names)} is {how} {' and '.join(gains)}"
    equal = [card for card in others if not is_clearly_better(chosen, card)]
    if silent or not equal:
        return ""
    known = [word for word, name in GAINS.items() if None not in (number(chosen, name), number(equal[0], name))]
    but = {0: "", 1: ", but not plainly "}.get(len(known), ", but neither plainly ") + " nor ".join(known)
    return f"; {names[id(equal[0])]} has {_score(equal[0]):.1f}, {_alike(chosen, equal[0])}{but}"


def _alike(chosen: Card, card: Card) -> str:
    """What is known of two scores that may be equal."""
    if not are_paired(chosen, card):
        return "within one standard error"
    seeds = max(row["runs"]["ok"] for row in (chosen, card))
    examples = f"{chosen['scores'][chosen['headline']]['n']:,} {chosen['split']} examples"
    return f"no worse as far as {examples}{f' and {seeds} seeds' if seeds > 1 else ''} can tell"


def _gains(card: Card, other: Card, times: float = 1.0) -> list[str]:
    """In what a model is more than so many times less than another: ["smaller", "faster"]."""
    both = {word: (number(card, name), number(other, name)) for word, name in GAINS.items()}
    return [word for word, (mine, its) in both.items() if mine is not None and its is not None and mine * times < its]


def frontier(cards: Sequence[Card], x: str = "bytes", y: str = "score") -> list[Card]:
    """The cards that no other one beats in both: smaller (or faster) and better; sorted by `x`."""
    x = ALIASES.get(x, x)
    good = [card for card in group_cards(cards) if card["status"] == "ok"]
    placed = [
        (a, b, card) for card in good if (a := number(card, x)) is not None and (b := number(card, y)) is not None
    ]
    kept: list[Card] = []
    highest = float("-inf")
    for _, value, card in sorted(placed, key=lambda point: (point[0], -point[1])):
        if value > highest:
            kept.append(card)
            highest = value
    return kept


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
        return Limit(name, sign, value if unit or abs(value) > 1 else value * 100)  # 0.90 and 90 mean the same
    if name not in MEASURES:
        names = [*MEASURES, *metrics]
        raise UserError(f"a budget has no measure called {name!r}.{did_you_mean(name, names)}{known(names)}")
    units = MEASURES[name].units
    if unit.lower() not in units:
        examples = ", ".join(f"{name}{sign}{digits}{written}" for written in _written_units(name))
        raise UserError(
            f"{name}{sign}{digits}{unit} has {'no' if not unit else 'an unknown'} unit; write one of: {examples}"
        )
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


def _told(card: Card, names: dict[int, str] | None = None) -> str:
    """The chosen card's numbers in words: accuracy 88.4 ± 0.7 at 22.1 MB and 2.2 ms."""
    value, error = score_of(card)
    spread = f" ± {error:.1f}" if error is not None else ""
    costs = [show(name, cost) for name in ("size", "latency") if (cost := number(card, name)) is not None]
    told = f"{card['headline']} {value:.1f}{spread}" + (f" at {' and '.join(costs)}" if costs else "")
    return f"{names[id(card)]} ({told})" if names else told


def _score(card: Card) -> float:
    return number(card, "score") or 0.0


def _size(card: Card) -> float:
    size = number(card, "size")
    return float("inf") if size is None else size
