"""The search: trials until enough are finished, in one process or several, on one machine or more; then the winner.

Trials are chosen by rows held out of train. The winner and the default recipe are then trained on all of train with
other seeds and scored once on dev, as the two arms of a study.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from smallbert.errors import RunError, UserError
from smallbert.machine.files import InUse, shared_folder
from smallbert.machine.jobs import WorkerLost, run_jobs
from smallbert.machine.sharing import default_jobs, is_memory, is_trouble_of_the_process, shared_machine
from smallbert.making.estimate import files_read
from smallbert.making.make import why_of
from smallbert.making.starting import Line, Say, check_device, quiet
from smallbert.measuring.findings import Result
from smallbert.recipes.recipe import Recipe
from smallbert.recipes.space import expand_space
from smallbert.studies import study as studies
from smallbert.studies.arms import Arm
from smallbert.studies.runs import run_study
from smallbert.tuning.held import search_task
from smallbert.tuning.records import DIED, DIVERGED, FAILED, OK, Record, best_of, records_of, write_records
from smallbert.tuning.space import Space, read_space
from smallbert.tuning.storage import is_alive, open_study, optuna, revive
from smallbert.tuning.trial import COMMON, SEED, Settled, Setup, open_setup, run_trial

DEFAULT, TUNED = "default", "tuned"
HOPELESS = 5  # trials that fail before one does not, after which a search is given up
SILENCE = 30.0  # seconds after which a line says how far it is
PAUSE = 1.0  # seconds between two looks at what other processes do


@dataclass(frozen=True)
class Tuning:
    """All that says what to search; plain enough to be sent to another process."""

    study: studies.Study  # the model, the task and the final runs; its arms are known at the end
    space: str
    trials: int
    storage: str
    name: str | None = None
    draws: int = 0  # seed of what is drawn
    prune: bool = True


def check_tuning(tuning: Tuning) -> Space:
    """Refuse what cannot be searched before anything is loaded."""
    if tuning.trials < 1:
        raise UserError(f"--trials was given {tuning.trials}; write how many recipes to try, 1 or more")
    if SEED in tuning.study.seeds:
        raise UserError(f"--seeds has {SEED}, with which trials are trained; the winner is scored with other seeds")
    space = read_space(tuning.space)
    for method in (method for phase in space.default().phases() for method in phase):
        if (store := method.settings().get("store", "auto")) not in ("auto", "none"):
            raise UserError(
                f"store={store!r} holds states of all of train, and trials learn from a part of it; leave store out: "
                "tune keeps the states of a frozen backbone for all trials by itself"
            )
    return space


def begin(tuning: Tuning, bench: studies.Bench) -> Setup:
    """Open the search for this process; the first to come begins it, with the default recipe as its first trial."""
    space, start = check_tuning(tuning), bench.start
    (whole,) = bench.tasks.values()
    task = search_task(whole)
    words = " ".join(space.text.split())
    about = {"space": words, "model": start.fingerprint, "task": task.fingerprint, "seed": SEED}
    if files := sorted({read for recipe in space.ends() if (read := files_read(recipe))}):
        about["teacher or text"] = ", ".join(files)
    name = tuning.name or f"{whole.name}-{hashlib.sha256(str(about).encode()).hexdigest()[:10]}"
    count = space.count()
    every = count is not None and count <= tuning.trials
    study = open_study(tuning.storage, name, about, space.defaults(), tuning.draws, every, tuning.prune)
    return open_setup(start, task, space, study, tuning.trials, tuning.study.out, check_device(tuning.study.device))


def search(
    tuning: Tuning, bench: studies.Bench, jobs: int | None = None, say: Say = quiet, line: Line = lambda text: None
) -> list[Record]:
    """Run the trials that are missing and give all of them; running again adds only what is missing then."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a search starts processes of its own; run it without accelerate launch or torchrun")
    setup, workers = begin(tuning, bench), jobs or default_jobs(tuning.study.device)
    teller = _Teller(setup, tuning.study.out, say, line)
    if workers > 1:
        # What all trials have in common is made by the first, so that it is not made by every worker.
        _search(setup, teller, most=1)
        if _missing(setup, records_of(setup.study)) > 0:
            _search_in_workers(tuning, min(workers, tuning.trials), teller)
    _search(setup, teller)
    setup.held.close()
    records = records_of(setup.study)
    write_records(records, tuning.study.out)
    return records


def _search(setup: Setup, teller: _Teller, alone: bool = True, most: int | None = None) -> None:
    """Trials one by one until none is missing (or so many were done here); waits for those that others still run."""
    done = 0
    while done != most:
        revive(setup.study)
        records = teller.look()
        _give_up_if_hopeless(records)
        if _missing(setup, records) <= 0 or _is_exhausted(setup, records):
            return
        running = sum(map(is_alive, _running(setup)))
        if _missing(setup, records) <= running:
            teller.say("waiting for trials of other processes", 0, 0, f"{running} running")
            time.sleep(PAUSE)
            continue
        objective = partial(run_trial, setup, alone=alone, say=teller.during)
        setup.study.optimize(lambda trial, run=objective: run(trial), n_trials=1, catch=(Settled,))
        done += 1


def _running(setup: Setup) -> list[Any]:
    return setup.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))


def _missing(setup: Setup, records: Sequence[Record]) -> int:
    return setup.trials - sum(record.is_done for record in records)


