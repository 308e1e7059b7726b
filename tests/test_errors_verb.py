"""Two models side by side: the numbers of a toy done by hand, every kind of task, and what the verb says and writes."""

import json
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from toys import run, small, toy_task

from smallbert.cli import main
from smallbert.errors import UserError
from smallbert.making.sidebyside import find_errors
from smallbert.making.starting import Start, start_from
from smallbert.measuring import errors
from smallbert.measuring.judged import Answers, _count_tokens
from smallbert.measuring.metrics import score
from smallbert.measuring.statistics import mcnemar, sign_flip, welch
from smallbert.model.encoder import fingerprint
from smallbert.model.folders import load_folder, save_folder
from smallbert.report.errors import load_errors, render, sentences, to_markdown, write_errors
from smallbert.report.errors_plot import draw
from smallbert.report.errors_sheets import sheets
from smallbert.report.markdown import render_overview
from smallbert.tasks import load_task
from smallbert.tasks.task import Split, Task
from smallbert.tiny import make_encoder, make_task

# Eight examples, four of each class. A is right on the first six, B on the first four and the last one.
GOLD = [0, 1, 0, 1, 0, 1, 0, 1]
A = [0, 1, 0, 1, 0, 1, 1, 0]
B = [0, 1, 0, 1, 1, 0, 1, 1]


def toy():
    texts = ["<b>one</b> | two", "[bold]three", *(f"word {number}" for number in range(6))]
    rows = Split(texts, None, GOLD, [f"id{number}" for number in range(8)])
    return Task("toy", "classify", ("no", "yes"), ("accuracy",), 50.0, 32, "", "abc", splits={"dev": rows})


def answers(said, sure=0.8, task=None):
    """A model that gives the same probability to whatever it says, on examples that get longer and longer."""
    task = task or toy()
    rows, classes = task.split("dev"), len(task.labels)
    probabilities = np.where(np.eye(classes, dtype=bool)[said], sure, (1 - sure) / (classes - 1))
    good, right = probabilities[np.arange(len(said)), rows.labels], np.array(said) == rows.labels
    return Answers(list(said), good, right, np.arange(len(said)), score(task, said, rows), probabilities)


def compared(one=A, other=B, **options):
    found = errors.compare_answers(answers(one), answers(other, 0.7), toy(), **options)
    about = [{"name": name, "fingerprint": name, "recipe": None, "whole_recipe": None} for name in ("first", "second")]
    found["models"] = [facts | own for facts, own in zip(about, found["models"], strict=True)]
    return found | {"notes": [], "command": "smallbert errors first second --task toy"}


# The numbers.


def test_a_toy_by_hand():
    found = compared()
    assert found["overlap"] == {
        "both": 4, "only_a": 2, "only_b": 1, "neither": 1, "both_right": 50.0, "agree": 62.5,
    }  # fmt: skip
    assert found["test"]["p"] == 1.0 and found["test"]["sentence"].startswith(
        "A is right on 2 examples where B is wrong, B on 1 where A is wrong, p = 1: no difference"
    )
    one, other = found["models"]
    assert one["confusion"] == [[3, 1], [1, 3]] and other["confusion"] == [[2, 2], [1, 3]]
    yes = other["classes"][1]
    assert (found["positive"], yes["said"], yes["share_said"], yes["share_true"]) == ("yes", 5, 62.5, 50.0)
    assert (yes["recall"], yes["precision"], yes["right_on_others"]) == (75.0, 60.0, 50.0)
    assert yes["f1"] == pytest.approx(200 / 3) and one["scores"]["accuracy"]["value"] == 75.0
    assert one["calibration_error"] == pytest.approx(5.0) and other["calibration_error"] == pytest.approx(7.5)
    assert one["lengths"]["tokens"]["right"] == 2.5 and one["lengths"]["tokens"]["wrong"] == 6.5
    assert [each["id"] for each in found["most_different"]] == ["id4", "id5", "id7"] + [
        f"id{number}" for number in (0, 1, 2, 3, 6)
    ]
    first = found["most_different"][0]
    assert first["true"] == "no" and first["a"] == {"said": "no", "good": 0.8, "right": True}
    assert first["b"] == {"said": "yes", "good": 0.3, "right": False}
    assert json.loads(json.dumps(found, allow_nan=False)) == found and len(found["predictions"]) == 8


