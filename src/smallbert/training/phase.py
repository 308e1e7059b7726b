"""A phase: an encoder being changed, and all that the methods of the phase attach to it while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder
from smallbert.model.heads import losses
from smallbert.model.walk import Route
from smallbert.texts.data import STUDENT, Stream
from smallbert.training.precision import HALF, exact_parameters, round_weights, tables
from smallbert.training.schedule import Product, Schedule, constant
from smallbert.training.step import Step
from smallbert.training.teachers import Teachers

if TYPE_CHECKING:
    from smallbert.methods import Method
    from smallbert.tasks import Task

Weights = dict[str, Tensor]
BACKBONE = "backbone."  # how the names of its weights begin
HELD_STAGE = 90  # what earlier phases settled is applied last, over whatever this phase does to a weight


@dataclass(frozen=True)
class Transform:
    """Weights as the model should see them, made from the weights as they are stored: once a step, all together."""

    stage: int
    names: list[str]
    make: Callable[[Weights], Weights]


class Phase:
    """What the hooks of a method may use: the encoder, marks, dials, transforms, extra modules, the teacher."""

    def __init__(
        self, encoder: Encoder, methods: tuple[Method, ...], task: Task | None, seed: int, marks: dict[str, Encoder]
    ):
        """Begin a phase on an encoder that it may change."""
        self.encoder, self.task, self.seed, self.marks = encoder, task, seed, marks
        self.methods = sorted(methods, key=lambda method: method.stage)  # stable: equal stages keep their order
        self.settings: Any = next((method for method in methods if method.is_train_setting), None)
        self.stream: Stream | None = None
        self._head = HEAD
        self.work: Path | None = None  # a folder for what may be made once and found again after a kill
        self.tokenise: Callable[[Any], Stream] = lambda tokenizer: _no_stream()
        self.device = encoder.device
        self.modules = nn.ModuleDict()  # trained beside the encoder, gone when the phase ends
        self.transforms: list[Transform] = []
        self.schedules: dict[str, Schedule] = {}
        self.dials: dict[str, Tensor] = {}
        self.frozen: list[nn.Parameter] = []  # what a method wants left as it is while the phase trains
        self.rates: list[tuple[list[nn.Parameter], float]] = []  # parameters with a learning rate of their own
        self.clipped_apart: set[nn.Parameter] = set()  # what is clipped by a norm of its own
        self.taps: set[str] = set()
        self._route: Route | None = None
        self.batch: Batch | None = None  # what the encoder looks at just now
        self.step, self.total = 0, 0
        self.world = 1
        self.notes: list[str] = []
        self.traces: dict[str, list[dict[str, Any]]] = {}  # what methods want remembered of the way, step by step
        self.teachers = Teachers(self)
        self.diverged = ""
        self.packed = False
        self._turned: dict[str, float] = {}  # where each dial stands
        self._products: dict[str, Product] = {}  # what methods say about the weight of each loss term
        self._weights = torch.zeros(0, device=self.device)  # and what comes of it, in that order, for all at once
        self.earlier = 0.0  # seconds that interrupted runs have spent on what was kept of this phase
        self.begun = time.monotonic()
        self.optimiser: torch.optim.Optimizer | None = None
        self.say: Callable[[str, int, int, str], None] = lambda stage, done, total, info: None

    # What a method may ask for in `attach`.

    def dial(self, name: str, schedule: Schedule | float) -> Tensor:
        """A number on the device that follows a schedule; a method reads it, the loop sets it before each step."""
        if name in self.schedules:
            raise UserError(f"two methods of one phase both schedule {name!r}; put them into separate phases")
        self.schedules[name] = schedule if isinstance(schedule, Schedule) else constant(schedule)
        # Double, since a share of millions of weights is rounded to a count.
        self.dials[name] = torch.tensor(self.schedules[name].at(0.0), dtype=torch.float64, device=self.device)
        return self.dials[name]

    def transform(self, names: list[str], make: Callable[[Weights], Weights], stage: int) -> None:
        """Let the model see other weights than the stored ones, from now to the end of the phase."""
        self.transforms.append(Transform(stage, names, make))
        self.transforms.sort(key=lambda transform: transform.stage)

    @property
    def half(self) -> bool:
        """Whether the encoder computes in half precision: on a GPU, unless the phase says otherwise."""
        return self.device.type == "cuda" and bool(self.settings.half)

    @property
    def steps_an_epoch(self) -> int:
        """How many batches hold every example once."""
        assert self.stream is not None
        return -(-len(self.stream) // self.settings.batch)

    @property
    def planned_steps(self) -> int:
        """How many steps the phase is going to take; what `total` is once it trains."""
        assert self.stream is not None
        return self.steps_over(len(self.stream))

    def steps_over(self, texts: int) -> int:
        """How many steps the phase takes with so many texts."""
        steps = getattr(self.settings, "steps", None)
        return steps or max(1, round(self.settings.epochs * -(-texts // self.settings.batch)))

    @property
    def route(self) -> Route | None:
        """What decides how each layer is run while training (see walk); one method of a phase may set it."""
        return self._route

    @route.setter
    def route(self, route: Route) -> None:
        if self._route is not None:
            raise UserError("two methods of one phase both route the layers; put them into separate phases")
        self._route = route

    @property
    def head(self) -> str:
        """The name of the head whose scores are learned; one method of a phase may choose another than the task's."""
        return self._head

    @head.setter
    def head(self, head: str) -> None:
        if self._head != HEAD:
            raise UserError("two methods of one phase both choose what is learned; put them into separate phases")
        self._head = head

    @property
    def rate(self) -> Tensor | float:
        """The learning rate of this step as the schedule has it, for a proximal step; a tensor on a GPU."""
        assert self.optimiser is not None
        group = self.optimiser.param_groups[0]  # all groups follow one schedule
        return group["lr"] * (self.settings.lr / group["base_lr"])

    def train_module(self, name: str, module: nn.Module, lr: float | None = None) -> nn.Module:
        """Train another module beside the encoder, with a learning rate of its own if one is given."""
        if name in self.modules:
            raise UserError(f"two methods of one phase both train a module {name!r}; put them into separate phases")
        self.modules[name] = module.to(self.device)
        if lr is not None:
            self.rates.append((list(module.parameters()), lr))
        return self.modules[name]

    def name_of(self, method: Method) -> str:
        """What a method's loss terms and modules are called; several of one kind in a phase are told apart.

        distill, distill 2, distill 3
        """
        alike = [one for one in self.methods if one.name == method.name]
        if alike.count(method) > 1:
            raise UserError(f"{method.name} is in one phase twice with the same settings; write it once")
        place = alike.index(method)
        return f"{method.name} {place + 1}" if place else method.name

    def teacher(self, name: str) -> Encoder:
        """A frozen encoder to learn from: a mark, "latest" for the last trained without one, or a saved folder."""
        return self.teachers.find(name).encoder

    def readers(self) -> list[Encoder]:
        """Every model that runs at each step: the encoder, and teachers whose words are not kept."""
        return [self.encoder, *(teacher.looking for teacher in self.teachers.values() if teacher.kept is None)]

    def remember(self, name: str, value: Any) -> None:
        """Write down how something stands at this step (plain JSON), for the card."""
        self.traces.setdefault(name, []).append({"step": self.step, "value": value})

    # What the loop asks.

    def held_masks(self) -> Weights:
        """Where weights may be other than zero, for all in which earlier phases settled on zeros."""
        held = [(f"{name}.weight", module.weight) for name, module in self.encoder.held("zeros")]
        return {name: weight != 0 for name, weight in held if isinstance(weight, nn.Parameter)}

    def hold_zeros(self) -> None:
        """Keep the zeros that earlier phases settled on, through all that this phase trains."""
        if masks := self.held_masks():
            self.transform(list(masks), lambda weights: {n: w * masks[n] for n, w in weights.items()}, HELD_STAGE)

    def begin_training(self) -> None:
        """Turn dropout on; a frozen backbone computes as it will in use."""
        self.encoder.train()
        self.modules.train()
        if self.settings.freeze == "backbone":
            self.encoder.backbone.eval()

    def set_dials(self, progress: float | None = None) -> None:
        """Turn every dial to where the schedule has it at this step, or at another share of the phase."""
        progress = self.step / max(self.total, 1) if progress is None else progress
        every: dict[str, Schedule | Product] = {**self.schedules, **self._products}
        for name, schedule in every.items():
            if self._turned.get(name) != (value := schedule.at(progress)):  # most stay where they are
                self.dials[name].fill_(value)
                self._turned[name] = value

    def is_off(self, term: str) -> bool:
        """Whether a loss term weighs nothing at this step, so that it need not be computed."""
        return self._turned.get(weight_of(term)) == 0

    @property
    def off(self) -> frozenset[str]:
        """The weights that are zero at this step: a recorded step is one with these."""
        return frozenset(name for name in self._products if self._turned.get(name) == 0)

    def weights(self) -> Weights:
        """Every transformed weight, by its name in the encoder, made once for this step."""
        stored, made = dict(self.encoder.named_parameters()), Weights()
        for transform in self.transforms:
            made.update(transform.make({name: made.get(name, stored[name]) for name in transform.names}))
        return made

    def look_at(self, batches: dict[str, Batch], depth: int | None = None) -> Step:
        """Run the encoder over a batch, with the weights as this phase wants them seen: to its head, or not so far."""
        batch = self.batch = self.encoder.as_read(batches[STUDENT])
        with self.as_seen(runs=batch.hidden is None), torch.autocast(self.device.type, enabled=False):
            states = self.encoder.states(batch, tuple(sorted(self.taps)), self.route, depth)
            scores = self.encoder.read(states, batch, self.head) if depth is None else None
            return Step(self, {**batches, STUDENT: batch}, states, scores)

    def depth(self) -> int | None:
        """How many layers the losses of this step read; None: all of them, and a head."""
        if not self._is_never_on("task"):
            return None
        depths = [method.depth(self) for method in self.methods]
        return None if None in depths else max(depth for depth in depths if depth is not None)

    def loss(self, batches: dict[str, Batch]) -> Tensor:
        """The whole loss of a batch: the task's own and the methods' terms, each with its weight."""
        step = self.look_at(batches, self.depth())
        terms: dict[str, Tensor] = {}
        for method in self.methods:
            for name, value in method.loss(step).items():
                if name in terms:
                    raise UserError(
                        f"two methods of one phase both have a loss called {name!r}; put them into separate phases"
                    )
                terms[name] = value
        if step.batch.labels is not None and not self._is_never_on("task"):
            each = losses(self.encoder.heads[self.head], step.scores, step.batch)
            terms["task"] = step.mean(each, step.batch.labelled)
        if not terms:
            raise UserError("this phase has nothing to learn from: no labels and no method with a loss")
        return self._weigh({name: value.float() for name, value in terms.items()})

    def fold(self) -> None:
        """Write the weights as seen into the weights as stored; the transforms are done with."""
        with torch.no_grad():
            stored = dict(self.encoder.named_parameters())
            for name, weight in self.weights().items():
                stored[name].copy_(weight)
        self.transforms.clear()

    def add_term_weights(self) -> None:
        """Make a dial of what all methods together say about the weight of each loss term."""
        said: dict[str, list[Schedule]] = {}
        for method in self.methods:
            for term, weight in method.weights(self).items():
                said.setdefault(term, []).append(weight if isinstance(weight, Schedule) else constant(weight))
        if taken := next((name for name in map(weight_of, said) if name in self.dials), None):
            raise UserError(
                f"a method of this phase has a schedule called {taken!r}, which is the weight of a loss; rename it"
            )
        self._products = {weight_of(term): Product(tuple(schedules)) for term, schedules in said.items()}
        self._weights = torch.zeros(len(said), device=self.device)
        self.dials.update(zip(self._products, self._weights.unbind(), strict=True))
        self.set_dials(0.0)

    @contextmanager
    def as_seen(self, runs: bool = True) -> Iterator[None]:
        """Put the transformed weights where the stored ones are; a tied one into all its places.

        A backbone that does not run, since its hidden states are known, is left as it is.
        """
        if not self.transforms and not self.half:  # each weight is seen as it is, and looking for it takes longest
            yield
            return
        stored = {name: one for name, one in self.encoder.named_parameters() if runs or not name.startswith(BACKBONE)}
        made = {name: one for name, one in self.weights().items() if name in stored}
        if self.half:
            exact = exact_parameters(self.encoder)
            made = round_weights({name: one for name, one in stored.items() if one not in exact} | made)
        new = {stored[name]: weight for name, weight in made.items()}
        owners = [module._parameters for module in self.encoder.modules()] if new else []
        rounded = tables(self.encoder) if self.half else []
        places = [(owner, key, one) for owner in owners for key, one in owner.items() if one is not None and one in new]
        try:
            for owner, key, parameter in places:
                owner[key] = new[parameter]  # type: ignore[assignment]
            for table in rounded:
                table.seen_as = HALF
            yield
        finally:
            for table in rounded:
                table.seen_as = None
            for owner, key, parameter in places:
                owner[key] = parameter

    def _weigh(self, terms: dict[str, Tensor]) -> Tensor:
        """The sum of all terms, each times what every method says about it, in as few kernels as can be."""
        found = {weight_of(name): value for name, value in terms.items()}
        said = [name for name in self._products if name in found]
        parts = [value for name, value in found.items() if name not in self._products]
        if said:
            whole = len(said) == len(self._products)
            weights = self._weights if whole else torch.stack([self.dials[name] for name in said])
            parts.append((torch.stack([found[name] for name in said]) * weights).sum())
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def _is_never_on(self, term: str) -> bool:
        return weight_of(term) in self._products and self._products[weight_of(term)].is_off


def weight_of(term: str) -> str:
    """The name of the dial that weighs a loss term."""
    return f"weight of {term}"


def _no_stream() -> Stream:
    raise UserError("this phase has no task, so there is no text to tokenise")
