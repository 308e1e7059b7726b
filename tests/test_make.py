"""One model: made, measured and put into place together, whatever happens on the way."""

import hashlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from toys import run

from smallbert.errors import UserError
from smallbert.making import make, starting
from smallbert.making.estimate import files_read
from smallbert.measuring.card import MACHINERY_CHECK, card_key
from smallbert.measuring.shelf import load_card
from smallbert.model.encoder import fingerprint, load
from smallbert.model.folders import save_folder
from smallbert.model.quantised import stored_parts
from smallbert.recipes.recipe import Recipe
from smallbert.tiny import make_encoder, make_task
from smallbert.training import loop

RECIPE = "finetune(epochs=0.2, batch=8)"
SHORT = "train(epochs=0.2, batch=8)"


def one(out, **settings):
    return make.make_one(
        RECIPE, starting.tiny_start("bert"), make_task(), 0, out, kind=MACHINERY_CHECK, seconds=0.05, **settings
    )


def test_a_kill_while_measuring_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    """The same command must go on, not find its own unfinished model in its place."""

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(make, "measure_model", killed)
        with pytest.raises(KeyboardInterrupt):
            one(tmp_path / "out", alone=True)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patched:
        patched.setattr("smallbert.making.run.train", None)  # what was trained is not trained again
        card = one(tmp_path / "out", alone=True)
    assert load_card(tmp_path / "out" / "card.json") == card
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted(out, recipe, monkeypatch, **settings):
    """Begin a run and interrupt the second step of its last phase, of nine."""

    def take(phase, batches):
        loss = real(phase, batches)
        if phase.total == 9 and phase.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    real = loop.take_step
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "take_step", take)
        alone(out, recipe, **settings)


def alone(out, recipe, task=None, seed=0, **settings):
    settings |= {"kind": MACHINERY_CHECK, "seconds": None, "alone": True}
    return make.make_one(recipe, starting.tiny_start("bert"), task or make_task(), seed, out, **settings)


LATER = "train(epochs=0.36, batch=8)"
OTHERS = [
    ("train(epochs=0.1)", {}, r"phase-1\.checkpoint holds .*'train\(0.36, batch=8\)', at step 2 of 9"),
    ("identity", {}, "holds training of other work"),
    (f"{RECIPE} | drop_layers(2) | {LATER}", {}, r"phase-3\.checkpoint holds .*drop_layers\(3\).* step 2 of 9"),
    (f"{RECIPE} | drop_layers(3) | {LATER}", {"seed": 1}, "another seed and 'finetune"),
    (f"{RECIPE} | drop_layers(3) | {LATER}", {"task": make_task(seed=1)}, "other data and 'finetune"),
    (f"{RECIPE} | drop_layers(3) | {LATER}", {"length": 9}, "other data and another length and 'finetune"),
]


