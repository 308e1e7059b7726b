"""Running a recipe: phase after phase, each planned, built, filled, trained and settled; then measured as a card."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError
from smallbert.machine.memory import hand_back
from smallbert.machine.processes import processes
from smallbert.making.estimate import (
    LATEST,
    becomes_teacher,
    check_data,
    foresee,
    is_of_task,
    marks_at_first,
    phases_of,
)
from smallbert.making.finished import find_finished, keep_finished, read_record
from smallbert.making.likeness import history_after, same_work, texts_so_far
from smallbert.measuring.collapse import judge_result
from smallbert.measuring.cost import size_in_words
from smallbert.methods import METHODS, Method
from smallbert.model.answering import in_order_of, note_pairs
from smallbert.model.encoder import Encoder, fingerprint
from smallbert.model.quantised import stored_parts
from smallbert.model.surgery import lost_heads
from smallbert.model.zeros import sparse_linears
from smallbert.progress import noting, saying
from smallbert.recipes.recipe import Recipe, Usable
from smallbert.texts.data import STUDENT, Stream, longest_input, stream_name, tokenise, usable_length
from smallbert.training.loop import CHECKPOINT_SECONDS, train
from smallbert.training.phase import Phase

if TYPE_CHECKING:
    from smallbert.features.store import Store
    from smallbert.tasks import Split, Task

Say = Callable[[str, int, int, str], None]

# What no phase trains, why not, and what to do about it.
UNTRAINED: tuple[tuple[Callable[[Encoder], Any], str, str], ...] = (
    (sparse_linears, "sparse has stored without zeros", "put sparse last"),
    (stored_parts, "are stored in few bits", "round last, or as quantize_aware and codebook_aware do"),
)


@dataclass
class Outcome:
    """What running a recipe gave: the new encoder, and what is worth knowing about how it was made."""

    encoder: Encoder
    steps: int = 0
    epochs: float = 0.0
    packed: bool = False
    notes: list[str] = field(default_factory=list)
    diverged: str = ""
    seconds: float = 0.0
    traces: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass
class Setting:
    """What all phases of one run share."""

    task: Task | None
    seed: int
    length: int
    say: Say
    work: Path | None
    key: str
    pause: float
    streams: dict[str, Stream] = field(default_factory=dict)
    memory: dict[str, dict[str, Any]] | None = None
    states: Path | None = None
    stores: dict[Path, Store] | None = None
    said: Path | None = None  # where runs find the scores that teachers gave
    rows: Split | None = None  # those that a phase read last where it does not read the task's
    streams_of_rows: dict[str, Stream] = field(default_factory=dict)

    def hold(self, rows: Split | None) -> Split | None:
        """The rows that a phase reads instead of the task's: those of the phase before if they are the same."""
        if rows != self.rows:
            self.rows, self.streams_of_rows = rows, {}
        return self.rows

    def tokenise(self, tokenizer: Any, rows: Split | None = None, length: int | None = None) -> Stream:
        """The task's training examples, or the rows that are held, for a tokenizer; made once."""
        if self.task is None:
            raise UserError("this recipe trains, so it needs a task: give --task")
        streams, length = self.streams if rows is None else self.streams_of_rows, length or self.length
        name = stream_name(tokenizer, length)
        if name not in streams:
            read = self.task.split("train") if rows is None else rows
            report = lambda done, total: self.say("tokenising", done, total, "")  # noqa: E731
            streams[name] = tokenise(tokenizer, read, self.task.kind, length, report)
        made = streams[name]
        return Stream(dict(made.views), made.labels, made.kind, made.windows, made.cut, made.notes)


