"""What teachers say, kept on disk: the same loss as from a teacher that looks, in any order, layout and company."""

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_align import other_words
from test_features import ENVIRONMENT
from test_resume import counted, killed_at, no_pickle
from toys import is_same_state, phase_of, run, small, stream_of, toy_task

from smallbert.errors import RunError, UserError
from smallbert.features import asking, building, cache, taught
from smallbert.features.asking import keep_taught
from smallbert.features.plan import text_keys
from smallbert.features.store import read_keys
from smallbert.model.encoder import Encoder
from smallbert.model.folders import save_folder
from smallbert.recipes.recipe import Recipe
from smallbert.tasks.task import Split
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, Tokens
from smallbert.training.loop import _Plan

LAYOUTS = {"padded": Layout(False, 64), "packed": Layout(True, 64, grain=64), "static": Layout(False, 64, multiple=16)}
TASK = toy_task("pair", 24)
TEXT = str(Path(__file__).parent / "data" / "own" / "text.txt")
USAGE = namedtuple("usage", "total used free")


def quiet(*_):
    pass


def train(folder="auto", epochs=2):
    return f"train(epochs={epochs}, batch=7, lr=0.003, dropout=0.0, cache={str(folder)!r})"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of teachers for every kind of task; "letters" cuts texts into other tokens."""
    folder, made = tmp_path_factory.mktemp("teachers"), {}
    for number, kind in enumerate(("pair", "regress", "tag", "answer")):
        made[kind] = small(layers=4, seed=3 + number, hidden_size=24, num_attention_heads=6)
        letters = small(layers=3, seed=9)
        letters.tokenizer = other_words()
        made[f"{kind} letters"] = letters
        for name in (kind, f"{kind} letters"):
            save_folder(run("head", made[name], toy_task(kind, 24)).encoder, folder / name)
    return {name: str(folder / name) for name in made}


def losses(phase, layout, steps=8, world=1):
    """The loss of each of some steps, two epochs of them in different orders, over all processes."""
    states = [SimpleNamespace(process_index=rank, num_processes=world) for rank in range(world)]
    plans = [_Plan(phase.stream, LAYOUTS[layout], 7, 3, state) for state in states]
    found = [one.kept for one in phase.teachers.values() if one.kept is not None]
    for plan in plans:
        plan.views, plan.taught = phase.teachers.views(phase.stream), found
    return torch.stack([sum(phase.loss(plan.batches(step)).detach() for plan in plans) for step in range(steps)])


@contextmanager
def resident(phase, room=1 << 40, shard=500):
    """What is kept as it would lie on a GPU with so much room, brought there in small pieces."""
    with patch.object(asking, "room_on", return_value=room), patch.object(taught, "SHARD_BYTES", shard):
        with keep_taught(phase, None, quiet) as found:
            yield found


def looked_and_kept(recipe, task, folder, layout="padded", student=None, world=1):
    """The losses when teachers look at every step, and when they do not look at all; and the phase.

    What was kept teaches the same whether batches bring it or it lies where the student learns.
    """
    phase = phase_of(f"{recipe} + {train(folder)}", student or run("head", small(), task).encoder, task)
    phase.encoder.eval()
    live = losses(phase, layout, world=world)
    with keep_taught(phase, None, quiet) as found, patch.object(Encoder, "look", side_effect=AssertionError):
        assert len(found) == len(phase.teachers) and not any(one.resident for one in found)
        kept = losses(phase, layout, world=world)
    with resident(phase) as found, patch.object(Encoder, "look", side_effect=AssertionError):
        assert all(one.resident and not one.reads for one in found)
        torch.testing.assert_close(losses(phase, layout, world=world), kept, rtol=0, atol=0)
    torch.testing.assert_close(losses(phase, layout, world=world), live, rtol=0, atol=0)  # and it can look again
    return live, kept, phase


def stores(folder):
    return sorted(file.parent for file in Path(folder).glob("*/*/store.json"))


def no_asking():
    return patch.object(building, "_write_shard", side_effect=AssertionError("the teacher was asked again"))


# The same loss.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["pair", "tag"])
def test_what_lies_on_a_gpu_is_what_batches_would_bring(teachers, kind, layout, tmp_path):
    """Number by number, zeros where no text is, however small the pieces in which it is brought."""
    name, task = teachers[kind], toy_task(kind, 24)
    terms = f"align(transform='linear', teacher={name!r}) + align('first', transform='linear', teacher={name!r})"
    recipe = f"{terms} + distill(teacher={name!r}) + {train(tmp_path)}"
    phase = phase_of(recipe, run("head", small(), task).encoder, task)
    index = np.array([5, 0, 17, 5])
    bare = make_batch(phase.stream, index, LAYOUTS[layout], slots=6)
    with keep_taught(phase, None, quiet) as (found,):
        brought = found.said_of(found.add_to(bare, index))
    assert set(brought) == {"scores", "hidden", "first"} and (kind == "tag" or not brought["scores"][4:].any())
    for shard in (1, 500, 1 << 26):
        with resident(phase, shard=shard) as (found,):
            assert found.bytes == sum(one.nbytes for one in found.resident.values())
            picked = found.said_of(found.add_to(bare, index))
        torch.testing.assert_close(picked, brought, rtol=0, atol=0)


def test_a_gpu_without_room_or_with_less_than_was_thought_reads_from_disk(teachers, tmp_path):
    recipe = f"align('first', transform='linear', teacher={teachers['pair']!r}) + {train(tmp_path)}"
    phase = phase_of(recipe, run("head", small(), TASK).encoder, TASK)
    with resident(phase) as (found,):
        size = found.bytes
    with resident(phase, room=size - 1) as (found,):
        assert not found.resident and found.reads
    with resident(phase, room=size) as (found,):
        assert found.resident

    def full(kept, *_):
        kept.resident["first"] = torch.zeros(1)
        raise torch.OutOfMemoryError

    with patch.object(taught.Taught, "bring_to", full), resident(phase) as (found,):
        assert not found.resident and found.reads
    assert [note.rsplit(" and ", 1)[1] for note in phase.notes if " were kept" in note] == [
        "brought to the GPU as a whole", "read at every step", "brought to the GPU as a whole", "read at every step",
    ]  # fmt: skip


TERMS = {
    "scores": ("distill(teacher={0!r})", 1e-6),
    "first": ("align('first', layers={{1: 2, 2: 4}}, transform='linear', teacher={0!r})", 1e-4),
    "hidden": ("align('hidden', transform='linear', teacher={0!r}) + distill(teacher={0!r})", 1e-4),
    "gram": ("align('gram', layers={{0: 0, 2: -1}}, teacher={0!r}, task=0.0)", 2e-3),
    "norm": ("align('moments', tokens='first', metric='l1', teacher={0!r}) + align('embeddings', transform='linear', "
             "metric='cosine', teacher={0!r})", 1e-3),
    "relations": ("align('relations', layers={{1: 2, 2: 4}}, heads=2, metric='kl', teacher={0!r}, task=0.0) "
                  "+ align('hidden', transform='linear', teacher={0!r}) + distill(teacher={0!r})", 1e-4),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("terms", TERMS)
def test_kept_teaches_as_looking_does(teachers, terms, layout, tmp_path):
    recipe, bound = TERMS[terms]
    live, kept, _ = looked_and_kept(recipe.format(teachers["pair"]), TASK, tmp_path, layout)
    torch.testing.assert_close(kept, live, rtol=bound, atol=1e-7)
    assert live.std() > 10 * (kept - live).abs().max()  # a step of other texts has another loss
    assert no_pickle(tmp_path)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["regress", "tag", "answer"])
def test_every_kind_of_task(teachers, kind, layout, tmp_path):
    metric = "'mse'" if kind == "answer" else "'kl'"
    live, kept, _ = looked_and_kept(
        f"distill(teacher={teachers[kind]!r}, metric={metric}) + align('first', transform='linear', "
        f"teacher={teachers[kind]!r})",
        toy_task(kind, 24),
        tmp_path,
        layout,
    )
    torch.testing.assert_close(kept, live, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["pair", "tag", "regress"])
def test_a_teacher_with_other_tokens(teachers, kind, tmp_path):
    recipe = f"distill(teacher={teachers[f'{kind} letters']!r})"
    live, kept, phase = looked_and_kept(recipe, toy_task(kind, 24), tmp_path, "packed")
    torch.testing.assert_close(kept, live, rtol=1e-5, atol=1e-6)
    own = f"teacher {teachers[f'{kind} letters']}"
    with keep_taught(phase, None, quiet):
        views = phase.teachers.views(phase.stream)  # only words need the teacher's own tokens in a batch
    assert own in phase.stream.views and views == ([STUDENT, own] if kind == "tag" else [STUDENT])


def test_two_teachers_and_two_processes(teachers, tmp_path):
    one, two = teachers["pair"], teachers["pair letters"]
    first = f"align('first', transform='linear', teacher={one!r})"
    recipe = f"distill(teacher={one!r}) + distill(teacher={two!r}, alpha=0.3) + {first}"
    live, kept, _ = looked_and_kept(recipe, TASK, tmp_path, "static")
    torch.testing.assert_close(kept, live, rtol=1e-4, atol=1e-6)
    assert len({path.parent for path in stores(tmp_path)}) == 2
    with no_asking():
        for layout in ("static", "packed"):  # 24 rows by 7: the last step has three rows for two processes
            live, whole, _ = looked_and_kept(recipe, TASK, tmp_path, layout)
            halves = looked_and_kept(recipe, TASK, tmp_path, layout, world=2)[1]
            torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(halves, live, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("terms", ["scores", "first", "hidden"])
def test_training_ends_the_same(teachers, terms):
    """Unasked to keep anything, a run is what it would be without, up to rounding."""
    before = run("head", small(), TASK).encoder
    recipe = TERMS[terms][0].format(teachers["pair"])
    looking, kept = (run(f"{recipe} + {train(where, 4)}", before, TASK, judge=False) for where in ("none", "auto"))
    moved = max((one - before.state_dict()[name]).abs().max() for name, one in kept.encoder.state_dict().items())
    assert moved > 0.01
    for name, one in looking.encoder.state_dict().items():
        if name.endswith("key.bias"):
            continue  # a softmax does not see it: its gradient is rounding noise
        torch.testing.assert_close(kept.encoder.state_dict()[name], one, atol=2e-5, rtol=0.0, msg=name)
    assert any("ran once on each text: " in note and "read at every step" in note for note in kept.notes)


def test_a_method_with_batches_of_its_own_lets_the_teacher_look(teachers):
    method = "second_order(0.5, events=2, gradients=6, block=8, examples=4, damp=1e-4)"
    recipe = f"{method} + distill(teacher={teachers['pair letters']!r}) + {train()}"
    assert run(recipe, run("head", small(), TASK).encoder, TASK, judge=False).steps == 8


# The same texts, found again.


def shuffled(task, seed):
    rows = task.split("train")
    order = np.random.default_rng(seed).permutation(len(rows))
    mixed = Split(
        *([side[i] for i in order] if side else None for side in (rows.texts, rows.pairs, rows.labels, rows.ids))
    )
    return replace(task, splits={**task.splits, "train": mixed}, fingerprint=f"{task.fingerprint} {seed}")


@pytest.mark.parametrize("terms", ["scores", "hidden"])
def test_rows_in_another_order_or_fewer_of_them(teachers, terms, tmp_path):
    recipe, bound = TERMS[terms]
    recipe = recipe.format(teachers["pair"])
    first, _, _ = looked_and_kept(recipe, TASK, tmp_path)
    rows = TASK.split("train")
    some = Split(rows.texts[5:19], rows.pairs[5:19], rows.labels[5:19], rows.ids[5:19])
    fewer = replace(TASK, splits={**TASK.splits, "train": some}, fingerprint="fewer")
    with no_asking():
        for other in (shuffled(TASK, 1), shuffled(TASK, 2), fewer):
            live, kept, _ = looked_and_kept(recipe, other, tmp_path)
            torch.testing.assert_close(kept, live, rtol=bound, atol=1e-7)
            assert not torch.allclose(live, first, rtol=1e-3)
    assert len(stores(tmp_path)) == 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_augmented_copies_and_rows_without_labels(teachers, layout, tmp_path):
    distill = f"distill(teacher={teachers['pair']!r})"
    looked_and_kept(distill, TASK, tmp_path)
    (tmp_path / "more.txt").write_text("a film\tit was good\nthe plot\tit was dull\n")
    copies = f"augment(2, ['delete', 'grams']) + unlabelled({str(tmp_path / 'more.txt')!r}) + {distill}"
    live, kept, phase = looked_and_kept(copies, TASK, tmp_path, layout)
    torch.testing.assert_close(kept, live, rtol=1e-5, atol=1e-6)
    held = [read_keys(path) for path in stores(tmp_path)]
    every, wanted = np.concatenate(held), np.unique(text_keys(phase.stream.views[STUDENT]))
    assert len(held) == 2 and len(phase.stream) > 24 + 20
    assert len(every) == len(np.unique(every)) and set(wanted) == set(
        every
    )  # only new texts were asked about, once each
    with no_asking():
        looked_and_kept(f"augment(2, ['delete', 'grams']) + {distill}", TASK, tmp_path, layout)


def test_a_text_is_known_by_its_own_tokens():
    encoder, task = small(), toy_task("pair", 24)
    tokens = phase_of(f"distill + {train()}", run("head", encoder, task).encoder, task).stream.views[STUDENT]
    keys = text_keys(tokens)
    types = tokens.types.copy()
    types[tokens.offsets[3]] ^= 1
    assert list(np.flatnonzero(text_keys(replace(tokens, types=types)) != keys)) == [3]
    ids = tokens.ids.copy()
    ids[tokens.offsets[6] - 1] += 1
    assert list(np.flatnonzero(text_keys(replace(tokens, ids=ids)) != keys)) == [5]
    assert keys.dtype == "S16" and all(len(key) == 16 for key in keys.tolist())


def test_more_than_is_wanted_will_do_and_less_will_not(teachers, tmp_path):
    teacher = teachers["pair"]
    distill, first = (
        f"distill(teacher={teacher!r})",
        f"align('first', layers={{2: 4}}, transform='linear', teacher={teacher!r})",
    )
    hidden = f"align('hidden', layers={{1: 2, 2: 4}}, transform='linear', teacher={teacher!r})"
    looked_and_kept(distill, TASK, tmp_path)
    looked_and_kept(f"{first} + {distill}", TASK, tmp_path)
    assert len(stores(tmp_path)) == 2
    looked_and_kept(f"{hidden} + {distill}", TASK, tmp_path)
    assert len(stores(tmp_path)) == 3
    with no_asking():
        for recipe in (first, distill, hidden, f"{hidden} + {first} + {distill}", hidden.replace("1: 2, ", "")):
            live, kept, _ = looked_and_kept(recipe, TASK, tmp_path)
            torch.testing.assert_close(kept, live, rtol=1e-4, atol=1e-6)
    looked_and_kept(hidden.replace("1: 2", "1: 1"), TASK, tmp_path)
    assert len(stores(tmp_path)) == 4


# Which store a text is read from.

SCORES = cache.What("a teacher", "texts", (), (), "float16")
FIRST = replace(SCORES, scores="", first=(2,))
BOTH = replace(SCORES, first=(2,))


@pytest.fixture(scope="module")
def cache_of():
    """Makes a cache of some of a task's texts."""
    encoder = run("head", small(), TASK).encoder
    every = stream_of(encoder, TASK, "train").views[STUDENT]

    def make(index, what, folder):
        index = np.asarray(index)
        places, offsets = every.places(index), np.concatenate([[0], np.cumsum(every.lengths[index])])
        return cache.Cache(encoder, Tokens(every.ids[places], every.types[places], offsets), what, folder)

    return make


