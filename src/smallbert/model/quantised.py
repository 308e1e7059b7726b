"""Layers and embedding tables whose numbers are stored in few bits; in use the real ones are made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model.anatomy import replace_module
from smallbert.model.kept import Keeping
from smallbert.model.packing import pack, packed_size, unpack
from smallbert.model.products import MIDDLE, Matrix, are_exact, code_range, code_tokens, multiply
from smallbert.model.rounding import Grid, spread, straight, to_steps

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

Activations = bool | Literal["static"]


class Stored(Keeping):
    """What every module has that stores a matrix small: the real matrix, made once and kept beside it."""

    shape: tuple[int, int]

    def real(self) -> Tensor:
        """The whole matrix as real numbers."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether each row is whole numbers of one scale, so that it can be multiplied as such."""
        return False

    def whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those whole numbers, in 8 bits with a sign, and of each row the scale and which number is zero, if not 0."""
        raise NotImplementedError


class StoredLinear(Stored):
    """A linear layer; with `activations` its inputs are rounded to 8 bits too, token by token or by a fixed range.

    A CPU then multiplies whole numbers, which is faster. A layer that `scales` multiplies its inputs by a factor for
    each feature before it rounds them, and stores columns that are smaller by that.
    """

    input_range: Tensor
    input_factor: Tensor | None

    def __init__(self, old: nn.Linear, activations: Activations = False, scales: bool = False):
        """The bias stays as it was."""
        super().__init__()
        self.in_features, self.out_features = old.in_features, old.out_features
        self.activations: Activations = activations
        self.shape = (old.out_features, old.in_features)
        self.bias = old.bias
        self.register_buffer("input_factor", torch.ones(old.in_features) if scales else None)
        if activations == "static":
            self.fix_range()

    def fix_range(self) -> None:
        """Make room for one range, by which inputs are rounded from now on."""
        self.activations = "static"
        self.register_buffer("input_range", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply."""
        if self.activations:
            with torch.no_grad():
                fixed, factor = self.activations == "static", self.input_factor
                given = inputs.float() if factor is None else inputs.float() * factor
                coded = code_range(given, *self.input_range) if fixed else code_tokens(given)
            if self._multiplies_whole(inputs):
                return multiply(coded, self._keep("whole", torch.int8, self._matrix), self.bias)
            made = coded.real() if factor is None else coded.real() / factor
            inputs = straight(inputs, made.to(inputs.dtype))
        weight = self._keep("real", inputs.dtype, lambda: self.real().to(inputs.dtype))
        return functional.linear(inputs, weight, self.bias)

    def _matrix(self) -> Matrix:
        codes, scale, zero = self.whole()
        sums = codes.sum(1, dtype=torch.int32)
        return Matrix(codes, scale, zero, sums if zero is None else sums - self.in_features * zero)

    def _multiplies_whole(self, inputs: Tensor) -> bool:
        """Whether products are of whole numbers here: not in training, and where the machine has exact ones."""
        return not (self.training or inputs.is_cuda or torch.compiler.is_exporting()) and self.is_whole and are_exact()


class StoredEmbedding(Stored):
    """An embedding table."""

    seen_as: torch.dtype | None = None  # what the layers above compute in, while that is not what is stored

    def __init__(self, old: nn.Embedding):
        """Of the same shape."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = old.weight.shape
        self.shape = (self.num_embeddings, self.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up."""
        return self.rows(ids).to(self.seen_as)

    def rows(self, ids: Tensor) -> Tensor:
        """Some rows as real numbers."""
        return functional.embedding(ids, self._keep("real", torch.float32, self.real))


