"""Tuning: spaces read and refused, draws that repeat, dev never looked at, searches that go on, and honest reports."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from toys import run, small, toy_task

optuna = pytest.importorskip("optuna", reason="the extra tune is not installed")

from smallbert.cli import main  # noqa: E402
from smallbert.errors import RunError, UserError  # noqa: E402
from smallbert.making.make import Start  # noqa: E402
from smallbert.measuring.card import MACHINERY_CHECK  # noqa: E402
from smallbert.measuring.findings import Result  # noqa: E402
from smallbert.measuring.shelf import load_cards  # noqa: E402
from smallbert.model.encoder import fingerprint  # noqa: E402
from smallbert.model.folders import save_folder  # noqa: E402
from smallbert.recipes.recipe import Recipe  # noqa: E402
from smallbert.recipes.space import expand_space  # noqa: E402
from smallbert.report.tuning import make_result, other_search, to_markdown, trials_sheet  # noqa: E402
from smallbert.studies import study as studies  # noqa: E402
from smallbert.tasks.task import Split  # noqa: E402
from smallbert.tuning import held, search, trial  # noqa: E402
from smallbert.tuning.records import Record, best_of, importances, records_of  # noqa: E402
from smallbert.tuning.space import read_space, rows  # noqa: E402
from smallbert.tuning.storage import open_study, revive, without_password  # noqa: E402
from smallbert.tuning.trial import COMMON  # noqa: E402

SPACE = "finetune(lr=log(1e-5, 1e-2), epochs={0.5, 1}, batch=16)"


# Spaces.


def test_a_space_is_read_with_its_names_kinds_and_defaults():
    space = read_space(
        "finetune(lr=log(1e-6, 1e-4), epochs={1, 2}, dropout={None, linear(0, 0.3)}, batch=log(8, 64)) "
        "| maybe(drop_layers(linear(1, 3))) | finetune(lr=linear(0.1, 0.3))"
    )
    assert list(rows(space)) == [
        ["finetune.lr", "log", "1e-06 to 0.0001", "5e-05"],
        ["finetune.epochs", "one of", "1, 2", "1"],
        ["finetune.dropout", "one of", "None, linear(0, 0.3)", "None"],
        ["finetune.dropout #2", "linear", "0 to 0.3", "0.15"],
        ["finetune.batch", "whole log", "8 to 64", "32"],
        ["maybe drop_layers(linear(1, 3))", "one of", "without, with", "without"],
        ["drop_layers.keep", "whole linear", "1 to 3", "2"],
        ["finetune.lr #2", "linear", "0.1 to 0.3", "0.2"],
    ]
    # A setting's own default where it lies inside, the first of a set, without what is in maybe().
    assert space.default() == Recipe("finetune(lr=5e-5, epochs=1, batch=32) | finetune(lr=0.2)")
    assert "drop_layers.keep" not in space.defaults() and space.defaults()["finetune.lr"] == 5e-5
    assert space.count() is None and read_space("finetune(epochs={1, 2}, batch={8, 16, 32})").count() == 6


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("", "no recipe to search"),
        ("finetune(lr=1e-4)", "nothing to search"),
        ("finetune(lr=uniform(1e-6, 1e-4))", "uniform"),
        ("finetune(lr=log(0, 1))", "two numbers above 0, the lower one first"),
        ("finetune(lr=linear(2, 1))", "the lower one first"),
        ("finetune(lr=log(1e-4))", "two ends"),
        ("finetune(lr=log)", "two ends"),
        ("finetune(lr=log({1, 2}, 3))", "two ends"),
        ("finetune(lr=log(low=1, high=2))", "two ends"),
        ("finetune(lr=log(1e-5, __import__('os').getpid()))", "two ends"),
        ("finetune(lr=linear(-1, 1))", "lr, a learning rate, must be more than 0, not -1"),  # checked at its ends
        ("finetune(warmup=linear(0, 2))", "warmup is a share"),
        ("finetune(dropout=linear(0.5, 3))", "dropout is a share"),
        ("finetune(batch=linear(0.5, 2.5))", "batch must be int"),
        ("finetune(epochs={1, 'two'})", "epochs must be float"),
        ("maybe() | finetune(epochs={1, 2})", "maybe takes one recipe"),
        ("finetune(seed={0, 1, 2})", "a seed cannot be searched"),
        ("finetune(seed=linear(0, 9))", "a seed cannot be searched"),
        ("{finetune(seed=1), finetune(seed=2)}", "a seed cannot be searched"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_a_sentence(text, phrase):
    with pytest.raises(UserError, match=phrase):
        read_space(text)


def test_ranges_are_for_tuning_alone():
    for text in ("finetune(lr=log(1e-6, 1e-4))", "finetune(lr={1e-3, linear(1e-6, 1e-4)})"):
        for read in (Recipe, expand_space):
            with pytest.raises(UserError, match=r"only smallbert tune can search a range|tries each"):
                read(text)
    with pytest.raises(UserError, match="only smallbert tune can search a range"):
        expand_space("finetune(lr=log(1e-6, 1e-4), epochs={1, 2})")


def test_drawn_recipes_lie_inside_and_stand_as_their_record_says():
    space = read_space("finetune(lr=log(1e-6, 1e-4), batch=linear(8, 12), dropout=linear(0, 0.3)) | maybe(mix_layers)")
    draw = random.Random(0)

    def choose(choice):
        drawn[choice.name] = choice.rounded(
            draw.choice(choice.values)
            if choice.values
            else draw.randint(choice.low, choice.high)
            if choice.whole
            else draw.uniform(choice.low, choice.high)
        )
        return drawn[choice.name]

    with_mixture = 0
    for _ in range(50):
        drawn = {}
        recipe = space.draw(choose)
        settings = recipe[0][0].settings()
        assert settings["lr"] == drawn["finetune.lr"] and float(f"{settings['lr']:.3g}") == settings["lr"]
        assert settings["batch"] in range(8, 13) and 0 <= settings["dropout"] <= 0.3
        with_mixture += len(recipe) == 2
        assert (len(recipe) == 2) == (drawn["maybe mix_layers"] == "with")
    assert 10 < with_mixture < 40


def test_rounding_does_not_lead_out_of_a_range():
    space = read_space("finetune(lr=log(1.234567e-5, 1e-3), dropout=linear(0.1, 0.99996))")
    for end in ("low", "high"):
        settings = space.draw(lambda choice, end=end: choice.rounded(getattr(choice, end)))[0][0].settings()
        assert [settings["lr"], settings["dropout"]] == [getattr(one, end) for one in space.choices.values()]


def test_beginnings_in_common_are_those_without_a_range():
    space = read_space("finetune(epochs={1, 2}) | drop_layers(3) | finetune(lr=log(1e-5, 1e-3)) | quantize(8)")
    texts = [str(recipe).replace(" ", "") for recipe in space.beginnings(16)]
    assert len(texts) == 4 and all("lr=5e-05" in text and "quantize" not in text for text in texts)
    assert [text.count("drop_layers") for text in texts] == [0, 0, 1, 1]
    assert not read_space("finetune(lr=log(1e-5, 1e-3)) | quantize(8)").beginnings(16)
    assert len(space.beginnings(1)) == 0


# The search.


def tuning_of(tmp_path, monkeypatch, space=SPACE, trials=4, task=None, **more):
    """A search on a toy task with a tiny model, and its bench."""
    encoder, task = small(), task or toy_task(rows=60)
    bench = studies.Bench(Start(encoder, "tiny", fingerprint(encoder)), {task.name: task})
    monkeypatch.setattr(studies, "open_bench", lambda study, line=None: bench)
    study = studies.Study("tiny", (task.name,), (), (0, 1), tmp_path / "out", device="cpu")
    options = {"storage": f"sqlite:///{tmp_path}/tune.db", **more}
    return search.Tuning(study, space, trials, **options), bench


def test_trials_see_a_part_of_train_and_nothing_of_dev(tmp_path, monkeypatch):
    whole = toy_task(rows=60)
    task = held.search_task(whole)
    train, chosen = task.split("train"), task.split("dev")
    assert set(task.splits) == {"train", "dev"} and len(chosen) == 6 and len(train) == 54
    assert {*train.ids} | {*chosen.ids} == {*whole.split("train").ids} and not {*train.ids} & {*chosen.ids}
    assert not {*train.texts} & {*chosen.texts} and task.fingerprint != whole.fingerprint
    assert held.search_task(whole).split("dev").ids == chosen.ids
    for kind in ("pair", "regress", "tag", "answer"):
        sizes = {name: len(split) for name, split in held.search_task(toy_task(kind)).splits.items()}
        assert sum(sizes.values()) == 48 and sizes["dev"] in (4, 5)

    # A dev split that cannot be read at all is noticed by whoever looks.
    class Secret(Split):
        def __getattribute__(self, name):
            if name in ("texts", "labels") and not allowed:
                raise AssertionError("a trial looked at dev")
            return super().__getattribute__(name)

    allowed = True
    dev = whole.split("dev")
    secret = replace(whole, splits={**whole.splits, "dev": Secret(dev.texts, dev.pairs, dev.labels, dev.ids)})
    tuning, bench = tuning_of(tmp_path, monkeypatch, task=secret, trials=3)
    allowed = False
    assert len(search.search(tuning, bench)) == 3
    with pytest.raises(AssertionError, match="looked at dev"):
        secret.split("dev").texts  # noqa: B018
    allowed = True
    assert all(
        run.status in ("ok", "diverged") for run in search.run_finals(tuning, bench, finals_of(tuning, bench))[1]
    )


def finals_of(tuning, bench):
    return best_of(search.search(tuning, bench))


def test_a_search_repeats_itself_and_goes_on_after_any_trial_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    def run(folder, *counts):
        for trials in counts:
            tuning, bench = tuning_of(tmp_path / folder, monkeypatch, trials=trials)
            records = search.search(tuning, bench)
            assert len(records) == trials
        return [(one.trial, one.recipe, one.score, one.looks) for one in records]

    first = run("one", 12)  # beyond the random ones, so that the model of what came before is used too
    assert run("two", 4, 12) == first  # only what is missing is added
    assert first[0][1] == read_space(SPACE).default().key() and len({recipe for _, recipe, _, _ in first}) == 12
    lines = (tmp_path / "one" / "out" / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["recipe"] for line in lines] == [recipe for _, recipe, _, _ in first]
    assert {json.loads(line)["by"] for line in lines} == {"process 1"}
    # Running once more trains nothing.
    monkeypatch.setattr(trial, "run_recipe", None)
    assert run("two", 12) == first


def test_looks_on_the_way_change_nothing_of_what_is_trained():
    from smallbert.making.run import run_recipe

    recipe, steps = Recipe("finetune(epochs=1, batch=8) | finetune(epochs=2, batch=8, lr=1e-3)"), []
    looked = run_recipe(trial._with_looks(recipe, lambda phase: steps.append(phase.step)), small(), toy_task())
    plain = run_recipe(recipe, small(), toy_task())
    assert steps == list(range(1, 13))  # of the last phase alone
    assert all(a.equal(b) for a, b in zip(looked.encoder.parameters(), plain.encoder.parameters(), strict=True))


def test_a_bad_trial_is_stopped_on_the_way(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, "finetune(lr={1e-3, 1e-9}, epochs=linear(1.5, 2.5), batch=8)", 8)
    scores = iter(range(1000))

    def made_up(self, encoder, say=None, common=False):
        # What a look sees: 90 and a bit for the first six trials, then 10.
        return (90.0 if len(records_of(setup.study)) <= 6 else 10.0) + next(scores) / 1000, 1.0

    setup = search.begin(tuning, bench)
    monkeypatch.setattr(held.Held, "score", made_up)
    records = search.search(tuning, bench)
    assert [one.status for one in records] == ["ok"] * 6 + ["pruned"] * 2
    last = records[-1]
    assert list(last.looks) == [25] and last.score == last.looks[25] and "below the median" in last.why
    assert best_of(records).trial < 6
    again, bench = tuning_of(tmp_path / "all", monkeypatch, tuning.space, 8, prune=False)
    setup = search.begin(again, bench)
    assert [one.status for one in search.search(again, bench)] == ["ok"] * 8


def test_failed_and_diverged_trials_are_written_down(tmp_path, monkeypatch):
    space = "{finetune(epochs=1, lr=1e-3), finetune(lr=1e30, epochs=1, clip=0.0), drop_layers(9) | finetune(epochs=1)}"
    tuning, bench = tuning_of(tmp_path, monkeypatch, space, trials=50)
    records = search.search(tuning, bench)  # each of a few recipes is tried once, and no more
    found = {one.drawn["methods"].split("(")[1][:2]: one for one in records}
    assert len(records) == 3 and found["ep"].status == "ok"
    assert found["lr"].status == "diverged" and found["lr"].score is None
    assert found["9)"].status == "failed" and "has 2 layers" in found["9)"].why
    assert best_of(records) == found["ep"] and all(one.is_done for one in records)


def test_a_search_in_which_everything_fails_is_given_up(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, "drop_layers(9) | finetune(lr=log(1e-5, 1e-2))", trials=50)
    with pytest.raises(RunError, match=r"all of the first 5 trials failed, the last since: drop_layers\(keep=9\)"):
        search.search(tuning, bench)


def test_a_search_in_which_something_succeeds_is_not_given_up():
    records = [record(0, score=80.0), *(record(number, "failed") for number in range(1, 7))]
    search._give_up_if_hopeless(records)
    with pytest.raises(RunError, match="all of the first 6 trials failed"):
        search._give_up_if_hopeless(records[1:])


def test_an_equal_recipe_is_not_trained_twice(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, "finetune(epochs=1, batch=linear(16, 17))", trials=5)
    calls = []
    monkeypatch.setattr(
        trial, "run_recipe", lambda *given, run=trial.run_recipe, **more: (calls.append(1), run(*given, **more))[1]
    )
    records = search.search(tuning, bench)
    assert len(records) == 5 and len(calls) == 2
    twins = [one for one in records if one.why and "the same recipe as trial" in one.why]
    assert len(twins) == 3 and all(one.score == records[int(one.why.split()[-1])].score for one in twins)


def test_what_trials_have_in_common_is_done_once(tmp_path, monkeypatch):
    from smallbert.features import building, store
    from smallbert.making import finished, run

    space = "finetune(epochs=1, batch=8) | pool_layers + train(freeze='backbone', epochs={0.5, 1}, lr=log(1e-4, 1e-2))"
    tuning, bench = tuning_of(tmp_path, monkeypatch, space, trials=4)
    trained, tokenised, loaded, shards, checked = [], [], [], [], []

    def spy(module, name, seen):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: (seen.append(given), real(*given, **more))[1])

    spy(run, "train", trained)
    spy(run, "tokenise", tokenised)
    spy(finished, "load_folder", loaded)
    spy(building, "compute_shard", shards)
    monkeypatch.setattr(
        store.Store, "check", lambda self, number, check=store.Store.check: checked.append(0) or check(self, number)
    )
    records = search.search(tuning, bench)
    assert [one.status for one in records] == ["ok"] * 4
    assert len(trained) == 5 and len(tokenised) == 1 and len(loaded) <= 1  # one beginning, four heads
    assert len(shards) == len(checked) == 2  # of the rows that train, and of those held out
    # Scores from stored states are those of the whole model.
    plain, bench = tuning_of(tmp_path / "plain", monkeypatch, space.replace("lr=log", "store='none', lr=log"), trials=4)
    assert [one.score for one in search.search(plain, bench)] == pytest.approx([one.score for one in records], abs=1e-9)


def test_states_of_a_backbone_that_is_changed_first_are_not_those_of_another(tmp_path, monkeypatch):
    """What changes it may stand in the very phase that then leaves it as it is."""
    pooler = "pool_layers(width=4) + train(freeze='backbone', epochs=1, lr={1e-3, 1e-2})"
    space = f"drop_layers(keep=1, which={{'first', 'last'}}) + {pooler}"
    found = {}
    for store in ("auto", "none"):
        text = space.replace("epochs", f"store='{store}', epochs")
        tuning, bench = tuning_of(tmp_path / store, monkeypatch, text, trials=4, prune=False)
        records = search.search(tuning, bench)
        found[store] = {str(one.drawn): {**one.looks, 100: one.score} for one in records}
    assert len(found["none"]) == 4 and len({str(one) for one in found["none"].values()}) > 1
    assert found["auto"] == {drawn: pytest.approx(looks, abs=1e-3) for drawn, looks in found["none"].items()}


def test_heads_that_read_padding_and_heads_that_do_not_share_a_search(tmp_path, monkeypatch):
    space = "pool_layers(masked={True, False}, width=4) + train(freeze='backbone', epochs={0.5, 1}, lr=1e-3)"
    tuning, bench = tuning_of(tmp_path, monkeypatch, space, trials=4)
    records = search.search(tuning, bench)
    assert [one.status for one in records] == ["ok"] * 4, [one.why for one in records]
    assert {one.drawn["pool_layers.masked"] for one in records} == {"True", "False"}


def test_the_final_runs_share_the_states_of_a_frozen_backbone(tmp_path, monkeypatch):
    from smallbert.features import building

    tuning, bench = tuning_of(
        tmp_path, monkeypatch, "head + train(freeze='backbone', epochs={0.5, 1}, lr=log(1e-3, 1e-1))", trials=2
    )
    records, shards = search.search(tuning, bench), []
    real = building.compute_shard
    monkeypatch.setattr(building, "compute_shard", lambda *given: (shards.append(given), real(*given))[1])
    _, results = search.run_finals(tuning, bench, records[1])
    assert len(results) == 4 and {one.status for one in results} <= {"ok", "diverged"}, "two arms, two seeds"
    assert len(shards) == 1, "of all of train, once"
    assert not (tuning.study.out / COMMON).exists()


HOLD = """
import sys, time
from pathlib import Path
from smallbert.machine.files import shared_folder
with shared_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_others_use_and_what_a_user_has_there_is_not_taken_away(tmp_path, monkeypatch):
    """A process that is done leaves what others still learn from; the last one takes it away, and nothing else."""
    tuning, bench = tuning_of(tmp_path, monkeypatch, "head + train(freeze='backbone', epochs={0.5, 1})", trials=2)
    out = tuning.study.out
    for name in ("states", "beginnings"):
        (out / name).mkdir(parents=True)
    best = search.search(tuning, bench)[0]
    other = subprocess.Popen([sys.executable, "-c", HOLD, out / COMMON], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    _, results = search.run_finals(tuning, bench, best)
    assert list((out / COMMON / "states").iterdir())
    other.kill()
    other.wait()
    assert search.run_finals(tuning, bench, best)[1] == results
    assert not (out / COMMON).exists() and not list(out.glob(f".{COMMON}.*"))
    assert (out / "states").is_dir() and (out / "beginnings").is_dir()


# Storage.


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_a_trial_that_died_is_tried_again_but_not_for_ever(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, trials=3)
    study = search.begin(tuning, bench).study
    died = study.ask()
    gone = subprocess.run([sys.executable, "-c", "import os, platform; print(f'{platform.node()}:{os.getpid()}')"],
                          capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    died.set_user_attr("by", gone)
    records = search.search(tuning, bench)
    assert [one.status for one in records] == ["died", "ok", "ok", "ok"]
    assert sum(one.is_done for one in records) == 3
    assert records[1].recipe == read_space(SPACE).default().key() and records[1].tries == 2  # it was the default

    study.enqueue_trial({}, user_attrs={"tries": 2})
    twice = study.ask()
    twice.set_user_attr("by", gone)
    revive(study)
    assert not study.get_trials(states=(optuna.trial.TrialState.WAITING,)) and records_of(study)[-1].is_done


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_a_dead_trial_is_begun_again_by_one_process_alone(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, trials=2)
    study = search.begin(tuning, bench).study
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    for _ in range(2):  # two processes saw it dead at the same moment
        study.enqueue_trial({}, user_attrs={"again": 0, "tries": 2})
    records = search.search(tuning, bench)
    assert [one.status for one in records] == ["died", "ok", "ok"] and len({one.recipe for one in records[1:]}) == 2


@pytest.mark.filterwarnings("ignore:Heartbeat")
def test_the_last_missing_trial_begun_by_two_processes_is_done_by_one(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, trials=1)
    setup = search.begin(tuning, bench)
    setup.study.ask()  # by the other process
    setup.study.optimize(lambda one: trial.run_trial(setup, one), n_trials=1)
    assert [one.status for one in records_of(setup.study)] == ["running"]


def test_a_search_with_another_teacher_is_another_search(tmp_path, monkeypatch):
    folder = tmp_path / "teacher"
    space = f"distill(teacher={str(folder)!r}) + train(lr=log(1e-4, 1e-2))"
    tuning, bench = tuning_of(tmp_path, monkeypatch, space, name="mine")
    for seed in (0, 1):
        save_folder(run("head", small(), toy_task(rows=60), seed=seed).encoder, folder)
        if not seed:
            search.begin(tuning, bench)
    with pytest.raises(UserError, match="a search called 'mine' with another teacher or text; give another --name"):
        search.begin(tuning, bench)


def test_a_name_stands_for_one_search(tmp_path, monkeypatch):
    tuning, bench = tuning_of(tmp_path, monkeypatch, name="mine")
    search.begin(tuning, bench)
    search.begin(tuning, bench)
    with pytest.raises(UserError, match="a search called 'mine' with another space; give another --name"):
        search.begin(replace(tuning, space="finetune(epochs={1, 2})"), bench)
    for storage, phrase in (("tune.db", "write sqlite"), ("nonsense://x", "cannot be opened")):
        with pytest.raises(UserError, match=phrase):
            search.begin(replace(tuning, storage=storage), bench)
    assert (
        without_password("tune --storage mysql://me:pw@host/x --out o")
        == "tune --storage mysql://me:***@host/x --out o"
    )


def test_processes_that_share_a_search_draw_differently(tmp_path):
    def draw(file):
        study = open_study(f"sqlite:///{tmp_path}/{file}.db", "a", {}, {"x": 0.5})
        values = []
        study.optimize(lambda trial: values.append(trial.suggest_float("x", 0, 1)) or values[0], n_trials=1)
        return values[0]

    values = [draw("shared") for _ in range(3)]  # as three processes would, each beginning anew
    assert values[0] == 0.5 and len(set(values)) == 3 and values == [draw("other") for _ in range(3)]


# The command line.


def command(out, *more):
    space = "finetune(lr=log(1e-3, 1e-1), epochs={0.2, 6}, batch=16)"
    words = ["tune", "--tiny", "--recipe", space, "--device", "cpu", "--out", str(out), "--seeds", "0,1"]
    return [*words, *map(str, more)]


@pytest.mark.slow  # the parts of it are tested one by one
def test_the_command_searches_then_scores_and_goes_on(tmp_path, capsys):
    assert main(command(tmp_path / "out", "--trials", 3)) == 0
    shown = capsys.readouterr().out
    for words in ("finetune.lr", "0.2, 6", "3 trials: 3 went to the end", "tuning gained"):
        assert words in shown
    out = tmp_path / "out"
    result = json.loads((out / "tune.json").read_text())
    assert [one["name"] for one in result["choices"]] == ["finetune.lr", "finetune.epochs"]
    assert result["rows"] == {"train": 180, "held out": 20} and result["trials"]["done"] == 3
    assert {one["arm"] for one in result["final"]} <= {"default", "tuned"} and result["search_seed"] not in result[
        "seeds"
    ]
    cards = load_cards(out, (MACHINERY_CHECK,))
    assert {card["seed"] for card in cards} == {0, 1} and {card["preset"] for card in cards} <= {"default", "tuned"}
    assert (out / "tune.png").stat().st_size > 10_000 and "## How it was done" in (out / "tune.md").read_text()
    assert not (out / COMMON).exists() and not (out / "work").exists()
    assert main(command(out, "--trials", 4, "--json")) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["trials"]["done"] == 4 and "3 of 4 trials are finished already" in said.err
    assert main(["report", str(out)]) == 0


def test_what_cannot_be_asked_for(tmp_path, capsys, monkeypatch):
    for words, phrase in (
        (["--seeds", "0,1000"], "with which trials are trained"),
        (["--seeds", "-1"], "a seed is 0 or more"),
        (["--split", "train"], "write dev or test"),
        (["--recipe", "finetune(seed={1, 2})"], "a seed cannot be searched"),
        (
            ["--recipe", "train(freeze='backbone', store='mine', epochs={1, 2})"],
            "store='mine' holds states of all of train",
        ),
    ):
        assert main(command(tmp_path / "out", *words)) == 2 and phrase in capsys.readouterr().err
    assert main(["tune", "--recipe", SPACE]) == 2 and "needs a MODEL and --task" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith(("optuna", "smallbert.tuning"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(command(tmp_path / "out")) == 2
    assert "tuning needs optuna; run: pip install -e '.[tune]'" in capsys.readouterr().err


def start(out, storage, *more):
    words = command(out, "--storage", f"sqlite:///{storage}", "--name", "shared", "--search-only", *more)
    code = f"import sys; from smallbert.cli import main; sys.exit(main({words!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_two_processes_share_a_search_and_killed_ones_are_gone_on_with(tmp_path):
    storage = tmp_path / "shared.db"
    both = [start(tmp_path / name, storage, "--trials", 400) for name in ("one", "two")]
    study, end = None, time.monotonic() + 240
    while study is None or len({one.by for one in records_of(study) if one.is_done}) < 2:
        assert time.monotonic() < end and all(process.poll() is None for process in both)
        time.sleep(0.1)
        if storage.exists() and study is None:
            with suppress(Exception):  # the tables are being made
                study = optuna.load_study(study_name="shared", storage=f"sqlite:///{storage}")
    for process in both:
        process.send_signal(signal.SIGKILL)
    for process in both:
        process.communicate()
    before = records_of(study)
    done = sum(one.is_done for one in before)
    assert len({one.recipe for one in before if one.is_done}) == done  # no two drew the same
    more = ["--storage", f"sqlite:///{storage}", "--name", "shared", "--search-only", "--trials", done + 2]
    assert main(command(tmp_path / "one", *more)) == 0
    after = records_of(study)
    assert sum(one.is_done for one in after) == done + 2 and not any(one.status == "running" for one in after)
    again = {one.user_attrs.get("again") for one in study.get_trials(deepcopy=False)}
    assert {one.trial for one in after if one.status == "died"} <= again


@pytest.mark.slow  # starts processes, each of which takes seconds to import
def test_several_jobs_do_what_one_would(tmp_path, capsys):
    assert main(command(tmp_path / "out", "--trials", 4, "--jobs", 2, "--search-only")) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and all(line["status"] in ("ok", "pruned") for line in lines)


# The report.


def record(number, status="ok", score=None, **drawn):
    return Record(number, status, score, 1.0, drawn, f"finetune({drawn})", {}, None, 1.0, "here:1")


def test_the_report_says_what_was_gained_and_what_it_seemed_to_be():
    records = [
        record(0, score=80.0, lr=1),
        record(1, score=84.0, lr=2),
        record(2, "pruned", 70.0, lr=3),
        record(3, "failed"),
    ]
    runs = [
        Result("toy", arm, None, seed, "ok", score)
        for arm, scores in (("default", (80.0, 81.0, 82.0)), ("tuned", (81.0, 82.5, 83.0)))
        for seed, score in enumerate(scores)
    ]
    about = {
        "trials": 4,
        "defaults": {"lr": 1},
        "rows": {"train": 90, "held out": 10},
        "metric": "accuracy",
        "split": "dev",
    }
    about |= {"choices": [{"name": "lr"}], "model": "m", "task": "toy", "command": "c", "space": "s", "protocol": ["p"]}
    about |= {"default_recipe": "d", "judged": True}
    result = make_result(about, records, runs)
    assert result["gain"]["value"] == pytest.approx(7 / 6) and result["gain"]["error"] == pytest.approx(
        0.1667, abs=1e-3
    )
    first, second, third = result["sentences"]
    assert "2 went to the end, 1 pruned, 1 failed; the best scores 84.00" in first and "the default 80.00" in first
    assert "tuning gained +1.17 ± 0.17" in second and "chance" not in second and third.endswith("+4.00.")
    assert trials_sheet(result, records).rows == [["1", "84.00 ± 1.00", "2"], ["0", "80.00 ± 1.00", "1"]]
    assert "+1.17" in to_markdown(result, [], None)
    # The first one was killed and drawn again: its score is the default's, and it counts once.
    killed = [record(0, "died", lr=1), *(one._replace(trial=one.trial + 1) for one in records)]
    killed[1] = killed[1]._replace(tries=2)
    again = make_result(about, killed, runs)
    assert again["default"]["trial"] == 1 and again["trials"]["done"] == 4 and "died" not in again["trials"]
    assert "4 trials: 2 went to the end, 1 pruned, 1 failed (1 that died was tried again)" in again["sentences"][0]
    assert ", the default 80.00." in again["sentences"][0] and again["sentences"][1:] == [second, third]
    given_up = make_result(about, [*killed[:1], killed[1]._replace(status="died", score=None), *killed[2:]], [])
    assert given_up["trials"]["died"] == 1 and given_up["trials"]["done"] == 4
    noisy = [run._replace(score=90.0 - 10 * run.seed) if run.arm == "tuned" else run for run in runs]
    assert "no more than chance" in make_result(about, records, noisy)["sentences"][1]


def test_the_report_of_another_search_is_not_replaced_silently(tmp_path):
    about = {"space": "finetune(lr=log(1e-5, 1e-4))", "model": "m", "task": "toy"}
    assert other_search(tmp_path, about) is None
    (tmp_path / "tune.json").write_text(json.dumps({**about, "trials": 4}))
    assert other_search(tmp_path, about) is None
    assert "of another search, 'finetune(lr=log(1e-5, 1e-4))'" in other_search(tmp_path, {**about, "space": "finetune"})
    assert other_search(tmp_path, {**about, "task": "other"})


def test_of_equal_trials_the_first_wins():
    """So the default, which comes first, is left only for something better."""
    assert best_of([record(0, score=84.0), record(1, score=80.0), record(2, score=84.0)]).trial == 0


def test_what_matters_is_told_from_what_does_not():
    draw = random.Random(0)
    records = [
        record(
            n,
            score=80 + 5 * (rate > 0.5) + draw.random(),
            rate=rate,
            colour=draw.choice(("red", "blue")),
            width=draw.random(),
        )
        for n in range(60)
        for rate in [draw.random()]
    ]
    shares = importances(records)
    assert next(iter(shares)) == "rate" and shares["rate"] > 0.7 and shares["colour"] < 0.2 and shares["width"] < 0.2
    assert importances(records[:1]) == {"rate": None, "colour": None, "width": None}
