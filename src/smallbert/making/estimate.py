"""What a recipe would make of a model, told before anything is trained: `build` steps on weights that are not there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import torch
from torch import nn

from smallbert.errors import UserError
from smallbert.measuring.cost import weights_of
from smallbert.methods import METHODS, Method
from smallbert.model.anatomy import linears
from smallbert.model.answering import answers_as_it_is, in_order_of, is_made_for, match_labels
from smallbert.model.encoder import HEAD, Encoder
from smallbert.progress import Say
from smallbert.recipes.recipe import Recipe
from smallbert.texts.data import usable_length
from smallbert.training.masks import What, hold_zeros, maskable, stack_up
from smallbert.training.phase import Phase

if TYPE_CHECKING:
    from smallbert.tasks import Task

Marks = dict[str, Encoder | None]
LATEST = "latest"  # the mark of the encoder that teaches unless another is named, see `becomes_teacher`
WHOLE = 0.99  # of a matrix with so many numbers other than zero nothing is saved without its zeros


def estimate(encoder: Encoder, recipe: Recipe | str) -> dict[str, Any]:
    """What shape a recipe would give, without data or training; null where only weights or data could tell.

    {"fits": True, "why": None, "layers": 3, "parameters": 17387522, "weight_bytes": 69550088}
    """
    unknown: dict[str, Any] = {"layers": None, "parameters": None, "weight_bytes": None}
    try:
        made = foresee(encoder, map(tuple, Recipe(recipe).phases()), marks={LATEST: None})
    except UserError as error:
        return {"fits": False, "why": str(error), **unknown}
    if made is None:
        return {"fits": True, "why": None, **unknown}
    return {
        "fits": True,
        "why": None,
        "layers": len(made.order),
        "parameters": sum(tensor.numel() for tensor in weights_of(made).values()),
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in made.state_dict().values()),
    }


def phases_of(recipe: Recipe, encoder: Encoder, task: Task | None) -> list[tuple[Method, ...]]:
    """The recipe's phases; an encoder without a head for the task gets one first, unless the recipe says which.

    What is not trained on the task keeps a head that can be scored, since a new one would know nothing, and a head that
    was made for something else is refused.
    """
    phases = [tuple(phase) for phase in recipe.phases()]
    needed = next((n for n, phase in enumerate(phases, 1) if any(method.trains for method in phase)), len(phases))
    named = any(method.name == "head" for phase in phases[:needed] for method in phase)
    trained = any(is_of_task(phase) and any(method.trains for method in phase) for phase in phases)
    fits = is_made_for if trained else answers_as_it_is
    if task is not None and not named and not fits(encoder, task):
        if HEAD in encoder.heads and not trained:
            match_labels(encoder, task)  # says why not
        phases.insert(0, (METHODS["head"](),))
    return phases


def reads_of(phases: Iterable[Iterable[Method]]) -> list[list[str]]:
    """For each method of each phase a fingerprint of the files it reads; a name that was marked before is none."""
    found, marks = [], {LATEST}
    for phase in map(tuple, phases):
        found.append([method.reads(marks) for method in phase])
        marks |= {method.label for method in phase if method.name == "mark"}  # type: ignore[attr-defined]
    return found


def files_read(recipe: Recipe) -> str | None:
    """What files a recipe reads, as its card says it, such as "distill of 12ab…, pretrain of 34cd…"; None: it does not.

    A recipe that cannot run reads nothing; its run will say why.
    """
    try:
        phases = [tuple(phase) for phase in recipe.phases()]
        found = [
            f"{method.name}{read}"
            for phase, reads in zip(phases, reads_of(phases), strict=True)
            for method, read in zip(phase, reads, strict=True)
            if read
        ]
    except UserError:
        return None
    return ", ".join(found) or None


def marks_at_first(encoder: Encoder, task: Task | None) -> dict[str, Any]:
    """A model that was made for the task can teach from the beginning."""
    return {LATEST: encoder} if task is not None and is_made_for(encoder, task) else {}


class Outlook(NamedTuple):
    """What can be told of a recipe before anything is trained: what will refuse it, and what nothing refuses."""

    refused: UserError | None = None
    warnings: tuple[str, ...] = ()


def look_ahead(
    recipes: Iterable[Recipe], encoder: Encoder, task: Task, say: Say = lambda stage, done, total, info: None
) -> dict[Recipe, Outlook]:
    """What can be told of recipes by the shape of the encoder, which may be without weights.

    What several begin with is looked at once.
    """
    found: dict[Recipe, Outlook] = {}
    encoder = in_order_of(encoder, task)
    recipes, left, stage = list(recipes), [], f"checking recipes on {task.name}"
    length = usable_length(encoder, None, task)
    say(stage, 0, len(recipes), "")
    for recipe in recipes:
        try:
            left.append((recipe, phases_of(recipe, encoder, task)))
        except UserError as error:
            found[recipe] = Outlook(error)
    for recipe, made in _branch(left, without_weights(encoder), task, marks_at_first(encoder, task)):
        refused = made if isinstance(made, UserError) else None
        found[recipe] = Outlook(refused, tuple(_warnings(made, length)))
        say(stage, len(found), len(recipes), "")
    return found


def _branch(
    left: list[tuple[Recipe, list[tuple[Method, ...]]]], empty: Encoder, task: Task, marks: Marks
) -> Iterator[tuple[Recipe, Encoder | UserError | None]]:
    """What recipes make of an encoder by the phases that are left of each, or what refuses that."""
    groups: dict[tuple[Method, ...], list[tuple[Recipe, list[tuple[Method, ...]]]]] = {}
    for recipe, phases in left:
        if phases:
            groups.setdefault(phases[0], []).append((recipe, phases))
        else:
            yield recipe, empty
    for group in groups.values():
        side_by_side = zip(*(phases for _, phases in group), strict=False)
        alike = [phase for phase, *_ in takewhile(lambda same: len(set(same)) == 1, side_by_side)]
        known = dict(marks)
        made: Encoder | UserError | None
        try:
            made = foresee(empty, alike, task, known)
        except UserError as error:
            made = error
        if isinstance(made, Encoder):
            yield from _branch([(recipe, phases[len(alike) :]) for recipe, phases in group], made, task, known)
        else:
            yield from ((recipe, made) for recipe, _ in group)


def _warnings(made: Encoder | UserError | None, length: int) -> Iterator[str]:
    """What should be known of the encoder that a recipe makes: a pooler that will not read whole texts."""
    reads = getattr(made.heads[HEAD], "positions", 0) if isinstance(made, Encoder) else 0
    if 0 < reads < length:
        yield f"texts may have {length} tokens, but the pooler reads only the first {reads}; see --length"


def foresee(
    encoder: Encoder, phases: Iterable[tuple[Method, ...]], task: Task | None = None, marks: Marks | None = None
) -> Encoder | None:
    """The encoder that phases would make, without weights; None where that depends on what the weights will be.

    What running would refuse for the model's sake is refused here, in the same sentence, and nothing else is. `marks`
    are those of the phases before, and become those behind them; a mark of which only the name is known is None.
    """
    empty, marks = without_weights(encoder), {} if marks is None else marks
    for given in phases:
        if marks.get(LATEST) is empty:
            empty = empty.copy()  # the teacher stays as it is
        methods = sorted(given, key=lambda method: method.stage)
        for method in methods:
            try:
                if method.name != "head" or task is not None:
                    empty.apply_method(method, method.plan(empty, task))
            except UserError:
                raise
            except Exception:  # it looked at weights; whatever else is wrong, running will say
                return None
            if not method.trains:
                _prune(empty, method)
        for method in methods:
            if method.trains:  # what prunes while it trains looks when all is built
                _prune(empty, method)
        _go_through(empty, given, task, marks)
    return empty


def _go_through(empty: Encoder, methods: tuple[Method, ...], task: Task | None, marks: Marks) -> None:
    """Let the methods of a phase say what they refuse, and leave the marks that it would leave."""
    trains = any(method.trains for method in methods)
    if trains and not any(method.is_train_setting for method in methods):
        methods = (*methods, METHODS["train"]())
    phase = Phase(empty, methods, task, 0, cast(dict[str, Encoder], marks))
    check_data(methods)
    for method in phase.methods:
        method.fits(phase, _steps(phase) if trains else 0)
    for method in phase.methods:
        if method.prunes and method.trains:
            hold_zeros(empty, maskable(empty, method.what))  # type: ignore[attr-defined]
    if trains and becomes_teacher(methods, marks):
        marks[LATEST] = empty
    for method in phase.methods:
        method.take_over(phase)


def check_data(methods: tuple[Method, ...]) -> None:
    """Refuse two methods that bring what a phase reads; several may add rows to the task's own."""
    streams = sum(type(method).data is not Method.data for method in methods)
    if streams > 1 or (streams and any(type(method).rows is not Method.rows for method in methods)):
        raise UserError("two methods of one phase both bring data; put them into separate phases")


