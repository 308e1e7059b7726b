"""Studies: arms read as written, runs made once and in a fair order, stops survived, and reports that drop nothing."""

import json
import math
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from toys import is_same_state, small, toy_task
from workers import is_alive, prepare_watched, wait_until

from smallbert.cli import main
from smallbert.errors import UserError
from smallbert.machine.files import alone_in, write_json
from smallbert.machine.jobs import WorkerLost
from smallbert.making import make, starting
from smallbert.making.likeness import beginnings
from smallbert.making.run import run_recipe
from smallbert.measuring.card import MACHINERY_CHECK
from smallbert.measuring.convergence import find_convergence
from smallbert.measuring.findings import Result, conclude, gather, marks_by_chance, pair_up
from smallbert.measuring.shelf import load_cards, load_pack, pack_cards
from smallbert.methods import METHODS
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import load_folder
from smallbert.recipes.recipe import Recipe
from smallbert.report.sheets import About, seeds_sheet
from smallbert.report.sizes import have_sizes, points_of
from smallbert.report.study import make_report, to_json, to_markdown, troubles, write_study
from smallbert.studies import study
from smallbert.studies.arms import read_arms, read_vary, with_setting
from smallbert.studies.runs import _prepare, make_piece, run_study

FIRST = "finetune(epochs=1, lr=1e-3, batch=16)"
PLAIN, MIXED = f"{FIRST} | magnitude(0.5) + train(epochs=1)", f"{FIRST} | mix_layers | magnitude(0.5) + train(epochs=1)"


# Arms.


def test_arms_are_named_and_varied():
    arms, setting = read_arms("finetune; mix_layers | finetune", "plain; mixture", "epochs=2,4.5,2")
    assert setting == "epochs" and [(arm.name, arm.value) for arm in arms] == [
        ("plain", 2),
        ("mixture", 2),
        ("plain", 4.5),
        ("mixture", 4.5),
    ]
    assert arms[3].recipe == Recipe("mix_layers | finetune(epochs=4.5)")
    arms, setting = read_arms("finetune | magnitude({0.1, 0.3}); quantize")
    assert [arm.name for arm in arms] == ["finetune | magnitude(0.1)", "finetune | magnitude(0.3)", "quantize(8)"]
    assert setting is None and all(arm.value is None for arm in arms)
    assert read_vary("scope=local, global") == ("scope", ["local", "global"])


def test_the_last_phase_that_has_a_setting_is_varied():
    both = Recipe("finetune(epochs=1) | magnitude(0.5) + train(epochs=2)")
    assert with_setting(both, "epochs", 7) == Recipe("finetune(epochs=1) | magnitude(0.5) + train(epochs=7)")
    assert with_setting(both, "finetune.epochs", 7) == Recipe("finetune(epochs=7) | magnitude(0.5) + train(epochs=2)")
    assert with_setting(both | Recipe("quantize"), "keep", 0.1)[1] == Recipe("magnitude(0.1) + train(epochs=2)")[0]
    # What trains by default has settings too.
    assert with_setting(Recipe("magnitude(0.5)"), "epochs", 7) == Recipe("magnitude(0.5) + train(epochs=7)")
    assert with_setting(Recipe("magnitude(0.5)"), "keep", 0.1)[0][0] == Recipe("magnitude(0.1)")[0][0]


@pytest.mark.parametrize(
    "words, phrase",
    [
        (("finetune; finetune(epochs=3)",), "are the same recipe"),
        (("finetune(epochs=2); finetune(epochs=4)", None, "epochs=2"), "are the same recipe"),
        (("finetune", None, "epoch=2"), r"no method of .* it has finetune\.epochs, finetune\.lr"),
        (("quantize; finetune", None, "epochs=2"), "no method of 'quantize"),
        (("movement + train", None, "lr=1e-3"), r"write movement\.lr or train\.lr"),
        (("finetune", None, "epochs"), "such as epochs=2,4,6"),
        (("finetune", None, "epochs=-2"), "more than 0"),
        (("finetune", "a; b"), "1 different names"),
        (("finetune; quantize", "a; a"), "2 different names"),
        ((" ; ",), "nothing to study"),
    ],
)
def test_arms_that_cannot_be(words, phrase):
    with pytest.raises(UserError, match=phrase):
        read_arms(*words)


# Running.


@pytest.fixture(scope="module")
def start():
    encoder = small()
    return starting.Start(encoder, "small bert", fingerprint(encoder))


@pytest.fixture
def trained(monkeypatch):
    """What was really trained, by the names of its methods."""
    from smallbert.making import run

    seen = []
    real = run.train
    names = lambda phase: " + ".join(sorted(method.name for method in phase.methods))  # noqa: E731
    monkeypatch.setattr(run, "train", lambda phase, *rest: seen.append(names(phase)) or real(phase, *rest))
    return seen


def make_study(start, out, recipes, tasks=("classify",), seeds=(9, 25), names=None, vary=None, **settings):
    arms, setting = read_arms(recipes, names, vary)
    bench = study.Bench(start, {kind: toy_task(kind, 24) for kind in tasks})
    settings = {"kind": MACHINERY_CHECK, "vary": setting, "named": names is not None, **settings}
    return study.Study("", tuple(tasks), arms, tuple(seeds), out, **settings), bench


