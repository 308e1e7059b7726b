"""Masked-LM training from plain text: the encoder guesses hidden words, with no label but the text itself."""

from collections.abc import Collection
from typing import Any, ClassVar, Literal

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.methods.train import Train
from smallbert.model.vocabulary import second_cutter
from smallbert.model.words import WORDS, WordHead, put_word_head
from smallbert.texts.corpus import Mixing, check_text, fingerprint_of_text, lines_of, masked_stream, read_blocks
from smallbert.texts.data import longest_input


class _Corpus(Method):
    """A text file, or a folder of them; the task's training texts if not given.

    text: plain text file, or folder of them, in which an empty line ends a document; None: the task's training texts
    """

    text: str | None = None


class Pretrain(Train, _Corpus):
    """Train by masked language modelling on a plain text file, a folder of them, or the task's texts.

    epochs: passes over the blocks of the text; 0.5 is half of one
    batch: blocks per step, over all processes together
    cache: not used: masks change at every step, so teachers run at every step
    lr: highest learning rate, reached after the warm-up and lowered in a straight line to 0
    steps: steps to train, instead of `epochs`; None: as many as `epochs` say
    share: share of a block's tokens, special ones apart, that are to be predicted: of these 80 % become the mask
        token, 10 % a random word piece, and 10 % stay as they are
    whole_words: whether all pieces of a word are masked together
    length: most tokens of a block, special ones included; never more than the model reads
    tokens: where words are scored: 'masked', where they are to be predicted; 'all', at every token, so that a teacher
        can teach at all of them
    keep_head: whether the masked-LM head is kept when the phase ends, as distill and augment may need it; one kept
        earlier is kept in any case
    mixed: probability that a word is split by the second vocabulary, from 0 to 1; None: 0.5 where there is one
    """

    stage: ClassVar[int] = 5
    guesses: ClassVar[bool] = True

    epochs: float = 1.0
    lr: float = 1e-4
    steps: int | None = None
    share: float = 0.15
    whole_words: bool = False
    length: int = 128
    tokens: Literal["masked", "all"] = "masked"
    keep_head: bool = False
    mixed: float | None = None

    def check(self) -> None:
        """What can be hidden and read."""
        super().check()
        if self.cache != type(self).cache:
            raise UserError(
                "pretrain: masks change at every step, so teachers' outputs cannot be cached; leave cache out"
            )
        if not 0 < self.share < 1:
            raise UserError(f"pretrain: share is the share of words to mask, between 0 and 1, not {self.share}")
        if not 0 <= (self.mixed or 0) <= 1:
            raise UserError(f"pretrain: mixed is the share of words that a second vocabulary splits, not {self.mixed}")
        for name in ("length", "steps"):
            if (value := getattr(self, name)) is not None and value < (least := 8 if name == "length" else 1):
                raise UserError(f"pretrain: {name} must be at least {least}, not {value}")

    def fits(self, phase: Any, steps: int | None) -> None:
        """There is text, and a model that reads it word by word."""
        super().fits(phase, steps)
        if self.text is not None:
            check_text(self.text, self.name)
        if not phase.encoder.second and self.mixed:
            raise UserError("pretrain: mixed words need a second vocabulary; put add_vocabulary(4928) before pretrain")
        if not phase.encoder.order and getattr(phase.encoder.backbone.config, "reads", "token") != "token":
            raise UserError(
                "pretrain: an lstm that reads whole texts cannot predict masked words; put pretrain before it"
            )

    def data(self, phase: Any) -> Any:
        """Blocks of the text, masked anew at every step."""
        encoder, mixing = phase.encoder, self._mixing(phase)
        say = lambda done, total: phase.say("reading text", done, total, "")  # noqa: E731
        lines = lines_of(self.text, phase.task, self.name, say)
        blocks = read_blocks(encoder.tokenizer, lines, min(self.length, longest_input(encoder)), mixing)
        phase.notes.append(f"read {len(blocks.tokens.ids):,} tokens of text in {len(blocks.tokens):,} blocks")
        if mixing is not None:
            phase.notes.append(f"the second vocabulary splits {mixing.chosen:,} of {mixing.words:,} words")
        return masked_stream(blocks, self.share, self.whole_words, self.tokens == "all")

    def _mixing(self, phase: Any) -> Mixing | None:
        encoder = phase.encoder
        share = 0.5 if self.mixed is None else self.mixed
        rows = encoder.backbone.config.vocab_size
        return Mixing(second_cutter(encoder), rows, share, phase.seed) if encoder.second and share else None

    def reads(self, marks: Collection[str] = ()) -> str:
        """The text."""
        return f" of {fingerprint_of_text(self.text, self.name)}" if self.text is not None else ""

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """What text it was, and whether a new head stays."""
        new = self.keep_head and WORDS not in encoder.heads
        own = getattr(task, "fingerprint", "")
        return {"text": fingerprint_of_text(self.text, self.name) if self.text is not None else own, "head": new}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """A head that stays is a part of the encoder."""
        if plan["head"]:
            encoder.heads[WORDS] = WordHead(encoder.backbone).to(encoder.device)

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """The head of the model file, or a new one."""
        if plan["head"]:
            put_word_head(encoder, seed)

    def attach(self, phase: Any) -> None:
        """Read through the masked-LM head; heads of tasks rest."""
        heads = phase.encoder.heads
        if WORDS not in heads:
            phase.notes.append(f"the masked-LM head is {put_word_head(phase.encoder, phase.seed)}")
            heads[WORDS].passing = True
        phase.head = WORDS
        resting = [head for name, head in heads.items() if name != WORDS] + [phase.encoder.pooler]
        phase.frozen += [parameter for head in resting if head is not None for parameter in head.parameters()]

    def settle(self, phase: Any) -> None:
        """A head that was only there for this phase goes."""
        if phase.encoder.heads[WORDS].passing:
            del phase.encoder.heads[WORDS]
