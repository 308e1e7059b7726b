"""Files and folders are written whole or not at all, and what was there before is never lost."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from smallbert import files
from smallbert.errors import RunError


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


def test_no_number_that_is_none_gets_into_json(tmp_path):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert names(tmp_path) == []
