"""Zhao et al. 2019: a vocabulary of a few thousand word pieces, trained on the texts at hand, in place of many."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.anatomy import anatomy, replace_module, words
from smallbert.model.vocabulary import (
    SPECIAL,
    make_tokenizer,
    mean_rows,
    old_rows,
    second_rows,
    special_pieces,
    train_pieces,
)
from smallbert.model.words import drop_word_head
from smallbert.texts.corpus import check_text, fingerprint_of_text, lines_of

LOOKED, HIDDEN = 2000, 0.5  # texts looked at for unknown tokens, and the share of those that is too many
NUMBERED = [f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep", "mask", "unk")]  # in a config


class SmallVocabulary(Method):
    """Train a small WordPiece vocabulary on a text file or on the task's texts, in place of the old one.

    size: most word pieces, special ones included
    text: plain text file, or folder of them, to learn the pieces from; None: the task's training texts

    A new piece starts as the mean of the old pieces of the same letters. If add_vocabulary has given the model a second
    vocabulary, that one is kept, with the embeddings it has learned.
    """

    size: int = 4928
    text: str | None = None

    def check(self) -> None:
        """Room for more than the special pieces."""
        if self.size <= 2 * len(SPECIAL):
            raise UserError(f"{self.name}: size is a number of word pieces above {2 * len(SPECIAL)}, not {self.size}")

    def reads(self, marks: Collection[str] = ()) -> str:
        """The text."""
        return f" of {fingerprint_of_text(self.text, self.name)}" if self.text is not None else ""

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """The pieces, and the new numbers of special ones; without texts to look at, only how many there may be."""
        if encoder.second and (self.text is not None or (any(encoder.second) and self.size < len(encoder.second))):
            raise UserError(
                f"small_vocabulary keeps the second vocabulary that this model has learned, of {len(encoder.second)} "
                f"pieces; write small_vocabulary({len(encoder.second)}), without a text"
            )
        pieces = encoder.second or self.learn(encoder, task)
        if not any(pieces):
            return {"size": len(pieces) or self.size, "pieces": [], "numbers": {}}
        check_table(encoder, self.name)
        old, special = encoder.tokenizer.get_vocab(), special_pieces(encoder.tokenizer)
        numbers = {str(old[name]): place for place, name in enumerate(special) if name in old}
        check_padding(encoder, numbers, self.name)
        return {"size": len(pieces), "pieces": list(pieces), "numbers": numbers}

    def learn(self, encoder: Any, task: Any) -> list[str]:
        """The pieces of a new vocabulary; none where there is no text to learn from, and none for an estimate."""
        check_table(encoder, self.name)
        if self.text is not None:
            check_text(self.text, self.name)
        if (self.text is None and task is None) or encoder.device.type == "meta":
            return []
        return train_pieces(lambda: lines_of(self.text, task, self.name), self.size, encoder.tokenizer)

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A smaller table, and a config that knows the new numbers."""
        change_table(encoder, plan["size"], plan["numbers"])
        encoder.second = []
        if not plan["pieces"]:
            encoder.tokenizer = None  # an estimate knows no more than that it is another one
        drop_word_head(encoder)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The new tokenizer, and for each of its pieces the row it has, or the mean of the old rows of its letters."""
        need_pieces(plan, self.name)
        pieces, old = plan["pieces"], before.tokenizer
        encoder.tokenizer = make_tokenizer(pieces, old)
        rows = [[row] for row in second_rows(before)] if before.second else old_rows(old, pieces)
        source, table = (words(one.backbone).weight for one in (before, encoder))
        with torch.no_grad():
            table.copy_(mean_rows(source, rows))  # type: ignore[operator, arg-type]

    def attach(self, phase: Any) -> None:
        """Say how many pieces there are and how much of the task they cannot write; refuse what hides most of it."""
        tokenizer, size = phase.encoder.tokenizer, len(words(phase.encoder.backbone).weight)  # type: ignore[arg-type]
        if tokenizer is None:
            return  # an estimate
        splits = () if phase.task is None else [name for name in ("train", "dev") if name in phase.task.splits]
        shares = {name: unknown_share(tokenizer, phase.task.split(name).texts[:LOOKED]) for name in splits}
        told = " and ".join(f"{share:.1%} of the tokens of {name}" for name, share in shares.items())
        if max(shares.values(), default=0.0) > HIDDEN:
            raise UserError(
                f"{self.name}: the {size:,} pieces learned from {self.text or 'the task'} leave {told} unknown; give a "
                "text that is like the task's, or more of it"
            )
        phase.notes.append(f"{self.name} has {size:,} word pieces{f', and leaves {told} unknown' if told else ''}")


def unknown_share(tokenizer: Any, texts: Sequence[Any]) -> float:
    """Which share of the tokens of some texts a tokenizer has no piece for."""
    read = [text if isinstance(text, str) else " ".join(text) for text in texts]
    numbers = [number for one in tokenizer(read, add_special_tokens=False)["input_ids"] for number in one]
    return numbers.count(tokenizer.unk_token_id) / max(len(numbers), 1)


def put_table(encoder: Any, size: int, padding: int | None) -> None:
    """An empty word table of so many rows in place of the old one."""
    width: Any = words(encoder.backbone).embedding_dim
    table = nn.Embedding(size, width, padding_idx=padding, device=encoder.device)
    replace_module(encoder.backbone, anatomy(encoder.backbone).words, table)
    encoder.backbone.config.vocab_size = size


def change_table(encoder: Any, size: int, numbers: dict[str, int | None]) -> None:
    """An empty word table, and a config that knows the new numbers by the old ones."""
    old: Any = words(encoder.backbone)
    config = encoder.backbone.config
    for name in NUMBERED:
        number = getattr(config, name, None)
        if str(number) in numbers:
            setattr(config, name, numbers[str(number)])
    pad = numbers.get(str(old.padding_idx), old.padding_idx)
    put_table(encoder, size, pad if (pad or 0) < size else None)


def check_padding(encoder: Any, numbers: dict[str, Any], name: str) -> None:
    """Refuse to move the padding of a model that counts positions from it."""
    pad = getattr(encoder.backbone.config, "pad_token_id", None)
    if anatomy(encoder.backbone).offset and numbers.get(str(pad), pad) != pad:
        raise UserError(f"{name}: this model counts positions from its padding id, which cannot be changed")


def need_pieces(plan: dict[str, Any], name: str) -> None:
    """Refuse to go on with a vocabulary that no text was there for."""
    if not plan["pieces"]:
        raise UserError(f"{name} learns from texts: give --task, or {name}(text='file.txt')")


def check_table(encoder: Any, name: str) -> None:
    """Refuse word embeddings in few bits, and a model that comes without a tokenizer."""
    if not isinstance(words(encoder.backbone), nn.Embedding):
        raise UserError(f"{name} needs plain word embeddings; put quantize after it")
    if encoder.tokenizer is None and encoder.device.type != "meta":
        raise UserError(f"{name}: this model has no tokenizer to learn from")
