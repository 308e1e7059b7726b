"""What worker processes are given to do in tests; light, since every one of them imports it anew."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from smallbert.errors import RunError


def prepare(folder: Path):
    """Work whose pieces are (name, what to do); every attempt is noted in a file."""
    (folder / f"worker-{os.getpid()}").touch()
    return partial(work, folder)


def work(folder: Path, piece, say, deaths: int, why: str):
    name, what = piece
    say("working", 1, 2, name)
    time.sleep(0.05)  # so that it is seen
    note(folder, "attempts", f"{name} {deaths}")
    if deaths < {"dies once": 1, "begins after a death": 1, "dies": 2}.get(what, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "crashes" and deaths < 2:
        os._exit(3)
    if what == "memory" and not deaths:
        raise MemoryError
    if what == "full disk":
        raise RunError("cannot write: the disk is full")
    if what == "sleeps":
        time.sleep(60)
    if what.startswith("begins"):
        (folder / "made").touch()
    if what.endswith("meets"):
        meet(folder / "meeting", 3)
    return f"{name} {os.getpid()} {why}"


def note(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as file:
        file.write(f"{text}\n")


def meet(folder: Path, many: int, seconds: float = 60.0) -> None:
    """Wait until so many processes are here, which they can only be if they run at the same time."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + seconds
    while len(list(folder.iterdir())) < many:
        if time.monotonic() > end:
            raise RunError(f"only {len(list(folder.iterdir()))} of {many} processes met")
        time.sleep(0.02)


def is_alive(process: int | str) -> bool:
    """Whether a process runs; one that ended counts as gone, even where nobody asks how it ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(true, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class Slow:
    """Preparation that takes long to unpack, as imports do."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return _unpack_slowly, (self.folder,)


def _unpack_slowly(folder: Path):
    (folder / f"worker-{os.getpid()}").touch()
    time.sleep(60)


def prepare_watched(plan: dict, asked, streams):
    """The work of a study whose trainings are noted as "methods process", and met or killed as planned.

    {"magnitude + train": 2} waits for a second process that trains; {"distill + train": 0} is killed the first time
    """
    from smallbert.making import run
    from smallbert.studies import runs

    real, folder = run.train, asked.out.parent

    def train(phase, *rest):
        names = " + ".join(sorted(method.name for method in phase.methods))
        note(folder, "trained", f"{names}: {os.getpid()}")
        if plan.get(names) == 0 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os._exit(3)
        if plan.get(names):
            meet(folder / "meeting", plan[names])
        return real(phase, *rest)

    run.train = train
    return runs._prepare(asked, streams)


def broken():
    """Preparation that cannot succeed."""
    raise RunError("the model is gone")


def killed():
    """Preparation that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)
