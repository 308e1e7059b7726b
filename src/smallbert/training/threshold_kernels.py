"""GPU kernels that find the k-th largest of very many numbers by narrowing down where it can be.

Numbers that are trained change little from step to step. So a hint is kept, a bracket around where the answer will be
if it moves on as it did last, wide enough for a few thousand numbers: one reading of a row counts what is above and
collects what lies in the bracket, and one program a row finds the answer among those and writes the next hint.

Where there is no hint, or the answer has left it, rounds narrow it down: one program a row holds a sample of it in
registers and says between which two values the answer must lie, then many programs count what is above and collect the
numbers between. The next round does the same with what was collected, until a row fits into registers whole. Should a
sample have misled, its row is searched from end to end.

An answer counts only if the numbers above it were counted, so hints and samples cost or save time and never change it.
Nothing here waits for Python: rounds that are not needed are launched too, and end at once. Importing this file needs
triton.
"""

# mypy: disable-error-code=no-untyped-def

import torch
import triton
import triton.language as tl
from torch import Tensor

SAMPLE = 16384  # numbers that one program holds at a time
DEEP = tl.constexpr(8)  # numbers that a thread looks at together when they are collected
THREADS = 132 * 2048  # that collect numbers: about twice what an H200 runs at a time
LOWEST = tl.constexpr(-(2**31))  # keys: the bits of a float as a whole number, in the order of floats
HIGHEST = tl.constexpr(2**31 - 1)
FIELDS = tl.constexpr(32)  # what a round knows of a row, in a line of memory of its own: the bracket, the rank wanted,
LOW, HIGH, WANTED, COUNT = (tl.constexpr(place) for place in range(4))  # and how many numbers lie where
ABOVE, ON_HIGH, BETWEEN, ON_LOW = (tl.constexpr(place) for place in range(4, 8))
HINTS = tl.constexpr(4)  # what is kept of a row from step to step: the bracket, the last answer, how often it missed
LAST, MISSED = (tl.constexpr(place) for place in range(2, 4))
HINTED, FIRST, LATER = (tl.constexpr(place) for place in range(3))  # kinds of rounds
OPEN, FOUND, LOST = (tl.constexpr(place) for place in range(3))


@triton.jit
def _key(bits):
    """The key of a float that is given by its bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float of a key, whose bits are turned back by what turned them."""
    return _key(key).to(tl.float32, bitcast=True)


@triton.jit
def _length(most):
    """How many bits a whole number has."""
    length = (most * 0).to(tl.int32)
    for bit in range(32):
        length += (most >> bit > 0).to(tl.int32)
    return length


@triton.jit
def _reached(numbers, want, most):
    """The largest number from 0 to `most` that `want` of the numbers reach, bit by bit from the highest on."""
    length = _length(most)
    found = most * 0
    for turn in range(length):
        pivot = found + (most * 0 + 1 << (length - 1 - turn))
        found = tl.where(tl.sum((numbers >= pivot).to(tl.int32)) >= want, pivot, found)
    return found


@triton.jit
def _roughly_reached(numbers, first, last, most, turns):
    """The same for two ranks, by their highest bits alone: the first is rounded up, the second down.

    Both counts of a turn are one sum, each in half of a number.
    """
    length = _length(most)
    turns = tl.minimum(turns, length)
    upper, lower = most * 0, most * 0
    for turn in range(turns):
        step = most * 0 + 1 << (length - 1 - turn)
        counts = tl.sum((numbers >= upper + step).to(tl.int32) + ((numbers >= lower + step).to(tl.int32) << 16))
        upper += tl.where((counts & 0xFFFF) >= first, step, 0)
        lower += tl.where((counts >> 16) >= last, step, 0)
    unasked = (most * 0 + 1 << (length - turns)) - 1
    return tl.minimum(upper + unasked, most), lower


@triton.jit
def _keep(hint, row, low, high, answer):
    tl.store(hint + row * HINTS + LOW, low)
    tl.store(hint + row * HINTS + HIGH, high)
    tl.store(hint + row * HINTS + LAST, answer)


@triton.jit
def _foresee(hint, row, low, high, answer, between, SIZE: tl.constexpr):
    """Keep a bracket for the next step, about as wide as this one, in which the answer moves on as it did last.

    It is made wider or narrower, by no more than a quarter, so that it comes to hold three eighths of what fits.
    """
    number = _number(answer)
    up = tl.where(high < HIGHEST, _number(high) - number, 0.0)  # not if that end was no number
    down = tl.where(low > LOWEST, number - _number(low), 0.0)
    reach = tl.maximum(up, down)
    reach *= tl.minimum(tl.maximum(0.375 * SIZE / between, 0.8), 1.25)
    middle = number + (number - _number(tl.load(hint + row * HINTS + LAST)))
    low = _key((middle - reach).to(tl.int32, bitcast=True))
    high = _key((middle + reach).to(tl.int32, bitcast=True))
    _keep(hint, row, low, high, answer)