def fill_partly(made):
    """As a run does that is killed while it writes the second shard."""
    write = building._write_shard

    def killed(encoder, stream, plan, out, number, tell):
        if number == 1:
            raise KeyboardInterrupt
        write(encoder, stream, plan, out, number, tell)

    with patch.object(building, "_write_shard", killed), pytest.raises(KeyboardInterrupt):
        made.fill(quiet)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")], ids=str)
def test_a_text_is_read_from_where_it_was_read_first_whatever_came_since(cache_of, names, tmp_path):
    cache_of([20], SCORES, tmp_path / "other").fill(quiet)  # so that the next one there is the second
    for what, folder, name in zip((SCORES, BOTH), ("", "other"), names, strict=True):
        ((store,), _) = cache_of(range(6), what, tmp_path / folder).fill(quiet)
        store.path.rename(tmp_path / name)  # names are hashes, so the older one may stand first or last
    shutil.rmtree(tmp_path / "other")
    found, rows = cache_of(range(8), BOTH, tmp_path).fill(quiet)  # two texts are new
    assert [store.path.name in names for store in found] == [True, True, False]
    assert [store.path.name for store in found[:2]] == list(names) and (rows[:2, :6] == rows[0, :6]).all()
    assert (rows[:2, 6:] < 0).all() and (rows[2, :6] < 0).all() and sorted(rows[2, 6:]) == [0, 1]
    damaged = tmp_path / names[1] / "00000.safetensors"  # what is never read is never missed
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    told = taught.Taught("one", SCORES, found, rows, np.ones(8, np.int64), STUDENT, {})
    assert told.table.shape == (8, 3) and not (told.table == 0).all(1).any()