def test_different_answers_are_shown_before_equal_ones_that_are_farther_apart():
    apart = np.array(A) != np.array(B)
    sure = np.where(apart, 0.55, 0.95)[:, None]  # beside 0.55: equal answers lie 0.4 apart, different ones 0.1
    found = errors.compare_answers(answers(A, sure), answers(B, 0.55), toy())["most_different"]
    assert [each["id"] for each in found] == [f"id{number}" for number in (4, 5, 7, 0, 1, 2, 3, 6)]


def test_what_never_happens_is_none_and_not_zero():
    rows = errors.class_facts([0, 0], [0, 0], ["a", "b"])
    assert rows[1]["recall"] is None and rows[1]["precision"] is None and rows[1]["f1"] is None
    assert rows[0]["right_on_others"] is None and rows[1]["right_on_others"] == 100.0
    assert errors.length_facts(np.array([3, 4]), np.array([True, True])) == {
        "all": 3.5, "right": 3.5, "wrong": None, "p": None,
    }  # fmt: skip


def test_a_word_that_was_cut_off_is_called_nothing_and_missed():
    assert errors.confusion([0, 1, 1], [0, -1, 1], 2) == [[1, 0], [0, 1]]
    assert errors.class_facts([0, 1, 1], [0, -1, 1], ["a", "b"])[1]["recall"] == 50.0


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (12, 5), (5, 12), (3, 3), (40, 61), (0, 20), (900, 1100)])
def test_mcnemar_is_the_binomial_test(one, other):
    exact = stats.binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(exact, rel=1e-9)


def test_welch_agrees_with_scipy():
    assert welch([1.0, 2.0, 3.0], [4.0, 5.0, 6.5]) >= stats.ttest_ind([1, 2, 3], [4, 5, 6.5], equal_var=False).pvalue
    same_spread = ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])  # whole degrees of freedom: nothing is rounded
    assert welch(*same_spread) == pytest.approx(stats.ttest_ind(*same_spread, equal_var=False).pvalue)
    draw = np.random.default_rng(0)
    many = [draw.normal(mean, sd, n).tolist() for mean, sd, n in ((40, 12, 700), (41, 20, 300))]
    assert welch(*many) == pytest.approx(stats.ttest_ind(*many, equal_var=False).pvalue, rel=1e-3)
    assert welch([1.0], [2.0, 3.0]) is None and welch([2.0, 2.0], [2.0, 2.0]) is None


def test_flips_of_many_pairs_agree_with_the_exact_test_and_with_the_normal_one():
    draw = np.random.default_rng(1)
    few, many = draw.normal(0.3, 1, 12), draw.normal(0.05, 1, 1500)
    assert errors.flip_test(few) == sign_flip(few.tolist())
    normal = 2 * NormalDist().cdf(-abs(many.sum()) / math.sqrt((many**2).sum()))
    assert errors.flip_test(many) == pytest.approx(normal, abs=0.01)
    assert errors.flip_test(np.zeros(50)) == 1.0


def test_which_class_is_positive():
    assert errors.positive_class(("entailment", "not_entailment")) == 0
    assert errors.positive_class(("not_duplicate", "duplicate")) == 1
    assert errors.positive_class(("spam", "ham"), "Spam") == 0
    with pytest.raises(UserError, match=r"not a class of this task; Did you mean 'spam'\?"):
        errors.positive_class(("spam", "ham"), "spim")
    assert compared(positive="no")["positive"] == "no"


