"""A tokenizer with fewer pieces, which cuts every text whose pieces all stay as it did before.

WordPiece   takes the longest match first. A piece that goes makes no match longer, so the one that was taken still is.
BPE         joins the pair that was learned first. A piece brings the joins that lead to it, so they happen as before.
Unigram     takes the likeliest way through all pieces. That way stays, and what goes was on others only; the least
            likely piece stays too, since letters that are not known count as less likely than that one.
WordLevel   knows whole words.

Letters always stay, and so do pieces with a letter that is no piece of its own: what goes can be spelled by what
stays. Only a word of WordLevel that goes is unknown from then on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.model.vocabulary import wrapped

KNOWN = ("WordPiece", "BPE", "Unigram", "WordLevel")
NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
CHUNK = 1000  # texts tokenised at once
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # what stands for a byte of a letter that is not known


def count_pieces(tokenizer: Any, texts: Iterable[str | list[str]]) -> Counter[str]:
    """How often each piece occurs in texts; one may come as a list of words."""
    pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
    found, rest = np.zeros(max(pieces) + 1, np.int64), iter(texts)
    settings = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
    while some := list(islice(rest, CHUNK)):
        for split in (False, True):
            if alike := [text for text in some if isinstance(text, list) == split]:
                cut = tokenizer(alike, is_split_into_words=split, **settings).encodings
                numbers = np.fromiter(chain.from_iterable(one.ids for one in cut), np.int64)
                found += np.bincount(numbers, minlength=len(found))
    return Counter({pieces[number]: int(found[number]) for number in np.flatnonzero(found).tolist()})


def check_tokenizer(tokenizer: Any, who: str) -> None:
    """Refuse a tokenizer whose pieces cannot be told apart here."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{who} cannot take pieces from a {type(tokenizer).__name__}, which has no tokenizer.json; save the model "
            "with a fast tokenizer, or write small_vocabulary"
        )
    if (kind := _parts(tokenizer)["model"]["type"]) not in KNOWN:
        raise UserError(f"{who} supports {', '.join(KNOWN)}, but this tokenizer is a {kind}; write small_vocabulary")


def must_stay(tokenizer: Any, numbers: Iterable[int] = ()) -> set[str]:
    """The pieces that stay whatever is read: special and added ones, letters, and those of these numbers."""
    parts, known, numbers = _parts(tokenizer), tokenizer.get_vocab(), set(numbers)
    model = parts["model"]
    named = {added["content"] for added in parts["added_tokens"]} | {model.get("unk_token")}
    named.update(*_marks(parts["post_processor"]), tokenizer.all_special_tokens)
    if model["type"] == "Unigram":
        named.add(min(model["vocab"], key=lambda entry: entry[1])[0])
        numbers.add(model["unk_id"])
    named |= {piece for piece, number in known.items() if number in numbers}
    if model["type"] != "WordLevel":
        named |= {piece for piece in known if _is_letter(piece, model) or not known.keys() >= _letters(piece, model)}
    return named & known.keys()


def all_of(tokenizer: Any) -> Callable[[str], set[str]]:
    """What gives a piece with all those that must be there for it to come about."""
    model = _parts(tokenizer)["model"]
    if model["type"] != "BPE":
        return lambda piece: {piece}
    ranks = {pair: rank for rank, pair in enumerate(_merges(model))}

    def joined(piece: str) -> set[str]:
        row, made = list(_letters_in_order(piece, model)), {piece}
        while pairs := [(ranks[pair], place) for place, pair in enumerate(pairwise(row)) if pair in ranks]:
            _, place = min(pairs)
            row[place : place + 2] = [_join(row[place], row[place + 1], model)]
            made.add(row[place])
        return made | set(row)

    return joined


def trimmed(tokenizer: Any, pieces: list[str], who: str) -> Any:
    """The same tokenizer with these pieces alone, numbered in this order."""
    from tokenizers import Tokenizer

    new, parts = {piece: number for number, piece in enumerate(pieces)}, _parts(tokenizer)
    model, post = parts["model"], parts["post_processor"]
    if model["type"] == "Unigram":
        unknown = model["unk_id"]
        model["unk_id"] = None if unknown is None else new[model["vocab"][unknown][0]]
        model["vocab"] = [entry for entry in model["vocab"] if entry[0] in new]
    else:
        model["vocab"] = {piece: new[piece] for piece in pieces if piece in model["vocab"]}
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in _merges(model) if {*pair, _join(*pair, model)} <= new.keys()]
    for added in parts["added_tokens"]:
        added["id"] = new[added["content"]]
    _renumber(post, new)
    made = Tokenizer.from_str(json.dumps({**parts, "truncation": None, "padding": None}))
    if made.get_vocab(with_added_tokens=True) != new:
        raise UserError(f"{who}: this tokenizer's ids have gaps, which cannot be closed; write small_vocabulary")
    names = {name: getattr(tokenizer, name) for name in ("padding_side", "truncation_side")}
    if more := list(getattr(tokenizer, "extra_special_tokens", ())):
        names["extra_special_tokens"] = more
    special = {name: getattr(tokenizer, name, None) for name in NAMED}
    return wrapped(made, tokenizer, **names, **{name: token for name, token in special.items() if token is not None})


def _parts(tokenizer: Any) -> dict[str, Any]:
    """All that a fast tokenizer is, as tokenizer.json has it."""
    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs in the order in which they are joined; older files have them as "a b"."""
    return [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]


def _join(first: str, second: str, model: dict[str, Any]) -> str:
    return first + second[len(model.get("continuing_subword_prefix") or "") :]


def _letters_in_order(piece: str, model: dict[str, Any]) -> Iterator[str]:
    """The letters of a piece as they stand in it: "ab" -> "a", "##b"."""
    more, end = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    goes_on, ends = bool(more) and piece.startswith(more), bool(end) and piece.endswith(end)
    inner = piece[len(more) * goes_on : len(piece) - len(end) * ends]
    for place, letter in enumerate(inner):
        yield more * (place > 0 or goes_on) + letter + end * (ends and place == len(inner) - 1)


def _letters(piece: str, model: dict[str, Any]) -> set[str]:
    return set(_letters_in_order(piece, model))


def _is_letter(piece: str, model: dict[str, Any]) -> bool:
    return _letters(piece, model) == {piece} or bool(BYTE.fullmatch(piece))


def _marks(post: dict[str, Any] | None) -> Iterator[list[str]]:
    """The special pieces that are put around texts."""
    for one in (post or {}).get("processors", []):
        yield from _marks(one)
    yield from (special["tokens"] for special in (post or {}).get("special_tokens", {}).values())
    yield from ([post[name][0]] for name in ("cls", "sep") if post and name in post)


def _renumber(post: dict[str, Any] | None, new: dict[str, int]) -> None:
    """The numbers of the special pieces that are put around texts."""
    for one in (post or {}).get("processors", []):
        _renumber(one, new)
    for special in (post or {}).get("special_tokens", {}).values():
        special["ids"] = [new[piece] for piece in special["tokens"]]
    for name in ("cls", "sep"):
        if post and name in post:
            post[name][1] = new[post[name][0]]