def test_what_a_store_lacks_is_not_taken_from_it(cache_of, tmp_path):
    cache_of(range(6), FIRST, tmp_path).fill(quiet)
    assert not cache_of(range(6), FIRST, tmp_path).jobs
    for what, left in (
        (SCORES, SCORES),
        (BOTH, SCORES),
        (replace(BOTH, dtype="float32"), replace(BOTH, dtype="float32")),
        (replace(FIRST, first=(1, 2)), replace(FIRST, first=(1,))),
        (replace(FIRST, hidden=(2,)), replace(FIRST, hidden=(2,), first=())),
    ):
        made = cache_of(range(6), what, tmp_path)
        assert len(made.stores) == (what.without(left) != replace(what, scores="", hidden=(), first=()))
        assert [len(job.stream) for job in made.jobs] == [6]
        assert {name: made.jobs[0].settings[name] for name in left.options} == left.options


@patch.object(cache, "SHARD_TEXTS", 4)
def test_texts_of_an_unfinished_store_are_planned_once(cache_of, tmp_path):
    fill_partly(cache_of(range(8), SCORES, tmp_path))
    (begun,) = (file.parent for file in tmp_path.glob("*/store.json"))
    made = cache_of(range(12), SCORES, tmp_path)
    assert [len(job.stream) for job in made.jobs] == [8, 4] and made.jobs[0].path == begun
    found, rows = made.fill(quiet)
    assert [len(read_keys(store.path)) for store in found] == [8, 4] and ((rows >= 0).sum(0) == 1).all()


