"""Abdaoui et al. 2020: the word pieces that the texts at hand need, and no others."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.small_vocabulary import NUMBERED, change_table, check_padding, check_table
from smallbert.model.anatomy import anatomy, words
from smallbert.model.trimming import all_of, check_tokenizer, count_pieces, must_stay, trimmed
from smallbert.model.words import WORDS, WordHead, fill_rows
from smallbert.texts.corpus import check_text, fingerprint_of_text, lines_of


class TrimVocabulary(Method):
    """Keep the word pieces that occur in a text file or in the task's texts, and remove all others.

    least: how often a piece has to occur to be kept. Special pieces and letters are always kept (WordLevel: special
        ones only), and so are the pieces from which BPE joins a kept one
    text: plain text file, or folder of them, in which pieces are counted; None: the task's training texts
    size: most pieces to keep, special ones and letters included, the most frequent first; None: no limit

    Texts of kept pieces are split as before and scored the same, bit by bit; other words are split into smaller pieces,
    down to letters, which are all kept. finetune | trim_vocabulary gives a smaller model that needs no training.
    """

    least: int = 1
    text: str | None = None
    size: int | None = None

    def check(self) -> None:
        """Numbers from one."""
        if min(self.least, 1 if self.size is None else self.size) < 1:
            raise UserError(
                f"{self.name}: least and size are whole numbers from 1, as in {self.name}(least=2, size=8000)"
            )

    def reads(self, marks: Collection[str] = ()) -> str:
        """The text."""
        return f" of {fingerprint_of_text(self.text, self.name)}" if self.text is not None else ""

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Which rows stay, as bits, and the new numbers of special ones; an estimate knows at most how many.

        {"size": 3, "of": 8, "covered": {"train": 1.0, "dev": 0.98}, "kept": "a4", "numbers": {"5": 2}}
                                                                     rows 0, 2 and 5 of 8
        """
        check_table(encoder, self.name)
        if encoder.second:
            raise UserError(
                f"{self.name}: this model has a second vocabulary; put {self.name} before add_vocabulary, or write "
                "small_vocabulary, which keeps the second alone"
            )
        if self.text is not None:
            check_text(self.text, self.name)
        if encoder.tokenizer is not None:
            check_tokenizer(encoder.tokenizer, self.name)
        rows = len(words(encoder.backbone).weight)  # type: ignore[arg-type]
        if encoder.device.type == "meta":
            if self.size is None and task is None:
                raise LookupError("how many pieces are kept depends on the texts")
            return {"size": min(self.size or rows, rows), "of": rows, "covered": {}, "kept": "", "numbers": {}}
        lines = self.text is not None or task is None  # which lines_of refuses
        read = lines_of(self.text, None, self.name) if lines else _texts(task.split("train"))
        counts = count_pieces(encoder.tokenizer, read)
        known, chosen = encoder.tokenizer.get_vocab(), self._choose(encoder, counts)
        kept = sorted(known[piece] for piece in chosen)
        if kept[-1] >= rows:
            raise UserError(
                f"{self.name}: the tokenizer has a piece with index {kept[-1]}, but the model has only {rows} word "
                "embeddings; give it the tokenizer that it was trained with"
            )
        new = {number: place for place, number in enumerate(kept)}
        numbers = {str(number): new.get(number) for number in sorted(_named(encoder.backbone.config))}
        check_padding(encoder, numbers, self.name)
        looked = {self.text or "train": counts}
        if task is not None and "dev" in task.splits:
            looked["dev"] = count_pieces(encoder.tokenizer, _texts(task.split("dev")))
        covered = {
            name: sum(found[piece] for piece in chosen) / max(found.total(), 1) for name, found in looked.items()
        }
        bits = np.packbits(np.isin(np.arange(rows), kept)).tobytes().hex()
        return {"size": len(kept), "of": rows, "covered": covered, "kept": bits, "numbers": numbers}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A smaller table, where zeros are held if they were, and a head for words as small."""
        held: set[str] = getattr(words(encoder.backbone), "held_facts", set())
        change_table(encoder, plan["size"], plan["numbers"])
        if held:
            words(encoder.backbone).held_facts = set(held)  # type: ignore[assignment]
        if not plan["kept"]:
            encoder.tokenizer = None  # an estimate knows no more than that it is another one
        if WORDS in encoder.heads:
            encoder.heads[WORDS] = WordHead(encoder.backbone).to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The tokenizer without the others, and the rows that stay."""
        rows = np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(plan["kept"]), np.uint8))).tolist()
        pieces = {number: piece for piece, number in before.tokenizer.get_vocab().items()}
        encoder.tokenizer = trimmed(before.tokenizer, [pieces[row] for row in rows], self.name)
        fill_rows(encoder, before, lambda values: values[rows])

    def attach(self, phase: Any) -> None:
        """Say how many stayed."""
        plan = next(entry["plan"] for entry in reversed(phase.encoder.history) if entry["step"] == str(self))
        shares = " and ".join(f"{100 * share:.4g} % of all tokens of {name}" for name, share in plan["covered"].items())
        phase.notes.append(f"{self.name} kept {plan['size']:,} of {plan['of']:,} word pieces, which are {shares}")

    def _choose(self, encoder: Any, counts: Any) -> set[str]:
        """The pieces that stay; a piece brings those it is joined from."""
        config, row = encoder.backbone.config, anatomy(encoder.backbone)
        numbers = _named(config)
        if row.offset:  # positions count from the number of the padding, so that it has to stay where it is
            numbers |= set(range(config.pad_token_id + 1))
        known, whole = encoder.tokenizer.get_vocab(), all_of(encoder.tokenizer)
        chosen = must_stay(encoder.tokenizer, numbers)
        if self.size is not None and len(chosen) > self.size:
            raise UserError(
                f"{self.name}: {len(chosen)} pieces, the special ones and letters, are always kept; write "
                f"size={len(chosen)} or more, or small_vocabulary"
            )
        often = [piece for piece, count in counts.items() if count >= self.least]
        for piece in sorted(often, key=lambda piece: (-counts[piece], known[piece])):
            more = set() if piece in chosen else whole(piece) - chosen
            if self.size is not None and len(chosen) + len(more) > self.size:
                break
            chosen |= more
        return chosen


def _named(config: Any) -> set[int]:
    """The numbers of special pieces that a config names."""
    found = (getattr(config, name, None) for name in NUMBERED)
    return {number for number in found if number is not None}


def _texts(rows: Any) -> Iterator[str | list[str]]:
    """All texts of some rows as they are, since their spaces may count."""
    yield from rows.texts
    yield from rows.pairs or ()
