"""Rows over tokens: who compares them, in what precision, how many layers at once, and which layers these are."""

import sys
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import small, stream_of, toy_task

from smallbert.errors import UserError
from smallbert.model.attention import Attending
from smallbert.texts.batches import Layout, make_batch
from smallbert.training import alignment
from smallbert.training.alignment import rows_apart
from smallbert.training.pairs import pair_layers

TASK = toy_task("pair", 24)
WAYS = [("kl", True), ("mse", True), ("mse", False)]


@pytest.fixture(scope="module")
def batch():
    return make_batch(stream_of(small(), TASK), np.arange(5), Layout(True, 64))


def looking(batch, seed, size=8, heads=2, dtype=torch.float32, **settings):
    """What a layer attends with, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 1, heads, batch.input_ids.shape[1], size, generator=generator).to(dtype)
    return Attending(query, key, **settings)


def test_layers_whose_keys_are_their_queries_are_not_put_beside_others(batch):
    """Wherever they stand among layers of the same shape."""
    for first in (0, 1):
        ours, theirs = ([looking(batch, seed, scaling=0.3) for seed in seeds] for seeds in ((1, 2), (3, 4)))
        ours[first] = replace(ours[first], key=ours[first].query)
        both = rows_apart(ours, theirs, batch, "mse")
        alone = [rows_apart([one], [other], batch, "mse")[0] for one, other in zip(ours, theirs, strict=True)]
        torch.testing.assert_close(both, torch.stack(alone))


# Kernels.


def product_by_product(ours, theirs, bounds, longest, metric):
    """What the kernels should give, sequence by sequence: (heads, tokens)."""
    far = torch.zeros(ours.query.shape[1], ours.query.shape[0])
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert stop - start <= longest
        one, other = (
            torch.einsum("ihd,jhd->hij", rows.query[start:stop], rows.key[start:stop]) * rows.scale
            for rows in (ours, theirs)
        )
        each = {
            "kl": lambda a, b: (b.softmax(-1) * (b.log_softmax(-1) - a.log_softmax(-1))).sum(-1),
            "chances": lambda a, b: (a.softmax(-1) - b.softmax(-1)).square().mean(-1),
            "scores": lambda a, b: (a - b).square().mean(-1),
        }[metric](one, other)
        far[:, start:stop] = each
    return far


@pytest.mark.parametrize(("metric", "soften"), WAYS)
def test_kernels_are_asked_for_what_plain_products_give(batch, metric, soften, monkeypatch):
    """Two layers at once, of other sizes and scales: the same numbers, in the same places."""
    ours = [looking(batch, seed, scaling=0.3) for seed in (1, 2)]
    theirs = [looking(batch, seed, size=6) for seed in (3, 4)]
    plain = rows_apart(ours, theirs, batch, metric, soften)
    asked = []

    def compare_rows(*given):
        asked.append(given[-1])
        return product_by_product(*given)

    kernels = SimpleNamespace(Rows=namedtuple("Rows", "query key scale"), compare_rows=compare_rows)
    monkeypatch.setitem(sys.modules, "smallbert.training.row_kernels", kernels)
    monkeypatch.setattr(alignment, "_by_kernels", lambda *_: True)
    found = rows_apart(ours, theirs, batch, metric, soften)
    assert found.shape == plain.shape == (2, *batch.input_ids.shape) and len(asked) == 1
    real = batch.tokens()
    torch.testing.assert_close(found[:, real], plain[:, real], rtol=1e-4, atol=1e-6)
    rows_apart(ours, theirs, batch, "l1", soften)
    assert len(asked) == 1  # which kernels have no word for


def test_kernels_compare_what_they_can(batch, monkeypatch):
    def on_gpu(size=32, item=2, window=None):
        query = SimpleNamespace(is_cuda=True, shape=(1, 2, 9, size), element_size=lambda: item)
        return SimpleNamespace(query=query, window=window)

    able = alignment._by_kernels
    with monkeypatch.context() as without:
        without.setattr(alignment, "KERNELS", False)
        assert not able(on_gpu(), on_gpu(), batch)
    assert able(on_gpu(128), on_gpu(64, 4), batch)
    padded = make_batch(stream_of(small(), TASK), np.arange(5), Layout(False, 64))
    assert not able(on_gpu(), on_gpu(), padded) and not able(looking(batch, 0), looking(batch, 1), batch)
    for other in (on_gpu(window=8), on_gpu(129), on_gpu(65, 4)):
        assert not able(on_gpu(), other, batch) and not able(other, on_gpu(), batch)


# Precision, and how many at once.


@pytest.mark.parametrize(("metric", "soften"), WAYS)
def test_half_precision_is_compared_in_float32(batch, metric, soften):
    ours, theirs = (looking(batch, seed, dtype=torch.bfloat16) for seed in (1, 2))
    whole = [Attending(one.query.float(), one.key.float()) for one in (ours, theirs)]
    wanted = rows_apart([whole[0]], [whole[1]], batch, metric, soften)
    assert rows_apart([ours], [theirs], batch, metric, soften).dtype == torch.float32
    torch.testing.assert_close(rows_apart([ours], [theirs], batch, metric, soften), wanted, rtol=0, atol=0)


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("metric", "soften"), WAYS)
def test_layers_that_are_alike_are_compared_at_once(batch, metric, soften):
    """The same numbers as one by one, in the order asked for, and hardly more operations than for one."""
    sizes = [8, 8, 6, 8, 6]
    ours = [looking(batch, seed, size) for seed, size in enumerate(sizes)]
    theirs = [looking(batch, 10 + seed, size) for seed, size in enumerate(sizes)]
    one_by_one = [rows_apart([one], [other], batch, metric, soften)[0] for one, other in zip(ours, theirs, strict=True)]
    torch.testing.assert_close(rows_apart(ours, theirs, batch, metric, soften), torch.stack(one_by_one))
    counts = []
    for some in ([0], [0, 1, 3]):
        with Counted() as seen:
            rows_apart([ours[place] for place in some], [theirs[place] for place in some], batch, metric, soften)
        counts.append(seen.count)
    assert counts[0] > 20 and counts[1] <= counts[0] + 4  # queries and keys of both, laid side by side


@pytest.mark.parametrize(("bound", "calls"), [(2**28, [6]), (0, [2, 2, 2]), (2 * 2 * 4 * 5 * 64**2, [4, 2])])
def test_large_rows_are_compared_layer_by_layer(batch, bound, calls, monkeypatch):
    batch = replace(batch, longest=64)
    ours, theirs = ([looking(batch, seed + side) for seed in range(3)] for side in (0, 10))
    whole, seen = rows_apart(ours, theirs, batch, "kl"), []
    real = alignment._rows_apart
    monkeypatch.setattr(
        alignment, "_rows_apart", lambda one, *more: seen.append(one.query.shape[1]) or real(one, *more)
    )
    monkeypatch.setattr(alignment, "AT_ONCE", bound)
    torch.testing.assert_close(rows_apart(ours, theirs, batch, "kl"), whole)
    assert seen == calls


UNLIKE = {"window": {"window": 2}, "scale": {"scaling": 2.0}, "key": {}}


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("side", [{0}, {1}, {0, 1}], ids=str)
def test_only_layers_that_are_alike_are_compared_at_once(batch, unlike, side):
    """Whichever of the two models has a layer that sees less, scales otherwise, or has queries for keys."""

    def drawn(place):
        three = [looking(batch, 3 * place), looking(batch, 3 * place + 1), looking(batch, 3 * place + 2)]
        if place in side:
            three[1] = replace(three[1], **UNLIKE[unlike])
            three[1] = replace(three[1], key=three[1].query) if unlike == "key" else three[1]
        return three

    ours, theirs = drawn(0), drawn(1)
    one_by_one = [rows_apart([one], [other], batch, "mse")[0] for one, other in zip(ours, theirs, strict=True)]
    torch.testing.assert_close(rows_apart(ours, theirs, batch, "mse"), torch.stack(one_by_one))
    plain = [looking(batch, seed) for seed in range(6)]
    assert unlike == "window" or not torch.allclose(rows_apart(plain[:3], plain[3:], batch, "mse")[1], one_by_one[1])


# Which layers.


@pytest.mark.parametrize(
    ("layers", "lowest", "pairs"),
    [
        ("uniform", 1, [(1, 2), (2, 4)]),
        ("whole", 0, [(0, 0), (1, 2), (2, 4)]),
        ("whole", 1, [(1, 2), (2, 4)]),  # what goes into the first layer has no attention
        ("skip", 1, [(1, 2)]),
        ("last", 1, [(1, 3), (2, 4)]),
        ({1: 4, -1: -1}, 1, [(1, 4), (2, 4)]),
        ({"0": -4}, 0, [(0, 1)]),
        ([[-2, -3]], 1, [(1, 2)]),
    ],
)
def test_pairs_of_two_and_four_layers(layers, lowest, pairs):
    assert pair_layers(layers, 2, 4, lowest, "hidden") == pairs


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({1: 5}, "layers={1: 5} does not fit a student of 2 layers and a teacher of 4"),
        ({"3": 1}, "layers={3: 1} does not fit"),
        ({1: 0}, "for 'attention' layers count from 1, and -1 is the last"),
        ([[1, -5]], "does not fit"),
        ({}, "at least one pair"),
        ([[2, 4], [-1, -1]], "each pair once"),
        ({"one": 1}, "layers is pairs of numbers"),
    ],
)
def test_pairs_that_cannot_be(layers, said):
    with pytest.raises(UserError) as refusal:
        pair_layers(layers, 2, 4, 1, "attention")
    assert said in str(refusal.value)


def test_a_student_of_one_layer_has_none_to_skip():
    with pytest.raises(UserError, match="leaves a student of one layer nothing to compare"):
        pair_layers("skip", 1, 4, 1, "hidden")
