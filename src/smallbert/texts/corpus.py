"""Plain text as a stream of blocks for reading: lines joined up to a length, never over the border of two documents."""

from __future__ import annotations

import codecs
import hashlib
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.model.heads import IGNORE, UNKNOWN
from smallbert.progress import note
from smallbert.texts.data import STUDENT, Stream, Tokens
from smallbert.wheels import sha256_of

CHUNK = 1000  # lines tokenised at once
BEGINNING = 2**16  # bytes of a file, by which it is known as text
BROKEN = re.compile("[\0\udc80-\udcff]")  # NUL, and how Python writes bytes that are no UTF-8
HIDDEN, SWAPPED = 0.8, 0.1  # of the chosen tokens, how many are hidden, and how many become another word
_GOLDEN, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def text_files(text: str, who: str) -> list[Path]:
    """The files that a setting names: one, or all in a folder, by name."""
    path = Path(text).expanduser()
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    found = files if path.is_dir() else [path]
    if not found:
        raise UserError(f"{who}: the folder {text!r} has no file in it; give a plain text file, or a folder of them")
    if not all(file.is_file() for file in found):
        raise UserError(f"{who}: there is no file or folder {text!r}; give a plain text file, or a folder of them")
    return found


def text_lines(files: list[Path], say: Callable[[int, int], None] | None = None) -> Iterator[str]:
    """Every line of the files, without its end; an empty one ends each file. Lines that are no text are noted."""
    total, done = sum(file.stat().st_size for file in files), 0
    lines, broken, first = 0, 0, ""
    for file in files:
        with file.open("rb") as opened:
            for number, line in enumerate(opened):
                done, lines = done + len(line), lines + 1
                if say is not None and number % CHUNK == 0:
                    say(done, total)
                text, is_whole = _decode(line, "utf-8-sig" if not number else "utf-8")
                if not is_whole:
                    broken, first = broken + 1, first or f"line {number + 1:,} of {file}"
                yield text.rstrip("\r\n")
        yield ""
    if say is not None:
        say(total, total)
    if broken:
        note(f"{broken:,} of {lines:,} lines of text hold bytes that are not UTF-8, or NUL; {first} is the first")


def _decode(line: bytes, coding: str) -> tuple[str, bool]:
    """A line as text, and whether all of it is text."""
    try:
        return line.decode(coding), b"\0" not in line
    except UnicodeDecodeError:
        return line.decode(coding, errors="replace"), False


def check_text(text: str, who: str) -> None:
    """Refuse a file or folder in which there is nothing to read, and any file whose beginning is no text."""
    empty = True
    for file in text_files(text, who):
        lines, is_all = _beginning(file)
        empty = empty and is_all and not lines
        if 10 * sum(BROKEN.search(line) is not None for line in lines) > len(lines):
            aside = "" if file == Path(text).expanduser() else ", or take it out of the folder"
            raise UserError(f"{who}: {file} is not plain text in UTF-8; convert it first{aside}")
    if empty:
        raise UserError(f"{who}: there is no text in {text}")


def _beginning(file: Path) -> tuple[list[str], bool]:
    """The first lines of a file that are not empty, and whether these are all."""
    with file.open("rb") as opened:
        read = opened.read(BEGINNING)
    is_all = len(read) < BEGINNING
    # What is cut in the middle of a character is left out, unless the file itself ends there.
    text = codecs.utf_8_decode(read.removeprefix(codecs.BOM_UTF8), "surrogateescape", is_all)[0]
    return [line for line in text.split("\n") if line.strip()], is_all


def lines_of(text: str | None, task: Any, who: str, say: Callable[[int, int], None] | None = None) -> Iterator[str]:
    """Every line of the text that a setting names, or of a task's training texts; an empty line ends a document."""
    if text is None and task is None:
        raise UserError(f"{who} learns from texts: give --task, or {who}(text='file.txt')")
    empty = True
    for line in _task_lines(task.split("train")) if text is None else text_lines(text_files(text, who), say):
        empty = empty and not line.strip()
        yield line
    if empty:
        raise UserError(f"{who}: there is no text in {text or 'this task'}")