def test_a_clear_difference_is_called_one():
    found = compared(GOLD, [1 - label for label in GOLD])
    assert found["test"]["p"] == 2 / 2**8
    assert "A is better by more than chance" in found["test"]["sentence"]


# What is shown.


def screen(found) -> str:
    console = Console(width=140, record=True)
    with console.capture() as captured:
        for thing in render(found):
            console.print(thing, soft_wrap=isinstance(thing, str), markup=False, highlight=False)
    return captured.get()


def test_the_smaller_p_the_more_is_said():
    found = compared()
    found["models"][0]["lengths"]["tokens"] = {"all": 20.0, "right": 10.0, "wrong": 30.0, "p": 0.0}
    found["models"][1]["lengths"]["tokens"]["p"] = None
    (told,) = [sentence for sentence in sentences(found) if "tokens against" in sentence or "Neither" in sentence]
    assert (
        told
        == "A's wrong examples are longer: 30.0 tokens against 10.0 of the right ones (Welch's t test, p < 0.0001)."
    )
    lengths = np.concatenate([np.arange(400) % 9, 30 + np.arange(400) % 5])
    assert 0 <= errors.length_facts(lengths, np.arange(800) < 400)["p"] < 1e-99


def test_screen_markdown_and_picture_say_the_same(tmp_path):
    found = compared()
    shown, page = screen(found), to_markdown(found)
    for text in ("75.0", "62.5", "4 (50.0 %)", "2 (25.0 %)", "right on no, %"):
        assert text in shown and text in page
    assert all(sentence in shown for sentence in sentences(found))
    assert "[bold]three" in shown and "<b>one</b> | two" in shown
    assert "&lt;b&gt;one&lt;/b&gt; \\| two" in page and "smallbert errors first" in page
    written = write_errors(found, tmp_path / "new")
    assert [path.name for path in written] == ["errors.json", "errors.md", "errors.png"]
    assert load_errors(tmp_path) == [found]
    labels = [text.get_text() for text in draw(found).axes[0].get_legend().get_texts()]
    assert labels == ["both right 4", "neither 1", "only A 2", "only B 1"]


def test_many_classes_are_told_by_their_commonest_mistakes():
    labels = tuple(f"c{number}" for number in range(40))
    gold = [number % 40 for number in range(160)]
    rows = Split(["x"] * 160, None, gold, ["0"] * 160)
    task = Task("many", "classify", labels, ("accuracy",), 2.5, 32, "", "abc", splits={"dev": rows})
    said = [3 if label in (1, 2) else label for label in gold]
    one, other = (answers(each, task=task) for each in (gold, said))
    found = errors.compare_answers(one, other, task)
    assert found["models"][1]["confusion"] is None and found["positive"] is None
    assert found["models"][1]["confused"] == [["c1", "c3", 4], ["c2", "c3", 4]]
    tables = {sheet.title: sheet for sheet in sheets(found)}
    assert tables["The most frequent mistakes"].rows == [["c1", "c3", "-", "4"], ["c2", "c3", "-", "4"]]
    assert tables["Class by class"].rows[0][0] == "c1" and "12 of 40" in tables["Class by class"].notes[0]


def test_tokens_of_long_contexts_are_counted_once():
    from smallbert.texts.data import tokenise
    from smallbert.tiny import make_tokenizer

    tokenizer, context = make_tokenizer(), "the film was good " * 30
    rows = Split(["this was"], [context], [{"text": ["good"], "answer_start": [13]}], ["0"])
    stream = tokenise(tokenizer, rows, "answer", 40)
    assert len(stream) > 3  # windows
    assert _count_tokens(stream, rows).tolist() == [2 + 120 + 3]


# Models.

KINDS = ("pair", "regress", "tag", "answer")


