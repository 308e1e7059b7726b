"""Writing files so that nothing already there is ever lost: aside first, then synced, then renamed into place."""

import ctypes
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smallbert.errors import RunError, UserError
from smallbert.machine.asides import make_held, remove_abandoned


def write_text(path: Path | str, text: str) -> None:
    """Write a text file whole or not at all."""
    write_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_json(path: Path | str, value: Any) -> None:
    """Write a value as readable JSON, whole or not at all; NaN is refused, since no other reader takes it."""
    write_text(path, _json(value))


def write_new_json(path: Path | str, value: Any) -> bool:
    """The same, unless a file of that name is there already; False where one is, which is left as it is."""
    try:
        write_file(path, lambda aside: aside.write_text(_json(value), encoding="utf-8"), _put_new)
    except RunError as error:
        if isinstance(error.__cause__, FileExistsError) and Path(path).exists():
            return False
        raise
    return True


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _put_new(aside: Path, path: Path) -> None:
    """Unlike a rename, a link fails where another process was a moment faster."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(path) from None
        aside.replace(path)


def write_file(path: Path | str, write: Callable[[Path], Any], put: Callable[[Path, Path], Any] = Path.replace) -> None:
    """Call `write` on a name beside `path`, sync what it wrote to disk, then rename it into place (or `put` it)."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        _sync(aside)
        put(aside, path)
        _sync(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; what was there before is untouched") from error
    finally:
        with suppress(OSError):  # where nothing could be written, there is nothing to take away
            aside.unlink()


def grow_file(path: Path, lines: Callable[[int], Iterable[str]], step: int = 1) -> None:
    """Write a file line by line, in its place only when whole; after a kill it goes on behind what is there.

    `lines(n)` gives all lines but the first n, which is a multiple of `step`. Who comes while another process writes
    the same file waits for it.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("a+b") as file:
            _wait_for(file)
            if path.exists():
                aside.unlink(missing_ok=True)
                return
            file.seek(0)
            ends = [0]
            for line in file:
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
            done = (len(ends) - 1) // step * step
            file.truncate(ends[done])
            for number, text in enumerate(lines(done), 1):
                file.write(text.encode() + b"\n")
                if number % step == 0:
                    file.flush()
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; what was there before is untouched") from error


def _wait_for(file: Any) -> None:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass  # a system without locks


@contextmanager
def write_folder(path: Path | str) -> Iterator[Path]:
    """Give an empty folder to fill; it takes the place of `path` only if everything inside it was written.

    >>> with write_folder("model") as aside:
    ...     (aside / "a.txt").write_text("…")
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    old, held = aside.with_name(aside.name + ".old"), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path)
        held = make_held(aside)
        yield aside
        for file in sorted(aside.rglob("*")):
            _sync(file)
        _sync(aside)
        while not (path.exists() and _exchange(aside, path)):
            if path.exists():
                path.rename(old)
            try:
                aside.rename(path)
                break
            except OSError:
                if not path.exists():  # else another process was a moment faster, and theirs is there to swap with
                    raise
        _sync(path.parent)
    except OSError as error:
        if old.exists() and not path.exists():
            old.rename(path)
        raise RunError(f"cannot write {path}: {error.strerror or error}; what was there before is untouched") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        if held is not None:
            os.close(held)


def move_folder(made: Path, path: Path) -> None:
    """Let a finished folder take its place in one step; what was there before goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.exists() and _exchange(made, path)):
        shutil.rmtree(path, ignore_errors=True)
        made.rename(path)
    _sync(path.parent)


def check_folder(out: Path | str) -> None:
    """Refuse a folder that cannot be written to before anything is done for it; nothing is made yet."""
    out = Path(out)
    there = next(one for one in (out, *out.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = f"{there} is {'not yours to write to' if there.is_dir() else 'a file'}"
        raise UserError(f"--out {out} cannot be written to: {why}; give another folder")


class InUse(UserError):
    """Another run of smallbert writes into the same folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder, so that the same command started twice does not write there twice; a kill lets go of it."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    path = folder / ".in-use"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written to: {error.strerror}") from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(f"{folder} is in use by another run of smallbert; wait for it, or give another --out") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def shared_folder(path: Path) -> Iterator[Callable[[], bool]]:
    """Use a folder that other processes may use as well; what this gives takes it away, unless one of them still does.

    Where nothing can be held, by the system or on this disk, nobody can know, and it stays.
    """
    file = _used_with_others(path)

    def leave() -> bool:
        if file is None or not _hold(file, alone=True):
            return False
        gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        path.rename(gone)  # in one step: who comes now begins with a new one
        shutil.rmtree(gone, ignore_errors=True)
        return True

    try:
        yield leave
    finally:
        if file is not None:
            file.close()


def _used_with_others(path: Path) -> Any:
    """The file of a folder that is locked by all who use it; None where it cannot be."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            file = (path / ".in-use").open("a")
        except FileNotFoundError:  # taken away just now
            continue
        if not _hold(file):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), (path / ".in-use").stat()):
                return file
        file.close()  # the folder went while we waited for the lock


def _hold(file: Any, alone: bool = False) -> bool:
    """Lock a file, with others or alone; False where others have it, or where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except (ImportError, OSError):
        return False
    return True


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that the disk is full; safetensors and tokenizers say it in errors of their own."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap names in one step, so that no kill finds neither; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
