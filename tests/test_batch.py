"""A batch means the same padded and packed, and every example is in exactly one batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smallbert.model.heads import IGNORE, KINDS
from smallbert.texts.batches import Layout, cut_into_batches, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, Tokens

LONGEST = 12
some = settings(deadline=None, max_examples=80)


@st.composite
def batches(draw, kinds=KINDS):
    """A stream, some of its sequences in some order, and the same sequences padded and packed."""
    lengths = np.array(draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=9)))
    seed = draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = random.integers(5, 100, offsets[-1]).astype(np.int32)
    tokens = Tokens(ids, random.integers(0, 2, len(ids)).astype(np.uint8), offsets)
    kind = draw(st.sampled_from(kinds))
    labels = {
        "classify": random.integers(0, 3, len(lengths)),
        "regress": random.random(len(lengths)).astype(np.float32),
        "tag": np.where(random.random(len(ids)) < 0.4, IGNORE, random.integers(0, 5, len(ids))),
        "answer": random.integers(0, lengths[:, None], (len(lengths), 2)),
    }[kind]
    stream = Stream({STUDENT: tokens}, labels, kind)
    index = np.array(draw(st.permutations(range(len(lengths)))))[: draw(st.integers(1, len(lengths)))]
    slots = draw(st.sampled_from([0, len(index), len(index) + 1, len(index) + 4]))
    grain, multiple = draw(st.sampled_from([1, 2, 7, 16, 64])), draw(st.sampled_from([1, 4, 8]))
    padded = make_batch(stream, index, Layout(False, LONGEST, multiple=multiple), slots=slots)
    packed = make_batch(stream, index, Layout(True, LONGEST, grain=grain), slots=slots)
    return stream, index, padded, packed


def texts(batch, values):
    """The values of each real sequence's tokens, in the order of the sequences."""
    real, there = batch.tokens(), batch.present > 0
    if batch.packed:
        return [values[0][real[0] & (batch.sequence == number)] for number in range(batch.size) if there[number]]
    return [row[mask] for row, mask, one in zip(values, real, there, strict=True) if one]


def test_padding_goes_no_further_than_the_longest_text_of_all():
    """A model may have no places beyond it."""
    lengths = np.array([3, 9, 21])
    tokens = Tokens(np.ones(33, np.int64), np.zeros(33, np.int64), np.concatenate([[0], np.cumsum(lengths)]))
    stream = Stream({STUDENT: tokens}, np.zeros(3, np.int64), "classify")
    widths = [make_batch(stream, [row], Layout(False, 99, multiple=8)).input_ids.shape[1] for row in range(3)]
    assert widths == [8, 16, 21]


@some
@given(batches())
def test_both_layouts_hold_the_sequences_that_were_asked_for(made):
    stream, index, padded, packed = made
    tokens = stream.views[STUDENT]
    for batch in (padded, packed):
        assert int(batch.present.sum()) == len(index) <= batch.size
        for name, column in (("input_ids", tokens.ids), ("token_type_ids", tokens.types)):
            found = texts(batch, getattr(batch, name))
            wanted = [column[tokens.offsets[number] : tokens.offsets[number + 1]] for number in index]
            assert [one.tolist() for one in found] == [one.tolist() for one in wanted]
        assert [one.tolist() for one in texts(batch, batch.position_ids)] == [
            list(range(length)) for length in tokens.lengths[index]
        ]


@some
@given(batches())
def test_tokens_are_those_of_real_sequences_and_no_others(made):
    stream, index, padded, packed = made
    total = int(stream.views[STUDENT].lengths[index].sum())
    for batch in (padded, packed):
        assert int(batch.tokens().sum()) == total and batch.tokens().shape == batch.input_ids.shape
        absent = replace(batch, present=torch.zeros_like(batch.present))  # a process without an example of its own
        assert not absent.tokens().any()


@some
@given(batches())
def test_first_mean_and_rows_agree(made):
    _, index, padded, packed = made
    there, count = padded.present > 0, len(index)
    assert torch.equal(padded.present, packed.present)
    # A value that depends on the token, its place and its type alone, so that both layouts give a token the same.
    rows = []
    for batch in (padded, packed):
        mark = batch.input_ids * 100 + batch.position_ids * 3 + batch.token_type_ids
        values = torch.stack([mark.double(), mark.double().sqrt()], -1)
        rows.append((batch.first(values)[there], batch.mean(values)[there], batch.rows(values[..., 1], -1.0)[there]))
    (first, mean, row), (other_first, other_mean, other_row) = rows
    assert torch.equal(first, other_first) and first.shape == (count, 2)
    torch.testing.assert_close(mean, other_mean, rtol=1e-12, atol=1e-12)
    width = min(row.shape[1], other_row.shape[1])
    assert torch.equal(row[:, :width], other_row[:, :width])
    assert (row[:, width:] == -1).all() and (other_row[:, width:] == -1).all()


@some
@given(batches())
def test_what_was_laid_out_in_rows_comes_back(made):
    for batch in made[2:]:
        values, real = torch.rand(*batch.input_ids.shape, 2), batch.tokens()
        again = batch.from_rows(batch.rows(values, -1.0))
        assert again.shape == values.shape and torch.equal(again[real], values[real])


@some
@given(batches())
def test_shares_of_all_tokens_are_counted_or_known_from_bounds(made):
    for batch in made[2:]:
        for one in (batch, replace(batch, present=torch.zeros_like(batch.present)), replace(batch, present=None)):
            torch.testing.assert_close(one.shares(), one.shares(one.tokens()), rtol=1e-6, atol=0)


