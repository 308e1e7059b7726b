"""Cards as files: one a piece of work, or many packed into one file; and the budget that they were compared under."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from smallbert.errors import RunError, UserError
from smallbert.machine.files import write_json, write_text
from smallbert.measuring.budget import Budget, Limit
from smallbert.measuring.card import RESULT, Card, card_key, check_card, ordered
from smallbert.recipes.recipe import Recipe

PACK = "cards.jsonl"
COMPARISON = "compare.json"


def card_path(folder: Path | str, key: str) -> Path:
    """Where the card of this work is, or would be."""
    return Path(folder) / f"{key}.json"


def save_card(card: Card, folder: Path | str) -> Path:
    """Check a card and write it under the name of its work; an earlier card of the same work is replaced."""
    check_card(card)
    path = card_path(folder, card_key(**card))
    write_json(path, ordered(card))
    return path


def load_card(path: Path | str) -> Card:
    """Read and check one card."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a card: {error}; make it again or move it away") from error
    return _read_card(text, str(path))


def _read_card(text: str, where: str) -> Card:
    """A card with its recipe as today's would say it: a setting that came later has its default, a place none."""
    try:
        card = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(card, dict):
            raise ValueError("it holds no names and values")
        for later in ("reads", "model_bytes", "right"):  # which older cards do not have
            card.setdefault(later, None)
        check_card(card)
        with suppress(UserError):  # a recipe that cannot be read any more stays as it is
            card["recipe"] = Recipe(card["recipe"]).key()
    except (ValueError, TypeError, AttributeError, RunError) as error:
        raise UserError(f"{where} cannot be read as a card: {error}; make it again or move it away") from error
    return dict(card)


def card_beside(folder: Path | str) -> tuple[Card | None, list[str]]:
    """The card in a model's folder, if there is one; and what is wrong with one that cannot be read."""
    path = Path(folder) / "card.json"
    try:
        return (load_card(path) if path.is_file() else None), []
    except UserError as error:
        return None, [str(error)]


def load_cards(folder: Path | str, kinds: tuple[str, ...] = (RESULT,)) -> list[Card]:
    """Read every card below a folder, sorted by file name; machinery checks only if their kind is asked for."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder of cards {str(folder)!r}; write the --out of compare, study or eval")
    found: dict[str, Card] = {}
    single = (load_card(path) for path in sorted(folder.rglob("*.json")) if _looks_like_card(path))
    packed = (card for path in sorted(folder.rglob(PACK)) for card in load_pack(path).values())
    for card in (*single, *packed):
        if card["kind"] in kinds:
            found.setdefault(card_key(**card), card)  # a saved model carries a copy of its card
    return list(found.values())


def pack_cards(folder: Path | str) -> Path:
    """Put all single cards below folder/cards into one file, one a line, beside those that are there already."""
    folder = Path(folder)
    path, single = folder / PACK, sorted((folder / "cards").glob("*.json"))
    if single:
        cards = load_pack(path) | {card_key(**card): card for card in map(load_card, single)}
        lines = (json.dumps(cards[key], ensure_ascii=False, allow_nan=False) for key in sorted(cards))
        write_text(path, "".join(f"{line}\n" for line in lines))
        for one in single:  # and no card that came meanwhile
            one.unlink()
        with suppress(OSError):
            (folder / "cards").rmdir()
    return path


def load_pack(path: Path | str) -> dict[str, Card]:
    """The cards of a packed file by the keys of their work; none where there is no such file."""
    path = Path(path)
    if not path.is_file():
        return {}
    found = {}
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        card = _read_card(line, f"{path}, line {place},")
        found[card_key(**card)] = card
    return found


def keep_budget(folder: Path | str, budget: Budget | None) -> None:
    """Write down beside the cards of a comparison which budget it was given, so that its page need not be told."""
    path, limits = Path(folder) / COMPARISON, None if budget is None else [limit._asdict() for limit in budget.limits]
    known, told = _read_comparison(path), {"compare": 1, "budget": limits}
    if known != told and (known or not path.exists()):  # not over somebody else's
        write_json(path, told)


def kept_budget(folder: Path | str) -> Budget | None:
    """The budget that the latest comparison in this folder was given, if there was one."""
    path = Path(folder) / COMPARISON
    try:
        limits = _read_comparison(path).get("budget")
        return None if limits is None else Budget(tuple(Limit(**limit) for limit in limits))
    except TypeError as error:
        raise UserError(f"{path} cannot be read ({error}); delete it, and give the report a --budget") from error


def _read_comparison(path: Path) -> dict[str, Any]:
    """What a comparison has written down; empty where none has, or where it is somebody else's file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("compare") == 1 else {}


def _looks_like_card(path: Path) -> bool:
    """Whether a JSON file starts as a card does; tokenizers and configs lie in the same folders."""
    with path.open("rb") as file:
        return re.match(rb'\s*\{\s*"card"\s*:', file.read(64)) is not None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")
