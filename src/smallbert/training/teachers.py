"""Teachers of a phase: frozen encoders that look at each batch once a step, however many terms learn from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smallbert.errors import UserError
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder, Seen, load
from smallbert.model.words import WORDS
from smallbert.recipes.registry import did_you_mean
from smallbert.sources import find_model, folder_read
from smallbert.texts.data import STUDENT, Stream, longest_input, tokenizer_key
from smallbert.training.precision import rounded_copy

if TYPE_CHECKING:
    from smallbert.features.taught import Taught
    from smallbert.training.phase import Phase

NOT_SPANS = "a teacher with another tokenizer can teach whole texts and words only, not spans"


@dataclass
class Teacher:
    """A frozen encoder and all that the methods of a phase want to know from it."""

    encoder: Encoder
    scores: bool = False
    wanted: dict[str, set[int]] = field(default_factory=dict)  # see walk.tap; "first": hidden states of first tokens
    kept: Taught | None = None  # what it says of every text, where batches bring that along
    rounded: Encoder | None = None  # the same in half precision, where that is what looks at batches

    @property
    def looking(self) -> Encoder:
        """The encoder that looks at batches."""
        return self.rounded or self.encoder


class Teachers(dict[str, Teacher]):
    """Every teacher of a phase by name: a mark, "latest" for the last trained without one, or a saved folder."""

    def __init__(self, phase: Phase):
        """None yet."""
        super().__init__()
        self.phase = phase

    def find(self, name: str) -> Teacher:
        """A teacher, made ready the first time it is named."""
        if name not in self:
            self.expect(name)
            found = self.phase.marks[name].copy() if name in self.phase.marks else load(name)
            self[name] = Teacher(found.to(self.phase.device).eval().requires_grad_(False))
        return self[name]

    def expect(self, name: str) -> Encoder | None:
        """A teacher as it is known so far, maybe without weights; None for a mark of which only the name is known.

        What will not be there is refused.
        """
        if name in self.phase.marks:
            return self.phase.marks[name]
        if name == "latest":
            heads = [entry["plan"]["labels"] for entry in self.phase.encoder.history if "labels" in entry["plan"]]
            came, now = (", ".join(heads[place]) for place in (0, -1)) if heads else ("", "")
            other = f" (the classes that the model came with, {came}, are not the task's, {now}, in that order)"
            raise UserError(
                f"this phase needs a trained teacher, and nothing was trained yet{other if came != now else ''}: start "
                "from a fine-tuned model, put finetune before it, or write teacher='folder'"
            )
        marks = [mark for mark in self.phase.marks if mark != "latest"]
        if near := did_you_mean(name, marks):
            raise UserError(f"no mark is called {name!r}.{near} A teacher in a folder is written with its path")
        if not name.strip():
            raise UserError(f"a teacher is 'latest', a mark, a folder or a name on the hub, not {name!r}")
        try:
            find_model(name)
        except UserError as error:
            if Path(name).name != name:  # a path, which no mark was meant by
                raise
            there = f"the marks before this phase are {', '.join(marks)}" if marks else "nothing before it is marked"
            raise UserError(f"{error}. If {name!r} should be a mark: {there}") from None
        return _shape_of(name, folder_read(name))

    def ask(self, name: str, scores: bool = False, wanted: Mapping[str, Iterable[int]] | None = None) -> Encoder:
        """Say, in `attach`, what a loss will want to know from a teacher; one that cuts texts otherwise gets a view."""
        teacher = self.find(name)
        teacher.scores |= scores
        for role, places in (wanted or {}).items():
            teacher.wanted.setdefault(role, set()).update(places)
        self._add_view(name, teacher.encoder.tokenizer)
        stream = self.phase.stream
        if stream is not None and stream.kind == "words" and teacher.encoder.second != self.phase.encoder.second:
            raise UserError(
                "a teacher of masked words needs the student's vocabularies, and one of the two has a second "
                "vocabulary that the other lacks; mark the teacher after add_vocabulary"
            )
        if stream is not None:
            reads = longest_input(teacher.encoder)
            longest = max(stream.views.get(view_of(name), stream.views[STUDENT]).lengths)
            if longest > reads:
                raise UserError(
                    f"the teacher reads at most {reads} tokens, but a text of the task has {longest}; "
                    f"give --length {reads}"
                )
        return teacher.encoder

    def _add_view(self, name: str, tokenizer: Any) -> None:
        """Let a teacher read the same texts through its own tokenizer; one that cuts them alike shares the view."""
        stream, view = self.phase.stream, view_of(name)
        if stream is None or view in stream.views or same_tokens(tokenizer, self.phase.encoder.tokenizer):
            return
        if stream.kind not in ("classify", "regress", "tag"):
            raise UserError(NOT_SPANS)
        theirs = self.phase.tokenise(tokenizer).views[STUDENT]
        if len(theirs) != len(stream):
            raise UserError(
                "a teacher with another tokenizer reads the task's own texts, but this phase brings others; "
                "take a teacher with the student's tokenizer"
            )
        stream.views[view] = theirs

    def get_ready(self) -> None:
        """Round, once, the weights of all who are going to look at every step of a phase in half precision."""
        for teacher in self.values():
            if self.phase.half and teacher.kept is None:
                teacher.rounded = rounded_copy(teacher.encoder)

    def look(self, name: str, batch: Batch) -> Seen:
        """What a teacher makes of a batch, only what was asked for: in evaluation mode, without gradients.

        A batch that brings along what was kept of it needs no look.
        """
        teacher, head = self[name], WORDS if self.phase.head == WORDS else HEAD
        if teacher.kept is not None and teacher.kept.came_with(batch):
            said = teacher.kept.said_of(batch)
            return Seen(said.get("scores"), teacher.kept.taps(said))
        firsts = teacher.wanted.get("first", set())
        wanted = {role: places for role, places in teacher.wanted.items() if role != "first"}
        if firsts:
            wanted["hidden"] = firsts | wanted.get("hidden", set())
        known = teacher.rounded is not None  # each weight in the precision it is used in
        with torch.no_grad(), torch.autocast(self.phase.device.type, enabled=False) if known else nullcontext():
            seen = teacher.looking.look(batch, wanted, teacher.scores, head)
            if firsts:
                seen.taps["first"] = {place: batch.first(seen.taps["hidden"][place]) for place in firsts}
        return seen

    def views(self, stream: Stream) -> list[str]:
        """In which views batches are laid out: not for a teacher who need not look and says one thing a text."""
        unread = {view_of(name) for name, one in self.items() if one.kept is not None and one.kept.view == STUDENT}
        return [view for view in stream.views if view not in unread]


@lru_cache(maxsize=8)
def _shape_of(name: str, read: str) -> Encoder:
    """What a folder holds, without weights; read once as long as its files are the same."""
    return load(name).to("meta")


def view_of(teacher: str) -> str:
    """The name of the stream's view that a teacher reads where it has a tokenizer of its own."""
    return f"teacher {teacher}"


def same_tokens(one: Any, other: Any) -> bool:
    """Whether two tokenizers cut every text into the same numbers."""
    return one is other or tokenizer_key(one) == tokenizer_key(other)
