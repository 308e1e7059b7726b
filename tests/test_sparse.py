"""Matrices without zeros: what is stored comes back to the bit, is small, is counted right, and multiplies the same."""

import doctest
import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cost import changed
from torch import nn
from toys import run, scores_of, small, toy_task

from smallbert.cli.catalog import inspect_folder
from smallbert.errors import UserError
from smallbert.export import export_hugging_face, export_onnx
from smallbert.making.estimate import estimate
from smallbert.measuring import cost
from smallbert.measuring.cost import count_macs, count_parameters, measure_latency
from smallbert.measuring.disk import measure_bytes, tensor_bytes
from smallbert.measuring.pruned import note_zeros
from smallbert.methods.head import Head
from smallbert.model import zeros
from smallbert.model.anatomy import linears
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.zeros import SparseLinear, best_width, pack, sparse_linears, unpack, with_plain_linears

TASK = toy_task("pair", 16)
SHORT = "train(epochs=1, batch=8, lr=0.001)"


def draw(shape, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=generator) < density
    return torch.randn(shape, generator=generator).masked_fill(~kept, 0.0)


def odd_matrices():
    """Matrices of every kind that a format could trip over."""
    empty_rows, far = draw((9, 40), 0.3), torch.zeros(3, 700)
    empty_rows[[0, 4, 8]] = 0
    far[0, 0], far[1, 60], far[2, 699] = 1.0, -2.0, 3.0  # gaps of 759 and 1338 zeros
    borders = torch.zeros(1, 1200)
    borders[0, torch.tensor([254, 510, 767, 768])] = 1.0  # gaps of 254, 255, 256 and 0 zeros
    return [
        *(torch.zeros(5, 7), torch.ones(5, 7), torch.zeros(1, 1), torch.tensor([[2.0]]), empty_rows, far, borders),
        *(torch.eye(33), torch.full((2, 3), float("nan")), draw((1, 17), 0.5), draw((17, 1), 0.5)),
        *(draw((31, 57), density, seed) for seed, density in enumerate((0.99, 0.7, 0.4, 0.2, 0.1, 0.03, 0.005))),
    ]


@pytest.mark.parametrize("width", zeros.WIDTHS)
def test_what_is_packed_comes_back(width):
    for weight in odd_matrices():
        packed, values = pack(weight, width)
        places = unpack(packed, width)
        assert places.tolist() == weight.flatten().nonzero()[:, 0].tolist()
        assert torch.equal(values.nan_to_num(9), weight.flatten()[places].nan_to_num(9))
        assert packed.dtype == torch.uint8 and len(packed) >= best_width(weight)[1]
        assert len(pack(weight, best_width(weight)[0])[0]) == best_width(weight)[1]


