"""Products of whole numbers: against sums by hand, against the same rounding in real numbers, in any company."""

import doctest

import numpy as np
import pytest
import torch
from toys import run, scores_of, small, toy_task

from smallbert.model import products, quantised
from smallbert.model.products import Matrix, are_exact, code_range, code_tokens, multiply, round_tokens

TASK = toy_task("pair", 16)
RECIPES = [
    "quantize(8, activations=True)",
    "quantize(4, activations=True, scope='tensor')",
    "quantize(8, activations='static')",
    "quantize(3, activations='static')",
]
needs_exact = pytest.mark.skipif(not are_exact(), reason="this CPU has no exact products of 8-bit numbers")


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def encoder():
    return run("head", small(), TASK, seed=5).encoder


def test_the_example_holds():
    assert doctest.testmod(products) == (0, 1)


def test_each_token_has_steps_of_its_own():
    inputs = draw(2, 3, 8) * torch.tensor([0.01, 1.0, 100.0])[:, None]
    inputs[1, 1] = 0.0
    codes, step, zero = code_tokens(inputs)
    assert zero is None and step.shape == (2, 3, 1)
    for place in np.ndindex(2, 3):
        values = inputs[place].double().numpy()
        wide = np.abs(values).max() / 127 or 1.0
        np.testing.assert_array_equal(codes[place].numpy(), np.round(values / wide))
    again = code_tokens(inputs[1:, 1:])
    assert torch.equal(again.codes, codes[1:, 1:]) and torch.equal(again.step, step[1:, 1:])


def test_rounding_lets_gradients_through():
    inputs = draw(4, 8).requires_grad_()
    made = round_tokens(inputs)
    assert 0 < (made - inputs).abs().max() < inputs.abs().max() / 127
    made.backward(torch.ones_like(made))
    assert torch.equal(inputs.grad, torch.ones_like(inputs))


@needs_exact
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("by_token", [True, False])
def test_whole_products_are_the_sums_of_what_codes_stand_for(by_token, biased):
    inputs, bias = draw(2, 5, 70), draw(33, seed=1) if biased else None
    weight = torch.randint(-127, 128, (33, 70), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    scale, bounds = draw(33, seed=3).abs(), torch.tensor([-0.7, 2.0])
    coded = code_tokens(inputs) if by_token else code_range(inputs, *bounds)
    found = multiply(coded, Matrix(weight, scale, None, weight.sum(1, dtype=torch.int32)), bias)
    codes = coded.codes.double() - (0 if by_token else coded.zero.double())
    wanted = (codes * coded.step.double()) @ (weight.double() * scale.double()[:, None]).t()
    torch.testing.assert_close(found.double(), wanted + (bias.double() if biased else 0), atol=1e-4, rtol=1e-5)


@needs_exact
@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_products_are_taken_and_say_what_real_ones_say(recipe, encoder, monkeypatch):
    result = run(recipe, encoder, TASK).encoder
    taken = []
    monkeypatch.setattr(quantised, "multiply", lambda *parts: taken.append(1) or multiply(*parts))
    whole = scores_of(result, TASK)
    assert len(taken) == sum(isinstance(part, quantised.StoredLinear) for part in result.modules())
    monkeypatch.setattr(quantised, "are_exact", lambda: False)
    assert torch.allclose(scores_of(result, TASK), whole, atol=1e-5) and not torch.equal(
        scores_of(encoder, TASK), whole
    )


@pytest.mark.parametrize("recipe", ["quantize(8, activations=True)", "quantize(8, activations='static')"])
def test_what_a_text_gets_does_not_depend_on_its_company(recipe, encoder):
    result = run(recipe, encoder, TASK).encoder
    together = scores_of(result, TASK)
    for number in range(5):
        torch.testing.assert_close(scores_of(result, TASK, index=[number])[0], together[number], atol=1e-4, rtol=0)


def test_products_that_lose_sums_are_not_taken(monkeypatch):
    """Without VNNI, one side is moved up to have no sign, pairs are added in 16 bits, and what is too large is cut."""

    def in_pairs(left, right):
        pairs = (left.int() + 128)[:, :, None] * right.int()[None]
        sums = (pairs[:, 0::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1, dtype=torch.int32)
        return sums - 128 * right.sum(0, dtype=torch.int32)

    monkeypatch.setattr(torch, "_int_mm", in_pairs, raising=False)
    assert not are_exact.__wrapped__()
    monkeypatch.delattr(torch, "_int_mm")
    assert not are_exact.__wrapped__()