def run_recipe(
    recipe: Usable,
    encoder: Encoder,
    task: Task | None = None,
    seed: int = 0,
    *,
    length: int | None = None,
    device: str | None = None,
    work: Path | None = None,
    key: str = "",
    say: Say = lambda stage, done, total, info: None,
    pause: float = CHECKPOINT_SECONDS,
    common: Mapping[str, Path] | None = None,
    judge: bool = True,
    streams: dict[str, Stream] | None = None,
    memory: dict[str, dict[str, Any]] | None = None,
    states: Path | None = None,
    stores: dict[Path, Store] | None = None,
    said: Path | None = None,
) -> Outcome:
    """Make a new encoder by a recipe; the one given is not changed.

    With a `work` folder, finished phases and a checkpoint of the one that runs are kept there, and a killed run of
    the same key goes on where it was. A beginning in `common` (see `beginnings`) is kept in the folder named
    there instead, so that recipes which begin alike train it once; `key` says what else they have in common. Without
    `judge`, a model that knows nothing of the task is not called diverged. Runs on the same task and at the same
    length may share `streams`, an empty dictionary at first, so that texts become tokens once, and `memory`, so that a
    beginning they have in common is read from its folder once, and a folder of `states`, so that a frozen backbone
    reads the texts once, and `stores`, so that what is in that folder is opened and checked once. Scores that
    teachers give are kept in a folder `said`, if there is one, and found there.
    """
    recipe = Recipe(recipe)
    device = device or str(processes().device)
    limit = usable_length(encoder, length, task) if task is not None else 0
    # Without a key of the caller's, what is kept in a work folder is told apart by the encoder itself.
    key = same_work(key or (fingerprint(encoder) if work else ""), task, seed, limit)
    tokens = {} if streams is None else streams
    encoder = in_order_of(encoder, task)
    marks: dict[str, Encoder] = marks_at_first(encoder, task)
    phases = phases_of(recipe, encoder, task)
    texts = texts_so_far(phases)
    setting = Setting(task, seed, limit, say, work, key, pause, tokens, memory, states, stores, said)
    student = encoder.copy().to(device)
    outcome = Outcome(student)
    own = [work / f"phase-{number}" if work is not None else None for number in range(len(phases))]
    places = [(common or {}).get(text) or place for text, place in zip(texts, own, strict=True)]
    _look_ahead(encoder, phases, texts, places, setting)
    for number, (phase, so_far, kept) in enumerate(zip(phases, texts, places, strict=True), 1):
        outcome = _run_phase(outcome, phase, so_far, setting, marks, kept, last=number == len(phases))
        hand_back()
        if outcome.diverged:
            break
    outcome.encoder.eval()
    learned = any(is_of_task(phase) and any(method.trains for method in phase) for phase in phases)
    if phases and not outcome.diverged and task is not None and judge:
        given = None if outcome.steps and learned else encoder
        outcome.diverged, note = judge_result(outcome.encoder, given, task, seed, limit, say)
        if outcome.diverged and outcome.steps:  # after two steps the same means less than after two thousand
            outcome.diverged = f"{_duration(outcome)}, {outcome.diverged}"
        outcome.notes += [note] if note else []
    return outcome


def _duration(outcome: Outcome) -> str:
    """How long a model was trained, such as "after 2 training steps (0.12 epochs)"."""
    many = ["s" if number != 1 else "" for number in (outcome.steps, outcome.epochs)]
    return f"after {outcome.steps:,} training step{many[0]} ({outcome.epochs:.3g} epoch{many[1]})"


def _look_ahead(
    encoder: Encoder,
    phases: list[tuple[Method, ...]],
    texts: list[str],
    places: list[Path | None],
    setting: Setting,
) -> None:
    """Refuse now what a phase behind long training would refuse; what is finished is taken over and not asked again."""
    trains = [any(method.trains for method in phase) for phase in phases]
    for number in reversed(range(len(phases))):
        kept, key = places[number], f"{setting.key}: {texts[number]}"
        if trains[number] and kept is not None and (key in (setting.memory or {}) or read_record(kept, key)):
            if any(trains[number + 1 : -1]) and (done := find_finished(kept, key, setting.memory)) is not None:
                before: Any = [m for some in phases[: number + 1] for m in some if m.name == "mark"]
                marks = dict.fromkeys([LATEST, *(method.label for method in before)])
                foresee(done["encoder"], phases[number + 1 :], setting.task, marks)
            return
    if any(trains[:-1]):
        foresee(encoder, phases, setting.task, marks_at_first(encoder, setting.task))


