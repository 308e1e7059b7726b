"""What a cache keeps of layers beside hidden states, and how it joins what several stores hold."""

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch
from test_cache import LAYOUTS, STUDENT, TASK, fill_partly, losses, no_asking, quiet, resident, shuffled, stores, train
from toys import is_same_state, pairs, phase_of, run, small, stream_of, toy_task

from smallbert.features import cache
from smallbert.features.asking import keep_taught
from smallbert.features.cache import Cache, What
from smallbert.features.parts import in_order, look_at_one, names_of, taps_for, turns, vector, why_not_kept
from smallbert.features.plan import text_keys
from smallbert.features.store import Store, read_keys
from smallbert.features.taught import Taught
from smallbert.model.attention import Attending
from smallbert.model.encoder import Encoder, fingerprint_of_outputs
from smallbert.model.folders import load_folder, save_folder
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import Stream, Tokens
from smallbert.tiny import SHAPES

SQUARE = ("mpnet", "deberta-v2")  # families whose attention is their own
ALONE = Layout(False, 0)


# What layers do.


def test_names_have_one_order_and_stand_for_what_is_looked_at():
    wanted = {"v": {11, 1}, "hidden": {12, 0, 2}, "attention": {9}, "q": {1}}
    names = names_of(wanted, True)
    assert names == (0, 2, 12, "key 10", "q 2", "query 10", "v 2", "v 12")
    assert taps_for(names) == wanted and in_order(reversed(names)) == list(names)
    plain = names_of({**wanted, "q": {9}}, False)  # what attention is made of is what is there already
    assert plain == (0, 2, 12, "k 10", "q 10", "v 2", "v 12")


def kept_of(encoder, tokens, wanted, folder, dtype="float32", scores="texts"):
    """What a cache tells of texts."""
    what = What("a teacher", scores, names_of(wanted, turns(encoder)), (), dtype)
    like = look_at_one(encoder, tokens, wanted)
    assert not why_not_kept(encoder, like)
    return Taught("one", what, *Cache(encoder, tokens, what, folder).fill(quiet), tokens.lengths, STUDENT, like)


def check_same(found, wanted, real, check):
    """Whether two looks show the same at the tokens that there are."""
    assert found.keys() == wanted.keys()
    for role, places in wanted.items():
        assert found[role].keys() == places.keys()
        for place, one in places.items():
            mine, theirs = (
                (x.query.transpose(1, 2), x.key.transpose(1, 2)) if isinstance(x, Attending) else (x,)
                for x in (found[role][place], one)
            )
            if isinstance(one, Attending):
                assert (found[role][place].scaling, found[role][place].window) == (one.scaling, one.window)
            for a, b in zip(mine, theirs, strict=True):
                assert a.shape == b.shape
                check(a[real], b[real])


