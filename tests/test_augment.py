"""Texts without labels and texts made of others: what may change, what is learned from them, what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_align import other_words
from torch.nn import functional
from toys import accuracy, check_refused, is_same_state, pairs, phase_of, run, small, toy_task

from smallbert.errors import UserError
from smallbert.machine.files import grow_file
from smallbert.machine.processes import processes
from smallbert.making.estimate import look_ahead
from smallbert.making.run import Setting
from smallbert.model.folders import save_folder
from smallbert.model.heads import UNKNOWN
from smallbert.model.words import need_word_head, put_word_head
from smallbert.recipes.recipe import Recipe
from smallbert.report.traces import draw_watch
from smallbert.tasks.task import Split
from smallbert.texts.augmenting import STOP, Guesser, changes, copies_of, may_change, put_together, taken_apart
from smallbert.texts.batches import Layout, make_batch
from smallbert.texts.data import STUDENT, tokenise
from smallbert.tiny import WORDS, make_tokenizer
from smallbert.training.loop import _Plan
from smallbert.training.teachers import view_of

SHORT = "train(epochs=1, batch=8, lr=0.003, dropout=0.0)"
KINDS = ("classify", "pair", "regress", "tag", "answer")


def partly(task, every=2):
    """A task with the label of every second row hidden."""
    rows = task.split("train")
    labels = [None if row % every else label for row, label in enumerate(rows.labels)]
    return replace(task, splits={**task.splits, "train": Split(rows.texts, rows.pairs, labels, rows.ids)})


def with_words(encoder=None):
    """An encoder with a masked-LM head."""
    encoder = (encoder or small()).copy()
    put_word_head(encoder)
    return encoder


def all_rows_of(recipe, task, encoder=None, **options):
    """All rows that become tokens while a recipe trains, in their order."""
    seen = []

    def look(tokenizer, rows, *rest):
        seen.append(rows)
        return tokenise(tokenizer, rows, *rest)

    with patch("smallbert.making.run.tokenise", look), patch("smallbert.making.run.train"):
        run(recipe, encoder or small(), task, judge=False, **options)
    return seen


def rows_of(recipe, task, encoder=None, **options):
    """The training rows that a recipe's first phase has."""
    return all_rows_of(recipe, task, encoder, **options)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_without_labels_add_nothing_to_the_labels_loss(kind, packed):
    task, encoder = toy_task(kind, 12), run("head", small(), toy_task(kind, 12)).encoder
    phase = phase_of(SHORT, encoder, task)
    phase.encoder.eval()
    layout = Layout(packed, 64, grain=32)
    hidden, whole = (tokenise(encoder.tokenizer, t.split("train"), task.kind, 64) for t in (partly(task), task))
    assert hidden.is_partly_labelled and not whole.is_partly_labelled
    with torch.no_grad():
        mixed = _Plan(hidden, layout, 12, 0, processes()).batches(0, torch.device("cpu"))
        even = np.flatnonzero(_is_even_row(hidden))
        alone = make_batch(whole, even, layout)
        count = torch.tensor(float(whole.units(even)))
        assert mixed[STUDENT].labelled == count < mixed[STUDENT].count
        expected = phase.loss({STUDENT: alone.with_tensors({"count": count})})
        torch.testing.assert_close(phase.loss(mixed), expected, atol=1e-6, rtol=1e-5)


def _is_even_row(stream):
    if stream.kind == "tag":
        tokens = stream.views[STUDENT]
        return [not (stream.labels[tokens.places(np.array([row]))] == UNKNOWN).any() for row in range(len(stream))]
    if stream.kind == "answer":
        return stream.labels[:, 0] != UNKNOWN
    return ~np.isnan(stream.labels) if stream.kind == "regress" else stream.labels != UNKNOWN


