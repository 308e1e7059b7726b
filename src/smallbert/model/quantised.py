"""Layers and embedding tables whose numbers are stored in few bits; in use the real ones are made once and kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.model.anatomy import replace_module
from smallbert.model.kept import Keeping
from smallbert.model.packing import pack, packed_size, unpack
from smallbert.model.rounding import Grid, round_inputs, spread, straight, to_steps

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

SEVEN_BITS = 127  # steps of inputs that are rounded call by call, as the CPU kernels take them
# torch's own int8 products for CPUs; without them the same rounding is done in floating point, at its speed.
WHOLE_KERNELS = hasattr(torch.ops.quantized, "linear_dynamic") and hasattr(torch, "_make_per_channel_quantized_tensor")
Activations = bool | Literal["static"]


class Stored(Keeping):
    """What every module has that stores a matrix small: the real matrix, made once and kept beside it."""

    shape: tuple[int, int]

    def real(self) -> Tensor:
        """The whole matrix as real numbers."""
        raise NotImplementedError


class StoredLinear(Stored):
    """A linear layer; with `activations` its inputs are rounded to 8 bits too, by each call's range or by a fixed one.

    With ranges by call, a CPU multiplies whole numbers, which is faster.
    """

    input_range: Tensor

    def __init__(self, old: nn.Linear, activations: Activations = False):
        """The bias stays as it was."""
        super().__init__()
        self.in_features, self.out_features = old.in_features, old.out_features
        self.activations: Activations = activations
        self.shape = (old.out_features, old.in_features)
        self.bias = old.bias
        if activations == "static":
            self.fix_range()

    def fix_range(self) -> None:
        """Make room for one range, by which inputs are rounded from now on."""
        self.activations = "static"
        self.register_buffer("input_range", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply."""
        if self.activations == "static":
            inputs = round_inputs(inputs, *self.input_range)
        elif self.activations:
            quick = WHOLE_KERNELS and not self.training and not inputs.is_cuda and not torch.compiler.is_exporting()
            if quick and (kernel := self._keep("kernel", torch.int8, self._kernel)) is not None:
                return torch.ops.quantized.linear_dynamic(inputs.float(), kernel, True)
            inputs = round_call(inputs)
        weight = self._keep("real", inputs.dtype, lambda: self.real().to(inputs.dtype))
        return functional.linear(inputs, weight, self.bias)

    def _kernel(self) -> Any:
        """What torch's int8 products take; None where they know no such grid."""
        return None


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


class WholeLinear(Whole, StoredLinear):
    """A linear layer of whole numbers on a grid."""

    def __init__(self, old: nn.Linear, activations: Activations = False, grid: Grid = Grid()):  # noqa: B008
        """An empty layer of the same shape."""
        super().__init__(old, activations)
        self._make_room(grid)

    def _kernel(self) -> Any:
        if self.grid.scope == "group" or not self.grid.symmetric:
            return None
        scale = self.scale.double().expand(self.out_features).contiguous()
        zeros = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to drop these tensors one day; WHOLE_KERNELS watches for it
            whole = torch._make_per_channel_quantized_tensor(self.steps().to(torch.int8), scale, zeros, 0)
        return torch.ops.quantized.linear_prepack(whole, None if self.bias is None else self.bias.detach())


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
    def write(self, codes: Tensor, table: Tensor, places: Tensor, outliers: Tensor) -> None:
        """Store the codes of a matrix (rows, columns), what they stand for, and where in the flat matrix others are."""
        self.codes.copy_(pack(codes, self.bits).flatten())
        self.table.copy_(table)
        self.places.copy_(places)
        self.outliers.copy_(outliers)

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


def round_call(inputs: Tensor) -> Tensor:
    """What rounding the inputs of one call to 7 bits, zero among them, does to them, as the kernels do it.

    The gradient passes straight through.
    """
    with torch.no_grad():
        low, high = inputs.amin().clamp(max=0), inputs.amax().clamp(min=0)
        step = ((high - low) / SEVEN_BITS).clamp(min=1e-12)
        zero = (-low / step).round()
        made = (((inputs / step).round() + zero).clamp(0, SEVEN_BITS) - zero) * step
    return straight(inputs, made)


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
