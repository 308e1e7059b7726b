"""Products and dropout for CPUs on which torch's own are slow: the same numbers, gradients and shares as torch's."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import onnx
import pytest
import torch
from test_walk import LENGTHS, make_batches
from torch.nn import functional
from toys import run, small, toy_task

from smallbert.export import write_onnx
from smallbert.measuring.cost import count_macs
from smallbert.model import attention, cpu
from smallbert.onnxfile.check import compare, open_session, varied_batches

pytestmark = pytest.mark.skipif(cpu.PRODUCT is None, reason="this torch comes without oneDNN")


@pytest.fixture
def everywhere(monkeypatch):
    """As on a CPU where all of it is faster, for products of every size; gives what was called how often."""
    calls = Counter()

    def counted(function):
        def call(*given, **named):
            calls[function.__name__] += 1
            return function(*given, **named)

        return call

    instead = {functional.linear: counted(cpu.linear), functional.dropout: counted(cpu.dropout)}
    monkeypatch.setattr(cpu, "_instead", lambda: instead)
    monkeypatch.setattr(cpu, "LEAST", 0)
    return calls


@contextmanager
def as_in_torch():
    """Where nothing is faster."""
    with patch.object(cpu, "_instead", dict):
        yield


def inputs_of(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    return {
        "rows": lambda: torch.randn(40, 24),
        "texts": lambda: torch.randn(3, 7, 24),
        "one": lambda: torch.randn(1, 24),
        "turned": lambda: torch.randn(24, 40).t(),
        "every other": lambda: torch.randn(40, 48)[:, ::2],
        "spread": lambda: torch.randn(40, 1).expand(40, 24),
        "heads": lambda: torch.randn(3, 6, 7, 4).transpose(1, 2).reshape(3, 7, 24),
    }[kind]()


@pytest.mark.parametrize("kind", ["rows", "texts", "one", "turned", "every other", "spread", "heads"])
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_their_gradients_and_theirs_are_torchs(kind, bias, everywhere):
    """Twice differentiated, since the curvature of a loss is."""
    values, made = inputs_of(kind), []
    weight, shift = torch.randn(10, 24), torch.randn(10) if bias else None
    target = torch.randn(*values.shape[:-1], 10)
    for multiply, dtype in ((cpu.linear, torch.float32), (functional.linear, torch.float64)):
        given = [one.to(dtype).requires_grad_() for one in (values, weight, shift) if one is not None]
        out = multiply(*given)
        slopes = torch.autograd.grad(((out - target.to(dtype)) ** 3).mean(), given, create_graph=True)
        second = torch.autograd.grad(sum((slope**2).sum() for slope in slopes), given)
        made.append([out, *slopes, *second])
    made_by = made[0][0].grad_fn.next_functions[0][0]  # behind the view that gives it its shape
    assert type(made_by).__name__ == "_LinearBackward"  # else torch would be compared with itself
    for ours, exact in zip(*made, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())


def test_who_learns_nothing_gets_no_gradient(everywhere):
    weight = torch.randn(10, 24)
    values = torch.randn(4, 24, requires_grad=True)
    cpu.linear(values, weight).sum().backward()
    torch.testing.assert_close(values.grad, weight.sum(0).expand(4, 24))
    assert weight.grad is None and cpu.linear(values.detach(), weight).grad_fn is None


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p):
    torch.manual_seed(1)
    ones = torch.ones(1001, 999, requires_grad=True)
    out = cpu.dropout(ones, p)
    share, count = float((out == 0).double().mean()), out.numel()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / count) + 1 / cpu.LEVELS
    for place in range(4):  # four numbers come of one draw
        assert abs(float((out.flatten()[place::4] == 0).double().mean()) - p) < 10 * math.sqrt(p * (1 - p) / count)
    together = (out[:, :-1] == 0) & (out[:, 1:] == 0)  # neighbours know nothing of each other
    assert abs(float(together.double().mean()) - p * p) < 10 * math.sqrt(p * p / count)
    values = out.detach().unique().tolist()
    assert values[0] == 0.0 and len(values) == 2 and values[1] == pytest.approx(1 / (1 - p), rel=1e-4)
    out.sum().backward()
    assert torch.equal(ones.grad, out.detach())


def test_dropout_follows_the_seed_and_knows_when_it_is_not_wanted():
    ones = torch.ones(100, 3)
    drawn = [torch.manual_seed(seed) and cpu.dropout(ones, 0.5) for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(cpu.dropout(ones, 0.5, training=False), ones) and torch.equal(cpu.dropout(ones, 0.0), ones)
    assert cpu.dropout(ones, 1.0).count_nonzero() == 0


def test_what_torch_does_itself(everywhere):
    """Small products, other precisions, autocast, what is no matrix; and all of it, where nothing is known better."""
    values, weight = torch.randn(4, 24), torch.randn(10, 24)
    with patch.object(cpu, "PRODUCT", None):  # would fail
        for one, other in ((values.double(), weight.double()), (values[0], weight), (values, weight[0])):
            assert torch.equal(cpu.linear(one, other), functional.linear(one, other))
        with torch.autocast("cpu", torch.bfloat16):
            assert cpu.linear(values, weight).dtype == torch.bfloat16
        with patch.object(cpu, "LEAST", values.numel() * 10 + 1):
            cpu.linear(values, weight)
        assert cpu.linear(values.to("meta"), weight.to("meta")).is_meta
        with as_in_torch(), cpu.faster(values):
            functional.linear(values, weight)
        with cpu.faster(values.to("meta")):
            functional.linear(values, weight)
    assert not everywhere  # nothing went by way of it
    with cpu.faster(values):
        torch.testing.assert_close(functional.linear(input=values, weight=weight), values @ weight.t())
    functional.linear(values, weight)
    assert everywhere == {"linear": 1}


@pytest.mark.parametrize(("maker", "family", "known"), [("GenuineIntel", 6, 0), ("AuthenticAMD", 25, 1)])
def test_which_cpus_it_is_for(maker, family, known, monkeypatch):
    monkeypatch.setattr(cpu, "cpu_maker", lambda: (maker, family))
    found = cpu._instead.__wrapped__()
    assert len(found) == known * torch.backends.mkl.is_available() and functional.linear not in found


def test_what_a_layer_gives_may_be_changed_in_place(everywhere):
    weight = torch.randn(10, 24, requires_grad=True)
    out = cpu.linear(torch.randn(3, 7, 24), weight)
    out += 1.0
    out.sum().backward()
    assert weight.grad is not None


def test_a_family_computes_the_same_with_it(tiny, family, everywhere):
    """Hidden states, and gradients of all weights; dropout off, since its draws are others."""
    encoder, made = tiny(family).copy().eval(), []
    padded, _ = make_batches(LENGTHS)
    real = padded.attention_mask.bool()
    for torchs in (False, True):
        with as_in_torch() if torchs else nullcontext():
            last = encoder.states(padded).last[real]
            wanted = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
            names, weights = zip(*encoder.named_parameters(), strict=True)
            slopes = torch.autograd.grad((last * wanted).sum(), weights, allow_unused=True)
        made.append((last.detach(), slopes))
    assert everywhere["linear"] >= 4 * len(encoder.order)
    (mine, ours), (other, theirs) = made
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    for name, slope, exact in zip(names, ours, theirs, strict=True):
        assert (slope is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(slope, exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item(), msg=name)


def test_training_and_guessing_words_go_by_way_of_it(everywhere, tmp_path):
    (text := tmp_path / "text.txt").write_text("the film seems dull and the plot is warm\n" * 40)
    run(f"pretrain({str(text)!r}, steps=1, batch=2, length=16)", small(layers=1))
    dropped = everywhere["dropout"]
    assert dropped >= 3 and everywhere["linear"] >= 6 + 2  # embeddings, attention, two more; the head's two products
    with patch.object(cpu, "draws", lambda _: False):  # attention by torch's own
        run(f"pretrain({str(text)!r}, steps=1, batch=2, length=16)", small(layers=1))
    assert everywhere["dropout"] == 2 * dropped - 1


@pytest.mark.parametrize("masked", [True, False])
def test_attention_drops_probabilities(masked, everywhere):
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 4, 5, 8)
    value = torch.eye(5).expand(3, 4, 5, 5)  # the output is the probabilities that are left
    mask = torch.tensor([1, 1, 1, 0, 0]).bool()[None, None, None] if masked else None
    plain = attention.probabilities(query, key, mask, None)
    with cpu.faster(query):
        out, _ = attention.attend(None, query, key, value, mask, dropout=0.5)
    out = out.transpose(1, 2)
    kept = out != 0
    torch.testing.assert_close(out[kept], 2 * plain[kept])
    share = float(kept[plain > 0].double().mean())
    assert 0.3 < share < 0.7 and (not masked or (out[..., 3:] == 0).all())
    assert everywhere == {"dropout": 1}


def test_multiplications_are_counted_all_the_same(everywhere):
    encoder = small(hidden_size=64)
    ours = count_macs(encoder, 24)
    assert everywhere["linear"] >= 12
    with as_in_torch():
        assert count_macs(encoder, 24) == ours > 2 * 24 * 4 * 64 * 64


def test_an_exported_file_has_plain_products(tmp_path, everywhere):
    """And gives the scores that the encoder gives with the others."""
    encoder = run("head", small(layers=1), toy_task()).encoder
    write_onnx(encoder, tmp_path / "model.onnx")
    assert {node.domain for node in onnx.load(tmp_path / "model.onnx").graph.node} <= {"", "ai.onnx"}
    assert not everywhere["linear"]
    found = compare(encoder, open_session(tmp_path / "model.onnx"), varied_batches(encoder))
    assert everywhere["linear"] and found["difference"] < 1e-5 and found["same"] == 1