@patch.object(cache, "SHARD_TEXTS", 4)
def test_an_unfinished_store_is_left_alone_where_some_of_its_texts_are_not_at_hand(cache_of, tmp_path):
    fill_partly(cache_of(range(8), SCORES, tmp_path))
    (begun,) = (file.parent for file in tmp_path.glob("*/store.json"))
    files = {file.name: file.read_bytes() for file in begun.iterdir()}
    made = cache_of(range(4, 12), SCORES, tmp_path)
    assert [len(job.stream) for job in made.jobs] == [8] and made.jobs[0].path != begun
    made.fill(quiet)
    assert {file.name: file.read_bytes() for file in begun.iterdir()} == files


def test_another_teacher_is_told_apart(tmp_path):
    """The same folder, trained on: its old words are left alone."""
    before = run("head", small(), TASK).encoder
    for lr in (0.001, 0.01):
        save_folder(run(f"train(epochs=1, lr={lr})", small(seed=2), TASK, judge=False).encoder, tmp_path / "teacher")
        recipe = f"distill(teacher={str(tmp_path / 'teacher')!r})"
        live, kept, _ = looked_and_kept(recipe, TASK, tmp_path / "cache", student=before)
        torch.testing.assert_close(kept, live, rtol=1e-6, atol=1e-7)
    notes = run(f"{recipe} + {train(tmp_path / 'cache')}", before, TASK, judge=False).notes
    assert any("also holds what 1 other teacher put out, which was left alone" in note for note in notes)
    assert len(stores(tmp_path / "cache")) == 2