@some
@given(batches())
def test_first_tokens_of_several_layers_at_once(made):
    for batch in made[2:]:
        layers = torch.rand(3, *batch.input_ids.shape, 2)
        assert torch.equal(batch.first(layers), torch.stack([batch.first(layer) for layer in layers]))


@some
@given(batches())
def test_empty_sequences_give_finite_numbers(made):
    for batch in made[2:]:
        values = torch.ones(*batch.input_ids.shape, 2)
        for found in (batch.first(values), batch.mean(values)):
            assert found.shape == (batch.size, 2) and torch.isfinite(found).all()
        assert batch.rows(values[..., 0], -1.0).shape[0] == batch.size


@some
@given(batches())
def test_labels_and_units_agree(made):
    stream, index, padded, packed = made
    there = padded.present > 0
    if stream.kind == "tag":
        for batch in (padded, packed):
            assert int((batch.labels != IGNORE).sum()) == stream.units(index)
            assert (batch.labels[~batch.tokens()] == IGNORE).all()
        for a, b in zip(texts(padded, padded.labels), texts(packed, packed.labels), strict=True):
            assert torch.equal(a, b)
    else:
        assert torch.equal(padded.labels, packed.labels) and len(padded.labels) == padded.size
        assert np.array_equal(padded.labels[there].numpy(), stream.labels[index])
        assert stream.units(index) == len(index) == int(there.sum())


@some
@given(batches())
def test_shapes_hold_together(made):
    _, _, padded, packed = made
    assert packed.bounds[0] == 0 and packed.bounds[-1] == packed.input_ids.shape[1] == len(packed.sequence)
    assert (packed.bounds.diff() >= 0).all() and int(packed.bounds.diff().max()) <= packed.longest == LONGEST
    assert padded.input_ids.shape == (padded.size, padded.longest)
    assert padded.attention_mask is not None or padded.tokens().all()
    if padded.attention_mask is not None:
        assert (padded.attention_mask.sum(1) > 0).all()  # a row that may look at nothing would give NaN


@some
@given(batches(kinds=("classify",)), st.sampled_from([16, 64]))
def test_packed_shapes_depend_on_slots_and_grain_alone(made, grain):
    stream, index, _, _ = made
    layout, slots = Layout(True, LONGEST, grain=grain), 12
    batch = make_batch(stream, index, layout, slots=slots)
    assert batch.input_ids.shape[1] % grain == 0
    assert batch.input_ids.shape[1] - int(batch.tokens().sum()) < grain
    fewer = make_batch(stream, index[:1], layout, slots=slots)
    assert fewer.bounds.shape == batch.bounds.shape and fewer.labels.shape == batch.labels.shape


def test_batches_move_and_keep_what_they_know():
    stream = Stream({STUDENT: Tokens(np.arange(5, 9), np.zeros(4), np.array([0, 1, 4]))}, np.array([0, 1]), "classify")
    batch = make_batch(stream, np.array([1, 0]), Layout(True, 4, grain=8), slots=3)
    moved = replace(batch, count=torch.tensor(2.0)).to("meta")
    assert moved.size == 3 and moved.longest == 4 and set(moved.tensors()) == {*batch.tensors(), "count"}
    assert all(tensor.device.type == "meta" for tensor in moved.tensors().values())
    assert batch.bounds.tolist() == [0, 3, 4, 4, 8, 8] and batch.sequence.tolist() == [0, 0, 0, 1, 3, 3, 3, 3]


lengths_of = st.lists(st.integers(1, 200), min_size=1, max_size=300).map(np.array)


@some
@given(lengths_of, st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_an_epoch_is_every_example_once(lengths, batch, seed, bucket):
    made = cut_into_batches(lengths, batch, seed, bucket)
    assert sorted(np.concatenate(made).tolist()) == list(range(len(lengths)))
    assert len(made) == -(-len(lengths) // batch)
    sizes = sorted(len(one) for one in made)
    assert sizes[-1] <= batch and all(size == batch for size in sizes[1:])
    again = cut_into_batches(lengths, batch, seed, bucket)
    assert [one.tolist() for one in made] == [one.tolist() for one in again]


@pytest.mark.parametrize("bucket", [False, True])
def test_another_seed_is_another_order_and_buckets_save_padding(bucket):
    lengths = np.random.default_rng(0).integers(1, 128, 2000)

    def padding(made):
        return sum(len(one) * lengths[one].max() for one in made) / lengths.sum()

    one, other = (cut_into_batches(lengths, 32, seed, bucket) for seed in (1, 2))
    assert [x.tolist() for x in one] != [x.tolist() for x in other]
    assert (padding(one) < 1.1) == bucket
    tops = np.array([lengths[x].max() for x in one])
    assert not (np.diff(tops) >= 0).all()  # batches of like length, but not from short to long


@some
@given(lengths_of, st.integers(1, 4000), st.integers(1, 64))
def test_reading_sees_each_once_within_the_budget(lengths, tokens, most):
    made = sort_into_batches(lengths, tokens, most)
    assert sorted(np.concatenate(made).tolist()) == list(range(len(lengths)))
    order = lengths[np.concatenate(made)]
    assert (np.diff(order) >= 0).all()
    for one, after in zip(made, [*made[1:], None], strict=True):
        assert len(one) <= most and (len(one) == 1 or len(one) * lengths[one].max() <= tokens)
        if after is not None:  # a batch ends only where one more would not have fitted
            assert len(one) == most or (len(one) + 1) * lengths[after[0]] > tokens