def exactly(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def nearly(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def roughly(one, other):
    torch.testing.assert_close(one.float(), other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", SHAPES)
def test_what_is_read_is_what_a_look_shows(family, tmp_path):
    """To the last bit, of the batch that the teacher was asked about; of others as near as looks at two batches are."""
    encoder = run("head", small(family, seed=2), TASK).encoder
    tokens = stream_of(encoder, TASK, "train").views[STUDENT]
    stream, count = Stream({STUDENT: tokens}, None, "classify"), len(encoder.order)
    wanted = {"hidden": {0, count}, "q": {0}, "k": {count - 1}, "v": {0, count - 1}}
    wanted |= {} if family in SQUARE else {"attention": {0, count - 1}}
    told = kept_of(encoder, tokens, wanted, tmp_path)
    each = np.unique(text_keys(tokens), return_index=True)[1]  # each text once, in the order of its key
    (asked,) = sort_into_batches(tokens.lengths[each], 2**11)
    for index, check in ((each[asked], exactly), (each[[7, 2, 2, 11]], nearly)):
        batch = make_batch(stream, index, ALONE)
        with torch.no_grad():
            live = encoder.look(batch, wanted)
        said = told.said_of(told.add_to(batch, index))
        check_same(told.taps(said), live.taps, batch.tokens(), check)
        check(said["scores"], live.scores)
    half = kept_of(encoder, tokens, wanted, tmp_path, "float16")
    batch = make_batch(stream, each[:5], LAYOUTS["packed" if encoder.packable else "padded"], slots=7)
    with torch.no_grad():
        live = encoder.look(batch, wanted, False)
    check_same(half.taps(half.said_of(half.add_to(batch, each[:5]))), live.taps, batch.tokens(), roughly)


def test_what_is_square_or_of_another_width_is_not_kept(tmp_path):
    for family in SQUARE:
        encoder = small(family)
        like = look_at_one(encoder, stream_of(encoder, TASK).views[STUDENT], {"attention": {0}})
        assert why_not_kept(encoder, like) == (
            f"{family} gives attention only as a matrix, quadratic in tokens, which is not kept"
        )
    save_folder(
        run("head", run("student(2, heads=2, start='slice')", small()).encoder, TASK).encoder, tmp_path / "pruned"
    )
    relations = f"align('relations', heads=2, of='v', teacher={str(tmp_path / 'pruned')!r})"
    outcome = run(f"{relations} + {train(tmp_path / 'cache')}", run("head", small(), TASK).encoder, TASK, judge=False)
    why = "its values of layer 1 are 8 wide, and only vectors as wide as its hidden states (16) are kept"
    assert any(note.endswith(f"ran at every step: {why}") for note in outcome.notes)


# What presets want of layers, without what makes their students.
PRESETS = {
    "minilm": "align('attention', layers={{-1: -1}}, metric='kl', teacher={0!r}, task=0.0) "
    "+ align('relations', of='v', layers={{-1: -1}}, metric='kl', teacher={0!r})",
    "minilmv2": "align('relations', heads=8, layers={{-1: -1}}, metric='kl', teacher={0!r}, task=0.0)",
    "mobilebert": "align('hidden', transform='linear_each', schedule='progressive', teacher={0!r}, task=0.0) "
    "+ align('relations', of='qk', heads=4, metric='kl', schedule='progressive', teacher={0!r})",
    "tinybert": "align('hidden', layers='whole', transform='linear', weight=3, teacher={0!r}, task=0.0) "
    "+ align('scores', weight=2, teacher={0!r})",
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of two teachers with as many heads as the student."""
    folder, made = tmp_path_factory.mktemp("teachers"), {}
    for family in ("bert", "modernbert"):
        save_folder(run("head", small(family, layers=4, seed=5), TASK).encoder, folder / family)
        made[family] = str(folder / family)
    return made


@pytest.mark.parametrize(
    ("preset", "read"), pairs(PRESETS, [*product(["bert", "modernbert"], LAYOUTS)], every=3), ids=str
)
def test_presets_learn_from_what_was_kept_as_from_a_teacher_that_looks(teachers, preset, read, tmp_path):
    family, layout = read
    student, terms = run("head", small(family), TASK).encoder, PRESETS[preset].format(teachers[family])
    for task, place, bound in ((TASK, "auto", 1e-5), (TASK, tmp_path, 5e-3), (shuffled(TASK, 1), tmp_path, 5e-3)):
        phase = phase_of(f"{terms} + {train(place)}", student, task)
        phase.encoder.eval()
        live = losses(phase, layout)
        with keep_taught(phase, None, quiet) as found, patch.object(Encoder, "look", side_effect=AssertionError):
            assert len(found) == 1
            kept = losses(phase, layout)
        with resident(phase) as (found,), patch.object(Encoder, "look", side_effect=AssertionError):
            assert found.resident and torch.equal(losses(phase, layout), kept)
        torch.testing.assert_close(kept, live, rtol=bound, atol=1e-7)
        assert live.std() > 10 * (kept - live).abs().max()  # a step of other texts has another loss
    assert len(stores(tmp_path)) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_from_the_cache_is_the_run_without_it(teachers, preset, tmp_path):
    """All texts in one batch are the batch that the teacher was asked about, but for the order of its rows."""
    before, whole = run("head", small(), TASK).encoder, "train(epochs=3, batch=24, lr=0.003, dropout=0.0, cache={!r})"
    terms = PRESETS[preset].format(teachers["bert"])
    looking, unasked, asked, again = (
        run(f"{terms} + {whole.format(place)}", before, TASK, judge=False)
        for place in ("none", "auto", str(tmp_path), str(tmp_path))
    )
    moved = max((one - before.state_dict()[name]).abs().max() for name, one in looking.encoder.state_dict().items())
    assert moved > 0.005 and is_same_state(unasked.encoder, looking.encoder)
    assert not is_same_state(asked.encoder, looking.encoder)  # it is rounded in a folder that stays
    assert is_same_state(asked.encoder, again.encoder)
    assert any("ran once on each text: " in note for note in asked.notes)
    assert any("had run on each text before: " in note for note in again.notes)


# What is in several stores.

SCORES = What("a teacher", "texts", (), (), "float32")
FIRST = replace(SCORES, scores="", first=(2,))
LAST = replace(SCORES, scores="", hidden=(2,))
BOTH = replace(SCORES, hidden=(1, 2), first=(0,))
KEYS = replace(SCORES, scores="", hidden=("k 1", "q 2"))
EVERY = replace(SCORES, hidden=(0, 1, 2, "k 1", "q 2"), first=(0, 1, 2))


@pytest.fixture(scope="module")
def model():
    """A teacher, its texts, and what a look at all of them shows: scores, and vectors token by token, by name."""
    encoder = run("head", small(seed=3), TASK).encoder
    tokens = stream_of(encoder, TASK, "train").views[STUDENT]
    batch = make_batch(Stream({STUDENT: tokens}, None, "classify"), np.arange(24), ALONE)
    with torch.no_grad():
        seen = encoder.look(batch, taps_for(EVERY.layers))
    return encoder, tokens, seen


def some_of(tokens, index):
    places = tokens.places(np.asarray(index))
    offsets = np.concatenate([[0], np.cumsum(tokens.lengths[np.asarray(index)])])
    return Tokens(tokens.ids[places], tokens.types[places], offsets)


@contextmanager
def questions():
    """Which texts a teacher is asked about while this lasts, by their tokens, and what of each."""
    asked, look = [], Encoder.look

    def heard(encoder, batch, wanted, scores=True, head="head"):
        names = {*names_of(wanted, True), *(["scores"] if scores else [])}
        for ids, real in zip(batch.input_ids, batch.tokens(), strict=True):
            asked.extend((tuple(ids[real].tolist()), name) for name in names)
        return look(encoder, batch, wanted, scores, head)

    with patch.object(Encoder, "look", heard):
        yield asked


def check_told(model, what, index, folder):
    """A cache of some texts tells of each what a look does; returns what the teacher was asked for it."""
    encoder, tokens, seen = model
    index = np.asarray(index)
    mine = some_of(tokens, index)
    made = Cache(encoder, mine, what, folder)
    with questions() as asked:
        found, rows = made.fill(quiet)
    told = Taught("one", what, found, rows, mine.lengths, STUDENT, {})
    order = np.random.default_rng(len(index)).permutation(len(index))
    batch = make_batch(Stream({STUDENT: mine}, None, "classify"), order, LAYOUTS["static"], slots=len(index) + 2)
    said, real = told.said_of(told.add_to(batch, order)), batch.tokens()
    assert said.keys() == {name for name in ("scores", "hidden", "first") if getattr(what, name)}
    for row, text in enumerate(index[order]):
        count = int(tokens.lengths[text])
        if what.scores:
            nearly(said["scores"][row], seen.scores[text])  # in float32, whatever vectors are in
        for name, by_token in (("hidden", True), ("first", False)):
            for layer, values in zip(told.kinds[name].layers if name in said else (), said.get(name, ()), strict=True):
                wanted = vector(seen.taps, layer)[text, :count]
                near = nearly if what.dtype == "float32" else roughly
                near(values[row][real[row]] if by_token else values[row], wanted if by_token else wanted[0])
    return asked, made


def items(model, what, index):
    """Texts by their tokens and what is wanted of each; of the first token alone, where no other is."""
    tokens = model[1]
    texts = [tuple(tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]].tolist()) for i in set(index)]
    return set(product(texts, [*what.layers, *(["scores"] if what.scores else [])]))


JOINS = {
    "scores, then layers too": ([SCORES], BOTH, replace(BOTH, scores="")),
    "layers, then scores too": ([LAST], replace(LAST, scores="texts"), SCORES),
    "layers of two stores": ([LAST, replace(LAST, hidden=(1,))], replace(LAST, hidden=(1, 2)), None),
    "one layer more": ([LAST], replace(LAST, hidden=(1, 2)), replace(LAST, hidden=(1,))),
    "the other side": ([replace(LAST, hidden=(1,))], replace(LAST, hidden=(1, 2)), LAST),
    "first tokens of all": ([LAST], FIRST, None),
    "all tokens of first": ([FIRST], LAST, LAST),
    "parts of layers": ([KEYS, SCORES], replace(SCORES, hidden=(2, "k 1", "q 2")), LAST),
    "all at once": ([SCORES, FIRST, LAST, KEYS], replace(SCORES, hidden=(2, "k 1", "q 2"), first=(2,)), None),
    "in other numbers": ([replace(LAST, scores="texts", dtype="float16")], replace(LAST, scores="texts"), LAST),
}  # fmt: skip


@pytest.mark.parametrize("join", JOINS)
def test_only_what_no_store_holds_is_asked(model, join, tmp_path):
    before, wanted, missing = JOINS[join]
    for what in before:
        check_told(model, what, range(9), tmp_path)
    asked, made = check_told(model, wanted, range(9), tmp_path)
    assert set(asked) == (set() if missing is None else items(model, missing, range(9)))
    assert len(made.jobs) == (missing is not None)
    asked, made = check_told(model, wanted, range(9), tmp_path)
    assert not asked and not made.jobs


def test_stores_that_lack_some_texts(model, tmp_path):
    check_told(model, SCORES, range(0, 12), tmp_path)
    check_told(model, LAST, range(6, 18), tmp_path)
    whole = replace(LAST, scores="texts")
    asked, made = check_told(model, whole, range(24), tmp_path)
    expected = (
        items(model, LAST, range(0, 6)) | items(model, SCORES, range(12, 18)) | items(model, whole, range(18, 24))
    )
    assert set(asked) == expected and len(asked) == len(expected)  # and nothing twice
    assert sorted(len(job.stream) for job in made.jobs) == [6, 6, 6]
    assert sorted(json.loads(file.read_text())["number"] for file in tmp_path.glob("*/store.json")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_was_asked_before(model, seed, tmp_path):
    """Many runs, each with texts and wishes of its own, against a list of what is known of each text."""
    draw, known = np.random.default_rng(seed), set()
    for _ in range(8):
        index = draw.choice(24, draw.integers(1, 25), replace=False)
        hidden = tuple(name for name in EVERY.hidden if draw.random() < 0.4)
        first = tuple(name for name in EVERY.first if draw.random() < 0.4)
        scores = "texts" if draw.random() < 0.5 or not (hidden or first) else ""
        what = replace(EVERY, scores=scores, hidden=hidden, first=first)
        wishes = {(key, name, "all") for key, name in items(model, replace(what, scores="", first=()), index)}
        wishes |= {(key, name, "first") for key, name in items(model, replace(what, hidden=()), index)}
        missing = wishes - known
        asked, _ = check_told(model, what, index, tmp_path)
        assert len(asked) == len(set(asked)) and set(asked) == {(key, name) for key, name, _ in missing}
        long = {key for key, _, tokens in missing if tokens == "all"}  # a store has all tokens of a text, or first ones
        known |= missing | {(key, name, "all") for key, name in asked if key in long and name != "scores"}
        known |= {(key, name, "first") for key, name, _ in known}


@patch.object(cache, "SHARD_TEXTS", 4)
def test_an_unfinished_store_among_those_that_are_joined(model, tmp_path):
    encoder, tokens, _ = model
    check_told(model, LAST, range(8), tmp_path)
    fill_partly(Cache(encoder, some_of(tokens, range(12)), SCORES, tmp_path))
    wanted = replace(BOTH, first=())
    asked, made = check_told(model, wanted, range(12), tmp_path)
    (begun, _, _) = made.jobs
    done = {(key, "scores") for key, _ in items(model, SCORES, range(12))} - set(asked)
    assert len(begun.stream) == 12 and len(done) == 4  # the shard that was there before the kill
    assert set(asked) == (
        items(model, SCORES, range(12)) - done
        | items(model, replace(LAST, hidden=(1,)), range(8))
        | items(model, replace(LAST, hidden=(1, 2)), range(8, 12))
    )
    first, again = (made.fill(quiet) for made in (made, Cache(encoder, some_of(tokens, range(12)), wanted, tmp_path)))
    assert [store.path for store in first[0]] == [store.path for store in again[0]] and (first[1] == again[1]).all()


@patch.object(cache, "SHARD_TEXTS", 4)
def test_an_unfinished_store_of_which_others_hold_all_stays_so(model, tmp_path):
    encoder, tokens, _ = model
    fill_partly(Cache(encoder, some_of(tokens, range(8)), SCORES, tmp_path))
    for index in (range(1, 9), [0]):  # neither has all of its texts
        check_told(model, SCORES, index, tmp_path)
    asked, made = check_told(model, SCORES, range(9), tmp_path)
    assert not asked and not made.jobs and len(list(tmp_path.glob("*/store.json"))) == 3


@patch.object(cache, "SHARD_TEXTS", 4)
def test_damage_of_one_of_several(model, tmp_path):
    encoder, tokens, _ = model
    check_told(model, SCORES, range(8), tmp_path)
    (path,) = (file.parent for file in tmp_path.glob("*/store.json"))
    check_told(model, LAST, range(4), tmp_path)
    lost = path / "00001.safetensors"
    whole = lost.read_bytes()
    wanted = replace(LAST, scores="texts")
    lost.unlink()
    fewer = Cache(encoder, some_of(tokens, range(4)), wanted, tmp_path)  # who could mend it has more texts
    assert [len(job.stream) for job in fewer.jobs] == [4] and fewer.jobs[0].settings["layers"] == []
    check_told(model, LAST, range(4), tmp_path)  # who wants nothing of it does not mind
    asked, _ = check_told(model, wanted, range(8), tmp_path)
    again = set(read_keys(path)[4:])
    keys = dict(zip(text_keys(tokens).tolist(), range(24), strict=True))
    torn = [keys[key] for key in again]
    held = items(model, LAST, range(4))
    assert set(asked) == items(model, SCORES, torn) | items(model, LAST, range(8)) - held
    assert lost.read_bytes() == whole


@patch.object(cache, "SHARD_TEXTS", 4)
def test_damage_that_a_younger_store_makes_up_for(model, tmp_path):
    encoder, tokens, _ = model
    check_told(model, SCORES, range(8), tmp_path)
    (path,) = (file.parent for file in tmp_path.glob("*/store.json"))
    (path / "00001.safetensors").rename(tmp_path / "aside")
    check_told(model, SCORES, range(4), tmp_path)
    assert not Cache(encoder, some_of(tokens, range(4)), SCORES, tmp_path).jobs
    (tmp_path / "aside").rename(path / "00001.safetensors")
    assert not check_told(model, SCORES, range(8), tmp_path)[0]


@patch.object(cache, "SHARD_TEXTS", 4)
def test_who_wants_less_than_an_unfinished_store_would_hold_begins_another(model, tmp_path):
    encoder, tokens, _ = model
    large = replace(SCORES, hidden=(1, 2))
    fill_partly(Cache(encoder, some_of(tokens, range(8)), large, tmp_path))
    (begun,) = (file.parent for file in tmp_path.glob("*/store.json"))
    files = {file.name: file.read_bytes() for file in begun.iterdir()}
    for what in (SCORES, FIRST, replace(large, dtype="float16")):
        made = Cache(encoder, some_of(tokens, range(8)), what, tmp_path)
        assert [job.path != begun for job in made.jobs] == [True] and made.jobs[0].settings["layers"] == what.layers
    asked, _ = check_told(model, LAST, range(8), tmp_path)
    assert set(asked) == items(model, LAST, range(8))
    assert {file.name: file.read_bytes() for file in begun.iterdir()} == files
    asked, made = check_told(model, large, range(8), tmp_path)  # of which some is held by now, so that less is asked
    assert set(asked) == items(model, replace(SCORES, hidden=(1,)), range(8)) and made.jobs[0].path != begun


@pytest.mark.parametrize(("held", "finished"), [(3, True), (4, True), (5, False)])
@patch.object(cache, "SHARD_TEXTS", 4)
def test_an_unfinished_store_is_finished_where_fewer_texts_are_asked_about_so(model, held, finished, tmp_path):
    encoder, tokens, _ = model
    fill_partly(Cache(encoder, some_of(tokens, range(12)), SCORES, tmp_path))  # four of its texts are there
    (begun,) = (file.parent for file in tmp_path.glob("*/store.json"))
    check_told(model, SCORES, [*range(held), 23], tmp_path)
    asked, made = check_told(model, SCORES, range(12), tmp_path)
    assert [job.path == begun for job in made.jobs] == [finished] and len(asked) == (8 if finished else 12 - held)


@patch.object(cache, "SHARD_TEXTS", 4)
def test_room_is_needed_for_what_is_not_written_yet(model, tmp_path):
    encoder, tokens, _ = model
    made = Cache(encoder, some_of(tokens, range(8)), LAST, tmp_path)
    (job,) = made.jobs
    assert made.bytes_left == job.plan.total == job.plan.bytes(0) + job.plan.bytes(1)
    fill_partly(made)
    assert Cache(encoder, some_of(tokens, range(8)), LAST, tmp_path).bytes_left == job.plan.bytes(1)
    more = Cache(encoder, some_of(tokens, range(12)), LAST, tmp_path)
    assert len(more.jobs) == 2 and more.bytes_left == job.plan.bytes(1) + more.jobs[1].plan.total


@patch.object(cache, "SHARD_TEXTS", 4)
def test_an_unfinished_store_that_is_older_than_a_whole_one_is_read_first(model, tmp_path):
    encoder, tokens, _ = model
    fill_partly(Cache(encoder, some_of(tokens, range(8)), SCORES, tmp_path))
    (older,) = (file.parent for file in tmp_path.glob("*/store.json"))
    check_told(model, LAST, range(8), tmp_path)
    found, _ = check_told(model, replace(LAST, scores="texts"), range(8), tmp_path)[1].fill(quiet)
    assert found[0].path == older and len(found) == 2


def test_a_teacher_is_who_says_the_same_whatever_it_is_called_and_however_it_was_trained(teachers, tmp_path):
    name, task = teachers["bert"], TASK
    for start in (f"distill(teacher={name!r})", "mark('a') | drop_layers(1) | distill(teacher='a')"):
        run(f"{start} + {train(tmp_path / 'cache')}", load_folder(name), task, judge=False)
    assert len(stores(tmp_path / "cache")) == 1
    other = run("mix_layers", load_folder(name), task).encoder  # the same weights and another way to read them
    assert len({fingerprint_of_outputs(one) for one in (load_folder(name), other)}) == 2


def test_relations_find_what_attention_is_made_of(teachers, tmp_path):
    name, student = teachers["bert"], run("head", small(), TASK).encoder
    attention = f"align('attention', layers={{2: 4}}, teacher={name!r}) + {train(tmp_path)}"
    relations = f"align('relations', layers={{2: 4}}, of='qk', teacher={name!r}) + {train(tmp_path)}"
    run(attention, student, TASK, judge=False)
    with no_asking():
        run(relations, student, TASK, judge=False)


def test_first_tokens_beside_all_are_told_as_they_are_kept(teachers, tmp_path):
    name, student = teachers["bert"], run("head", small(), TASK).encoder
    first, every = (f"align({what!r}, layers={{1: 2}}, teacher={name!r})" for what in ("first", "hidden"))
    last = every.replace("1: 2", "2: 4")
    alone, beside = (
        run(f"{recipe} + {train(tmp_path / folder)}", student, TASK, judge=False).notes
        for recipe, folder in ((first, "a"), (f"{first} + {last}", "b"))
    )
    assert any("hidden states 2 of first tokens were kept" in note for note in alone)
    assert any("hidden states 4 of all tokens and hidden states 2 of all tokens were kept" in note for note in beside)


def test_a_note_says_how_much_is_kept(teachers, tmp_path):
    recipe = f"distill(teacher={teachers['bert']!r}) + {train(tmp_path)}"
    with patch.object(Store, "bytes", PropertyMock(return_value=2_530_000_000)):
        notes = run(recipe, run("head", small(), TASK).encoder, TASK, judge=False).notes
    assert any("ran once on each text: scores were kept (2,530.0 MB) and read at every step" in one for one in notes)


def test_a_text_without_tokens_does_not_stand_for_the_others(model):
    encoder, tokens, _ = model
    empty = Tokens(tokens.ids, tokens.types, np.concatenate([[0], tokens.offsets]))
    like = look_at_one(encoder, empty, {"q": {0}, "attention": {1}})
    assert like["q"][0].shape[1] == tokens.lengths.min() and not why_not_kept(encoder, like)


def test_what_is_brought_has_the_numbers_that_were_kept(teachers, tmp_path):
    recipe = f"align('hidden', layers={{2: 4}}, teacher={teachers['bert']!r}) + {train(tmp_path)}"
    with resident(phase_of(recipe, run("head", small(), TASK).encoder, TASK)) as (found,):
        assert found.resident["hidden"].dtype == torch.float16


def test_recipes_one_after_the_other_share_what_was_said(teachers, tmp_path):
    """One distils, one compares hidden states, one relations; who wants all of it asks nobody."""
    name, student = teachers["bert"], run("head", small(), TASK).encoder
    terms = [
        f"distill(teacher={name!r})",
        f"align('hidden', layers={{2: 2}}, teacher={name!r})",
        f"align('hidden', layers={{1: 1, 2: 4}}, teacher={name!r})",
        f"align('relations', layers={{2: 4}}, heads=2, teacher={name!r})",
    ]
    for number, term in enumerate(terms, 1):
        run(f"{term} + {train(tmp_path)}", student, TASK, judge=False)
        assert len(stores(tmp_path)) == number
    every = " + ".join([terms[0], terms[3], f"align('hidden', layers={{0: 1, 1: 2, 2: 4}}, teacher={name!r})"])
    every += f" + align('first', layers={{1: 1, 2: 4}}, teacher={name!r})"
    phase = phase_of(f"{every} + {train(tmp_path)}", student, TASK)
    phase.encoder.eval()
    for layout in LAYOUTS:
        live = losses(phase, layout)
        with no_asking(), keep_taught(phase, None, quiet) as (found,):
            assert len(found.stores) == 4
            with patch.object(Encoder, "look", side_effect=AssertionError):
                torch.testing.assert_close(losses(phase, layout), live, rtol=1e-4, atol=1e-6)
    assert any("had run on each text before: " in note for note in phase.notes)
    more = f"align('hidden', layers={{1: 2, 2: 3}}, teacher={name!r}) + {train(tmp_path)}"
    notes = run(more, student, TASK, judge=False).notes
    assert any(
        "ran once on each text for which the cache lacked something: hidden states 2, 3 of" in one for one in notes
    )


@pytest.mark.parametrize("kind", ["tag", "regress"])
def test_scores_of_words_and_of_texts_are_joined_with_layers(kind, tmp_path):
    task = toy_task(kind, 24)
    save_folder(run("head", small(layers=3, seed=5), task).encoder, tmp_path / "teacher")
    teacher = str(tmp_path / "teacher")
    terms = [f"align('first', teacher={teacher!r})", f"distill(teacher={teacher!r})"]
    for term in terms:
        run(f"{term} + {train(tmp_path / 'cache')}", run("head", small(), task).encoder, task, judge=False)
    phase = phase_of(f"{' + '.join(terms)} + {train(tmp_path / 'cache')}", run("head", small(), task).encoder, task)
    phase.encoder.eval()
    live = losses(phase, "packed")
    with no_asking(), keep_taught(phase, None, quiet) as (found,):
        assert len(found.stores) == 2 and found.reads
        torch.testing.assert_close(losses(phase, "packed"), live, rtol=1e-4, atol=1e-6)
