"""Pruning by what the loss would miss, smoothed or of second order, against formulas worked out by hand."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pruned import CURVED, SIX, TASK, WHOLE, density, everything
from psutil import virtual_memory
from torch.func import functional_call
from torch.nn import functional
from toys import phase_of, run

from smallbert.errors import UserError
from smallbert.methods import METHODS, second_order
from smallbert.methods.second_order import add_gradient, correction, in_blocks, start_inverse
from smallbert.training.loop import take_step
from smallbert.training.masks import Stacks, carried, maskable
from smallbert.training.memory import free_memory


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
        parts = [carried(phase, "smooth_movement", key) for key in ("importance", "uncertainty")]
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


def test_gradients_that_are_not_finite_once_wipe_nothing(encoder, monkeypatch):
    whole = METHODS["smooth_movement"].after_step

    def once(self, phase):
        whole(self, phase)
        if phase.step == 2:
            carried(phase, self.name, "window")[0].fill_(float("nan"))

    monkeypatch.setattr(METHODS["smooth_movement"], "after_step", once)
    result = run(f"smooth_movement(0.3, window=2, begin=0.0, finish=0.5) + {SIX}", encoder, TASK, judge=False).encoder
    assert density(result, maskable(result)) == pytest.approx(0.3, abs=0.01)


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


def test_curvature_is_found_without_dropout(trained):
    phase = phase_of(f"{CURVED} + {SIX}", trained, TASK)
    (method,) = (one for one in phase.methods if one.name == "second_order")
    phase.begin_training()
    assert not torch.equal(phase.loss(everything(trained)), phase.loss(everything(trained)))  # there is some
    first, second = (method._inverses(phase, maskable(trained)) for _ in range(2))
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    assert all(module.training for module in phase.encoder.modules())  # and the next step has it again


@pytest.mark.parametrize("update", ["each", "joint"])
def test_blocks_may_be_corrected_a_few_at_a_time(trained, update, monkeypatch):
    """With all blocks at once or in parts that do not come out even, the weights are the same."""
    made, calls = [], []

    def counted(*part):
        calls.append(len(part[0]))
        return correction(*part)

    monkeypatch.setattr(second_order, "correction", counted)
    for chunk in (second_order.CHUNK, 5):
        monkeypatch.setattr(second_order, "CHUNK", chunk)
        phase = phase_of(f"{CURVED[:-1]}, update={update!r}) + {WHOLE}", trained, TASK)
        (method,) = (one for one in phase.methods if one.name == "second_order")
        names, phase.step = maskable(trained), 7
        method.look(phase)
        made.append({name: phase.encoder.get_parameter(name).detach() for name in names})
    assert len(calls) > 2 * len(names) and set(calls[len(names) :]) == {5, 2, 1}  # of 52 blocks and of 26
    for name in names:
        assert not torch.equal(made[0][name], trained.get_parameter(name))
        torch.testing.assert_close(made[1][name], made[0][name])


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


def test_events_that_fall_on_one_step_are_one(trained):
    short = f"{CURVED.replace('events=3', 'events=7')} + train(epochs=1, batch=64, lr=0.001)"
    outcome = run(short, trained, TASK, judge=False)
    assert any("MB at 1 of 7 events, since the phase has 1 step (" in note for note in outcome.notes)


def test_a_fisher_matrix_that_cannot_fit_is_refused(encoder, monkeypatch):
    training = 12 * sum(parameter.numel() for parameter in encoder.parameters())
    monkeypatch.setattr("smallbert.methods.second_order.free_memory", lambda device: training + 2**20)
    recipe = "second_order(block={}, gradients=2, examples=2) + " + SIX
    match = r"block=64 the inverse Fisher .* are free beside training on cpu; .* such as block=\d+$"
    with pytest.raises(UserError, match=match) as no:
        run(recipe.format(64), encoder, TASK)
    fits = int(str(no.value).rpartition("=")[2])
    assert 8 < fits < 64
    run(recipe.format(fits), encoder, TASK, judge=False)
    monkeypatch.setattr("smallbert.methods.second_order.free_memory", lambda device: training // 2)
    with pytest.raises(UserError, match="smaller blocks do not fit either"):
        run(recipe.format(1), encoder, TASK)


def test_free_memory_is_what_the_machine_says():
    assert 2**20 < free_memory(torch.device("cpu")) < virtual_memory().total