def _task_lines(rows: Any) -> Iterator[str]:
    for row in zip(rows.texts, *([rows.pairs] if rows.pairs else ()), strict=True):
        yield from (" ".join(one.split() if isinstance(one, str) else one) for one in row)
        yield ""


def fingerprint_of_text(text: str, who: str) -> str:
    """A short hash of all the text there is, so that a record says what was read."""
    digest = hashlib.sha256()
    for file in text_files(text, who):
        digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens, ready to be masked: which tokens begin a word, and which are no words at all."""

    tokens: Tokens
    begins: np.ndarray  # one a token: whether a word begins here
    special: np.ndarray  # one a number of the vocabulary: whether it is [CLS], [PAD], …
    mask: int


class Mixing:
    """Cuts each word of a text by a second vocabulary, with a chance of `share`, whole: by its place and the seed."""

    def __init__(self, cut: Callable[[str], list[int]], rows: int, share: float, seed: int):
        """Nothing cut yet; `rows` are those of both vocabularies."""
        self.cut, self.rows, self.share, self.seed = cut, rows, share, seed
        self.words, self.chosen = 0, 0

    def __call__(self, line: str, encoding: Any) -> tuple[list[int], list[bool]]:
        """The tokens of a line as the first vocabulary cuts it, with some words in pieces of the second instead."""
        (old, begins), spans = _begins(encoding), encoding.offsets
        starts = [place for place, begin in enumerate(begins) if begin]
        chosen = _uniform(self.seed, self.words + np.arange(len(starts)), 4) < self.share
        self.words, self.chosen = self.words + len(starts), self.chosen + int(chosen.sum())
        ids: list[int] = []
        firsts: list[bool] = []
        for start, stop, choose in zip(starts, [*starts[1:], len(old)], chosen, strict=True):
            new = self.cut(line[spans[start][0] : spans[stop - 1][1]]) if choose else []
            ids += new or old[start:stop]
            firsts += [True] + [False] * ((len(new) or stop - start) - 1)
        return ids, firsts


def read_blocks(tokenizer: Any, lines: Iterator[str], length: int, mixing: Mixing | None = None) -> Blocks:
    """Cut text into blocks of at most `length` tokens: whole lines where they fit, longer ones between two words.

    An empty line ends a document; no block holds text of two.
    """
    if tokenizer is None or tokenizer.mask_token_id is None:
        raise UserError("masked words need a tokenizer with a mask token; this model's has none")
    marks = tokenizer("a", return_special_tokens_mask=True)
    shown = marks["special_tokens_mask"].index(0)
    front, back = marks["input_ids"][:shown], marks["input_ids"][len(marks["special_tokens_mask"]) - _trailing(marks) :]
    ids, begins, offsets = array("i"), array("b"), array("q", [0])
    block, firsts, room = array("i"), array("b"), length - len(front) - len(back)

    def close() -> None:
        if block:
            ids.extend([*front, *block, *back])
            begins.extend([1] * len(front) + [1, *firsts[1:]] + [1] * len(back))
            offsets.append(len(ids))
            del block[:], firsts[:]

    for line in _tokenised(tokenizer, map(str.strip, lines), mixing or (lambda text, encoding: _begins(encoding))):
        if line is None:
            close()
            continue
        rest, first = line
        while rest:
            if len(block) + len(rest) <= room:
                block.extend(rest)
                firsts.extend(first)
                break
            if not block:
                cut = next((place for place in range(room, 0, -1) if first[place]), room)
                block.extend(rest[:cut])
                firsts.extend(first[:cut])
                rest, first = rest[cut:], first[cut:]
            close()
    close()
    if len(offsets) == 1:
        raise UserError("this model's tokenizer finds no words in the text")
    special = np.zeros(max(len(tokenizer), max(ids) + 1, mixing.rows if mixing else 0), dtype=bool)
    special[[number for number in tokenizer.all_special_ids if number is not None]] = True
    tokens = Tokens(np.array(ids, np.int32), np.zeros(len(ids), np.uint8), np.array(offsets, np.int64))
    return Blocks(tokens, np.array(begins, bool), special, tokenizer.mask_token_id)


def masked_stream(blocks: Blocks, share: float, whole_words: bool, every: bool) -> Stream:
    """The blocks as a stream that hides other words at every step; with `every`, the rest count too, unlabelled."""

    def draw(index: np.ndarray, seed: int) -> Stream:
        return _masked(blocks, np.asarray(index), seed, share, whole_words, every)

    return Stream({STUDENT: blocks.tokens}, None, "words", draw=draw)


def _masked(blocks: Blocks, index: np.ndarray, seed: int, share: float, whole_words: bool, every: bool) -> Stream:
    """Some blocks with a share of their words hidden: a function of the seed and of each token's own place alone.

    Of the chosen, 80 % become the mask token, 10 % another word, and 10 % stay; all are labels.
    """
    places, lengths = blocks.tokens.places(index), blocks.tokens.lengths[index]
    ids = blocks.tokens.ids[places]
    row = np.repeat(np.arange(len(index)), lengths)
    free = np.flatnonzero(~blocks.special[ids])
    chosen = free[_choose(row[free], places[free], blocks.begins[places[free]] | ~np.bool_(whole_words), share, seed)]
    labels = np.full(len(ids), UNKNOWN if every else IGNORE, np.int64)
    labels[chosen] = ids[chosen]
    ordinary = np.flatnonzero(~blocks.special)
    what, other = (_uniform(seed, places[chosen], salt) for salt in (2, 3))
    swapped = ordinary[(other * len(ordinary)).astype(np.int64)]
    ids = ids.copy()
    ids[chosen] = np.where(what < HIDDEN, blocks.mask, np.where(what < HIDDEN + SWAPPED, swapped, ids[chosen]))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Stream({STUDENT: Tokens(ids, np.zeros(len(ids), np.uint8), offsets)}, labels, "words")


def _choose(row: np.ndarray, places: np.ndarray, begins: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Which tokens are hidden: words in random order, until their pieces are nearest to the share of their row.

    The first is hidden however long it is, so that every row with a word has something to guess.
    """
    if not len(row):
        return np.zeros(0, dtype=bool)
    begins = begins | (np.diff(row, prepend=-1) > 0)
    word = np.cumsum(begins) - 1
    size, first = np.bincount(word), np.flatnonzero(begins)
    order = np.lexsort((_uniform(seed, places[first], 1), row[first]))  # of words, those of one row together
    before = np.cumsum(size[order]) - size[order]
    total = np.bincount(row)
    begun = np.cumsum(total) - total
    rows = row[first][order]
    wanted = np.maximum(1, share * total)[rows]
    taken = np.zeros(len(first), dtype=bool)
    sooner = before - begun[rows]  # pieces of the row's words that come first
    taken[order] = (sooner == 0) | (2 * sooner + size[order] <= 2 * wanted)
    return taken[word]