def test_no_label_gives_no_gradient_either():
    task = toy_task("regress", 12)
    nothing = replace(task, splits={**task.splits, "train": partly(task, 13).split("train").take(range(1, 12))})
    encoder = run("head", small(), task).encoder
    phase = phase_of(SHORT, encoder, nothing)
    assert np.isnan(phase.stream.labels).all()
    loss = phase.loss(_Plan(phase.stream, Layout(False, 64), 4, 0, processes()).batches(0, torch.device("cpu")))
    loss.backward()
    gradients = [parameter.grad for parameter in phase.encoder.parameters() if parameter.grad is not None]
    assert loss == 0 and gradients and all(bool((gradient == 0).all()) for gradient in gradients)


@pytest.mark.parametrize("kind", ["classify", "regress", "tag"])
def test_a_teacher_teaches_rows_without_labels(kind):
    """alpha * (over all rows) + (1 - alpha) * (over labelled rows), each a mean of its own."""
    task = toy_task(kind, 12)
    teacher = run("finetune(epochs=4, batch=8, lr=0.003)", small(), task, judge=False).encoder
    student = run("head", small(seed=3), task).encoder
    recipe = f"mark('me') | distill(teacher='me', alpha=0.5, temperature=1.0) + {SHORT}"
    phase = phase_of(recipe, teacher, partly(task))
    phase.encoder.load_state_dict(student.state_dict())
    phase.encoder.eval()
    batches = _Plan(phase.stream, Layout(False, 64), 12, 0, processes()).batches(0, torch.device("cpu"))
    batch = batches[STUDENT]
    with torch.no_grad():
        ours, theirs = student(batch), teacher(batch)
        if kind == "regress":
            known = ~batch.labels.isnan()
            soft, hard = (ours - theirs).pow(2).mean(), (ours.squeeze(-1) - batch.labels)[known].pow(2).mean()
        else:
            ours, theirs, labels = ours.view(-1, ours.shape[-1]), theirs.view(-1, ours.shape[-1]), batch.labels.view(-1)
            units = labels > -100
            assert (labels == UNKNOWN).any()
            each = functional.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="none").sum(-1)
            soft, hard = each[units].mean(), functional.cross_entropy(ours[labels >= 0], labels[labels >= 0])
        torch.testing.assert_close(phase.loss(batches), 0.5 * soft + 0.5 * hard, atol=1e-6, rtol=1e-5)


def test_watch_looks_at_texts_whose_label_is_known(tmp_path):
    task = toy_task("classify", 24)
    (tmp_path / "more.txt").write_text("\n".join(f"the film was warm {word}" for word in "abcdefghijkl" * 6))
    tuned = run("finetune(epochs=1, batch=8)", small(), task, judge=False).encoder
    found = {}
    for name, more in {
        "none": "",
        "more": f"unlabelled({str(tmp_path / 'more.txt')!r}) + ",
        "all": "unlabelled + ",
    }.items():
        recipe = f"{more}distill(alpha=1.0) + watch(1, 24) + train(epochs=1, batch=96, lr=1e-9)"
        (found[name],) = run(recipe, tuned, task, judge=False).traces["watch"]
    none, some, all_unknown = (found[name]["value"] for name in ("none", "more", "all"))
    assert none["accuracy"] is not None and none["gradients"][-1] > 0
    for what in ("accuracy", "loss", "gradients", "spread", "largest"):
        assert some[what] == pytest.approx(none[what], rel=1e-3), what
    assert all_unknown["loss"] is None and all_unknown["accuracy"] is None and set(all_unknown["gradients"]) == {None}
    assert all_unknown["largest"] == none["largest"]
    assert draw_watch([found["all"]], "nothing is known").axes


