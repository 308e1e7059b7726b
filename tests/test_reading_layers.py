"""Encoders whose heads or layers read many layers: streamed as stacked, plain at first, cut, saved, exported."""

import json

import pytest
import torch
from conftest import EACH
from toys import batch_of, daily, pairs, run, small, toy_task

from smallbert.errors import UserError
from smallbert.model.folders import load_folder, save_folder
from smallbert.model.mixing import AXES
from smallbert.tiny import SHAPES

TASK = toy_task("classify", 24)
SHORT = "train(epochs=2, batch=8, lr=0.003)"
every_family = pytest.mark.parametrize("family", EACH)


def with_values(encoder):
    """The mixture away from its beginning, each scalar another."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in encoder.mixture.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return encoder.eval()


@pytest.mark.parametrize(("family", "norm"), pairs(SHAPES, AXES, every=3))
def test_scores_of_a_streamed_mixture_are_those_of_a_stacked_one(family, norm):
    for kind, pool in (("classify", "first"), ("classify", "mean"), ("tag", "first"), ("answer", "first")):
        task = toy_task(kind, 24)
        encoder = with_values(run(f"head(pool={pool!r}) | mix_layers(norm={norm!r})", small(family, 3), task).encoder)
        batch = batch_of(encoder, task)
        with torch.no_grad():
            stacked = encoder.mixture.stack(encoder.states(batch).hidden)
            torch.testing.assert_close(encoder(batch), encoder.head(stacked, batch), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "family"), pairs(["mix_layers(init='plain')", "gate_layers", "connect_layers"], SHAPES, every=3)
)
def test_a_plain_start_is_the_plain_model_to_the_bit_and_learns(family, recipe):
    plain = run("head", small(family, 3), TASK).encoder.eval()
    changed = run(recipe, plain, TASK).encoder.eval()
    batch = batch_of(plain, TASK)
    with torch.no_grad():
        assert torch.equal(plain(batch), changed(batch))
    trained = run(f"{recipe} | {SHORT}", plain, TASK).encoder.eval()
    new = trained.mixture if "connect" not in recipe else trained.connections
    old = changed.mixture if "connect" not in recipe else changed.connections
    moved = [not torch.equal(a, b) for a, b in zip(new.parameters(), old.parameters(), strict=True)]
    assert all(moved), moved
    without = run(SHORT, plain, TASK).encoder.eval()
    with torch.no_grad():
        assert not torch.equal(trained(batch), without(batch))


def test_a_plain_mixture_costs_layers_plus_two_scalars():
    plain = run("head", small(layers=3), TASK).encoder
    count = sum(one.numel() for one in plain.parameters())
    for init in ("xavier", "zeros", "plain"):
        mixed = run(f"mix_layers(init={init!r})", plain, TASK).encoder
        assert sum(one.numel() for one in mixed.parameters()) - count == 3 + 2


def test_evaluation_stores_no_hidden_states(monkeypatch):
    """The encoder walks, and never collects."""
    from smallbert.model import encoder as module

    def refuse(*_, **__):
        raise AssertionError("collected")

    encoder = run("mix_layers", small(layers=3), TASK).encoder.eval()
    monkeypatch.setattr(module, "collect", refuse)
    with torch.no_grad():
        assert encoder(batch_of(encoder, TASK)).shape == (5, 2)


def cut(encoder, shares, mass=0.95):
    with torch.no_grad():
        encoder.mixture.weights.copy_(torch.tensor(shares).log())
    return run(f"cut_to_mixture({mass})", encoder, TASK).encoder


def test_cutting_to_the_mixture():
    encoder = run("mix_layers(norm='none', dropout=0.0)", small(layers=4), TASK).encoder.eval()
    assert len(cut(encoder, [0.1, 0.5, 0.37, 0.02, 0.01]).order) == 2
    assert len(cut(encoder, [0.1, 0.5, 0.34, 0.05, 0.01]).order) == 3
    assert len(cut(encoder, [0.1, 0.5, 0.34, 0.05, 0.01], mass=0.99).order) == 3
    assert len(cut(encoder, [0.2, 0.2, 0.2, 0.2, 0.2], mass=1.0).order) == 4  # nothing to cut
    assert len(cut(encoder, [1.0, 1e-9, 1e-9, 1e-9, 1e-9]).order) == 1  # one layer always stays
    shorter = cut(encoder, [0.3, 0.3, 0.4, 1e-12, 1e-12])  # nothing at all is read above, so nothing changes
    batch = batch_of(encoder, TASK)
    with torch.no_grad():
        torch.testing.assert_close(shorter(batch), encoder(batch), atol=1e-6, rtol=1e-6)
    assert shorter.history[-1]["plan"]["shares"] == pytest.approx([0.3, 0.3, 0.4, 0, 0], abs=1e-4)
    for recipe in ("head", "gate_layers"):
        with pytest.raises(UserError, match="put mix_layers before it"):
            run(f"{recipe} | cut_to_mixture", small(), TASK)


def test_letting_a_mixture_in_step_by_step():
    seen = []

    def say(stage, *_):
        if stage == "training":
            seen.append(1)

    outcome = run(f"mix_layers(gradual=0.5) + watch(1, 4) + {SHORT}", small(layers=3), TASK, say=say)
    assert outcome.encoder.mixture.blend is None and len(outcome.traces["watch"]) == 6
    with pytest.raises(UserError, match="same phase"):
        run(f"mix_layers(gradual=0.5) | {SHORT}", small(layers=3), TASK)
    encoder = run("mix_layers", small(layers=3), TASK).encoder.eval()
    batch = batch_of(encoder, TASK)
    with torch.no_grad():
        whole = encoder.output(encoder.states(batch), batch)
        last = encoder.states(batch).last
        for share in (0.0, 0.25, 1.0):
            encoder.mixture.blend = torch.tensor(share, dtype=torch.float64)
            torch.testing.assert_close(encoder.output(encoder.states(batch), batch), last + share * (whole - last))


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("mix_layers(layers=[0, 9])", "there is no hidden state 9"),
        ("mix_layers(layers=[])", "layers is empty"),
        ("mix_layers(layer_dropout=1.0)", "layer_dropout is a share"),
        ("connect_layers(dilation=0)", "whole numbers from 1"),
        ("gate_layers(ratio=0)", "whole number from 1"),
        ("cut_to_mixture(0)", "mass is a share"),
        ("mix_layers(lr=-1)", "learning rate"),
        ("connect_layers(lr=0)", "learning rate"),
        ("mix_layers | gate_layers", "only one"),
        (f"watch(0) + {SHORT}", "steps is 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(recipe, sentence):
    with pytest.raises(UserError, match=sentence):
        run(recipe, small(layers=3), TASK)


def test_watching_changes_nothing_and_tells_what_happens():
    recipe = f"mix_layers(layer_dropout=0.5) | movement(0.5) + {SHORT}"
    plain, watched = (run(text, small(layers=3), TASK) for text in (recipe, recipe.replace(" + ", " + watch(2, 8) + ")))
    for one, two in zip(plain.encoder.parameters(), watched.encoder.parameters(), strict=True):
        assert torch.equal(one, two)
    looks = watched.traces["watch"]
    assert [look["step"] for look in looks] == [2, 4, 6]
    first, last = looks[0]["value"], looks[-1]["value"]
    assert "churn" not in first and len(last["churn"]) == len(last["kept"]) == 3
    assert all(abs(share - 0.5) < 0.02 for share in last["kept"])
    assert len(last["gradients"]) == len(last["spread"]) == len(last["mixture"]) == 4
    assert min(last["mixture"]) > 0.05  # what is learned, not what layer dropout left of it at that step
    assert sum(last["mixture"]) == pytest.approx(1, abs=1e-3) and all(one > 0 for one in last["gradients"])
    assert json.loads(json.dumps(looks)) == looks


@pytest.mark.parametrize(("which", "moved"), [("nothing", "ebh"), ("embeddings", "bh"), ("backbone", "h")])
def test_frozen_parts_stay_as_they_are(which, moved):
    before = run("head | mix_layers", small(layers=2), TASK).encoder
    after = run(f"train(epochs=1, batch=8, lr=0.01, freeze={which!r})", before, TASK).encoder
    parts = {"e": ("backbone.embeddings",), "b": ("backbone.encoder",), "h": ("heads", "mixture")}
    for part, prefixes in parts.items():
        names = [name for name in dict(before.named_parameters()) if name.startswith(prefixes)]
        same = [torch.equal(before.get_parameter(name), after.get_parameter(name)) for name in names]
        assert names and (not any(same) if part in moved and part != "e" else all(same) == (part not in moved))
    assert all(one.requires_grad for one in after.parameters())


@pytest.mark.parametrize(
    "recipe",
    daily(
        ["mix_layers", "connect_layers | gate_layers", "mix_layers(norm='layer')", "gate_layers", "connect_layers"],
        every=5,
    ),
)
def test_what_reads_layers_can_be_saved_loaded_and_exported(recipe, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from smallbert.export import export_onnx

    encoder = run(f"{recipe} | {SHORT} | drop_layers(2)", small(layers=3), TASK).encoder.eval()
    save_folder(encoder, tmp_path / "model")
    batch = batch_of(encoder, TASK)
    with torch.no_grad():
        assert torch.equal(load_folder(tmp_path / "model").eval()(batch), encoder(batch))
    found = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert found["checked"] >= 64 and found["difference"] < 1e-4


def test_cutting_by_what_varies_from_text_to_text():
    encoder = run("head | mix_layers(norm='none', dropout=0.0)", small(layers=4), TASK).encoder.eval()
    layer = encoder.backbone.encoder.layer[2].output.LayerNorm
    with torch.no_grad():  # from layer 3 on every text looks the same, however much the mixture reads it
        layer.weight.zero_()
        layer.bias.normal_()
        encoder.mixture.weights.copy_(torch.tensor([0.05, 0.05, 0.05, 0.4, 0.45]).log())
    assert len(run("cut_to_mixture", encoder, TASK).encoder.order) == 4
    short = run("cut_to_mixture(weigh='variation')", encoder, TASK).encoder
    assert len(short.order) == 2
    shares = short.history[-1]["plan"]["shares"]
    assert shares[0] == 0 and shares[3] == shares[4] == 0  # a first token's embedding is the same in every text too
    with pytest.raises(UserError, match="needs a task"):
        run("cut_to_mixture(weigh='variation')", encoder)
