"""GPU kernels for attention within many short sequences that stand one behind the other.

The kernels that come with torch cut every sequence into tiles of 128 tokens, of which a sentence fills a tenth. Here
tiles have 16, 32 or 64 tokens, by the mean length of the batch; one program reads one tile of one head, and nothing is
added up in an order that changes from run to run. Importing this file needs triton, which comes with torch on a GPU.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE = tl.constexpr(-1.0e30)  # the score of a token that is not there: finite, so that no difference is a nan


@triton.jit
def segment(bounds, BLOCK: tl.constexpr):
    """A program's head, the first token of its tile, where its sequence starts and how many tokens that has."""
    start = tl.load(bounds + tl.program_id(0)).to(tl.int64)
    numbers = (tl.load(bounds + tl.program_id(0) + 1) - start).to(tl.int32)
    return tl.program_id(1), tl.program_id(2) * BLOCK, start, numbers


@triton.jit
def tile(start, head, first, numbers, size, stride, apart, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Where the numbers of a tile's tokens are, and which of them are there."""
    token, column = first + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    inside = (token < numbers)[:, None] & (column < size)[None, :]
    return (start + token)[:, None] * stride + head * apart + column[None, :], inside


@triton.jit
def _forward(
    query, key, value, out, level, bounds, scale, tokens, size, stride, apart, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """One tile of queries over all keys of its sequence; `level` is the logarithm of what each row was divided by."""
    head, first, start, numbers = segment(bounds, BLOCK)
    if first < numbers:
        place, inside = tile(start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
        q = tl.load(query + place, mask=inside, other=0.0)
        most = tl.full((BLOCK,), NONE, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK, WIDE), tl.float32)
        for other in range(0, numbers, BLOCK):
            there, theirs = tile(start, head, other, numbers, size, stride, apart, BLOCK, WIDE)
            k = tl.load(key + there, mask=theirs, other=0.0)
            v = tl.load(value + there, mask=theirs, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where((other + tl.arange(0, BLOCK) < numbers)[None, :], scores, NONE)
            higher = tl.maximum(most, tl.max(scores, 1))
            shares = tl.exp(scores - higher[:, None])
            fade = tl.exp(most - higher)
            total = total * fade + tl.sum(shares, 1)
            sums = sums * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
            most = higher
        own, mine = tile(start, head, first, numbers, size, tl.num_programs(1) * size, size, BLOCK, WIDE)
        tl.store(out + own, (sums / total[:, None]).to(out.dtype.element_ty), mask=mine)
        row = first + tl.arange(0, BLOCK)
        tl.store(level + head * tokens + start + row, most + tl.log(total), mask=row < numbers)


@triton.jit
def _shares(q, k, level, first, other, numbers, scale, BLOCK: tl.constexpr):
    """How much the queries from `first` on attend to the keys from `other` on."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    real = (first + tl.arange(0, BLOCK) < numbers)[:, None] & (other + tl.arange(0, BLOCK) < numbers)[None, :]
    return tl.where(real, tl.exp(scores - level[:, None]), 0.0)


@triton.jit
def _row(out, g, level, place, inside, first, numbers, BLOCK: tl.constexpr):
    """The logarithm of each row's divisor, and the sum of its output times the output's slope."""
    row = first + tl.arange(0, BLOCK)
    o = tl.load(out + place, mask=inside, other=0.0)
    return tl.load(level + row, mask=row < numbers, other=0.0), tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)


@triton.jit
def _backward(
    query, key, value, out, level, slopes, to_query, to_key, to_value, bounds, scale, tokens, size, stride, apart,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile as queries (over all keys), then the same tile as keys and values (over all queries)."""
    head, first, start, numbers = segment(bounds, BLOCK)
    if first < numbers:
        wide = tl.num_programs(1) * size
        place, inside = tile(start, head, first, numbers, size, stride, apart, BLOCK, WIDE)
        own, mine = tile(start, head, first, numbers, size, wide, size, BLOCK, WIDE)
        q = tl.load(query + place, mask=inside, other=0.0)
        k = tl.load(key + place, mask=inside, other=0.0)
        v = tl.load(value + place, mask=inside, other=0.0)
        g = tl.load(slopes + own, mask=mine, other=0.0)
        top, product = _row(out, g, level + head * tokens + start, own, mine, first, numbers, BLOCK)
        q_slope = tl.zeros((BLOCK, WIDE), tl.float32)
        k_slope = tl.zeros((BLOCK, WIDE), tl.float32)
        v_slope = tl.zeros((BLOCK, WIDE), tl.float32)
        for other in range(0, numbers, BLOCK):
            there, theirs = tile(start, head, other, numbers, size, stride, apart, BLOCK, WIDE)
            away, their = tile(start, head, other, numbers, size, wide, size, BLOCK, WIDE)
            k_other = tl.load(key + there, mask=theirs, other=0.0)
            v_other = tl.load(value + there, mask=theirs, other=0.0)
            shares = _shares(q, k_other, top, first, other, numbers, scale, BLOCK)
            rise = shares * (tl.dot(g, tl.trans(v_other), input_precision="ieee") - product[:, None])
            q_slope += tl.dot(rise.to(k.dtype), k_other, input_precision="ieee")
            q_other = tl.load(query + there, mask=theirs, other=0.0)
            g_other = tl.load(slopes + away, mask=their, other=0.0)
            top_other, product_other = _row(
                out, g_other, level + head * tokens + start, away, their, other, numbers, BLOCK
            )
            shares = _shares(q_other, k, top_other, other, first, numbers, scale, BLOCK)
            v_slope += tl.dot(tl.trans(shares.to(v.dtype)), g_other, input_precision="ieee")
            rise = shares * (tl.dot(g_other, tl.trans(v), input_precision="ieee") - product_other[:, None])
            k_slope += tl.dot(tl.trans(rise.to(k.dtype)), q_other, input_precision="ieee")
        tl.store(to_query + own, (q_slope * scale).to(to_query.dtype.element_ty), mask=mine)
        tl.store(to_key + own, (k_slope * scale).to(to_key.dtype.element_ty), mask=mine)
        tl.store(to_value + own, v_slope.to(to_value.dtype.element_ty), mask=mine)


@torch.library.custom_op("smallbert::attend_short", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q.shape
    out, level = q.new_empty(q.shape), q.new_empty(heads, tokens, dtype=torch.float32)
    grid, sizes = _launch(q, bounds, longest)
    _forward[grid](q, k, v, out, level, bounds, scale, tokens, size, q.stride(0), q.stride(1), **sizes)
    return out, level


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("smallbert::attend_short_backward", mutates_args=())
def _turn(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, level: Tensor, out: Tensor, g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    made = q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)
    grid, sizes = _launch(q, bounds, longest)
    shape = (scale, q.shape[0], q.shape[2], q.stride(0), q.stride(1))
    _backward[grid](q, k, v, out, level, g.contiguous(), *made, bounds, *shape, **sizes)
    return made


@_turn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _remember(ctx, inputs, output) -> None:
    q, k, v, bounds, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bounds, output[1], output[0])


def _gradients(ctx, slopes, _):
    q, k, v, bounds, level, out = ctx.saved_tensors
    return (*_turn(q, k, v, bounds, ctx.longest, ctx.scale, level, out, slopes), None, None, None)


_attend.register_autograd(_gradients, setup_context=_remember)


def _launch(q: Tensor, bounds: Tensor, longest: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """A program for each tile of each head of each sequence, many with nothing to do, and how large tiles are."""
    segments, heads = bounds.shape[0] - 1, q.shape[1]
    usual = q.shape[0] / segments
    block = 16 if usual <= 24 else 32 if usual <= 48 else 64
    sizes = {"BLOCK": block, "WIDE": max(16, triton.next_power_of_2(q.shape[2])), "num_warps": max(1, block // 16)}
    return (segments, heads, triton.cdiv(longest, block)), sizes


def attend_short(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Attend within each segment: (tokens, heads, size) of each, segments from one bound to the next.

    There is at least one segment, none is longer than `longest`, and the last bound is the number of tokens: what lies
    beyond would be left as memory happened to be.
    """
    if not (q.stride() == k.stride() == v.stride() and q.stride(2) == 1):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return _attend(q, k, v, bounds, longest, scale)[0]
