"""What verbs tell of the models they made: a table, a line each, and why runs did not go well."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smallbert.cli.progress import Progress
    from smallbert.measuring.card import Card

BANNER = "MACHINERY CHECK: a tiny random model on toy data. These numbers mean nothing."


def tell_all(say: Progress, cards: list[Card], tiny: bool = False) -> None:
    """Show the table of all."""
    from smallbert.report.table import render_table

    say.show(*([BANNER] if tiny else []), render_table(cards))


def tell_one(say: Progress, card: Card, done: int, total: int, with_seed: bool) -> None:
    """Show that one of them is made, in one line."""
    from smallbert.report.table import in_one_line

    say.show(f"{done} of {total}: {in_one_line(card, with_seed)}")


def tell_troubles(say: Progress, cards: list[Card]) -> None:
    """Say why runs did not go well, and where they are not the whole story."""
    from smallbert.measuring.collapse import UNTRAINED
    from smallbert.measuring.groups import short_recipes
    from smallbert.measuring.pruned import note_zeros

    named = [(card["preset"] or recipe, card) for card, recipe in zip(cards, short_recipes(cards), strict=True)]
    for why in dict.fromkeys(f"{card['status']}: {name}: {card['why']}" for name, card in named if card["why"]):
        say.line(why)

    notes = {id(card): (card["trained"] or {}).get("notes", []) for card in cards}
    told = notes[id(cards[0])] if len(cards) == 1 else [note for card in cards for note in note_zeros(card)]
    told += [f"{name}: {UNTRAINED}" for name, card in named if len(cards) > 1 and UNTRAINED in notes[id(card)]]
    for note in dict.fromkeys(told):
        say.line(note)