# Kills, damage, company.

SCRIPT = f"""
import os, signal, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from smallbert.features import building, cache, shards
from test_cache import TASK, train
from toys import run, small

folder, fatal, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
real, write = shards.write_file, building._write_shard

def killed_while_writing(path, write):
    if path.name == fatal:
        (path.parent / f".{{path.name}}.halfdone").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, write)

def told(encoder, stream, plan, out, number, tell):
    print("shard", number, flush=True)
    write(encoder, stream, plan, out, number, tell)

shards.write_file, building._write_shard, cache.SHARD_TEXTS = killed_while_writing, told, 4
student = run("head", small(), TASK).encoder
run(f"distill(teacher={{sys.argv[4]!r}}) + {{train(folder)}}", student, TASK, seed, judge=False)
"""


@pytest.mark.slow
def test_killed_while_the_teacher_is_asked(teachers, tmp_path):
    recipe, before = f"distill(teacher={teachers['pair']!r}) + {{}}", run("head", small(), TASK).encoder
    with patch.object(cache, "SHARD_TEXTS", 4):
        whole = run(recipe.format(train(tmp_path / "whole")), before, TASK, judge=False)
    (made,) = stores(tmp_path / "whole")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), "00002.safetensors", "0", teachers["pair"]]
    killed = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (begun,) = stores(tmp_path / "cache")
    assert begun.name == made.name and len(list(begun.glob("0*.safetensors"))) == 2
    written = patch.object(building, "_write_shard", wraps=building._write_shard)
    # Others come first, with some of the texts and with others: what was begun is gone on with all the same.
    some, more = TASK.split("train"), toy_task("pair", 48).split("train")
    other = Split(
        some.texts[:5] + more.texts[-3:],
        some.pairs[:5] + more.pairs[-3:],
        some.labels[:5] + more.labels[-3:],
        more.ids[:8],
    )
    with patch.object(cache, "SHARD_TEXTS", 4), written as write:
        task = replace(TASK, splits={**TASK.splits, "train": other}, fingerprint="other")
        run(recipe.format(train(tmp_path / "cache")), before, task, judge=False)
        assert write.call_count == 2
        write.reset_mock()
        gone_on = run(recipe.format(train(tmp_path / "cache")), before, TASK, judge=False)
        assert [call.args[4] for call in write.call_args_list] == [2, 3, 4, 5]
    assert is_same_state(gone_on.encoder, whole.encoder)
    assert [file.read_bytes() for file in sorted(begun.glob("0*"))] == [
        file.read_bytes() for file in sorted(made.glob("0*"))
    ]
    assert not list(begun.glob(".0*"))


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_two_runs_fill_one_cache_at_once(teachers, tmp_path):
    folder = str(tmp_path / "cache")
    commands = [[sys.executable, "-c", SCRIPT, folder, "none", seed, teachers["pair"]] for seed in ("0", "1")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for command in commands]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(line for out, _ in said for line in out.split("\n") if line) == [f"shard {n}" for n in range(6)]
    with no_asking(), patch.object(cache, "SHARD_TEXTS", 4):
        live, kept, _ = looked_and_kept(f"distill(teacher={teachers['pair']!r})", TASK, folder)
    torch.testing.assert_close(kept, live, rtol=1e-6, atol=1e-7)


