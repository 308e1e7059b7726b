"""Building a store: every shard is a function of the model and the data alone, whoever writes it and however often."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.errors import UserError
from smallbert.features.computing import LARGEST, compute_shard
from smallbert.features.parts import Name
from smallbert.features.plan import SHARD, Plan, difference, plan_store, text_keys
from smallbert.features.shards import read_about, write_arrays
from smallbert.features.store import LENGTHS, MANIFEST, Store, is_sound, many, open_store, read_manifest, shard_name
from smallbert.machine.files import write_json, write_new_json
from smallbert.machine.processes import processes
from smallbert.model.encoder import Encoder
from smallbert.texts.data import STUDENT, Stream

Say = Callable[[str, int, int, str], None]
STAGE = "storing hidden states"
CLAIMS = ".claims"  # a file whose bytes stand for shards, to be locked by who writes them
PAPERS = 2**30  # the byte that stands for store.json and the lengths, behind those of all shards


class Taken(UserError):
    """A folder in which there is something, but no store."""


class NoRoom(UserError):
    """A store that does not fit on its disk."""


def build_store(
    encoder: Encoder,
    stream: Stream,
    out: Path | str,
    *,
    layers: str | Sequence[Name] = "all",
    tokens: str = "all",
    dtype: str = "float16",
    length: int | None = None,
    scores: str = "",
    model: str = "",
    about: dict[str, Any] | None = None,
    shard_bytes: int = SHARD,
    shard_texts: int | None = None,
    verify: bool = False,
    say: Say = lambda stage, done, total, info: None,
    line: Callable[[str], None] = lambda text: None,
    stage: str = STAGE,
) -> Store:
    """Write the hidden states of a stream (see plan_store), or what of them is missing, and open the store.

    Any number of processes and machines may do so at once on the same folder: each takes shards that no other is at,
    and whoever sees the last one finished writes store.json. With `verify`, shards that are there already are read,
    and damaged ones written anew.
    """
    options: dict[str, Any] = {"layers": layers, "tokens": tokens, "dtype": dtype, "length": length, "about": about}
    options |= {"scores": scores, "model": model, "shard_bytes": shard_bytes, "shard_texts": shard_texts}
    plan, out = plan_store(encoder, stream, **options), Path(out)
    used = out.exists() and (not out.is_dir() or any(one.name[0] != "." for one in out.iterdir()))
    known = _known(plan, out)  # after that look: what another process puts there meanwhile begins with store.json
    if known is None and used:
        raise Taken(f"{out} already holds something else; give another folder, or move it away first")
    _sweep(out)
    if verify:
        _remove_damaged(plan, out, say, line)
    left = [number for number in range(len(plan.ranges)) if not plan.is_whole(out, number)]
    _check_room(plan, left, out, line)
    if known is None or not known["shards"] or left or not is_sound(out / LENGTHS, plan.about["store"]):
        _write_all(encoder, stream, plan, out, _Tell(plan, out, say, stage))
    (out / CLAIMS).unlink(missing_ok=True)
    return open_store(out)


def _known(plan: Plan, out: Path) -> dict[str, Any] | None:
    """What store.json says, if there is one; one of other hidden states is refused."""
    known = read_manifest(out)
    if known is not None and known["store"] != plan.about["store"]:
        raise UserError(f"{out} holds other hidden states: {difference(known, plan.about)}; give another folder")
    return known


def _remove_damaged(plan: Plan, out: Path, say: Say, line: Callable[[str], None]) -> None:
    """Read the shards that are there, each process its share of them, so that none of them is kept damaged."""
    state = processes()
    for number in range(state.process_index, len(plan.ranges), state.num_processes):
        file = out / shard_name(number)
        if file.exists():
            say("checking what is there", number, len(plan.ranges), file.name)
            if not is_sound(file, plan.about["store"]):
                line(f"{file} is damaged; it is written again")
                file.unlink(missing_ok=True)
    state.wait_for_everyone()


def free_room(out: Path) -> tuple[int, Path]:
    """How many bytes are free where a folder is or will be, and the folder that is there."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free, there


def _check_room(plan: Plan, left: list[int], out: Path, line: Callable[[str], None]) -> None:
    """Say how large the store will be, and refuse to begin what cannot be finished."""
    need, (free, there) = sum(map(plan.bytes, left)), free_room(out)
    about, size = plan.about, f"{plan.total / 1e6:,.1f} MB"
    line(
        f"{about['texts']:,} texts, {about['text_tokens']:,} tokens, {many(len(about['layers']), 'hidden state')} of "
        f"width {about['width']}, {about['dtype']}: {size} in {many(len(plan.ranges), 'shard')}, "
        f"{plan.total / about['texts'] / 1e3:,.1f} kB a text"
        + (f"; {need / 1e6:,.1f} MB are left to write" if len(left) < len(plan.ranges) else "")
    )
    if need > free:
        raise NoRoom(
            f"the store needs {need / 1e6:,.1f} MB more, but {there} has {free / 1e6:,.1f} MB free; choose fewer "
            "layers, tokens='first' or a smaller dtype, or another disk"
        )


