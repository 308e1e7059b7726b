"""Conditions that hold while a phase trains and are lifted when it ends: frozen parts, dropout, compiled layers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from smallbert.model.anatomy import layers
from smallbert.model.encoder import Encoder

COMPILE_PAYS = 15_000  # steps, of BERT-base on a fast GPU: 25 s against 1 to 2 ms a step; of small students thrice that


def pays_to_compile(asked: bool | None, total: int) -> bool:
    """Whether layers are compiled: as asked, else where the whole phase is long.

    What a resumed phase has left must not matter: compiled layers round otherwise, and it would go on as another run.
    """
    return total >= COMPILE_PAYS if asked is None else asked


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and a polite kill into a question to ask between steps, so that no half step is ever saved.

    A second Ctrl-C stops at once, and saves nothing more.
    """
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def other_dropout(encoder: nn.Module, rate: float | None) -> Iterator[None]:
    """Give every module that drops anything another rate."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in encoder.modules() if rate is not None else ():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), int | float) and (name != "p" or isinstance(module, nn.Dropout)):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, rate)
    try:
        yield
    finally:
        for module, name, old in before:
            setattr(module, name, old)


FROZEN: dict[str, Callable[[Encoder], list[nn.Module]]] = {
    "nothing": lambda encoder: [],
    "embeddings": lambda encoder: [encoder.backbone.embeddings],
    "backbone": lambda encoder: [encoder.backbone],
}


@contextmanager
def frozen_parts(encoder: Encoder, which: str, also: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """Leave a part of the encoder as it is, and what a method wants left."""
    parts = [one for part in FROZEN[which](encoder) for one in part.parameters()]
    parameters = [one for one in dict.fromkeys([*parts, *also]) if one.requires_grad]
    for one in parameters:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in parameters:
            one.requires_grad_(True)


@contextmanager
def compiled_layers(encoders: Sequence[Encoder]) -> Iterator[None]:
    """Compile the layers of these encoders: those of one are alike, so one compilation serves all, for any shape."""
    stack = [layer for encoder in encoders for layer in layers(encoder.backbone)]
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        for layer in stack:
            layer.compile(dynamic=True)
        try:
            yield
        finally:
            for layer in stack:
                layer._compiled_call_impl = None
