"""Products and dropout for CPUs on which torch's own are slow: the same numbers, gradients and shares as torch's."""

from __future__ import annotations

import math
from contextlib import nullcontext
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
    """As on a CPU where it pays, and for products of every size."""
    monkeypatch.setattr(cpu, "pays", lambda: True)
    monkeypatch.setattr(cpu, "LEAST", 0)


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
    assert type(made[0][0].grad_fn).__name__ == "_LinearBackward"  # else torch would be compared with itself
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


def test_it_is_in_force_where_it_pays_and_nowhere_else():
    place, values = torch.zeros(1), torch.ones(300, 300)
    for pays in (True, False):
        with patch.object(cpu, "pays", lambda pays=pays: pays), patch.dict(cpu._INSTEAD) as known:
            known[functional.linear] = lambda *_: "ours"
            with cpu.faster(place):
                assert (functional.linear(values, values) == "ours") == pays
            assert isinstance(functional.linear(values, values), torch.Tensor)
            with cpu.faster(torch.zeros(1, device="meta")):
                assert isinstance(functional.linear(values, values), torch.Tensor)


def test_a_family_computes_the_same_with_it(tiny, family, everywhere):
    """Hidden states, and gradients of all weights; dropout off, since its draws are others."""
    encoder, seen = tiny(family).eval(), []
    padded, _ = make_batches(LENGTHS)
    real = padded.attention_mask.bool()
    for off in (False, True):
        with patch.object(cpu, "pays", lambda: False) if off else nullcontext():
            encoder.zero_grad()
            last = encoder.states(padded).last[real]
            last.square().mean().backward()
            slopes = {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}
            seen.append((last.detach(), slopes))
    (mine, ours), (other, theirs) = seen
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, slope in ours.items():
        torch.testing.assert_close(slope, theirs[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_dropout_is_torchs_with_the_same_draws(masked, everywhere):
    """Torch's own is not shown its draws: so values are told apart by what they add to the output."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 4, 5, 8)
    value = torch.eye(5).expand(3, 4, 5, 5)  # the output is the probabilities that are left
    mask = torch.tensor([1, 1, 1, 0, 0]).bool()[None, None, None] if masked else None
    plain = attention.probabilities(query, key, mask, None)
    out, _ = attention.attend(None, query, key, value, mask, dropout=0.5)
    out = out.transpose(1, 2)
    kept = out != 0
    torch.testing.assert_close(out[kept], 2 * plain[kept])
    share = float(kept[plain > 0].double().mean())
    assert 0.3 < share < 0.7 and (not masked or (out[..., 3:] == 0).all())


def test_multiplications_are_counted_all_the_same(everywhere):
    encoder = small(hidden_size=64)
    ours = count_macs(encoder, 24)
    with patch.object(cpu, "pays", lambda: False):
        assert count_macs(encoder, 24) == ours > 2 * 24 * 4 * 64 * 64


def test_an_exported_file_has_plain_products(tmp_path, everywhere):
    """And gives the scores that the encoder gives with the others."""
    encoder = run("head", small(layers=1), toy_task()).encoder
    write_onnx(encoder, tmp_path / "model.onnx")
    assert {node.domain for node in onnx.load(tmp_path / "model.onnx").graph.node} <= {"", "ai.onnx"}
    found = compare(encoder, open_session(tmp_path / "model.onnx"), varied_batches(encoder))
    assert found["difference"] < 1e-5 and found["same"] == 1
