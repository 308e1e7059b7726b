"""Weights that no gradient tells apart: words and layers that nothing reads, zeros held from before, equal sizes."""

from unittest.mock import patch

import pytest
import torch
from pruned import SIX, TASK, WHOLE, WORDS, by_name, density, everything, fresh_encoder, largest, left
from toys import is_same_state, phase_of, run

from smallbert.training import loop
from smallbert.training.loop import take_step
from smallbert.training.masks import maskable
from smallbert.training.ranking import LOWEST, behind, keep_top, ranks, spread_out

LEARNED = ["movement(0.2{})", "movement(0.2, init='magnitude', fresh=True{})", "smooth_movement(0.2, window=2{})"]
BY_GRADIENTS = [*LEARNED, "second_order(0.2, gradients=6, block=10, examples=4{})"]
EVERYTHING = "layers+pooler+embeddings"


def wanted(encoder, names, keep):
    return {name: round(keep * encoder.get_parameter(name).numel()) for name in names}


@pytest.fixture(scope="module")
def rounded():
    """An encoder whose weights were once stored in half precision: among many, some are equally large."""
    half = fresh_encoder().copy()
    with torch.no_grad():
        for weight in half.parameters():
            weight.copy_(weight.to(torch.float8_e4m3fn))  # even fewer sizes than bfloat16, since the model is tiny
    return half


@pytest.mark.parametrize("method", BY_GRADIENTS)
def test_words_that_no_text_holds_are_ranked_by_size(encoder, method):
    names = maskable(encoder, EVERYTHING)
    method = method.format(f", scope='local', what={EVERYTHING!r}")
    result = run(f"{method} + {SIX}", encoder, TASK, judge=False).encoder
    assert left(result, names) == wanted(encoder, names, 0.2)


@pytest.mark.parametrize("method", BY_GRADIENTS)
def test_a_layer_that_nothing_reads_is_pruned_by_size(encoder, method):
    method, settings = method.format(", scope='local'"), SIX.replace(")", ", weight_decay=0.0)")
    result = run(f"mix_layers(layers=[0, 1]) + {method} + {settings}", encoder, TASK, judge=False).encoder
    assert left(result, maskable(encoder)) == wanted(encoder, maskable(encoder), 0.2)
    for name in maskable(encoder):
        if "layer.1." in name:
            kept = largest(encoder.get_parameter(name), 0.2)
            assert torch.equal(result.get_parameter(name), encoder.get_parameter(name) * kept)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("method", [one.replace("0.2", "0.3") for one in BY_GRADIENTS])
def test_zeros_held_from_before_are_the_first_to_go(encoder, method, scope):
    names = maskable(encoder)
    first, method = f"prune(0.4, scope={scope!r})", method.format(f", scope={scope!r}")
    result = run(f"{first} | {method} + {SIX}", encoder, TASK, judge=False).encoder
    if scope == "local":
        assert left(result, names) == wanted(encoder, names, 0.3)
    assert sum(left(result, names).values()) == pytest.approx(0.3 * 4096, abs=1 if scope == "global" else 6)
    before = run(first, encoder, TASK).encoder
    assert not any(((result.get_parameter(n) != 0) & (before.get_parameter(n) == 0)).any() for n in names)


def test_movement_inside_a_lottery_keeps_its_share(encoder):
    part = f"movement(0.3, begin=0.0, finish=0.5) + {SIX}"
    result = run(f"lottery(0.5, rounds=2, scope='local', what='layers', part={part})", encoder, TASK, judge=False)
    assert left(result.encoder, maskable(encoder)) == wanted(encoder, maskable(encoder), 0.3)


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("method", ["prune(0.37{})", "prune(0.37, by='random'{})", "delete_information(0.37{})"])
def test_of_equal_sizes_as_many_stay_as_asked_for(rounded, method, scope):
    names = maskable(rounded)
    sizes = rounded.get_parameter(names[0]).detach().abs().unique()
    assert len(sizes) < 100
    result = run(method.format(f", scope={scope!r}, what='layers'"), rounded, TASK).encoder
    if scope == "local":
        assert left(result, names) == wanted(rounded, names, 0.37)
    assert sum(left(result, names).values()) == pytest.approx(0.37 * 4096, abs=1 if scope == "global" else 6)
    if method.startswith("prune(0.37{"):
        for name in names:
            weight, stays = rounded.get_parameter(name).abs(), result.get_parameter(name) != 0
            assert weight[stays].min() >= weight[~stays].max() or scope == "global"


@pytest.mark.parametrize("method", ["magnitude(0.3)", "movement(0.3, train_weights=False)", "movement(0.3)"])
def test_equal_sizes_of_weights_that_do_not_train(rounded, method):
    settings = SIX.replace(")", ", freeze='backbone')") if method == "magnitude(0.3)" else SIX
    result = run(f"mix_layers(layers=[0, 1]) + {method} + {settings}", rounded, TASK, judge=False).encoder
    assert left(result, maskable(rounded)) == wanted(rounded, maskable(rounded), 0.3)


