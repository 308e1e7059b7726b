"""Tiny random encoders shared by all tests; a test that changes one takes a copy."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)

from smallbert.tiny import SHAPES, make_encoder  # noqa: E402


@pytest.fixture(scope="session")
def tiny():
    """tiny("bert") gives the shared tiny encoder of a family; copy it before changing it."""
    made = {}
    return lambda family="bert": made.get(family) or made.setdefault(family, make_encoder(family))


# XLM-RoBERTa is RoBERTa by another name: once in a while is enough.
EACH = [pytest.param(name, marks=pytest.mark.slow) if name == "xlm-roberta" else name for name in SHAPES]


@pytest.fixture(scope="session", params=EACH)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def encoder():
    """A tiny encoder with a head; a file that needs another one has a fixture of its own."""
    from pruned import fresh_encoder

    return fresh_encoder()


@pytest.fixture(scope="session")
def trained():
    """The same, trained for nine steps."""
    from pruned import trained_encoder

    return trained_encoder()


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Speed is not what tests are about: it is measured as shortly as can be, but where a file says otherwise."""
    from smallbert.measuring import cost

    real = cost.measure_latencies
    monkeypatch.setattr(
        cost, "measure_latencies", lambda *given, **named: real(*given, **{**named, "repeats": 2, "warm": 0})
    )
