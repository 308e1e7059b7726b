"""Pruning at once: lottery tickets, Gordon's control, random masks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from pruned import SIX, TASK, density
from toys import is_same_state, run

from smallbert.methods import METHODS
from smallbert.recipes.recipe import Recipe
from smallbert.training import loop
from smallbert.training.masks import maskable


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


def test_a_mark_of_the_same_name_is_left_alone(encoder):
    ticket = f"lottery(0.5, rounds=1, what='layers', part={SIX})"
    result = run(f"mark('lottery') | {SIX} | {ticket} | rewind('lottery')", encoder, TASK, judge=False).encoder
    for name in maskable(encoder):
        weight = result.get_parameter(name)
        assert torch.equal(weight, encoder.get_parameter(name) * (weight != 0)) and (weight == 0).any()


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