def test_unlabelled_brings_texts(tmp_path):
    single, pair = toy_task("classify", 24), toy_task("pair", 24)
    (tmp_path / "single.txt").write_text("\ufeffthe film was warm\n\nthe plot was flat\r\n")
    (tmp_path / "pair.txt").write_text("the film\tit was warm\nthe plot\tso flat\n")
    first = f"finetune(epochs=1, batch=8) | unlabelled({str(tmp_path / 'single.txt')!r}) + distill + {SHORT}"
    tuned = run("finetune(epochs=1, batch=8)", small(), single, judge=False).encoder
    more = rows_of(first.split(" | ")[1], single, tuned)
    assert more.texts[-2:] == ["the film was warm", "the plot was flat"] and more.labels[-2:] == [None, None]
    assert more.labels[:24] == single.split("train").labels
    own = rows_of(f"unlabelled + distill + {SHORT}", single, tuned)
    assert own.labels == [None] * 24 and own.texts == single.split("train").texts
    only = rows_of(f"unlabelled({str(tmp_path / 'single.txt')!r}, own='left out') + distill + {SHORT}", single, tuned)
    assert len(only) == 2
    paired = run("finetune(epochs=1, batch=8)", small(), pair, judge=False).encoder
    two = rows_of(f"unlabelled({str(tmp_path / 'pair.txt')!r}) + distill + {SHORT}", pair, paired)
    assert two.pairs[-2:] == ["it was warm", "so flat"] and len(two) == 26
    for recipe, task, words in (
        (f"unlabelled({str(tmp_path / 'pair.txt')!r}) + distill", single, "one text a row"),
        (f"unlabelled({str(tmp_path / 'single.txt')!r}) + distill", pair, "two texts a row"),
        (f"unlabelled + {SHORT}", single, "only a teacher"),
        (f"unlabelled + share_projections + {SHORT}", single, "only a teacher"),  # it looks at weights, not at texts
        ("unlabelled(own='left out') + distill", single, "no text is given"),
        ("unlabelled(own='labelled') + distill", single, "no text is given"),
    ):
        with pytest.raises(UserError, match=words):
            run(recipe, tuned if task is single else paired, task)
    late = Recipe(f"finetune | unlabelled({str(tmp_path / 'pair.txt')!r}) + distill")
    assert "one text a row" in str(look_ahead([late], small(), single)[late].refused)  # before anything is trained


def test_a_teacher_with_other_tokens_reads_the_same_rows(tmp_path):
    """The teacher's view is of the rows of the phase, not of the task alone."""
    from tokenizers import normalizers

    task = toy_task("classify", 24)
    teacher = run("finetune(epochs=1, batch=8)", small(), task, judge=False).encoder
    teacher.tokenizer = make_tokenizer()
    teacher.tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFD()])
    save_folder(teacher, tmp_path / "teacher")
    (tmp_path / "more.txt").write_text("the film was warm\n")
    recipe = f"unlabelled({str(tmp_path / 'more.txt')!r}) + distill(teacher={str(tmp_path / 'teacher')!r}) + {SHORT}"
    phase = phase_of(recipe, small(), task)
    assert len(phase.stream.views[view_of(str(tmp_path / "teacher"))]) == len(phase.stream) == 25


def test_a_share_beside_shares_is_refused():
    check_refused(
        "augment(ways={'mask': 0.1}, share=0.5) + distill", small(), toy_task("classify", 24), "leave out share"
    )


def test_words_are_taken_apart_and_put_together():
    assert taken_apart("A fine film, isn't it?") == [
        "A",
        " ",
        "fine",
        " ",
        "film",
        ",",
        " ",
        "isn",
        "'",
        "t",
        " ",
        "it",
        "?",
    ]
    assert put_together(taken_apart("a  fine film"), "x") == "a fine film"
    assert [taken_apart("the fine 3 Films")[place] for place in may_change(taken_apart("the fine 3 Films"))] == [
        "fine",
        "Films",
    ]


@lru_cache
def long_task(kind):
    """A task of more than one chunk, with words that may change in each text, and an encoder for it."""
    task = toy_task(kind, 70)
    if kind == "answer":
        rows = task.split("train")
        texts = [f"warm {word} seems moving" for word in (WORDS * 2)[:70]]
        task = replace(task, splits={**task.splits, "train": Split(texts, rows.pairs, rows.labels, rows.ids)})
    return task, with_words(run("head", small(), task, judge=False).encoder)


