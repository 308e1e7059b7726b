"""Alignment with a teacher's insides: hidden states, attention, relations of queries, keys and values, and more.

    align('hidden', transform='linear') + align('attention') + distill + train(epochs=3)

Each `align` is one loss term; a phase may have several beside `distill`, and a teacher runs once a step for all. Its
value is the mean over features (for kl, ce and cosine the sum), heads, chosen tokens of a text, texts and pairs of
layers, so its weight means the same for any length, width, depth, batch and layout. Padding is never counted.
"""

from collections.abc import Collection
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.methods import Method
from smallbert.model.batch import Batch
from smallbert.model.cpu import faster
from smallbert.model.encoder import Encoder
from smallbert.model.replace import head_count
from smallbert.model.walk import Taps
from smallbert.sources import folder_read
from smallbert.texts.data import STUDENT
from smallbert.training.alignment import (
    OF_BOTH,
    ON_CHANCES,
    Side,
    distance,
    each_other,
    linear_map,
    moments,
    relation,
    rows_apart,
)
from smallbert.training.comparable import (
    check_has_layers,
    check_heads,
    check_inside,
    check_parts,
    check_tokens,
    check_widths,
    check_windows,
)
from smallbert.training.pairs import MANY, Pairs, pair_layers
from smallbert.training.schedule import Schedule

VECTORS = ("hidden", "first", "embeddings")  # compared feature by feature
INSIDE = ("attention", "scores", "relations")  # what layers do, and not what comes out of them
STATES = ("hidden", "first", "moments", "gram")
ROWS = ("attention", "scores", "relations", "gram")  # one row over the text's tokens for each token
TRANSFORMS = {"gram": ("none", "l2", "norm"), **dict.fromkeys(VECTORS, ("none", "linear", "linear_each", "l2", "norm"))}
STAIRS = ("progressive", "stacked")  # schedules by which layers come one after the other
EDGE = 1e-9  # shares of a phase are compared with steps / total, which is rounded


