"""WordPiece vocabularies trained on texts, and a second one beside a model's own.

The pieces of a second vocabulary have the last rows of the word table, in their order; its special pieces, which come
first, are those of the first vocabulary and have none of their own:

    encoder.second   [PAD] [UNK] [CLS] [SEP] [MASK]  a    b    ##c        rows of a table of 103
                     0     100   101   102   103     100  101  102
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
LETTERS = 1000  # no more different ones
MORE = "##"  # before a piece that goes on with a word
REMEMBERED = 1_000_000  # words whose pieces are kept while a text is cut


def special_pieces(tokenizer: Any) -> list[str]:
    """The special pieces in their new order: those with a small number keep it, the others fill the gaps."""
    names = {kind: getattr(tokenizer, f"{kind}_token", None) or name for kind, name in SPECIAL.items()}
    vocabulary, places = tokenizer.get_vocab(), dict.fromkeys(range(len(names)), "")
    late = []
    for name in names.values():
        number = vocabulary.get(name, len(names))
        if number < len(names) and not places[number]:
            places[number] = name
        else:
            late.append(name)
    return [places[place] or late.pop(0) for place in places]


def train_pieces(texts: Callable[[], Iterator[str]], size: int, tokenizer: Any) -> list[str]:
    """The pieces by their numbers, special ones first, the same for the same texts; case is as the tokenizer has it.

    The library numbers letters within words as it happens to meet them, and ties between merges follow numbers; so
    those letters are numbered here, among the special pieces.
    """
    from tokenizers import trainers

    special = special_pieces(tokenizer)
    made, seen = _word_pieces(special, tokenizer), Counter[str]()
    for text in texts():
        seen.update(made.normalizer.normalize_str(text))
    most = min(LETTERS, (size - len(special)) // 2)
    letters = sorted(sorted(c for c in seen if not c.isspace()), key=seen.__getitem__, reverse=True)[:most]
    goes_on = [
        c for c in letters if len(made.pre_tokenizer.pre_tokenize_str(made.normalizer.normalize_str(c + c))) == 1
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*special, *(MORE + letter for letter in sorted(goes_on))],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix=MORE,
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    found = made.get_vocab()
    return sorted(found, key=lambda piece: found[piece])


def make_tokenizer(pieces: list[str], old: Any) -> Any:
    """A tokenizer of these pieces, with the special ones, the case and the limits of an old one."""
    from tokenizers import processors

    names = {f"{kind}_token": getattr(old, f"{kind}_token", None) or name for kind, name in SPECIAL.items()}
    made, begin, end = _word_pieces(pieces, old), names["cls_token"], names["sep_token"]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(begin, pieces.index(begin)), (end, pieces.index(end))],
    )
    return wrapped(made, old, **names)


def wrapped(made: Any, old: Any, **names: Any) -> Any:
    """A tokenizer as transformers has it, with the limits of an old one."""
    from transformers import PreTrainedTokenizerFast

    limits = {"model_max_length": old.model_max_length, "model_input_names": list(old.model_input_names)}
    return PreTrainedTokenizerFast(tokenizer_object=made, **limits, **names)


def _word_pieces(pieces: list[str], old: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    known, unknown = {piece: number for number, piece in enumerate(pieces)}, old.unk_token or SPECIAL["unk"]
    made = Tokenizer(models.WordPiece(known, unk_token=unknown, max_input_chars_per_word=100))
    normalizer = old.backend_tokenizer.normalizer
    lower = normalizer is not None and normalizer.normalize_str("A").endswith("a")
    made.normalizer = normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix=MORE)
    return made


def old_rows(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    """For each piece the rows that an old vocabulary has for the same letters, where it knows them."""
    known = tokenizer.get_vocab()

    def cut(piece: str) -> list[int]:
        found = tokenizer(piece.removeprefix(MORE), add_special_tokens=False)["input_ids"]
        return [number for number in found if number != tokenizer.unk_token_id]

    return [[known[piece]] if piece in known else cut(piece) for piece in pieces]


def mean_rows(values: Tensor, rows: list[list[int]]) -> Tensor:
    """The mean of these rows for each piece; of all of them where there are none."""
    every = values.mean(0)
    return torch.stack([values[some].mean(0) if some else every for some in rows])


def second_rows(encoder: Any) -> list[int]:
    """Which row of the word table each piece of the second vocabulary has."""
    known, behind = encoder.tokenizer.get_vocab(), encoder.backbone.config.vocab_size - len(encoder.second)
    unknown = encoder.tokenizer.unk_token_id or 0
    special = [known.get(piece, unknown) for piece in encoder.second[: len(SPECIAL)]]
    return special + [behind + number for number in range(len(SPECIAL), len(encoder.second))]


def second_cutter(encoder: Any) -> Callable[[str], list[int]]:
    """What cuts a word by the second vocabulary, into rows of the word table."""
    made, rows = _word_pieces(encoder.second, encoder.tokenizer), second_rows(encoder)

    @lru_cache(REMEMBERED)
    def cut(word: str) -> list[int]:
        return [rows[number] for number in made.encode(word, add_special_tokens=False).ids]

    return cut


def same_pieces(one: Any, other: Any) -> list[tuple[int, int]]:
    """The rows of two encoders that stand for the same piece; each vocabulary is held against the one most like it."""
    theirs = _vocabularies(other)
    pairs: dict[int, int] = {}
    for mine in _vocabularies(one):
        like = max(theirs, key=lambda known: len(known.keys() & mine.keys()))
        pairs |= {row: like[piece] for piece, row in mine.items() if piece in like}
    return sorted(pairs.items())


def _vocabularies(encoder: Any) -> list[dict[str, int]]:
    """The row of each piece, for each vocabulary of an encoder."""
    if encoder.tokenizer is None:
        return [{}]
    second = [dict(zip(encoder.second, second_rows(encoder), strict=True))] if encoder.second else []
    return [encoder.tokenizer.get_vocab(), *second]
