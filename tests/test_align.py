"""Alignment terms: against formulas in numpy, text by text, and whatever way texts are laid out."""

import copy
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from test_resume import counted
from toys import batch_of, check_refused, is_same_state, pairs, phase_of, run, small, toy_task

from smallbert.errors import UserError
from smallbert.methods.align import Align
from smallbert.methods.drop_layers import CHOICES
from smallbert.methods.share_projections import _matrices
from smallbert.model.encoder import Encoder
from smallbert.model.folders import save_folder
from smallbert.model.replace import head_count
from smallbert.probing.attentions import watched
from smallbert.recipes.recipe import Recipe
from smallbert.tiny import SHAPES
from smallbert.training.alignment import Side, attention_scores, distance
from smallbert.training.loop import train
from smallbert.training.pairs import MAPS
from smallbert.training.phase import Phase

TASK = toy_task("pair", 24)
WHOLE = "train(epochs=4, batch=24, lr=0.003, warmup=0.0, dropout=0.0)"
WHATS = ("hidden", "first", "embeddings", "attention", "scores", "relations", "moments", "gram")
ROWS = ("attention", "scores", "relations", "gram")
LAYOUTS = {"padded": {"packed": False}, "packed": {"packed": True, "slots": 7}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A student, and the folder of a teacher that is wider, deeper and has more heads; and one of the same shape."""
    folder = tmp_path_factory.mktemp("teachers")
    shape = {"hidden_size": 24, "num_attention_heads": 6}
    wide = run("head", small(layers=4, seed=3, **shape), TASK).encoder
    like = run("head", small(layers=4, seed=4), TASK).encoder
    save_folder(wide, folder / "wide")
    save_folder(like, folder / "like")
    student = run("head", small(layers=2), TASK).encoder
    return student, {"wide": (wide, str(folder / "wide")), "like": (like, str(folder / "like"))}


@cache
def with_head(family, seed=0):
    return run("head", small(family, seed=seed), TASK).encoder


def align(teacher=None, **settings):
    """The text of a phase that aligns and does nothing else."""
    settings = {"task": 0.0, **settings, **({} if teacher is None else {"teacher": teacher})}
    return f"align({', '.join(f'{name}={value!r}' for name, value in settings.items())}) + {WHOLE}"


def loss_of(recipe, encoder, task=TASK, index=range(5), **layout):
    phase = phase_of(recipe, encoder, task)
    phase.encoder.eval()
    return phase.loss({"student": batch_of(encoder, task, index, **layout)})


# A student that is its teacher.


@pytest.mark.parametrize("what", WHATS)
def test_a_student_that_is_its_teacher_is_aligned(pair, what):
    for metric in ("mse", "l1", "cosine", "kl"):
        phase = phase_of(align(what=what, metric=metric), pair[0], TASK)
        phase.encoder.eval()
        for layout in LAYOUTS.values():
            assert float(phase.loss({"student": batch_of(pair[0], TASK, **layout)}).detach()) == 0.0


@pytest.mark.parametrize("transform", ["none", "linear", "linear_each", "l2", "norm"])
def test_no_transform_hides_that(pair, transform):
    assert float(loss_of(align(transform=transform), pair[0]).detach()) == 0.0


# Each term in every fourth family, and each family with every fourth term; the rest with -m slow.
@pytest.mark.parametrize(("family", "what"), pairs(SHAPES, WHATS, every=4))
def test_in_every_family(family, what):
    encoder, other = with_head(family), with_head(family, 2)
    layouts = [{}, {"slots": 7}, *([LAYOUTS["packed"]] if encoder.packable else [])]
    assert [float(loss_of(align(what=what), encoder, **layout).detach()) for layout in layouts] == [0.0] * len(layouts)
    phase = phase_of(align(what=what), encoder, TASK)
    phase.encoder.eval().load_state_dict(other.state_dict())
    found = [float(phase.loss({"student": batch_of(encoder, TASK, **layout)}).detach()) for layout in layouts]
    assert found[0] > 1e-8 and found == pytest.approx([found[0]] * len(found), rel=1e-4)
    alone = [float(phase.loss({"student": batch_of(encoder, TASK, [number])}).detach()) for number in range(5)]
    assert np.mean(alone) == pytest.approx(found[0], rel=1e-4)  # no text's part depends on its company


def test_cross_entropy_of_equal_attention_is_its_entropy(pair):
    found = loss_of(align(what="attention", metric="ce"), pair[0])
    entropies = []
    for number in range(5):
        batch, layers = batch_of(pair[0], TASK, [number]), []
        with watched(pair[0], lambda place, seen, kept=layers: kept.append(seen)):
            pair[0](batch)
        entropies.append(np.mean([float(torch.special.entr(seen).sum(-1).mean().detach()) for seen in layers]))
    assert float(found.detach()) == pytest.approx(np.mean(entropies), rel=1e-5)


# Against numpy.


def insides(encoder, number):
    """Hidden states and queries, keys and values of every layer for one text alone, by hand from the weights."""
    with torch.no_grad():
        hidden = [state[0].double().numpy() for state in encoder.states(batch_of(encoder, TASK, [number])).hidden]
    parts = []
    for layer, state in zip(encoder.backbone.encoder.layer, hidden[:-1], strict=True):
        mine = layer.attention.self
        linear = lambda part, x: x @ part.weight.detach().double().numpy().T + part.bias.detach().double().numpy()  # noqa: E731
        parts.append({"q": linear(mine.query, state), "k": linear(mine.key, state), "v": linear(mine.value, state)})
    return hidden, parts, encoder.backbone.config.num_attention_heads


def softmax(values):
    shifted = np.exp(values - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def split(vectors, heads):
    return np.stack(np.split(vectors, heads, -1))  # (heads, tokens, size)


def numpy_sides(what, transform, found, layer, heads, linear=None):
    hidden, parts, own = found
    if what == "relations":
        sides = [split(parts[layer - 1][role], heads) for role in "qkv"]
        return [x @ x.transpose(0, 2, 1) / np.sqrt(x.shape[-1]) for x in sides]
    if what in ("attention", "scores"):
        q, k = (split(parts[layer - 1][role], own) for role in "qk")
        return [q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])]
    x = hidden[layer]
    if what == "first":
        x = x[:1]
    if linear is not None:
        x = x @ linear.weight.detach().double().numpy().T + linear.bias.detach().double().numpy()
    elif transform == "l2":
        x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    elif transform == "norm":
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    if what == "moments":
        return [np.stack([x.mean(-1), x.var(-1)], -1)]
    return [x @ x.T / x.shape[-1] if what == "gram" else x]


def numpy_metric(metric, ours, theirs, soften):
    if metric in ("kl", "ce"):
        mine, wanted = np.log(softmax(ours)), softmax(theirs)
        return (wanted * ((np.log(wanted) if metric == "kl" else 0) - mine)).sum(-1).mean()
    if soften:
        ours, theirs = softmax(ours), softmax(theirs)
    if metric == "cosine":
        norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
        return (1 - (ours * theirs).sum(-1) / norms).mean()
    return (np.abs(ours - theirs) if metric == "l1" else (ours - theirs) ** 2).mean()


CASES = [(what, "none", metric, "like") for what in WHATS for metric in ("mse", "l1", "cosine", "kl", "ce")]
CASES += [("hidden", "linear", metric, "wide") for metric in ("mse", "cosine")]
CASES += [(what, "linear_each", "mse", "wide") for what in ("hidden", "first", "embeddings")]
CASES += [(what, transform, "mse", "like") for what in ("hidden", "gram", "first") for transform in ("l2", "norm")]
CASES += [(what, "none", metric, "wide") for what in ("relations", "moments", "gram") for metric in ("mse", "kl")]


@pytest.mark.parametrize(("what", "transform", "metric", "which"), CASES)
def test_every_term_is_its_formula(pair, what, transform, metric, which):
    student, (teacher, folder) = pair[0], pair[1][which]
    heads = 2 if what == "relations" else 0
    phase = phase_of(
        align(folder, what=what, transform=transform, metric=metric, weight=3.0, heads=heads), student, TASK
    )
    phase.encoder.eval()
    batches = [batch_of(student, TASK, **layout) for layout in LAYOUTS.values()]
    found = [float(phase.loss({"student": batch}).detach()) for batch in batches]
    pairs = [(0, 0)] if what == "embeddings" else [(1, 2), (2, 4)]
    each = []
    for number in range(5):  # text by text: no padding, no packing, nothing to leave out
        ours, theirs = insides(student, number), insides(teacher, number)
        for place, (mine, its) in enumerate(pairs):
            linear = phase.modules["align"][place % len(phase.modules["align"])] if "linear" in transform else None
            sides = zip(
                numpy_sides(what, transform, ours, mine, heads, linear),
                numpy_sides(what, "none" if linear else transform, theirs, its, heads),
                strict=True,
            )
            each.append(sum(numpy_metric(metric, *both, what in ("attention", "relations")) for both in sides))
    assert found == pytest.approx([3 * np.mean(each)] * 2, rel=2e-4) and min(found) > 0


def test_tokens_are_chosen(pair, tmp_path):
    task = toy_task("tag", 24)
    teacher, student = (run("head", small(seed=seed), task).encoder for seed in (5, 0))
    save_folder(teacher, tmp_path / "teacher")
    index = range(5)
    for tokens in ("all", "first", "first_piece"):
        each = []
        for number in index:
            batch = batch_of(student, task, [number])
            with torch.no_grad():
                apart = (student.states(batch).last - teacher.states(batch).last)[0].square().mean(-1).numpy()
            labels = batch.labels[0].numpy()
            each.append({"all": apart, "first": apart[:1], "first_piece": apart[labels >= 0]}[tokens].mean())
        for layout in LAYOUTS.values():
            recipe = align(str(tmp_path / "teacher"), tokens=tokens, layers={-1: -1})
            assert float(loss_of(recipe, student, task, **layout).detach()) == pytest.approx(np.mean(each), rel=1e-4)
    rows = align(str(tmp_path / "teacher"), what="scores", tokens="first_piece")
    one, other = (float(loss_of(rows, student, task, **layout).detach()) for layout in LAYOUTS.values())
    assert one == pytest.approx(other, rel=1e-4) and one > 0


@pytest.mark.parametrize("what", ROWS)
def test_of_rows_over_tokens_the_first_may_be_chosen(pair, what):
    student, (teacher, folder) = pair[0], pair[1]["like"]
    recipe = align(folder, what=what, tokens="first", layers={2: 4}, **({"heads": 2} if what == "relations" else {}))
    each = []
    for number in range(5):
        sides = zip(
            numpy_sides(what, "none", insides(student, number), 2, 2),
            numpy_sides(what, "none", insides(teacher, number), 4, 2),
            strict=True,
        )
        firsts = [[side[..., :1, :] for side in both] for both in sides]  # the first token's row, over all tokens
        each.append(sum(numpy_metric("mse", *both, what in ("attention", "relations")) for both in firsts))
    for layout in LAYOUTS.values():
        assert float(loss_of(recipe, student, **layout).detach()) == pytest.approx(np.mean(each), rel=2e-4)


def test_relations_have_as_many_parts_as_the_teacher_has_heads(pair, tmp_path):
    student = pair[0]  # of four heads
    save_folder(run("head", small(seed=3, num_attention_heads=2), TASK).encoder, tmp_path / "teacher")
    found = {
        heads: float(loss_of(align(str(tmp_path / "teacher"), what="relations", heads=heads), student).detach())
        for heads in (0, 2, 4)
    }
    assert found[0] == found[2] != found[4]


@torch.no_grad()
def test_attention_is_what_the_layers_attend_with(family):
    encoder = small(family)
    batch, shown = batch_of(encoder, TASK), {}
    real = batch.tokens()
    with watched(encoder, lambda place, seen: shown.update({place: seen})):
        encoder(batch)
    layouts = [{}, *([LAYOUTS["packed"]] if encoder.packable else [])]
    for layout in layouts:
        again = batch_of(encoder, TASK, **layout)
        seen = encoder.look(again, {"attention": {0, 1}}, scores=False).taps["attention"]
        assert set(seen) == {0, 1}
        for place, found in seen.items():
            side = attention_scores(found, again)
            chances = side.values.masked_fill(~side.cells, -1e9).softmax(-1)[:5, :, : real.shape[1], : real.shape[1]]
            wanted = shown[place].transpose(1, 2)[real]
            torch.testing.assert_close(chances.transpose(1, 2)[real], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_scores_are_scaled_as_the_layer_scales_them(pair):
    batch = batch_of(pair[0], TASK)
    found = pair[0].look(batch, {"attention": {0}}, scores=False).taps["attention"][0]
    assert found.query.shape[-1] == 4  # so the usual scale is one half
    usual = attention_scores(replace(found, scaling=None), batch).values
    torch.testing.assert_close(attention_scores(replace(found, scaling=0.25), batch).values, usual / 2)


def seen_alone(encoder, layer, number):
    """What one layer of a ModernBERT attends to in one text, by Hugging Face's own plain attention: (heads, t, t)."""
    batch = batch_of(encoder, TASK, [number])
    plain = copy.deepcopy(encoder.backbone)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return plain(batch.input_ids, output_attentions=True).attentions[layer - 1][0]


@pytest.mark.parametrize(
    ("pair", "metric"), pairs([(1, 1), (1, 2), (2, 1), (2, 2)], ["kl", "ce", "mse", "l1", "cosine"], every=3), ids=str
)
def test_layers_that_look_less_far_are_compared_as_they_look(pair, metric, tmp_path):
    """Layer 1 of these sees all, layer 2 what is near."""
    shape = {"local_attention": 4, "global_attn_every_n_layers": 2}
    student, teacher = (run("head", small("modernbert", seed=seed, **shape), TASK).encoder for seed in (0, 5))
    save_folder(teacher, tmp_path / "teacher")
    recipe = align(str(tmp_path / "teacher"), what="attention", metric=metric, layers=[list(pair)])
    if pair == (2, 1) and metric in ("kl", "ce"):
        with pytest.raises(UserError, match="teacher's layer 1 attends further than the 2 tokens"):
            phase_of(recipe, student, TASK)
        return
    wanted = []
    for number in range(5):
        ours, theirs = (seen_alone(model, layer, number) for model, layer in zip((student, teacher), pair, strict=True))
        looked_at = (ours > 0) | (theirs > 0)
        squares, ways = (ours - theirs).square(), (ours - theirs).abs()
        per_row = {
            "kl": torch.special.xlogy(theirs, theirs / ours.clamp(min=1e-30)).sum(-1),
            "ce": -torch.special.xlogy(theirs, ours.clamp(min=1e-30)).sum(-1),
            "mse": squares.sum(-1) / looked_at.sum(-1),
            "l1": ways.sum(-1) / looked_at.sum(-1),
            "cosine": 1 - torch.cosine_similarity(ours, theirs, dim=-1),
        }
        wanted.append(float(per_row[metric].mean()))
    for layout in LAYOUTS.values():
        found = float(loss_of(recipe, student, **layout).detach())
        assert found == pytest.approx(np.mean(wanted), rel=1e-3) and found > 0


@pytest.mark.parametrize("sides", [("bert", "mpnet"), ("mpnet", "bert"), ("mpnet", "mpnet")], ids=str)
@pytest.mark.parametrize("metric", ["mse", "l1", "cosine"])
def test_scores_of_two_families_are_compared_without_their_rows_means(sides, metric):
    """What a family shows as probabilities is known but for a constant of each row."""
    found = []
    for shift in (0.0, 7.0):
        read = []
        for place, family in enumerate(sides):
            encoder = with_head(family, place)
            batch = batch_of(with_head("bert"), TASK)
            seen = encoder.look(batch, {"attention": {0}}, scores=False).taps["attention"][0]
            side = attention_scores(seen, batch)
            read.append(replace(side, values=side.values + (0.0 if side.centred else shift)))
        found.append(distance(*read, metric).mean())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("metric", ["mse", "l1", "cosine"])
def test_scores_are_compared_where_both_look(metric):
    """Neither the distance nor the mean that is taken off knows of cells that only one of them looks at."""
    place = torch.arange(5)
    near, every = (place[:, None] - place).abs()[None, None] < 2, torch.ones(1, 1, 1, 5, dtype=torch.bool)
    scores, others = torch.randn(2, 1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    theirs, shifted = Side(scores, near), Side((scores + 7).where(near, 50 * others), every, centred=True)
    for one, other in ((shifted, theirs), (theirs, shifted)):
        torch.testing.assert_close(distance(one, other, metric), torch.zeros(1, 3, 5), atol=1e-5, rtol=0)
    unlike = Side(shifted.values + others, every, centred=True)
    assert distance(unlike, theirs, metric).sum() > 0.1


# Which layers, when, and how much.


def test_maps_of_layers():
    assert MAPS["uniform"](6, 12) == [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10), (6, 12)]
    assert MAPS["whole"](3, 12) == [(0, 0), (1, 4), (2, 8), (3, 12)]
    assert MAPS["skip"](6, 12) == [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)]  # PKD-Skip
    assert MAPS["last"](6, 12)[:-1] == [(1, 7), (2, 8), (3, 9), (4, 10), (5, 11)]  # PKD-Last, and its last layer
    assert MAPS["first"](3, 12) == [(1, 1), (2, 2), (3, 3)]
    assert MAPS["first"](4, 2) == [(1, 1), (2, 2)]  # of a student that is deeper, the layers that have one
    assert MAPS["last"](4, 2) == [(3, 1), (4, 2)]
    assert MAPS["uniform"](4, 2) == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [its for _, its in MAPS["uniform"](24, 12)] == [layer for layer in range(1, 13) for _ in range(2)]
    assert [its for _, its in MAPS["uniform"](24, 6)] == [layer for layer in range(1, 7) for _ in range(4)]
    for text in ("align(layers={1: 2, -1: -1})", "align(layers=[[1, 2], [-1, -1]])"):
        ((method,),) = Recipe(text)
        assert method._pairs(3, 7) == [(1, 2), (3, 7)]
        assert str(Recipe(str(method))) == str(method)