def test_gaps_of_one_bit_are_a_mask_and_the_examples_hold():
    weight = draw((8, 8), 0.5)
    weight[-1, -1] = 1.0
    bits = pack(weight, 1)[0].numpy()
    mask = [int(bits[place // 8]) >> place % 8 & 1 == 0 for place in range(64)]
    assert mask == (weight != 0).flatten().tolist()
    assert doctest.testmod(zeros).failed == 0 and doctest.testmod(zeros).attempted == 2


@pytest.mark.parametrize(
    ("density", "width", "most"), [(0.5, 1, 0.54), (0.3, 2, 0.33), (0.1, 4, 0.12), (0.03, 8, 0.04)]
)
def test_bytes_of_a_matrix(density, width, most):
    weight = draw((256, 768), density)
    packed, values = pack(weight, best_width(weight)[0])
    assert best_width(weight)[0] == width
    assert density < (packed.nbytes + values.nbytes) / weight.nbytes < most


def pruned(family="bert", keep=0.3, **shape):
    return run(f"head | prune({keep})", small(family, **shape), TASK).encoder


def folder_bytes(encoder, path):
    """Bytes on disk of the matrices of the layers, and what a card says of the backbone."""
    save_folder(encoder, path)
    names = [f"backbone.{name}." for name, _ in linears(encoder.backbone)]
    sizes = tensor_bytes(path / "model.safetensors")
    prefix = "" if any(name.startswith("backbone.") for name in sizes) else "backbone."
    sizes = {f"{prefix}{name}".replace("backbone.bert.", "backbone."): size for name, size in sizes.items()}
    kinds = ("weight", "gaps", "values")
    return sum(sizes.get(f"{name}{kind}", 0) for name in names for kind in kinds), measure_bytes(path)["encoder"]


@pytest.mark.parametrize(("values", "most"), [("float32", 0.16), ("float16", 0.1)])
def test_the_folder_is_small_and_its_card_says_so(values, most, tmp_path):
    dense = pruned(keep=0.1, hidden_size=128, intermediate_size=512)
    sparse = run(f"sparse('{values}')", dense, TASK).encoder
    (whole, all_whole), (part, all_part) = folder_bytes(dense, tmp_path / "a"), folder_bytes(sparse, tmp_path / "b")
    assert 0 < part <= most * whole and all_whole - all_part == whole - part
    assert json.loads((tmp_path / "b" / "encoder.json").read_text())["layout"] == "smallbert"
    loaded = load_folder(tmp_path / "b")
    for (name, old), (_, new) in zip(linears(dense.backbone), linears(loaded.backbone), strict=True):
        wanted = old.weight if values == "float32" else old.weight.half().float()
        assert isinstance(new, SparseLinear) and torch.equal(new.weight, wanted), name


def test_counts_are_those_of_the_dense_model(family):
    dense = pruned(family)
    sparse = run("sparse", dense, TASK).encoder
    assert sparse_linears(sparse) and count_parameters(sparse) == count_parameters(dense)
    for way in ("measured", "dense", "sparse"):
        zeros._seen.clear()  # what is timed on the way must not be counted
        assert count_macs(run(f"sparse(run='{way}')", dense, TASK).encoder, 12) == count_macs(dense, 12)


def test_numbers_too_small_for_half_precision_are_zeros():
    dense = pruned()
    with torch.no_grad():
        _, first = next(linears(dense.backbone))
        first.weight.mul_(1e-12)
    found = count_parameters(run("sparse('float16')", dense, TASK).encoder)
    lost = int(first.weight.count_nonzero())
    assert lost and found["encoder_non_zero"] == count_parameters(dense)["encoder_non_zero"] - lost
    assert found["encoder"] == count_parameters(dense)["encoder"]


def test_all_ways_agree(family):
    dense = pruned(family, keep=0.3)
    wanted = scores_of(dense, TASK)
    for way, width in (("dense", 0), ("sparse", 0), ("sparse", 5)):
        encoder = run(f"sparse(run='{way}')", dense, TASK).encoder
        assert torch.equal(scores_of(with_plain_linears(encoder.copy()), TASK), wanted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zeros, "PIECE", width or zeros.PIECE)  # pieces that do not come out even
            torch.testing.assert_close(scores_of(encoder, TASK), wanted, atol=2e-5, rtol=1e-4)
        assert {part.last_way for part in sparse_linears(encoder).values()} == {way}
    assert torch.equal(scores_of(run("sparse(run='dense')", dense, TASK).encoder, TASK), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_products_of_odd_matrices(bias):
    for weight in odd_matrices():
        if weight.isnan().any():
            continue
        old = nn.Linear(*weight.shape[::-1], bias=bias)
        width, size = best_width(weight)
        new = SparseLinear(old, int(weight.count_nonzero()), width, size, torch.float32, "sparse").eval()
        new.fill(weight)
        inputs = draw((2, 37, weight.shape[1]), 1.0)
        with torch.no_grad():
            wanted = nn.functional.linear(inputs, weight, old.bias)
            torch.testing.assert_close(new(inputs), wanted, atol=1e-4, rtol=1e-4)
            assert new.last_way == "sparse" and new(inputs[:, :0]).shape == wanted[:, :0].shape


def test_what_trains_asks_for_gradients_or_has_no_kernels_is_dense(monkeypatch):
    part = next(iter(sparse_linears(run("sparse(run='sparse')", pruned(), TASK).encoder).values()))
    inputs, ways = torch.randn(3, 16, requires_grad=True), []

    def way(inputs):
        part(inputs)
        return part.last_way

    part(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, part.weight.sum(0).expand(3, -1))
    ways.append(part.last_way)
    with torch.no_grad():
        assert way(inputs) == "sparse"
        part.train()
        ways.append(way(inputs))
        part.eval().to(torch.bfloat16)
        ways.append(way(inputs.bfloat16()))
        part.to(torch.float32)
        assert way(inputs) == "sparse"
        monkeypatch.setattr(zeros, "SPARSE_KERNELS", False)
        ways.append(way(inputs))
    assert ways == ["dense"] * 4


def test_a_way_is_timed_a_few_times_for_like_products(monkeypatch):
    asked, said = [], {"dense": 2.0, "sparse": 1.0}
    monkeypatch.setattr(zeros, "_timed", {})
    monkeypatch.setattr(zeros, "_seen", zeros.Counter())
    monkeypatch.setattr(zeros, "time_ways", lambda ways: asked.append([run() for run in ways.values()]) or dict(said))
    encoder = run("sparse", pruned(keep=0.3), TASK).encoder
    parts = sparse_linears(encoder)
    scores_of(encoder, TASK)
    first = len(asked)
    assert 0 < first < len(parts) and {part.last_way for part in parts.values()} == {"sparse"}
    assert {kind for part in parts.values() for kind in part._kept} == {"sparse"}  # the loser is not kept
    said["dense"] = 1.5  # the machine was busy before, but this is still no better
    for _ in range(70):
        scores_of(encoder.copy(), TASK)
    kinds = len(zeros._seen)
    assert len(asked) == kinds * len(zeros.AGAIN)
    with torch.inference_mode():
        scores_of(encoder, TASK, index=[0])  # far fewer tokens
    assert len(asked) > kinds * len(zeros.AGAIN)


def test_a_choice_made_on_a_busy_machine_is_mended(monkeypatch):
    monkeypatch.setattr(zeros, "_timed", {})
    monkeypatch.setattr(zeros, "_seen", zeros.Counter())
    part = next(iter(sparse_linears(run("sparse", pruned(keep=0.3), TASK).encoder).values())).eval()
    inputs = torch.randn(5, part.in_features)
    found = iter([{"dense": 2.0, "sparse": 3.0}, {"dense": 2.5, "sparse": 1.0}, {"dense": 9.0, "sparse": 9.0}])
    monkeypatch.setattr(zeros, "time_ways", lambda ways: next(found))
    with torch.inference_mode():
        ways = [part._way(inputs) for _ in range(zeros.AGAIN[-1] + 3)]
    assert ways == ["dense"] * 7 + ["sparse"] * 60


def test_timing_that_fails_or_runs_elsewhere_is_made_up_for(monkeypatch):
    monkeypatch.setattr(zeros, "_timed", {})
    monkeypatch.setattr(zeros, "_seen", zeros.Counter())
    part = next(iter(sparse_linears(run("sparse", pruned(keep=0.3), TASK).encoder).values())).eval()
    inputs, found = torch.randn(5, part.in_features), iter([MemoryError(), {"dense": 2.0, "sparse": 1.0}])

    def time_ways(ways):
        taken = next(found)
        if isinstance(taken, Exception):
            raise taken
        return taken

    monkeypatch.setattr(zeros, "time_ways", time_ways)
    with torch.inference_mode():
        with pytest.raises(MemoryError):
            part(inputs)
        assert part._way(inputs) == "sparse"  # the second product of its kind, of which none was timed


def test_a_form_that_is_no_longer_used_is_let_go(monkeypatch):
    part = next(iter(sparse_linears(run("sparse", pruned(keep=0.3), TASK).encoder.copy()).values())).eval()
    part._chosen.clear()  # by those who scored it
    monkeypatch.setattr(zeros, "_timed", {})
    monkeypatch.setattr(zeros, "_seen", zeros.Counter())
    inputs, twin = torch.randn(5, part.in_features), part.__deepcopy__({})
    found = iter([{"dense": 2.0, "sparse": 3.0}, {"dense": 2.5, "sparse": 1.0}])
    monkeypatch.setattr(zeros, "time_ways", lambda ways: next(found))
    with torch.inference_mode():
        part(inputs)
        assert list(part._kept) == ["dense"]
        for _ in range(7):
            twin(inputs)  # the last of which turns the choice, for both
        part(inputs)
    assert list(part._kept) == list(twin._kept) == ["sparse"]


@pytest.mark.parametrize(("scale", "turns"), [(1.0, 4), (1e-6, 12)])
def test_the_fastest_way_is_the_one_that_took_least(monkeypatch, scale, turns):
    now, slow, calls = [0.0], iter([9.0, 3.0, 2.0, *[3.0] * 9]), []
    monkeypatch.setattr(zeros, "perf_counter", lambda: now[0])

    def take(seconds):
        now[0] += seconds * scale
        calls.append(seconds)

    ways = {"slow once, then quick": lambda: take(next(slow)), "steady": lambda: take(2.5)}
    taken = zeros.time_ways(ways)
    assert taken == pytest.approx({"slow once, then quick": 2.0 * scale, "steady": 2.5 * scale})
    assert len(calls) == 2 * turns


def test_what_was_copied_in_inference_mode_works():
    encoder = run("sparse(run='sparse')", pruned(), TASK).encoder
    with torch.inference_mode():
        assert torch.equal(scores_of(encoder.copy(), TASK), scores_of(encoder, TASK))


@pytest.mark.parametrize("way", ["dense", "sparse"])
def test_changed_numbers_are_seen_and_copies_share_nothing(way):
    encoder = run(f"sparse(run='{way}')", pruned(), TASK).encoder
    before = scores_of(encoder, TASK)
    other = encoder.copy()
    with torch.no_grad():
        for part in sparse_linears(encoder).values():
            part.values.mul_(2)
    assert not torch.equal(scores_of(encoder, TASK), before) and torch.equal(scores_of(other, TASK), before)


@pytest.mark.parametrize("recipe", ["sparse", "sparse('float16')", "quantize | sparse"])
def test_a_model_without_zeros_is_refused(recipe):
    with pytest.raises(UserError, match="enough zeros to be smaller without them; prune first") as refusal:
        run(recipe, small(), TASK)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("recipe", "phrase"),
    [
        (
            "prune(0.5) | sparse | sparse",
            "12 matrices of this bert model are stored without their zeros already, .*leave",
        ),
        (
            f"prune(0.5) | sparse | magnitude(0.2) + {SHORT}",
            r"prune before sparse, as in magnitude\(0.1\) \+ train \| sparse",
        ),
        ("prune(0.5) | sparse | prune(0.2)", "stored without their zeros, and are not trained; prune before sparse"),
    ],
)
def test_what_cannot_follow_sparse_says_what_to_write_instead(recipe, phrase):
    with pytest.raises(UserError, match=phrase) as refusal:
        run(recipe, small(), TASK)
    assert "\n" not in str(refusal.value) and "quantize" not in str(refusal.value)


def test_inspect_counts_what_sparse_matrices_stand_for_and_refuses_what_running_would(tmp_path):
    dense = pruned(keep=0.1)
    for name, encoder in {"dense": dense, "sparse": run("sparse", dense, TASK).encoder}.items():
        save_folder(encoder, tmp_path / name)
    whole, small_one = (inspect_folder(tmp_path / name) for name in ("dense", "sparse"))
    assert small_one["parameters"] == whole["parameters"]
    parts = whole["parameters"]
    assert sum(parts[part] for part in ("embeddings", "layers", "head", "pooler")) == parts["total"]
    assert parts["encoder_non_zero"] == pytest.approx(0.1 * parts["encoder"], rel=0.01)
    assert small_one["bytes"]["encoder"] < 0.25 * whole["bytes"]["encoder"]
    presets = [{row["preset"]: row for row in found["presets"]} for found in (whole, small_one)]
    assert presets[0]["gmp10"]["fits"] and presets[0]["ticket30"]["fits"]
    for name in ("gmp10", "l0-masks", "ticket30", "deleted30"):
        assert not presets[1][name]["fits"] and "prune before sparse" in presets[1][name]["why"], name
    assert presets[1]["baseline"]["fits"] and presets[1]["baseline"]["parameters"] == parts["total"]


def test_an_estimate_knows_about_how_small_sparse_will_be():
    encoder = small(hidden_size=64, intermediate_size=256)
    for keep in (0.1, 0.03):
        made = run(f"prune({keep}) | sparse", encoder, TASK, judge=False).encoder
        guess = estimate(encoder, f"prune({keep}) | sparse")
        real = sum(tensor.numel() * tensor.element_size() for tensor in made.state_dict().values())
        assert guess["fits"] and guess["weight_bytes"] == pytest.approx(real, rel=0.02)
        assert guess["weight_bytes"] < 0.9 * estimate(encoder, f"prune({keep})")["weight_bytes"]
    unknown, never = estimate(encoder, f"l0 + {SHORT} | sparse"), estimate(encoder, "sparse")
    assert unknown["fits"] and unknown["weight_bytes"] == estimate(encoder, "finetune")["weight_bytes"]
    assert not never["fits"] and "prune first" in never["why"]
    assert estimate(pruned(keep=0.1), "sparse")["fits"]
    with_states = estimate(encoder, f"finetune | magnitude(0.03) + align('hidden') + distill + {SHORT} | sparse")
    assert with_states["weight_bytes"] == guess["weight_bytes"]  # `what` of align is not what is pruned


def with_a_byte_lost(gaps):
    gaps[len(gaps) // 2] = 255
    return gaps


GAPS = {  # what was damaged, in gaps of how many bits -> what is said
    "zeros": (torch.zeros_like, 4, r"its gaps lead to \d+ places, but it has \d+ values"),
    "ones": (lambda gaps: torch.full_like(gaps, 255), 4, r"its gaps lead to 0 places, but it has \d+ values"),
    "a byte": (with_a_byte_lost, 4, r"its gaps lead to \d+ places, but it has \d+ values"),
    # As many numbers as there were, each behind the widest gap that has one.
    "far": (lambda gaps: torch.where(gaps == 255, gaps, 254), 8, r"its gaps lead to place \d+ of 1024"),
}


@pytest.mark.parametrize("damage", list(GAPS))
def test_gaps_that_lead_nowhere_are_refused_when_the_folder_is_loaded(damage, tmp_path):
    """Used as they are, they would be read, and written, beyond the end of a matrix."""
    change, width, phrase = GAPS[damage]
    dense = pruned(keep={4: 0.1, 8: 0.02}[width], hidden_size=32, intermediate_size=32)
    save_folder(run("sparse", dense, TASK).encoder, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name, part in sparse_linears(load_folder(tmp_path / "model")).items() if part.width == width)
    tensors[f"{name}.gaps"] = change(tensors[f"{name}.gaps"])
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=rf"the weights in .*model do not fit .*: of {name}, {phrase}; save or") as said:
        load_folder(tmp_path / "model")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(("width", "phrase"), [(1, "but it has"), (3, "no gaps of 3 bits, only of 1, 2, 4, 8")])
def test_gaps_of_another_width_are_refused_when_the_folder_is_loaded(width, phrase, tmp_path):
    save_folder(run("sparse", pruned(keep=0.1), TASK).encoder, tmp_path / "model")
    about = tmp_path / "model" / "encoder.json"
    saved = json.loads(about.read_text())
    assert saved["history"][-1]["plan"]["matrices"][0]["width"] == 4
    saved["history"][-1]["plan"]["matrices"][0]["width"] = width
    about.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=phrase):
        load_folder(tmp_path / "model")


def test_a_folder_of_an_unknown_method_is_refused_in_a_sentence(tmp_path):
    save_folder(run("sparse", pruned(), TASK).encoder, tmp_path / "model")
    about = tmp_path / "model" / "encoder.json"
    about.write_text(about.read_text().replace("sparse(values", "sparser(values"))
    with pytest.raises(UserError, match=r"the recorded steps of .* cannot be repeated: .*'sparser'"):
        load_folder(tmp_path / "model")


@pytest.mark.parametrize("mixed", ["", "mix_layers | "])
def test_after_fine_pruning_and_before_quantize(mixed, tmp_path):
    base = small(hidden_size=32, intermediate_size=64)
    outcome = run(f"{mixed}magnitude(0.1) + {SHORT} | sparse | quantize", base, TASK)
    dense = run(f"{mixed}magnitude(0.1) + {SHORT} | quantize", base, TASK).encoder
    save_folder(outcome.encoder, tmp_path / "model")
    loaded = load_folder(tmp_path / "model")
    assert torch.equal(scores_of(loaded, TASK), scores_of(outcome.encoder, TASK))
    assert (scores_of(loaded, TASK) - scores_of(dense, TASK)).abs().max() < 0.05
    found = count_parameters(loaded)
    assert found["encoder_non_zero"] == pytest.approx(0.1 * found["encoder"], rel=0.02)
    assert (loaded.mixture is not None) == bool(mixed)


def test_stored_numbers_stay_while_the_rest_is_trained():
    sparse = run("sparse", pruned(), TASK).encoder
    outcome = run(SHORT, sparse, TASK)
    later = outcome.encoder
    assert any("only the weights around them are; to train them too, put sparse last" in n for n in outcome.notes)
    for (name, old), new in zip(sparse_linears(sparse).items(), sparse_linears(later).values(), strict=True):
        assert torch.equal(new.values, old.values) and torch.equal(new.gaps, old.gaps), name
        assert not torch.equal(new.bias, old.bias), name


@pytest.mark.slow
def test_compiled_layers_give_the_same():
    encoder = run("sparse(run='sparse')", pruned(), TASK).encoder
    wanted = scores_of(encoder, TASK)
    for layer in encoder.backbone.encoder.layer:
        layer.compile(backend="eager")
    torch.testing.assert_close(scores_of(encoder, TASK), wanted, atol=2e-5, rtol=1e-4)
    assert {part.last_way for part in sparse_linears(encoder).values()} == {"dense"}


def test_handed_over_it_is_a_plain_model(tmp_path):
    dense = pruned()
    save_folder(run("sparse", dense, TASK).encoder, tmp_path / "sparse")
    export_hugging_face(tmp_path / "sparse", tmp_path / "plain")
    assert torch.equal(scores_of(load_folder(tmp_path / "plain"), TASK), scores_of(dense, TASK))
    if all(map(find_spec, ("onnxscript", "onnxruntime"))):
        assert export_onnx(tmp_path / "sparse", tmp_path / "onnx")["difference"] < 1e-4


def test_a_card_says_what_zeros_do_and_how_it_ran(tmp_path, tiny):
    dense, plain = pruned(keep=0.1), changed(tiny(), Head())
    sparse = run("sparse(run='sparse')", dense, TASK).encoder
    notes = {}
    for name, encoder in {"plain": plain, "dense": dense, "sparse": sparse}.items():
        save_folder(encoder, tmp_path / name)
        notes[name] = note_zeros(cost.measure(encoder, tmp_path / name, 8, seconds=0.01))
    assert notes["plain"] == [] and "10.0% of the weights in the layers' matrices are left" in notes["dense"][0]
    assert notes["dense"][0].endswith("no faster; in the time measured all products were dense")
    assert notes["sparse"][0].endswith(
        "no faster; in the time measured 12 of 12 pruned matrices ran as sparse products"
    )
    untimed = cost.measure(sparse, tmp_path / "sparse", 8, seconds=None)
    assert note_zeros(untimed)[0].endswith("no faster; nothing was timed")
    assert "sparse_products" not in measure_latency(dense, 8, repeats=1)