WAYS = ["masked", "nearest", "mask", "delete", "grams", ["mask", "grams"], {"mask": 0.2, "delete": 0.3}]


@pytest.mark.parametrize(("kind", "ways"), pairs(["classify", "pair", "tag", "answer"], WAYS, every=3))
def test_copies_change_only_what_they_may(kind, ways):
    task, base = long_task(kind)
    share = "" if isinstance(ways, dict) else ", share=0.5"
    recipe = f"mark('t') | augment(copies=4, ways={ways!r}{share}) + distill('t') + {SHORT}"
    rows, before = rows_of(recipe, task, base), task.split("train")
    again = rows_of(recipe, task, base)
    assert (rows.texts, rows.pairs) == (again.texts, again.pairs)  # the same again
    assert rows.take(range(70)) == before and len(rows) > 110 and set(rows.labels[70:]) == {None}
    other = rows_of(recipe.replace("copies=4", "copies=4, seed=1"), task, base)
    assert other.texts != rows.texts or other.pairs != rows.pairs
    sides = {0: 0, 1: 0}
    for place in range(70, len(rows)):
        source = int(rows.ids[place].split(" copy ")[0])
        old = (before.texts[source], before.pairs and before.pairs[source])
        new = (rows.texts[place], rows.pairs and rows.pairs[place])
        side = int(old[0] == new[0])
        assert old[side] != new[side] and old[1 - side] == new[1 - side]  # one side, the other as it was
        sides[side] += 1
        check_change(old[side], new[side], ways)
    assert (sides[1] > 0) == (kind == "pair")
    ids = rows.ids[70:]
    assert len(set(ids)) == len(ids) and max(int(one.split()[-1]) for one in ids) <= 3


def check_change(old, new, ways):
    before, after = (list(text) if isinstance(text, list) else text.split() for text in (old, new))
    ways = {ways} if isinstance(ways, str) else set(ways)
    if ways <= {"masked", "nearest", "mask"}:
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            if one != other:
                assert one not in STOP and (
                    other == "[MASK]" if ways == {"mask"} else other in WORDS or other[:4] == "word"
                )
    else:
        rest = iter(before)
        assert all(any(word in (one, "[MASK]") for one in rest) for word in after) and after


def test_guesses_are_the_models_own():
    encoder = with_words(small())
    guesser = Guesser(encoder.eval())
    text = "the film was warm"
    found = guesser.guesses([text])[0]
    assert len(found) == 2 and all(
        len(one) == 15 and word not in one for one, word in zip(found, ("film", "warm"), strict=True)
    )
    tokenizer = encoder.tokenizer
    ids = tokenizer("the [MASK] was warm", text, return_token_type_ids=True)
    from smallbert.model.batch import Batch

    row = torch.tensor([ids["input_ids"]])
    place = torch.arange(row.shape[1])[None]
    spot = (row[0] == 4).nonzero()[0]
    batch = Batch(row, torch.tensor([ids["token_type_ids"]]), place, size=1, longest=row.shape[1], places=spot)
    with torch.no_grad():
        order = encoder(batch, "words")[0].argsort(descending=True).tolist()
    names = [tokenizer.decode([number]) for number in order]
    assert found[0] == [name for name in names if name.isalpha() and name != "film"][:15]
    table = functional.normalize(encoder.backbone.embeddings.word_embeddings.weight.detach(), dim=-1)
    film = tokenizer.convert_tokens_to_ids("film")
    near = [tokenizer.decode([number]) for number in (table @ table[film]).argsort(descending=True).tolist()]
    assert guesser.nearest(["film"])["film"] == [name for name in near if name.isalpha() and name != "film"][:15]


def test_a_word_of_several_pieces_is_not_asked_for_but_the_nearest_are_taken():
    """Even where its first piece is a word too: a masked LM would guess at one piece and not at the word."""
    encoder = small()
    encoder.tokenizer = other_words()
    guesser = Guesser(with_words(encoder).eval())
    ((film, letter),) = guesser.guesses(["film x"])
    assert guesser.names == list("abcdefghijklmnopqrstuvwxyz")  # so both begin with a word
    near = guesser.nearest(["film", "x"])
    assert film == near["film"] and letter != near["x"]