@pytest.mark.parametrize(
    ("keep", "total", "kept"),
    [
        (8, 12, [2, 3, 4, 6, 8, 9, 10, 12]),
        (6, 12, [2, 4, 6, 8, 10, 12]),
        (4, 12, [3, 6, 9, 12]),
        (3, 12, [4, 8, 12]),
        (4, 6, [2, 3, 4, 6]),
        (3, 6, [2, 4, 6]),
        (2, 6, [3, 6]),
    ],
)
def test_a_copied_layer_learns_from_the_one_it_was_copied_from(keep, total, kept):
    assert [place + 1 for place in CHOICES["even"](keep, total)] == kept
    assert [its for _, its in MAPS["uniform"](keep, total)] == kept
    teacher = small(layers=total)
    student = run(f"student({keep})", teacher).encoder
    pulled = [torch.equal(theirs, ours) for _, theirs, ours in _matrices(teacher, student)]
    assert all(pulled) and len(pulled) == 6 * keep


@pytest.mark.parametrize(
    ("recipe", "phrase"),
    [
        ("align('attention', layers={0: 0})", "cannot be; for 'attention' layers count from 1, and -1 is the last"),
        ("align('embeddings', layers={1: 1})", "leave out"),
        ("share_projections(0.0)", "weight is above 0"),
        ("share_projections(-1)", "weight is above 0"),
        ("mark('latest')", "any text but '' and 'latest'"),
        ("mark('')", "any text but ''"),
        ("distill(alpha=0)", "alpha must be above 0"),
        ("distill(schedule='fade_in', share=0)", "share must be above 0"),
        ("distill(share=0.5)", "is for a schedule"),
        ("distill(temperature=1e400)", "must be a finite number"),
        ("align(share=0.5)", "is for a schedule"),
        ("align('embeddings', layers='last')", "leave out 'last'"),
        ("align('attention', heads=4)", "settings for what='relations'"),
        ("align(layers={1: 2, 1: 3})", "is in this dict twice"),
    ],
)
def test_settings_that_cannot_be_meant(recipe, phrase):
    with pytest.raises(UserError, match=phrase) as refusal:
        Recipe(recipe)
    assert "1000000" not in str(refusal.value)