class Align(Method):
    """Learn from the inside of a teacher: bring hidden states, attention or relations closer to the teacher's.

    what: 'hidden', outputs of layers; 'first', the same for each text's first token; 'embeddings', the input of the
        first layer; 'moments', mean and variance of each token's features; 'gram', products of all pairs of tokens of
        a text, divided by the width; 'attention', its probabilities; 'scores', these before the softmax (MPNet and
        DeBERTa: minus each row's mean); 'relations', softmax of the products of queries, of keys and of values (MiniLM)
    layers: which of the teacher's L layers teaches layer m of the student's M: 'uniform', m L / M, which student copies
        too; 'whole', the same, and embedding output by embedding output; 'skip', as uniform, but without the student's
        last; 'first', m; 'last', L - M + m; or pairs, {3: 6, -1: -1} or [[3, 6], [-1, -1]]. Layers are numbered from 1;
        -1 is the last, and 0 the embedding output, which has no attention, scores or relations.
    tokens: which tokens of a text count: 'all'; 'first'; 'masked', those to predict in pretrain; 'first_piece',
        those that begin a word, where words have labels
    transform: before comparing: 'none'; 'l2', vectors to length 1; 'norm', to mean 0, variance 1; 'linear', the
        student's by a learned map to the teacher's width, one for all layers; 'linear_each', by one for each pair
    metric: how far apart: 'mse'; 'cosine', 1 - cos; 'kl', KL(teacher || student) of softmaxes; 'ce', the same with the
        teacher's entropy added; 'l1', the mean absolute difference
    weight: weight of this term in the phase's loss
    schedule: the weight over time: 'constant'; 'progressive', one pair of layers after another, each with all of it;
        'stacked', the same, but earlier pairs stay, in equal parts; 'fade_in' from 0, 'fade_out' to 0, linearly
    teacher: who teaches: 'latest' (the last encoder trained on the task without a teacher; before one, the given model
        if it was made for the task), a name given by mark(), a model folder, or a name on the hub
    share: share of the phase's steps, from its beginning, that a schedule takes; 'progressive' weighs nothing after it
    heads: equal parts into which relations are split; 0 takes the teacher's number of attention heads
    of: what relations are computed of: any of the letters q, k and v; their losses are added up
    task: weight of the labels' loss (in pretrain the masked words'), times what distill leaves it; 0: teachers alone
    lr: learning rate of the maps of 'linear' and 'linear_each', which are removed when the phase ends
    """

    trains: ClassVar[bool] = True
    teaches: ClassVar[bool] = True

    what: Literal["hidden", "first", "embeddings", "attention", "scores", "relations", "moments", "gram"] = "hidden"
    layers: Literal["uniform", "whole", "skip", "first", "last"] | list[list[int]] | dict[str, int] = "uniform"
    tokens: Literal["all", "first", "masked", "first_piece"] = "all"
    transform: Literal["none", "linear", "linear_each", "l2", "norm"] = "none"
    metric: Literal["mse", "cosine", "kl", "ce", "l1"] = "mse"
    weight: float = 1.0
    schedule: Literal["constant", "progressive", "stacked", "fade_in", "fade_out"] = "constant"
    teacher: str = "latest"
    share: float = 1.0
    heads: int = 0
    of: str = "qkv"
    task: float = 1.0
    lr: float = 1e-3

    def check(self) -> None:
        """Numbers within bounds, and a transform that fits what is compared."""
        if self.weight <= 0:
            raise UserError(f"align: weight must be above 0, not {self.weight}")
        if not 0 < self.share <= 1:
            raise UserError(f"align: share must be above 0 and at most 1, not {self.share}")
        for name in ("task", "heads"):
            if getattr(self, name) < 0:
                raise UserError(f"align: {name} must be 0 or more, not {getattr(self, name)}")
        if self.transform not in (known := TRANSFORMS.get(self.what, ("none",))):
            raise UserError(f"align: for {self.what!r} transform is {' or '.join(known)}, not {self.transform!r}")
        if not self.of or not set(self.of) <= set("qkv") or len(set(self.of)) < len(self.of):
            raise UserError(f"align: of is any of the letters q, k and v, such as 'qkv' or 'v', not {self.of!r}")
        if self.what == "embeddings" and self.layers != "uniform":
            raise UserError(f"align('embeddings') compares the input of the first layer; leave out {self.layers!r}")
        if not isinstance(self.layers, str):
            self._pairs(MANY, MANY)
        if self.what != "relations" and (self.heads or self.of != "qkv"):
            raise UserError(f"align: heads and of are settings for what='relations'; leave them out with {self.what}")
        if self.what == "first" and self.tokens not in ("all", "first"):
            raise UserError(f"align('first') compares first tokens alone; leave out tokens={self.tokens!r}")
        if self.lr != type(self).lr and not self.transform.startswith("linear"):
            raise UserError(f"align: transform={self.transform!r} learns no map, so lr has no effect; leave lr out")
        if self.schedule == "constant" and self.share != 1:
            raise UserError(f"align: share={self.share} is for a schedule; write one, such as schedule='fade_in'")

    def reads(self, marks: Collection[str] = ()) -> str:
        """A teacher in a folder."""
        return folder_read(self.teacher, marks)

    def fits(self, phase: Any, steps: int | None) -> None:
        """There is a teacher, and as far as it is known both have what is compared."""
        phase.name_of(self)
        teacher = phase.teachers.expect(self.teacher)
        self._check_reach(phase.encoder)
        if teacher is not None:
            self._check_reach(teacher)
            check_tokens(phase.encoder, teacher)
            self._pairs(len(phase.encoder.order), len(teacher.order))
            if self.what in VECTORS and not self.transform.startswith("linear"):
                check_widths(phase.encoder, teacher)
            if self.what in ("attention", "scores"):
                check_heads(phase.encoder, teacher)
            if self.what == "relations":
                check_parts((phase.encoder, teacher), self.of, self._heads(teacher))
        if phase.stream is not None or all(type(method).data is Method.data for method in phase.methods):
            self._check_tokens(phase.stream.kind if phase.stream else phase.task and phase.task.kind)

    def attach(self, phase: Any) -> None:
        """Ask the teacher for what is needed and listen to the student's layers; make maps where they are wanted."""
        teacher, student = phase.teacher(self.teacher), phase.encoder
        roles = {"relations": tuple(self.of), "attention": ("attention",), "scores": ("attention",)}.get(self.what, ())
        pairs = self._pairs(len(student.order), len(teacher.order))
        if "attention" in roles and self.metric in ON_CHANCES and phase.stream is not None:
            check_windows(student, teacher, pairs, max(phase.stream.views[STUDENT].lengths), self.metric)
        if self.schedule in STAIRS and phase.stream is not None and phase.planned_steps * self.share < len(pairs):
            phase.notes.append(
                f"align: {phase.planned_steps} steps are too few for {len(pairs)} pairs of layers one after the other: "
                "some are never taught; train longer, or pair fewer layers"
            )
        phase.taps.update(roles)
        wanted = {role: {theirs - 1 for _, theirs in pairs} for role in roles}
        states = {"first" if self._reads_first else "hidden": {theirs for _, theirs in pairs}}
        phase.teachers.ask(self.teacher, wanted=wanted or states)
        if self.transform.startswith("linear"):
            count = len(pairs) if self.transform == "linear_each" else 1
            maps = [linear_map(student.width, teacher.width, phase.seed + number) for number in range(count)]
            phase.train_module(phase.name_of(self), nn.ModuleList(maps), self.lr)

    def weights(self, phase: Any) -> dict[str, Any]:
        """One term, or one a pair of layers where they come one after the other."""
        name, pairs = phase.name_of(self), self._pairs_in(phase)
        task = {} if self.task == 1 else {"task": self.task}
        if self.schedule in STAIRS:
            stairs = [number * self.share / len(pairs) - EDGE for number in range(len(pairs) + 1)]
            made = [self._stair(begin, finish, len(pairs)) for begin, finish in pairwise(stairs)]
            return task | dict(zip(_terms(name, pairs), made, strict=True))
        fade = {"fade_in": (0.0, self.weight), "fade_out": (self.weight, 0.0)}.get(self.schedule)
        return task | {name: self.weight if fade is None else Schedule(*fade, finish=self.share)}

    def _stair(self, begin: float, finish: float, pairs: int) -> Schedule:
        if self.schedule == "progressive":
            return Schedule(self.weight, self.weight, begin, finish, "constant", before=0.0, after=0.0)
        return Schedule(self.weight / pairs, self.weight / pairs, begin, shape="constant", before=0.0)

    def depth(self, phase: Any) -> int:
        """The student's highest layer that counts at this step."""
        return max(mine for mine, _ in self._pairs_at(phase, self._pairs_in(phase)))

    def loss(self, step: Any) -> dict[str, Tensor]:
        """How far the student's layers are from the teacher's, in float32, whatever the encoders compute in."""
        phase, every = step.phase, self._pairs_in(step.phase)
        name, teacher = phase.name_of(self), phase.teacher(self.teacher)
        pairs = self._pairs_at(phase, every)
        heads = self._heads(teacher)
        mine: Taps = {"hidden": dict(enumerate(step.states.hidden)), **step.states.taps}
        theirs = step.taught(self.teacher).taps
        with torch.autocast(phase.device.type, enabled=False):
            shares, found = self._shares(step.batch), []
            for some in [[pair] for pair in pairs] if self.transform == "linear_each" else [pairs]:
                maps = phase.modules[name] if self.transform.startswith("linear") else None
                move = None if maps is None else maps[every.index(some[0]) if len(maps) > 1 else 0]
                one = self._read(mine, [ours for ours, _ in some], step.batch, heads, move)
                other = self._read(theirs, [its for _, its in some], step.batch, heads, None)
                found.append(step.mean_of_texts(self._compare(one, other, step.batch), shares))
        each = torch.cat(found) if len(found) > 1 else found[0]
        if self.schedule in STAIRS:
            return dict(zip(_terms(name, pairs), each.unbind(), strict=True))
        return {name: each.mean()}

    def _pairs_at(self, phase: Any, pairs: Pairs) -> Pairs:
        """Those that count at this step; the last where none does any more, since a step needs a loss."""
        on = [
            pair for pair, term in zip(pairs, _terms(phase.name_of(self), pairs), strict=True) if not phase.is_off(term)
        ]
        return pairs if self.schedule not in STAIRS else on or pairs[-1:]

    def _read(self, taps: Taps, layers: list[int], batch: Batch, heads: int, move: nn.Module | None) -> Any:
        """What is compared, of some layers of one model: their vectors, stacked, or what makes their rows, one each."""
        if self.what == "relations":
            return [relation(taps[role][layer - 1], heads) for layer in layers for role in self.of]
        if self.what in ("attention", "scores"):
            return [taps["attention"][layer - 1] for layer in layers]
        kept = self._reads_first and "first" in taps
        vectors = torch.stack([taps["first" if kept else "hidden"][layer] for layer in layers])
        if self._reads_first:
            vectors = (vectors if kept else batch.first(vectors)).unsqueeze(-2)
        vectors = vectors.float()
        if move is not None:
            with faster(vectors):
                vectors = move(vectors)
        elif self.transform in OF_BOTH:
            vectors = OF_BOTH[self.transform](vectors)
        if self.what == "gram":
            return [each_other(layer, 1, 1 / vectors.shape[-1]) for layer in vectors]
        return moments(vectors) if self.what == "moments" else vectors

    def _compare(self, ours: Any, theirs: Any, batch: Batch) -> Tensor:
        """How far apart two models are at each token, layer by layer: (layers, rows, tokens)."""
        if self.what not in ROWS:
            return distance(Side(ours), Side(theirs), self.metric)
        each = rows_apart(ours, theirs, batch, self.metric, soften=self.what in ("attention", "relations"))
        return each.unflatten(0, (-1, len(self.of))).sum(1) if self.what == "relations" else each

    @property
    def _reads_first(self) -> bool:
        """Whether nothing but first tokens is needed."""
        return self.what not in ROWS and (self.what == "first" or self.tokens == "first")

    def _shares(self, batch: Batch) -> Tensor:
        """How much each token counts, in the shape in which tokens are compared."""
        if self._reads_first:
            present = torch.ones(batch.size, device=batch.input_ids.device) if batch.present is None else batch.present
            return present[:, None]
        chosen = None
        if self.tokens == "first":
            chosen = batch.tokens() & (batch.position_ids == 0)
        elif self.tokens in NEEDS:
            marks = batch.guessed() if self.tokens == "masked" else None if batch.words is None else batch.words >= 0
            if marks is None:
                raise self._needs()
            chosen = batch.tokens() & marks
        return batch.shares(chosen)

    def _heads(self, teacher: Encoder) -> int:
        """In how many parts relations are compared."""
        return self.heads or head_count(teacher) or 1

    def _pairs_in(self, phase: Any) -> Pairs:
        return self._pairs(len(phase.encoder.order), len(phase.teacher(self.teacher).order))

    def _pairs(self, mine: int, theirs: int) -> Pairs:
        """Which layer of the student learns from which of the teacher, such as [(1, 2), (2, 4), (3, 6)]."""
        if self.what == "embeddings":
            return [(0, 0)]
        return pair_layers(self.layers, mine, theirs, 1 if self.what in INSIDE else 0, self.what)

    def _check_tokens(self, kind: str | None) -> None:
        if self.tokens not in NEEDS or kind is None:
            return
        if kind in ("classify", "regress", "answer") or (kind == "tag") != (self.tokens == "first_piece"):
            raise self._needs()

    def _needs(self) -> UserError:
        return UserError(f"align(tokens={self.tokens!r}) needs {NEEDS[self.tokens]}, and this one does not")

    def _check_reach(self, model: Encoder) -> None:
        """Refuse a model without what is wanted."""
        if self.what not in STATES or isinstance(self.layers, str):
            check_has_layers(model)
        if self.what in INSIDE:
            check_inside(model, self.what, self.of if self.what == "relations" else "qk")


NEEDS = {"masked": "a phase that masks words", "first_piece": "a task that labels words"}


def _terms(name: str, pairs: Pairs) -> list[str]:
    """A name for the term of each pair of layers: "align layer 1 to 2", …"""
    return [f"{name} layer {mine} to {theirs}" for mine, theirs in pairs]
