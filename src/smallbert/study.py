"""A study: recipes (arms) x seeds x tasks, run seed by seed, several at a time, each once, and never dropped silently.

plain = "movement + train(epochs=8)", mixture = "mix_layers | movement + train(epochs=8)", seeds 9 25 39 …
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smallbert.arms import Arm
from smallbert.beginnings import common_beginnings, forget, group_recipes, is_made
from smallbert.compare import tiny_setting
from smallbert.data import Stream
from smallbert.errors import UserError
from smallbert.files import alone_in
from smallbert.jobs import WorkerLost, run_jobs, shared_gpu
from smallbert.make import (
    Line,
    Say,
    Start,
    at_length,
    check_device,
    find_place,
    foreseen,
    give_up,
    make_one,
    quiet,
    start_from,
    task_from,
    why_of,
    work_key,
)
from smallbert.measuring.card import MACHINERY_CHECK, RESULT, Card, card_key, number
from smallbert.measuring.findings import Result
from smallbert.measuring.pruned import weights_left
from smallbert.measuring.shelf import PACK, load_card, load_pack
from smallbert.recipe import Recipe
from smallbert.tasks import Task
from smallbert.tasks.task import CHOOSE, with_choice
from smallbert.wheels import to_stderr

MOST = 8  # processes on one GPU, unless more are asked for


class Piece(NamedTuple):
    """One run: which task, seed and arm (by number), and the arms whose recipes begin with the same training."""

    task: str
    seed: int
    arm: int
    group: tuple[int, ...]


@dataclass(frozen=True)
class Study:
    """All that says what to run; plain enough to be sent to another process."""

    model: str | None
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    out: Path
    vary: str | None = None
    named: bool = False  # whether the arms' names were given, and so belong on the cards
    split: str = "dev"
    kind: str = RESULT
    keep_models: bool = False
    again: bool = False
    command: str = ""
    device: str | None = None
    length: int | None = None
    examples: int | None = None
    data: str | None = None
    columns: dict[str, str | None] = field(default_factory=dict)
    states: Path | None = None  # where runs keep hidden states of frozen backbones for each other


@dataclass
class Bench:
    """What runs are made with, read once: the model to start from, the tasks, and their tokens as they are made."""

    start: Start
    tasks: dict[str, Task]
    streams: dict[str, dict[str, Stream]] = field(default_factory=dict)
    packed: dict[str, Card] = field(default_factory=dict)  # cards of earlier runs that were put into one file


def open_bench(study: Study, line: Line = to_stderr) -> Bench:
    """Read the model and the tasks."""
    if study.kind == MACHINERY_CHECK:
        start, task = tiny_setting(study.model, line)
        tasks = {task.name: task}
    else:
        start = start_from(str(study.model), line)
        tasks = {}
        for given in study.tasks:
            task = task_from(given, study.data, study.examples, line, **study.columns)
            tasks[task.name if task.name not in tasks else given] = task
    if study.split == CHOOSE:
        tasks = {name: with_choice(task) for name, task in tasks.items()}
    tasks = {name: at_length(start, task, study.length) for name, task in tasks.items()}
    for task in tasks.values():
        task.split(study.split)
    return Bench(start, tasks, packed=open_packed(study.out / PACK))


def open_packed(path: Path) -> dict[str, Card]:
    """Cards of earlier runs by the keys that their work has today: a setting that came later counts as its default."""
    found = {}
    for key, card in load_pack(path).items():
        with suppress(UserError):  # a recipe that cannot be read any more keeps the key it had
            key = card_key(**card | {"recipe": Recipe(card["recipe"]).key()})
        found[key] = card
    return found


def plan(study: Study, bench: Bench) -> list[list[Piece]]:
    """All runs as jobs, seed by seed over all arms, so that a study broken off is balanced.

    Recipes that begin with the same training are one job, so that it is done once a seed; see `part`.
    """
    recipes = [arm.recipe for arm in study.arms]
    groups = {name: group_recipes(recipes, bench.start, task) for name, task in bench.tasks.items()}
    return [
        [Piece(name, seed, arm, group) for arm in group]
        for seed in study.seeds
        for name in bench.tasks
        for group in groups[name]
    ]


def part(study: Study, bench: Bench, pieces: Sequence[Piece]) -> list[list[Piece]]:
    """One job as jobs that several workers can do: only runs that wait for the same training stay together."""
    made = {text for text, folder in _common(study, bench, pieces[0]).items() if is_made(folder)}
    recipes = [study.arms[piece.arm].recipe for piece in pieces]
    groups = group_recipes(recipes, bench.start, bench.tasks[pieces[0].task], made)
    return [[pieces[number] for number in group] for group in groups]


def _common(study: Study, bench: Bench, piece: Piece) -> dict[str, Path]:
    recipes, task = [study.arms[number].recipe for number in piece.group], bench.tasks[piece.task]
    return common_beginnings(recipes, bench.start, task, piece.seed, study.out, study.kind, study.split)


def card_of(study: Study, bench: Bench, piece: Piece) -> Card | None:
    """The card of a run if it is there."""
    path = _card_path(study, bench, piece)
    return load_card(path) if path.is_file() else bench.packed.get(path.stem)


def _card_path(study: Study, bench: Bench, piece: Piece) -> Path:
    task, recipe = bench.tasks[piece.task], study.arms[piece.arm].recipe
    return find_place(study.out, work_key(recipe, bench.start, task, piece.seed, study.kind, study.split)).card


def result_of(study: Study, bench: Bench, piece: Piece) -> Result:
    """How a run ended, from its card."""
    arm, card = study.arms[piece.arm], card_of(study, bench, piece)
    facts = (piece.task, arm.name, arm.value, piece.seed)
    if card is None:
        return Result(*facts, "not run")
    ended = card["status"], number(card, "score"), card["why"], card["seconds"]
    return Result(*facts, *ended, weights_left(card), number(card, "size"))


def run_study(
    study: Study,
    bench: Bench,
    jobs: int | None = None,
    say: Say = quiet,
    line: Line = lambda text: None,
) -> list[Result]:
    """Make every run that has no card yet and give all results; `line` is told how each run ended."""
    planned = plan(study, bench)
    waiting = [open_ for job in planned if (open_ := [piece for piece in job if _is_open(study, bench, piece)])]
    if waiting:
        check_device(study.device)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("a study starts processes of its own; run it without accelerate launch or torchrun")
        with alone_in(study.out):
            _run(study, bench, waiting, sum(map(len, planned)), jobs, say, line)
            shutil.rmtree(study.out / "work", ignore_errors=True)
    return results_of(study, bench)


def _run(
    study: Study, bench: Bench, waiting: list[list[Piece]], total: int, jobs: int | None, say: Say, line: Line
) -> None:
    left = [piece for job in waiting for piece in job]
    if len(left) < total:
        line(f"{total - len(left)} of {total} runs are finished already")

    def finished(piece: Piece, _: Any = None) -> None:
        left.remove(piece)
        if not any(other._replace(arm=piece.arm) == piece for other in left):  # the last one of its group
            forget(_common(study, bench, piece))
        line(f"{total - len(left)} of {total}: {in_words(result_of(study, bench, piece))}")

    for piece, why in _foreseen(study, bench, left).items():
        facts = _facts(study, study.arms[piece.arm])
        give_up(study.arms[piece.arm].recipe, bench.start, bench.tasks[piece.task], piece.seed, study.out, why, **facts)
        finished(piece)
    waiting = [rest for job in waiting if (rest := [piece for piece in job if piece in left])]
    workers = min(jobs or default_jobs(study.device), len(left))
    if workers > 1:
        show = lambda running: say(*_combined(study, running, total - len(left), total))  # noqa: E731
        return _run_in_workers(study, bench, waiting, workers, finished, show)
    for piece in list(left):
        title = f"run {total - len(left) + 1} of {total}, {_short(study, piece)}"
        make_piece(study, bench, True, piece, lambda stage, *rest, t=title: say(f"{t}: {stage}", *rest))
        finished(piece)


def _foreseen(study: Study, bench: Bench, pieces: Sequence[Piece]) -> dict[Piece, str]:
    """The runs that will be refused since their recipe does not fit the model, and why."""
    reasons: dict[tuple[str, int], str] = {}
    for piece in pieces:
        if (key := (piece.task, piece.arm)) not in reasons:
            reasons[key] = foreseen(study.arms[piece.arm].recipe, bench.start, bench.tasks[piece.task], study.out)
    return {piece: why for piece in pieces if (why := reasons[piece.task, piece.arm])}


def _facts(study: Study, arm: Arm) -> dict[str, Any]:
    """What a card says of the study that its run belongs to."""
    about = {"kind": study.kind, "command": study.command, "split": study.split}
    return {**about, "preset": arm.name if study.named else None}


def cards_of(study: Study, bench: Bench) -> list[Card]:
    """The cards of all runs that ended so far."""
    found = (card_of(study, bench, piece) for job in plan(study, bench) for piece in job)
    return [card for card in found if card is not None]


def results_of(study: Study, bench: Bench) -> list[Result]:
    """How all runs of a study ended so far, in the order of arms, then seeds."""
    pieces = [piece for job in plan(study, bench) for piece in job]
    places = {name: place for place, name in enumerate(bench.tasks)}
    pieces.sort(key=lambda piece: (places[piece.task], piece.arm, study.seeds.index(piece.seed)))
    return [result_of(study, bench, piece) for piece in pieces]


def default_jobs(device: str | None) -> int:
    """One run at a time on a CPU, which it fills; several on a GPU."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return max(1, min(MOST, cores() // 2)) if on_gpu else 1


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_in_workers(
    study: Study,
    bench: Bench,
    jobs: list[list[Piece]],
    workers: int,
    finished: Callable[..., None],
    show: Callable[..., None],
) -> None:
    on_gpu = study.device != "cpu" and torch.cuda.is_available()
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), "TOKENIZERS_PARALLELISM": "false"}
    with shared_gpu(on_gpu) as environment:
        parting = partial(part, study, bench)
        run_jobs(jobs, partial(_prepare, study), workers, finished, show, threads | environment, parting)