def test_runs_go_seed_by_seed_and_share_beginnings(start, tmp_path, trained):
    asked, bench = make_study(start, tmp_path, f"quantize; {PLAIN}; {MIXED}", names="a; b; c")
    order = [(piece.seed, piece.arm) for job in study.plan(asked, bench) for piece in job]
    assert order == [(9, 0), (9, 1), (9, 2), (25, 0), (25, 1), (25, 2)]
    lines = []
    results = run_study(asked, bench, line=lines.append)
    assert trained == ["finetune", "magnitude + train", "magnitude + train"] * 2
    assert [(result.arm, result.seed, result.status) for result in results] == [
        (arm, seed, "ok") for arm in "abc" for seed in (9, 25)
    ]
    assert len(lines) == 6 and lines[0].startswith("1 of 6: classify, seed 9, a: ")
    assert [path.name for path in tmp_path.iterdir()] == ["cards"]  # no models, and nothing that is not needed
    cards = load_cards(tmp_path, (MACHINERY_CHECK,))
    assert len(cards) == 6 and {card["preset"] for card in cards} == set("abc")
    for card in cards:
        assert card["latency"] is None and "shared the machine" in card["missing"]["latency"]
        assert card["bytes"]["total"] > 0 and card["macs"]["value"] > 0 and card["parameters"]["total"] > 0
    alone = make.make_one(MIXED, start, bench.tasks["classify"], 9, tmp_path / "alone", kind=MACHINERY_CHECK, seconds=0)
    (same,) = [card for card in cards if (card["seed"], card["preset"]) == (9, "c")]
    assert same["scores"] == alone["scores"]  # a shared beginning changes nothing


LESSON = "distill + train(epochs=2, lr=1e-3, batch=16)"
OTHER = LESSON.replace("distill", "distill(alpha=0.5)")
PULLED = f"align('first') + {LESSON}"  # which wants more of the teacher
COPIED = f"augment(copies=1, ways={{'grams': 0.5}}) + {LESSON}"  # which has more texts


def words_of(out):
    """For each arm and seed of a study, how its teacher was asked."""
    cards = load_cards(out, (MACHINERY_CHECK,))
    notes = {(card["preset"], card["seed"]): "; ".join(card["trained"]["notes"]) for card in cards}
    said = re.compile(r"the teacher '[^']*' (had run on each text before|ran once on each text(?: of which)?)")
    return {key: [found.group(1) for found in said.finditer(told)] for key, told in notes.items()}


ONCE, BEFORE = ["ran once on each text"], ["had run on each text before"]


def test_scores_are_asked_for_once_and_numbers_are_those_of_runs_alone(start, tmp_path):
    recipes = [f"{FIRST} | {rest}" for rest in (PULLED, COPIED, LESSON, f"drop_layers(1) | {LESSON}", OTHER)]
    asked, bench = make_study(start, tmp_path / "all", "; ".join(recipes), names="a; b; c; d; e", keep_models=True)
    run_study(asked, bench)
    told = words_of(tmp_path / "all")
    for seed in asked.seeds:
        assert [told[arm, seed] for arm in "abcde"] == [ONCE, ONCE, ONCE, BEFORE, BEFORE]
    assert {path.name for path in asked.out.iterdir()} == {"cards", "models"}
    for recipe in recipes:
        make.make_one(recipe, start, bench.tasks["classify"], 9, tmp_path / "own", kind=MACHINERY_CHECK, seconds=0)
    alone = list((tmp_path / "own" / "models").iterdir())
    assert len(alone) == 5 and not (tmp_path / "own" / "work" / "said").exists()
    for model in alone:
        assert is_same_state(load_folder(model), load_folder(asked.out / "models" / model.name))


def test_a_given_teacher_is_asked_once_for_all_seeds(start, tmp_path, monkeypatch):
    task = toy_task("classify", 24)
    known = run_recipe(FIRST, start.encoder, task).encoder
    given = starting.Start(known, "tuned", fingerprint(known))
    kept = LESSON.replace("batch=16", f"batch=16, cache='{tmp_path / 'words'}'")
    asked, bench = make_study(given, tmp_path / "out", f"drop_layers(1) | {LESSON}; {LESSON}; {kept}", names="a; b; c")
    run_study(asked, bench)
    told = words_of(asked.out)
    assert [told[key] for key in (("a", 9), ("b", 9), ("a", 25), ("b", 25))] == [ONCE, *[BEFORE] * 3]
    assert [told["c", seed] for seed in asked.seeds] == [ONCE, BEFORE]
    assert len(list((tmp_path / "words").iterdir())) == 1
    monkeypatch.setattr("smallbert.features.asking.LITTLE", 4 * 2 * 24 - 1)  # what is larger goes with its run
    asked = replace(asked, out=tmp_path / "large", arms=asked.arms[:2])
    run_study(asked, bench)
    assert list(words_of(asked.out).values()) == [ONCE] * 4


def test_what_a_kill_has_left_behind_the_last_card_is_taken_away(start, tmp_path):
    asked, bench = make_study(start, tmp_path, FIRST, seeds=[0])
    run_study(asked, bench)
    (tmp_path / "work" / "said").mkdir(parents=True)
    with alone_in(tmp_path):
        run_study(asked, bench)  # somebody else may be at it
        assert (tmp_path / "work").exists()
    run_study(asked, bench)
    assert not (tmp_path / "work").exists()


def test_what_another_study_has_begun_stays(start, tmp_path):
    asked, bench = make_study(start, tmp_path, f"{FIRST}; drop_layers(9) | {FIRST}", seeds=[0])
    (tmp_path / "work" / "another").mkdir(parents=True)
    for _ in range(2):  # runs are made, or there already; what is begun is not refused early, so one fails
        (tmp_path / "work" / "said").mkdir()
        assert [result.status for result in run_study(asked, bench)] == ["ok", "failed"]
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["another"]
    (failed,) = [path for path in (tmp_path / "cards").iterdir() if "drop_layers" in path.name]
    (tmp_path / "work" / failed.stem / "phase-1").mkdir(
        parents=True
    )  # what a run had kept for a kill goes with it, however it ends
    run_study(replace(asked, again=True), bench)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["another"]


