"""Attention over padded or packed batches, registered with transformers under one name.

A packed batch comes with `bounds`, the cumulative lengths of its segments; each segment attends to itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model import cpu

NAME = "smallbert"
SHORT = 96  # tokens a sequence, on average, up to which small tiles are used: 1.3 times faster at 90, hardly at 128


@dataclass(frozen=True)
class Attending:
    """What one layer attends with: queries and keys (batch, heads, tokens, size), and how far a token sees."""

    query: Tensor
    key: Tensor
    scaling: float | None = None
    window: int | None = None  # a token sees others less than this far away; None: all of its sequence


def take_over(backbone: Any) -> None:
    """Let every layer of a backbone attend by `attend`, in its own forward too, with masks that transformers makes."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    backbone.set_attn_implementation(NAME)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    bounds: Tensor | None = None,
    longest: int = 0,
    sliding_window: int | None = None,
    watch: Callable[[Tensor], None] | None = None,
    show: Callable[[Attending], None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence; query, key and value are (batch, heads, tokens, size).

    `watch` is shown the probabilities of a padded batch, which are otherwise never made, and `show` what they are made
    of, in either layout.
    """
    if show is not None:
        show(Attending(query, key, scaling, sliding_window))
    if bounds is None:
        drops = dropout > 0 and cpu.draws(query)
        if drops or watch is not None:
            seen = probabilities(query, key, attention_mask, scaling)
        if watch is not None:
            watch(seen)
        if drops:
            out = functional.dropout(seen, dropout) @ value
        else:
            out = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
            )
        return out.transpose(1, 2), None
    # ModernBERT counts its own place into the half window; the kernels do not.
    window = -1 if sliding_window is None else sliding_window - 1
    packed = _attend_fast if query.is_cuda else _attend_segments
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # x[0] would copy on its way back
    return packed(q, k, v, bounds, longest, scaling, window).unsqueeze(0), None


def probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """How much each token attends to each other one: (batch, heads, tokens, tokens), each row adding up to one."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is not None:  # a row that may look at nothing (padding) comes out level, not as no numbers at all
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


def _attend_fast(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int
) -> Tensor:
    """On a GPU, in half precision: by small tiles, or by torch's kernels where texts are long or look near.

    What comes out has the precision of the values: turned queries and keys are float32 where all else is not.
    """
    wanted = v.dtype
    if q.dtype == torch.float32:
        q, k, v = (x.bfloat16() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    if window < 0 and q.shape[0] <= SHORT * (bounds.shape[0] - 1):
        from smallbert.model.short_kernels import attend_short

        return attend_short(q, k, v, bounds, longest, scale).to(wanted)
    return _attend_long(q, k, v, bounds, longest, scale, window).to(wanted)


def _attend_long(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, window: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    size, missing = q.shape[-1], -q.shape[-1] % 8  # the kernel takes heads of 8, 16, 24, … numbers only
    if missing:
        q, k, v = (functional.pad(x, (0, missing)) for x in (q, k, v))
    extra: dict[str, Any] = {} if window < 0 else {"window_size": (window, window)}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, **extra)
    assert isinstance(out, Tensor)
    return out[..., :size]


def _attend_segments(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scaling: float | None, window: int
) -> Tensor:
    """The same, one segment at a time: the reference for the fast kernel, and what runs without a GPU."""
    outputs = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if start == stop:
            continue
        place = torch.arange(stop - start, device=q.device)
        near = None if window < 0 else (place[:, None] - place[None, :]).abs() <= window
        a, b, c = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        outputs.append(functional.scaled_dot_product_attention(a, b, c, attn_mask=near, scale=scaling).transpose(0, 1))
    return torch.cat(outputs)