def test_killed_while_training(teachers, tmp_path):
    recipe = f"distill(teacher={teachers['pair']!r}) + train(epochs=4, batch=8, lr=0.01)"
    before = run("head", small(), TASK).encoder
    with killed_at(7):
        run(recipe, before, TASK, work=tmp_path, pause=0.0)
    with counted() as taken, no_asking():
        resumed = run(recipe, before, TASK, work=tmp_path, judge=False)
    assert taken == [(step, 12) for step in range(7, 12)]
    assert is_same_state(resumed.encoder, run(recipe, before, TASK, judge=False).encoder)
    assert not list(tmp_path.glob("*.states"))


@patch.object(cache, "SHARD_TEXTS", 4)
def test_damage_is_named_and_what_is_lost_is_asked_again(teachers, tmp_path):
    recipe = f"distill(teacher={teachers['pair']!r}) + {train(tmp_path)}"
    before = run("head", small(), TASK).encoder
    first = run(recipe, before, TASK, judge=False)
    shard = stores(tmp_path)[0] / "00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        RunError, match=r"00003.safetensors is damaged: its checksum is .*; delete it if it is there, and repeat"
    ):
        run(recipe, before, TASK, judge=False)
    for cut in (lambda: shard.unlink(), lambda: shard.write_bytes(whole[:-5])):
        cut()
        with patch.object(building, "_write_shard", wraps=building._write_shard) as write:
            again = run(recipe, before, TASK, judge=False)
        assert [call.args[4] for call in write.call_args_list] == [3] and shard.read_bytes() == whole
        assert is_same_state(again.encoder, first.encoder)
    lengths = shard.with_name("lengths.safetensors")
    known = lengths.read_bytes()
    for cut in (lambda: lengths.unlink(), lambda: lengths.write_bytes(known[:-1] + bytes([known[-1] ^ 1]))):
        cut()
        with patch.object(building, "_write_shard", side_effect=AssertionError):
            again = run(recipe, before, TASK, judge=False)
        assert lengths.read_bytes() == known and len(stores(tmp_path)) == 1
        assert is_same_state(again.encoder, first.encoder)