@pytest.fixture(scope="module")
def trained():
    """trained(kind) gives two tiny models of a kind: one that has learned something, one that has learned little."""
    made = {}

    def give(kind):
        if kind not in made:
            task = toy_task(kind)
            recipes = ("finetune(epochs=6, lr=5e-3, batch=8)", "finetune(epochs=1, lr=1e-3, batch=16)")
            encoders = [run(recipe, small(), task).encoder for recipe in recipes]
            made[kind] = [Start(each, name, fingerprint(each)) for name, each in zip("pq", encoders, strict=True)]
        return made[kind]

    return give


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task(kind, trained, tmp_path):
    from smallbert.measuring.evaluate import evaluate
    from smallbert.report import write_report

    task = toy_task(kind)
    found = find_errors(*trained(kind), task, examples=4, device="cpu", command="smallbert errors p q")
    rows = task.split("dev")
    assert found["examples"] == len(rows) == len(found["predictions"])
    for start, model in zip(trained(kind), found["models"], strict=True):
        assert model["scores"] == evaluate(start.encoder, task)["scores"]
    assert 0 < len(found["most_different"]) <= 4
    shown = found["most_different"]
    order = [(each["a"]["said"] != each["b"]["said"], abs(each["a"]["good"] - each["b"]["good"])) for each in shown]
    assert order == sorted(order, reverse=True)
    write_errors(found, tmp_path)
    assert screen(found) and draw(found).axes
    page = write_report([], tmp_path / "page", "Two models", errors=load_errors(tmp_path)).read_text()
    assert "p and q on toy" in page and "<svg" in page
    right = [each["a_right"] for each in found["predictions"]]
    if kind == "regress":
        off = [abs(each["a"] - each["true"]) for each in found["predictions"]]
        assert found["models"][0]["absolute_error"] == pytest.approx(np.mean(off))
        nearer = found["overlap"]["a_nearer"] + found["overlap"]["b_nearer"] + found["overlap"]["equal"]
        assert nearer == len(rows) and found["test"]["name"] == "paired permutation test"
    else:
        both = [each["a_right"] and each["b_right"] for each in found["predictions"]]
        assert (sum(right), sum(both)) == (found["models"][0]["right"], found["overlap"]["both"])
    if kind == "answer":
        assert found["models"][0]["scores"]["em"]["value"] == pytest.approx(100 * np.mean(right))
    if kind == "tag":
        whole = [each["a"] == each["true"] for each in found["predictions"]]
        assert right == whole and sum(map(sum, found["models"][0]["confusion"])) == sum(map(len, rows.labels))
    if kind == "pair":
        assert [row["label"] for row in found["models"][0]["classes"]] == list(task.labels)
        assert sum(row["share_said"] for row in found["models"][0]["classes"]) == pytest.approx(100)


def test_unanswerable_questions_have_rows_of_their_own(trained):
    task = toy_task("answer")
    labels = [
        {"text": [], "answer_start": []} if row % 3 == 0 else label
        for row, label in enumerate(task.split("dev").labels)
    ]
    task = replace(task, unanswerable=True, splits={"dev": replace(task.split("dev"), labels=labels)})
    found = find_errors(*trained("answer"), task, device="cpu")
    assert found["models"][0]["unanswerable"] == pytest.approx(100 * 8 / 24)
    said = [each["a"] for each in found["predictions"]]
    assert found["models"][0]["silent"] == pytest.approx(100 * said.count("") / 24)
    assert "predicted no answer, % (33.3 have no answer)" in screen(found)


def test_a_model_against_itself(trained):
    one = trained("pair")[0]
    found = find_errors(one, one, toy_task("pair"), device="cpu")
    assert found["test"]["p"] == 1.0 and found["most_different"] == [] and found["overlap"]["agree"] == 100.0
    assert found["overlap"]["only_a"] == found["overlap"]["only_b"] == 0
    assert "A and B are the same model" in found["notes"] and "right on the same examples" in sentences(found)[0]


