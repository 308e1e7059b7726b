"""GPU kernels that compare how the tokens of short sequences stand to each other in two models.

For each token and head a row of scores, its query times all keys of its sequence, of the student and of the teacher;
what comes out is one number for each. Sequences stand one behind the other, and nothing as large as all pairs of
tokens is ever written: programs read one tile of one head, as in model/short_kernels.py. Nothing is added up in an
order that changes from run to run. Importing this file needs triton, which comes with torch on a GPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from smallbert.model.short_kernels import NONE, segment, tile

KL, CHANCES, SCORES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of softmaxes; squares of these; of scores
PRECISION = tl.constexpr("tf32x3")  # of float32, by three products each; vectors in half precision as they are


class Rows(NamedTuple):
    """Queries and keys of one model, (tokens, heads, size) each, and what their products are multiplied by."""

    query: Tensor
    key: Tensor
    scale: float


@triton.jit
def _read(vectors, start, head, first, numbers, size, stride, apart, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    place, inside = tile(start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
    return tl.load(vectors + place, mask=inside, other=0.0)


@triton.jit
def _scores(q, k, scale):
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale


@triton.jit
def _level(q, key, start, head, numbers, scale, size, stride, apart, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The logarithm of what each row of a softmax is divided by."""
    most = tl.full((BLOCK,), NONE, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for other in range(0, numbers, BLOCK):
        scores = _scores(q, _read(key, start, head, other, numbers, size, stride, apart, BLOCK, WIDE), scale)
        scores = tl.where((other + tl.arange(0, BLOCK) < numbers)[None, :], scores, NONE)
        higher = tl.maximum(most, tl.max(scores, 1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(scores - higher[:, None]), 1)
        most = higher
    return most + tl.log(total)


@triton.jit
def _forward(
    query, key, their_query, their_key, out, levels, their_levels, leans, bounds, tokens,
    scale, size, stride, apart, their_scale, their_size, their_stride, their_apart,
    METRIC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, THEIR_WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of rows over all keys of its sequence, twice: what they are divided by, then how far they are apart."""
    head, first, start, numbers = segment(bounds, BLOCK)
    if first < numbers:
        row = first + tl.arange(0, BLOCK)
        place = head * tokens + start + row
        q = _read(query, start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
        their_q = _read(
            their_query, start, head, first, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
        )
        level = tl.zeros((BLOCK,), tl.float32)
        their_level = tl.zeros((BLOCK,), tl.float32)
        if METRIC != SCORES:
            level = _level(q, key, start, head, numbers, scale, size, stride, apart, BLOCK, WIDE)
            their_level = _level(
                their_q, their_key, start, head, numbers, their_scale, their_size, their_stride, their_apart,
                BLOCK, THEIR_WIDE
            )  # fmt: skip
            tl.store(levels + place, level, mask=row < numbers)
            tl.store(their_levels + place, their_level, mask=row < numbers)
        far = tl.zeros((BLOCK,), tl.float32)
        lean = tl.zeros((BLOCK,), tl.float32)
        for other in range(0, numbers, BLOCK):
            k = _read(key, start, head, other, numbers, size, stride, apart, BLOCK, WIDE)
            their_k = _read(
                their_key, start, head, other, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
            )
            ours = _scores(q, k, scale) - level[:, None]
            theirs = _scores(their_q, their_k, their_scale) - their_level[:, None]
            real = (other + tl.arange(0, BLOCK) < numbers)[None, :]
            if METRIC == KL:
                far += tl.sum(tl.where(real, tl.exp(theirs) * (theirs - ours), 0.0), 1)
            elif METRIC == CHANCES:
                more = tl.exp(ours) - tl.exp(theirs)
                far += tl.sum(tl.where(real, more * more, 0.0), 1) / numbers
                lean += tl.sum(tl.where(real, more * tl.exp(ours), 0.0), 1)
            else:
                far += tl.sum(tl.where(real, (ours - theirs) * (ours - theirs), 0.0), 1) / numbers
        tl.store(out + place, far, mask=row < numbers)
        if METRIC == CHANCES:
            tl.store(leans + place, lean, mask=row < numbers)


@triton.jit
def _rise(
    q, k, their_q, their_k, level, their_level, lean, slope, first, other, numbers, scale, their_scale,
    METRIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How the loss rises with the student's scores, of the rows from `first` on over the keys from `other` on."""
    ours = _scores(q, k, scale) - level[:, None]
    theirs = _scores(their_q, their_k, their_scale) - their_level[:, None]
    if METRIC == KL:
        rise = tl.exp(ours) - tl.exp(theirs)
    elif METRIC == CHANCES:
        rise = tl.exp(ours) * (tl.exp(ours) - tl.exp(theirs) - lean[:, None]) * 2.0 / numbers
    else:
        rise = (ours - theirs) * 2.0 / numbers
    real = (first + tl.arange(0, BLOCK) < numbers)[:, None] & (other + tl.arange(0, BLOCK) < numbers)[None, :]
    return tl.where(real, rise * slope[:, None], 0.0) * scale


@triton.jit
def _row(
    levels, their_levels, leans, slopes, start, head, first, numbers, tokens,
    METRIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the forward pass kept of some rows, and how the loss rises with what came of them."""
    row = first + tl.arange(0, BLOCK)
    place, inside = head * tokens + start + row, row < numbers
    level = tl.zeros((BLOCK,), tl.float32)
    their_level = tl.zeros((BLOCK,), tl.float32)
    lean = tl.zeros((BLOCK,), tl.float32)
    if METRIC != SCORES:
        level = tl.load(levels + place, mask=inside, other=0.0)
        their_level = tl.load(their_levels + place, mask=inside, other=0.0)
    if METRIC == CHANCES:
        lean = tl.load(leans + place, mask=inside, other=0.0)
    slope = tl.load(slopes + place, mask=inside, other=0.0)
    return level, their_level, lean, slope


@triton.jit
def _backward(
    query, key, their_query, their_key, slopes, to_query, to_key, levels, their_levels, leans, bounds, tokens,
    scale, size, stride, apart, their_scale, their_size, their_stride, their_apart,
    METRIC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, THEIR_WIDE: tl.constexpr,
):  # fmt: skip
    """One tile as queries (over all keys), then the same tile as keys (over all queries)."""
    head, first, start, numbers = segment(bounds, BLOCK)
    if first < numbers:
        q = _read(query, start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
        k = _read(key, start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
        their_q = _read(
            their_query, start, head, first, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
        )
        their_k = _read(
            their_key, start, head, first, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
        )
        level, their_level, lean, slope = _row(
            levels, their_levels, leans, slopes, start, head, first, numbers, tokens, METRIC, BLOCK
        )
        q_slope = tl.zeros((BLOCK, WIDE), tl.float32)
        k_slope = tl.zeros((BLOCK, WIDE), tl.float32)
        for other in range(0, numbers, BLOCK):
            k_other = _read(key, start, head, other, numbers, size, stride, apart, BLOCK, WIDE)
            their_k_other = _read(
                their_key, start, head, other, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
            )
            rise = _rise(
                q, k_other, their_q, their_k_other, level, their_level, lean, slope, first, other, numbers,
                scale, their_scale, METRIC, BLOCK,
            )  # fmt: skip
            q_slope += tl.dot(rise, k_other.to(tl.float32), input_precision=PRECISION)
            q_other = _read(query, start, head, other, numbers, size, stride, apart, BLOCK, WIDE)
            their_q_other = _read(
                their_query, start, head, other, numbers, their_size, their_stride, their_apart, BLOCK, THEIR_WIDE
            )
            level_other, their_level_other, lean_other, slope_other = _row(
                levels, their_levels, leans, slopes, start, head, other, numbers, tokens, METRIC, BLOCK
            )
            rise = _rise(
                q_other, k, their_q_other, their_k, level_other, their_level_other, lean_other, slope_other,
                other, first, numbers, scale, their_scale, METRIC, BLOCK,
            )  # fmt: skip
            k_slope += tl.dot(tl.trans(rise), q_other.to(tl.float32), input_precision=PRECISION)
        own, mine = tile(start, head, first, numbers, size, tl.num_programs(1) * size, size, BLOCK, WIDE)
        tl.store(to_query + own, q_slope.to(to_query.dtype.element_ty), mask=mine)
        tl.store(to_key + own, k_slope.to(to_key.dtype.element_ty), mask=mine)


class _Compare(torch.autograd.Function):
    """The distance of each token and head, and the gradients of the student's queries and keys."""

    @staticmethod
    def forward(ctx, query, key, their_query, their_key, bounds, longest, scale, their_scale, metric):
        tokens, heads, size = query.shape
        segments = bounds.shape[0] - 1
        usual = tokens / segments
        block = 16 if usual <= 24 else 32
        ctx.grid = (segments, heads, triton.cdiv(longest, block))
        ctx.shape = (scale, size, *query.stride()[:2], their_scale, their_query.shape[2], *their_query.stride()[:2])
        wide = (max(16, triton.next_power_of_2(one.shape[2])) for one in (query, their_query))
        ctx.sizes = {"METRIC": metric, "BLOCK": block, **dict(zip(("WIDE", "THEIR_WIDE"), wide, strict=True))}
        out, *kept = query.new_empty(4, heads, tokens, dtype=torch.float32)
        _forward[ctx.grid](
            query, key, their_query, their_key, out, *kept, bounds, tokens, *ctx.shape, **ctx.sizes,
            num_warps=block // 16
        )  # fmt: skip
        ctx.save_for_backward(query, key, their_query, their_key, bounds, *kept)
        return out

    @staticmethod
    def backward(ctx, slopes):
        query, key, their_query, their_key, bounds, *kept = ctx.saved_tensors
        made = query.new_empty(query.shape), query.new_empty(query.shape)
        _backward[ctx.grid](
            query, key, their_query, their_key, slopes.contiguous(), *made, *kept, bounds, query.shape[0],
            *ctx.shape, **ctx.sizes, num_warps=2 * (ctx.sizes["BLOCK"] // 16),
        )  # fmt: skip
        return (*made, *(None,) * 7)


METRICS = {"kl": KL.value, "chances": CHANCES.value, "scores": SCORES.value}


def compare_rows(ours: Rows, theirs: Rows, bounds: Tensor, longest: int, metric: str) -> Tensor:
    """How far the rows of each token are apart, (heads, tokens); segments go from one bound to the next.

    metric is "kl" (teacher, student) or "chances" (the mean square) of softmaxes, or "scores" (the mean square of what
    these are of). No segment is longer than `longest`, and the last bound is the number of tokens.
    """
    if ours.query.shape[:2] != theirs.query.shape[:2]:
        raise ValueError(f"tokens and heads of both differ: {ours.query.shape[:2]}, {theirs.query.shape[:2]}")
    four = []
    for rows in (ours, theirs):
        same = rows.query.stride() == rows.key.stride() and rows.query.stride(2) == 1
        four += [rows.query, rows.key] if same else [rows.query.contiguous(), rows.key.contiguous()]
    return _Compare.apply(*four, bounds, longest, ours.scale, theirs.scale, METRICS[metric])
