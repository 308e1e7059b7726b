"""Matrices without their zeros: how they are stored, and how they are multiplied, sparse where that measures faster."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from smallbert.model.anatomy import replace_module
from smallbert.model.cpu import faster
from smallbert.model.kept import Keeping

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

WIDTHS = (1, 2, 4, 8)  # bits of one gap
PIECE = 32  # tokens that are multiplied at once: their inputs stay in the cache beside the weights
MOST = 128  # tokens that ways are timed with; more of them only repeat it
TURNS, ENOUGH = range(4, 12), 0.03  # how many turns each way is timed in, the more the less seconds they take
SPARSE_KERNELS = torch.backends.mkl.is_available()  # torch's own sparse products for CPUs; without them all is dense
AGAIN = 1, 8, 64  # which products of a kind are timed: at the first the machine may be busy with other things
_timed: dict[Hashable, dict[str, float]] = {}  # of this process, by kind of product: the least time of each way
_seen: Counter[Hashable] = Counter()  # how many there were of a kind


def pack(weight: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The numbers of a matrix that are not zero, and how many zeros lie before each, in gaps of so many bits.

    The largest gap stands for as many zeros and no number after them. So gaps of one bit are a bit mask.

    >>> pack(torch.tensor([[0.0, 7.0, 0.0], [0.0, 0.0, 5.0]]), 2)  # gaps 1 and 3 + 0, the first in the lowest bits
    (tensor([205], dtype=torch.uint8), tensor([7., 5.]))
    """
    gaps, top = _gaps(weight), 2**width - 1
    codes = torch.full((_bytes(gaps, width), 8 // width), top, dtype=torch.uint8, device=weight.device)
    ends = (gaps // top + 1).cumsum(0)  # how many codes are written once a number is
    codes.view(-1)[ends - 1] = (gaps % top).to(torch.uint8)
    return (codes << _shifts(width, weight.device)).sum(1, dtype=torch.uint8), weight[weight != 0]


def unpack(packed: Tensor, width: int) -> Tensor:
    """Where in the flat matrix the numbers stand.

    >>> unpack(torch.tensor([205], dtype=torch.uint8), 2)
    tensor([1, 5], dtype=torch.int32)
    """
    codes, top = packed, 2**width - 1
    if width < 8:
        codes = ((packed[:, None] >> _shifts(width, packed.device)) & top).flatten()
    numbers = codes < top
    return (codes + numbers).cumsum(0, dtype=torch.int32)[numbers] - 1


def best_width(weight: Tensor) -> tuple[int, int]:
    """The width of gaps that takes the fewest bytes, and how many."""
    gaps = _gaps(weight)
    return min(((width, _bytes(gaps, width)) for width in WIDTHS), key=lambda found: found[1])


@cache
def expected_room(shape: torch.Size, share: float) -> tuple[int, tuple[int, int]]:
    """How many numbers would be left of a matrix with its zeros at random, and the best width of their gaps."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    return int(drawn.sum()), best_width(drawn)


def _gaps(weight: Tensor) -> Tensor:
    places = weight.flatten().nonzero()[:, 0]
    return places.diff(prepend=places.new_tensor([-1])) - 1


def _bytes(gaps: Tensor, width: int) -> int:
    return -((len(gaps) + int((gaps // (2**width - 1)).sum())) * width // -8)


def _shifts(width: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


class SparseLinear(Keeping):
    """A linear layer whose matrix is stored without its zeros; the numbers are no longer trained, the bias is.

    In use on a CPU the matrix is multiplied as a dense or as a sparse one, whichever is faster; elsewhere as dense.
    """

    gaps: Tensor
    values: Tensor

    def __init__(self, old: nn.Linear, count: int, width: int, size: int, dtype: torch.dtype, run: str):
        """An empty layer of the same shape, with room for so many numbers and bytes of gaps; the bias stays."""
        super().__init__()
        self.in_features, self.out_features, self.width, self.run = old.in_features, old.out_features, width, run
        self.register_buffer("gaps", torch.zeros(size, dtype=torch.uint8))
        self.register_buffer("values", torch.zeros(count, dtype=dtype))
        self.bias, self.last_way = old.bias, ""
        self._kept: dict[str, tuple[Hashable, Any]] = {}
        self._chosen: dict[Hashable, str] = {}

    def fill(self, weight: Tensor) -> None:
        """Store a matrix."""
        gaps, values = pack(weight.detach(), self.width)
        self.gaps.copy_(gaps)
        self.values.copy_(values)

    def fault(self) -> str:
        """What is wrong with gaps that were read from a file: used as they are, they would lead anywhere in memory."""
        if self.width not in WIDTHS:
            return f"there are no gaps of {self.width} bits, only of {', '.join(map(str, WIDTHS))}"
        places, room = unpack(self.gaps, self.width), self.in_features * self.out_features
        if len(places) != len(self.values):
            return f"its gaps lead to {len(places)} places, but it has {len(self.values)} values"
        if len(places) and not 0 <= int(places[0]) <= int(places[-1]) < room:
            return f"its gaps lead to place {int(places[-1])} of {room}"
        return ""

    @property
    def weight(self) -> Tensor:
        """The matrix with its zeros, made anew."""
        return self._dense(torch.promote_types(self.values.dtype, torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply."""
        self.last_way = self._way(inputs)
        return (self._multiply_sparse if self.last_way == "sparse" else self._multiply_dense)(inputs)

    def _way(self, inputs: Tensor) -> str:
        """What to do with inputs like these: where there is a choice, what was faster when it was tried."""
        plain = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        settled = self.training or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not plain or settled or not SPARSE_KERNELS or not inputs.numel():
            return "dense"
        if self.run != "measured":
            return self.run
        few = inputs.reshape(-1, self.in_features)[:MOST]
        density = len(self.values) / (self.in_features * self.out_features)
        step = round(2 * math.log2(max(density, 1e-6)))  # half of an octave
        key = (self.out_features, self.in_features, step, (len(few) - 1).bit_length(), torch.get_num_threads())
        _seen[key] += 1
        timed = key not in _timed or _seen[key] in AGAIN
        if timed:
            ways = {"dense": lambda: self._multiply_dense(few), "sparse": lambda: self._multiply_sparse(few)}
            with _disable_current_modes():  # who counts multiplications must not count these
                taken = time_ways(ways)
            _timed[key] = {way: min(time, _timed.get(key, taken)[way]) for way, time in taken.items()}
        fastest = min(_timed[key], key=lambda way: _timed[key][way])
        if timed or self._chosen.get(key) != fastest:  # forms that no kind of product is made with any more go
            self._chosen[key] = fastest
            self._kept = {kind: kept for kind, kept in self._kept.items() if kind in self._chosen.values()}
        return fastest

    def _multiply_dense(self, inputs: Tensor) -> Tensor:
        weight = self._keep("dense", inputs.dtype, lambda: self._dense(inputs.dtype))
        with faster(inputs):  # wherever it is timed
            return functional.linear(inputs, weight, self.bias)

    def _multiply_sparse(self, inputs: Tensor) -> Tensor:
        matrix = self._keep("sparse", inputs.dtype, self._sparse)
        bias = inputs.new_zeros(1, 1) if self.bias is None else self.bias[:, None]
        pieces = inputs.reshape(-1, self.in_features).split(PIECE)
        outputs = torch.cat([torch.addmm(bias, matrix, piece.t()).t() for piece in pieces])
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def _dense(self, dtype: torch.dtype) -> Tensor:
        flat = torch.zeros(self.out_features * self.in_features, dtype=dtype, device=self.values.device)
        if not flat.is_meta:  # shapes alone have no places
            flat[unpack(self.gaps, self.width)] = self.values.to(dtype)
        return flat.view(self.out_features, self.in_features)

    def _sparse(self) -> Tensor:
        places, shape = unpack(self.gaps, self.width), (self.out_features, self.in_features)
        starts = torch.arange(0, (shape[0] + 1) * shape[1], shape[1], dtype=torch.int32)
        rows = torch.searchsorted(places, starts, out_int32=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that these tensors may still change
            return torch.sparse_csr_tensor(rows, places % shape[1], self.values.float(), shape)


def time_ways(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The least time that each way took in a few turns, the first of which warms up."""
    taken, begun = dict.fromkeys(ways, math.inf), perf_counter()
    for turn in range(TURNS.stop):
        if turn >= TURNS.start and perf_counter() - begun > ENOUGH:
            break
        for name, run in ways.items():
            start = perf_counter()
            run()
            taken[name] = min(taken[name], perf_counter() - start)
    return taken


def sparse_linears(module: nn.Module) -> dict[str, SparseLinear]:
    """The layers that are stored without zeros, each once, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, SparseLinear)}


def with_plain_linears(encoder: Encoder) -> Encoder:
    """The same encoder with its zeros written out, for what knows plain layers only."""
    for name, sparse in sparse_linears(encoder).items():
        plain = nn.Linear(sparse.in_features, sparse.out_features, sparse.bias is not None, device=encoder.device)
        plain.weight = nn.Parameter(sparse.weight)
        plain.bias = sparse.bias
        replace_module(encoder, name, plain.train(sparse.training))
    return encoder
