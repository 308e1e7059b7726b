"""A run that is killed goes on as if it had never stopped, and what was finished is not done again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from toys import daily, is_same_state, pairs, run, small, toy_task

from smallbert.model.folders import save_folder
from smallbert.training import loop
from smallbert.training.loop import take_step

TASK = toy_task("classify", 24)
LONG = "train(epochs=4, batch=8, lr=0.003)"  # twelve steps
SHORT = "train(epochs=1, batch=8, lr=0.003)"  # three
RECIPE = f"{SHORT} | mix_layers | movement(0.5) + distill + {LONG} | quantize"
SCRIPT = f"""
import os, signal, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from smallbert.training import checkpoint
from toys import run, small, toy_task

write = checkpoint.write_json

def killed_while_writing(path, about):
    if about["step"] == 7 and about["total"] == 12:
        os.kill(os.getpid(), signal.SIGKILL)  # the tensors are written, the rest is not
    write(path, about)

checkpoint.write_json = killed_while_writing
run({RECIPE!r}, small(), toy_task("classify", 24), work=Path(sys.argv[1]), pause=0.0)
"""


class Kill(Exception):
    """Stands for a kill inside this process."""


@contextmanager
def killed_at(step: int, error: type[BaseException] = Kill):
    """Break off a phase of twelve steps before it takes this one."""

    def take(phase, batches):
        if phase.step == step and phase.total == 12:
            raise error
        return real(phase, batches)

    real = loop.take_step
    with patch.object(loop, "take_step", take), pytest.raises(error):
        yield


@contextmanager
def counted():
    """A list of the steps that are taken, as (step, total)."""
    taken: list[tuple[int, int]] = []
    real = loop.take_step
    with patch.object(loop, "take_step", lambda p, b: taken.append((p.step, p.total)) or real(p, b)):
        yield taken


def no_pickle(folder: Path) -> bool:
    """Whether nothing in a folder is anything but safetensors, JSON and plain text."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return bool(files) and all(file.suffix in (".safetensors", ".json") for file in files)


def test_time_of_interrupted_parts_counts(tmp_path):
    with killed_at(7):
        run(RECIPE, small(), TASK, work=tmp_path, pause=0.0)
    state = tmp_path / "phase-3.checkpoint" / "state.json"
    about = json.loads(state.read_text())
    assert 0 < about["seconds"] < 100
    state.write_text(json.dumps({**about, "seconds": about["seconds"] + 1000}))
    assert 1000 < run(RECIPE, small(), TASK, work=tmp_path, pause=0.0).seconds < 1100


def test_kill_minus_nine_in_the_middle(tmp_path):
    options = {"capture_output": True, "text": True, "timeout": 120}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    killed = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, **options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert no_pickle(tmp_path)
    assert json.loads((tmp_path / "phase-3.checkpoint" / "state.json").read_text())["step"] == 6
    with counted() as taken:
        outcome = run(RECIPE, small(), TASK, work=tmp_path, pause=0.0)
    # Only what was not done yet: no step of the finished first phase, and the second one from its checkpoint on.
    assert taken == [(step, 12) for step in range(6, 12)]
    assert no_pickle(tmp_path)
    assert is_same_state(outcome.encoder, run(RECIPE, small(), TASK).encoder)


@pytest.mark.parametrize(
    "recipe",
    daily(
        [
            LONG,
            f"magnitude(0.3) + {LONG}",
            f"{SHORT} | mix_layers | movement(0.3, scope='global') + distill + {LONG}",
            f"magnitude(0.3) + {SHORT} | drop_layers(1) | {LONG} | quantize",
            f"{SHORT} | align('attention', schedule='progressive') + align(transform='linear_each') + distill + {LONG}",
            f"quantize | {LONG}",
            f"magnitude(0.5) + quantize_aware + {LONG}",
            f"movement(0.3, init='magnitude', fresh=True, begin=0.4, train_weights=False) + {LONG}",
            f"soft_movement(pull=0.1, lr=0.5, begin=0.0) + {LONG}",
            f"l0(pull=0.1, lr=0.5) + {LONG}",
            f"smooth_movement(0.3, window=2) + {LONG}",
            f"{SHORT} | second_order(0.3, events=4, gradients=4, block=8, examples=2, damp=1e-4) + distill + {LONG}",
            f"rpp(pull=1.0, steps=3) + {LONG}",
            f"delete_information(0.3) + {LONG}",
            f"prune(0.3, by='random') | {LONG}",
            f"quantize_aware(8, smooth='search') + {LONG}",
            f"magnitude(0.5) + codebook_aware(3) + {LONG}",
        ],
        every=3,
    ),
)
def test_resumed_is_equal_to_the_bit(recipe, tmp_path):
    with killed_at(7):
        run(recipe, small(), TASK, work=tmp_path, pause=0.0)
    (checkpoint,) = tmp_path.glob("*.checkpoint")
    assert json.loads((checkpoint / "state.json").read_text())["step"] == 7 and no_pickle(tmp_path)
    with counted() as taken:
        resumed = run(recipe, small(), TASK, work=tmp_path)
    assert taken == [(step, 12) for step in range(7, 12)]
    assert "went on from a checkpoint at step 7" in resumed.notes
    whole = run(recipe, small(), TASK)
    assert is_same_state(resumed.encoder, whole.encoder) and resumed.encoder.history == whole.encoder.history
    assert (resumed.steps, resumed.epochs, resumed.packed) == (whole.steps, whole.epochs, whole.packed)
    assert not list(tmp_path.glob("*.checkpoint"))