def test_damage_beside_the_shards_is_named_and_so_is_what_to_delete(teachers, tmp_path):
    recipe = f"distill(teacher={teachers['pair']!r}) + {train(tmp_path / 'cache')}"
    before = run("head", small(), TASK).encoder
    first = run(recipe, before, TASK, judge=False)
    (store,) = stores(tmp_path / "cache")
    manifest, known = store / "store.json", (store / "store.json").read_text()
    about = json.loads(known)
    unnumbered = {name: value for name, value in about.items() if name != "number"}

    def refused(*words):
        with pytest.raises(UserError) as refusal:
            run(recipe, before, TASK, judge=False)
        assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)

    for damaged, said in [
        (unnumbered, "it has no 'number'; delete"),
        ({**about, "number": "one"}, "it has no 'number'; delete"),
        ({**about, "width": 99}, "its content is not what was written); delete the folder"),
        ({**about, "scores": {**about["scores"], "classes": 7}}, "its content is not what was written"),
    ]:
        manifest.write_text(json.dumps(damaged))
        refused(f"{manifest} ", said, f" {store} and ")
    manifest.unlink()
    refused(f"{store} should hold a teacher's outputs, but there is no store.json in it; delete it and run again")
    shutil.rmtree(store)
    store.write_text("a file")
    refused(f"{store} should hold a teacher's outputs", "delete it and run again")
    shutil.rmtree(store.parent)
    store.parent.write_text("a file")
    refused(f"{store.parent} is a file where a teacher's outputs should be kept; delete it and run again")
    store.parent.unlink()
    assert is_same_state(run(recipe, before, TASK, judge=False).encoder, first.encoder)
    assert manifest.read_text() == known


# When it pays.


def notes_of(recipe, **options):
    outcome = run(recipe, run("head", small(), TASK).encoder, TASK, judge=False, **options)
    return [note for note in outcome.notes if note.startswith("the teacher ")]


def test_what_is_not_kept_is_looked_up_at_every_step(teachers, tmp_path):
    like = str(tmp_path / "like")
    save_folder(run("head", small(layers=3, seed=5), TASK).encoder, like)
    distill = f"distill(teacher={like!r})"
    said = f"the teacher {like!r} ran at every step: "
    assert notes_of(f"{distill} + {train('none')}") == []
    assert notes_of(f"{distill} + {train(epochs=1)}") == [f"{said}each text is read once"]
    padding = f"pool_layers(masked=False) + {distill} + {train(tmp_path / 'cache')}"
    assert notes_of(padding) == [f"{said}a head reads padding"]
    drawn = f"pretrain({TEXT!r}, length=16, steps=4) + align(teacher={like!r})"
    assert notes_of(drawn) == [f"{said}its texts are drawn anew"]
    assert not (tmp_path / "cache").exists()
    assert "hidden states 0, 3 of all tokens and scores were kept (0.0 MB, vectors in float32)" in "".join(
        notes_of(f"align(layers=[[0, 0], [2, 3]], teacher={like!r}) + {distill} + {train()}")
    )


