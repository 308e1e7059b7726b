"""Costs against their closed forms: what can be worked out by hand is, and times only in their order."""

import json
import types

import pytest
import torch

from smallbert.errors import UserError
from smallbert.measuring import cost
from smallbert.measuring.card import FIELDS
from smallbert.measuring.cost import (
    WARM,
    count_macs,
    count_parameters,
    measure,
    measure_latencies,
    measure_latency,
    measure_throughput,
    size_in_words,
)
from smallbert.measuring.disk import PARTS, measure_bytes
from smallbert.methods.drop_layers import DropLayers
from smallbert.methods.head import Head
from smallbert.methods.mix_layers import MixLayers
from smallbert.methods.quantize import Quantize
from smallbert.model.anatomy import linears
from smallbert.model.encoder import Encoder
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.products import are_exact
from smallbert.tiny import make_encoder

H, F, L, VOCABULARY, POSITIONS = 16, 32, 4, 100, 72  # the shape of tiny encoders
MATRICES = 4 * H * H + 2 * H * F


@pytest.fixture(autouse=True)
def hasty():
    """Here speed is what tests are about."""


def changed(encoder, *methods, kind="classify"):
    """A copy to which methods were applied, as a recipe would."""
    task = types.SimpleNamespace(kind=kind, labels=("no", "maybe", "yes") if kind in ("classify", "tag") else ())
    for method in methods:
        before, encoder = encoder, encoder.copy()
        plan = method.plan(encoder, task)
        encoder.apply_method(method, plan)
        method.fill(encoder, before, plan, task, 0)
    return encoder.eval()


def test_parameters_of_bert_by_hand(tiny):
    encoder = changed(tiny(), Head())
    tables = (VOCABULARY + POSITIONS + 2) * H + 2 * H
    vectors = (4 * H + F + H) + 2 * 2 * H
    head = (H * H + H) + (3 * H + 3)
    found = count_parameters(encoder)
    assert found["total"] == tables + L * (MATRICES + vectors) + head
    assert found["non_embedding"] == found["total"] - tables
    assert found["encoder"] == L * MATRICES == found["encoder_non_zero"]
    assert found["non_zero"] == found["total"] - 3  # only a new head's last bias is zero


def test_zeros_are_counted_where_they_are(tiny):
    encoder = tiny().copy()
    before = count_parameters(encoder)
    with torch.no_grad():
        dict(linears(encoder.backbone))["encoder.layer.1.output.dense"].weight[:, :5] = 0
        encoder.backbone.embeddings.word_embeddings.weight[7] = 0
    after = count_parameters(encoder)
    assert before["encoder_non_zero"] - after["encoder_non_zero"] == 5 * H
    assert before["non_zero"] - after["non_zero"] == 5 * H + H
    assert all(before[name] == after[name] for name in ("total", "encoder", "non_embedding"))


def test_a_model_in_few_bits_is_told_with_all_its_weights():
    plain, stored = make_encoder("bert"), make_encoder("bert")
    stored.apply_method(Quantize(8), Quantize(8).plan(stored, None))
    assert size_in_words(stored) == size_in_words(plain)
    assert f"{cost.count_parameters(plain)['total']:,} parameters" in size_in_words(plain)


def test_shared_weights_count_once(tiny):
    albert = tiny("albert")
    found = count_parameters(albert)
    assert len(albert.order) == L and found["encoder"] == MATRICES
    assert found["total"] == sum(parameter.numel() for parameter in albert.parameters())
    bert = tiny().copy()
    before = count_parameters(bert)
    bert.backbone.encoder.layer[3].attention.self.key.weight = bert.backbone.encoder.layer[0].attention.self.key.weight
    after = count_parameters(bert)
    assert before["total"] - after["total"] == before["encoder"] - after["encoder"] == H * H


@pytest.mark.parametrize("activations", [False, True])
def test_whole_numbers_are_parameters_and_a_quarter_of_the_bytes(tmp_path, activations):
    plain = changed(make_encoder(hidden_size=64, intermediate_size=128, vocab_size=1000), Head())
    whole = changed(plain, Quantize(activations=activations))
    a, b = count_parameters(plain), count_parameters(whole)
    assert all(a[name] == b[name] for name in ("total", "non_embedding", "encoder"))
    save_folder(plain, tmp_path / "plain"), save_folder(whole, tmp_path / "whole")
    assert 3.0 < measure_bytes(tmp_path / "plain")["weights"] / measure_bytes(tmp_path / "whole")["weights"] < 4.0
    are_exact.cache_clear()  # the first to ask does so by products of its own
    assert count_macs(plain, 24) == count_macs(whole, 24)