def _write_all(encoder: Encoder, stream: Stream, plan: Plan, out: Path, tell: _Tell) -> None:
    """Write every shard that is not there yet and that nobody else is at, then store.json."""
    keys = text_keys(stream.views[STUDENT]).view(np.uint8).reshape(-1, 16)
    known: dict[str, np.ndarray] = {"lengths": plan.counts.astype(np.int32), "keys": keys}
    out.mkdir(parents=True, exist_ok=True)
    with (out / CLAIMS).open("a") as claims, _claimed(claims, PAPERS, wait=True):
        if not write_new_json(out / MANIFEST, {**plan.about, "shards": []}):
            _known(plan, out)  # another process may have begun another store here meanwhile
        write_arrays(out / LENGTHS, known, {"store": plan.about["store"]})
    state, training = processes(), encoder.training
    # Each begins with shards of its own, then helps with what others have not come to.
    order = sorted(range(len(plan.ranges)), key=lambda n: n % state.num_processes != state.process_index)
    encoder.eval()
    try:
        with (out / CLAIMS).open("a") as claims:
            while left := [number for number in order if not plan.is_whole(out, number)]:
                busy = False
                for number in left:
                    with _claimed(claims, number) as mine:
                        if mine is not False and not plan.is_whole(out, number):
                            _write_shard(encoder, stream, plan, out, number, tell)
                            busy = True
                tell.look()
                if not busy:
                    tell.wait()
                    time.sleep(0.2)
    finally:
        encoder.train(training)
    found = [read_about(out / shard_name(number)) for number in range(len(plan.ranges))]
    abouts = [one[1] for one in found if one is not None]
    clipped = sum(int(about["clipped"]) for about in abouts)
    notes = [*stream.notes, *([f"{clipped} values beyond {LARGEST:.0f} were clipped there"] if clipped else [])]
    shards = [
        {"file": shard_name(n), "start": start, "stop": stop, "bytes": plan.bytes(n), "crc32": abouts[n]["crc32"]}
        for n, (start, stop) in enumerate(plan.ranges)
    ]
    finished = {**plan.about, "bytes": plan.total, "notes": notes, "shards": shards}
    with (out / CLAIMS).open("a") as claims, _claimed(claims, PAPERS, wait=True):
        if _known(plan, out) != finished:
            write_json(out / MANIFEST, finished)
    _sweep(out)


def _sweep(out: Path) -> None:
    """Take away what killed processes left of store.json and the lengths; where a live one writes, leave all."""
    left = [file for name in (MANIFEST, LENGTHS) for file in out.glob(f".{name}.*")]
    if left:
        with suppress(OSError), (out / CLAIMS).open("a") as claims, _claimed(claims, PAPERS) as mine:
            for file in left if mine else ():
                file.unlink(missing_ok=True)


@contextmanager
def _claimed(claims: Any, number: int, wait: bool = False) -> Iterator[bool | None]:
    """Hold one shard, so that no other process writes it too; a kill lets go of it. False where another holds it.

    None where nothing can be held, by the system or on this disk: the same bytes may then be written twice.
    """
    try:
        import fcntl
    except ImportError:
        yield None
        return
    try:
        fcntl.lockf(claims, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, number)
    except (BlockingIOError, PermissionError):
        yield False
        return
    except OSError:
        yield None
        return
    try:
        yield True
    finally:
        fcntl.lockf(claims, fcntl.LOCK_UN, 1, number)


def _write_shard(encoder: Encoder, stream: Stream, plan: Plan, out: Path, number: int, tell: _Tell) -> None:
    file = out / shard_name(number)
    for aside in out.glob(f".{file.name}.*"):  # of a killed process: nobody else holds this shard
        aside.unlink(missing_ok=True)
    arrays, clipped = compute_shard(encoder, stream, plan, number, tell)
    start, stop = plan.ranges[number]
    about = {"store": plan.about["store"], "texts": f"{start} to {stop}", "clipped": str(clipped)}
    write_arrays(file, {name: array.numpy() for name, array in arrays.items()}, about)
    tell.look()


class _Tell:
    """Says how far the whole store is; how long it will take, whoever shows it knows by itself."""

    def __init__(self, plan: Plan, out: Path, say: Say, stage: str):
        self.plan, self.out, self.say, self.stage, self.total = plan, out, say, stage, len(plan.counts)
        self.done = self._whole()

    def _whole(self) -> int:
        return sum(stop - start for n, (start, stop) in enumerate(self.plan.ranges) if self.plan.is_whole(self.out, n))

    def look(self) -> None:
        """See what is finished by now, whoever wrote it."""
        self.done = self._whole()
        self(0)

    def __call__(self, here: int) -> None:
        self.say(self.stage, self.done + here, self.total, "")

    def wait(self) -> None:
        """All that is left is being written by others."""
        self.say(f"{self.stage}: waiting for other processes", self.done, self.total, "")
