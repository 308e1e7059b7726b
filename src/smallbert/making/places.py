"""Where work is kept: the finished model, its card, and what is needed to go on after a kill."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from smallbert.errors import UserError
from smallbert.machine.files import is_full_disk
from smallbert.measuring.card import Card, card_key
from smallbert.measuring.shelf import load_card


class Place(NamedTuple):
    """Where one piece of work is kept: the finished model, its card, and what is needed to go on after a kill."""

    model: Path
    card: Path
    work: Path


def find_place(out: Path | str, key: str, alone: bool = False) -> Place:
    """Where the work of a key is kept below a folder of many; `alone`, the folder is the model itself."""
    out = Path(out)
    if alone:
        whole = out.resolve()
        return Place(out, out / "card.json", whole.parent / f".{whole.name}.work")
    return Place(out / "models" / key, out / "cards" / f"{key}.json", out / "work" / key)


def words_of_all(out: Path | str) -> Path:
    """Where runs of one folder find the scores that teachers gave, as long as any of them is made."""
    return Path(out) / "work" / "said"


def clear_work(out: Path | str) -> None:
    """Drop what the runs of one folder shared while they were made; what others have begun there stays for them."""
    shutil.rmtree(words_of_all(out), ignore_errors=True)
    remove_empty(Path(out) / "work")


def remove_empty(folder: Path) -> None:
    """Remove a folder in which nothing is left."""
    with suppress(OSError):
        folder.rmdir()


def is_begun(out: Path | str) -> bool:
    """Whether something was left below a folder of many that a run may take over, so that it alone can be refused."""
    return any((Path(out) / left).exists() for left in ("work", "models"))


def known_card(place: Place, key: str, alone: bool) -> Card | None:
    """The card of this very work if it is finished; a folder that holds something else is not written over."""
    if place.card.is_file():
        card = load_card(place.card)
        if card_key(**card) == key and (alone or not _is_torn(place.model)):
            return card
    if alone and place.model.exists() and (not place.model.is_dir() or any(place.model.iterdir())):
        raise UserError(f"{place.model} already holds something else; give another --out, or move it away first")
    return None


def _is_torn(model: Path) -> bool:
    """Whether a model's folder is there and the model is not."""
    return model.is_dir() and not any((model / name).is_file() for name in ("encoder.json", "config.json"))


def check_writable(out: Path | str, place: Place) -> None:
    """Refuse a place that cannot be written to before anything is trained for it."""
    try:
        place.work.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=place.work) as probe:
            probe.write(b"1")
    except OSError as error:
        if is_full_disk(error):
            raise
        raise UserError(f"--out {out} cannot be written to: {error.strerror or error}") from None