def _run_phase(
    before: Outcome,
    methods: tuple[Method, ...],
    so_far: str,
    setting: Setting,
    marks: dict[str, Encoder],
    kept: Path | None,
    last: bool,
) -> Outcome:
    encoder, trains = before.encoder, any(method.trains for method in methods)
    key, begun = f"{setting.key}: {so_far}", time.monotonic()
    if trains and kept is not None and (done := find_finished(kept, key, setting.memory)) is not None:
        outcome = Outcome(done["encoder"].to(encoder.device), *done["counts"])
        outcome.notes, outcome.seconds = [*before.notes, *done["notes"]], done["seconds"]
        outcome.traces = done.get("traces", {})
        outcome.encoder.spare = encoder.spare
        outcome.encoder.history = history_after(encoder.history, outcome.encoder.history, methods)
        if becomes_teacher(methods, marks):
            marks[LATEST] = done.get("remembered") or outcome.encoder.copy()
            marks[LATEST].spare = encoder.spare
        taken = Phase(outcome.encoder, methods, setting.task, setting.seed, marks)
        for method in methods:
            method.take_over(taken)
        return outcome
    notes: list[str] = []
    with saying(setting.say), noting(notes):
        for method in sorted(methods, key=lambda method: method.stage):
            encoder = _change(encoder, method, setting)
    if trains and not any(method.is_train_setting for method in methods):
        methods = (*methods, METHODS["train"]())
    # A later phase must not see the same order of examples and the same dropout again.
    phase = Phase(encoder, methods, setting.task, setting.seed + 100_003 * before.steps, marks)
    phase.notes += [*notes, *lost_heads(before.encoder, encoder)]
    outcome = Outcome(encoder, before.steps, before.epochs, before.packed, list(before.notes))
    if trains:
        with saying(setting.say), noting(phase.notes):
            _prepare(phase, setting)
        checkpoint = None if kept is None else kept.with_suffix(".checkpoint")
        train(phase, setting.say, checkpoint, key, setting.pause, setting.states, setting.stores, setting.said)
        outcome.steps += phase.step
        steps = getattr(phase.settings, "steps", None)
        outcome.epochs += steps / phase.steps_an_epoch if steps else phase.settings.epochs
        outcome.packed |= phase.packed
        outcome.diverged = phase.diverged
        if setting.task is not None and is_of_task(methods):
            note_pairs(encoder, setting.task)
    else:
        for method in phase.methods:
            method.fits(phase, 0)
        with saying(setting.say):
            for method in phase.methods:
                method.attach(phase)
    phase.fold()
    for method in phase.methods:
        method.settle(phase)
    phase.fold()
    outcome.notes += [note for note in phase.notes if note not in outcome.notes]
    outcome.seconds = before.seconds + phase.earlier + time.monotonic() - begun
    outcome.traces = {name: list(found) for name, found in before.traces.items()}
    for name, found in phase.traces.items():
        later = [{**entry, "step": before.steps + entry["step"]} for entry in found]
        outcome.traces[name] = outcome.traces.get(name, []) + later
    if trains and not phase.diverged:
        if not last and becomes_teacher(methods, marks):
            marks[LATEST] = encoder.copy()
        if kept is not None:
            keep_finished(kept, key, outcome, outcome.notes[len(before.notes) :])
    return outcome


def _change(encoder: Encoder, method: Method, setting: Setting) -> Encoder:
    """Plan, build and fill one method on a copy, so that filling can still read the encoder as it was."""
    plan = method.plan(encoder, setting.task)
    if type(method).build is Method.build and type(method).fill is Method.fill:
        encoder.apply_method(method, plan)
        return encoder
    changed = encoder.copy()
    changed.apply_method(method, plan)
    method.fill(changed, encoder, plan, setting.task, setting.seed)
    return changed


def _prepare(phase: Phase, setting: Setting) -> None:
    """Find the data of a training phase, let its methods attach what they need, and hold what was settled before."""
    phase.say, phase.work = setting.say, setting.work
    check_data(tuple(phase.methods))
    streams = [stream for method in phase.methods if (stream := method.data(phase)) is not None]
    adding = [method for method in phase.methods if type(method).rows is not Method.rows]
    rows = setting.task.split("train") if setting.task is not None and adding else None
    for method in adding:
        rows = method.rows(phase, rows)
    phase.tokenise = partial(setting.tokenise, rows=setting.hold(rows))
    phase.stream = streams[0] if streams else phase.tokenise(phase.encoder.tokenizer)
    most, longest = longest_input(phase.encoder), max(phase.stream.views[STUDENT].lengths, default=0)
    if longest > most:  # a student may have fewer places than the model that the length was chosen for
        raise UserError(f"the student reads at most {most} tokens, but a text has {longest}; give --length {most}")
    phase.notes += phase.stream.notes
    for find, how, advice in UNTRAINED:
        if stored := len(find(phase.encoder)):
            phase.notes.append(
                f"{stored} matrices that {how} are not trained, only the weights around them are; to train "
                f"them too, {advice}"
            )
    for method in phase.methods:
        method.fits(phase, phase.planned_steps)
    phase.hold_zeros()
    for method in phase.methods:
        method.attach(phase)
    phase.notes += [f"taught by {name!r}: {size_in_words(one.encoder)}" for name, one in phase.teachers.items()]
    phase.add_term_weights()
