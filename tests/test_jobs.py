"""Worker processes: they may die, be stopped or be left alone, and everything is done or said to have failed."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from workers import broken, is_alive, killed, prepare, wait_until

from smallbert.errors import RunError
from smallbert.machine.facts import GPU_PART
from smallbert.machine.jobs import run_jobs
from smallbert.machine.sharing import MPS_FOLDERS, doubt_part, shared_gpu, shared_machine

FAKE = """#!/bin/sh
if [ "$1" = "-d" ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}; exit {code}; fi
while read line; do echo "$line" >> {log}; done
"""


def do(folder, jobs, workers=2, **settings):
    results = {}
    run_jobs(jobs, partial(prepare, folder), workers, lambda piece, said: results.update({piece[0]: said}), **settings)
    return results


def attempts(folder):
    path = folder / "attempts"
    return sorted(path.read_text().split("\n")[:-1]) if path.exists() else []


def test_workers_live_on_and_jobs_stay_together(tmp_path):
    jobs = [[("a", ""), ("b", "")], [("c", "")], [("d", "")], []]
    seen = []
    results = do(tmp_path, jobs, show=seen.append, environment={"OMP_NUM_THREADS": "1"})
    assert set(results) == set("abcd") and results["a"].split()[1] == results["b"].split()[1]
    assert len(list(tmp_path.glob("worker-*"))) == 2
    assert any(said[0] == "working" for running in seen for _, said in running)


def test_what_kills_a_worker_is_tried_once_more_and_then_recorded(tmp_path):
    jobs = [[("a", "dies"), ("b", "")], [("c", "dies once"), ("d", "")], [("e", "crashes")], [("f", "memory")]]
    jobs += [[("g", "")], [("h", "")]]
    results = do(tmp_path, jobs)
    assert set(results) == set("abcdefgh")
    assert attempts(tmp_path) == sorted(
        ["a 0", "a 1", "a 2", "b 0", "c 0", "c 1", "d 0", "e 0", "e 1", "e 2", "f 0", "f 1", "g 0", "h 0"]
    )
    assert results["a"].endswith("signal 9") and results["e"].endswith("exit code 3")
    assert results["f"].endswith("not enough memory") and results["b"].split()[2:] == []


def fall_apart(folder, pieces):
    """Every piece a job of its own once the beginning is made, but those of one letter stay together."""
    if not (folder / "made").exists():
        return [pieces]
    letters = dict.fromkeys(name[0] for name, _ in pieces)
    return [[piece for piece in pieces if piece[0][0] == letter] for letter in letters]


def test_pieces_that_need_not_wait_any_more_go_to_other_workers(tmp_path):
    job = [("a", "begins and meets"), ("b1", "meets"), ("b2", ""), ("c", "meets")]
    running = []
    settings = {"part": partial(fall_apart, tmp_path), "show": lambda now: running.append([p[0] for p, _ in now])}
    results = do(tmp_path, [job], 3, **settings)  # the first is not even finished when the others begin
    assert set(results) == {"a", "b1", "b2", "c"} and attempts(tmp_path) == ["a 0", "b1 0", "b2 0", "c 0"]
    assert len({results[name].split()[1] for name in ("a", "b1", "c")}) == 3
    assert results["b1"].split()[1] == results["b2"].split()[1] and not any({"b1", "b2"} <= {*now} for now in running)


def test_pieces_wait_as_long_as_they_must(tmp_path):
    job = [("a", ""), ("b", "begins"), ("c", "meets"), ("d", "meets"), ("e", "meets")]
    results = do(tmp_path, [job], 8, part=partial(fall_apart, tmp_path))
    assert results["a"].split()[1] == results["b"].split()[1]
    assert len({results[name].split()[1] for name in "cde"}) == 3
    assert len(list(tmp_path.glob("worker-*"))) == 5  # no more than pieces


def test_a_death_is_counted_for_the_piece_that_died(tmp_path):
    job = [("a", "begins"), ("b1", "dies"), ("b2", ""), ("c", "dies once"), ("d", "")]
    assert set(do(tmp_path, [job], part=partial(fall_apart, tmp_path))) == {"a", "b1", "b2", "c", "d"}
    assert attempts(tmp_path) == ["a 0", "b1 0", "b1 1", "b1 2", "b2 0", "c 0", "c 1", "d 0"]


def test_what_waited_for_a_dead_worker_waits_for_the_next(tmp_path):
    job = [("a", "begins after a death"), ("b", ""), ("c", "")]
    results = do(tmp_path, [job], 3, part=partial(fall_apart, tmp_path))
    assert attempts(tmp_path) == ["a 0", "a 1", "b 0", "c 0"]
    assert len({said.split()[1] for said in results.values()}) == 1  # alone, as what follows a death is


def test_what_stops_all_stops_all(tmp_path):
    with pytest.raises(RunError, match="disk is full"):
        do(tmp_path, [[("a", "full disk")], [("b", "sleeps")]])
    workers = [int(path.name.split("-")[1]) for path in tmp_path.glob("worker-*")]
    assert workers and not any(map(is_alive, workers))
    with pytest.raises(RunError, match="model is gone"):
        run_jobs([[1]], broken, 1, lambda *_: None)
    with pytest.raises(RunError, match="while it started"):
        run_jobs([[1]], killed, 1, lambda *_: None)


@pytest.fixture
def listening():
    """Ctrl-C as at a terminal: a process that a shell started in the background ignores it, these tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("asking", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_workers(tmp_path, asking, listening):
    before = signal.getsignal(signal.SIGTERM)

    def interrupt():
        wait_until(lambda: (tmp_path / "attempts").exists())
        os.kill(os.getpid(), asking)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        do(tmp_path, [[("a", "sleeps")], [("b", "sleeps")]])
    thread.join()
    workers = [int(path.name.split("-")[1]) for path in tmp_path.glob("worker-*")]
    assert workers and not any(map(is_alive, workers)) and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("how", ["partial(prepare, folder)", "Slow(folder)"], ids=["at work", "while it imports"])
def test_no_worker_outlives_its_parent(tmp_path, how):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from functools import partial; from pathlib import Path; from smallbert.machine.jobs import run_jobs\n"
        f"from workers import Slow, prepare\nfolder = Path({str(tmp_path)!r})\n"
        f"run_jobs([[('a', 'sleeps')], [('b', 'sleeps')]], {how}, 2, lambda *_: None)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    begun = (lambda: list(tmp_path.glob("worker-*"))) if "Slow" in how else (lambda: attempts(tmp_path))
    wait_until(lambda: len(begun()) == 2)
    parent.kill()
    parent.wait()
    workers = [int(path.name.split("-")[1]) for path in tmp_path.glob("worker-*")]
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_alive, workers)), 10.0)