@pytest.mark.parametrize(("recipe", "settings", "told"), OTHERS, ids=range(len(OTHERS)))
def test_what_was_interrupted_is_not_lost_to_other_work(recipe, settings, told, tmp_path, monkeypatch):
    begun = LATER if recipe.startswith("train") else f"{RECIPE} | drop_layers(3) | {LATER}"
    interrupted(tmp_path / "out", begun, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=told):
        alone(tmp_path / "out", recipe, **settings)
    assert sorted(tmp_path.rglob("*")) == before
    card = alone(tmp_path / "out", begun)
    assert "went on from a checkpoint at step 2" in card["trained"]["notes"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_mark_moves_to_another_place_is_not_lost(tmp_path, monkeypatch):
    begun = f"mark('x') | {RECIPE} | mark('y') | drop_layers(3) | {LATER}"
    interrupted(tmp_path / "out", begun, monkeypatch)
    with pytest.raises(UserError, match=r"marks at other places and .* at step 2 of 9"):
        alone(tmp_path / "out", f"{RECIPE} | drop_layers(3) | {LATER}")
    assert "went on from a checkpoint at step 2" in alone(tmp_path / "out", begun)["trained"]["notes"]


def test_what_another_version_has_begun_is_told(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", LATER, monkeypatch)
    (file,) = (tmp_path / ".out.work").glob("phase-*/state.json")
    about = json.loads(file.read_text())
    older = about["key"].replace(", cache='auto')", ")")
    assert older != about["key"]
    file.write_text(json.dumps({**about, "key": older}))
    with pytest.raises(UserError, match=r"another version of smallbert and 'train.*; finish it with that version"):
        alone(tmp_path / "out", LATER)
    unknown = about["key"].replace("train(", "train(warp=9, ")
    file.write_text(json.dumps({**about, "key": unknown}))
    with pytest.raises(UserError, match=r"another version of smallbert and 'head \| train', at step"):
        alone(tmp_path / "out", LATER)
    assert file.exists()


def test_other_work_by_the_same_recipe_is_told_by_what_it_reads(tmp_path, monkeypatch):
    def teacher(seed):
        shutil.rmtree(tmp_path / "teacher", ignore_errors=True)
        save_folder(run("head", make_encoder(seed=seed), make_task()).encoder, tmp_path / "teacher")
        return f"distill(teacher={str(tmp_path / 'teacher')!r}) + {LATER}"

    interrupted(tmp_path / "out", teacher(0), monkeypatch)
    with pytest.raises(UserError, match="other files that it reads and '"):
        alone(tmp_path / "out", teacher(1))


def test_a_finished_beginning_is_taken_over_by_other_work_and_what_is_deleted_stands_in_no_way(tmp_path, monkeypatch):
    interrupted(tmp_path / "out", f"{RECIPE} | drop_layers(3) | {LATER}", monkeypatch)
    shutil.rmtree(tmp_path / ".out.work" / "phase-3.checkpoint")
    taken = []
    monkeypatch.setattr(loop, "take_step", lambda p, b, real=loop.take_step: taken.append(p.total) or real(p, b))
    alone(tmp_path / "out", f"{RECIPE} | drop_layers(2) | {LATER}")
    assert taken == [9] * 9


def test_what_is_left_and_cannot_be_read_stands_in_no_way(tmp_path):
    for name, text in (("phase-1/phase.json", "[]"), ("phase-2.checkpoint/state.json", '{"key"')):
        (tmp_path / ".out.work" / name).parent.mkdir(parents=True)
        (tmp_path / ".out.work" / name).write_text(text)
    assert alone(tmp_path / "out", RECIPE)["status"] == "ok"


def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("smallbert.making.run.train", None)
    with pytest.raises(UserError, match=r"--out .*file/sub cannot be written"):
        one(tmp_path / "file" / "sub", alone=True)


def test_what_holds_no_numbers_is_called_diverged_and_has_no_score(tmp_path, monkeypatch):
    """Also where they are not weights that could be trained: scales, centroids, ranges of inputs."""

    def broken(*given, **settings):
        outcome = run_recipe(*given, **settings)
        next(iter(stored_parts(outcome.encoder).values())).scale[0] = float("nan")
        return outcome

    run_recipe = make.run_recipe
    monkeypatch.setattr(make, "run_recipe", broken)
    card = make.make_one(f"{RECIPE} | quantize", starting.tiny_start("bert"), make_task(), 0, tmp_path, seconds=None)
    assert card["status"] == "diverged" and "scale holds NaN" in card["why"] and not card["scores"]


def test_a_seed_below_zero_is_refused(tmp_path):
    with pytest.raises(UserError, match="seed is 0 or more"):
        make.make_one(RECIPE, starting.tiny_start("bert"), make_task(), -1, tmp_path)


def test_a_comparison_measures_what_it_starts_from(tmp_path):
    """Rows are compared with the model as it was given, not with one of their own."""
    from smallbert.making.compare import AS_GIVEN, compare, read_entries
    from smallbert.report import format_rows

    task = make_task()
    card = make.make_one(
        RECIPE, starting.tiny_start("bert"), task, 0, tmp_path / "given", kind=MACHINERY_CHECK, alone=True
    )
    assert card["status"] == "ok"
    start = replace(starting.start_from(str(tmp_path / "given")), name="given")
    cards = compare(
        read_entries(recipes="drop_layers(2); quantize(8)"),
        start,
        task,
        tmp_path / "out",
        kind=MACHINERY_CHECK,
        seconds=0.05,
    )
    rows = format_rows(cards)
    assert rows[0]["model"] == AS_GIVEN and rows[0]["versus"] == "baseline"
    assert all(float(row["smaller"].rstrip("x")) > 1 for row in rows[1:])


def test_what_is_left_of_a_pruned_model_is_told_where_a_user_looks(tmp_path):
    """Both denominators, and that zeros are no speed: in the README, the notes, the table and the tables of a study."""
    from smallbert.making.readme import numbers
    from smallbert.measuring.findings import Result, gather
    from smallbert.measuring.pruned import Left, mean_left, weights_left
    from smallbert.report.sheets import About, seeds_sheet
    from smallbert.report.table import format_rows, render_table

    recipe, facts = "magnitude(0.1) + train(epochs=0.2, batch=8)", {"kind": MACHINERY_CHECK, "seconds": 0.05}
    card = make.make_one(recipe, starting.tiny_start("bert"), make_task(), 0, tmp_path / "out", alone=True, **facts)
    left, counts = weights_left(card), card["parameters"]
    assert left.layers == pytest.approx(0.1, abs=0.01) and left.whole == counts["non_zero"] / counts["total"] > 0.2
    shown = f"{100 * left.layers:.1f} / {100 * left.whole:.1f}"
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"| weights left, of the layers' matrices / of the whole model | {shown} % |" in readme
    note = next(note for note in card["trained"]["notes"] if "zeros make dense products no faster" in note)
    assert (
        note.startswith(f"{left.layers:.1%} of the weights in the layers' matrices are left") and f"- {note}" in readme
    )

    assert (
        sum("are left" in note for note in card["trained"]["notes"]) == readme.count("are left") == 1
    )  # once is enough
    twice = f"{recipe} | magnitude(0.05) + train(epochs=0.2, batch=8)"
    both = make.make_one(twice, starting.tiny_start("bert"), make_task(), 0, tmp_path / "twice", alone=True, **facts)
    told = [note for note in both["trained"]["notes"] if "are left" in note]  # of the first phase, and in the end
    assert len(told) == 2 and told[0].startswith("10.") and f"{weights_left(both).layers:.1%} of the weights" in told[1]

    dense = one(tmp_path / "dense", alone=True)
    assert [row["left"] for row in format_rows([dense, card])][1] == shown and "left" not in format_rows([dense])[0]
    assert "zeros make dense products no faster" in str(render_table([card]).caption)
    assert not any("weights left" in name for name, _ in numbers(dense))

    runs = [Result("toy", "dense", None, 0, "ok", 50.0, left=weights_left(dense))]
    runs += [
        Result("toy", "pruned", None, seed, "ok", 50.0, left=Left(share, 0.5)) for seed, share in ((0, 0.1), (1, 0.2))
    ]
    about = About("m", "dev", "", {"toy": ("accuracy", "classify", 50.0)}, [])
    sheet = seeds_sheet(gather(runs), about)
    assert sheet.rows[-1][0] == "% of weights left" and sheet.rows[-1][2] == "15.0 / 50.0"
    assert any("zeros make dense products no faster" in note for note in sheet.notes)
    sized = [run._replace(size=1e6 * size) for run, size in zip(runs, (20.0, 4.0, 5.0), strict=True)]
    assert seeds_sheet(gather(sized), about).rows[-1] == ["MB", "20.0", "4.5"]
    assert seeds_sheet(gather(runs[:1]), about).rows[-1][0] != "% of weights left" and mean_left([None]) is None


def test_what_was_measured_of_a_model_is_not_said_of_those_made_from_it(tmp_path):
    """A pruned model that stands for the beginning of another recipe does not hand on the note on its own zeros."""
    from smallbert.making.compare import compare, read_entries

    first = "magnitude(0.1) + train(epochs=0.2, batch=8)"
    setting = {"kind": MACHINERY_CHECK, "seconds": 0.05}
    start, task = starting.tiny_start("bert"), make_task()
    compare(read_entries(None, first), start, task, tmp_path, **setting)
    cards = compare(read_entries(None, f"{first}; {first} | delete_information(0.5)"), start, task, tmp_path, **setting)
    notes = [note for note in cards[-1]["trained"]["notes"] if "zeros make dense products no faster" in note]
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (f"student(2) | distill(teacher='read') + {SHORT}", "distill"),
        (f"student(2) | align('hidden', teacher='read') + {SHORT}", "align"),
        pytest.param(
            f"student(2) | share_projections(teacher='read') + distill(teacher='read') + {SHORT}",
            "share_projections",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{RECIPE} | augment(1, 'nearest', model='read', labels='kept') + {SHORT}",
            "augment",
            marks=pytest.mark.slow,
        ),
        (f"student(model='read') | {RECIPE}", "student"),
        (f"pretrain('read', steps=1, batch=8) | {RECIPE}", "pretrain"),
        pytest.param(f"repeat(2, pretrain('read', steps=1, batch=8)) | {RECIPE}", "pretrain", marks=pytest.mark.slow),
    ],
)
def test_a_changed_file_is_other_work(recipe, name, tmp_path, monkeypatch):
    """What stood in a folder of that name before is not taken over, neither whole nor in parts."""
    monkeypatch.chdir(tmp_path)

    def write(seed):
        if name == "pretrain":
            Path("read").write_text(f"the film was great {'very ' * seed} good\n" * 9)
        else:
            shutil.rmtree("read", ignore_errors=True)
            save_folder(run(RECIPE, make_encoder("bert", seed), make_task(), seed).encoder, "read")

    make_it = lambda: make.make_one(  # noqa: E731
        recipe, starting.tiny_start("bert"), make_task(), 0, "out", kind=MACHINERY_CHECK, seconds=None
    )
    write(1)
    old = make_it()
    assert old["status"] == "ok" and f"{name} of " in old["reads"]
    with monkeypatch.context() as patched:
        patched.setattr("smallbert.making.run.train", None)
        assert make_it() == old
    write(2)
    new = make_it()
    assert card_key(**new) != card_key(**old) and new["recipe"] == old["recipe"] and new["reads"] != old["reads"]
    assert fingerprint(load(f"out/models/{card_key(**new)}")) != fingerprint(load(f"out/models/{card_key(**old)}"))


def test_a_mark_is_no_folder_and_what_reads_no_file_keeps_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("teacher", "latest"):
        save_folder(make_encoder("bert"), name)
    recipe, start, task = Recipe("finetune | mark('teacher') | distill(teacher='teacher') + distill"), None, make_task()
    assert files_read(recipe) is None and files_read(Recipe("distill(teacher='teacher')")) is not None
    start = starting.tiny_start("bert")
    facts = {"model_fingerprint": start.fingerprint, "task": task.name, "task_fingerprint": task.fingerprint}
    work = [start.fingerprint, recipe.key(), task.name, task.fingerprint, 3]
    assert make.work_key(recipe, start, task, 3).endswith(hashlib.sha256(json.dumps(work).encode()).hexdigest()[:10])
    assert make.work_key(recipe, start, task, 3) == card_key(**facts, recipe=recipe.key(), seed=3)
