"""Pruning methods against closed forms and references written by hand."""

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn import functional
from toys import batch_of, is_same_state, phase_of, run, scores_of, small, state_of, toy_task

from smallbert.errors import UserError
from smallbert.methods import METHODS
from smallbert.methods.l0 import BETA, HIGH, LOW, SHIFT, _Gated
from smallbert.methods.rpp import shrink
from smallbert.methods.second_order import add_gradient, correction, in_blocks, start_inverse
from smallbert.model.folders import load_folder, save_folder
from smallbert.recipe import Recipe
from smallbert.training import loop
from smallbert.training.loop import take_step
from smallbert.training.masks import Stacks, kept_stacks, maskable, ranks
from smallbert.training.schedule import Schedule

TASK = toy_task("classify", 24)
WHOLE = "train(epochs=4, batch=24, lr=0.003, warmup=0.0, dropout=0.0)"  # four steps of one batch that holds everything
SIX = "train(epochs=2, batch=8, lr=0.003)"  # six steps
CURVED = "second_order(0.3, events=3, gradients=6, block=10, examples=4, damp=1e-4)"


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK).encoder


@pytest.fixture(scope="module")
def trained(encoder):
    return run("train(epochs=3, batch=8, lr=0.003)", encoder, TASK, judge=False).encoder


def everything(encoder: Any) -> dict[str, Any]:
    return {"student": batch_of(encoder, TASK, range(24), "train")}


def by_name(phase: Any, label: str, names: list[str]) -> dict[str, torch.Tensor]:
    """The scores of each weight, in its shape."""
    return Stacks(phase.encoder, names).rows([stack.detach() for stack in phase.modules[label]])


def density(encoder: Any, names: list[str]) -> float:
    weights = [encoder.get_parameter(name) for name in names]
    return sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


# Schedules.


def test_the_cubic_way_of_the_papers_at_named_times():
    """SST-2, 25 epochs, one of warm-up at each end: half the weights are left at epoch 6.5, 20 % at 12.9."""
    sst2 = Schedule(1.0, 0.1, 1 / 25, 24 / 25, "cubic")
    assert [sst2.at(epoch / 25) for epoch in (0, 1, 6.5, 10.1, 12.9, 24, 25)] == pytest.approx(
        [1.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1], abs=0.005
    )
    steps, first, last, total = 3 * 2100, 2100, 2100, 25 * 2105  # schedule_threshold's own formula, in steps
    wanted = 0.1 + 0.9 * (1 - (steps - first) / (total - first - last)) ** 3
    assert Schedule(1.0, 0.1, first / total, 1 - last / total, "cubic").at(steps / total) == pytest.approx(wanted)


def test_a_drop_and_stairs_for_well_tuned_magnitude_pruning(encoder):
    way = METHODS["magnitude"](0.1, begin=0.2, finish=0.8, first=0.4, stairs=3).schedule()
    steps = [0.4, 0.1 + 0.3 * (2 / 3) ** 3, 0.1 + 0.3 * (1 / 3) ** 3, 0.1]
    assert [way.at(x) for x in (0.0, 0.19, 0.2, 0.39, 0.4, 0.59, 0.6, 0.8, 1.0)] == pytest.approx(
        [1.0, 1.0, steps[0], steps[0], steps[1], steps[1], steps[2], steps[3], steps[3]]
    )
    assert METHODS["magnitude"](0.1).schedule() == Schedule(1.0, 0.1, 0.1, 0.7, "cubic")
    assert METHODS["magnitude"](0.6, first=0.3).schedule().at(0.5) == 0.6
    phase = phase_of(f"magnitude(0.1, begin=0.2, finish=0.8, first=0.4, stairs=3) + {WHOLE}", encoder, TASK)
    for phase.step, share in ((1, 1.0), (2, 0.4), (3, 0.4), (4, steps[1]), (10, 0.1)):
        phase.set_dials()
        for weight in phase.weights().values():
            assert int(weight.count_nonzero()) == round(share * weight.numel())


# Soft movement.


def test_soft_movement_masks_and_gradients(encoder):
    phase = phase_of(f"soft_movement(pull=7.0, threshold=0.2, begin=0.0, finish=0.5) + {WHOLE}", encoder, TASK)
    names = maskable(encoder)
    for stack in phase.modules["soft_movement"]:
        assert not stack.any()
        torch.nn.init.normal_(stack, std=2.0)
    phase.encoder.eval()
    for phase.step, part in ((0, 0.0), (2, 1 - 0.6**3), (5, 1.0), (10, 1.0)):
        phase.set_dials()
        tau, pull = 0.2 * part, 7.0 * part  # the pull grows as the threshold does
        assert float(phase._weight("soft_movement")) == pytest.approx(pull)
        phase.modules.zero_grad()
        loss = phase.loss(everything(encoder))
        loss.backward()
        scores = by_name(phase, "soft_movement", names)
        slopes = Stacks(phase.encoder, names).rows([stack.grad for stack in phase.modules["soft_movement"]])
        leaves = {
            name: (encoder.get_parameter(name).detach() * (torch.sigmoid(scores[name]) > tau)).requires_grad_(True)
            for name in names
        }
        batch = everything(encoder)["student"]
        task = functional.cross_entropy(functional_call(encoder, leaves, (batch,)), batch.labels)
        shares = {name: torch.sigmoid(one) for name, one in scores.items()}
        torch.testing.assert_close(loss, task + pull * sum(one.mean() for one in shares.values()) / len(names))
        for name, slope in zip(names, torch.autograd.grad(task, list(leaves.values())), strict=True):
            weight, share = encoder.get_parameter(name).detach(), shares[name]
            through = pull * share * (1 - share) / share.numel() / len(names)  # small and large matrices count alike
            torch.testing.assert_close(slopes[name], weight * slope + through, atol=1e-7, rtol=1e-4)


