"""What holds for every pruning method: schedules, shares, what is masked, what is written, refusals."""

import pytest
import torch
from pruned import CURVED, SIX, TASK, WHOLE, density, everything
from safetensors.torch import load_file
from toys import accuracy, check_refused, daily, is_same_state, phase_of, run, small, state_of, toy_task

from smallbert.measuring.cost import count_parameters
from smallbert.methods import METHODS
from smallbert.methods.l0 import _Gated
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.zeros import sparse_linears
from smallbert.training.masks import _Masked, magnitudes, maskable
from smallbert.training.schedule import Schedule
from smallbert.training.thresholds import kth_largest


def test_the_cubic_way_of_the_papers_at_named_times():
    """SST-2, 25 epochs, one of warm-up at each end: half the weights are left at epoch 6.5, 20 % at 12.9."""
    sst2 = Schedule(1.0, 0.1, 1 / 25, 24 / 25, "cubic")
    assert [sst2.at(epoch / 25) for epoch in (0, 1, 6.5, 10.1, 12.9, 24, 25)] == pytest.approx(
        [1.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1], abs=0.005
    )
    steps, first, last, total = 3 * 2100, 2100, 2100, 25 * 2105  # schedule_threshold's own formula, in steps
    wanted = 0.1 + 0.9 * (1 - (steps - first) / (total - first - last)) ** 3
    assert Schedule(1.0, 0.1, first / total, 1 - last / total, "cubic").at(steps / total) == pytest.approx(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kth_largest_is_what_sorting_gives(dtype):
    """Exactly, whatever the numbers; on a GPU the same is asked of kernels."""
    torch.manual_seed(0)
    rows = torch.randn(6, 501).to(dtype)
    rows[1], rows[2, ::2], rows[3, 7] = 0.0, rows[2, 0], float("inf")
    rows[4, :400] = torch.finfo(torch.float32).min  # pruned before
    rows = rows.t().contiguous().t()  # as it may lie in memory
    high_first = rows.sort(1, descending=True).values
    for count in (1, 2, 50, 250, 500, 501):
        found = kth_largest(rows, torch.full((6,), count))
        assert found.dtype == dtype and torch.equal(found, high_first[:, count - 1])
    mixed = kth_largest(rows.requires_grad_(), torch.tensor([0, 1, 501, 502, 3, 0]))
    assert mixed[[0, 5]].tolist() == [float("inf")] * 2
    assert torch.equal(mixed[1:5], torch.stack([high_first[i, k] for i, k in ((1, 0), (2, 500), (3, 500), (4, 2))]))


def test_a_drop_and_stairs_for_well_tuned_magnitude_pruning(encoder):
    way = METHODS["magnitude"](0.1, begin=0.2, finish=0.8, first=0.4, stairs=3).schedule()
    steps = [0.4, 0.1 + 0.3 * (2 / 3) ** 3, 0.1 + 0.3 * (1 / 3) ** 3, 0.1]
    assert [way.at(x) for x in (0.0, 0.19, 0.2, 0.39, 0.4, 0.59, 0.6, 0.8, 1.0)] == pytest.approx(
        [1.0, 1.0, steps[0], steps[0], steps[1], steps[1], steps[2], steps[3], steps[3]]
    )
    assert METHODS["magnitude"](0.1).schedule() == Schedule(1.0, 0.1, 0.1, 0.7, "cubic")
    assert METHODS["magnitude"](0.6, first=0.3).schedule().at(0.5) == 0.6
    at_once = METHODS["magnitude"](0.1, begin=0.5, finish=0.8, shape="constant").schedule()
    assert [at_once.at(x) for x in (0.0, 0.49, 0.5, 0.7, 1.0)] == [1.0, 1.0, 0.1, 0.1, 0.1]
    phase = phase_of(f"magnitude(0.1, begin=0.2, finish=0.8, first=0.4, stairs=3) + {WHOLE}", encoder, TASK)
    for phase.step, share in ((1, 1.0), (2, 0.4), (3, 0.4), (4, steps[1]), (10, 0.1)):
        phase.set_dials()
        for weight in phase.weights().values():
            assert int(weight.count_nonzero()) == round(share * weight.numel())


MASKED = ["magnitude(0.3)", "movement(0.3)", "movement(0.3, scope='global')", "soft_movement", "l0", CURVED]


@pytest.mark.parametrize("method", MASKED)
@pytest.mark.parametrize("what", ["layers", "layers+pooler+embeddings"])
def test_masked_outputs_equal_folded_ones(encoder, method, what):
    method = f"{method[:-1]}, what={what!r})" if method.endswith(")") else f"{method}(what={what!r})"
    phase = phase_of(f"{method} + {WHOLE}", encoder, TASK)
    torch.manual_seed(3)
    for one in phase.modules.parameters():
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
    assert outcome.notes[:1] == [
        f"{left / numbers:.2%} of the {numbers:,} layers+embeddings weights are left, "
        f"{(whole - numbers + left) / whole:.2%} of all {whole:,} parameters"
    ]


HARDLY, IDLE, FEWER = "too few to train the weights left", "almost nothing was pruned", "fewer were left"


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (f"movement(0.3, begin=0.0) + {SIX}", HARDLY),
        ("smooth_movement(0.3, window=20) + train(epochs=7, batch=8, lr=1e-3)", HARDLY),
        ("magnitude(0.3, begin=0.0, finish=0.5) + train(epochs=7, batch=8)", None),
        (f"l0 + {SIX}", IDLE),
        (f"soft_movement + {SIX}", IDLE),
        (f"soft_movement(pull=5.0, lr=3.0) + {SIX}", None),
        ("prune(0.3) | prune(0.5)", FEWER),
        ("prune(0.3) | magnitude(0.5, begin=0.0) + train(epochs=7, batch=8)", FEWER),
        ("prune(0.5) | prune(0.3)", None),
        (f"delete_information(0.3, what='layers') + {SIX}", None),
    ],
)
def test_what_did_not_prune_as_asked_is_noted(encoder, recipe, said):
    notes = [note for note in run(recipe, encoder, TASK, judge=False).notes if "weights are left" not in note]
    found = [part for part in (HARDLY, IDLE, FEWER) if any(part in note for note in notes)]
    assert found == ([said] if said else [])


