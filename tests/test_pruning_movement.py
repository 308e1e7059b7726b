"""Movement and soft movement pruning against references written by hand."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pruned import SIX, TASK, WHOLE, by_name, density, everything
from torch.func import functional_call
from torch.nn import functional
from toys import batch_of, is_same_state, phase_of, run, state_of

from smallbert.methods import METHODS
from smallbert.training.masks import Stacks, maskable


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


def test_movement_with_a_teacher_equals_one_written_by_hand(trained):
    settings = "train(epochs=6, batch=24, lr=0.003, warmup=0.2, dropout=0.0, weight_decay=0.1, clip=0.5)"
    recipe = f"prune(0.8) | movement(0.3, begin=0.2, finish=0.8) + distill(alpha=0.7, temperature=3.0) + {settings}"
    result = run(recipe, trained, TASK, judge=False).encoder
    mine, names = run("prune(0.8)", trained, TASK).encoder, maskable(trained)
    held = {name: mine.get_parameter(name) != 0 for name in names}
    # What was pruned before is the first to go now.
    scores = {name: torch.where(held[name], 0.0, float("-inf")).requires_grad_(True) for name in names}
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


def test_the_rate_of_scores_that_start_at_zero_changes_no_mask(encoder):
    # Adam's steps are as long as its rate and the mask asks for order alone, so the rate only scales the scores.
    first, second = (
        run(f"movement(0.3, lr={lr}, begin=0.0, finish=0.5) + {SIX}", encoder, TASK, judge=False).encoder
        for lr in (2**-7, 2**-13)
    )
    for name, weight in first.named_parameters():
        assert torch.equal(weight, second.get_parameter(name)), name


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
        assert float(phase.dials["weight of soft_movement"]) == pytest.approx(pull)
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


def test_soft_movement_keeps_what_is_above_the_threshold_not_what_is_at_it(encoder):
    phase = phase_of(f"soft_movement(threshold=0.5) + {WHOLE}", encoder, TASK)
    phase.set_dials(1.0)
    for stack in phase.modules["soft_movement"]:
        stack.data[:] = 1e-30  # hardly above 0, where the sigmoid is 0.5
        stack.data[:, :3] = 0.0
    assert {int((weight == 0).sum()) for weight in phase.weights().values()} == {3}