def test_soft_movement_keeps_a_floor_and_notes_the_density(encoder):
    phase = phase_of(f"soft_movement + {WHOLE}", encoder, TASK)
    phase.set_dials(1.0)
    assert math.log(0.1 / 0.9) == pytest.approx(-2.197, abs=1e-3)
    for stack in phase.modules["soft_movement"]:
        torch.nn.init.normal_(stack, mean=-30.0)
    for weight in phase.weights().values():
        assert int(weight.count_nonzero()) == int(0.005 * weight.numel()) + 1
    for stack in phase.modules["soft_movement"]:
        stack.data[:] = -2.197225  # just above log(0.1 / 0.9) = -2.1972246 … is kept, just below is not
        stack.data[:, 1:] = -2.197224
        stack.data[:, 2:6] = -2.2
    assert {int((weight == 0).sum()) for weight in phase.weights().values()} == {5}
    outcome = run(f"soft_movement(pull=0.01, lr=2.0, begin=0.0) + {WHOLE}", encoder, TASK, judge=False)
    left = density(outcome.encoder, maskable(encoder))
    assert 0.2 < left < 0.98 and any(
        note.startswith(f"{left:.2%} of the 4,096 layer weights") for note in outcome.notes
    )
    assert len(outcome.encoder.held("zeros")) == 12


# L0.


def test_hard_concrete_constants():
    assert pytest.approx(1.599, abs=1e-3) == SHIFT and (BETA, LOW, HIGH) == (2 / 3, -0.1, 1.1)
    use = lambda score: float(_Gated.apply(torch.tensor([[score]]), False, torch.ones(1))[0])  # noqa: E731
    assert use(2.197) == pytest.approx(1.2 * 0.9 - 0.1, abs=1e-4)  # 0.98
    edge = math.log((1 / 12) / (11 / 12))
    assert edge == pytest.approx(-2.398, abs=1e-3)
    assert use(edge - 1e-3) == 0 < use(edge + 1e-3) < 1e-3 and use(-edge + 1e-3) == 1 > use(-edge - 1e-3)
    assert METHODS["l0"]().start == pytest.approx(math.log(9), abs=1e-3) and METHODS["l0"]().lr == 0.1


@pytest.mark.parametrize("open_", [0.005, 0.3, 0.995])  # the tails are where every mask is shut, or open
def test_masks_are_open_as_often_as_the_penalty_says(open_):
    torch.manual_seed(0)
    score = math.log(open_ / (1 - open_)) - SHIFT
    (masks,) = _Gated.apply(torch.full((1, 400_000), score), True, torch.ones(400_000))
    spread = 4 * math.sqrt(open_ * (1 - open_) / 400_000) + 1e-4  # draws keep 1e-4 away from both ends
    assert float((masks > 0).float().mean()) == pytest.approx(open_, abs=spread)
    # By symmetry a mask is whole as often as one of the opposite score is shut.
    assert float((masks == 1).float().mean()) == pytest.approx(1 / (1 + math.exp(SHIFT - score)), abs=spread + 2e-3)
    assert 0 <= float(masks.min()) and float(masks.max()) <= 1


