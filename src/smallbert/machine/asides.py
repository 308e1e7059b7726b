"""Folders that are filled beside the name they will get: held while they are, and removed when a kill left one."""

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

OLD = 3600  # seconds: where locks hold on one machine only, another's folder is not touched while it is filled


def make_held(aside: Path) -> int | None:
    """Make a folder and hold it until what is given back is closed, or this process ends; None where nothing can be."""
    while True:
        aside.mkdir(exist_ok=True)
        held = _hold(aside, wait=True)
        if aside.exists():
            return held
        if held is not None:  # it was taken for an abandoned one in the moment before it was held
            os.close(held)


def remove_abandoned(path: Path) -> None:
    """Remove what killed processes left beside a path while they filled a folder for it.

    Where a folder of before was already out of the way, nothing is touched: both may be wanted. Nor is what changed
    within the last hour.
    """
    for left in path.parent.glob(".*"):
        if not re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}", left.name) or left.is_symlink():
            continue
        if left.with_name(f"{left.name}.old").exists() or not left.is_dir():
            continue
        if (held := _hold(left)) is not None:
            with suppress(OSError):  # gone meanwhile
                seen = left.stat()
                # The name may be another folder's by now.
                if os.path.samestat(os.fstat(held), seen) and time.time() - seen.st_mtime > OLD:
                    shutil.rmtree(left, ignore_errors=True)
            os.close(held)


def _hold(folder: Path, wait: bool = False) -> int | None:
    """Lock a folder; None where another process has it and is not waited for, and where there are no locks."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return handle
    os.close(handle)
    return None
