"""Few bits while training: what the model saw is what is stored; ranges, curvature and choices against closed forms."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import accuracy, batch_of, check_refused, is_same_state, phase_of, run, scores_of, small, state_of, toy_task

from smallbert.errors import UserError
from smallbert.making import starting
from smallbert.measuring.cost import count_parameters, measure_bytes
from smallbert.methods.codebook import nearest
from smallbert.methods.mixed_bits import choose_bits
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.heads import losses
from smallbert.model.products import are_exact
from smallbert.model.quantised import WholeLinear, stored_parts
from smallbert.model.rounding import Grid, rounded
from smallbert.model.twins import split
from smallbert.onnxfile.check import varied_batches
from smallbert.tasks.derived import limit
from smallbert.texts.data import STUDENT
from smallbert.training.aware import Ranges, to_nearest, to_ternary
from smallbert.training.calibrate import draw_texts
from smallbert.training.curvature import layer_curvatures, top_eigenvalue
from smallbert.training.loop import take_step

TASK = toy_task("pair", 16)
SHORT = "train(epochs=1, batch=8, lr=0.001, dropout=0.0)"
AWARE = [
    "quantize_aware",
    "quantize_aware(4, activations=False, scope='group', group=6, symmetric=False)",
    "quantize_aware(8, activations=True)",
    "quantize_aware(8, smooth='search')",
    "quantize_aware(4, activations=True, scope='group', group=6, symmetric=False, smooth='search')",
    "quantize_aware(2, embeddings=8)",
    "ternary",
    "ternary(scope='tensor', embeddings=8, activations='static')",
    "binary",
    "mixed_bits(2.5, group=8, batches=2, examples=4)",
    "codebook_aware(2, embeddings=4, outliers=2.5)",
]


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK, seed=5).encoder


# Ranges that move.


def test_ranges_are_means_at_first_and_then_move():
    """Two numbers a step, one text: with a decay of 0.75 the fifth step counts a quarter, not a fifth."""
    ranges, real = Ranges(1, decay=0.75), torch.ones(1, 2, dtype=torch.bool)
    lows, highs = [-1.0, -3.0, -2.0, -6.0, -8.0, 0.5], [2.0, 4.0, 9.0, 1.0, 4.0, 6.0]
    for low, high in zip(lows, highs, strict=True):
        ranges.add(0, torch.tensor([[[low], [high]]]), real)
    wanted = []
    for values in ([min(low, 0) for low in lows], highs):
        mean = sum(values[:4]) / 4
        for value in values[4:]:
            mean = 0.75 * mean + 0.25 * value
        wanted.append(mean)
    torch.testing.assert_close(ranges.bounds[0], torch.tensor(wanted))
    short = Ranges(1, decay=0.9999)  # the published decay: a short run must not keep the range of its first batch
    for high in (1.0, 3.0, 3.0, 3.0):
        short.add(0, torch.tensor([[[0.0], [high]]]), real)
    assert short.bounds[0].tolist() == [0.0, 2.5]


def test_ranges_do_not_see_padding(encoder):
    ranges, inputs = Ranges(1, 0.9), torch.tensor([[[1.0], [50.0]], [[-2.0], [-70.0]]])
    ranges.add(0, inputs, torch.tensor([[True, False], [True, False]]))
    assert ranges.bounds[0].tolist() == [-2.0, 1.0]
    ranges.add(0, inputs[:, 0], torch.ones(2, 1, dtype=torch.bool))  # a pooled state has none
    assert ranges.bounds[0].tolist() == [-2.0, 1.0]
    calm, loud = encoder.copy(), encoder.copy()
    with torch.no_grad():
        loud.backbone.embeddings.word_embeddings.weight[0] *= 30  # the row of padding
    one, two = (run("quantize_aware + train(epochs=1, batch=8, lr=1e-9)", base, TASK).encoder for base in (calm, loud))
    for name, part in stored_parts(one).items():
        if isinstance(part, WholeLinear):
            torch.testing.assert_close(two.get_submodule(name).input_range, part.input_range, atol=1e-4, rtol=1e-4)


# What is seen, and what is stored.


@pytest.mark.parametrize("recipe", AWARE)
def test_what_the_model_saw_is_what_is_stored_to_the_bit(encoder, recipe, tmp_path, monkeypatch):
    """In real numbers, as training has them; where a CPU multiplies whole ones, up to float noise."""
    phase = phase_of(f"{recipe} + {SHORT}", encoder, TASK)
    batches = {STUDENT: batch_of(encoder, TASK, split="train")}
    phase.begin_training()
    take_step(phase, batches)
    take_step(phase, batches)
    phase.encoder.eval()
    with torch.no_grad():
        seen = phase.look_at(batches).scores
    phase.fold()
    for method in phase.methods:
        method.settle(phase)
    phase.fold()
    assert not any(module.training for module in phase.encoder.modules())
    with torch.no_grad():
        torch.testing.assert_close(phase.encoder(batches[STUDENT]), seen, atol=0.02 * float(seen.std()), rtol=0)
        with monkeypatch.context() as real:
            real.setattr("smallbert.model.quantised.are_exact", lambda: False)
            assert torch.equal(phase.encoder(batches[STUDENT]), seen)
    assert not any(module._forward_pre_hooks for module in phase.encoder.modules())
    save_folder(phase.encoder, tmp_path / "model")
    assert torch.equal(scores_of(load_folder(tmp_path / "model"), TASK), scores_of(phase.encoder, TASK))
    assert phase.encoder.history[-1]["step"].startswith(("quantize(", "codebook("))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["quantize(8, activations=True)", "quantize_aware + train(epochs=0.1)"])
def test_whole_numbers_move_what_real_weights_say_by_little(recipe, monkeypatch):
    """Float noise moves an input by a step, and six layers carry that on, but no prediction is another."""
    try:
        start, task = starting.start_from("all-MiniLM-L6-v2"), limit(starting.task_from(starting.DEMO_DATA), 1500)
    except UserError as unreachable:
        pytest.skip(str(unreachable))
    result = run(f"finetune(epochs=1, lr=2e-4) | {recipe}", start.encoder, task, judge=False).encoder.eval()
    texts, said = varied_batches(result), []
    for exact in (are_exact(), False):
        monkeypatch.setattr("smallbert.model.quantised.are_exact", lambda exact=exact: exact)
        with torch.inference_mode():
            said.append(torch.cat([result(batch).softmax(-1) for batch in texts]))
    print(f"the largest change of a probability is {(said[0] - said[1]).abs().max():.3f}")
    assert (said[0] - said[1]).abs().max() < 0.05 and torch.equal(said[0].argmax(-1), said[1].argmax(-1))


@pytest.mark.parametrize("inputs", ["True", "'static'"])
def test_layers_that_scale_their_inputs_have_a_range_for_all_of_them(encoder, inputs):
    """One neuron as loud as in real models: its column is small, so that nothing of the model changes."""
    loud, name = encoder.copy(), "backbone.encoder.layer.1.output.dense"
    with torch.no_grad():
        loud.get_submodule("backbone.encoder.layer.1.intermediate.dense").bias[5] += 300
        loud.get_submodule(name).weight[:, 5] *= 0.01
    wanted, learn = scores_of(loud, TASK), "train(epochs=1, batch=8, lr=1e-9, dropout=0.0)"
    plain, scaled = (
        run(f"quantize_aware(8, activations={inputs}{more}) + {learn}", loud, TASK, judge=False).encoder
        for more in ("", ", smooth='search'")
    )
    plain_error, scaled_error = ((scores_of(one, TASK) - wanted).abs().mean() for one in (plain, scaled))
    assert scaled_error < 0.3 * plain_error
    factor = scaled.get_submodule(name).input_factor
    assert factor[5] < 0.1 * factor.median()
    assert scaled.history[-1]["plan"]["scaled"] and "scaled" not in plain.history[-1]["plan"]
    query, key = (scaled.get_submodule(f"backbone.encoder.layer.0.attention.self.{one}") for one in ("query", "key"))
    assert torch.equal(query.input_factor, key.input_factor)  # what reads the same inputs is given the same


@pytest.mark.parametrize("recipe", ["quantize_aware(3, activations=False)", "ternary", "binary", "codebook_aware(2)"])
def test_gradients_pass_straight_through(encoder, recipe):
    phase = phase_of(f"{recipe} + {SHORT}", encoder, TASK)
    batches = {STUDENT: batch_of(encoder, TASK, split="train")}
    phase.loss(batches).backward()
    name = "backbone.encoder.layer.1.output.dense.weight"
    found = phase.encoder.get_parameter(name).grad
    plain = encoder.copy()
    with torch.no_grad():
        for key, weight in phase.weights().items():
            plain.get_parameter(key).copy_(weight)
    losses(plain.head, plain(batches[STUDENT]), batches[STUDENT]).mean().backward()
    torch.testing.assert_close(found, plain.get_parameter(name).grad)
    assert found.abs().max() > 0


@pytest.mark.parametrize(("rounding", "stored"), [("quantize_aware(4)", "quantize"), ("codebook_aware(3)", "codebook")])
def test_prune_round_and_distil_in_one_phase(encoder, rounding, stored):
    outcome = run(f"finetune(epochs=1, batch=8) | magnitude(0.3) + {rounding} + distill + {SHORT}", encoder, TASK)
    found = count_parameters(outcome.encoder)
    assert 0.2 * found["encoder"] < found["encoder_non_zero"] <= round(0.3 * found["encoder"]) + 12
    steps = [entry["step"].split("(")[0] for entry in outcome.encoder.history]
    assert steps[-5:] == ["magnitude", "distill", "train", rounding.split("(")[0], stored]
    part = outcome.encoder.get_submodule("backbone.encoder.layer.0.output.dense")
    if stored == "quantize":
        assert part.grid == Grid(4) and part.activations == "static" and part.input_range[1] > part.input_range[0]
    else:
        assert 0.0 in part.table and any("prune in a phase before" in note for note in outcome.notes)


def test_centroids_of_what_was_pruned_before_are_all_used(encoder):
    outcome = run(f"prune(0.5) | codebook_aware(2) + {SHORT}", encoder, TASK)
    part = outcome.encoder.get_submodule("backbone.encoder.layer.0.output.dense")
    used = torch.bincount(nearest(part.real()[part.real().abs() <= part.table.abs().max()], part.table).int())
    assert 0.0 in part.table and len(used) == 4 and bool((used > 0).all())
    assert not any("prune in a phase before" in note for note in outcome.notes)


def test_centroids_are_those_of_codebook_and_weights_go_over_to_others(encoder):
    """With a step that moves nothing it stores what codebook does; with larger ones, other centroids of the same."""
    still = "train(epochs=1, batch=8, lr=1e-12, dropout=0.0)"
    plain = stored_parts(run("codebook(2, outliers=2.5)", encoder, TASK).encoder)
    seen = stored_parts(run(f"codebook_aware(2, outliers=2.5) + {still}", encoder, TASK).encoder)
    learned = stored_parts(run(f"codebook_aware(2, outliers=2.5) + {SHORT}", encoder, TASK).encoder)
    assert set(plain) == set(seen) == set(learned)
    moved = 0
    for name, part in plain.items():
        torch.testing.assert_close(seen[name].real(), part.real(), rtol=0, atol=1e-6)
        assert torch.equal(learned[name].table, part.table) and torch.equal(learned[name].places, part.places)
        moved += int((learned[name].codes != part.codes).sum())
    assert moved > 0
    dense = "backbone.encoder.layer.0.output.dense"
    assert len(plain[dense].places) and not torch.equal(learned[dense].outliers, plain[dense].outliers)


@pytest.mark.parametrize("recipe", ["ternary", "binary", "mixed_bits(2.5, group=8, batches=2, examples=4)"])
def test_without_training_it_rounds_what_is_there(encoder, recipe):
    result = run(recipe, encoder, TASK).encoder
    for name, part in stored_parts(result).items():
        weight = encoder.get_submodule(name).weight.detach()
        if recipe == "ternary":
            assert torch.equal(part.real(), to_ternary(weight, part.grid)[0])
        elif recipe == "binary":
            assert torch.equal(part.real(), rounded(weight, part.grid))
        else:
            plain = rounded(weight, part.grid)
            assert (part.real() - weight).square().sum() <= (plain - weight).square().sum()
    assert {type(one) for one in result.history[-1]["plan"]["modules"]} == {str}


def test_ternary_is_the_formula():
    weight = torch.tensor([[0.1, -0.5, 0.9, 0.1], [1.0, -1.0, 0.0, 0.2]])
    seen, (scale, zero) = to_ternary(weight, Grid(2))
    torch.testing.assert_close(seen, torch.tensor([[0.0, -0.7, 0.7, 0.0], [1.0, -1.0, 0.0, 0.0]]))
    assert zero is None and scale.tolist() == pytest.approx([0.7, 1.0])
    whole, (scale, _) = to_ternary(weight, Grid(2, "tensor"))  # mean size 0.475, threshold 0.3325
    torch.testing.assert_close(whole, torch.tensor([[0, -0.85, 0.85, 0], [0.85, -0.85, 0, 0]]))
    torch.testing.assert_close(to_ternary(seen, Grid(2))[0], seen)  # once more changes nothing
    assert torch.equal(to_ternary(torch.zeros(2, 3), Grid(2))[0], torch.zeros(2, 3))
    random = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    errors = [(rule(random, Grid(2))[0] - random).square().sum() for rule in (to_ternary, to_nearest)]
    assert errors[0] < 0.5 * errors[1]


LEARNED = ["quantize_aware(8)", "quantize_aware(2, activations=False)", "ternary", "binary", "codebook_aware(2)"]


@pytest.fixture(scope="module")
def good():
    """A toy task, and a toy model that is good at it."""
    task = toy_task("classify", 240)
    encoder = run("train(epochs=6, batch=8, lr=0.003)", small(hidden_size=32), task).encoder
    assert accuracy(encoder, task) > 95
    return task, encoder


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one == "ternary" else pytest.mark.slow) for one in LEARNED]
)
def test_training_with_rounding_keeps_what_was_learned(good, method):
    task, encoder = good
    outcome = run(f"{method} + distill + train(epochs=3, batch=8, lr=0.002)", encoder, task)
    assert not outcome.diverged and accuracy(outcome.encoder, task) > 90, outcome.notes


def test_same_seed_same_bits(encoder):
    recipe = f"quantize_aware(4) + {SHORT}"
    assert is_same_state(run(recipe, encoder, TASK).encoder, run(recipe, encoder, TASK).encoder)


# Mixed bits.

OTHERS = ["modernbert", "deberta-v2"]  # of other attention than bert


def test_the_top_eigenvalue_of_a_quadratic():
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=draw))[0]
    for values in ([5.0, 1, 1, 0.5, 0, -1], [-7.0, 2, 1, 0, 0, 0]):  # the largest size counts, whatever its sign
        matrix = basis @ torch.diag(torch.tensor(values)) @ basis.T
        weights = [torch.randn(2, 2, generator=draw).requires_grad_(), torch.randn(2, generator=draw).requires_grad_()]
        flat = torch.cat([one.flatten() for one in weights])
        slopes = torch.autograd.grad(flat @ matrix @ flat / 2, weights, create_graph=True)
        assert top_eigenvalue(slopes, weights, 100, draw) == pytest.approx(values[0], rel=0.02)


@pytest.mark.parametrize("family", ["bert", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)])
def test_curvature_is_that_of_the_whole_hessian(family):
    encoder = run(f"head | {SHORT}", small(family, layers=1), TASK).encoder
    name = next(n for n, p in encoder.named_parameters() if p.shape in ((16, 16), (48, 16)) and "backbone" in n)
    batches = draw_texts(encoder, TASK, 8, 0, "test", batch=4)
    found = layer_curvatures(encoder, [[name]], batches, rounds=300, seed=0)
    assert np.shape(found) == (1, 2)
    weight = encoder.get_parameter(name)
    for batch, value in zip(batches, found[0], strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            (slope,) = torch.autograd.grad(
                losses(encoder.head, encoder(batch), batch).mean(), weight, create_graph=True
            )
            rows = [torch.autograd.grad(one, weight, retain_graph=True)[0].flatten() for one in slope.flatten()]
        values = torch.linalg.eigvalsh(torch.stack(rows).double())
        # Two values of nearly the same size and other signs are told apart slowly: no more than the largest is found.
        assert abs(value) <= values.abs().max() * 1.001 and abs(value) >= 0.7 * values.abs().max()


def test_bits_go_where_a_byte_saves_most():
    errors = np.array([[16.0, 4, 1], [16, 4, 1], [16, 4, 1]])
    sizes = np.array([[2.0, 3, 4]] * 3)
    assert choose_bits(np.array([1.0, 1.0, 1.0]), errors, sizes, 9) == [1, 1, 1]
    assert choose_bits(np.array([1.0, 9.0, 1.0]), errors, sizes, 8) == [0, 2, 0]
    assert choose_bits(np.array([1.0, 9.0, 2.0]), errors, sizes, 8.5) == [0, 2, 0]
    assert choose_bits(np.array([1.0, 9.0, 2.0]), errors, sizes, 99) == [2, 2, 2]


def test_bits_go_past_a_number_that_is_worse_than_the_one_before():
    errors, sizes = np.array([[0.36, 0.51, 0.1]] * 2), np.array([[1.0, 2, 3]] * 2)
    assert choose_bits(np.array([100.0, 1.0]), errors, sizes, 4) == [2, 0]
    assert choose_bits(np.array([100.0, 1.0]), errors, sizes, 5) == [2, 0]
    assert choose_bits(np.array([100.0, 1.0]), errors, sizes, 6) == [2, 2]


def test_the_choice_is_the_best_one_where_steps_are_of_one_size():
    draw = np.random.default_rng(0)
    for _ in range(20):
        sharp, first = draw.random(4) * 10, draw.random((4, 1)) + 0.5
        errors, sizes = first * np.array([[16.0, 4, 1]]), np.array([[2.0, 3, 4]] * 4)
        room = draw.integers(8, 17)
        chosen = choose_bits(sharp, errors, sizes, room)
        cost = lambda pick: sum(sharp[i] * errors[i, c] for i, c in enumerate(pick))  # noqa: B023, E731
        fits = [p for p in product(range(3), repeat=4) if sum(sizes[i, c] for i, c in enumerate(p)) <= room]
        assert sum(sizes[i, c] for i, c in enumerate(chosen)) <= room
        assert cost(chosen) == pytest.approx(min(map(cost, fits)))


def test_the_plan_holds_bits_and_curvature_and_keeps_the_budget(encoder, tmp_path):
    setting = "group=8, batches=2, examples=4"
    result = run(f"mixed_bits(2.5, {setting})", encoder, TASK).encoder
    plan = next(entry["plan"] for entry in result.history if entry["step"].startswith("mixed_bits"))
    assert len(plan["layers"]) == 2 and {*plan["layers"][0]} == {"curvature", "spread", "bits"}
    assert sorted(row["bits"] for row in plan["layers"]) == [2, 3]  # one layer gets more, and it is the sharper one
    sharp = [abs(row["curvature"]) + row["spread"] for row in plan["layers"]]
    assert plan["layers"][int(np.argmax(sharp))]["bits"] == 3
    for name, part in stored_parts(result).items():
        assert part.grid.bits == plan["bits"].get(name, 8)
    wide = run("head", small(hidden_size=64, intermediate_size=256), TASK, seed=5).encoder
    for budget in (0.127, 0.132, 0.138):  # as the table shows it: the tokenizer and encoder.json with the weights
        recipe = f"mixed_bits({budget}, unit='MB', {setting}) + distill + {SHORT}"
        save_folder(run(recipe, wide, TASK, judge=False).encoder, tmp_path / "model")
        assert 0.9 * budget * 1e6 < measure_bytes(tmp_path / "model")["total"] <= budget * 1e6


@pytest.mark.parametrize("budget", ["1.5", "0.005, unit='MB'"])
def test_a_budget_that_cannot_be_held_is_refused_before_anything_is_trained(encoder, budget, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was looked at or trained")

    monkeypatch.setattr("smallbert.methods.mixed_bits.draw_texts", never)
    monkeypatch.setattr("smallbert.making.run.train", never)
    with pytest.raises(UserError, match="give a larger budget") as refusal:
        run(f"{SHORT} | mixed_bits({budget})", encoder, TASK)
    told = str(refusal.value)
    assert "bits per weight are too few" in told if budget == "1.5" else "a folder of 0.005 MB" in told
    assert ("embeddings take 0.00" in told) == ("MB" in budget)
    if "MB" in budget:  # what it names as enough is enough
        enough = float(told.split("larger budget, ")[1].split()[0])
        monkeypatch.undo()
        run(f"mixed_bits({enough}, unit='MB', batches=2, examples=4, rounds=4)", encoder, TASK)


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        ("quantize_aware(decay=1.0)", "decay is a share"),
        ("quantize_aware(activations=True, decay=0.9)", "decay=0.9 moves the ranges of activations='static'"),
        ("quantize_aware(1, symmetric=False)", "one bit is a sign"),
        ("quantize_aware(activations=False, smooth='search')", "leave one of them out"),
        (f"quantize_aware + ternary + {SHORT}", "another method of this phase rounds"),
        (f"codebook_aware + ternary + {SHORT}", "another method of this phase rounds"),
        (f"codebook_aware(outliers=-1.0) + {SHORT}", "codebook_aware: outliers is a number of standard deviations"),
        (f"codebook_aware(2, outliers=1e-9) + {SHORT}", "codebook_aware: with outliers=1e-09, 100% of the weights"),
        (f"magnitude(0.5) + binary + {SHORT}", "one bit has no zero"),
        ("prune(0.5) | binary", "one bit has no zero"),
        ("quantize | ternary", "no real-valued matrix left to round"),
        ("mixed_bits(1.5)", "give a larger budget"),
        ("mixed_bits(0.0)", "budget is above 0"),
        ("mixed_bits(fewest=4, most=2)", "fewest not more than most"),
        ("mixed_bits(rounds=0)", "are 1 or more"),
    ],
)
def test_refusals(encoder, recipe, match):
    check_refused(recipe, encoder, TASK, match)


def test_mixed_bits_needs_a_task():
    with pytest.raises(UserError, match="reads training texts, so it needs a task"):
        run("mixed_bits", small())


def test_later_training_leaves_what_is_stored(encoder):
    settled = run(f"quantize_aware(4) + {SHORT}", encoder, TASK).encoder
    later = run(SHORT, settled, TASK).encoder
    before, after = state_of(settled), state_of(later)
    stored = [name for name in before if name.endswith((".codes", ".scale", ".input_range"))]
    assert len(stored) > 30 and all(torch.equal(before[name], after[name]) for name in stored)
    assert not is_same_state(settled, later)


def test_halves_add_up():
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 33, generator=draw)
    ternary = to_ternary(weight, Grid(2))[0]
    for latent in (weight, ternary):
        halves = split(latent, ternary)
        assert torch.allclose(halves[0] + halves[1], latent, atol=1e-6)
        assert torch.allclose(sum(rounded(half, Grid(1)) for half in halves), ternary, atol=1e-6)
    first, second = split(*[torch.tensor([[0.5, -0.5, 0.0, 0.0]])] * 2)
    assert first.tolist() == [[0.25, -0.25, 0.25, 0.25]] and second.tolist() == [[0.25, -0.25, -0.25, -0.25]]


def test_splitting_goes_on_where_ternary_was(encoder, family, tmp_path):
    before = run("head | ternary(embeddings=8)", small(family), TASK).encoder
    after = run("binary(split=True)", before, TASK).encoder
    assert torch.allclose(scores_of(after, TASK), scores_of(before, TASK), atol=1e-5)
    parts = {name: part.grid.bits for name, part in stored_parts(after).items()}
    assert set(parts.values()) == {1, 8} and {name.rpartition(".")[2] for name, bits in parts.items() if bits == 1} == {
        "first",
        "second",
    }
    save_folder(after, tmp_path / "model")
    assert torch.equal(scores_of(load_folder(tmp_path / "model"), TASK), scores_of(after, TASK))


def test_halves_learn_apart(encoder):
    """Also of a model with real weights, which is made ternary by it."""
    ternary = run("ternary(embeddings=8)", encoder, TASK).encoder
    split_at_once = run("binary(split=True, embeddings=8)", encoder, TASK).encoder
    assert torch.allclose(scores_of(split_at_once, TASK), scores_of(ternary, TASK), atol=1e-5)
    learned = run(f"binary(split=True) + distill + {SHORT}", ternary, TASK).encoder
    assert not torch.allclose(scores_of(learned, TASK), scores_of(ternary, TASK), atol=1e-5)
    with pytest.raises(UserError, match="row by row"):
        run("binary(split=True, scope='tensor')", encoder, TASK)
    # Four levels, one a for part of a row, one factor a column: no two halves of one scale a row add up to these.
    scaled = f"quantize_aware(2, smooth='search') + {SHORT}"
    for first in ("quantize", "quantize(2, symmetric=False)", "quantize(2, scope='group', group=8)", scaled):
        with pytest.raises(UserError, match="no ternary or real-valued matrix"):
            run(f"{first} | binary(split=True)", encoder, TASK)


def test_a_head_that_did_not_run_gets_a_range_all_the_same(encoder, tmp_path):
    """A phase that guesses words runs no head of the task, so that nothing was seen of what goes into it."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 20, encoding="utf-8")
    recipe = f"quantize_aware(8) + pretrain({str(tmp_path / 'text.txt')!r}, steps=2, batch=4)"
    result = run(recipe, encoder, TASK).encoder
    low, high = result.get_submodule("heads.task.dense").input_range.tolist()
    assert low < 0 < high
    assert not torch.equal(*scores_of(result, TASK)[:2])
