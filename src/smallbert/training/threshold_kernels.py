"""GPU kernels that find the k-th largest of very many numbers by narrowing down where it can be.

A round: one program a row holds a sample of it in registers and says between which two values the answer must lie, then
many programs count what is above and collect the few numbers between. The next round does the same with what was
collected, until a row fits into registers whole. Should a sample have misled, its row is searched from end to end: the
answer is exact either way. Importing this file needs triton.
"""

# mypy: disable-error-code=no-untyped-def

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLE = 16384  # numbers that one program holds at a time
LOWEST = tl.constexpr(-(2**31))  # keys: the bits of a float as a whole number, in the order of floats
HIGHEST = tl.constexpr(2**31 - 1)
FIELDS = 8  # what a round knows of each row: the rank wanted, the bracket, and how many numbers lie where
WANTED, COUNT, LOW, HIGH = (tl.constexpr(place) for place in range(4))
ABOVE, ON_HIGH, BETWEEN, ON_LOW = (tl.constexpr(place) for place in range(4, 8))
ALL = tl.constexpr(33)  # halvings that leave nothing between any two keys
ROUGHLY = (22, 9)  # halvings that bracket well enough: of all floats, and of what lay in a bracket before
OPEN, FOUND, LOST = (tl.constexpr(place) for place in range(3))