@pytest.mark.parametrize("asking", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_step_end_and_saves_first(tmp_path, asking):
    def interrupted(phase, batches):
        loss = take_step(phase, batches)
        if phase.step == 5:
            os.kill(os.getpid(), asking)  # the weights have moved, but the step is not counted yet
        return loss

    before = signal.getsignal(asking)
    with patch("smallbert.training.loop.take_step", interrupted), pytest.raises(KeyboardInterrupt):
        run(LONG, small(), TASK, work=tmp_path)  # the time to save one has not come yet
    assert signal.getsignal(asking) is before
    resumed = run(LONG, small(), TASK, work=tmp_path)
    assert "went on from a checkpoint at step 6" in resumed.notes
    assert is_same_state(resumed.encoder, run(LONG, small(), TASK).encoder)


def test_what_is_finished_is_not_run_again(tmp_path):
    recipe = f"{SHORT} | drop_layers(1) | mark('here') + {SHORT} | {SHORT} | rewind('here')"
    first = run(recipe, small(), TASK, work=tmp_path)
    assert no_pickle(tmp_path)
    with counted() as taken:
        second = run(recipe, small(), TASK, work=tmp_path)
    assert not taken
    assert is_same_state(first.encoder, second.encoder) and first.encoder.history == second.encoder.history
    assert (first.steps, first.epochs, first.diverged) == (second.steps, second.epochs, second.diverged)
    assert is_same_state(first.encoder, run(recipe, small(), TASK).encoder)


def test_a_teacher_is_the_same_after_a_resume(tmp_path):
    """What is rewound after a finished phase must not rewind the teacher that this phase left."""
    recipe = f"mark('start') | {SHORT} | rewind('start') | distill(alpha=1.0) + {LONG}"
    with killed_at(4):
        run(recipe, small(), TASK, work=tmp_path, pause=0.0)
    resumed = run(recipe, small(), TASK, work=tmp_path)
    assert is_same_state(resumed.encoder, run(recipe, small(), TASK).encoder)


CHANGES = ("recipe", "earlier", "seed", "task", "encoder", "length", "key", "longer")


@pytest.mark.parametrize(("change", "finished"), pairs(CHANGES, [False, True], every=2))
def test_other_work_is_not_gone_on_with(change, finished, tmp_path):
    def go(what: str, **options):
        long = LONG.replace("4", "5") if what == "longer" else LONG
        recipe = (
            f"drop_layers({2 if what == 'earlier' else 1}) | magnitude({0.5 if what == 'recipe' else 0.4}) + {long}"
        )
        task = toy_task("classify", 24, seed=7 if what == "task" else 0)
        encoder = small(layers=3, seed=5 if what == "encoder" else 0)
        options |= {"seed": int(what == "seed"), "length": 8 if what == "length" else None}
        return run(recipe, encoder, task, key="other" if what == "key" else "", **options)

    if finished:
        go("", work=tmp_path)
    else:
        with killed_at(3):
            go("", work=tmp_path, pause=0.0)
        assert list(tmp_path.glob("*.checkpoint"))
    other, clean = go(change, work=tmp_path), go(change)
    assert not any("went on" in note for note in other.notes)
    assert is_same_state(other.encoder, clean.encoder) and other.encoder.history == clean.encoder.history


@pytest.mark.parametrize("finished", [False, True])
def test_another_teacher_in_the_same_folder_is_other_work(finished, tmp_path):
    def go(seed, **options):
        shutil.rmtree(tmp_path / "teacher", ignore_errors=True)
        save_folder(run("head", small(seed=seed), TASK, seed).encoder, tmp_path / "teacher")
        teacher = str(tmp_path / "teacher")
        return run(f"{SHORT} | distill(teacher={teacher!r}, alpha=1.0) + {LONG}", small(), TASK, **options)

    if finished:
        go(1, work=tmp_path / "work")
    else:
        with killed_at(3):
            go(1, work=tmp_path / "work", pause=0.0)
    with counted() as taken:
        other = go(2, work=tmp_path / "work")
    assert [total for _, total in taken] == [12] * 12  # what no teacher was in is taken over
    assert is_same_state(other.encoder, go(2).encoder)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(file: Path) -> None:
    file.write_bytes(b"\xff\x00[]")


def no_object(file: Path) -> None:
    file.write_text("[]")


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [cut, overwrite, no_object, Path.unlink])
def test_a_broken_checkpoint_is_survived(file, damage, tmp_path):
    with killed_at(3):
        run(LONG, small(), TASK, work=tmp_path, pause=0.0)
    (checkpoint,) = tmp_path.glob("*.checkpoint")
    damage(checkpoint / file)
    anew = run(LONG, small(), TASK, work=tmp_path)
    assert is_same_state(anew.encoder, run(LONG, small(), TASK).encoder)
    assert not any("went on" in note for note in anew.notes)
    if damage is not Path.unlink:
        assert "the last checkpoint was incomplete, so the phase started again" in anew.notes


@pytest.mark.parametrize("damage", [cut, no_object])
@pytest.mark.parametrize("file", ["model.safetensors", "phase.json", "encoder.json"])
def test_a_broken_finished_phase_is_done_again(file, damage, tmp_path):
    first = run(SHORT, small(), TASK, work=tmp_path)
    (found,) = tmp_path.rglob(file)
    damage(found)
    with counted() as taken:
        second = run(SHORT, small(), TASK, work=tmp_path)
    assert len(taken) == 3 and is_same_state(first.encoder, second.encoder)