def test_scores_of_held_zeros_stay_at_the_bottom_whatever_the_optimiser_does(encoder):
    pruned = run("prune(0.4, scope='local')", encoder, TASK).encoder
    for method in ("movement(0.3)", "soft_movement(pull=5.0, begin=0.0)", "l0(pull=5.0)"):
        phase = phase_of(f"{method} + {WHOLE[:-1]}, weight_decay=0.1)", pruned, TASK)
        label, lowest = method.split("(")[0], torch.finfo(torch.float32).min
        for phase.step in range(4):
            phase.set_dials()
            assert torch.isfinite(take_step(phase, everything(encoder)))
        for name, scores in by_name(phase, label, maskable(encoder)).items():
            zeros = pruned.get_parameter(name) == 0
            assert (scores[zeros] == lowest).all() and (scores[~zeros].abs() < 10).all()
        for stack in phase.modules[label]:
            assert all(moment.isfinite().all() for moment in phase.optimiser.state[stack].values())


def test_starts_are_too_near_to_each_other_to_outweigh_one_step(encoder):
    phase = phase_of(f"movement(0.3, lr=0.02) + {WHOLE}", encoder, TASK)
    for name, scores in by_name(phase, "movement", maskable(encoder)).items():
        order = scores.flatten().argsort()
        sizes = encoder.get_parameter(name).detach().abs().flatten()[order]
        assert (sizes.diff() >= 0).all() and len(scores.unique()) == scores.numel()
        assert 0 < float(scores.min()) < float(scores.max()) < 0.02 / 1000


def test_a_killed_run_with_ties_goes_on_to_the_same_weights(encoder, tmp_path):
    recipe, taken, real = f"prune(0.5) | movement(0.2, what={EVERYTHING!r}) + {SIX}", 0, loop.take_step

    def take(phase, batches):
        nonlocal taken
        taken += 1
        if taken == 4:
            raise KeyError("killed")
        return real(phase, batches)

    with patch.object(loop, "take_step", take):
        with pytest.raises(KeyError):
            run(recipe, encoder, TASK, work=tmp_path, pause=0.0, judge=False)
        resumed = run(recipe, encoder, TASK, work=tmp_path, judge=False).encoder
    assert is_same_state(resumed, run(recipe, encoder, TASK, judge=False).encoder)
    assert density(resumed, [WORDS]) == pytest.approx(0.2, abs=1e-3)


def test_zeros_that_nobody_holds_may_come_back_under_movement(encoder):
    deleted = run("delete_information(0.2, what='layers')", encoder, TASK).encoder
    result = run(f"movement(0.6) + {SIX}", deleted, TASK, judge=False).encoder
    assert left(deleted, maskable(encoder)) == wanted(encoder, maskable(encoder), 0.2)
    assert left(result, maskable(encoder)) == wanted(encoder, maskable(encoder), 0.6)


# The parts it is done with.


def test_ranks():
    rows = [torch.tensor([[0.1, 0.4, 0.2, 0.9]]), torch.tensor([[0.3, 0.0], [0.5, 0.6]])]
    assert [one.tolist() for one in ranks(rows, "local")] == [[[0.0, 0.5, 0.25, 0.75]], [[0.5, 0.0], [0.0, 0.5]]]
    overall = torch.cat([one.flatten() for one in ranks(rows, "global")])
    assert overall.tolist() == [1 / 8, 4 / 8, 2 / 8, 7 / 8, 3 / 8, 0.0, 5 / 8, 6 / 8]


def test_exactly_so_many_of_equal_ones_stay():
    rows = [torch.tensor([[3.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), torch.tensor([[1.0, 5.0]])]
    assert [one.int().tolist() for one in keep_top(rows, 0.5, "local")] == [[[1, 1, 0, 0]] * 2, [[0, 1]]]
    assert [one.int().tolist() for one in keep_top(rows, 0.5, "global")] == [[[1, 1, 1, 1], [0, 0, 0, 0]], [[0, 1]]]


@pytest.mark.parametrize("scope", ["local", "global"])
def test_spread_out_numbers_are_distinct_and_scale_with_the_highest(scope):
    rows = [torch.randint(9, (3, 5000)).float(), torch.randn(2, 700)]
    high, low = (torch.cat([one.flatten() for one in spread_out(rows, scope, most)]) for most in (0.3, 0.3 / 64))
    assert torch.equal(high, low * 64) and float(high.max()) == pytest.approx(0.3) and float(low.min()) > 0
    for row, mine in zip(rows, spread_out(rows, scope, 0.3), strict=True):
        order = mine.argsort(dim=1)
        assert (row.gather(1, order).diff() >= 0).all() and (mine.gather(1, order).diff() > 0).all()
    assert len(high.unique()) == (16400 if scope == "global" else 5000)


def test_sizes_come_behind_every_score():
    sizes = torch.tensor([0.0, 1e-30, 1e-5, 0.3, 0.30000004, 7.0, 0.0, 2.0])
    scores = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-30, 3.0])
    found = behind(scores, sizes)
    assert (found[:6].diff() > 0).all() and float(found[0]) == LOWEST and float(found[5]) < 0
    assert torch.equal(found[6:], scores[6:])