def _is_exhausted(setup: Setup, records: Sequence[Record]) -> bool:
    """Whether every recipe of a space that has an end was tried."""
    count = setup.space.count()
    if count is None or count > setup.trials:
        return False
    tried = {Recipe(record.recipe).key() for record in records if record.is_done}
    return tried >= _every_key(setup.space.text, setup.trials)


@lru_cache
def _every_key(space: str, most: int) -> frozenset[str]:
    return frozenset(recipe.key() for recipe in expand_space(space, most))


def _give_up_if_hopeless(records: Sequence[Record]) -> None:
    done = [record for record in records if record.is_done]
    bad = [record for record in done if record.status in (FAILED, DIED)]
    if len(bad) == len(done) >= HOPELESS:
        raise RunError(f"all of the first {len(bad)} trials failed, the last since: {bad[-1].why}")


def _search_in_workers(tuning: Tuning, workers: int, teller: _Teller) -> None:
    """Let several processes search at once; each is one piece of work that ends when nothing is missing."""
    pieces = [[number] for number in range(workers)]
    with shared_machine(workers, tuning.study.device) as environment:
        finished = lambda piece, result: None  # noqa: E731 - the storage knows more
        run_jobs(pieces, partial(_prepare, tuning), workers, finished, teller.together, environment)


def _prepare(tuning: Tuning) -> Callable[..., None]:
    """In a worker: read all that trials need, once."""
    bench = studies.open_bench(tuning.study, lambda text: None)
    return partial(_work, begin(tuning, bench))


def _work(setup: Setup, piece: int, say: Say = quiet, deaths: int = 0, why: str = "") -> None:
    if deaths >= 2:
        return  # the trials that killed it are recorded as such
    try:
        _search(setup, _Teller(setup, None, say, lambda text: None), alone=False)
    except Exception as error:
        if is_trouble_of_the_process(error):
            raise WorkerLost(why_of(error), is_memory(error)) from error
        raise


class _Teller:
    """Says how far a search is, and one line about every trial that is worth one."""

    def __init__(self, setup: Setup, out: Path | None, say: Say, line: Line) -> None:
        self.setup, self.out, self.say, self.line = setup, out, say, line
        self.records = records_of(setup.study)
        self.told = {record.trial for record in self.records if record.is_done}
        self.written = self.said = time.monotonic()
        if self.told:
            line(f"{len(self.told)} of {setup.trials} trials are finished already")

    def look(self) -> list[Record]:
        """See what is new in the storage, and say it."""
        before, self.records = best_of(self.records), records_of(self.setup.study)
        best = best_of(self.records)
        for record in self.records:
            if record.is_done and record.trial not in self.told:
                self.told.add(record.trial)
                if record.status in (FAILED, DIVERGED, DIED) or (record == best and best != before):
                    self.line(f"trial {record.trial}, {in_words(record)}")
        if self.out is not None and time.monotonic() - self.written > 10:
            write_records(self.records, self.out)
            self.written = time.monotonic()
        self.during("", 0, 0, "")
        return self.records

    def during(self, stage: str, at: int, of: int, info: str) -> None:
        """How far the search is while a trial is on its way."""
        now = f", {stage}{f' {100 * at // of} %' if of else ''}" if stage else ""
        self._bar(now)

    def together(self, running: Sequence[Any]) -> None:
        """How far it is while workers run trials."""
        if time.monotonic() - getattr(self, "looked", 0.0) > PAUSE:
            self.looked = time.monotonic()
            self.look()
        self._bar(f", {len(running)} processes" if running else "")

    def _bar(self, now: str) -> None:
        done, best = sum(record.is_done for record in self.records), best_of(self.records)
        told = "" if best is None else f"best {best.score:.2f} (trial {best.trial})"
        info = f"{told}{now}".removeprefix(", ")
        self.say("trials", min(done, self.setup.trials), self.setup.trials, info)
        if time.monotonic() - self.said > SILENCE:  # where there is no bar, this is all that is seen of a long trial
            self.said = time.monotonic()
            self.line(f"{done} of {self.setup.trials} trials, {info}")


def in_words(record: Record) -> str:
    """How a trial ended, in one line: "best so far 84.20: finetune.lr 3.1e-05, finetune.epochs 2"."""
    drawn = ", ".join(f"{name} {value}" for name, value in record.drawn.items())
    end = f"best so far, {record.score:.2f}" if record.status == OK else f"{record.status} ({record.why})"
    return f"{end}: {drawn}"


def run_finals(
    tuning: Tuning,
    bench: studies.Bench,
    best: Record,
    jobs: int | None = None,
    say: Say = quiet,
    line: Line = lambda text: None,
) -> tuple[studies.Study, list[Result]]:
    """Train the default recipe and the winner on all of train with each seed, and score them once."""
    arms = [Arm(DEFAULT, read_space(tuning.space).default())]
    if (tuned := Recipe(best.recipe)).key() != arms[0].recipe.key():
        arms.append(Arm(TUNED, tuned))
    common = tuning.study.out / COMMON
    final = replace(tuning.study, arms=tuple(arms), named=True, states=common / "states")
    with shared_folder(common) as leave:
        while True:
            try:
                results = run_study(final, bench, jobs, say, line)
                break
            except InUse:  # another process of the same search trains them; its cards are ours
                say("waiting for another process to train the winner", 0, 0, "")
                time.sleep(PAUSE)
        leave()  # whoever of several processes is the last takes it away
    return final, results