@pytest.mark.parametrize("kind", ["classify", "tag", "answer", None])
def test_parts_of_a_folder_add_up_in_every_family(tmp_path, tiny, family, kind):
    encoder = tiny(family) if kind is None else changed(tiny(family), Head(), kind=kind)
    layout = save_folder(encoder, tmp_path / "model")
    found = measure_bytes(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert found["weights"] == file.stat().st_size == sum(found[part] for part in PARTS)
    assert found["other"] == 8 + int.from_bytes(file.read_bytes()[:8], "little"), layout  # nothing but the header
    parts = {"embeddings": "backbone.embeddings.", "head": ("heads.", "pooler.")}
    for part, start in parts.items():
        mine = sum(x.numel() for name, x in encoder.state_dict().items() if name.startswith(start))
        assert found[part] == 4 * mine, (part, layout)
    assert found["encoder"] >= 4 * count_parameters(encoder)["encoder"]


def test_our_own_layout_and_a_mixture(tmp_path, tiny):
    encoder = changed(tiny(), MixLayers(), Head())
    assert save_folder(encoder, tmp_path / "mixed") == "smallbert"
    found = measure_bytes(tmp_path / "mixed")
    header = 8 + int.from_bytes((tmp_path / "mixed" / "model.safetensors").read_bytes()[:8], "little")
    assert found["other"] == header + 4 * (L + 1 + 1)
    assert sum(found[part] for part in PARTS) == found["weights"]
    assert found["head"] == 4 * (H * H + H + 3 * H + 3)


def test_total_is_what_running_needs(tmp_path, tiny):
    folder = tmp_path / "model"
    save_folder(tiny(), folder)
    found = measure_bytes(folder)
    assert found["total"] == sum(path.stat().st_size for path in folder.iterdir()) > found["weights"]
    for name in ("README.md", "card.json", "report.html", "model.onnx", "pytorch_model.bin"):
        (folder / name).write_text("x" * 1000)
    assert measure_bytes(folder) == found
    (folder / "encoder.json").unlink()  # config.json tells the family as well
    assert measure_bytes(folder)["embeddings"] == found["embeddings"]


def test_a_folder_that_is_no_model_is_refused(tmp_path, tiny):
    with pytest.raises(UserError, match="holds no weights"):
        measure_bytes(tmp_path)
    folder = tmp_path / "model"
    save_folder(tiny(), folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        measure_bytes(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "encoder.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="which kind of model"):
        measure_bytes(folder)


def macs_of_layers(length, layers=L):
    return layers * (length * MATRICES + 2 * length * length * H)


@pytest.mark.parametrize("length", [1, 12, 32])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_macs_by_hand(tiny, length, family):
    assert count_macs(tiny(family), length) == macs_of_layers(length)
    assert count_macs(tiny(family), length, batch=3) == 3 * macs_of_layers(length)
    assert count_macs(changed(tiny(family), Head()), length) == macs_of_layers(length) + H * H + 3 * H
    assert count_macs(changed(tiny(family), Head(), kind="answer"), length) == macs_of_layers(length) + length * 2 * H


@pytest.mark.parametrize("family", ["albert", "electra"])
def test_macs_of_narrow_embeddings_and_shared_layers(tiny, family):
    assert count_macs(tiny(family), 12) == macs_of_layers(12) + 12 * 8 * H


def test_macs_of_families_without_a_closed_form_here(tiny, family):
    assert count_macs(tiny(family), 12) >= macs_of_layers(12)  # fused, gated, relative: never fewer


def test_macs_fall_with_layers(tiny, family):
    encoder = tiny(family)
    four, two, one = (count_macs(changed(encoder, *drop), 16) for drop in ([], [DropLayers(2)], [DropLayers(1)]))
    assert four - two >= macs_of_layers(16, layers=2) and two - one >= macs_of_layers(16, layers=1)


def test_zeros_save_no_multiplications(tiny):
    encoder = tiny().copy()
    before = count_macs(encoder, 12)
    with torch.no_grad():
        for _, module in linears(encoder.backbone):
            module.weight.zero_()
    assert count_macs(encoder, 12) == before


def test_a_length_beyond_the_model_is_refused(tiny):
    with pytest.raises(UserError, match="at most 72"):
        count_macs(tiny(), 73)
    with pytest.raises(UserError, match="at most 71"):
        measure_latency(tiny("roberta"), 72, repeats=1)


class Clock:
    """A clock that only a call moves on, each by a time of its own; it writes down who was called."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(cost, "perf_counter", lambda: self.now)

    def encoder(self, name, *seconds):
        """An encoder that takes these times, one call after the other, the last for good."""
        encoder, turns = make_encoder(num_hidden_layers=1), iter(seconds)
        last = seconds[-1]

        def forward(batch):
            self.calls.append((name, tuple(batch.input_ids.shape), torch.get_num_threads(), encoder.training))
            self.now += next(turns, last)

        encoder.forward = forward
        return encoder


def test_latency_is_of_single_calls_after_warming_up(monkeypatch):
    clock = Clock(monkeypatch)
    encoder = clock.encoder("a", 9.0, 9.0, *[0.001 * n for n in range(1, 102)]).train()
    before = torch.get_num_threads()
    found = measure_latency(encoder, length=8, batch=2, threads=before + 1, repeats=101, warm=2)
    assert found == {
        "p50_ms": pytest.approx(51),
        "p95_ms": pytest.approx(96),
        "batch": 2,
        "length": 8,
        "threads": before + 1,
        "device": "cpu",
        "repeats": 101,
    }
    assert set(clock.calls) == {("a", (2, 8), before + 1, False)} and len(clock.calls) == 103
    assert torch.get_num_threads() == before and encoder.training


def test_threads_are_set_back_after_a_failure(tiny, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(cost, "take_turns", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_latency(tiny(), threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("each", "rounds"), [(10.0, 20), (0.01, 200)])
def test_seconds_bound_the_rounds_but_twenty_are_always_taken(monkeypatch, each, rounds):
    clock = Clock(monkeypatch)
    assert measure_latency(clock.encoder("a", each), seconds=2.0, warm=0)["repeats"] == pytest.approx(rounds, abs=1)


def test_candidates_take_turns_and_noise_hits_all_alike(monkeypatch):
    clock = Clock(monkeypatch)
    noise = [1.0, 1.0, 5.0, 1.0, 3.0]  # a busy machine for some rounds; each is called twice a round, timed once
    slow = clock.encoder("slow", *[0.010 * n for n in noise for _ in range(2)])
    fast = clock.encoder("fast", *[0.004 * n for n in noise for _ in range(2)])
    found = measure_latencies({"slow": slow, "fast": fast}, repeats=5, warm=0)
    assert [call[0] for call in clock.calls] == ["slow", "slow", "fast", "fast"] * 5
    assert found["slow"]["ratio"] == 1.0 and found["fast"]["ratio"] == pytest.approx(0.4)
    assert found["fast"]["p50_ms"] == pytest.approx(4) and found["fast"]["p95_ms"] > 15
    assert list(found) == ["slow", "fast"] and found["fast"]["repeats"] == 5


def test_real_time_is_taken_of_quantised_models_too(tiny):
    encoder = changed(tiny(), Head(), Quantize(activations=True))
    found = measure_latencies({"int8": encoder, "again": encoder}, repeats=2, warm=1)
    assert all(0 < one["p50_ms"] <= one["p95_ms"] and one["ratio"] > 0 for one in found.values())


def test_an_encoder_elsewhere_is_measured_by_a_copy(tiny, monkeypatch):
    encoder = changed(tiny(), Head(), Quantize()).train()
    wanted = count_macs(encoder, 12)
    elsewhere = property(lambda self: torch.device("cuda" if self is encoder else "cpu"))
    monkeypatch.setattr(Encoder, "device", elsewhere)
    forward, ran = Encoder.forward, []
    monkeypatch.setattr(Encoder, "forward", lambda self, batch: ran.append(self) or forward(self, batch))
    assert count_macs(encoder, 12) == wanted
    assert measure_latency(encoder, repeats=2)["device"] == "cpu" and encoder.training
    assert len(ran) == 1 + WARM + 2 and not any(one is encoder for one in ran)


def test_everything_in_the_shapes_of_a_card(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    encoder = changed(tiny(), Head())
    save_folder(encoder, tmp_path / "model")
    found = measure(load_folder(tmp_path / "model"), tmp_path / "model", length=16, seconds=0.01)
    assert set(found) == {"bytes", "parameters", "macs", "latency", "throughput", "missing"}
    for name in ("bytes", "parameters", "macs", "latency"):
        assert set(FIELDS[name].parts) <= set(found[name]) and None not in found[name].values()
    assert found["macs"] == {"value": macs_of_layers(16) + H * H + 3 * H, "length": 16}
    assert found["throughput"] is None and "no GPU" in found["missing"]["throughput"]
    assert found["latency"]["repeats"] >= 20 and found["latency"]["length"] == 16
    json.dumps(found)


def test_a_full_gpu_leaves_the_other_numbers(tmp_path, tiny, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cost, "measure_throughput", refuse)
    save_folder(tiny(), tmp_path / "model")
    found = measure(tiny(), tmp_path / "model", seconds=0.01)
    assert found["throughput"] is None and "memory" in found["missing"]["throughput"] and found["latency"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("whole", [False, True])
def test_throughput_on_a_gpu_leaves_the_encoder_where_it_was(tiny, family, whole):
    encoder = changed(tiny(family), Head(), *([Quantize(activations=True)] if whole else []))
    found = measure_throughput(encoder, batch=8, repeats=3)
    assert next(iter(found.values())) > 0 and found["batch"] == 8 and found["repeats"] == 3
    assert encoder.device.type == "cpu" and next(encoder.parameters()).dtype == torch.float32
    moved = encoder.copy().to("cuda")
    assert count_macs(moved, 12) == count_macs(encoder, 12)
    assert measure_latency(moved, repeats=2)["device"] == "cpu" and moved.device.type == "cuda"


def test_rounding_to_zero_is_no_pruning(tiny):
    whole = changed(tiny(), Quantize(2))
    counts = count_parameters(whole)
    assert counts["encoder"] == counts["encoder_non_zero"] and counts["total"] - counts["non_zero"] < 100