@pytest.mark.parametrize("training", [True, False])
def test_gradients_through_hard_concrete_masks(training):
    torch.manual_seed(1)
    scores, weights = torch.randn(2, 12, requires_grad=True), [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    slopes = [torch.randn(3, 4) for _ in range(2)]
    torch.manual_seed(7)
    seen = _Gated.apply(scores, training, *weights)
    found = torch.autograd.grad(seen, [scores, *weights], slopes)
    torch.manual_seed(7)
    draw = torch.empty(2, 12).uniform_(1e-4, 1 - 1e-4)
    inner = (draw.log() - (1 - draw).log() + scores) / BETA if training else scores
    masks = (torch.sigmoid(inner) * 1.2 - 0.1).clamp(0, 1)
    wanted = [weight * mask.view(3, 4) for weight, mask in zip(weights, masks, strict=True)]
    for mine, theirs in zip(seen, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(found, torch.autograd.grad(wanted, [scores, *weights], slopes), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_l0_draws_in_training_only_and_folds_fractions(encoder):
    phase = phase_of(f"l0(pull=3.0, start=0.5) + {WHOLE}", encoder, TASK)
    phase.begin_training()
    one, other = phase.weights(), phase.weights()
    assert not any(torch.equal(one[name], other[name]) for name in one)
    phase.encoder.eval()
    step = phase.look_at(everything(encoder))
    (method,) = (method for method in phase.methods if method.name == "l0")
    wanted = torch.sigmoid(torch.tensor(0.5 + SHIFT))
    torch.testing.assert_close(method.loss(step)["l0"], wanted)
    assert float(phase._weight("l0")) == 3.0
    phase.fold()
    mask = 1.2 / (1 + math.exp(-0.5)) - 0.1
    for name in maskable(encoder):
        torch.testing.assert_close(phase.encoder.get_parameter(name), encoder.get_parameter(name) * mask)


# Everything that is seen is what is written.

MASKED = ["magnitude(0.3)", "movement(0.3)", "movement(0.3, scope='global')", "soft_movement", "l0", CURVED]


@pytest.mark.parametrize("method", MASKED)
@pytest.mark.parametrize("what", ["layers", "layers+pooler+embeddings"])
def test_masked_outputs_equal_folded_ones(encoder, method, what):
    method = f"{method[:-1]}, what={what!r})" if method.endswith(")") else f"{method}(what={what!r})"
    phase = phase_of(f"{method} + {WHOLE}", encoder, TASK)
    torch.manual_seed(3)
    for one in phase.modules.parameters():
        if one.dtype == torch.bool:
            one.data.copy_(torch.rand(one.shape) < 0.3)
        else:
            torch.nn.init.normal_(one, std=3.0)
    phase.set_dials(1.0)
    phase.encoder.eval()
    with torch.no_grad():
        seen = phase.look_at(everything(encoder)).scores
        phase.fold()
        folded = phase.encoder(everything(encoder)["student"])
        whole = encoder(everything(encoder)["student"])
    assert torch.equal(seen, folded) and not torch.equal(seen, whole)
    assert 0.1 < density(phase.encoder, maskable(encoder, what)) < 0.9


COUNTED = [
    "magnitude(0.37, first=0.6, stairs=2)",
    "movement(0.37, init='magnitude')",
    "movement(0.37, train_weights=False)",
    "smooth_movement(0.37, window=2, finish=1.0, scope='local')",
    CURVED.replace("0.3", "0.37", 1).replace(")", ", scope='local')"),
    "prune(0.37, scope='local')",
    "prune(0.37, scope='local', by='random')",
]


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("method", COUNTED)
def test_exactly_the_share_is_kept(method, scope):
    given = run("head", small(hidden_size=15, num_attention_heads=3, intermediate_size=31), TASK).encoder
    method = method.replace("'local'", repr(scope)) if "scope" in method else f"{method[:-1]}, scope={scope!r})"
    outcome = run(f"{method} + {SIX}", given, TASK, judge=False)
    left = {name: int(outcome.encoder.get_parameter(name).count_nonzero()) for name in maskable(given)}
    sizes = {name: given.get_parameter(name).numel() for name in left}
    assert set(sizes.values()) == {225, 465}
    if scope == "local":
        assert left == {name: round(0.37 * size) for name, size in sizes.items()}
    else:
        assert sum(left.values()) == round(0.37 * sum(sizes.values())) and len(set(left.values())) > 2
    share = f"{sum(left.values()) / sum(sizes.values()):.2%} of the {sum(sizes.values()):,} layer weights are left"
    assert any(note.startswith(share) for note in outcome.notes)
    later = run(SIX, outcome.encoder, TASK, judge=False).encoder  # and the zeros are held
    assert all(torch.equal(later.get_parameter(n) == 0, outcome.encoder.get_parameter(n) == 0) for n in left)


def test_what_is_masked(encoder):
    layers = maskable(encoder)
    words, pooler = "backbone.embeddings.word_embeddings.weight", "heads.task.dense.weight"
    assert maskable(encoder, "layers+pooler+embeddings") == [*layers, pooler, words]
    assert maskable(encoder, "layers+embeddings") == [*layers, words]
    assert maskable(small(), "layers+pooler") == [*layers, "pooler.weight"]
    plain = run("head", small("roberta"), TASK).encoder  # its head's dense layer is new: there is nothing to prune by
    assert maskable(plain, "layers+pooler") == maskable(plain)
    outcome = run("prune(0.4, what='layers+embeddings', scope='local')", encoder, TASK)
    for name in (*layers, words):
        weight = outcome.encoder.get_parameter(name)
        assert int(weight.count_nonzero()) == round(0.4 * weight.numel())
    assert torch.equal(outcome.encoder.get_parameter(pooler), encoder.get_parameter(pooler))
    numbers = sum(encoder.get_parameter(name).numel() for name in (*layers, words))
    whole = sum(parameter.numel() for parameter in encoder.parameters())
    left = sum(round(0.4 * encoder.get_parameter(name).numel()) for name in (*layers, words))
    assert outcome.notes == [
        f"{left / numbers:.2%} of the {numbers:,} layers+embeddings weights are left, "
        f"{(whole - numbers + left) / whole:.2%} of all {whole:,} parameters"
    ]


# Movement: where scores start, masks alone, a teacher beside.


def test_ranks():
    rows = [torch.tensor([[0.1, 0.4, 0.2, 0.9]]), torch.tensor([[0.3, 0.0], [0.5, 0.6]])]
    assert [one.tolist() for one in ranks(rows, "local")] == [[[0.0, 0.5, 0.25, 0.75]], [[0.5, 0.0], [0.0, 0.5]]]
    overall = torch.cat([one.flatten() for one in ranks(rows, "global")])
    assert overall.tolist() == [1 / 8, 4 / 8, 2 / 8, 7 / 8, 3 / 8, 0.0, 5 / 8, 6 / 8]


@pytest.mark.parametrize("scope", ["local", "global"])
def test_scores_may_start_at_magnitudes(encoder, scope):
    settings = "train(epochs=3, batch=8, lr=0.003)"
    phase = phase_of(f"movement(0.3, scope={scope!r}, init='magnitude', lr=0.02) + {settings}", encoder, TASK)
    names = maskable(encoder)
    scores = by_name(phase, "movement", names)
    assert 0.9 * 0.02 * 3 < max(float(one.max()) for one in scores.values()) < 0.02 * 3  # three steps an epoch
    phase.set_dials(1.0)
    pruned = run(f"prune(0.3, scope={scope!r})", encoder, TASK).encoder  # at first, what magnitude would keep
    for name, weight in phase.weights().items():
        assert torch.equal(weight, pruned.get_parameter(name))


@pytest.mark.parametrize("init", ["zeros", "magnitude"])
def test_scores_may_be_forgotten_when_the_ramp_begins(encoder, init):
    recipe = f"movement(0.3, init={init!r}, fresh=True, begin=0.5, lr=0.1) + {SIX}"
    seen: list[Any] = []
    real = METHODS["movement"].look

    def look(self: Any, phase: Any) -> None:
        before = [stack.detach().clone() for stack in phase.modules["movement"]]
        real(self, phase)
        state = [phase.optimiser.state[stack] for stack in phase.modules["movement"]]
        moments = [float(one.abs().max()) for each in state for one in each.values()]
        start = METHODS["movement"]._start(self, phase, Stacks(phase.encoder, maskable(phase.encoder)))
        now = [stack.detach().clone() for stack in phase.modules["movement"]]
        anew = all(torch.equal(one, first) for one, first in zip(now, start, strict=True)) and max(moments) == 0
        seen.append((phase.step, anew, all(torch.equal(a, b) for a, b in zip(before, now, strict=True))))

    with patch.object(METHODS["movement"], "look", look):
        fresh = run(recipe, encoder, TASK, judge=False).encoder
    assert [(step, anew) for step, anew, _ in seen] == [(step, step == 3) for step in range(1, 7)]
    assert [same for _, _, same in seen] == [step != 3 for step in range(1, 7)]
    assert not is_same_state(
        fresh, run(recipe.replace("fresh=True", "fresh=False"), encoder, TASK, judge=False).encoder
    )


@pytest.mark.parametrize(
    "method", ["movement(0.3)", "soft_movement(pull=0.1, lr=2.0, begin=0.0)", "l0(pull=0.001, lr=4.0)"]
)
def test_masks_alone_may_be_trained(encoder, method):
    method = method.replace(")", ", train_weights=False)")
    given = run("mix_layers", encoder, TASK).encoder
    result = run(f"{method} + {SIX}", given, TASK, judge=False).encoder
    names = set(maskable(given))
    for name, tensor in state_of(given).items():
        mine = result.state_dict()[name]
        if name in names:
            assert (mine == 0).any() and not torch.equal(mine, tensor)
            if "l0" not in method:
                assert torch.equal(mine, tensor * (mine != 0))
        else:  # biases, norms and embeddings stay, the head and the mixture learn
            assert torch.equal(mine, tensor) == name.startswith("backbone.")
    assert all(parameter.requires_grad for parameter in result.parameters())


def test_movement_with_a_teacher_equals_one_written_by_hand(trained):
    settings = "train(epochs=6, batch=24, lr=0.003, warmup=0.2, dropout=0.0, weight_decay=0.1, clip=0.5)"
    recipe = f"prune(0.8) | movement(0.3, begin=0.2, finish=0.8) + distill(alpha=0.7, temperature=3.0) + {settings}"
    result = run(recipe, trained, TASK, judge=False).encoder
    mine, names = run("prune(0.8)", trained, TASK).encoder, maskable(trained)
    held = {name: mine.get_parameter(name) != 0 for name in names}
    scores = {name: torch.zeros_like(mine.get_parameter(name), requires_grad=True) for name in names}
    groups = [
        {"params": [p for p in mine.parameters() if p.dim() > 1], "weight_decay": 0.1, "base": 0.003},
        {"params": [p for p in mine.parameters() if p.dim() < 2], "weight_decay": 0.0, "base": 0.003},
        {"params": list(scores.values()), "weight_decay": 0.0, "base": 0.01},
    ]
    optimiser, batch = torch.optim.AdamW(groups, fused=True), batch_of(mine, TASK, range(24), "train")
    with torch.no_grad():
        taught = functional.softmax(trained.eval()(batch) / 3.0, -1)

    def masks(progress: float) -> dict[str, torch.Tensor]:
        keep = 0.3 + 0.7 * (1 - min(max((progress - 0.2) / 0.6, 0.0), 1.0)) ** 3
        cut = {
            n: s.detach().flatten().sort(descending=True).values[round(keep * s.numel()) - 1] for n, s in scores.items()
        }
        return {name: one.detach() >= cut[name] for name, one in scores.items()}

    for step in range(6):
        now = masks(step / 6)
        leaves = {n: (mine.get_parameter(n).detach() * now[n] * held[n]).requires_grad_(True) for n in names}
        optimiser.zero_grad()
        logits = functional_call(mine.eval(), leaves, (batch,))
        soft = functional.kl_div(functional.log_softmax(logits / 3.0, -1), taught, reduction="batchmean") * 9.0
        (0.7 * soft + 0.3 * functional.cross_entropy(logits, batch.labels)).backward()
        for name, leaf in leaves.items():  # what is held comes last, so that its zeros shield scores and weights alike
            scores[name].grad = mine.get_parameter(name).detach() * leaf.grad * held[name]
            mine.get_parameter(name).grad = now[name] * held[name] * leaf.grad
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.5)
        done = (step + 1) / 7
        for group in optimiser.param_groups:
            group["lr"] = group["base"] * (done / 0.2 if done < 0.2 else (1 - done) / 0.8)
        optimiser.step()
    final = masks(1.0)
    for name, tensor in state_of(mine).items():
        if not name.endswith(
            "key.bias"
        ):  # softmax does not see it: its gradient is rounding noise, which Adam blows up
            wanted = tensor * final[name] * held[name] if name in final else tensor
            torch.testing.assert_close(result.state_dict()[name], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kin", ["bert", "albert", "modernbert"])
def test_what_is_masked_is_what_the_file_holds(kin, tmp_path):
    """Nothing is drawn anew between loading a model and masking it."""
    save_folder(run("head", small(kin), TASK).encoder, tmp_path / "model")
    (stem,) = {"bert": ["bert."], "albert": ["albert."], "modernbert": ["model."]}[kin]
    filed = load_file(tmp_path / "model" / "model.safetensors")
    phase = phase_of(f"movement(0.3) + {WHOLE}", load_folder(tmp_path / "model"), TASK)
    seen = phase.weights()  # at the first step everything is seen
    assert len(seen) == len(maskable(phase.encoder)) > 3
    for name, weight in seen.items():
        assert torch.equal(weight, filed[stem + name.removeprefix("backbone.")])


# Smoothed importance.


def test_smooth_movement_follows_the_formula(encoder):
    recipe = f"smooth_movement(0.25, window=2, smooth=0.8, smooth_uncertainty=0.9, begin=0.0, finish=1.0) + {SIX}"
    products: list[dict[str, np.ndarray]] = []
    found: list[dict[str, np.ndarray]] = []
    method, names = METHODS["smooth_movement"], maskable(encoder)
    real_step, real_look, real_settle = method.after_step, method.look, method.settle

    def after_step(self: Any, phase: Any) -> None:
        parameters = {name: phase.encoder.get_parameter(name) for name in names}
        products.append({name: (one.detach() * one.grad).abs().numpy().copy() for name, one in parameters.items()})
        real_step(self, phase)

    def scores(phase: Any) -> dict[str, np.ndarray]:
        parts = [kept_stacks(phase, "smooth_movement", key) for key in ("importance", "uncertainty")]
        whole = Stacks(phase.encoder, names).rows([a * b for a, b in zip(*parts, strict=True)])
        return {name: one.numpy().copy() for name, one in whole.items()}

    def look(self: Any, phase: Any) -> None:
        real_look(self, phase)
        found.append(scores(phase))

    def settle(self: Any, phase: Any) -> None:
        real_settle(self, phase)
        found.append(scores(phase))

    with patch.multiple(method, after_step=after_step, look=look, settle=settle):
        result = run(recipe, encoder, TASK, judge=False).encoder
    assert len(products) == 6 and len(found) == 4
    importance, uncertainty = ({name: np.zeros(products[0][name].shape) for name in names} for _ in range(2))
    for number in range(3):
        for name in names:
            window = (products[2 * number][name].astype(float) + products[2 * number + 1][name]) / 2
            importance[name] = 0.8 * importance[name] + 0.2 * window
            uncertainty[name] = 0.9 * uncertainty[name] + 0.1 * np.abs(window - importance[name])
            np.testing.assert_allclose(found[number][name], importance[name] * uncertainty[name], rtol=1e-4, atol=1e-30)
    everything = np.concatenate([one.ravel() for one in found[-1].values()])
    cut = np.sort(everything)[-round(0.25 * everything.size)]
    for name in names:
        assert np.array_equal(result.get_parameter(name).detach().numpy() != 0, found[-1][name] >= cut)


def test_what_smooth_movement_zeroed_may_grow_back(encoder):
    """On the ramp zeros are written at the end of a window and train on; behind it they are written at every step."""
    phase = phase_of(f"smooth_movement(0.3, window=2, begin=0.0, finish=0.4, scope='local') + {WHOLE}", encoder, TASK)
    (method,) = (one for one in phase.methods if one.name == "smooth_movement")
    (name, *_), shares = maskable(encoder), []
    for phase.step in range(10):
        phase.set_dials()
        take_step(phase, everything(encoder))
        weight = phase.encoder.get_parameter(name)
        shares.append([density(phase.encoder, [name])])
        if phase.step % 2:
            method.look(phase)
            shares[-1].append(density(phase.encoder, [name]))
        assert weight.grad.count_nonzero() > 0.9 * weight.numel()  # gradients are not masked
    assert shares[0] == [1.0] and shares[1][0] == 1.0 and shares[1][1] < 1.0  # the first window has ended
    assert shares[2] == [1.0]  # grown back
    kept = [
        share[-1] for share in shares[5:]
    ]  # behind the ramp at every step; one that came back is still zero at first
    assert max(kept) == 77 / 256 and min(kept) > 0.27


def test_smooth_movement_wants_a_whole_window(encoder):
    with pytest.raises(UserError, match="has 6 steps, fewer than one window of 10"):
        run(f"smooth_movement + {SIX}", encoder, TASK)


# Second order.


def test_inverse_fisher_equals_an_explicit_inverse():
    torch.manual_seed(0)
    slopes = torch.randn(20, 3 * 4, dtype=torch.float64)
    slopes[:, 11] = 0.0  # a number that was filled in
    inverse = start_inverse(11, 4, 0.01).double()
    for slope in slopes:
        add_gradient(inverse, in_blocks(slope[:11], 4), 20)
    for number in range(3):
        part = slopes[:, 4 * number : 4 * number + 4]
        fisher = 0.01 * torch.eye(4, dtype=torch.float64) + part.T @ part / 20
        torch.testing.assert_close(inverse[number], fisher.inverse(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("gone", "update"), [([2], "each"), ([2], "joint"), ([0, 2, 3], "joint")])
def test_corrected_weights_are_the_least_costly(gone, update):
    """Of all moves d that bring the removed weights to zero, the one with the least d^T F d / 2."""
    torch.manual_seed(2)
    root = torch.randn(5, 5, dtype=torch.float64)
    fisher = root @ root.T + 0.1 * torch.eye(5, dtype=torch.float64)
    weight, mask = torch.randn(5, dtype=torch.float64), torch.zeros(5, dtype=torch.bool)
    mask[gone] = True
    move = correction(fisher.inverse()[None], weight[None], mask[None], update)[0]
    # The same by Lagrange's equations: [F, A^T; A, 0] [d; l] = [0; -w_gone].
    rows = torch.eye(5, dtype=torch.float64)[gone]
    system = torch.cat(
        [torch.cat([fisher, rows.T], 1), torch.cat([rows, torch.zeros(len(gone), len(gone))], 1).double()]
    )
    wanted = torch.linalg.solve(system, torch.cat([torch.zeros(5).double(), -weight[gone]]))[:5]
    torch.testing.assert_close(move, wanted)
    torch.testing.assert_close(move[gone], -weight[gone])
    if len(gone) == 1:  # its cost is the score
        cost = weight[2] ** 2 / (2 * fisher.inverse()[2, 2])
        torch.testing.assert_close(move @ fisher @ move / 2, cost)


@pytest.mark.parametrize("update", ["each", "joint", "none"])
def test_an_event_prunes_by_cost_and_corrects(trained, update):
    settings = f"gradients=5, block=7, examples=24, damp=1e-7, events=1, begin=0.0, finish=0.0, update={update!r}"
    phase = phase_of(f"second_order(0.4, scope='global', {settings}) + {WHOLE}", trained, TASK)
    (method,) = (one for one in phase.methods if one.name == "second_order")
    names, batch = maskable(trained), everything(trained)["student"]
    before = {name: trained.get_parameter(name).detach().clone() for name in names}
    phase.step = 1
    method.look(phase)
    # All examples are in each gradient, so that all gradients are one and F = damp I + g g^T.
    logits = functional_call(trained.eval(), {}, (batch,))
    slopes = torch.autograd.grad(
        functional.cross_entropy(logits, batch.labels), [trained.get_parameter(name) for name in names]
    )
    costs, inverses = {}, {}
    for name, slope in zip(names, slopes, strict=True):
        parts = in_blocks(slope.double(), 7)
        inverses[name] = (1e-7 * torch.eye(7) + parts[:, :, None] * parts[:, None, :]).inverse()
        spread = inverses[name].diagonal(dim1=1, dim2=2).flatten()[: slope.numel()].view_as(slope)
        costs[name] = before[name].double() ** 2 / (2 * spread)
    every = torch.cat([cost.flatten() for cost in costs.values()])
    cut = every.sort(descending=True).values[round(0.4 * len(every)) - 1]
    wrong, moved = 0, 0.0
    for name in names:
        weight, stays = phase.encoder.get_parameter(name).detach(), costs[name] >= cut
        wrong += int(((weight != 0) != stays).sum())
        stays = weight != 0
        moves = correction(inverses[name], in_blocks(before[name].double(), 7), in_blocks(~stays, 7), update)
        wanted = (before[name] + moves.flatten()[: weight.numel()].view_as(weight)) * stays
        torch.testing.assert_close(weight, wanted.float(), atol=1e-4, rtol=1e-3)
        moved = max(moved, float((weight - before[name] * stays).abs().max()))
    assert (moved == 0) if update == "none" else (moved > 0.01), moved
    assert wrong <= 4  # of 4096; rounding may swap two that cost alike
    assert density(phase.encoder, names) == pytest.approx(0.4, abs=1e-3)
    assert all(module.training for module in phase.encoder.modules())


def test_events_are_where_they_should_be(trained):
    method = METHODS["second_order"](0.1, begin=0.1, finish=0.9, events=5)
    due = {step: method._due(step, 100) for step in range(101)}
    assert [step for step, keep in due.items() if keep is not None] == [10, 30, 50, 70, 90]
    assert due[10] == pytest.approx(0.3) and due[90] == pytest.approx(0.1)
    assert due[50] == pytest.approx(0.1 + 0.2 * 0.5**3)
    assert METHODS["second_order"](0.1, events=1)._due(70, 100) == 0.1
    assert METHODS["second_order"](0.1, begin=0.0, finish=0.0)._due(1, 2) == 0.1  # several at once: the last counts
    said: list[Any] = []
    outcome = run(
        f"{CURVED.replace('gradients=6', 'gradients=16')} + watch(1) + {SIX}",
        trained,
        TASK,
        judge=False,
        say=lambda *what: said.append(what),
    )
    kept = [entry["value"]["kept"] for entry in outcome.traces["watch"]]
    assert [round(sum(one) / len(one), 2) for one in kept] == pytest.approx([0.3] * 6, abs=0.01)
    assert sum(what[0] == "second_order: curvature" for what in said) == 3  # at three events
    assert any("the inverse Fisher takes 0.2 MB at each of 3 events" in note for note in outcome.notes)


# Reweighted proximal pruning.


def test_shrinking():
    weight = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.0])
    shrink([weight], [torch.tensor([0.2, 0.2, 0.2, 0.05, 0.3])])
    torch.testing.assert_close(weight, torch.tensor([0.3, -0.3, 0.0, -0.05, 0.0]))


def test_proximal_steps_lie_outside_adam(encoder):
    """One step: Adam's moments are those of plain training, weights are its weights shrunk by rate * pull * a."""
    phases = [phase_of(f"{method}{WHOLE}", encoder, TASK) for method in ("", "rpp(pull=2.0, steps=1, edge=0.01) + ")]
    names = maskable(encoder)
    (method,) = (one for one in phases[1].methods if one.name == "rpp")
    weights: dict[str, torch.Tensor] = {}
    for number in range(3):
        for phase in phases:
            for group in phase.optimiser.param_groups:
                group["lr"] = 0.004 / (number + 1)  # as scheduled, not as set
            take_step(phase, everything(encoder))
        plain, pruned = (phase.encoder for phase in phases)
        for name, parameter in plain.named_parameters():
            mine = pruned.get_parameter(name)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(phases[0].optimiser.state[parameter][key], phases[1].optimiser.state[mine][key])
            if name not in names:
                assert torch.equal(mine, parameter)
                continue
            pull = 1 / (weights[name].abs() + 0.01) if weights else torch.ones_like(mine)
            by = 0.004 / (number + 1) * 2.0 * pull
            wanted = parameter.sign() * (parameter.abs() - by).clamp(min=0)
            torch.testing.assert_close(mine, wanted, atol=1e-7, rtol=1e-5)
        method.look(phases[1])
        weights = {name: pruned.get_parameter(name).detach().clone() for name in names}
        # Both start the next step from the same weights, so that both see the same gradients.
        plain.load_state_dict(pruned.state_dict())
    assert 0.1 < density(pruned, names) < 0.9


def test_rpp_settles_its_zeros(encoder):
    outcome = run(f"rpp(pull=1.0, steps=2) + {SIX} | {SIX}", encoder, TASK, judge=False)
    first = run(f"rpp(pull=1.0, steps=2) + {SIX}", encoder, TASK, judge=False).encoder
    left = density(first, maskable(encoder))
    assert 0.05 < left < 0.95 and any(note.startswith(f"{left:.2%} of the 4,096") for note in outcome.notes)
    for name in maskable(encoder):
        assert torch.equal(first.get_parameter(name) == 0, outcome.encoder.get_parameter(name) == 0)


# Lottery tickets, Gordon's control, random masks.


def test_the_lottery_rewinds_to_the_very_same_weights(encoder):
    lottery = METHODS["lottery"](0.4, rounds=3, part=SIX, what="layers")
    phases = [str(phase) for phase in Recipe(lottery).phases()]
    assert [phase.split("(")[0] for phase in phases] == ["mark", *["train", "prune", "rewind"] * 3, "train"]
    assert [phase.split(",")[0] for phase in phases if "prune" in phase] == [
        *("prune(keep=0.8", "prune(keep=0.6", "prune(keep=0.4")
    ]
    ticket = run(" | ".join(phases[:-1]), encoder, TASK, judge=False).encoder
    for name, tensor in encoder.backbone.state_dict().items():
        mine = ticket.backbone.state_dict()[name]
        pruned = f"backbone.{name}" in maskable(encoder)
        assert torch.equal(mine, tensor * (mine != 0)) if pruned else torch.equal(mine, tensor)
    assert density(ticket, maskable(encoder)) == round(0.4 * 4096) / 4096
    outcome = run(Recipe(lottery), encoder, TASK, judge=False)
    for name in maskable(encoder):
        assert torch.equal(outcome.encoder.get_parameter(name) == 0, ticket.get_parameter(name) == 0)
    assert not is_same_state(outcome.encoder, ticket) and outcome.steps == 24
    # What goes is what was smallest after training, not before it.
    once = run("prune(0.4)", encoder, TASK).encoder
    assert any(not torch.equal(once.get_parameter(n) == 0, ticket.get_parameter(n) == 0) for n in maskable(encoder))


def test_a_killed_lottery_goes_on(encoder, tmp_path):
    recipe, taken, real = f"lottery(0.5, rounds=2, part={SIX})", 0, loop.take_step

    def take(phase: Any, batches: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 9:  # in the second round
            raise KeyError("killed")
        return real(phase, batches)

    with patch.object(loop, "take_step", take):
        with pytest.raises(KeyError):
            run(recipe, encoder, TASK, work=tmp_path, pause=0.0, judge=False)
        resumed = run(recipe, encoder, TASK, work=tmp_path, judge=False)
    assert taken == 9 + 4 + 6
    assert is_same_state(resumed.encoder, run(recipe, encoder, TASK, judge=False).encoder)


@pytest.mark.parametrize("joint", [" | ", " + "])
def test_deleted_information_may_grow_back(encoder, joint):
    names = maskable(encoder, "layers+pooler+embeddings")
    sparse = run(
        f"delete_information(0.3){joint}train(epochs=1, batch=24, lr=1e-12)", encoder, TASK, judge=False
    ).encoder
    for name in names:
        weight, before = sparse.get_parameter(name), encoder.get_parameter(name)
        kept = before.abs() >= before.abs().flatten().sort(descending=True).values[round(0.3 * before.numel()) - 1]
        torch.testing.assert_close(weight.detach(), before.detach() * kept, atol=1e-9, rtol=0)
    regrown = run(f"prune(0.5) | delete_information(0.3){joint}{SIX}", encoder, TASK, judge=False).encoder
    assert not regrown.held("zeros")
    assert density(regrown, maskable(encoder)) > 0.99
    held = run(f"prune(0.3){joint}{SIX}", encoder, TASK, judge=False).encoder
    assert density(held, maskable(encoder)) == pytest.approx(0.3, abs=1e-3)


def test_random_masks_are_random_nested_and_seeded(encoder):
    names = maskable(encoder)
    one, same, other = (run("prune(0.3, by='random')", encoder, TASK, seed=seed).encoder for seed in (0, 0, 1))
    assert is_same_state(one, same) and not is_same_state(one, other)
    sizes = torch.cat([encoder.get_parameter(name).detach().abs().flatten() for name in names])
    kept = torch.cat([one.get_parameter(name).detach().flatten() != 0 for name in names])
    assert int(kept.sum()) == round(0.3 * 4096)
    assert float(sizes[kept].mean()) == pytest.approx(float(sizes.mean()), rel=0.1)  # not by size
    less = run("prune(0.1, by='random')", one, TASK, seed=5).encoder
    again = torch.cat([less.get_parameter(name).detach().flatten() != 0 for name in names])
    assert int(again.sum()) == round(0.1 * 4096) and not (again & ~kept).any()


# Looking while training, refusals.


def test_watch_looks_with_the_current_or_the_final_mask_and_says_which(encoder):
    found = {}
    for mask in ("current", "final"):
        recipe = f"movement(0.25, begin=0.0, finish=1.0) + watch(2, mask={mask!r}) + {SIX}"
        outcome = run(recipe, encoder, TASK, judge=False)
        found[mask] = ([entry["value"] for entry in outcome.traces["watch"]], outcome.encoder)
    assert is_same_state(found["current"][1], found["final"][1])  # looking changes nothing
    for mask, (looks, _) in found.items():
        assert [look["mask"] for look in looks] == [mask] * 3
    ramp = [0.25 + 0.75 * (1 - step / 6) ** 3 for step in (1, 3, 5)]
    assert [look["kept"][0] for look in found["current"][0]] == pytest.approx(ramp, abs=0.005)
    assert [look["kept"][0] for look in found["final"][0]] == pytest.approx([0.25] * 3, abs=0.005)
    assert found["current"][0][0]["loss"] != found["final"][0][0]["loss"]


def test_gradients_that_are_not_finite_once_wipe_nothing(encoder, monkeypatch):
    whole = METHODS["smooth_movement"].after_step

    def once(self, phase):
        whole(self, phase)
        if phase.step == 2:
            kept_stacks(phase, self.name, "window")[0].fill_(float("nan"))

    monkeypatch.setattr(METHODS["smooth_movement"], "after_step", once)
    result = run(f"smooth_movement(0.3, window=2, begin=0.0, finish=0.5) + {SIX}", encoder, TASK, judge=False).encoder
    assert density(result, maskable(result)) == pytest.approx(0.3, abs=0.01)


def test_the_rate_of_scores_that_start_at_zero_changes_no_mask(encoder):
    # Adam's steps are as long as its rate and the mask asks for order alone, so the rate only scales the scores.
    first, second = (
        run(f"movement(0.3, lr={lr}, begin=0.0, finish=0.5) + {SIX}", encoder, TASK, judge=False).encoder
        for lr in (2**-7, 2**-13)
    )
    for name, weight in first.named_parameters():
        assert torch.equal(weight, second.get_parameter(name)), name


def test_watch_sees_masks_as_in_use_and_zeros_that_are_stored(encoder):
    drawn = run(f"l0(pull=0.0, lr=1e-9, start=-2.4) + watch(2) + {SIX}", encoder, TASK, judge=False)
    assert [entry["value"]["kept"] for entry in drawn.traces["watch"]] == [[0.0, 0.0]] * 3  # drawn ones are often open
    for method in ("smooth_movement(0.3, window=2, begin=0.0, finish=0.0)", "rpp(pull=1.0, steps=2)"):
        outcome = run(f"{method} + watch(2) + {SIX}", encoder, TASK, judge=False)
        last = outcome.traces["watch"][-1]["value"]["kept"]
        assert sum(last) / 2 == pytest.approx(density(outcome.encoder, maskable(encoder)), abs=0.02) and max(last) < 0.9


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("magnitude(0.1, first=0.0)", "first is a share"),
        ("magnitude(0.1, stairs=-1)", "stairs"),
        ("soft_movement(threshold=0.0)", "threshold"),
        ("soft_movement(begin=0.9, finish=0.1)", "begin and finish"),
        ("l0(pull=-1.0)", "pull"),
        ("smooth_movement(window=0)", "window"),
        ("second_order(damp=0.0)", "damp"),
        ("rpp(pull=0.0)", "pull"),
        ("prune(1.0)", "keep"),
        ("lottery(rounds=0)", "rounds"),
        ("lottery(part=3)", "part must be a recipe"),
        ("delete_information(0.0)", "keep"),
        ("rpp + train(freeze='backbone')", "leaves some of them as they are"),
        ("smooth_movement(what='layers+embeddings') + train(freeze='embeddings')", "leaves some of them as they are"),
        ("second_order + train(freeze='backbone')", "leaves some of them as they are"),
        ("quantize | prune", "there is no weight to prune"),
        ("quantize | delete_information", "there is no weight to prune"),
    ],
)
def test_refusals(encoder, recipe, match):
    with pytest.raises(UserError, match=match):
        run(recipe, encoder, TASK)


def test_pruned_models_still_tell_texts_apart(trained):
    """Each method at a mild share leaves a toy model that works: no mask is upside down."""
    task = toy_task("classify", 240)
    good = run("train(epochs=6, batch=8, lr=0.003)", small(hidden_size=32), task).encoder
    from toys import accuracy

    assert accuracy(good, task) > 95
    curved = "second_order(0.5, events=2, gradients=24, block=16, examples=4, damp=1e-4, first=0.7)"
    for method in (
        "movement(0.5, init='magnitude')",
        "smooth_movement(0.5, window=5)",
        curved,
        "rpp(pull=0.05)",
        "l0(pull=0.05)",
    ):
        outcome = run(f"{method} + train(epochs=2, batch=8, lr=0.002)", good, task)
        assert not outcome.diverged and accuracy(outcome.encoder, task) > 85, (method, outcome.notes)
    assert not torch.equal(scores_of(good, task), scores_of(outcome.encoder, task))
