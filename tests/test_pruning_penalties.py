"""Pruning under a penalty, L0 and reweighted proximal pruning, against closed forms."""

import math

import pytest
import torch
from pruned import SIX, TASK, WHOLE, density, everything
from toys import phase_of, run

from smallbert.methods import METHODS
from smallbert.methods.l0 import BETA, HIGH, LOW, SHIFT, _Gated
from smallbert.methods.rpp import shrink
from smallbert.training.loop import take_step
from smallbert.training.masks import maskable


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
    assert float(phase.dials["weight of l0"]) == 3.0
    phase.fold()
    mask = 1.2 / (1 + math.exp(-0.5)) - 0.1
    for name in maskable(encoder):
        torch.testing.assert_close(phase.encoder.get_parameter(name), encoder.get_parameter(name) * mask)


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