def test_a_mark_that_is_misspelt_is_no_folder(pair):
    recipe = f"mark('big') | student(2) | distill(teacher='bigg') + {WHOLE}"
    check_refused(recipe, pair[0], TASK, "no mark is called 'bigg'. Did you mean 'big'")


@pytest.mark.parametrize("method", ["distill", "align", "share_projections"])
@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("mark('big') | mark('old') | student(2) | {}(teacher='middle')", "should be a mark: the marks before"),
        ("student(2) | {}(teacher='middle')", "If 'middle' should be a mark: nothing before it is marked"),
        ("student(2) | {}(teacher='')", "is 'latest', a mark, a folder or a name on the hub, not ''"),
    ],
)
def test_a_teacher_who_is_nowhere_may_have_been_meant_as_a_mark(pair, method, recipe, said, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_refused(f"{recipe.format(method)} + {WHOLE}", pair[0], TASK, said)


def test_a_temperature_that_nothing_reads_is_refused(pair):
    recipe = f"mark('big') | student(2) | distill('big', metric='mse', temperature=4.0) + {WHOLE}"
    check_refused(recipe, pair[0], TASK, "temperature=4 has no effect with metric='mse'")


def weights_at(phase, progress):
    phase.set_dials(progress)
    return {name.removeprefix("weight of "): float(phase.dials[name]) for name in phase._products}


def test_schedules(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    phase = phase_of(align(folder, schedule="progressive", share=0.5, weight=2.0), student, TASK)
    terms = ("align layer 1 to 2", "align layer 2 to 4")
    steps = {0: (2, 0), 2: (2, 0), 3: (0, 2), 5: (0, 2), 6: (0, 0), 11: (0, 0), 12: (0, 0)}  # of twelve
    for step, wanted in steps.items():
        assert weights_at(phase, step / 12) == {"task": 0.0, **dict(zip(terms, wanted, strict=True))}
    phase = phase_of(align(folder, schedule="stacked", share=0.5, weight=2.0), student, TASK)
    for step, wanted in {0: (1, 0), 2: (1, 0), 3: (1, 1), 6: (1, 1), 12: (1, 1)}.items():
        assert weights_at(phase, step / 12) == {"task": 0.0, **dict(zip(terms, wanted, strict=True))}
    for schedule, wanted in {"fade_in": (0, 1, 2, 2), "fade_out": (2, 1, 0, 0), "constant": (2, 2, 2, 2)}.items():
        share = 1.0 if schedule == "constant" else 0.5
        phase = phase_of(align(folder, schedule=schedule, share=share, weight=2.0), student, TASK)
        assert [weights_at(phase, x)["align"] for x in (0, 0.25, 0.5, 1)] == list(wanted)


def test_no_stair_comes_or_goes_a_step_late_by_rounding(pair):
    """3 * 0.4 / 3 is a little more than 12 / 30."""
    recipe = align(pair[1]["like"][1], layers="whole", schedule="progressive", share=0.4)
    phase = phase_of(recipe, pair[0], TASK)
    for step, wanted in {3: (1, 0, 0), 4: (0, 1, 0), 7: (0, 1, 0), 8: (0, 0, 1), 11: (0, 0, 1), 12: (0, 0, 0)}.items():
        found = weights_at(phase, step / 30)
        assert tuple(found[f"align layer {mine} to {its}"] for mine, its in ((0, 0), (1, 2), (2, 4))) == wanted


def test_a_teachers_scores_come_and_go(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    for schedule, alphas in {"constant": (0.8, 0.8, 0.8), "fade_in": (0, 0.4, 0.8), "fade_out": (0.8, 0.4, 0)}.items():
        share = 1.0 if schedule == "constant" else 0.5
        text = f"distill(teacher={folder!r}, alpha=0.8, schedule={schedule!r}, share={share}) + {WHOLE}"
        phase = phase_of(text, student, TASK)
        for progress, alpha in zip((0.0, 0.25, 0.5), alphas, strict=True):
            assert weights_at(phase, progress) == pytest.approx({"task": 1 - alpha, "distill": alpha})
    assert str(Recipe("distill('a', 0.5, 1.0, 'ce', 9)")) == str(
        Recipe("distill('a', 0.5, 1.0, 'ce', 9, 'constant', 1.0)")
    )
    with pytest.raises(UserError, match="fade together"):
        phase_of(f"distill(teacher={folder!r}) + distill(alpha=0.2, schedule='fade_out') + {WHOLE}", student, TASK)


def test_staircases_learn_one_layer_after_the_other(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    phase = phase_of(align(folder, schedule="progressive", layers="first"), student, TASK)
    moved = {}
    for progress in (0.0, 0.5):
        phase.encoder.eval().zero_grad()
        phase.set_dials(progress)
        phase.loss({"student": batch_of(student, TASK)}).backward()
        slopes = [layer.output.dense.weight.grad for layer in phase.encoder.backbone.encoder.layer]
        moved[progress] = [slope is not None and bool(slope.abs().sum() > 0) for slope in slopes]
    assert moved == {0.0: [True, False], 0.5: [True, True]}


@pytest.mark.parametrize("transform", ["none", "linear", "linear_each"])
@pytest.mark.parametrize("schedule", ["progressive", "stacked"])
def test_layers_whose_turn_has_not_come_cost_nothing_and_change_nothing(pair, schedule, transform, monkeypatch):
    student, (_, folder) = pair[0], pair[1]["like"]
    batch, found = {"student": batch_of(student, TASK)}, {}
    for which in ("those that count", "all"):
        phase = phase_of(align(folder, schedule=schedule, transform=transform, share=0.5), student, TASK)
        if which == "all":
            monkeypatch.setattr(Align, "_pairs_at", lambda self, phase, pairs: pairs)
        both = torch.nn.ModuleList([phase.encoder, phase.modules])
        with torch.no_grad():  # maps begin by changing nothing, each like the other
            for number, parameter in enumerate(phase.modules.parameters()):
                parameter.add_(0.01 * (number + 1))
        for progress in (0.0, 0.25, 0.75):
            both.eval().zero_grad()
            phase.set_dials(progress)
            looks = phase.look_at(batch)
            (term,) = [method for method in phase.methods if method.name == "align"]
            loss = phase.loss(batch)
            loss.backward()
            slopes = {name: one.grad for name, one in both.named_parameters()}
            found[which, progress] = list(term.loss(looks)), loss.detach(), slopes
    counts = [len(found["those that count", progress][0]) for progress in (0.0, 0.25, 0.75)]
    assert counts == ([1, 1, 1] if schedule == "progressive" else [1, 2, 2])  # with none that counts the last, at zero
    assert list(found["those that count", 0.75][0])[-1] == "align layer 2 to 4"
    for progress in (0.0, 0.25, 0.75):
        (_, loss, slopes), (_, other, others) = found["those that count", progress], found["all", progress]
        torch.testing.assert_close(loss, other)
        for name, slope in slopes.items():
            expected = torch.zeros(()) if others[name] is None else others[name]
            torch.testing.assert_close(torch.zeros_like(expected) if slope is None else slope, expected)
        if progress == 0.0 and transform == "linear_each":
            assert [slopes[f"1.align.{number}.weight"] is None for number in (0, 1)] == [False, True]


@pytest.mark.parametrize("what", ["hidden", "relations"])
@pytest.mark.parametrize("schedule", ["progressive", "stacked", "constant"])
def test_layers_above_those_that_count_do_not_run(pair, schedule, what, monkeypatch):
    student, (_, folder) = pair[0], pair[1]["like"]
    recipe = align(folder, what=what, schedule=schedule, layers="first")
    phase, ran = phase_of(recipe, student, TASK), []
    for number, layer in enumerate(phase.encoder.backbone.encoder.layer):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    for progress in (0.0, 0.5):
        ran.append("|")
        phase.set_dials(progress)
        phase.loss({"student": batch_of(student, TASK)})
    assert ran == (["|", 0, 1, "|", 0, 1] if schedule == "constant" else ["|", 0, "|", 0, 1])
    longer = recipe.replace(WHOLE, "train(epochs=4, batch=12)")
    short = run(longer, student, TASK, judge=False).encoder
    monkeypatch.setattr(Phase, "depth", lambda self: None)
    whole = run(longer, student, TASK, judge=False).encoder
    assert is_same_state(short, whole)  # to the bit, dropout included


def test_all_layers_run_where_a_head_is_read(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    recipe = align(folder, schedule="progressive", layers="first")
    for beside in (f"distill(teacher={folder!r}, alpha=1.0)", f"distill(teacher={folder!r}, metric='mse')"):
        phase = phase_of(f"{recipe} + {beside}", student, TASK)
        phase.set_dials(0.0)
        assert phase.depth() is None and phase.loss({"student": batch_of(student, TASK)}).isfinite()
    assert phase_of(recipe.replace("task=0.0", "task=0.5"), student, TASK).depth() is None
    assert phase_of(recipe, student, TASK).depth() == 1


def test_each_pair_in_turn_has_the_loss_that_it_has_alone(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    settings = {"what": "relations", "of": "qv", "metric": "kl", "heads": 2}
    phase = phase_of(align(folder, schedule="stacked", layers={1: 3, 2: 2}, **settings), student, TASK)
    phase.encoder.eval()
    phase.set_dials(1.0)
    (term,) = [method for method in phase.methods if method.name == "align"]
    found = term.loss(phase.look_at({"student": batch_of(student, TASK, range(5))}))
    assert list(found) == ["align layer 1 to 3", "align layer 2 to 2"]
    for name, layers in zip(found, ({1: 3}, {2: 2}), strict=True):
        torch.testing.assert_close(found[name], loss_of(align(folder, layers=layers, **settings), student))


def test_too_few_steps_for_all_layers_in_turn_are_noted(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    text = "align(teacher={!r}, schedule={!r}, share={}) + train(epochs=1, batch={})"
    for schedule, share, batch, noted in [
        ("progressive", 1.0, 24, True),  # one step
        ("stacked", 0.5, 8, True),  # one and a half
        ("progressive", 1.0, 12, False),
        ("constant", 1.0, 24, False),
    ]:
        notes = run(text.format(folder, schedule, share, batch), student, TASK, judge=False).notes
        assert any("too few for 2 pairs of layers" in note for note in notes) == noted, (schedule, share, batch)


def test_heads_are_counted_in_the_layers_and_not_in_the_config(pair):
    student, (_, folder) = pair[0], pair[1]["like"]
    assert head_count(student) == 4
    for heads, metric in ((2, "kl"), (1, "mse")):  # one head would be compared with each of four
        cut = f"mark('big') | student(2, heads={heads}, start='slice') | "
        check_refused(
            f"{cut}align('attention', metric={metric!r}, teacher={folder!r}) + {WHOLE}", student, TASK,
            f"the student attends with {heads} heads and the teacher with 4",
        )  # fmt: skip
    cut = run("student(2, heads=2, start='slice')", student, TASK).encoder
    assert head_count(cut) == 2 and cut.backbone.config.num_attention_heads == 4
    values = [
        loss_of(f"mark('cut') | student(1) | align('relations', heads={heads}, teacher='cut', task=0.0) + {WHOLE}", cut)
        for heads in (0, 2, 4)
    ]
    torch.testing.assert_close(values[0], values[1])
    assert not torch.allclose(values[0], values[2])


# Several terms, several teachers, one look.


def test_gradients_reach_the_student_and_the_maps_alone(pair):
    student, (_, folder) = pair[0], pair[1]["wide"]
    phase = phase_of(align(folder, transform="linear_each", layers="first"), student, TASK)
    teacher = phase.teacher(folder)
    phase.begin_training()
    phase.loss({"student": batch_of(student, TASK)}).backward()
    assert not teacher.training and all(parameter.grad is None for parameter in teacher.parameters())
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in phase.modules.parameters())
    slopes = {name: parameter.grad for name, parameter in phase.encoder.backbone.named_parameters()}
    assert all(slope is not None for slope in slopes.values())
    assert phase.encoder.head.out.weight.grad is None  # the labels are off


def test_maps_begin_unlike_each_other_and_learn_at_their_own_rate(pair):
    recipe = align(pair[1]["wide"][1], transform="linear_each", lr=0.02)
    phase, again = (phase_of(recipe, pair[0], TASK) for _ in range(2))
    one, other = phase.modules["align"]
    assert not torch.equal(one.weight, other.weight)
    assert is_same_state(phase.modules, again.modules)
    rates = {parameter: group["lr"] for group in phase.optimiser.param_groups for parameter in group["params"]}
    assert {rates[parameter] for parameter in phase.modules.parameters()} == {0.02}
    assert rates[phase.encoder.backbone.encoder.layer[0].output.dense.weight] == 0.003


def test_work_with_a_teacher_that_was_replaced_is_not_taken_over(pair, tmp_path):
    student, folder = pair[0], tmp_path / "teacher"
    save_folder(run("head", small(seed=3), TASK).encoder, folder)
    recipe = f"align(teacher={str(folder)!r}) + train(epochs=1, batch=12, dropout=0.0)"
    first = run(recipe, student, TASK, work=tmp_path / "work", judge=False)
    with counted() as taken:
        run(recipe, student, TASK, work=tmp_path / "work", judge=False)
        assert not taken
        save_folder(run("head", small(seed=4), TASK).encoder, folder)
        other = run(recipe, student, TASK, work=tmp_path / "work", judge=False)
    assert len(taken) == 2 and not is_same_state(first.encoder, other.encoder)


def test_several_terms_and_teachers_in_one_phase(pair):
    student, teachers = pair
    wide, like = (teachers[name][1] for name in ("wide", "like"))
    terms = {
        "align": f"align('attention', layers='last', teacher={like!r})",
        "align 2": f"align('first', transform='linear', teacher={wide!r}, weight=0.5)",
        "align 3": f"align('hidden', transform='linear', teacher={wide!r})",
        "distill": f"distill(alpha=0.8, teacher={like!r})",
        "distill 2": f"distill(alpha=0.6, teacher={wide!r})",
    }
    phase = phase_of(f"{' + '.join(reversed(terms.values()))} + {WHOLE}", student, TASK)
    phase.encoder.eval()
    assert set(phase.modules) == {"align 2", "align 3"}
    asked = {name: (teacher.scores, teacher.wanted) for name, teacher in phase.teachers.items()}
    assert asked == {like: (True, {"attention": {2, 3}}), wide: (True, {"first": {2, 4}, "hidden": {2, 4}})}
    batch = batch_of(student, TASK)
    looks, look = [], Encoder.look
    with patch.object(Encoder, "look", lambda self, *rest: looks.append(self) or look(self, *rest)):
        whole = float(phase.loss({"student": batch}).detach())
    assert sorted(map(id, looks)) == sorted(id(phase.teacher(name)) for name in (wide, like))
    step, parts = phase.look_at({"student": batch}), {}
    for method in phase.methods:
        parts.update({name: float(value.detach()) for name, value in method.loss(step).items()})
    assert set(parts) == set(terms) and all(value > 0 for value in parts.values())
    wanted = {"align": 1, "align 2": 0.5, "align 3": 1, "distill": 0.4, "distill 2": 0.3}
    assert weights_at(phase, 0.5) == pytest.approx({**wanted, "task": 0.3})
    labels = float(phase_of(WHOLE, student, TASK).loss({"student": batch}).detach())
    assert whole == pytest.approx(0.3 * labels + sum(wanted[name] * value for name, value in parts.items()), rel=1e-5)


def test_a_teacher_looks_once_a_step_and_no_further_than_asked(pair):
    student, (teacher, folder) = pair[0], pair[1]["like"]
    runs, layers = [], teacher.backbone.encoder.layer[0].__class__
    forward = layers.forward

    def count(self, *rest, **named):
        runs.append(torch.is_grad_enabled())
        return forward(self, *rest, **named)

    relations = f"align('relations', layers={{2: 1}}, teacher={folder!r})"
    phase = phase_of(f"{align(folder, layers={1: 2})} + {relations}", student, TASK)
    with patch.object(layers, "forward", count):
        phase.loss({"student": batch_of(student, TASK)})
    assert runs == [True, True, False, False]  # two layers of the student, two of the teacher's four


def test_training_brings_the_student_closer(pair):
    student, (_, folder) = pair[0], pair[1]["wide"]
    terms = (
        f"align('relations', metric='kl', heads=2, teacher={folder!r}, task=0.0) "
        f"+ align('hidden', transform='linear', teacher={folder!r})"
    )
    phase = phase_of(f"{terms} + train(epochs=30, batch=24, lr=0.003, dropout=0.0)", student, TASK)
    batch = batch_of(student, TASK, range(12), split="train")
    before = float(phase.loss({"student": batch}).detach())
    train(phase, lambda *_: None)
    assert float(phase.loss({"student": batch}).detach()) < 0.7 * before
    packed, padded = (
        run(f"{terms} + train(epochs=2, batch=8, dropout=0.0, layout={layout!r})", student, TASK, judge=False)
        for layout in ("packed", "padded")
    )
    assert packed.packed and not padded.packed and not is_same_state(packed.encoder, student)


# What cannot be.


def test_refusals(pair, tmp_path):
    student, teachers = pair
    wide = teachers["wide"][1]
    assert Recipe("align('first', tokens='first')")  # says the same twice, and nothing wrong
    for wrong in (
        "align('attention', transform='linear')",
        "align('gram', transform='linear')",
        "align(weight=0)",
        "align(share=0.0)",
        "align(of='qq')",
        "align(layers={'a': 1})",
        "align(layers=[[1]])",
        "align(layers=[])",
        "align(layers=[[1, 2], [1, 2]])",
        "align('attention', layers={0: 1})",
        "align('first', tokens='masked')",
        "align(transform='l2', lr=0.01)",
    ):
        with pytest.raises(UserError, match="align"):
            Recipe(wrong)
    for recipe, sentence in {
        align(wide): "16 wide and the teacher's 24; write transform='linear'",
        align(wide, what="attention"): "4 heads and the teacher with 6; compare what='relations'",
        align(wide, what="relations"): "relations in 6 parts need widths that 6 divides, and one is 16",
        align(wide, layers={3: 1}): "does not fit a student of 2 layers and a teacher of 4",
        align(tokens="masked"): "needs a phase that masks words",
        align(tokens="first_piece"): "needs a task that labels words",
    }.items():
        with pytest.raises(UserError, match=sentence):
            loss_of(recipe, student)
    with pytest.raises(UserError, match="nothing to compare"):
        loss_of(align(layers="skip"), run("drop_layers(1)", student, TASK).encoder)
    other = student.copy()
    other.tokenizer = other_words()
    save_folder(other, tmp_path / "other")
    with pytest.raises(UserError, match="token by token"):
        phase_of(align(str(tmp_path / "other")), student, TASK)


def other_words():
    """A tokenizer that cuts words into letters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "##oo"]
    tokenizer = Tokenizer(models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tagging_teacher_may_cut_words_otherwise(tmp_path, layout):
    """Its score of a word is that of the word's first piece, wherever that stands, as long as it reads that far."""
    from smallbert.methods.distill import METRICS
    from smallbert.texts.batches import Layout, make_batch
    from smallbert.training.teachers import view_of

    task = toy_task("tag", 24)
    teacher = small(seed=3)
    teacher.tokenizer = other_words()
    teacher = run("head", teacher, task).encoder
    save_folder(teacher, tmp_path / "teacher")
    student = run("head", small(), task).encoder
    name = str(tmp_path / "teacher")
    phase = phase_of(f"distill(teacher={name!r}, alpha=1.0) + {WHOLE}", student, task)
    phase.encoder.eval()
    packed = layout == "packed"
    layouts = {view: Layout(packed, 64, grain=32) for view in ("student", view_of(name))}
    index = np.array([3, 1, 4, 8])
    batches = {view: make_batch(phase.stream, index, how, view=view) for view, how in layouts.items()}
    count = {"count": torch.tensor(float(phase.stream.units(index)))}
    found = float(phase.loss({view: batch.with_tensors(count) for view, batch in batches.items()}).detach())
    each, lost = [], 0
    for number in index:
        ours, theirs = (batch_of(model, task, [number], split="train") for model in (student, teacher))
        scores = [model(batch)[0].detach() for model, batch in ((student, ours), (teacher, theirs))]
        firsts = [torch.nonzero(batch.words[0] >= 0).flatten() for batch in (ours, theirs)]
        both = min(map(len, firsts))  # 64 tokens hold fewer words of letters
        each += METRICS["kl"](scores[0][firsts[0][:both]], scores[1][firsts[1][:both]], 2.0).tolist()
        lost += len(firsts[0]) - both
    assert found == pytest.approx(sum(each) / (len(each) + lost), rel=1e-4)
    outcome = run(
        f"distill(teacher={name!r}) + train(epochs=1, batch=8, layout={layout!r})", student, task, judge=False
    )
    assert outcome.packed == packed and not is_same_state(outcome.encoder, student)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_word_takes_the_scores_of_another_texts_word(layout):
    """Words may have larger numbers than there are tokens, since a tokenizer may find nothing in some of them."""
    from smallbert.methods.distill import by_words

    encoder, task = small(), toy_task("tag", 24)
    batch = batch_of(encoder, task, [0, 1], **LAYOUTS[layout])
    scores = torch.arange(1.0, 1 + batch.input_ids.numel()).view(*batch.input_ids.shape, 1)
    plain, known = by_words(scores, batch, batch)
    assert torch.equal(known, (batch.words >= 0).float()) and torch.equal(plain, scores * known[..., None])
    far = batch.words.clone()
    far.view(-1)[1] = batch.longest + 2  # the first word of the first text, as if many had been before it
    batch = replace(batch, words=far)
    found, both = by_words(scores, batch, batch)
    assert known.view(-1)[1] == 1 and both.view(-1)[1] == 0 and found.view(-1)[1] == 0
    rest = torch.arange(known.numel()) != 1
    assert torch.equal(both.view(-1)[rest], known.view(-1)[rest])
    assert torch.equal(found.view(-1)[rest], plain.view(-1)[rest])


def test_a_family_without_attention_is_refused(pair):
    from dataclasses import replace

    from smallbert.model.anatomy import FAMILIES

    with patch.dict(FAMILIES, {"bert": replace(FAMILIES["bert"], q="")}), pytest.raises(UserError, match="no part 'q'"):
        phase_of(align(what="attention"), pair[0], TASK)