def fake_daemon(folder, monkeypatch, code=0):
    program, log = folder / "nvidia-cuda-mps-control", folder / "log"
    program.write_text(FAKE.format(log=log, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


def test_the_gpu_daemon_is_private_and_goes(tmp_path, monkeypatch):
    log = fake_daemon(tmp_path, monkeypatch)
    with shared_gpu() as environment:
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir() and log.read_text() == f"start {folder}\n"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert log.read_text() == f"start {folder}\nquit\n" and not folder.exists()
    with shared_gpu(wanted=False) as environment:
        assert environment == {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")  # the user has one
    with shared_gpu() as environment:
        assert environment == {}
    assert log.read_text().count("start") == 1


def test_no_process_is_given_a_part_of_the_gpu_unasked(tmp_path, monkeypatch):
    fake_daemon(tmp_path, monkeypatch)
    with shared_gpu() as environment:
        assert set(environment) == set(MPS_FOLDERS)  # in parts of 28 per cent losses become nan


def test_a_loss_that_breaks_in_a_part_of_a_gpu_says_what_to_try(monkeypatch):
    monkeypatch.setenv(GPU_PART, "28")
    assert doubt_part(torch.device("cuda")) == f", in 28 % of a GPU: try without {GPU_PART}"
    assert doubt_part(torch.device("cpu")) == ""
    monkeypatch.setenv(GPU_PART, "100")
    assert doubt_part(torch.device("cuda")) == ""


def test_a_gpu_daemon_that_does_not_start_is_done_without(tmp_path, monkeypatch):
    log = fake_daemon(tmp_path, monkeypatch, code=1)
    with shared_gpu() as environment:
        assert environment == {}
    assert "quit" not in log.read_text() and not Path(log.read_text().split()[1]).exists()


def test_the_gpu_daemon_does_not_outlive_a_killed_parent(tmp_path, monkeypatch):
    log = fake_daemon(tmp_path, monkeypatch)
    code = "import os\nfrom smallbert.machine.sharing import shared_gpu\nwith shared_gpu(): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    wait_until(lambda: "quit" in log.read_text(), 10.0)


@pytest.mark.parametrize(("asked", "given"), [("", "4"), ("2", "2"), ("16", "4"), ("none", "4")])
def test_workers_take_no_more_threads_than_was_asked_for(asked, given, monkeypatch):
    monkeypatch.setattr("smallbert.machine.sharing.cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    with shared_machine(2, "cpu") as environment:
        assert environment["OMP_NUM_THREADS"] == given