def test_classes_in_another_order_are_brought_into_the_tasks(trained):
    one = trained("pair")[0]
    turned = one.encoder.copy()
    order = [2, 0, 1]
    with torch.no_grad():
        turned.head.out.weight.copy_(turned.head.out.weight[order])
        turned.head.out.bias.copy_(turned.head.out.bias[order])
    turned.head.labels = [one.encoder.head.labels[place] for place in order]
    found = find_errors(one, Start(turned, "turned", "x"), toy_task("pair"), device="cpu")
    assert found["overlap"]["agree"] == 100.0 and found["notes"] == []
    turned.head.labels = ["1", "2", "3"]
    found = find_errors(one, Start(turned, "turned", "x"), toy_task("pair"), device="cpu")
    assert found["notes"] == ["B's classes 1, 2, 3 are read as bad, good, none"]
    turned.head.labels = ["x", "y", "z"]
    with pytest.raises(UserError, match=r"B, turned: .* classes named x, y, z where toy pair has bad, good, none"):
        find_errors(one, Start(turned, "turned", "x"), toy_task("pair"), device="cpu")


def test_other_tokenizers_are_told(trained):
    one = trained("pair")[0]
    other = one.encoder.copy()
    other.tokenizer = make_encoder("bert").tokenizer
    other.tokenizer.backend_tokenizer.normalizer = None
    found = find_errors(one, Start(other, "other", "x"), toy_task("pair"), device="cpu")
    assert "tokenise differently" in found["notes"][0]


def test_a_diverged_model_is_refused(trained):
    one = trained("pair")[0]
    broken = one.encoder.copy()
    with torch.no_grad():
        broken.head.out.bias.fill_(float("nan"))
    with pytest.raises(UserError, match=r"^B, broken: its outputs are not finite numbers"):
        find_errors(one, Start(broken, "broken", "x"), toy_task("pair"), device="cpu")