@triton.jit
def _begin_round(rows, before, now, status, answers, hint, width, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Look at what the round before has shown of a row; if the answer is still open, bracket it, or find it."""
    row = tl.program_id(0)
    if tl.load(status + row) != OPEN:
        return
    before += row * FIELDS
    now += row * FIELDS
    want = tl.load(before + WANTED) - tl.load(before + ABOVE)
    on_high = tl.load(before + ON_HIGH)
    on_low = tl.load(before + ON_LOW)
    if KIND == FIRST:  # as if a round before had collected all there is
        low, high, between = want * 0 + LOWEST, want * 0 + HIGHEST, want * 0 + width
    else:
        low, high, between = tl.load(before + LOW), tl.load(before + HIGH), tl.load(before + BETWEEN)
    at_high = (want >= 1) & (want <= on_high)
    want -= on_high
    if at_high | ((want > between) & (want <= between + on_low)):
        answer = tl.where(at_high, high, low)
        tl.store(answers + row, answer)
        tl.store(status + row, FOUND)
        if hint is not None:  # many may be equal to it: too many to be collected, but no more than can be counted
            _keep(hint, row, answer, answer, answer)
    elif (want < 1) | (want > between) | (between > width):
        if KIND == HINTED:  # it stays open
            missed = hint + row * HINTS + MISSED
            tl.store(missed, tl.load(missed) + 1)
        else:
            tl.store(status + row, LOST)
    else:
        # The stride is odd and no multiple of three, so it shares no factor with the widths that most matrices have
        # and samples every column; a poorer sample costs time, never the answer.
        stride = 1 + 6 * tl.cdiv(tl.cdiv(between, SIZE) - 1, 6)
        place = tl.arange(0, SIZE) * stride
        key = _key(tl.load(rows + row.to(tl.int64) * width + place, mask=place < between))
        bottom = low.to(tl.uint32, bitcast=True)
        numbers = tl.where(place < between, key.to(tl.uint32, bitcast=True) - bottom, 0)
        most = high.to(tl.uint32, bitcast=True) - bottom
        if stride == 1:
            answer = (_reached(numbers, want, most) + bottom).to(tl.int32, bitcast=True)
            tl.store(answers + row, answer)
            tl.store(status + row, FOUND)
            if hint is not None:
                _foresee(hint, row, low, high, answer, between, SIZE)
        else:  # six standard deviations of its rank in the sample, to both sides
            size = tl.cdiv(between, stride)
            share = want.to(tl.float32) / between
            spread = 6.0 * tl.sqrt(size * share * (1.0 - share)) + 8.0
            first = (share * size - spread).to(tl.int32)
            last = (share * size + spread).to(tl.int32) + 1
            # So many bits bracket it well enough: of all floats, and of what lay in a bracket before.
            upper, lower = _roughly_reached(numbers, first, last, most, 22 if KIND == FIRST else 9)
            tl.store(now + HIGH, (upper + bottom).to(tl.int32, bitcast=True))
            tl.store(now + LOW, (lower + bottom).to(tl.int32, bitcast=True))
            tl.store(now + WANTED, want)
            tl.store(now + COUNT, between)


@triton.jit(do_not_specialize=["width", "room"])  # loads in fours would have to be shuffled to be written one by one
def _collect(rows, near, now, status, width, room, programs, KIND: tl.constexpr, WIDE: tl.constexpr):
    """Count the numbers of each row above its bracket and on its ends, and write down those between.

    A block is WIDE threads with a row of DEEP each, so that most sums need no other thread. Past the end all bits are
    1, a key below all others. Where many are on an end of a hint's bracket both are one, so only one is counted.
    """
    row = tl.program_id(0)
    if tl.load(status + row) != OPEN:
        return
    now += row * FIELDS
    low = tl.load(now + LOW)
    high = tl.load(now + HIGH)
    count = width
    if KIND == LATER:
        count = tl.load(now + COUNT)
    rows += row.to(tl.int64) * width
    near += row.to(tl.int64) * room
    block = tl.arange(0, WIDE)[:, None] + tl.arange(0, DEEP)[None, :] * WIDE
    above = tl.zeros([WIDE], dtype=tl.int32)
    on_high = tl.zeros([WIDE], dtype=tl.int32)
    on_low = tl.zeros([WIDE], dtype=tl.int32)
    begin = tl.program_id(1) * DEEP * WIDE
    step = programs * DEEP * WIDE
    ahead = tl.load(rows + begin + block, mask=block < count - begin, other=-1)
    for start in range(begin, count, step):
        bits = ahead  # the next block is on its way while this one is looked at
        ahead = tl.load(rows + start + step + block, mask=block < count - start - step, other=-1)
        key = _key(bits)
        above += tl.sum((key > high).to(tl.int32), 1)
        on_high += tl.sum((key == high).to(tl.int32), 1)
        if KIND != HINTED:
            on_low += tl.sum((key == low).to(tl.int32), 1)
        between = (key > low) & (key < high)
        mine = tl.sum(between.to(tl.int32), 1)
        some = tl.sum(mine)
        if some > 0:
            first = tl.atomic_add(now + BETWEEN, some, sem="relaxed")
            spot = (first + tl.cumsum(mine) - mine)[:, None] + tl.cumsum(between.to(tl.int32), 1) - 1
            tl.store(near + spot, bits, mask=between & (first + some <= room))
    tl.atomic_add(now + ABOVE, tl.sum(above), sem="relaxed")
    tl.atomic_add(now + ON_HIGH, tl.sum(on_high), sem="relaxed")
    if KIND != HINTED:
        tl.atomic_add(now + ON_LOW, tl.where(low < high, tl.sum(on_low), 0), sem="relaxed")


@triton.jit
def _end_search(rows, whole, status, answers, thresholds, hint, width, BLOCK: tl.constexpr):
    """Write the answers as numbers; a row whose sample has misled is searched first, by eight readings of all of it."""
    row = tl.program_id(0)
    want = tl.load(whole + row * FIELDS + WANTED)
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
                key = _key(tl.load(rows + row.to(tl.int64) * width + place, mask=inside))
                found += ((key[None, :] >= pivots[:, None]) & inside[None, :]).to(tl.int32)
            digit = tl.sum((tl.sum(found, 1) >= want).to(tl.int64)) - 1
            prefix += digit << shift
        answer = prefix.to(tl.int32)
        if hint is not None:  # as a rule many are equal to it
            _keep(hint, row, answer, answer, answer)
    tl.store(thresholds + row, tl.where(want < 1, float("inf"), _number(answer)))


def find_kth(rows: Tensor, wanted: Tensor, hint: Tensor | None = None) -> Tensor:
    """The wanted[i]-th largest number of each row, +inf for none: (rows, numbers), (rows,) -> (rows,).

    A hint is what `make_hint` makes, whatever is in it; it is replaced by what helps the next time.
    """
    height, width = rows.shape
    bits, rooms = rows.view(torch.int32), [width]
    while rooms[-1] > SAMPLE:
        rooms.append(_room(rooms[-1]))
    rounds = torch.zeros(len(rooms) + 2, height, FIELDS.value, dtype=torch.int32, device=rows.device)
    status, answers, thresholds = torch.zeros(3, height, dtype=torch.int32, device=rows.device)
    rounds[:2, :, WANTED.value] = wanted
    hint = hint if width > SAMPLE else None

    def begin(pieces: Tensor, before: Tensor, now: Tensor, kind: tl.constexpr) -> None:
        parts = (pieces, before, now, status, answers, hint, pieces.shape[1])
        _begin_round[(height,)](*parts, KIND=kind.value, SIZE=SAMPLE, num_warps=16)

    def collect(pieces: Tensor, now: Tensor, room: int, kind: tl.constexpr) -> Tensor:
        near = torch.empty(height, room, dtype=torch.int32, device=rows.device)
        warps = 1 if kind is HINTED else 4  # where few are to be written down, no warp waits for another
        blocks = triton.cdiv(pieces.shape[1], 32 * warps * DEEP.value)
        programs = min(blocks, triton.cdiv(THREADS, 32 * warps * height))
        parts, sizes = (pieces, near, now, status), (pieces.shape[1], room, programs)
        _collect[(height, programs)](*parts, *sizes, KIND=kind.value, WIDE=32 * warps, num_warps=warps)
        return near

    if hint is not None:
        rounds[0, :, :2] = hint[:, :2]
        begin(collect(bits, rounds[0], SAMPLE, HINTED), rounds[0], rounds[-1], HINTED)
    pieces = bits
    for number, room in enumerate([*rooms[1:], 0], 1):
        kind = FIRST if number == 1 else LATER
        begin(pieces, rounds[number], rounds[number + 1], kind)
        if room:
            pieces = collect(pieces, rounds[number + 1], room, kind)
    numbers = thresholds.view(torch.float32)
    _end_search[(height,)](bits, rounds[1], status, answers, numbers, hint, width, BLOCK=1024, num_warps=8)
    return numbers


def make_hint(rows: Tensor) -> Tensor:
    """A hint for rows of which nothing is known yet."""
    return torch.zeros(len(rows), HINTS.value, dtype=torch.int32, device=rows.device)


def _room(width: int) -> int:
    """Room for what lies between, one and a half times what the widest bracket is expected to hold."""
    stride = 1 + 6 * triton.cdiv(triton.cdiv(width, SAMPLE) - 1, 6)
    size = triton.cdiv(width, stride)
    return int(width * (9 / size**0.5 + 48 / size))
