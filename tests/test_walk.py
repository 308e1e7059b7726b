"""Our walk gives what Hugging Face's own forward gives, padded and packed, in every family."""

import pytest
import torch

from smallbert.model.batch import Batch

LENGTHS = [5, 11, 3, 8]


def make_batches(lengths, filler=0):
    """The same random sequences padded and packed."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 100, (n,), generator=generator) for n in lengths]
    types = [(torch.arange(n) > n // 2).long() for n in lengths]
    top = max(lengths)
    pad = torch.nn.functional.pad
    mask = torch.stack([pad(torch.ones(n, dtype=torch.long), (0, top - n)) for n in lengths])
    padded = Batch(
        torch.stack([pad(r, (0, top - len(r))) for r in rows]),
        torch.stack([pad(t, (0, top - len(t))) for t in types]),
        torch.arange(top).repeat(len(rows), 1),
        attention_mask=mask,
        size=len(rows),
        longest=top,
    )
    tail = [torch.zeros(filler, dtype=torch.long)] if filler else []
    ends = torch.tensor([0, *lengths, *([filler] if filler else [])]).cumsum(0).int()
    packed = Batch(
        torch.cat(rows + tail)[None],
        torch.cat(types + tail)[None],
        torch.cat([torch.arange(n) for n in lengths] + ([torch.arange(filler)] if filler else []))[None],
        bounds=ends,
        sequence=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((filler,), len(rows))]),
        size=len(rows),
        longest=top,
    )
    return padded, packed


@torch.no_grad()
def test_walk_equals_hugging_face(tiny, family):
    encoder = tiny(family)
    padded, _ = make_batches(LENGTHS)
    extra = {"token_type_ids": padded.token_type_ids} if family not in ("distilbert", "mpnet", "modernbert") else {}
    theirs = encoder.backbone(
        input_ids=padded.input_ids, attention_mask=padded.attention_mask, output_hidden_states=True, **extra
    )
    ours = encoder.states(padded)
    assert len(ours.hidden) == len(theirs.hidden_states) == len(encoder.order) + 1
    real = padded.attention_mask.bool()
    for mine, other in zip(ours.hidden, theirs.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], other[real], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("filler", [0, 6])
def test_packed_equals_padded(tiny, family, filler):
    encoder = tiny(family)
    if not encoder.packable:
        assert family in ("mpnet", "deberta-v2")
        return
    padded, packed = make_batches(LENGTHS, filler)
    a, b = encoder.states(padded), encoder.states(packed)
    for mine, other in zip(a.hidden, b.hidden, strict=True):
        torch.testing.assert_close(mine[padded.attention_mask.bool()], other[0, : sum(LENGTHS)], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(padded.first(mine), packed.first(other), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(padded.mean(mine), packed.mean(other), atol=2e-5, rtol=1e-5)
        rows = padded.rows(mine[..., 0], -9.0), packed.rows(other[..., 0], -9.0)
        torch.testing.assert_close(*rows, atol=2e-5, rtol=1e-5)
    assert packed.tokens().sum() == padded.tokens().sum() == sum(LENGTHS)


@torch.no_grad()
def test_padding_and_company_do_not_matter(tiny, family):
    encoder = tiny(family)
    together, _ = make_batches(LENGTHS)
    for number, length in enumerate(LENGTHS):
        alone = Batch(
            together.input_ids[number : number + 1, :length],
            together.token_type_ids[number : number + 1, :length],
            torch.arange(length)[None],
            size=1,
            longest=length,
        )
        a = encoder.states(alone).last[0]
        torch.testing.assert_close(a, encoder.states(together).last[number, :length], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_taps_see_q_k_v_of_every_layer(tiny, family):
    encoder = tiny(family)
    padded, _ = make_batches(LENGTHS)
    before = sum(len(module._forward_hooks) for module in encoder.modules())
    states = encoder.states(padded, taps=("q", "k", "v"))
    for role in ("q", "k", "v"):
        assert len(states.taps[role]) == len(encoder.order)
        assert all(tap.shape == states.last.shape for tap in states.taps[role].values())
    assert not torch.equal(states.taps["q"][0], states.taps["v"][0])
    assert before == sum(len(module._forward_hooks) for module in encoder.modules())  # nothing stays behind


@torch.no_grad()
def test_a_route_can_skip_a_layer(tiny, family):
    encoder = tiny(family)
    padded, _ = make_batches(LENGTHS)
    skipping = encoder.states(padded, route=lambda place, hidden, layer: hidden if place == 1 else layer(hidden))
    assert torch.equal(skipping.hidden[1], skipping.hidden[2])
    assert not torch.equal(skipping.last, encoder.states(padded).last)