def _uniform(seed: int, places: np.ndarray, salt: int) -> np.ndarray:
    """A number from 0 to below 1 for each place, the same whatever else is asked for (SplitMix64)."""
    start = np.random.SeedSequence([seed & 0xFFFFFFFF, salt]).generate_state(1, np.uint64)[0]
    mixed = start + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _tokenised(
    tokenizer: Any, lines: Iterator[str], cut: Callable[[str, Any], tuple[list[int], list[bool]]]
) -> Iterator[tuple[list[int], list[bool]] | None]:
    """Each line's tokens and which of them begin a word; None for an empty line."""
    some: list[str] = []

    def flush() -> Iterator[tuple[list[int], list[bool]] | None]:
        made = iter(tokenizer([line for line in some if line], **settings).encodings if any(some) else [])
        for line in some:
            yield cut(line, next(made)) if line else None
        some.clear()

    settings = {"add_special_tokens": False, "truncation": False, "verbose": False}
    for line in lines:
        some.append(line)
        if len(some) == CHUNK:
            yield from flush()
    yield from flush()


def _begins(encoding: Any) -> tuple[list[int], list[bool]]:
    known = encoding.word_ids
    return encoding.ids, [place == 0 or word is None or word != known[place - 1] for place, word in enumerate(known)]


def _trailing(marks: Any) -> int:
    mask = marks["special_tokens_mask"]
    return next(number for number, special in enumerate(reversed(mask)) if not special)