def test_a_task_that_cannot_be_read_stops_no_other(start, tmp_path, monkeypatch):
    asked, bench = make_study(start, tmp_path, FIRST, ("classify", "answer"), seeds=[0], length=12)
    bench.tasks["answer"] = starting.at_length(start, bench.tasks["answer"], 12)
    (tmp_path / "work").mkdir()  # so that nothing is refused early

    def here(jobs, prepare, workers, finished, *_):
        work = prepare()
        for piece in (piece for job in jobs for piece in job):
            work(piece)
            finished(piece)

    monkeypatch.setattr("smallbert.studies.runs.open_bench", lambda *_: study.Bench(start, bench.tasks))
    monkeypatch.setattr("smallbert.studies.runs.run_jobs", here)
    read, none = run_study(asked, bench, 2)
    assert read.status == "ok" and none.status == "failed" and "a window of 12 tokens" in none.why


def test_marks_of_others_are_not_in_a_models_history(start, tmp_path):
    asked, bench = make_study(
        start, tmp_path, f"mark('a') | {FIRST} | rewind('a'); {FIRST} | quantize", seeds=[9], keep_models=True
    )
    run_study(asked, bench)
    alone = run_recipe(f"{FIRST} | quantize", start.encoder, bench.tasks["classify"], 9, judge=False).encoder
    steps = [[entry["step"] for entry in load_folder(path).history] for path in (tmp_path / "models").iterdir()]
    assert [entry["step"] for entry in alone.history] in steps
    assert sorted(sum(step == "mark(label='a')" for step in some) for some in steps) == [0, 1]


def test_scores_of_words_go_with_their_run(start, tmp_path):
    asked, bench = make_study(
        start, tmp_path, f"{FIRST} | {LESSON}; {FIRST} | drop_layers(1) | {LESSON}", ("tag",), seeds=[9], names="a; b"
    )
    run_study(asked, bench)
    assert words_of(tmp_path) == {("a", 9): ONCE, ("b", 9): ONCE}


def test_a_mark_that_nothing_names_parts_no_beginnings(start, tmp_path, trained):
    task = toy_task("classify", 24)
    texts = lambda recipe: beginnings(Recipe(recipe), start.encoder, task)  # noqa: E731
    plain, marked = texts(f"{FIRST} | drop_layers(1)"), texts(f"mark('a') | {FIRST} | mark('b') | drop_layers(1)")
    assert list(marked) == list(plain) and list(plain.values()) == [False, True, False]
    assert marked == plain  # a phase that nothing tells apart from the one before still stands behind training
    # Who teaches depends on where it was marked, and what is trained beside a mark is not left out with it.
    early, late = f"{FIRST} | mark('a') | drop_layers(1) | ", f"{FIRST} | drop_layers(1) | mark('a') | "
    taught = "distill(teacher='a') + train(epochs=1)"
    assert list(texts(early + taught))[-1] != list(texts(late + taught))[-1]
    assert list(texts(early + "quantize")) == list(texts(late + "quantize"))
    assert list(texts(f"{FIRST} + mark('a')")) != list(texts(""))
    recipes = f"{FIRST} | {LESSON}; mark('a') | {FIRST} | rewind('a') | {LESSON}"
    asked, bench = make_study(start, tmp_path, recipes, names="a; b", seeds=(9,))
    run_study(asked, bench)
    assert trained == ["finetune", "distill + train", "distill + train"]
    alone = make.make_one(asked.arms[1].recipe, start, bench.tasks["classify"], 9, tmp_path / "own", seconds=0)
    (same,) = [card for card in load_cards(tmp_path, (MACHINERY_CHECK,)) if card["preset"] == "b"]
    assert same["scores"] == alone["scores"]