# The verb.


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, two trained models, one without a head and one for numbers."""
    folder = tmp_path_factory.mktemp("errors")
    task = make_task()
    (folder / "reviews").mkdir()
    for name in ("train", "dev"):
        rows = task.split(name)
        lines = [f"{text},{task.labels[label]}" for text, label in zip(rows.texts, rows.labels, strict=True)]
        (folder / "reviews" / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    save_folder(make_encoder("bert"), folder / "tiny")
    for name, epochs, code in (("good", "8", 0), ("poor", "0.5", 1)):  # one learns, one does not and is told so
        words = ["finetune", folder / "tiny", "--task", folder / "reviews", "--epochs", epochs, "--lr", "5e-3"]
        assert main([str(word) for word in (*words, "--batch", "16", "--out", folder / name)]) == code
    save_folder(run("finetune(epochs=1)", small(), toy_task("regress")).encoder, folder / "numbers")
    return folder


@pytest.fixture
def call(capsys, place):
    def run(*words):
        capsys.readouterr()
        code = main(["errors", *(str(word) for word in words), "--task", str(place / "reviews"), "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


def test_the_verb(call, place, capsys):
    out = place / "found"
    code, shown, _ = call(place / "good", place / "poor", "--out", out, "--examples", 2)
    assert code == 0 and "A: good" in shown and "B: poor" in shown and str(out / "errors.png") in shown
    found = json.loads((out / "errors.json").read_text())
    assert list(found)[:3] == ["errors", "task", "note"] and len(found["most_different"]) == 2
    assert [model["name"] for model in found["models"]] == ["good", "poor"]
    card = json.loads((place / "good" / "card.json").read_text())
    assert found["models"][0]["scores"]["accuracy"] == pytest.approx(card["scores"]["accuracy"], rel=1e-5)
    assert found["models"][0]["whole_recipe"] == card["recipe"]
    assert found["command"].startswith("smallbert errors") and "the training of B diverged" in found["notes"][0]
    assert (out / "errors.png").read_bytes()[:4] == b"\x89PNG" and "![" in (out / "errors.md").read_text()

    assert main(["report", str(place)]) == 0
    page = (place / "report" / "index.html").read_text()
    assert "good and poor on reviews" in page and found["test"]["sentence"].split(",")[0] in page
    assert main(["report", str(out), "--out", str(place / "alone")]) == 0
    assert "comparison of two models" in capsys.readouterr().out and not (place / "alone" / "cards.json").exists()
    topics = place / "topics"
    (topics / "reviews").mkdir(parents=True)
    write_errors(found, topics / "reviews" / "pair")
    overview = render_overview(topics)
    assert found["test"]["sentence"] in overview and "reviews/pair/errors.md" in overview


def test_json_alone_on_stdout_and_nothing_written_unasked(call, place):
    before = sorted(place.iterdir())
    code, shown, _ = call(place / "good", place / "poor", "--json", "--examples", 0)
    assert code == 0 and json.loads(shown)["most_different"] == [] and sorted(place.iterdir()) == before


def test_models_of_one_name_are_told_apart(call, place):
    for name in ("good", "poor"):
        save_folder(load_folder(place / name), place / f"{name}-run" / "model")
    _, shown, _ = call(place / "good-run" / "model", place / "poor-run" / "model", "--json")
    assert [model["name"] for model in json.loads(shown)["models"]] == ["good-run/model", "poor-run/model"]


def test_a_head_of_other_classes_is_refused_with_their_names(trained):
    two = replace(toy_task("pair"), labels=("bad", "good"))
    with pytest.raises(UserError, match="its head is for classify bad, good, none; fine-tune"):
        find_errors(*trained("pair"), two, device="cpu")


def test_the_verb_has_help_and_is_listed(capsys):
    assert main(["errors", "--help"]) == 0 and "--json" in capsys.readouterr().out
    assert main(["--help"]) == 0 and "where two models differ" in " ".join(capsys.readouterr().out.split())


def test_a_model_made_for_something_else_is_told(place):
    other = replace(make_task(), name="elsewhere")
    found = find_errors(start_from(str(place / "good")), start_from(str(place / "good")), other, device="cpu")
    assert "A was made for reviews, not for elsewhere" in found["notes"]
    good, same = start_from(str(place / "good")), load_task(str(place / "reviews"))
    told = "A was made with texts cut at the usual length, and is run here with texts cut at 8 tokens"
    assert told in find_errors(good, good, same, length=8, device="cpu")["notes"]
    assert not any("was made" in note for note in find_errors(good, good, same, device="cpu")["notes"])


def test_a_pooler_that_reads_fewer_tokens_than_there_are_is_told():
    task = toy_task("classify", 8)
    starts = [
        Start(run(f"pool_layers(length={length})", small(layers=1), task).encoder, str(length), "")
        for length in (4, 64)
    ]
    notes = find_errors(*starts, task, device="cpu")["notes"]
    assert [note for note in notes if "reads only the first" in note] == [
        "A: the pooler reads only the first 4 tokens of a text, and 3 of 4 are longer"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("good", "tiny"), "B, tiny: this model cannot be scored on reviews (classify): it has no task head"),
        (("numbers", "good"), "A, numbers: this model cannot be scored on reviews (classify): its head is for regress"),
        (("good", "nowhere"), "nowhere"),
        (("good", "poor", "--split", "test"), "has no split 'test'"),
        (("good", "poor", "--positive", "goood"), "Did you mean 'good'?"),
        (("good", "poor", "--examples", "-1"), "--examples was given -1"),
        (("good", "poor", "--out", __file__), "test_errors_verb.py is a file; give another folder"),
        (("good", "poor", "--length", "3"), "texts cannot be truncated to 3 tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(call, place, words, said):
    one, other, *options = words
    code, out, error = call(place / one, place / other, *options)
    assert (code, out) == (2, "") and error.splitlines()[-1].startswith("error: ") and said in error
    assert error.count("\n") - error.count("guessed by name") == 1 and "Traceback" not in error