def _prepare(study: Study) -> Callable[..., None]:
    """In a worker: read all that runs need, once."""
    bench = open_bench(study, lambda text: None)
    return partial(make_piece, study, bench, False)


def make_piece(
    study: Study, bench: Bench, alone: bool, piece: Piece, say: Say = quiet, deaths: int = 0, why: str = ""
) -> None:
    """Make one run; one that has killed two processes becomes a failed card instead.

    Not `alone`, trouble with memory or the GPU raises WorkerLost: more memory may be free later, and after some errors
    of a GPU nothing works any more in the same process.
    """
    arm, task, start = study.arms[piece.arm], bench.tasks[piece.task], bench.start
    facts = _facts(study, arm)
    if deaths >= 2:
        why = f"its process ended twice, the second time alone ({why})"
        return give_up(arm.recipe, start, task, piece.seed, study.out, why, **facts)
    facts |= {"device": study.device, "keep_model": study.keep_models, "again": study.again, "seconds": None}
    facts |= {"streams": bench.streams.setdefault(piece.task, {}), "states": study.states, "keep_going": True}
    facts["common"] = _common(study, bench, piece)
    if not alone:
        facts["raising"] = is_trouble_of_the_process
    try:
        make_one(arm.recipe, start, task, piece.seed, study.out, say=say, **facts)
    except Exception as error:
        if alone or not is_trouble_of_the_process(error):
            raise
        raise WorkerLost(why_of(error), _is_memory(error)) from error


