"""The runs of a study made, one by one or several at a time, each once; one that fails becomes a card as well."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from smallbert.errors import UserError
from smallbert.machine.files import InUse, alone_in
from smallbert.machine.jobs import WorkerLost, run_jobs
from smallbert.machine.sharing import default_jobs, is_memory, is_trouble_of_the_process, shared_machine
from smallbert.making.beginnings import forget
from smallbert.making.estimate import look_ahead, without_weights
from smallbert.making.make import give_up, make_one, why_of
from smallbert.making.places import clear_work, is_begun, words_of_all
from smallbert.making.starting import Line, Say, check_device, quiet
from smallbert.measuring.findings import Result
from smallbert.recipes.recipe import Recipe
from smallbert.studies.study import (
    Bench,
    Piece,
    Study,
    beginnings_of,
    card_of,
    command_of,
    open_bench,
    part,
    plan,
    result_of,
    results_of,
)
from smallbert.texts.data import Stream, stream_name, tokenise, usable_length


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
            clear_work(study.out)
    elif (study.out / "work").exists():  # a kill came behind the last card
        with suppress(InUse), alone_in(study.out):
            clear_work(study.out)
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
            forget(beginnings_of(study, bench, piece))
        line(f"{total - len(left)} of {total}: {in_words(result_of(study, bench, piece))}")

    for piece, why in _foreseen(study, bench, left, say, line).items():
        facts = _facts(study, bench, piece)
        give_up(study.arms[piece.arm].recipe, bench.start, bench.tasks[piece.task], piece.seed, study.out, why, **facts)
        finished(piece)
    waiting = [rest for job in waiting if (rest := [piece for piece in job if piece in left])]
    workers = min(jobs or default_jobs(study.device), len(left))
    if workers > 1:
        show = lambda running: say(*_combined(study, running, total - len(left), total))  # noqa: E731
        return _run_in_workers(study, bench, waiting, workers, finished, say, show)
    for piece in list(left):
        title = f"run {total - len(left) + 1} of {total}, {_short(study, piece)}"
        make_piece(study, bench, True, piece, lambda stage, *rest, t=title: say(f"{t}: {stage}", *rest))
        finished(piece)


def _foreseen(study: Study, bench: Bench, pieces: Sequence[Piece], say: Say, line: Line) -> dict[Piece, str]:
    """The runs that will be refused since their recipe does not fit the model, and why; `line` is told the rest."""
    empty, begun = without_weights(bench.start.encoder), is_begun(study.out)
    recipes: dict[str, dict[Recipe, None]] = {}
    for piece in pieces:
        recipes.setdefault(piece.task, {})[study.arms[piece.arm].recipe] = None
    found = {name: look_ahead(some, empty, bench.tasks[name], say) for name, some in recipes.items()}
    refused: dict[Piece, str] = {}
    told: dict[str, None] = {}
    for piece in pieces:
        arm = study.arms[piece.arm]
        outlook = found[piece.task][arm.recipe]
        told |= dict.fromkeys(f"{piece.task}, {arm.name}: {warning}" for warning in outlook.warnings)
        if outlook.refused and not begun:
            refused[piece] = why_of(outlook.refused)
    for warning in told:
        line(warning)
    return refused


def _facts(study: Study, bench: Bench, piece: Piece) -> dict[str, Any]:
    """What a card says of its run besides what it found."""
    about = {"kind": study.kind, "command": command_of(study, bench, piece), "split": study.split}
    return {**about, "preset": study.arms[piece.arm].name if study.named else None}


def _run_in_workers(
    study: Study,
    bench: Bench,
    jobs: list[list[Piece]],
    workers: int,
    finished: Callable[..., None],
    say: Say,
    show: Callable[..., None],
) -> None:
    streams = _tokenise(study, bench, [piece for job in jobs for piece in job], say)
    show([])
    with shared_machine(workers, study.device) as environment:
        parting = partial(part, study, bench)
        run_jobs(jobs, partial(_prepare, study, streams), workers, finished, show, environment, parting)


def _tokenise(study: Study, bench: Bench, pieces: Sequence[Piece], say: Say) -> dict[str, dict[str, Stream]]:
    """The tokens of tasks that something trains on: made once by all cores, and not by each worker with its few."""
    encoder, found = bench.start.encoder, dict[str, dict[str, Stream]]()
    for name in dict.fromkeys(piece.task for piece in pieces if _trains(study.arms[piece.arm].recipe)):
        task, tokenizer = bench.tasks[name], encoder.tokenizer
        report = lambda done, total, name=name: say(f"tokenising {name}", done, total, "")  # noqa: E731
        with suppress(UserError):  # each run of this task says why, and others go on
            length = usable_length(encoder, None, task)
            made = tokenise(tokenizer, task.split("train"), task.kind, length, report)
            # Where windows lie in their contexts is for reading answers, and would be most of what is sent.
            found[name] = {stream_name(tokenizer, length): replace(made, windows=None)}
    return found


def _trains(recipe: Recipe) -> bool:
    return any(phase.trains for phase in recipe.phases())


def _prepare(study: Study, streams: dict[str, dict[str, Stream]]) -> Callable[..., None]:
    """In a worker: read all that runs need, once."""
    bench = open_bench(study, lambda text: None)
    bench.streams |= streams
    return partial(make_piece, study, bench, False)


def make_piece(
    study: Study, bench: Bench, alone: bool, piece: Piece, say: Say = quiet, deaths: int = 0, why: str = ""
) -> None:
    """Make one run; one that has killed two processes becomes a failed card instead.

    Not `alone`, trouble with memory or the GPU raises WorkerLost: more memory may be free later, and after some errors
    of a GPU nothing works any more in the same process.
    """
    arm, task, start = study.arms[piece.arm], bench.tasks[piece.task], bench.start
    facts = _facts(study, bench, piece)
    if deaths >= 2:
        why = f"its process ended twice, the second time with no other run beside it ({why})"
        return give_up(arm.recipe, start, task, piece.seed, study.out, why, **facts)
    facts |= {"device": study.device, "keep_model": study.keep_models, "again": study.again, "seconds": None}
    facts |= {"streams": bench.streams.setdefault(piece.task, {}), "states": study.states, "keep_going": True}
    facts |= {"common": beginnings_of(study, bench, piece), "said": words_of_all(study.out)}
    if not alone:
        facts["raising"] = is_trouble_of_the_process
    try:
        make_one(arm.recipe, start, task, piece.seed, study.out, say=say, **facts)
    except Exception as error:
        if alone or not is_trouble_of_the_process(error):
            raise
        raise WorkerLost(why_of(error), is_memory(error)) from error


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
