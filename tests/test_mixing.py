"""The mixture of hidden states on its own: what it adds up, what it forgets, and where its gradients go."""

import weakref

import numpy as np
import pytest
import torch

from smallbert.errors import UserError
from smallbert.model.batch import Batch
from smallbert.model.mixing import AXES, Connections, Gates, Mixture, normalise


def stack(count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).to(dtype) * (n + 1) + n for n in range(count)]


def filled(norm="token", plain=False, count=4):
    mixture = Mixture(list(range(count)), norm, dropout=0.3, plain=plain).eval()
    with torch.no_grad():
        for number, parameter in enumerate(mixture.parameters()):
            parameter.copy_(torch.linspace(0.3, 1.1, parameter.numel()).view(parameter.shape) + number)
    return mixture


def test_no_norm_is_a_weighted_sum():
    mixture, hidden = filled("none"), stack()
    shares = torch.tensor([0.3, 0.3 + 0.8 / 3, 0.3 + 1.6 / 3, 1.1]).exp()
    wanted = sum(share * one for share, one in zip(shares / shares.sum(), hidden, strict=True)) * mixture.gamma
    torch.testing.assert_close(mixture(hidden), wanted)
    torch.testing.assert_close(mixture.shares().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("norm", list(AXES))
def test_norms_do_what_they_say(norm):
    made = normalise(torch.stack(stack()), norm)
    axes = AXES[norm]
    if not axes:
        assert torch.equal(made, torch.stack(stack()))
        return
    torch.testing.assert_close(made.mean(axes), torch.zeros_like(made.mean(axes)), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.var(axes, correction=0), torch.ones_like(made.mean(axes)), atol=1e-3, rtol=0)


def test_layer_norm_leaves_nothing_of_a_uniform_mixture():
    uniform = Mixture([0, 1, 2, 3], "layer").eval()
    torch.testing.assert_close(uniform(stack()), torch.zeros(2, 5, 8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", list(AXES))
@pytest.mark.parametrize("plain", [False, True])
def test_precision_and_shape_stay(norm, plain):
    for dtype in (torch.float32, torch.bfloat16):
        mixed = filled(norm, plain)(stack(dtype=dtype))
        assert mixed.dtype == dtype and mixed.shape == (2, 5, 8) and torch.isfinite(mixed).all()


def test_plain_starts_at_the_last_layer_with_live_gradients():
    mixture, hidden = Mixture([0, 1, 2, 3], "none", plain=True), stack()
    assert torch.equal(mixture(hidden), hidden[-1])  # in training mode too, whatever dropout does
    mixture(hidden).square().sum().backward()
    assert mixture.gamma.grad.abs() > 0 and torch.equal(mixture.weights.grad, torch.zeros(4))
    with torch.no_grad():
        mixture.gamma.fill_(0.1)
    mixture(hidden).square().sum().backward()
    assert mixture.weights.grad.abs().min() > 0
    half = filled("none", plain=True)
    with torch.no_grad():
        half.gamma.fill_(1.0)
    full = filled("none")
    with torch.no_grad():
        full.gamma.fill_(1.0)
    torch.testing.assert_close(half(hidden), full(hidden))


def test_dropout_only_while_training():
    mixture, hidden = filled(), stack()
    assert torch.equal(mixture(hidden), mixture(hidden))
    mixture.train()
    assert not torch.equal(mixture(hidden), mixture(hidden))


@pytest.mark.parametrize("norm", list(AXES))
def test_keeping_layers_forgets_the_others(norm):
    mixture, hidden = filled(norm), stack()
    before = {name: parameter.detach().clone() for name, parameter in mixture.named_parameters()}
    mixture.keep([0, 2])  # layers 0 and 2; what comes before the first layer always stays
    for name, parameter in mixture.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, before[name] if name == "gamma" else before[name][[0, 1, 3]])
    smaller = filled(norm, count=3)
    smaller.load_state_dict(mixture.state_dict())
    assert torch.equal(mixture([hidden[n] for n in (0, 1, 3)]), smaller([hidden[n] for n in (0, 1, 3)]))


@pytest.mark.parametrize("norm", list(AXES))
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reads", [[0, 1, 2, 3], [1, 3], [0, 2], [3]])
def test_streaming_is_stacking(norm, plain, reads):
    mixture = Mixture(reads, norm, plain=plain).eval()
    with torch.no_grad():
        for number, parameter in enumerate(mixture.parameters()):
            parameter.copy_(torch.linspace(0.3, 1.1, parameter.numel()).view(parameter.shape) + number)
    for hidden in (stack(), [one * 3 + 20 for one in stack()]):
        torch.testing.assert_close(mixture.stream(iter(hidden)), mixture.stack(hidden), atol=2e-5, rtol=2e-5)


def test_streaming_keeps_one_state_at_a_time():
    alive = weakref.WeakSet()

    class Seen:
        pass

    def states():
        for one in stack(6):
            owner = Seen()
            one.owner = owner  # lives as long as the tensor object
            alive.add(owner)
            del owner
            assert len(alive) <= 2
            yield one

    def walked():  # the list inside stack() would keep all of them
        for one in states():
            copied = one + 0
            copied.owner = one.owner
            del one.owner
            yield copied
            del copied

    mixture = Mixture(list(range(6))).eval()
    with torch.no_grad():
        mixture.stream(walked())
    assert not alive


def test_a_part_of_the_tokens_is_mixed_as_in_the_whole():
    mixture, hidden = filled(), stack()
    torch.testing.assert_close(mixture.stream(hidden, lambda state: state[:, 0]), mixture.stream(hidden)[:, 0])
    torch.testing.assert_close(mixture.stack(hidden, lambda state: state[:, 0]), mixture.stack(hidden)[:, 0])


def test_a_subset_reads_nothing_else():
    mixture, hidden = Mixture([1, 3], "none").eval(), stack()
    torch.testing.assert_close(mixture(hidden), (hidden[1] + hidden[3]) / 2)
    mixture.keep([0, 2])  # the states 0, 1 and 3 stay, now called 0, 1 and 2
    assert mixture.reads == [1, 2]
    mixture.keep([1])
    assert mixture.reads == [1] and len(mixture.weights) == 1
    with pytest.raises(UserError, match="none of them would be left"):
        Mixture([1]).keep([1])


def test_profile_counts_the_last_layer_of_a_plain_start():
    mixture = Mixture([0, 1, 2, 3], "none", plain=True)
    assert mixture.profile(4) == [0, 0, 0, 1]
    with torch.no_grad():
        mixture.gamma.fill_(0.4)
    assert mixture.profile(4) == pytest.approx([0.1, 0.1, 0.1, 0.7])
    assert Mixture([1, 2]).profile(4) == pytest.approx([0, 0.5, 0.5, 0])


def test_layer_dropout_takes_layers_out_while_training_only():
    torch.manual_seed(0)
    mixture = Mixture([0, 1, 2, 3], layer_dropout=0.5)
    drawn = torch.stack([mixture.shares() for _ in range(400)]).detach()
    assert torch.allclose(drawn.sum(1), torch.ones(400))
    gone = (drawn == 0).float().mean()
    assert 0.37 < gone < 0.5  # half of them, but for the times when all four are gone and all come back
    mixture.eval()
    assert torch.equal(mixture.shares(), torch.full((4,), 0.25))


def padded(lengths=(5, 3)):
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.ones_like(mask)
    return Batch(ids, ids, ids, attention_mask=mask, size=len(lengths), longest=max(lengths))


def packed(lengths=(5, 3)):
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    ids = torch.ones(1, sum(lengths), dtype=torch.long)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Batch(ids, ids, ids, bounds=bounds, sequence=sequence, size=len(lengths), longest=max(lengths))


def gates(squeeze, count=4):
    made = Gates(count, 3, squeeze, 8)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


@pytest.mark.parametrize("squeeze", ["first", "square"])
def test_gates_are_the_formula_and_see_no_padding(squeeze):
    made, hidden, lengths = gates(squeeze), stack(), (5, 3)
    found = made(hidden, padded(lengths))
    for text, length in enumerate(lengths):
        own = [state[text, :length].double() for state in hidden]
        look = made.look.double() if made.look is not None else None
        z = torch.stack([s[0] @ look if squeeze == "first" else s.square().mean() for s in own])
        inner = (z - z.mean()) @ made.inward.double() + made.inward_bias.double()
        inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
        gate = 1 / (1 + torch.exp(-(inner @ made.outward.double() + made.outward_bias.double())))
        mixed = sum(share * state for share, state in zip(gate / gate.sum(), own, strict=True))
        wanted = own[-1] + made.gamma.double() * (mixed - own[-1])
        torch.testing.assert_close(found[text, :length].double(), wanted, atol=1e-5, rtol=1e-5)
    rows = [torch.cat([state[text, :length] for text, length in enumerate(lengths)])[None] for state in hidden]
    together = made(rows, packed(lengths))[0]
    torch.testing.assert_close(together, torch.cat([found[text, :length] for text, length in enumerate(lengths)]))


def test_gates_start_at_the_last_layer():
    made, hidden = gates("first"), stack()
    with torch.no_grad():
        made.gamma.zero_()
    assert torch.equal(made(hidden, padded()), hidden[-1])
    made(hidden, padded()).sum().backward()
    assert made.gamma.grad.abs() > 0


def test_connections_begin_as_nothing_and_are_the_formula():
    made, hidden = Connections(3), stack()
    assert sum(row.numel() for row in made.rows) == 2 + 3 + 4
    assert all(torch.equal(made(place, hidden[: place + 2]), hidden[place + 1]) for place in range(3))
    with torch.no_grad():
        made.rows[1].copy_(torch.tensor([0.5, -1.0, 2.0]))
    wanted = 0.5 * hidden[0] - hidden[1] + 2 * hidden[2]
    torch.testing.assert_close(made(1, hidden[:3]), wanted)
    made.dilation = 2
    torch.testing.assert_close(made(1, hidden[:3]), 0.5 * hidden[0] + 2 * hidden[2])
    made.period = 3
    assert torch.equal(made(1, hidden[:3]), hidden[2])


def test_connections_of_layers_that_are_gone_are_forgotten():
    made = Connections(3)
    with torch.no_grad():
        made.rows[2].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    made.keep([0, 2])
    assert [row.tolist() for row in made.rows] == [[0, 1], [1, 2, 4]]
