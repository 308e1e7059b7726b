"""The training loop: it learns, its numbers are those of the textbook, and it notices when a run is broken."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from toys import (
    accuracy,
    batch_of,
    is_same_state,
    phase_of,
    run,
    scores_of,
    small,
    state_of,
    toy_task,
    trajectory,
)

from smallbert.errors import UserError
from smallbert.measuring.evaluate import evaluate
from smallbert.methods import METHODS, Method
from smallbert.model.heads import KINDS
from smallbert.tasks.task import Split
from smallbert.texts.batches import Layout
from smallbert.texts.data import STUDENT, Stream, Tokens, tokenise
from smallbert.training import loop
from smallbert.training.conditions import COMPILE_PAYS, other_dropout, pays_to_compile
from smallbert.training.loop import take_step
from smallbert.training.phase import Phase
from smallbert.training.precision import round_weights
from smallbert.training.schedule import warmup_then_linear

TASK = toy_task("classify", 24)
WHOLE = "train(epochs=1, batch=24, lr=0.003, warmup=0.0, dropout=0.0)"


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK).encoder


@pytest.fixture
def own_methods():
    with METHODS.for_now():
        yield


@pytest.mark.parametrize(
    ("kind", "epochs", "enough"),
    [
        ("classify", 6, 90),
        pytest.param("pair", 12, 85, marks=pytest.mark.slow),
        ("regress", 8, 90),
        ("tag", 4, 95),
        ("answer", 8, 85),
    ],
)
def test_a_learnable_task_is_learned(kind, epochs, enough):
    task = toy_task(kind, 192)
    given = run("head", small(hidden_size=32), task).encoder
    losses, outcome = trajectory(f"train(epochs={epochs}, batch=8, lr=0.003)", given, task)
    assert accuracy(given, task, "dev") < 65
    assert not outcome.diverged and losses[-1] < losses[0] / 3
    assert accuracy(outcome.encoder, task, "dev") > enough
    assert outcome.steps == 24 * epochs and outcome.epochs == epochs


# Groups, rates, clipping.


def test_optimiser_groups(encoder):
    phase = phase_of("mix_layers | train(lr=1e-4, weight_decay=0.2)", encoder, TASK)
    of = {parameter: group for group in phase.optimiser.param_groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in phase.optimiser.param_groups) == len(of)
    assert set(of) == set(phase.encoder.parameters())
    for name, parameter in phase.encoder.named_parameters():
        group = of[parameter]
        own = name.startswith("mixture.")
        assert group["base_lr"] == (0.01 if own else 1e-4), name
        assert group["weight_decay"] == (0.0 if own or parameter.dim() < 2 else 0.2), name
        assert not own or parameter.dim() < 2
    assert {n for n, p in phase.encoder.named_parameters() if of[p]["base_lr"] == 0.01} == {
        *("mixture.weights", "mixture.gamma")
    }
    scores = phase_of("movement(0.5, lr=0.03) + train(lr=1e-4)", encoder, TASK)
    (group,) = (group for group in scores.optimiser.param_groups if group["base_lr"] == 0.03)
    assert group["weight_decay"] == 0 and [p.dim() for p in group["params"]] == [2, 2]


def test_rates_follow_warmup_and_line(encoder, own_methods):
    seen = []

    class Spy(Method):
        """Writes the rate down."""

        def after_step(self, phase: Any) -> None:
            seen.append(phase.rate)

    run("spy + train(epochs=4, batch=8, lr=0.001, warmup=0.25)", encoder, TASK)
    assert seen == pytest.approx([0.001 * warmup_then_linear(step / 13, 0.25) for step in range(1, 13)])
    assert max(seen) <= 0.001 and seen.index(max(seen)) in (2, 3) and seen[-1] < seen[-2] < seen[-3]


def gradients(phase, batches):
    phase.optimiser.zero_grad()
    phase.loss(batches).backward()
    return {n: p.grad.clone() for n, p in phase.encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("most", [0.0, 0.05, 1000.0])
def test_clipping_scales_the_joint_norm(encoder, most):
    phase = phase_of(f"train(clip={most}, dropout=0.0)", encoder, TASK)
    batches = {"student": batch_of(encoder, TASK)}
    slopes = gradients(phase, batches)
    norm = torch.cat([slope.flatten() for slope in slopes.values()]).norm()
    assert 0.05 < norm < 1000
    scale = most / norm if most == 0.05 else 1.0
    take_step(phase, batches)
    for name, parameter in phase.encoder.named_parameters():
        if name in slopes:
            found = phase.optimiser.state[parameter]["exp_avg"]
            torch.testing.assert_close(found, 0.1 * scale * slopes[name], atol=1e-7, rtol=1e-4)


def test_a_gradient_that_is_no_number_changes_nothing(encoder, own_methods):
    class Break(Method):
        """Spoil one gradient."""

        def after_backward(self, phase: Any) -> None:
            phase.encoder.head.out.weight.grad[0, 0] = float("inf")

    phase = phase_of("train(weight_decay=0.5)", encoder, TASK)
    batches = {"student": batch_of(encoder, TASK)}
    take_step(phase, batches)
    before, counts = state_of(phase.encoder), [s["step"].clone() for s in phase.optimiser.state.values()]
    phase.methods = [*phase.methods, Break()]
    take_step(phase, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(phase.encoder).items())
    assert [s["step"] for s in phase.optimiser.state.values()] == counts
    phase.methods = phase.methods[:-1]
    take_step(phase, batches)
    assert not torch.equal(phase.encoder.head.out.weight, before["heads.task.out.weight"])


# Runs that break.


def test_a_loss_that_is_no_number_ends_the_run(encoder, own_methods, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "doubt_part", lambda device: f", on a {device.type}")

    class Explode(Method):
        """From the third step on there is no loss any more."""

        trains: ClassVar[bool] = True

        def loss(self, step: Any) -> dict[str, Any]:
            return {"bang": step.scores.sum() * (float("nan") if step.phase.step > 2 else 0.0)}

    outcome = run("explode + train(epochs=40, batch=8) | quantize | finetune", encoder, TASK, work=tmp_path)
    assert outcome.steps == 20 and outcome.diverged == "the loss became nan by step 20 of 120, on a cpu"
    assert [entry["step"].split("(")[0] for entry in outcome.encoder.history[1:]] == ["explode", "train"]
    assert all(torch.isfinite(tensor).all() for tensor in outcome.encoder.state_dict().values())
    assert not list(tmp_path.glob("phase-0/*"))  # a broken phase is not kept as a finished one


@pytest.mark.parametrize(
    ("recipe", "broken"), [("train(epochs=1, lr=1e-9)", True), ("train(epochs=12, batch=8, lr=0.005)", False)]
)
def test_a_model_that_learned_nothing_is_called_collapsed(encoder, recipe, broken):
    outcome = run(recipe, encoder, TASK)
    assert bool(outcome.diverged) == broken
    if broken:
        assert "not clearly better than always guessing the largest class (50.0)" in outcome.diverged
        assert not run(recipe, encoder, TASK, judge=False).diverged


def test_collapse_counts_the_largest_class(encoder):
    """Three quarters of one class: a model that says only that class is right three times in four."""
    rows = TASK.split("train")
    labels = [0] * 18 + [1] * 6
    uneven = replace(TASK, splits={"train": Split(rows.texts, None, labels, rows.ids)})
    outcome = run("train(epochs=1, batch=24, lr=1e-9)", encoder, uneven)
    assert "largest class (75.0)" in outcome.diverged


# How long, in what batches.


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"), [(0.5, 4, 3), (0.01, 24, 1), (2.5, 8, 8), (1, 7, 4), (1, 100, 1)]
)
def test_fractional_epochs(encoder, epochs, batch, steps):
    assert run(f"train(epochs={epochs}, batch={batch})", encoder, TASK, judge=False).steps == steps


def test_every_example_is_seen_once_an_epoch():
    ids, offsets = np.arange(276) % 100, np.cumsum(np.arange(24))
    stream = Stream({"student": Tokens(ids, ids % 2, offsets)}, np.arange(23) % 2, "classify")
    plan = loop._Plan(stream, Layout(False, 64), 5, 3, SimpleNamespace(process_index=0, num_processes=1))
    assert plan.steps_per_epoch == 5
    orders = [np.concatenate(plan.epoch(number)).tolist() for number in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(23)) and orders[0] != orders[1]


@pytest.mark.parametrize("kin", ["bert", "roberta", "albert", "modernbert", "distilbert"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_padded_give_the_same_loss_and_gradients(kind, kin):
    task = toy_task(kind, 24)
    found = []
    for packed in (False, True):
        phase = phase_of("head | train(dropout=0.0)", small(kin), task)
        phase.encoder.eval()
        batch = batch_of(phase.encoder, task, range(12), packed=packed, slots=12 + 3 * packed)
        units = torch.tensor(float((batch.labels != -100).sum() if kind == "tag" else 12))
        loss = phase.loss({"student": replace(batch, count=units)})
        loss.backward()
        found.append((loss, {n: p.grad for n, p in phase.encoder.named_parameters() if p.grad is not None}))
    (padded, one), (packed, other) = found
    torch.testing.assert_close(packed, padded, atol=1e-6, rtol=1e-5)
    assert one.keys() == other.keys() and float(padded.detach()) > 0.01
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-3)


def test_packed_training_runs_on_a_cpu_and_says_so(encoder):
    settings = "train(epochs=3, batch=24, lr=0.003, dropout=0.0, layout={!r})"
    (one, packed), (other, padded) = (
        trajectory(settings.format(layout), encoder, TASK, judge=False) for layout in ("packed", "padded")
    )
    assert packed.packed and not padded.packed
    assert any(note.startswith("packed batches") for note in packed.notes)
    assert one == pytest.approx(other, abs=2e-3) and one[-1] < one[0]
    refused = run("train(epochs=1, layout='packed')", small("mpnet"), TASK, judge=False)
    assert not refused.packed and "mpnet attention cannot be packed: length buckets instead" in refused.notes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_a_batch_add_up_to_the_whole(kind, world, packed):
    """Losses of all processes add up to the loss of one that has the whole batch, to the last batch of one example."""
    task = toy_task(kind, 25)
    phase = phase_of("distill(alpha=0.5) + train", run("head", small(), task).encoder, task)
    phase.encoder.eval()
    torch.nn.init.normal_(phase.encoder.head.out.weight)  # so that there is something to learn from the teacher
    layout = Layout(packed, 64, grain=32)
    plans = {
        (rank, size): loop._Plan(phase.stream, layout, 8, 1, SimpleNamespace(process_index=rank, num_processes=size))
        for size in (1, world)
        for rank in range(size)
    }
    for step in range(4):
        with torch.no_grad():
            whole = phase.loss(plans[0, 1].batches(step, phase.device))
            parts = [phase.loss(plans[rank, world].batches(step, phase.device)) for rank in range(world)]
        torch.testing.assert_close(torch.stack(parts).sum(), whole, atol=1e-6, rtol=1e-5)
    batches = [plans[rank, world].batches(step, phase.device)["student"] for step in range(4) for rank in range(world)]
    last = min(
        range(4), key=lambda step: sum(float(b.present.sum()) for b in batches[step * world : (step + 1) * world])
    )
    present = [float(batch.present.sum()) for batch in batches[last * world : (last + 1) * world]]
    assert present == [1.0] + [0.0] * (world - 1) and not batches[last * world + 1].tokens().any()


def test_penalties_count_once_over_all_processes(encoder):
    phase = phase_of("train", encoder, TASK)
    step = phase.look_at({"student": batch_of(encoder, TASK)})
    phase.world = 4
    assert float(step.penalty(torch.tensor(2.0))) == 0.5


# Dials, dropout, lengths.


def test_dials(encoder):
    phase = phase_of("train", encoder, TASK)
    dial = phase.dial("depth", 3.0)
    phase.total = 7
    for phase.step in range(8):
        phase.set_dials()
        assert float(dial) == 3.0
    with pytest.raises(UserError, match="'depth'"):
        phase.dial("depth", 4.0)


def test_no_dropout_means_none_at_all(family):
    given = run("mix_layers", small(family), TASK).encoder
    rates = [(n, m.p) for n, m in given.named_modules() if isinstance(m, nn.Dropout)]
    batch = batch_of(given, TASK)
    with other_dropout(given, 0.0), torch.no_grad():
        torch.testing.assert_close(given.train()(batch), scores_of(given, TASK), atol=1e-7, rtol=1e-5)
    with other_dropout(given, None), torch.no_grad():
        assert family == "modernbert" or not torch.equal(given.train()(batch), scores_of(given, TASK))
    assert rates == [(n, m.p) for n, m in given.named_modules() if isinstance(m, nn.Dropout)]


def test_a_rate_that_a_config_has_as_a_whole_number_is_a_rate():
    given = small("albert", hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    with other_dropout(given, 0.37):
        assert {module.p for module in given.modules() if isinstance(module, nn.Dropout)} == {0.37}


def test_texts_longer_than_the_model_are_cut_and_counted(encoder):
    long = " ".join(["great", *["film"] * 200])
    split = Split([long, "bad film", "good film", "a dull plot"], None, [1, 0, 1, 0], list("abcd"))
    task = replace(TASK, length=500, splits={"train": split, "dev": split})
    outcome = run("train(epochs=1)", encoder, task, judge=False)
    assert "1 of 4 texts were cut at 72 tokens" in outcome.notes
    found = evaluate(outcome.encoder, task)
    assert len(found["predictions"]) == 4 and found["notes"] == ["1 of 4 texts were cut at 72 tokens"]
    assert evaluate(outcome.encoder, task, length=16)["notes"] == ["1 of 4 texts were cut at 16 tokens"]
    with pytest.raises(UserError, match="at most 72"):
        run("train", encoder, task, length=73)
    roberta = run("train(epochs=1)", small("roberta"), task, judge=False)
    assert "1 of 4 texts were cut at 71 tokens" in roberta.notes  # its positions count from 1


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("special", [False, True], ids=["special as they are", "special split"])
@pytest.mark.parametrize("kind", ["classify", "pairs", "tag"])
def test_tokens_are_those_that_transformers_gives(encoder, kind, special, side):
    tokenizer = encoder.tokenizer
    tokenizer.truncation_side, tokenizer.split_special_tokens = side, special
    tokenizer.backend_tokenizer.enable_padding(length=20)  # somebody asked it for something else before
    texts = ["a great film [SEP] a dull one", "bad", "a dull plot a great film a good one", ""]
    read = [text.split() for text in texts] if kind == "tag" else texts
    pairs = [*texts[1:], texts[0]] if kind == "pairs" else None
    labels = [[0] * len(words) for words in read] if kind == "tag" else [0] * 4
    made = tokenise(tokenizer, Split(read, pairs, labels, list("abcd")), "tag" if kind == "tag" else "classify", 8)
    asked = {"is_split_into_words": kind == "tag", "truncation": True, "max_length": 8, "return_token_type_ids": True}
    wanted, tokens = tokenizer(read, pairs, **asked), made.views[STUDENT]
    assert [tokens.ids[begin:end].tolist() for begin, end in pairwise(tokens.offsets)] == wanted["input_ids"]
    assert tokens.types.tolist() == list(chain(*wanted["token_type_ids"]))
    assert made.cut == sum(bool(one.overflowing) for one in wanted.encodings) > 0
    if kind == "tag":
        firsts = [
            [i for i, word in enumerate(row) if word is not None and word != row[i - 1]]
            for row in map(wanted.word_ids, range(4))
        ]
        begun = tokens.words >= 0
        assert [np.flatnonzero(begun[begin:end]).tolist() for begin, end in pairwise(tokens.offsets)] == firsts


def test_many_texts_keep_their_places_and_those_that_fit_are_not_cut(encoder):
    texts = [f"film {'good ' * (number % 5)}" for number in range(2 * 4096 + 3)]
    made = tokenise(encoder.tokenizer, Split(texts, None, [0] * len(texts), [""] * len(texts)), "classify", 7)
    assert made.views[STUDENT].lengths.tolist() == [3 + number % 5 for number in range(len(texts))] and made.cut == 0


def test_what_a_phase_adds_to_its_texts_is_gone_with_it(encoder):
    shared, seen = {}, []

    def look(phase, *rest, **options):
        seen.append(dict(phase.stream.views))
        phase.stream.views["other"] = None

    with patch("smallbert.making.run.train", look):
        run("train(epochs=1) | train(epochs=1)", encoder, TASK, judge=False, streams=shared)
    assert [list(views) for views in seen] == [[STUDENT]] * 2


# What is missing is said in one sentence.


def test_training_needs_a_task_a_tokenizer_and_a_head(encoder):
    for recipe in ("finetune", "head", "magnitude", "distill"):
        with pytest.raises(UserError, match="task"):
            run(recipe, small())
    mute = encoder.copy()
    mute.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        run("finetune", mute, TASK)
    with pytest.raises(UserError, match="no task head"):
        small().head  # noqa: B018


def test_a_head_named_late_does_not_leave_the_first_phase_without(tmp_path):
    outcome = run(f"{WHOLE} | head(pool='mean') | {WHOLE}", small(), TASK, judge=False)
    assert [entry["step"].split("(")[0] for entry in outcome.encoder.history] == ["head", "train", "head", "train"]
    assert outcome.encoder.head.pool == "mean"
    once = run(f"head(pool='mean') | {WHOLE}", small(), TASK, judge=False).encoder
    assert [entry["step"].split("(")[0] for entry in once.history] == ["head", "train"]


def test_a_head_for_other_classes_is_not_taken_for_this_task(encoder):
    turned = run("quantize(8)", encoder, replace(TASK, labels=("good", "bad"))).encoder  # the same, put in order
    assert turned.head.labels == ["good", "bad"] and torch.equal(turned.head.out.bias, encoder.head.out.bias.flip(0))
    other = replace(TASK, labels=("gloom", "cheer"))
    result = run(WHOLE, encoder, other, judge=False).encoder
    assert result.head.labels == ["gloom", "cheer"] and encoder.head.labels == ["bad", "good"]
    with pytest.raises(UserError, match=r"trained yet \(the classes that the model came with, bad, good, are not the"):
        run("distill", encoder, other)
    nameless = encoder.copy()
    nameless.head.labels = ["LABEL_0", "LABEL_1"]
    assert run(WHOLE, nameless, other, judge=False).encoder.history[:1] == nameless.history[:1]
    assert not is_same_state(result, encoder)


def test_weights_are_rounded_together_and_gradients_come_back_whole():
    weights = {name: torch.randn(3, 4, requires_grad=name != "frozen") for name in ("a", "b", "frozen", "unused")}
    weights["count"] = torch.tensor([1, 2])
    made = round_weights(weights)
    assert made["count"] is weights["count"] and not made["frozen"].requires_grad
    for name in ("a", "b", "frozen"):
        assert made[name].dtype == torch.bfloat16 and torch.equal(made[name], weights[name].bfloat16())
    (made["a"] * made["b"] * made["frozen"]).float().sum().backward()
    product = weights["b"].detach().bfloat16() * weights["frozen"].bfloat16()
    assert weights["a"].grad.dtype == torch.float32 and weights["unused"].grad is None
    torch.testing.assert_close(weights["a"].grad, product.float(), atol=0, rtol=1e-2)


def test_half_precision_trains_every_family(family, monkeypatch):
    """What a GPU does, on a CPU: the same steps with rounded weights end close to those without."""
    monkeypatch.setattr(loop.torch, "autocast", lambda *_, **__: nullcontext())
    recipe = "mix_layers | movement(0.5) + train(epochs=1, batch=8, lr=0.003, dropout=0.0)"
    whole = run(recipe, small(family), TASK).encoder
    monkeypatch.setattr(Phase, "half", property(lambda phase: True))
    half = run(recipe, small(family), TASK).encoder
    assert all(one.dtype == torch.float32 for one in half.parameters())
    near, far = scores_of(half, TASK), scores_of(run("head", small(family), TASK).encoder, TASK)
    there = scores_of(whole, TASK)
    assert not torch.equal(near, there) and (near - there).norm() < 0.3 * (far - there).norm()


def test_whether_layers_are_compiled_does_not_change_when_a_phase_goes_on(encoder, monkeypatch, tmp_path):
    assert pays_to_compile(None, COMPILE_PAYS) and not pays_to_compile(None, COMPILE_PAYS - 1)
    assert pays_to_compile(True, 1) and not pays_to_compile(False, COMPILE_PAYS)
    phase, asked = phase_of("train(epochs=3, batch=8, lr=0.003)", encoder, TASK), []
    monkeypatch.setattr(
        loop, "load_checkpoint", lambda phase, work, key: setattr(phase, "step", phase.total - 1) or True
    )
    monkeypatch.setattr(loop, "pays_to_compile", lambda setting, total: bool(asked.append((setting, total))))
    loop.train(phase, lambda *_: None, tmp_path)
    assert asked == [(None, 9)] and phase.step == 9