def _steps(phase: Phase) -> int | None:
    """How many steps a phase will take; None where the number of its texts is not known before they are read."""
    if getattr(phase.settings, "steps", None):
        return phase.steps_over(0)
    known = phase.task is not None and phase.task.kind != "answer" and is_of_task(tuple(phase.methods))
    if not known or any(type(method).rows is not Method.rows for method in phase.methods):
        return None
    return phase.steps_over(len(phase.task.split("train")))  # type: ignore[union-attr]


def is_of_task(methods: tuple[Method, ...]) -> bool:
    """Whether a phase reads the task's own rows, so that what it trained can be judged by them, and teach."""
    return all(type(method).data is Method.data for method in methods)


def becomes_teacher(methods: tuple[Method, ...], marks: Collection[str]) -> bool:
    """Whether what a phase trained is the teacher of later ones: if it read the task, and had no teacher itself.

    A student that were to teach what comes behind it would often teach itself; a recipe that wants that marks it. Where
    there is no other model, the first that was taught has to do.
    """
    taught = any(hasattr(method, "teacher") for method in methods)
    return is_of_task(methods) and (not taught or LATEST not in marks)


def without_weights(encoder: Encoder) -> Encoder:
    """A copy that has shapes only, made without copying a weight; its plain matrices know whether they were whole."""
    shapes: dict[int, Any] = {}
    for tensor in (*encoder.parameters(), *encoder.buffers(), *encoder.spare.values()):
        shape = torch.empty_like(tensor, device="meta")
        shapes[id(tensor)] = (
            nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape.detach()
        )
    empty = encoder.copy(shapes)
    for name, module in linears(encoder.backbone):
        if type(module) is nn.Linear and not module.weight.is_meta:
            whole = int(module.weight.count_nonzero()) > WHOLE * module.weight.numel()
            empty.backbone.get_submodule(name).share_left = 1.0 if whole else None
    return empty


def _prune(empty: Encoder, method: Method) -> None:
    """Refuse where there is nothing to prune; note for `sparse`, which finds no weights here, what would be left."""
    what: Any = getattr(method, "what", None)
    if what not in get_args(What):
        return
    names, keep = maskable(empty, what), getattr(method, "keep", None)
    stack_up(empty, names)
    for name in names:
        module: Any = empty.get_submodule(name.removesuffix(".weight"))
        before = getattr(module, "share_left", None)
        module.share_left = keep if keep is None or before is None else min(keep, before)
