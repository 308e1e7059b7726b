"""Files and folders are written whole or not at all, and what was there before is never lost."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from smallbert.errors import RunError, UserError
from smallbert.machine import asides, files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    for text in ("first", "second"):
        with files.write_folder(tmp_path / "model") as aside:
            (aside / "a.txt").write_text(text)
    assert (tmp_path / "model" / "a.txt").read_text() == "second"
    assert names(tmp_path) == ["model"]  # nothing is left aside


KILLED = """
import os, signal, sys
from smallbert.machine.files import write_folder
with write_folder(sys.argv[1]) as aside:
    (aside / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_aside_is_removed_by_the_next(tmp_path):
    pytest.importorskip("fcntl")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "model"])
    (left,) = names(tmp_path)
    assert left.startswith(".model.")
    for other in (".model.work", ".models.01234567", ".model.0123456x", ".model.89abcdef", ".model.89abcdef.old"):
        (tmp_path / other).mkdir()
    asides.remove_abandoned(tmp_path / "model")
    assert left in names(tmp_path)  # it may be another machine's, where locks do not reach
    os.utime(tmp_path / left, (0, 0))
    with files.write_folder(tmp_path / "model") as first:
        os.utime(first, (0, 0))
        with files.write_folder(tmp_path / "model") as second:  # as another process might, at the same time
            assert first.exists() and second.exists() and left not in names(tmp_path)
            (second / "a.txt").write_text("whole")
        assert first.exists()
    kept = [".model.0123456x", ".model.89abcdef", ".model.89abcdef.old", ".model.work", ".models.01234567", "model"]
    assert names(tmp_path) == kept


def test_a_folder_taken_for_an_abandoned_one_is_made_again(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    real, seen = asides._hold, []

    def slow(folder, wait=False):
        if not seen:
            seen.append(folder)
            asides.remove_abandoned(tmp_path / "model")
        return real(folder, wait)

    monkeypatch.setattr(asides, "_hold", slow)
    monkeypatch.setattr(asides, "OLD", -1)
    with files.write_folder(tmp_path / "model") as aside:
        (aside / "a.txt").write_text("whole")
    assert len(seen) == 1 and names(tmp_path) == ["model"]


def test_a_name_that_is_another_folders_by_now_is_left_alone(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    real, left = asides._hold, tmp_path / ".model.01234567"
    left.mkdir()

    def swap(folder, wait=False):
        held = real(folder, wait)
        left.rename(tmp_path / "gone")  # another process removed it, and a third made it anew
        left.mkdir()
        (left / "half").write_text("half")
        return held

    monkeypatch.setattr(asides, "_hold", swap)
    monkeypatch.setattr(asides, "OLD", -1)
    asides.remove_abandoned(tmp_path / "model")
    assert names(left) == ["half"]


def test_two_may_write_one_folder_at_once(tmp_path):
    both = threading.Barrier(2)

    def write(number):
        with files.write_folder(tmp_path / f"model-{number}") as aside:
            (aside / "a.txt").write_text("same")
            both.wait(10)

    with ThreadPoolExecutor(2) as pool:
        for number in range(50):
            list(pool.map(write, [number, number]))
            assert (tmp_path / f"model-{number}" / "a.txt").read_text() == "same"
    assert len(names(tmp_path)) == 50


def test_two_names_are_swapped_in_one_step(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot swap names")
    assert (tmp_path / "a" / "who").read_text() == "b"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch, kind):
    def write(text):
        if kind == "file":
            files.write_text(tmp_path / "it", text)
        else:
            with files.write_folder(tmp_path / "it") as aside:
                (aside / "a").write_text(text)

    def read():
        return (tmp_path / "it" if kind == "file" else tmp_path / "it" / "a").read_text()

    write("old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match="No space left"):
        write("new")
    assert read() == "old" and names(tmp_path) == ["it"]


def test_a_file_where_a_folder_should_be_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("mine")
    for write in (files.write_json, files.write_new_json):
        with pytest.raises(RunError, match=r"cannot write .*file/it.json: .*; what was there before is untouched"):
            write(tmp_path / "file" / "it.json", {})
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserError, match=r"--out .* cannot be written to: .*file is a file; give another folder"):
            files.check_folder(out)
    files.check_folder(tmp_path / "new" / "folder")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("links", [True, False])
def test_what_is_there_is_not_written_over_by_what_is_new(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    assert files.write_new_json(tmp_path / "it", 1) and not files.write_new_json(tmp_path / "it", 2)
    assert (tmp_path / "it").read_text() == "1\n" and names(tmp_path) == ["it"]


def test_no_number_that_is_none_gets_into_json(tmp_path):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert names(tmp_path) == []
