"""Heads: their losses against formulas, where their weights come from, and which classes they answer in."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import batch_of, run, scores_of, small, stream_of, toy_task

from smallbert.model.heads import IGNORE, KINDS, Head, losses, same_labels
from smallbert.tiny import make_encoder


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_textbook_ones(kind, packed):
    task = toy_task(kind, 24)
    encoder = run("head", small(), task).encoder
    batch = batch_of(encoder, task, packed=packed, slots=7)
    scores = scores_of(encoder, task, packed=packed, slots=7)
    scores = scores + torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    found, raw, stream = losses(encoder.head, scores, batch).numpy(), scores.double().numpy(), stream_of(encoder, task)
    lengths, starts = stream.views["student"].lengths[:5], stream.views["student"].offsets[:5]
    if kind == "tag":
        rows = np.split(raw[0], np.cumsum(lengths)) if packed else raw
        wanted = 0.0
        for row, length, start in zip(rows, lengths, starts, strict=False):
            tags = stream.labels[start : start + length]
            wanted -= sum(log_softmax(row[place])[tag] for place, tag in enumerate(tags) if tag != IGNORE)
        assert found.sum() == pytest.approx(wanted, rel=1e-5)
        assert (found > 0).sum() == stream.units(np.arange(5))
        return
    if kind == "regress":
        wanted = (raw[:5, 0] - stream.labels[:5]) ** 2
    elif kind == "classify":
        wanted = -log_softmax(raw)[np.arange(5), stream.labels[:5]]
    else:
        rows = np.split(raw[0], np.cumsum(lengths)) if packed else raw
        wanted = [
            -sum(log_softmax(rows[n][:length, side])[stream.labels[n, side]] for side in (0, 1)) / 2
            for n, length in enumerate(lengths)
        ]
    np.testing.assert_allclose(found[:5], wanted, rtol=1e-5)
    assert (found[5:] == 0).all()  # rows that only fill the shape


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_without_an_example_adds_nothing(kind, packed):
    task = toy_task(kind, 24)
    encoder = run("head", small(), task).encoder
    batch = batch_of(encoder, task, packed=packed)
    absent = replace(batch, present=torch.zeros_like(batch.present))
    assert (losses(encoder.head, scores_of(encoder, task, packed=packed), absent) == 0).all()
    with pytest.raises(ValueError, match="without labels"):
        losses(encoder.head, scores_of(encoder, task), replace(batch, labels=None))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_seeds(kind, family):
    task = toy_task(kind, 24)
    one, same, other = (run("head", small(family), task, seed).encoder for seed in (0, 0, 1))
    assert scores_of(one, task).shape[-1] == {"classify": 2, "regress": 1, "tag": 3, "answer": 2}[kind]
    assert torch.equal(one.head.out.weight, same.head.out.weight)
    assert not torch.equal(one.head.out.weight, other.head.out.weight)
    assert 0.005 < float(one.head.out.weight.std()) < 0.05 and (one.head.out.bias == 0).all()
    assert one.head.kind == kind and one.head.labels == list(task.labels) and one.pooler is None


def test_a_pretrained_pooler_becomes_the_head(tiny, family):
    given = tiny(family)
    taken = family in ("bert", "albert", "mobilebert")
    assert (given.pooler is not None) == taken
    result = run("head", given, toy_task()).encoder
    assert result.history[0]["plan"]["from_pooler"] == taken
    if taken:
        assert torch.equal(result.head.dense.weight, given.pooler.weight)
        assert torch.equal(result.head.dense.bias, given.pooler.bias)
    tagger = run("head", given, toy_task("tag")).encoder  # reads tokens, so it has no use for one
    assert not tagger.history[0]["plan"]["from_pooler"] and tagger.pooler is None


def test_mean_pooling_is_the_mean_of_real_tokens():
    task = toy_task()
    encoder = run("head(pool='mean')", small(), task).encoder
    batch = batch_of(encoder, task)
    hidden = encoder.states(batch).last
    lengths = stream_of(encoder, task).views["student"].lengths[:5]
    pooled = torch.stack([row[:length].mean(0) for row, length in zip(hidden, lengths, strict=True)])
    wanted = encoder.head.out(encoder.head.activation(encoder.head.dense(pooled)))
    torch.testing.assert_close(scores_of(encoder, task), wanted.detach())
    first = run("head", small(), task).encoder
    assert not torch.allclose(scores_of(first, task), scores_of(encoder, task), atol=1e-4)


def test_a_new_task_gets_a_new_head():
    encoder = run("head", small(), toy_task("tag")).encoder
    for kind in ("classify", "regress", "answer", "pair"):
        task = toy_task(kind)
        encoder = run("train(epochs=0.1)", encoder, task, judge=False).encoder
        assert encoder.head.kind == task.kind and encoder.head.labels == list(task.labels)
        assert list(encoder.heads) == ["task"]


def test_dropout_of_a_head_follows_the_config():
    for name, value in (("classifier_dropout", 0.25), ("hidden_dropout_prob", 0.35)):
        config = make_encoder("bert", **{name: value}).backbone.config
        assert Head("classify", 2, config, ["a", "b"]).dropout.p == value
        assert Head("answer", 2, config, []).dropout.p == 0.0
    assert Head("classify", 2, make_encoder("distilbert").backbone.config, []).dropout.p == pytest.approx(0.2)


def test_same_labels():
    assert same_labels(["No", "Yes"], ("no", "yes")) and same_labels([], ())
    assert same_labels(["LABEL_0", "LABEL_1"], ["no", "yes"]) and same_labels(["no", "yes"], ["LABEL_0", "LABEL_1"])
    assert not same_labels(["yes", "no"], ["no", "yes"]) and not same_labels(["LABEL_0"], ["no", "yes"])
    assert not same_labels(["LABEL_1", "LABEL_0"], ["no", "yes"])
    assert same_labels(["NOT_ENTAILED"], ["not entailed"]) and not same_labels(["+", "-"], ["-", "+"])
