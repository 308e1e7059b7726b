"""Which model to take: the best within a budget, what else is worth a look, and those that nothing beats."""

from collections.abc import Sequence
from typing import NamedTuple

from smallbert.errors import UserError
from smallbert.measuring.budget import ALIASES, Budget, show
from smallbert.measuring.card import Card, number
from smallbert.measuring.groups import group_cards, score_of, short_names, standard_error, status_of
from smallbert.measuring.outcomes import are_paired, is_clearly_better

GAINS = {"smaller": "size", "faster": "latency"}
PLAINLY = 1.1  # times a size or time; a smaller gain does not make another model worth a look
ONE_SIZE = 1.02  # times a size or time; a few bytes of another config file decide nothing, nor does noise
NEAR, IN_SIGHT = 1.0, 2.0  # standard errors: as good as the best; worth a look beside it


class Choice(NamedTuple):
    """The card to take (None if none can be) and one sentence that says which and why."""

    card: Card | None
    sentence: str


def best(cards: Sequence[Card], budget: Budget | None = None) -> Choice:
    """The best headline score within the budget, or the smallest, then the fastest, of those that may be as good.

    Those are within one standard error of it, and no model is better than they are by more than chance. The sentence
    names the best of the others that are near, and smaller or faster.

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
        return Choice(None, f"No model is{within}; the nearest is {names[id(near)]} ({_told(near)}), but {broken}.")
    top = max(fitting, key=lambda card: (_score(card), -_size(card)))
    chosen = _choose(fitting, top)
    sentence = f"{names[id(chosen)]} is the best{within}: {_told(chosen)}{_lead_of(top, chosen, names)}"
    sentence += f"{_other_than(top, chosen, fitting, names)}."
    if status_of(chosen) != "ok" and chosen["runs"]["ok"] < chosen["runs"]["n"]:
        sentence += f" Of its runs {status_of(chosen)}."
    return Choice(chosen, sentence)


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


def _choose(cards: Sequence[Card], top: Card) -> Card:
    """The smallest of those that may be as good as the top score, and of one size the fastest."""
    level = [card for card in cards if _is_within(NEAR, card, top) and _leader(card, cards) is None]
    smallest = min(map(_size, level))
    of_one_size = [card for card in level if _size(card) <= smallest * ONE_SIZE]
    return min(of_one_size, key=lambda card: (number(card, "latency") or float("inf"), -_score(card), _size(card)))


def _leader(card: Card, cards: Sequence[Card]) -> Card | None:
    """The best of the models that are clearly better than this one, if there are any."""
    ahead = [other for other in cards if _score(other) > _score(card) and is_clearly_better(other, card)]
    return max(ahead, key=_score, default=None)


def _is_within(errors: float, card: Card, other: Card) -> bool:
    """Whether a score is no further behind another than so many standard errors of that one."""
    return _score(card) >= _score(other) - errors * standard_error(other)


def _lead_of(top: Card, chosen: Card, names: dict[int, str]) -> str:
    """What has the top score, where that was not chosen, and why not."""
    if chosen is top:
        return ""
    said = f"; {names[id(top)]} has {_score(top):.1f}"
    if _score(top) > _score(chosen):
        said += f", which is within one standard error ({standard_error(top):.1f})"
    gains = _gains(chosen, top)
    return f"{said}, and {names[id(chosen)]} is {' and '.join(gains)}" if gains else said


def _other_than(top: Card, chosen: Card, cards: Sequence[Card], names: dict[int, str]) -> str:
    """The best of the models in sight that are plainly smaller or faster, and how far it is behind."""
    in_sight = [card for card in cards if card is not top and card is not chosen and _is_within(IN_SIGHT, card, chosen)]
    in_sight.sort(key=_score, reverse=True)
    for card in in_sight:
        if gains := _gains(card, chosen, PLAINLY):
            leader, said = _leader(card, cards), f"; {names[id(card)]} ({_told(card)}) is"
            if leader is None:
                return f"{said} {_level_with(chosen, card)}, and {' and '.join(gains)}"
            behind = f"behind {names[id(leader)]} by more than"
            behind += f" chance on {_read_by(leader, card)}" if are_paired(leader, card) else " one standard error"
            return f"{said} {' and '.join(gains)}, but {behind}"
    return ""


def _level_with(chosen: Card, card: Card) -> str:
    """What is known of two scores that may be equal."""
    if not are_paired(chosen, card):
        return "within one standard error" + " of its own" * (not _is_within(NEAR, card, chosen))
    return f"no worse as far as {_read_by(chosen, card)} can tell"


def _read_by(one: Card, other: Card) -> str:
    """What two rows are compared on: 872 dev examples and 3 seeds."""
    seeds = max(row["runs"]["ok"] for row in (one, other))
    examples = f"{one['scores'][one['headline']]['n']:,} {one['split']} examples"
    return f"{examples} and {seeds} seeds" if seeds > 1 else examples


def _gains(card: Card, other: Card, times: float = ONE_SIZE) -> list[str]:
    """In what a model is more than so many times less than another: ["smaller", "faster"]."""
    both = {word: (number(card, name), number(other, name)) for word, name in GAINS.items()}
    return [word for word, (mine, its) in both.items() if mine is not None and its is not None and mine * times < its]


def _told(card: Card) -> str:
    """A card's numbers in words: accuracy 88.4 ± 0.7 at 22.1 MB and 2.2 ms."""
    value, error = score_of(card)
    spread = f" ± {error:.1f}" if error is not None else ""
    costs = [show(name, cost) for name in ("size", "latency") if (cost := number(card, name)) is not None]
    return f"{card['headline']} {value:.1f}{spread}" + (f" at {' and '.join(costs)}" if costs else "")


def _score(card: Card) -> float:
    return number(card, "score") or 0.0


def _size(card: Card) -> float:
    size = number(card, "size")
    return float("inf") if size is None else size
