"""New texts from old ones: words replaced by what a masked LM or the word embedding has near, hidden, or left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from smallbert.errors import UserError
from smallbert.model.anatomy import words
from smallbert.model.heads import IGNORE
from smallbert.model.words import WORDS
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, Tokens, longest_input

Text = str | list[str]
Change = Callable[[list[str], list[int], list[list[str]], float, np.random.Generator], list[str]]
WAYS = ("masked", "nearest", "mask", "delete", "grams")
CANDIDATES = 15
LONGEST_GRAM = 5
TOKENS = 8192  # of a batch for guessing
STOP = frozenset(  # what carries grammar, not content; other languages have all their words replaced
    "a about after all also am an and any are as at be because been before being but by can could did do does for from "
    "had has have he her here him his how i if in into is it its just me more most my no nor not of off on or other "
    "our out over own s she should so some such t than that the their them then there these they this those through to "
    "too under until up very was we were what when where which while who whom why will with would you your".split()
)


def taken_apart(text: Text) -> list[str]:
    """A text as words and what is between them; joined, they are the text again.

    >>> taken_apart("A fine film.")
    ['A', ' ', 'fine', ' ', 'film', '.']
    """
    return list(text) if isinstance(text, list) else re.findall(r"\w+|\s+|[^\w\s]+", text)


def put_together(parts: list[str], like: Text) -> Text:
    """Parts as a text of the kind that they came from."""
    return [part for part in parts if part] if isinstance(like, list) else " ".join("".join(parts).split())


def _shown(parts: list[str], like: Text) -> str:
    return (" " if isinstance(like, list) else "").join(parts)


def may_change(parts: list[str]) -> list[int]:
    """Where the words are that carry content: all letters, and no stop words."""
    return [place for place, part in enumerate(parts) if part.isalpha() and part.lower() not in STOP]


def _replaced(parts: list[str], places: list[int], near: list[list[str]], share: float, draw: Any) -> list[str]:
    made = list(parts)
    for place, found in zip(places, near, strict=True):
        if draw.random() < share and found:
            made[place] = found[draw.integers(len(found))]
    return made


def _hidden(mask: str) -> Change:
    return lambda parts, places, near, share, draw: _replaced(parts, places, [[mask]] * len(places), share, draw)


def _deleted(parts: list[str], places: list[int], near: list[list[str]], share: float, draw: Any) -> list[str]:
    gone = {place for place in places if draw.random() < share}
    return [part for place, part in enumerate(parts) if place not in gone]


def _gram(parts: list[str], places: list[int], near: list[list[str]], share: float, draw: Any) -> list[str]:
    """With a chance of `share`, one to five words in a row instead of the whole."""
    inside = [place for place, part in enumerate(parts) if part.strip()]
    if draw.random() >= share or not inside:
        return parts
    count = min(int(draw.integers(1, LONGEST_GRAM + 1)), len(inside))
    first = int(draw.integers(len(inside) - count + 1))
    return parts[inside[first] : inside[first + count - 1] + 1]


def changes(ways: dict[str, float], tokenizer: Any) -> list[tuple[Change, float]]:
    """What is done to each copy, in order: words are replaced first, since what could stand there is known by then."""
    if "mask" in ways and getattr(tokenizer, "mask_token", None) is None:
        raise UserError("augment: this model's tokenizer has no mask token, so ways='mask' cannot be used")
    table: dict[str, Change] = {"masked": _replaced, "nearest": _replaced, "delete": _deleted, "grams": _gram}
    if "mask" in ways:
        table["mask"] = _hidden(tokenizer.mask_token)
    return [(table[way], ways[way]) for way in WAYS if way in ways]


def copies_of(
    text: Text, near: list[list[str]], how: list[tuple[Change, float]], count: int, draw: np.random.Generator
) -> list[Text]:
    """Up to so many different texts made of one, none of them that one; a short text has fewer."""
    found: list[Text] = []
    parts = taken_apart(text)
    same = put_together(parts, text)
    for _ in range(2 * count):
        made = parts
        for change, share in how:
            made = change(made, may_change(made), near, share, draw)
        new = put_together(made, text)
        if new and new != same and new not in found:
            found.append(new)
        if len(found) == count:
            break
    return found


class Guesser:
    """Finds words that could stand where another stands, with one model."""

    def __init__(self, model: Any):
        """Know which words are one piece of the model's vocabulary."""
        self.model, self.tokenizer = model, model.tokenizer
        numbers = range(len(self.tokenizer))
        texts = [self.tokenizer.decode([number]).strip() for number in numbers]
        letters = [number for number in numbers if texts[number].isalpha()]
        pieces = self._pieces([texts[number] for number in letters])
        whole = [number for number, piece in zip(letters, pieces, strict=True) if piece == [number]]
        self.numbers = torch.tensor(whole, device=model.device)
        self.names = [texts[number] for number in whole]
        self.known = set(whole)
        table: Any = words(model.backbone)
        with torch.no_grad():
            self.table = table(torch.arange(table.num_embeddings, device=model.device)).float()
        self.units = functional.normalize(self.table[self.numbers], dim=-1)
        self.seen: dict[str, list[str]] = {}

    def _pieces(self, texts: list[str]) -> list[list[int]]:
        """The numbers of each word as it is cut inside a text."""
        return self.tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"] if texts else []

    @torch.no_grad()
    def nearest(self, wanted: Iterable[str]) -> dict[str, list[str]]:
        """The nearest words to each by the cosine of their embeddings; a word of several pieces is their mean."""
        new = [word for word in dict.fromkeys(wanted) if word not in self.seen]
        for start in range(0, len(new), 256):
            some = new[start : start + 256]
            pieces = [piece or [0] for piece in self._pieces(some)]
            mine = torch.stack([self.table[torch.tensor(piece, device=self.table.device)].mean(0) for piece in pieces])
            near = functional.normalize(mine, dim=-1) @ self.units.T
            for word, row in zip(some, self._best(near), strict=True):
                self.seen[word] = self._others(word, row)
        return self.seen

    @torch.no_grad()
    def guesses(self, texts: list[Text]) -> list[list[list[str]]]:
        """For each word that may change, what a masked LM would put there; for a word of several pieces, the nearest.

        The model reads the text twice, hidden word first, so that it knows what stood there (as TinyBERT does).
        """
        parted = [taken_apart(text) for text in texts]
        spots = [(row, place) for row, parts in enumerate(parted) for place in may_change(parts)]
        names = [parted[row][place] for row, place in spots]
        single = [piece[0] in self.known and len(piece) == 1 for piece in self._pieces(names)]
        found: dict[tuple[int, int], list[str]] = {}
        asked = [spot for spot, one in zip(spots, single, strict=True) if one]
        for spot, row in zip(asked, self._read(texts, asked), strict=True):
            if row is not None:
                found[spot] = self._others(parted[spot[0]][spot[1]], row)
        rest = [spot for spot in spots if spot not in found]
        near = self.nearest(parted[row][place] for row, place in rest)
        found |= {(row, place): near[parted[row][place]] for row, place in rest}
        return [[found[row, place] for place in may_change(parts)] for row, parts in enumerate(parted)]

    def _read(self, texts: list[Text], spots: list[tuple[int, int]]) -> list[list[int] | None]:
        """The best words at each spot, as places in `names`; None where the text is too long to show it."""
        if not spots:
            return []
        first, second = [], []
        for row, place in spots:
            parts = taken_apart(texts[row])
            second.append(_shown(parts, texts[row]))
            parts[place] = self.tokenizer.mask_token
            first.append(_shown(parts, texts[row]))
        most = longest_input(self.model)
        encoded = self.tokenizer(first, second, truncation=True, max_length=most, return_token_type_ids=True)
        ids = [np.asarray(row, np.int32) for row in encoded["input_ids"]]
        types = np.concatenate([np.asarray(row, np.uint8) for row in encoded["token_type_ids"]])
        lengths = np.array([len(row) for row in ids])
        tokens = Tokens(np.concatenate(ids), types, np.concatenate([[0], np.cumsum(lengths)]))
        labels = np.where(tokens.ids == self.tokenizer.mask_token_id, 0, IGNORE).astype(np.int64)
        stream = Stream({STUDENT: tokens}, labels, "words")
        best: list[list[int] | None] = [None] * len(spots)
        shown = np.array([bool((row == self.tokenizer.mask_token_id).sum() == 1) for row in ids])
        index = np.flatnonzero(shown)
        for some in (index[batch] for batch in sort_into_batches(lengths[index], TOKENS)):
            batch = make_batch(stream, some, Layout(False, 0)).to(self.model.device)
            scores = self.model(batch, WORDS)[: len(some), self.numbers]
            for place, found in zip(some, self._best(scores), strict=True):
                best[place] = found
        return best

    def _best(self, scores: torch.Tensor) -> list[list[int]]:
        """The best few of each row, and one more, since the word itself may be among them."""
        return scores.topk(min(CANDIDATES + 1, len(self.names))).indices.tolist()

    def _others(self, word: str, places: list[int]) -> list[str]:
        return [self.names[one] for one in places if self.names[one].lower() != word.lower()][:CANDIDATES]