@pytest.mark.parametrize("store", ["sparse", "quantize"])
def test_pruned_and_stored_otherwise_in_one_phase(encoder, store):
    outcome = run(f"prune(0.1) + {store}", encoder, TASK)
    apart = run(f"prune(0.1) | {store}", encoder, TASK)
    assert is_same_state(outcome.encoder, apart.encoder)


def test_what_is_stored_without_zeros_counts_among_all(encoder):
    partly = encoder.copy()
    with torch.no_grad():
        weight = partly.get_parameter(maskable(encoder)[0])
        weight.mul_(torch.rand_like(weight) < 0.1)
    stored = run("sparse", partly, TASK).encoder
    assert len(sparse_linears(stored)) == 1
    note = run("prune(0.5)", stored, TASK).notes[0]
    counts = count_parameters(run("prune(0.5)", stored, TASK).encoder)
    gone, whole = counts["encoder"] - counts["encoder_non_zero"], counts["total"]
    assert note.endswith(f"{(whole - gone) / whole:.2%} of all {whole:,} parameters")


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
    phase = phase_of(f"movement(0.25, begin=0.0, finish=1.0) + watch(2, mask='final') + {SIX}", encoder, TASK)
    phase.step, phase.total = 3, 6
    phase.set_dials()
    before = {name: float(dial) for name, dial in phase.dials.items()}
    next(method for method in phase.methods if method.name == "watch").look(phase)
    assert {name: float(dial) for name, dial in phase.dials.items()} == before


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
        ("magnitude(0.1, shape='constant', first=0.3)", "first and stairs have no effect"),
        ("second_order(0.1, shape='constant', stairs=3)", "first and stairs have no effect"),
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
        ("rpp + train(freeze='backbone')", "does not train some of them"),
        ("smooth_movement(what='layers+embeddings') + train(freeze='embeddings')", "does not train some of them"),
        ("second_order + train(freeze='backbone')", "does not train some of them"),
        ("quantize | prune", "there is no weight to prune"),
        ("quantize | delete_information", "there is no weight to prune"),
        (
            "movement + magnitude",
            "one method that decides which weights are kept, but magnitude and movement were given",
        ),
        ("prune(0.3) + delete_information(0.3)", "but delete_information and prune were given; keep one"),
        ("movement + prune(0.3)", "but movement and prune were given; keep one"),
        ("l0 + rpp + train(epochs=2)", "but l0 and rpp were given; keep one, or put |"),
        ("repeat(2, soft_movement) | repeat(1, movement) + second_order", "but movement and second_order were given"),
        (
            "lottery + distill",
            r"^lottery expands into 23 phases, .* put the others into lottery\(part=...\)$",
        ),
        ("rpp + train(epochs=2, batch=8)", "the phase has 6 steps, and weights are pulled by their size only after"),
        ("rpp(steps=6) + train(epochs=2, batch=8)", "steps=6, so it would prune nothing"),
    ],
)
def test_refusals(encoder, recipe, match):
    check_refused(recipe, encoder, TASK, match)


MILD = [  # each leaves a quarter to a half of the weights
    "magnitude(0.4)",
    "movement(0.3)",
    "soft_movement(pull=5.0, lr=0.1)",
    "l0(pull=1.0, lr=0.2)",
    "smooth_movement(0.4, window=5)",
    "second_order(0.5, events=2, gradients=24, block=16, examples=4, damp=1e-4, first=0.7)",
    "rpp(pull=1.0, steps=10)",
]


@pytest.fixture(scope="module")
def good():
    """A toy model that gets everything right, and its task."""
    task = toy_task("classify", 240)
    model = run("train(epochs=6, batch=8, lr=0.003)", small(hidden_size=32), task).encoder
    assert accuracy(model, task) > 95
    return model, task


@pytest.mark.parametrize("method", daily(MILD, every=3))
def test_pruned_models_still_tell_texts_apart(good, method):
    model, task = good
    outcome = run(f"{method} + train(epochs=2, batch=8, lr=0.0003)", model, task)
    assert 0.25 < density(outcome.encoder, maskable(model)) < 0.55
    assert not outcome.diverged and accuracy(outcome.encoder, task) > 95


def test_and_do_not_where_a_mask_is_upside_down(good, monkeypatch):
    model, task = good

    for function in (_Masked, _Gated):

        def wrong(ctx, *slopes, right=function.backward):
            to_scores, *others = right(ctx, *slopes)
            return (None if to_scores is None else -to_scores, *others)

        monkeypatch.setattr(function, "backward", staticmethod(wrong))
    monkeypatch.setattr("smallbert.methods.magnitude.magnitudes", lambda names, weights: -magnitudes(names, weights))
    for method in ("movement(0.3)", "l0(pull=1.0, lr=0.2)", "magnitude(0.4)"):
        outcome = run(f"{method} + train(epochs=2, batch=8, lr=0.0003)", model, task)
        assert accuracy(outcome.encoder, task) < 95, method
