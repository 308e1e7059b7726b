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
    with (folder / "attempts").open("a") as file:
        file.write(f"{name} {deaths}\n")
    if deaths < {"dies once": 1, "dies": 2}.get(what, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "crashes" and deaths < 2:
        os._exit(3)
    if what == "memory" and not deaths:
        raise MemoryError
    if what == "full disk":
        raise RunError("cannot write: the disk is full")
    if what == "sleeps":
        time.sleep(60)
    return f"{name} {os.getpid()} {why}"


def broken():
    """Preparation that cannot succeed."""
    raise RunError("the model is gone")


def killed():
    """Preparation that the system ends."""
    os.kill(os.getpid(), signal.SIGKILL)