def test_finished_runs_are_not_made_again_and_failed_ones_only_if_asked(start, tmp_path, trained):
    asked, bench = make_study(start, tmp_path, f"drop_layers(9) | {FIRST}; {FIRST}", seeds=[0])
    first = run_study(asked, bench)
    assert [result.status for result in first] == ["failed", "ok"] and "2 layers" in first[0].why
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert run_study(asked, bench) == first and trained == ["finetune"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    run_study(replace(asked, again=True), bench)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert ["drop_layers" in path.name for path in after if after[path] != before[path]] == [True]
    more, _ = make_study(start, tmp_path, f"drop_layers(9) | {FIRST}; {FIRST}", seeds=[0, 1])
    assert [result.status for result in study.results_of(more, bench)] == ["failed", "not run", "ok", "not run"]


def test_other_kinds_splits_and_kept_models(start, tmp_path):
    asked, bench = make_study(
        start, tmp_path, FIRST, ("regress", "answer"), seeds=[3], keep_models=True, split="test", length=16
    )
    for name, task in bench.tasks.items():
        bench.tasks[name] = replace(task, splits={**task.splits, "test": task.split("dev").take(range(6))})
    results = run_study(asked, bench)
    assert [(result.task, result.status) for result in results] == [("regress", "ok"), ("answer", "ok")]
    cards = load_cards(tmp_path / "cards", (MACHINERY_CHECK,))
    assert {card["split"] for card in cards} == {"test"} and {card["headline"] for card in cards} == {"pearson", "em"}
    assert all(next(iter(card["scores"].values()))["n"] == 6 for card in cards)
    assert len(list((tmp_path / "models").iterdir())) == 2
    # The same work scored on other examples is another card.
    dev = replace(asked, split="dev")
    assert {result.status for result in study.results_of(dev, bench)} == {"not run"}


def test_packed_cards_outlive_settings_that_came_later(start, tmp_path):
    asked, bench = make_study(start, tmp_path, FIRST, seeds=[0])
    run_study(asked, bench)
    path = pack_cards(tmp_path)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert ", compile=None" in written["recipe"]
    older = written | {"recipe": written["recipe"].replace(", compile=None", "")}  # as before there was such a setting
    for text, known in ((older["recipe"], True), ("gone_since(keep=3)", False)):
        path.write_text(json.dumps(older | {"recipe": text}), encoding="utf-8")
        bench.packed = load_pack(path)
        assert (study.results_of(asked, bench)[0].status == "ok") is known


def test_finished_runs_are_found_wherever_their_copies_were_kept(start, tmp_path):
    recipe = "augment(copies=1, ways='nearest', labels='kept', folder={!r}) + train(epochs=1, batch=8)"
    asked, bench = make_study(start, tmp_path, recipe.format(str(tmp_path / "here")), seeds=[0])
    run_study(asked, bench)
    assert str(tmp_path) not in json.loads(pack_cards(tmp_path).read_text(encoding="utf-8"))["recipe"]
    asked, bench = make_study(start, tmp_path, recipe.format(str(tmp_path / "there")), seeds=[0])
    bench.packed = load_pack(tmp_path / "cards.jsonl")
    phases = [beginnings(arm.recipe, start.encoder, bench.tasks["classify"]) for arm in asked.arms]
    with pytest.raises(UserError, match="are the same recipe"):
        read_arms("; ".join(recipe.format(name) for name in ("here", "there")))
    assert str(tmp_path) not in str(phases)  # what was begun is found too
    assert [result.status for result in study.results_of(asked, bench)] == ["ok"]


def test_failed_runs_tried_again_share_their_beginning(start, tmp_path, trained, monkeypatch):
    def fail(*_):
        raise UserError("it cannot be done, as only doing it tells")

    monkeypatch.setattr(METHODS["quantize"], "fill", fail)
    asked, bench = make_study(start, tmp_path, f"{FIRST} | quantize(8); {FIRST} | quantize(4)", seeds=[0])
    for again in (False, True):
        results = run_study(replace(asked, again=again), bench)
        assert [result.status for result in results] == ["failed"] * 2
    assert trained == ["finetune"] * 2  # once each time


def test_a_job_falls_apart_as_its_beginnings_are_made(start, tmp_path, trained):
    asked, bench = make_study(start, tmp_path, f"{FIRST}; {MIXED}; {PLAIN}; {PLAIN} | quantize; quantize", seeds=[0])
    job, alone = study.plan(asked, bench)
    arms = lambda jobs: [[piece.arm for piece in job] for job in jobs]  # noqa: E731
    assert arms([job, alone]) == [[0, 1, 2, 3], [4]] == arms([*study.part(asked, bench, job), alone])
    make_piece(asked, bench, False, job[0])
    assert arms(study.part(asked, bench, job[1:])) == [[1], [2, 3]]  # what two still wait for is made once
    make_piece(asked, bench, False, job[2])
    assert arms(study.part(asked, bench, [job[1], job[3]])) == [[1], [3]]
    assert arms(study.part(replace(asked, seeds=(1,)), bench, [piece._replace(seed=1) for piece in job])) == [
        [0, 1, 2, 3]
    ]
    assert [result.status for result in run_study(asked, bench)] == ["ok"] * 5  # goes on with what is there
    assert trained == ["finetune", "magnitude + train", "magnitude + train"] and not (tmp_path / "work").exists()


def test_a_kept_model_is_a_beginning_that_is_made(start, tmp_path, trained):
    first, bench = make_study(start, tmp_path, FIRST, seeds=[0], keep_models=True)
    run_study(first, bench)
    asked, _ = make_study(start, tmp_path, f"{FIRST}; {PLAIN}; {MIXED}", seeds=[0])
    (job,) = study.plan(asked, bench)
    assert [[piece.arm for piece in part] for part in study.part(asked, bench, job[1:])] == [[1], [2]]
    run_study(asked, bench)
    assert trained == ["finetune", "magnitude + train", "magnitude + train"]


CUT, TAUGHT = "magnitude + train", "distill + magnitude + train"
SCREEN = f"{FIRST}; {PLAIN}; {PLAIN} | quantize; {FIRST} | drop_layers(99); {FIRST} | magnitude(0.7) + distill + train"


def make_screen(out, **settings):
    """Five runs behind one fine-tuning, two of them behind the same pruning too, on a model that workers can make."""
    arms, _ = read_arms(SCREEN.replace("distill + train", "distill + train(epochs=1)"))
    asked = study.Study(None, (), arms, (9,), out, kind=MACHINERY_CHECK, **settings)
    return asked, study.open_bench(asked)


def trainings(folder):
    """What workers trained -> in which processes."""
    found: dict[str, list[str]] = {}
    for line in (folder / "trained").read_text().splitlines():
        found.setdefault(line.split(": ")[0], []).append(line.split(": ")[1])
    return found


@pytest.mark.parametrize("kind", ["classify", "answer"])
def test_workers_are_given_the_tokens_that_their_runs_look_for(kind, start, tmp_path, monkeypatch):
    asked, bench = make_study(start, tmp_path, f"quantize; {FIRST}", (kind,), names="a; b", length=16)
    given, told = [], []
    monkeypatch.setattr("smallbert.studies.runs.run_jobs", lambda jobs, prepare, *_: given.append(prepare))
    run_study(asked, bench, 2, say=lambda *one: told.append(one[0]))
    ((_, streams),) = (prepare.args for prepare in given)
    assert f"tokenising {kind}" in told
    again = study.Bench(start, bench.tasks)
    monkeypatch.setattr("smallbert.studies.runs.open_bench", lambda *_: again)
    monkeypatch.setattr("smallbert.making.run.tokenise", None)  # none is left to be made
    work = _prepare(asked, pickle.loads(pickle.dumps(streams)))
    for piece in (piece for job in study.plan(asked, bench) for piece in job):
        work(piece)
    assert [result.status for result in study.results_of(asked, bench)] == ["ok"] * 4, study.results_of(asked, bench)
    run_study(replace(asked, arms=asked.arms[:1], out=tmp_path / "untrained"), bench, 2)
    assert given[1].args[1] == {}


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_runs_behind_one_beginning_go_to_many_workers(tmp_path, monkeypatch):
    """Two of them wait for each other, so that they must run at once; all are what they are one by one."""
    monkeypatch.setattr("smallbert.studies.runs._prepare", partial(prepare_watched, {CUT: 2, TAUGHT: 2}))
    asked, bench = make_screen(tmp_path / "out", keep_models=True)
    lines, kept = [], []
    beginnings = lambda: len(list(asked.out.glob("work/beginning-*")))  # noqa: E731
    results = run_study(asked, bench, 3, line=lambda text: lines.append(text) or kept.append(beginnings()))
    assert [result.status for result in results] == ["ok", "ok", "ok", "failed", "ok"]
    assert len(lines) == 5 and max(kept) > 0 and kept[-1] == 0
    found = trainings(tmp_path)
    assert {name: len(where) for name, where in found.items()} == {"finetune": 1, CUT: 1, TAUGHT: 1}
    assert found[CUT] != found[TAUGHT] and {path.name for path in asked.out.iterdir()} == {"cards", "models"}
    one_by_one, bench = make_screen(tmp_path / "one by one", keep_models=True)
    run_study(one_by_one, bench, 1)
    models = sorted(asked.out.glob("models/*"))
    assert len(models) == 4
    for model in models:
        one, other = (load_folder(out / "models" / model.name) for out in (asked.out, one_by_one.out))
        assert is_same_state(one, other)


@pytest.mark.slow  # five processes; test_jobs.py has stops and deaths of light ones
def test_a_stop_and_a_dead_worker_behind_one_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr("smallbert.studies.runs._prepare", partial(prepare_watched, {TAUGHT: 0}))
    asked, bench = make_screen(tmp_path / "out")

    def stop(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(asked, bench, 2, line=stop)
    assert any(result.status == "not run" for result in study.results_of(asked, bench))
    results = run_study(asked, bench, 2)
    assert [result.status for result in results] == ["ok", "ok", "ok", "failed", "ok"]
    found = trainings(tmp_path)
    assert len(found["finetune"]) == 1 and len(found[TAUGHT]) >= 2 and len({*found[TAUGHT]}) >= 2
    assert [path.name for path in asked.out.iterdir()] == ["cards"]


def test_too_little_memory_is_an_error_only_while_others_run(start, tmp_path, monkeypatch):
    asked, bench = make_study(start, tmp_path, FIRST, seeds=[0])
    ((piece,),) = study.plan(asked, bench)

    def explode(*_, **__):
        raise errors[-1]

    monkeypatch.setattr(make, "run_recipe", explode)
    errors: list[Exception] = []
    for error, memory in ((MemoryError(), True), (RuntimeError("CUDA error: an illegal access"), False)):
        errors.append(error)
        with pytest.raises(WorkerLost) as lost:
            make_piece(asked, bench, False, piece, deaths=1)
        assert lost.value.memory is memory and study.result_of(asked, bench, piece).status == "not run"
    errors.append(RuntimeError("shapes do not fit"))  # the recipe's own trouble
    make_piece(asked, bench, False, piece)
    assert "shapes do not fit" in study.result_of(asked, bench, piece).why
    errors.append(MemoryError())
    make_piece(replace(asked, again=True), bench, True, piece)
    assert "not enough memory" in study.result_of(asked, bench, piece).why
    make_piece(asked, bench, False, piece, deaths=2, why="signal 9")
    result = study.result_of(asked, bench, piece)
    assert result.status == "failed" and "ended twice" in result.why and "signal 9" in result.why


def test_one_folder_is_written_by_one_study(start, tmp_path):
    asked, bench = make_study(start, tmp_path, FIRST, seeds=[0])
    with alone_in(tmp_path), pytest.raises(UserError, match="in use by another"):
        run_study(asked, bench)
    assert [result.status for result in run_study(asked, bench)] == ["ok"]


def test_a_launch_of_many_processes_is_refused(start, tmp_path, monkeypatch):
    asked, bench = make_study(start, tmp_path, FIRST, seeds=[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without accelerate launch"):
        run_study(asked, bench)


@pytest.mark.slow
def test_kill_minus_nine_with_workers_and_go_on(tmp_path, capsys):
    """Two workers, one recipe that fails; the parent is killed, the workers go with it, and the rest is made later."""
    out = tmp_path / "out"
    first = "finetune(epochs=2, lr=1e-3)"
    recipes = f"{first}; drop_layers(99) | finetune; {first} | mix_layers | train(epochs=2, lr=1e-3)"
    words = ["study", "--tiny", "--recipes", recipes, "--names", "plain; broken; mixture", "--out", str(out)]
    words += ["--seeds", "1,2,1,3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    parent = subprocess.Popen([sys.executable, "-m", "smallbert", *words, "--jobs", "2"], env=environment, **quiet)

    def children():
        found = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        return [pid for pid in found if is_alive(pid) and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_until(lambda: len(list(out.glob("cards/*.json"))) >= 5 or parent.poll() is not None, 240)
    assert parent.poll() is None
    workers = children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert len(workers) == 2
    wait_until(lambda: not any(map(is_alive, workers)), 15)
    before = {path: path.read_bytes() for path in out.glob("cards/*.json")}
    assert 5 <= len(before) < 9  # three that failed at once, and two
    assert main([*words, "--report-only", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(run["status"] == "not run" for run in found["runs"]) == 9 - len(before)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {path: path.read_bytes() for path in before} == before
    statuses = {arm: [run["status"] for run in found["runs"] if run["arm"] == arm] for arm in ("plain", "broken")}
    assert statuses == {"plain": ["ok"] * 3, "broken": ["failed"] * 3}
    assert {path.name for path in out.iterdir()} == {"cards", "study.md", "study.json", "toy-seeds.png"}
    assert main(words) == 0
    text = capsys.readouterr()
    assert "MACHINERY CHECK" in text.out and "3 failed" in text.out and "3 of 9 runs failed" in text.out
    assert "the model has 12 layers" in text.err


def test_a_card_has_the_command_that_makes_it_alone(tmp_path, capsys):
    words = ["study", "--tiny", "--recipes", "quantize(8); quantize(4)", "--names=eight; four", "--seeds", "0,1"]
    assert main([*words, "--vary", "scope=tensor", "--jobs", "1", "--out", str(tmp_path / "all")]) == 0
    cards = [json.loads(path.read_text()) for path in (tmp_path / "all" / "cards").glob("*.json")]
    (card,) = (card for card in cards if card["preset"] == "four" and card["seed"] == 1)
    assert len(cards) == 4 and "eight" not in card["command"]
    alone = shlex.split(card["command"].replace(str(tmp_path / "all"), str(tmp_path / "one")))
    assert alone[0] == "smallbert" and main(alone[1:]) == 0
    (made,) = (tmp_path / "one" / "cards").glob("*.json")
    assert (tmp_path / "all" / "cards" / made.name).is_file()
    again = json.loads(made.read_text())
    assert all(again[key] == card[key] for key in ("recipe", "preset", "seed", "task_fingerprint", "scores"))


# Reports.


def runs(task, arm, scores, value=None, diverged=(), failed=(), seeds=(9, 25, 39, 52, 59, 63, 77, 87, 91, 96)):
    """Results of one arm, a score a seed."""
    made = []
    for seed, score in zip(seeds, scores, strict=False):
        status = "diverged" if seed in diverged else "failed" if seed in failed else "ok"
        why = None if status == "ok" else f"it {status}"
        made.append(Result(task, arm, value, seed, status, None if status == "failed" else score, why, 1.0))
    return made


def about(*tasks, arms=("plain", "mixture"), setting=None, values=(None,), kind="classify"):
    rows = [(arm, value, f"finetune # {arm}") for value in values for arm in arms]
    return About("bert", "dev", "smallbert study …", {task: ("accuracy", kind, 50.9) for task in tasks}, rows, setting)


SEEDS = (9, 25, 39, 52, 59, 63, 77, 87, 91, 96)
COLLAPSED = [50.9] * 8 + [84.0, 86.0]
STEADY = [85.0, 86.0, 85.0, 84.0, 85.0, 86.0, 85.0, 84.0, 85.0, 86.0]


def test_the_paper_s_table_of_seeds(tmp_path):
    results = runs("sst2", "plain", COLLAPSED, diverged=SEEDS[:8]) + runs("sst2", "mixture", STEADY)
    report = make_report(results, about("sst2"))
    sheet = report.sheets[0]
    assert sheet.columns == ["seed", "plain", "mixture"] and sheet.rows[0] == ["9", "50.90 †", "85.00"]
    assert sheet.rows[9] == ["96", "86.00", "86.00"] and len(sheet.rows) == 13
    assert sheet.rows[10][1:] == ["85.00 ± 1.41 (2)", "85.10 ± 0.74 (10)"]
    assert sheet.rows[11][1:] == ["57.72 ± 14.39 (10)", "85.10 ± 0.74 (10)"]
    assert sheet.rows[12][1:] == ["8 of 10 (49 to 94 %)", "0 of 10 (0 to 28 %)"]
    assert report.sentences == [
        "plain: 57.7 ± 14.4 (8 of 10 diverged); mixture: 85.1 ± 0.7 (0 of 10 diverged); Fisher's exact p = 0.0007."
    ]
    (pair,) = report.pairs
    assert pair.survivors == pytest.approx(0.1) and pair.all == pytest.approx(27.38)
    assert pair.fisher == pytest.approx(90 / 125970) and pair.paired.n == 10 and pair.paired_survivors.n == 2
    assert troubles(report) == ["sst2, plain, diverged: it diverged (seed 9, 25, 39, 52, 59, 63, 77, 87)"]
    written = write_study(report, tmp_path)
    assert [path.name for path in written] == ["study.md", "study.json", "sst2-seeds.png"]
    assert (tmp_path / "sst2-seeds.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "study.md").read_text()
    assert "| 9 | 50.90 † | 85.00 |" in text and report.sentences[0] in text and "(sst2-seeds.png)" in text
    assert json.loads((tmp_path / "study.json").read_text())["pairs"][0]["fisher"] == pytest.approx(0.000714, abs=1e-6)


def test_nothing_is_dropped_silently():
    results = runs("sst2", "plain", [50.0, 80.0, 82.0], diverged=[9], failed=[39]) + runs(
        "sst2", "mixture", [85.0, 86.0]
    )
    results += [
        Result("sst2", "mixture", None, 39, "not run"),
        Result("sst2", "mixture", None, 52, "diverged", None, "NaN"),
    ]
    report = make_report(results, about("sst2"))
    rows = {row[0]: row[1:] for row in report.sheets[0].rows}
    assert rows["39"] == ["failed", "not run"] and rows["52"] == ["not run", "no score †"]
    assert rows["missing"] == ["1 failed", "1 not run"] and rows["diverged (95 % interval)"][1].startswith("1 of 3")
    assert rows["mean ± sd with † counted (n)"] == ["65.00 ± 21.21 (2)", "85.50 ± 0.71 (2)"]
    assert "2 of 7 runs failed or were not run" in report.sentences[-1]
    text = to_markdown(report)
    assert "sst2, plain, failed: it failed (seed 39)" in text and "sst2, mixture, not run (seed 39)" in text


def test_arms_of_other_sizes_are_drawn_against_them(tmp_path):
    sizes = {"whole": 100e6, "half": 50e6, "half, worse": 51e6, "tiny": 10e6}
    scores = {"whole": 91.0, "half": 90.0, "half, worse": 85.0, "tiny": 80.0}
    results = [run._replace(size=size) for arm, size in sizes.items() for run in runs("sst2", arm, [scores[arm]] * 2)]
    report = make_report(results, about("sst2", arms=sizes))
    assert [path.name for path in write_study(report, tmp_path)][2:] == ["sst2-seeds.png", "sst2-sizes.png"]
    with_line = [point.name for point in points_of(report.cells) if point.on_frontier]
    assert with_line == ["whole", "half", "tiny"]
    assert not have_sizes([cell for cell in report.cells if cell.arm.startswith("half")])


def test_one_seed_has_no_deviation_and_one_arm_no_pair():
    report = make_report(runs("sts", "plain", [88.0]) + runs("sts", "mixture", [89.0]), about("sts", kind="regress"))
    assert [sheet.title for sheet in report.sheets] == ["sts, accuracy on dev"]
    assert report.sheets[0].columns == ["", "seed 9"]
    assert report.sheets[0].rows == [["plain", "88.00"], ["mixture", "89.00"]]
    assert report.pairs[0].paired == (1.0, None, 1) and not report.pairs[0].is_beyond
    assert report.sentences == ["plain: 88.0; mixture: 89.0; one seed each, so nothing is tested."]
    alone = make_report(runs("sts", "plain", [88.0]), about("sts", arms=["plain"]))
    assert len(alone.sheets) == 1 and alone.sentences == ["plain: 88.0."]
    nothing = make_report([Result("sts", "plain", None, 0, "not run")], about("sts", arms=["plain"]))
    assert nothing.sentences == ["plain: no run finished; 1 of 1 runs failed or were not run."]
    assert seeds_sheet(nothing.cells, nothing.about).rows == [["plain", "not run", "1 not run"]]


def test_the_paper_s_table_of_tasks():
    plain, better = [82.0, 82.5, 83.0, 82.2, 82.8], [87.0, 87.5, 88.1, 87.0, 87.9]
    results = []
    for task, mixed in (("tense", better), ("length", [82.1, 82.4, 83.1, 82.1, 82.9])):
        results += runs(task, "plain", plain) + runs(task, "mixture", mixed)
    report = make_report(results, about("tense", "length"))
    sheet = report.sheets[-1]
    assert sheet.columns == ["task", "plain", "mixture", "mixture - plain"]
    assert sheet.rows[0] == ["tense", "82.50 ± 0.41", "87.50 ± 0.50", "+5.00 ± 0.05 *"]
    assert sheet.rows[1][3] == "+0.02 ± 0.05"
    chance = marks_by_chance(report.pairs)
    assert chance == pytest.approx(2 * 0.1161, abs=1e-3)  # two tasks, Student's t with four degrees of freedom
    assert any("1 of 2 tested" in note and "about 0.2 are to be expected" in note for note in sheet.notes)
    assert report.sentences[0].startswith(
        "Against plain, beyond two standard errors of survivors or in how often it diverges: mixture is better on 1 "
        "(tense +5.0) and worse on 0 of 2 tasks; of 2 comparisons"
    )


def test_the_convergence_figure(tmp_path):
    results = []
    for epochs, plain, mixed in ((2, 80.0, 84.0), (4, 84.0, 86.0), (8, 86.0, 86.0)):
        results += runs("mnli", "plain", [plain - 1, plain + 1], epochs) + runs(
            "mnli", "mixture", [mixed, mixed], epochs
        )
    report = make_report(results, about("mnli", setting="epochs", values=(2, 4, 8)))
    # plateau 86, its error 1: plain is at 85 half way from 4 to 8, mixture half way from 2 to 4
    (found,) = report.convergence
    assert found.plateau[0] == 86.0 and found.plateau.error == pytest.approx(1.0)
    assert (found.one_at.x, found.other_at.x) == (6.0, 3.0) and found.factor == 2.0
    assert report.sentences[0] == (
        "mnli: mixture reaches plain's last score, still rising (86.0 less its standard error 1.0) after 3 epochs, "
        "plain after 6 epochs: factor 2.00."
    )
    assert report.sentences[1].startswith("at epochs = 8: plain: 86.0 ± 1.4")
    assert [row[0] for row in report.sheets[3].rows] == ["2", "4", "8"] and report.sheets[3].rows[0][
        1
    ] == "80.00 ± 1.41"
    assert [path.name for path in write_study(report, tmp_path)][2:] == ["mnli-epochs.png"]
    reversed_ = find_convergence(gather(sorted(results, key=lambda run: run.arm)))
    assert "plain reaches mixture's plateau (86.0) after 8 epochs, mixture after 4 epochs" in reversed_[0].sentence


def test_many_arms_are_rows_and_stand_against_the_first(tmp_path):
    arms = ["dense", *(f"way {number}" for number in range(1, 10))]
    results = [run for number, arm in enumerate(arms) for run in runs("sst2", arm, [90.0 - number, 92.0 - number])]
    results[-1] = results[-1]._replace(score=50.0, status="diverged", why="guesses")
    report = make_report(results, about("sst2", arms=arms))
    seeds, pairs = report.sheets
    assert seeds.columns[:3] == ["", "seed 9", "seed 25"] and [row[0] for row in seeds.rows] == arms
    assert seeds.rows[2][1:3] == ["88.00", "90.00"] and seeds.rows[-1][2] == "50.00 †"
    assert all(len(row) == len(seeds.columns) for row in seeds.rows)
    assert pairs.title == "against dense" and [row[0] for row in pairs.rows] == [f"{arm} - dense" for arm in arms[1:]]
    assert len(to_json(report)["pairs"]) == 45 and to_markdown(report).startswith("# Study of 10 recipes\n")
    (said,) = report.sentences
    assert "highest of the 9 others: way 1 with 90.0 ± 1.4 (0 of 2 diverged), way 2 with" in said
    assert "way 3 with" in said and "way 4" not in said and "difference way 1 against dense -1.00" in said
    assert [path.name for path in write_study(report, tmp_path)][2:] == ["sst2-seeds.png"]


def test_a_plateau_that_is_never_or_at_once_reached():
    def lines(plain, mixed, **options):
        results = [run for n, score in enumerate(plain, 1) for run in runs("t", "plain", [score], n, **options)]
        results += [run for n, score in enumerate(mixed, 1) for run in runs("t", "mixture", [score], n)]
        return find_convergence(gather(results))[0]

    never = lines([80, 85, 90], [60, 61, 62])
    assert never.factor is None and "never within the range, plain after 3 epochs" in never.sentence
    at_once = lines([80, 85, 90], [91, 92, 93])
    assert at_once.sentence.endswith("after at most 1 epoch, plain after 3 epochs: factor at least 3.00.")
    assert "no factor" in lines([90, 90, 90], [91, 92, 93]).sentence
    assert "one seed" in at_once.sentence
    gone = lines([50, 50, 50], [60, 61, 62], diverged=[9])
    assert "plain has no plateau" in gone.sentence and gone.factor is None


def test_runs_that_diverged_stay_in_the_convergence_figure():
    """Two of three runs that learned nothing are not dropped for the one that did."""
    few = runs("t", "plain", [50.0, 50.0, 80.0], 1, diverged=[9, 25]) + runs("t", "plain", [84.0, 84.0, 84.0], 2)
    many = runs("t", "mixture", [70.0, 70.0, 70.0], 1) + runs("t", "mixture", [85.0, 85.0, 85.0], 2)
    (found,) = find_convergence(gather(few + many))
    assert found.one_at.x == 2.0 and found.other_at.x == pytest.approx(1 + 14 / 15)
    assert found.sentence.endswith("2 of 12 runs diverged and count with their scores.")


def test_an_arm_that_diverges_more_often_is_called_worse():
    results = [run for task in ("a", "b") for run in runs(task, "plain", [80.0, 81.0, 82.0, 83.0, 84.0])]
    results += runs("a", "mixture", [81.0, 82.0, 83.0, 84.0, 85.1])
    results += runs("b", "mixture", [50.0] * 5, diverged=SEEDS[:5])
    said = conclude(gather(results))
    assert "better on 1 (a +1.0) and worse on 1 (b, 5 of 5 diverged against 0 of 5) of 2 tasks" in said


def test_words_can_be_varied_too(tmp_path):
    results = [run for value in ("local", "global") for run in runs("t", "plain", [80.0, 81.0], value)]
    report = make_report(results, about("t", arms=["plain"], setting="scope", values=("local", "global")))
    assert report.convergence == [] and report.sentences[0].startswith("at scope = global: plain: 80.5")
    assert (tmp_path / "t-scope.png") in write_study(report, tmp_path)


def test_json_holds_every_number_and_no_nan(tmp_path):
    results = runs("a", "plain", COLLAPSED, diverged=SEEDS[:9]) + runs("a", "mixture", STEADY, failed=SEEDS)
    found = to_json(make_report(results, about("a")))
    write_json(tmp_path / "study.json", found)  # which refuses NaN
    assert len(found["runs"]) == 20 and found["cells"][1]["failed"] == 10 and found["cells"][1]["all"]["value"] is None
    assert found["pairs"][0]["fisher"] is None and re.search("NaN|Infinity", json.dumps(found)) is None
    assert math.isclose(found["cells"][0]["diverged_interval"][1], 0.982, abs_tol=1e-3)


def test_the_difference_speaks_where_nothing_diverged():
    cells = gather(runs("t", "plain", [80.0, 81.0, 82.0]) + runs("t", "mixture", [81.0, 83.0, 85.0]))
    (pair,) = pair_up(cells)
    assert pair.flips == 0.25 and pair.paired == (2.0, 1.0, 3)
    assert conclude(cells).endswith("difference +2.00 ± 0.58 over 3 paired seeds (standard error; p = 0.250).")