def test_what_a_teacher_without_a_head_has_inside_is_kept_too(tmp_path):
    save_folder(small(layers=3, seed=5), tmp_path / "plain")
    (note,) = notes_of(f"align(layers={{1: 2}}, teacher={str(tmp_path / 'plain')!r}) + {train()}")
    assert "ran once on each text: hidden states 2 of all tokens were kept" in note


def test_no_disk_is_filled(teachers, tmp_path):
    distill = f"distill(teacher={teachers['pair']!r})"
    said = "MB, more than half of what is free in"
    with patch("shutil.disk_usage", return_value=USAGE(10**9, 10**9 - 2000, 2000)):
        (note,) = notes_of(f"{distill} + {train()}", work=tmp_path)  # 24 x 3 scores and a header
        assert said in note and "ran at every step" in note
        notes_of(f"{distill} + {train(tmp_path / 'cache')}")  # asked for, and there is room
    with patch("shutil.disk_usage", return_value=USAGE(10**9, 10**9, 1)):
        with pytest.raises(UserError, match="MB free; write another cache='folder', or cache='none'") as refusal:
            notes_of(f"{distill} + {train(tmp_path / 'other')}")
        assert "dtype" not in str(refusal.value)  # which nobody who distils can set
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be kept in .*below: Not a directory; write another cache='folder'"):
        notes_of(f"{distill} + {train(tmp_path / 'file' / 'below')}")


def test_a_cache_in_a_file_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; name a folder"):
        Recipe(f"finetune | distill + {train(tmp_path / 'file')}")
    for nothing in ("", " "):
        with pytest.raises(UserError, match="cache is auto, none or a folder"):
            Recipe(f"finetune | distill + {train(nothing)}")


@pytest.mark.parametrize(("size", "said"), [(5.04e7, "50.4 MB to write"), (9e5, "")])
def test_progress_says_how_much_is_to_be_written_and_leaves_the_time_left_to_who_shows_it(
    teachers, tmp_path, size, said
):
    before = run("head", small(), TASK).encoder
    recipe = f"distill(teacher={teachers['pair']!r}) + {train(tmp_path)}"
    for lost in (24, 4):  # all texts, then a shard of them
        seen = []
        with patch.object(cache, "SHARD_TEXTS", 4), patch.object(cache.Cache, "bytes_left", size):
            outcome = run(recipe, before, TASK, judge=False, say=lambda *one, seen=seen: seen.append(one))
        told = [one for one in seen if one[0] == cache.STAGE]
        assert told[-1][1:3] == (24, 24) and {one[3] for one in told} == {said} and len(told) >= lost // 4
        assert [one[0] for one in seen].index("training") > seen.index(told[-1])
        (note,) = (note for note in outcome.notes if "ran once on each text" in note)
        assert ("for which the cache lacked something" in note) == (lost == 4)
        (shard,) = tmp_path.glob("*/*/00002.safetensors")
        shard.unlink()


MEMORY = f"""
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from toys import held, phase_of, run, small, toy_task
from test_cache import losses, quiet, train
from smallbert.features import cache
from smallbert.features.asking import keep_taught

task, cache.SHARD_TEXTS = toy_task("classify", 6000), 256
student = run("head", small(hidden_size=64), task).encoder
phase = phase_of(f"align(teacher={{sys.argv[2]!r}}) + {{train(sys.argv[1])}}", student, task)
seen = []
with keep_taught(phase, None, lambda *_: seen.append(held())) as (found,):
    read = []
    for _ in range(8):
        losses(phase, "padded", 50)
        read.append(held())
    quarter = len(seen) // 4
    print(sum(store.bytes for store in found.stores) / 2**20)
    print(max(seen[-quarter:]) - max(seen[:quarter]), read[-1] - read[0])
"""


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    with_head = run("head", small(layers=2, seed=4, hidden_size=64), toy_task("classify", 24)).encoder
    save_folder(with_head, tmp_path / "teacher")
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "cache"), str(tmp_path / "teacher")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    size, filling, reading = map(float, done.stdout.split())
    assert size > 8 and filling < 6 and reading < 4  # MB