def test_a_text_that_has_the_mask_token_itself_is_not_asked_about():
    """There would be several places to guess at; the guesses for other texts stay theirs."""
    guesser = Guesser(with_words(small()).eval())
    text = "the film was warm"
    marked, other = guesser.guesses(["the [MASK] film", text])
    assert marked[1] == guesser.nearest(["film"])["film"]
    assert [other] == guesser.guesses([text]) and other[0] != marked[1]


def test_each_row_draws_by_its_own_number():
    """Not by its place in the chunk that is worked on at a time."""
    task = toy_task("classify", 2)
    text = "warm film dull story bright music flat scene cold plot"
    same = Split([text] * 130, None, [0] * 130, [str(row) for row in range(130)])
    recipe = f"augment(copies=1, ways='delete', labels='kept') + {SHORT}"
    rows = rows_of(recipe, replace(task, splits={**task.splits, "train": same}))
    made = dict(zip(rows.ids[130:], rows.texts[130:], strict=True))
    assert len(made) == 130
    assert sum(made[f"{row} copy 0"] == made[f"{row + 64} copy 0"] for row in range(66)) < 6


def test_grams_are_one_to_five_words_in_a_row():
    text, draw = " ".join(f"word{number}" for number in range(12)), np.random.default_rng(0)
    found = [copies_of(text, [], changes({"grams": 1.0}, None), 1, draw)[0] for _ in range(300)]
    assert {len(gram.split()) for gram in found} == {1, 2, 3, 4, 5} and all(gram in text for gram in found)


def test_labels_are_kept_when_asked():
    task = toy_task("classify", 24)
    rows = rows_of(f"augment(copies=3, ways='delete', labels='kept') + {SHORT}", task)
    truth = dict(zip(task.split("train").ids, task.split("train").labels, strict=True))
    assert len(rows) > 30 and all(
        truth[one.split()[0]] == label for one, label in zip(rows.ids, rows.labels, strict=True)
    )
    for recipe, words in {
        f"augment(ways='delete') + {SHORT}": "only a teacher",
        f"augment(labels='kept') + {SHORT}": "no masked-LM head",
        f"augment(ways='better') + {SHORT}": "no way 'better'",
        f"augment(share=0.0) + {SHORT}": "above 0",
        f"augment(ways=['masked', 'nearest']) + {SHORT}": "take one",
        f"augment(ways='delete', model='x', labels='kept') + {SHORT}": "leave out model='x'",
    }.items():
        with pytest.raises(UserError, match=words):
            run(recipe, small(), task)
    with pytest.raises(UserError, match="labels='kept' does not fit"):
        run(f"augment(ways='grams', labels='kept') + {SHORT}", small(), toy_task("tag", 24))


def test_copies_are_made_once_and_found_again(tmp_path):
    task = toy_task("classify", 70)
    recipe = f"augment(copies=2, ways='nearest', labels='kept', folder={str(tmp_path / 'made')!r}) + {SHORT}"
    said = []
    first = rows_of(recipe, task, say=lambda stage, *rest: said.append((stage, *rest)))
    assert ("augmenting", 64, 70, "") in said and ("augmenting", 70, 70, "") in said
    (file,) = (tmp_path / "made").iterdir()
    said.clear()
    again = rows_of(recipe, task, say=lambda stage, *rest: said.append((stage, *rest)))
    assert first == again and not [stage for stage, *_ in said if stage == "augmenting"]
    assert [json.loads(line) for line in file.read_text().splitlines()][3][0][1] in first.texts
    rows_of(recipe.replace("copies=2", "copies=3"), task)
    rows_of(recipe, task, small(seed=9))  # another model finds other words
    assert len(list((tmp_path / "made").iterdir())) == 3
    assert first == rows_of(recipe.replace(f", folder={str(tmp_path / 'made')!r}", ""), task)


