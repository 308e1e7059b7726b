"""The mixture of hidden states on its own: what it adds up, what it forgets, and where its gradients go."""

import pytest
import torch

from smallbert.model.mixing import NORMS, Mixture


def stack(count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).to(dtype) * (n + 1) + n for n in range(count)]


def filled(norm="token", plain=False, count=4):
    mixture = Mixture(count, norm, dropout=0.3, plain=plain).eval()
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


@pytest.mark.parametrize("norm", list(NORMS))
def test_norms_do_what_they_say(norm):
    made = torch.stack(NORMS[norm](stack()))
    axes = {"token": (0, 3), "feature": (3,), "layer": (0,)}.get(norm)
    if axes is None:
        assert torch.equal(made, torch.stack(stack()))
        return
    torch.testing.assert_close(made.mean(axes), torch.zeros_like(made.mean(axes)), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.var(axes, correction=0), torch.ones_like(made.mean(axes)), atol=1e-3, rtol=0)


def test_layer_norm_leaves_nothing_of_a_uniform_mixture():
    uniform = Mixture(4, "layer").eval()
    torch.testing.assert_close(uniform(stack()), torch.zeros(2, 5, 8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("plain", [False, True])
def test_precision_and_shape_stay(norm, plain):
    for dtype in (torch.float32, torch.bfloat16):
        mixed = filled(norm, plain)(stack(dtype=dtype))
        assert mixed.dtype == dtype and mixed.shape == (2, 5, 8) and torch.isfinite(mixed).all()


def test_plain_starts_at_the_last_layer_with_live_gradients():
    mixture, hidden = Mixture(4, "none", plain=True), stack()
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


@pytest.mark.parametrize("norm", list(NORMS))
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