class Whole(Stored):
    """Whole numbers on a grid: 8 symmetric bits as they are, in `weight`; others packed, in `codes`."""

    weight: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    grid: Grid

    def _make_room(self, grid: Grid) -> None:
        self.grid = grid
        if grid.bits == 8 and grid.symmetric:
            self.register_buffer("weight", torch.zeros(self.shape, dtype=torch.int8))
        else:
            self.register_buffer("codes", torch.zeros(_bytes(self.shape, grid.bits), dtype=torch.uint8))
        self.register_buffer("scale", torch.zeros(grid.scales(self.shape)))
        if not grid.symmetric:
            self.register_buffer("zero", torch.zeros(grid.scales(self.shape), dtype=torch.uint8))

    @torch.no_grad()
    def write(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Store the codes of a matrix (rows, columns) and what each group has."""
        if hasattr(self, "weight"):
            self.weight.copy_(codes.to(torch.int16) - self.grid.top)
        else:
            self.codes.copy_(pack(codes, self.grid.bits).flatten())
        self.scale.copy_(scale)
        if zero is not None:
            self.zero.copy_(zero)

    def steps(self, rows: Tensor | None = None) -> Tensor:
        """How many scales each number is, of the whole matrix or of some rows."""
        dtype = self.scale.dtype
        if hasattr(self, "weight"):
            return (self.weight if rows is None else self.weight[rows]).to(dtype)
        packed = self.codes.view(self.shape[0], -1)
        codes = unpack(packed if rows is None else packed[rows], self.grid.bits, self.shape[1])
        zero = None if self.grid.symmetric else spread(self.zero, self.shape, self.grid, rows).to(dtype)
        return to_steps(codes, zero, self.grid, dtype)

    def real(self) -> Tensor:
        """The steps, each by its scale."""
        return self.steps() * spread(self.scale, self.shape, self.grid)

    @property
    def is_whole(self) -> bool:
        """Unless groups of a row have scales of their own."""
        return self.grid.scope != "group"

    def whole(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The steps, or codes moved to 8 bits with a sign, as zero is; and the scales of their rows."""
        scale = self.scale.expand(self.shape[0])
        if self.grid.symmetric:
            return self.steps().to(torch.int8), scale, None
        codes = unpack(self.codes.view(self.shape[0], -1), self.grid.bits, self.shape[1])
        zero = self.zero.expand(self.shape[0]).to(torch.int32) - MIDDLE
        return (codes.to(torch.int16) - MIDDLE).to(torch.int8), scale, zero


class WholeLinear(Whole, StoredLinear):
    """A linear layer of whole numbers on a grid."""

    def __init__(
        self,
        old: nn.Linear,
        activations: Activations = False,
        grid: Grid = Grid(),  # noqa: B008
        scales: bool = False,
    ):
        """An empty layer of the same shape."""
        super().__init__(old, activations, scales)
        self._make_room(grid)

    def real(self) -> Tensor:
        """What inputs are multiplied with, whatever they are scaled by in between."""
        made = super().real()
        return made if self.input_factor is None else made * self.input_factor


class WholeEmbedding(Whole, StoredEmbedding):
    """An embedding table of whole numbers on a grid; a row is made real when it is looked up."""

    def __init__(self, old: nn.Embedding, grid: Grid = Grid()):  # noqa: B008
        """An empty table of the same shape."""
        super().__init__(old)
        self._make_room(grid)

    def rows(self, ids: Tensor) -> Tensor:
        """Those that are looked up."""
        scale = spread(self.scale, self.shape, self.grid, ids)
        return self.steps(ids) * (scale.view(()) if self.grid.scope == "tensor" else scale)


class Book(Stored):
    """Numbers that name one of a few centroids, in `codes`; outliers stand beside them as they are."""

    codes: Tensor
    table: Tensor
    places: Tensor
    outliers: Tensor
    bits: int

    def _make_room(self, bits: int, outliers: int) -> None:
        self.bits = bits
        self.register_buffer("codes", torch.zeros(_bytes(self.shape, bits), dtype=torch.uint8))
        self.register_buffer("table", torch.zeros(2**bits))
        self.register_buffer("places", torch.zeros(outliers, dtype=torch.int32))
        self.register_buffer("outliers", torch.zeros(outliers))

    @torch.no_grad()
    def write(self, codes: Tensor, table: Tensor, apart: Tensor, matrix: Tensor) -> None:
        """Store the codes of a matrix (rows, columns), what they stand for, and its own numbers where it is `apart`."""
        self.codes.copy_(pack(codes, self.bits).flatten())
        self.table.copy_(table)
        self.places.copy_(apart.flatten().nonzero()[:, 0])
        self.outliers.copy_(matrix[apart])

    def real(self) -> Tensor:
        """Look every code up, then set the outliers."""
        codes = unpack(self.codes.view(self.shape[0], -1), self.bits, self.shape[1])
        flat = self.table.index_select(0, codes.flatten().int())
        return flat.index_copy_(0, self.places.long(), self.outliers).view(self.shape)


class BookLinear(Book, StoredLinear):
    """A linear layer whose numbers name centroids."""

    def __init__(self, old: nn.Linear, bits: int, outliers: int):
        """An empty layer of the same shape, with room for so many outliers."""
        super().__init__(old)
        self._make_room(bits, outliers)


class BookEmbedding(Book, StoredEmbedding):
    """An embedding table whose numbers name centroids."""

    def __init__(self, old: nn.Embedding, bits: int, outliers: int):
        """An empty table of the same shape, with room for so many outliers."""
        super().__init__(old)
        self._make_room(bits, outliers)


def stored_bytes(shape: tuple[int, ...], grid: Grid) -> int:
    """How many bytes a matrix takes on disk: its codes, scales and zeros."""
    return _bytes((shape[0], shape[1]), grid.bits) + grid.scales(shape) * (4 if grid.symmetric else 5)


def _bytes(shape: tuple[int, int], bits: int) -> int:
    return shape[0] * packed_size(shape[1], bits)


def roundable(encoder: Encoder) -> list[str]:
    """Every linear layer and embedding table but the last layer of a head, an LSTM's own, and small position biases."""
    taken = tuple(f"{name}." for name, module in encoder.named_modules() if getattr(module, "takes_weights", False))
    found = [
        (name, module)
        for name, module in encoder.named_modules()
        if not name.startswith(taken)
        and (
            (type(module) is nn.Linear and not name.endswith(".out"))
            or (type(module) is nn.Embedding and ".embeddings." in f".{name}.")
        )
    ]
    return [name for name, module in found if module.weight.numel() >= 256]


def stored_parts(module: nn.Module) -> dict[str, Stored]:
    """The parts that are stored in few bits, each once, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Stored)}


def packed_parts(module: nn.Module) -> dict[str, Stored]:
    """Those whose numbers do not stand in a matrix of whole numbers as they are, but packed."""
    return {name: part for name, part in stored_parts(module).items() if "weight" not in part._buffers}


def with_real_weights(encoder: Encoder, which: Callable[[nn.Module], dict[str, Stored]] = stored_parts) -> Encoder:
    """The same encoder with plain layers and tables in their places, for what knows those only.

    Rounding of inputs is lost by that, so that whoever needs it has to look for `activations` first.
    """
    for name, part in which(encoder).items():
        plain: nn.Linear | nn.Embedding
        if isinstance(part, StoredLinear):
            plain = nn.Linear(part.in_features, part.out_features, part.bias is not None, device=encoder.device)
            plain.bias = part.bias
        else:
            plain = nn.Embedding(*part.shape, device=encoder.device)
        plain.weight = nn.Parameter(part.real())
        replace_module(encoder, name, plain.train(part.training))
    return encoder