def test_phases_with_the_same_copies_have_them_as_tokens_once():
    task = toy_task("classify", 24)
    two, three = (f"augment(copies={copies}, ways='nearest', labels='kept') + {SHORT}" for copies in (2, 3))
    sizes = [len(rows) for rows in all_rows_of(" | ".join([two, two, SHORT, SHORT, three, two]), task)]
    assert len(sizes) == 4 and sizes[0] == sizes[3] != sizes[2] and sizes[1] == 24


def test_equal_rows_are_held_once_and_no_longer_than_they_are_read():
    first = toy_task("classify", 24).split("train")
    second = first.take(range(24))
    setting = Setting(toy_task("classify", 24), 0, 8, lambda *_: None, None, "", 0.0)
    assert setting.hold(first) is first and setting.hold(second) is first is not second
    setting.tokenise(make_tokenizer(), first)
    assert setting.streams_of_rows and setting.hold(None) is None and not setting.streams_of_rows


def test_other_copies_of_the_same_finder_are_other_files(tmp_path):
    """A model that is marked is the same one whatever is done with it."""
    task, found = toy_task("classify", 24), []
    for copies, seed, ways in (
        (2, 0, "nearest"),
        (3, 0, "nearest"),
        (2, 1, "nearest"),
        (2, 0, ["nearest", "mask"]),
        (2, 0, "nearest"),
    ):
        made = f"copies={copies}, seed={seed}, ways={ways!r}, labels='kept', folder={str(tmp_path)!r}"
        found.append(rows_of(f"mark('finder') | augment(model='finder', {made}) + {SHORT}", task).texts)
    assert len(list(tmp_path.iterdir())) == 4 and found[0] == found[-1]
    assert all(found[0] != other for other in found[1:-1])


def test_a_file_grows_on_after_a_kill(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from smallbert.machine.files import grow_file

def lines(start):
    for number in range(start, 20):
        if number == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield f"line {number} " + "x" * 5000

grow_file(Path(sys.argv[1]), lines, 4)
"""
    path = tmp_path / "made" / "rows.jsonl"
    source = str(Path(__file__).parent.parent / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    killed = subprocess.run([sys.executable, "-c", script, str(path), "11"], env=environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL and not path.exists()
    (part,) = path.parent.iterdir()
    assert part.stat().st_size > 10_000
    with part.open("ab") as file:
        file.write(b"line half")
    asked = []
    grow_file(path, lambda start: asked.append(start) or (f"line {n} " + "x" * 5000 for n in range(start, 20)), 4)
    assert asked[0] % 4 == 0 and 0 < asked[0] <= 8
    assert path.read_text() == "".join(f"line {n} " + "x" * 5000 + "\n" for n in range(20))
    assert list(path.parent.iterdir()) == [path]


def test_ten_copies_and_a_teacher_train_to_the_end(tmp_path):
    task = toy_task("classify", 32)
    teacher = run("finetune(epochs=25, batch=8, lr=0.005)", small(), task).encoder
    save_folder(teacher, tmp_path / "teacher")
    student = small(layers=1, seed=5)
    taught = f"augment(copies=10, ways='nearest') + distill({str(tmp_path / 'teacher')!r})"
    taught += " + train(epochs=4, batch=16, lr=0.005)"
    outcome = run(taught, student, task, work=tmp_path / "work")
    made = next(note for note in outcome.notes if note.startswith("augment made"))
    assert int(made.split()[2]) > 200 and outcome.steps == round(4 * -(-(32 + int(made.split()[2])) // 16))
    assert accuracy(outcome.encoder, task, "train") > 85 and not outcome.diverged
    assert is_same_state(run(taught, student, task).encoder, outcome.encoder)  # a file changes nothing


def test_need_word_head_says_what_to_do():
    with pytest.raises(UserError, match="keep_head=True"):
        need_word_head(small(), "it")