def _is_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def is_trouble_of_the_process(error: Exception) -> bool:
    """Whether another process might do better: memory, or an error of the GPU, which the next runs would meet too."""
    names = ("cuda", "cublas", "cudnn")
    return _is_memory(error) or (isinstance(error, RuntimeError) and any(name in str(error).lower() for name in names))


def _is_open(study: Study, bench: Bench, piece: Piece) -> bool:
    card = card_of(study, bench, piece)
    return card is None or (study.again and card["status"] == "failed")


def in_words(result: Result) -> str:
    """One run in one line: "sst2, seed 9, mixture at 4: 85.2 (41 s)"."""
    at = "" if result.value is None else f" at {result.value}"
    score = "" if result.score is None else f" {result.score:.1f}"
    status = "" if result.status == "ok" else f" {result.status}{f', {result.why}' if result.why else ''}"
    took = "" if result.seconds is None else f" ({result.seconds:.0f} s)"
    return f"{result.task}, seed {result.seed}, {result.arm}{at}:{score}{status}{took}"


def _short(study: Study, piece: Piece) -> str:
    arm = study.arms[piece.arm]
    name = arm.name if len(arm.name) <= 24 else f"{arm.name[:23]}…"
    return f"{piece.task} s{piece.seed} {name}{'' if arm.value is None else f' {arm.value}'}"


def _combined(study: Study, running: Sequence[tuple[Piece, tuple[str, int, int, str]]], done: int, total: int) -> Any:
    """What all workers do, in the form that progress is told."""
    parts = []
    for piece, (stage, at, of, _) in running:
        parts.append(f"{_short(study, piece)} {stage}{f' {100 * at // of} %' if of else ''}")
    more = f", {len(parts) - 2} more" if len(parts) > 2 else ""
    what = f"{len(parts)} at once: {', '.join(parts[:2])}{more}" if parts else "" if done == total else "starting"
    return "runs", done, total, what
