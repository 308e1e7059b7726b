"""Several pieces of work at a time: worker processes that outlive their jobs, and a parent that outlives its workers.

A job is a list of pieces that one worker does in turn, until the parent sees that some need not wait for the others:
they become jobs of their own. A worker that dies takes no other with it: what it had not finished is tried once more at
the end, alone. When the parent is gone, so are the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from smallbert.errors import RunError, UserError

Say = Callable[[str, int, int, str], None]
Part = Callable[[Sequence[Any]], Sequence[Sequence[Any]]]
Work = Callable[[Any, Say, int, str], Any]  # (piece, say, how many workers it has killed so far, how the last died)
PATIENCE = 30.0  # seconds that a worker asked to stop has to save what it does
PAUSE = 0.3  # seconds between two messages on how far a worker is
LOOK = 1.0  # seconds between two looks for pieces that need not wait any more, while a worker has nothing to do


class WorkerLost(Exception):
    """Raised by work to say that its process cannot be used any more, and whether it was short of memory."""

    def __init__(self, why: str, memory: bool = False):
        super().__init__(why, memory)
        self.why, self.memory = why, memory


@dataclass(frozen=True)
class Job:
    """Pieces, one after the other; `deaths` is how many workers the first has killed, `why` how the last one died."""

    pieces: tuple[Any, ...]
    deaths: int = 0
    why: str = ""


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    ready: bool = False
    job: Job | None = None  # it knows of the first piece only
    said: tuple[str, int, int, str] = ("starting", 0, 0, "")
    lost: WorkerLost | None = None  # what it said before it went


@dataclass
class _Crew:
    """What a round of work is about."""

    prepare: Callable[[], Work]
    finished: Callable[[Any, Any], None]
    show: Callable[[list[tuple[Any, tuple[str, int, int, str]]]], None]
    part: Part
    waiting: list[Job] = field(default_factory=list)
    lost: list[Job] = field(default_factory=list)
    workers: list[_Worker] = field(default_factory=list)


def run_jobs(
    jobs: Sequence[Sequence[Any]],
    prepare: Callable[[], Work],
    workers: int,
    finished: Callable[[Any, Any], None],
    show: Callable[[list[tuple[Any, tuple[str, int, int, str]]]], None] = lambda running: None,
    environment: Mapping[str, str] | None = None,
    part: Part = lambda pieces: [pieces],
) -> None:
    """Do all pieces of all jobs in worker processes.

    Each worker calls `prepare` once (it must be picklable) and what that gives for every piece. In the parent,
    `finished(piece, result)` is called after each, and `show` with [(piece, (stage, done, total, info))] of those that
    run. A piece that killed two workers is handed out once more, with `deaths` 2, to be recorded instead of done.

    `part(pieces)` gives those of a job as jobs that may go at the same time, the first piece first; it is asked while
    that piece runs too. All workers that there may ever be work for are started at once, since they can prepare while
    the pieces are done that others wait for.
    """
    waiting = [Job(tuple(pieces)) for pieces in jobs if pieces]
    with _stopping_politely(), _in_environment(environment or {}):
        while waiting:
            crew = _Crew(prepare, finished, show, part, waiting)
            try:
                _do_round(crew, min(workers, _count(crew)))
            finally:
                _dismiss(crew.workers)
            waiting, workers = crew.lost, 1


def _do_round(crew: _Crew, size: int) -> None:
    """Hand out all that waits; a dead worker is replaced, unless memory seems to be what it died of."""
    crew.workers = [_start(crew.prepare) for _ in range(size)]
    looked = 0.0
    while crew.waiting or any(worker.job for worker in crew.workers):
        if not crew.workers:
            crew.workers = [_start(crew.prepare)]
        idle = [worker for worker in crew.workers if worker.ready and worker.job is None]
        if idle and not crew.waiting and time.monotonic() > looked + LOOK:
            looked = time.monotonic()
            for busy in crew.workers:
                _let_go(busy, crew)
        for worker in idle[: len(crew.waiting)]:
            _hand_out(crew.waiting.pop(0), worker, crew)
        handles = [handle for worker in crew.workers for handle in (worker.pipe, worker.process.sentinel)]
        woken = wait(handles, timeout=1.0)
        for worker in list(crew.workers):
            if worker.pipe in woken or worker.process.sentinel in woken:
                alive = worker.process.is_alive()  # asked first: what it sent before it ended is then all there
                _listen(worker, crew)
                if not alive:
                    _bury(worker, crew)
        crew.show([(worker.job.pieces[0], worker.said) for worker in crew.workers if worker.job])


def _count(crew: _Crew) -> int:
    """How many pieces are not finished, but for those put aside."""
    return sum(len(job.pieces) for job in [*crew.waiting, *(worker.job for worker in crew.workers if worker.job)])


def _hand_out(job: Job, worker: _Worker, crew: _Crew) -> None:
    """Give a worker the first piece of a job; the rest waits for it, or goes."""
    worker.job, worker.said = job, ("starting", 0, 0, "")
    _let_go(worker, crew)
    with suppress(OSError):  # it died just now; its end is seen soon
        worker.pipe.send((job.pieces[0], job.deaths, job.why))


def _let_go(worker: _Worker, crew: _Crew) -> None:
    """Let what need not wait for the piece that a worker does become jobs of their own, the next to be taken."""
    if worker.job and len(worker.job.pieces) > 1:
        kept, *others = crew.part(worker.job.pieces)
        worker.job = replace(worker.job, pieces=tuple(kept))
        crew.waiting[:0] = [Job(tuple(pieces)) for pieces in others]


def _listen(worker: _Worker, crew: _Crew) -> None:
    """Take in all that a worker has sent."""
    while worker.pipe.poll():
        try:
            word, what = worker.pipe.recv()
        except (EOFError, OSError):  # the end, or a message cut off by a kill
            return
        if word == "ready":
            worker.ready = True
        elif word == "say":
            worker.said = what
        elif word == "done":
            assert worker.job is not None
            (piece, *rest), worker.job = worker.job.pieces, None
            crew.finished(piece, what)
            if rest:
                _hand_out(Job(tuple(rest)), worker, crew)
        elif word == "lost":
            worker.lost = what
        else:  # something that would stop every other run too, such as a full disk
            raise what


def _bury(worker: _Worker, crew: _Crew) -> None:
    """Put what a dead worker had not finished aside, to be tried alone, and see that somebody takes its place."""
    crew.workers.remove(worker)
    worker.process.join()
    code = worker.process.exitcode
    if worker.job is None:
        if not worker.ready and not crew.workers:
            raise RunError(f"a worker process ended while it started (exit code {code}); try --jobs 1")
        return
    _let_go(worker, crew)
    killed = code == -signal.SIGKILL  # which is what a system short of memory does
    lost = worker.lost or WorkerLost(f"signal {-code}" if code < 0 else f"exit code {code}", memory=killed)
    job = replace(worker.job, deaths=worker.job.deaths + 1, why=lost.why)
    if job.deaths > 2:
        raise RunError(f"a worker process ended ({lost.why}) while it wrote down that a run had failed")
    crew.lost.append(job)
    if len(crew.workers) < _count(crew) and not lost.memory:
        crew.workers.append(_start(crew.prepare))


def _start(prepare: Callable[[], Work]) -> _Worker:
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    ours, theirs = spawn.Pipe()
    # Packed by hand: what it needs is imported when it is unpacked, and the worker must watch its parent before that.
    process = spawn.Process(target=_serve, args=(pickle.dumps(prepare), theirs))
    process.start()
    theirs.close()  # so that its end is the end of the pipe
    return _Worker(process, ours)


def _dismiss(workers: list[_Worker]) -> None:
    """Ask all workers to stop, which lets them save what they do, and make them if they do not."""
    for worker in workers:
        worker.process.terminate()
    end = time.monotonic() + PATIENCE
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.pipe.close()
    workers.clear()


def _serve(packed: bytes, pipe: Connection) -> None:
    """What a worker does: prepare once, then one piece after the other."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C goes to the parent alone, which asks the workers to stop, once
    last, stage = 0.0, ""

    def say(*what: Any) -> None:
        nonlocal last, stage
        now = time.monotonic()
        if what[0] != stage or now - last > PAUSE:
            last, stage = now, what[0]
            pipe.send(("say", what))

    import warnings

    warnings.simplefilter("ignore")  # of libraries, to programmers; the parent's screen is not theirs
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):  # asked to stop, or nobody is there any more
        try:
            work = pickle.loads(packed)()
            pipe.send(("ready", None))
            while True:
                piece, deaths, why = pipe.recv()
                pipe.send(("done", work(piece, say, deaths, why)))
        except BrokenPipeError:
            raise
        except (WorkerLost, MemoryError) as error:
            pipe.send(("lost", error if isinstance(error, WorkerLost) else WorkerLost("not enough memory", True)))
        except (UserError, RunError) as error:
            pipe.send(("error", error))
        except Exception as error:
            pipe.send(("error", RunError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _stopping_politely() -> Iterator[None]:
    """Let a polite kill of the parent stop the workers as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    mine = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if mine else None
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _in_environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