@triton.jit
def _key(number):
    """A float as a whole number, in the order of floats."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _reached(keys, first, last, low, high, turns):
    """Keys that about `first` and `last` of the keys reach, all of which are in [low, high], by halving it so often.

    The upper one is rounded up and the lower one down; with enough turns both are exact. Both counts of a turn are one
    sum, each in half of a number.
    """
    bottom, top = low.to(tl.int64), high.to(tl.int64)
    length = low * 0
    for bit in range(33):
        length += ((top - bottom) >> bit > 0).to(tl.int32)
    turns = tl.minimum(turns, length)
    upper, lower = bottom, bottom
    for turn in range(turns):
        step = bottom * 0 + 1 << (length - 1 - turn)
        over = (keys >= tl.minimum(upper + step, top).to(tl.int32)).to(tl.int32)
        under = (keys >= tl.minimum(lower + step, top).to(tl.int32)).to(tl.int32)
        counts = tl.sum(over + (under << 16))
        upper += tl.where((upper + step <= top) & ((counts & 0xFFFF) >= first), step, 0)
        lower += tl.where((lower + step <= top) & ((counts >> 16) >= last), step, 0)
    unasked = (bottom * 0 + 1 << (length - turns)) - 1
    return tl.minimum(upper + unasked, top).to(tl.int32), lower.to(tl.int32)


@triton.jit
def _begin_round(
    rows, before, now, status, answers, width, height, FIRST: tl.constexpr, ROUGH: tl.constexpr, SIZE: tl.constexpr
):
    """Look at what the round before has shown of a row; if the answer is still open, bracket it, or find it."""
    row = tl.program_id(0)
    above = tl.load(before + ABOVE * height + row)
    on_high = tl.load(before + ON_HIGH * height + row)
    between = tl.load(before + BETWEEN * height + row)
    on_low = tl.load(before + ON_LOW * height + row)
    want = tl.load(before + WANTED * height + row) - above
    stage = tl.load(status + row)
    if stage == OPEN:
        if (want >= 1) & (want <= on_high):
            stage = FOUND
            tl.store(answers + row, tl.load(before + HIGH * height + row))
        elif (want > on_high + between) & (want <= on_high + between + on_low):
            stage = FOUND
            tl.store(answers + row, tl.load(before + LOW * height + row))
        elif (want < 1) | (want > on_high + between) | (between > width):
            stage = LOST
    want -= on_high
    if stage == OPEN:
        # The stride is odd and no multiple of three, so it shares no factor with the widths that most matrices have
        # and samples every column; a poorer sample costs time, never the answer.
        stride = 1 + 6 * tl.cdiv(tl.cdiv(between, SIZE) - 1, 6)
        place = tl.arange(0, SIZE) * stride
        key = _key(tl.load(rows + row.to(tl.int64) * width + place, mask=place < between, other=0.0))
        keys = tl.where(place < between, key, LOWEST)
        low = tl.load(before + LOW * height + row)
        high = tl.load(before + HIGH * height + row)
        if FIRST:
            low, high = low * 0 + LOWEST, high * 0 + HIGHEST
        if stride == 1:
            stage = FOUND
            answer, _ = _reached(keys, want, want, low, high, ALL)
            tl.store(answers + row, answer)
        else:  # six standard deviations of its rank in the sample, to both sides
            size = tl.cdiv(between, stride)
            share = want.to(tl.float32) / between
            spread = 6.0 * tl.sqrt(size * share * (1.0 - share)) + 8.0
            first = (share * size - spread).to(tl.int32)
            last = (share * size + spread).to(tl.int32) + 1
            upper, lower = _reached(keys, first, last, low, high, ROUGH)
            tl.store(now + HIGH * height + row, upper)
            tl.store(now + LOW * height + row, lower)
    tl.store(now + WANTED * height + row, want)
    tl.store(now + COUNT * height + row, between)
    tl.store(status + row, stage)


@triton.jit
def _collect(rows, near, now, status, width, room, programs, height, BLOCK: tl.constexpr):
    """Count the numbers of each row above its bracket and on its ends, and write down those between."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(status + row) == OPEN:
        low = tl.load(now + LOW * height + row)
        high = tl.load(now + HIGH * height + row)
        count = tl.load(now + COUNT * height + row)
        filled = now + BETWEEN * height + row
        base = rows + row.to(tl.int64) * width
        above = tl.zeros([BLOCK], dtype=tl.int32)
        on_high = tl.zeros([BLOCK], dtype=tl.int32)
        on_low = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(part * BLOCK, count, programs * BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < count
            number = tl.load(base + place, mask=inside, other=0.0)
            key = _key(number)
            above += (inside & (key > high)).to(tl.int32)
            on_high += (inside & (key == high)).to(tl.int32)
            on_low += (inside & (key == low) & (low < high)).to(tl.int32)
            between = (inside & (key > low) & (key < high)).to(tl.int32)
            some = tl.sum(between)
            if some > 0:
                spot = tl.atomic_add(filled, some) + tl.cumsum(between) - 1
                tl.store(near + row.to(tl.int64) * room + spot, number, mask=(between == 1) & (spot < room))
        tl.atomic_add(now + ABOVE * height + row, tl.sum(above))
        tl.atomic_add(now + ON_HIGH * height + row, tl.sum(on_high))
        tl.atomic_add(now + ON_LOW * height + row, tl.sum(on_low))


@triton.jit
def _end_search(rows, wanted, status, answers, thresholds, width, BLOCK: tl.constexpr):
    """Write the answers as numbers; a row whose sample has misled is searched first, by eight readings of all of it."""
    row = tl.program_id(0)
    want = tl.load(wanted + row)
    answer = tl.load(answers + row)
    if (tl.load(status + row) == LOST) & (want >= 1):
        lane = tl.arange(0, 16)
        prefix = tl.full([], -2147483648, tl.int64)
        for turn in range(8):
            shift = 28 - 4 * turn
            pivots = (prefix + (lane.to(tl.int64) << shift)).to(tl.int32)
            found = tl.zeros([16, BLOCK], dtype=tl.int32)
            for start in range(0, width, BLOCK):
                place = start + tl.arange(0, BLOCK)
                inside = place < width
                key = _key(tl.load(rows + row.to(tl.int64) * width + place, mask=inside, other=0.0))
                found += ((key[None, :] >= pivots[:, None]) & inside[None, :]).to(tl.int32)
            digit = tl.sum((tl.sum(found, 1) >= want).to(tl.int64)) - 1
            prefix += digit << shift
        answer = prefix.to(tl.int32)
    number = (answer ^ ((answer >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(thresholds + row, tl.where(want < 1, float("inf"), number))


def find_kth(rows: Tensor, wanted: Tensor) -> Tensor:
    """The wanted[i]-th largest number of each row, +inf for none: (rows, numbers), (rows,) -> (rows,)."""
    height, width = rows.shape
    rooms = [width]
    while rooms[-1] > SAMPLE:
        rooms.append(_room(rooms[-1]))
    made = torch.zeros(FIELDS * (len(rooms) + 1) + 3, height, dtype=torch.int32, device=rows.device)
    rounds, (status, answers, thresholds) = made[:-3].unflatten(0, (-1, FIELDS)), made[-3:]
    rounds[0, WANTED.value], rounds[0, BETWEEN.value] = wanted, width  # as if a round before had collected everything
    pieces = rows
    for number, room in enumerate(rooms):
        before, now = rounds[number], rounds[number + 1]
        kind = {"FIRST": number == 0, "ROUGH": ROUGHLY[number > 0], "SIZE": SAMPLE}
        _begin_round[(height,)](pieces, before, now, status, answers, room, height, **kind, num_warps=16)
        if number + 1 < len(rooms):
            near = torch.empty(height, rooms[number + 1], device=rows.device)
            programs = min(triton.cdiv(room, 1024), max(1, 132 * 32 // height))
            sizes = (room, rooms[number + 1], programs, height)
            _collect[(height, programs)](pieces, near, now, status, *sizes, BLOCK=1024, num_warps=4)
            pieces = near
    numbers = thresholds.view(torch.float32)
    _end_search[(height,)](rows, rounds[0, WANTED.value], status, answers, numbers, width, BLOCK=1024, num_warps=8)
    return numbers


def _room(width: int) -> int:
    """Room for what lies between, one and a half times what the widest bracket is expected to hold."""
    stride = 1 + 6 * triton.cdiv(triton.cdiv(width, SAMPLE) - 1, 6)
    size = triton.cdiv(width, stride)
    return int(width * (9 / size**0.5 + 48 / size))
