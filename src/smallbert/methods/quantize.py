"""Weights as 8-bit whole numbers, embeddings included: a quarter of the bytes; int8 arithmetic on CPU if asked for."""

import copy
import warnings
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from smallbert.methods import Method
from smallbert.model.anatomy import replace_module

TOP = 127
# torch's own int8 products for CPUs; without them the same rounding is done in floating point, at its speed.
WHOLE_KERNELS = hasattr(torch.ops.quantized, "linear_dynamic") and hasattr(torch, "_make_per_channel_quantized_tensor")


class Quantize(Method):
    """Store weights, embeddings included, as 8-bit whole numbers with one scale a row."""

    stage: ClassVar[int] = 50

    bits: Literal[8] = 8
    activations: bool = False

    def plan(self, encoder: Any, task: Any) -> dict[str, Any]:
        """Every linear layer and embedding table but the last layer of a head and small position biases."""
        names = [
            name
            for name, module in encoder.named_modules()
            if (type(module) is nn.Linear and not name.endswith(".out"))
            or (type(module) is nn.Embedding and ".embeddings." in f".{name}.")
        ]
        return {"modules": [name for name in names if not _is_small(encoder.get_submodule(name))]}

    def build(self, encoder: Any, plan: dict[str, Any]) -> None:
        """Put empty 8-bit modules in their places."""
        for name in plan["modules"]:
            old = encoder.get_submodule(name)
            new = WholeEmbedding(old) if isinstance(old, nn.Embedding) else WholeLinear(old, self.activations)
            replace_module(encoder, name, new.to(encoder.device))

    def fill(self, encoder: Any, before: Any, plan: dict[str, Any], task: Any, seed: int) -> None:
        """Round to nearest, each row by its own largest weight."""
        for name in plan["modules"]:
            old, new = before.get_submodule(name), encoder.get_submodule(name)
            scale = old.weight.detach().abs().amax(1).clamp(min=1e-12) / TOP
            new.weight.copy_((old.weight.detach() / scale[:, None]).round().clamp(-TOP, TOP))
            new.scale.copy_(scale)


def _is_small(module: Any) -> bool:
    return module.weight.numel() < 256


class WholeEmbedding(nn.Module):
    """An embedding table of 8-bit whole numbers; a row is made real when it is looked up."""

    weight: Tensor
    scale: Tensor

    def __init__(self, old: nn.Embedding):
        """An empty table of the same shape."""
        super().__init__()
        self.register_buffer("weight", torch.zeros(old.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(len(old.weight)))

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids][..., None]


class WholeLinear(nn.Module):
    """A linear layer of 8-bit whole numbers.

    In evaluation the real weights are made once and kept beside the small ones; with `activations` the inputs are
    rounded to 8 bits too, and a CPU then multiplies whole numbers, which is faster.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, old: nn.Linear, activations: bool):
        """An empty layer of the same shape; the bias stays as it was."""
        super().__init__()
        self.in_features, self.out_features, self.activations = old.in_features, old.out_features, activations
        self.register_buffer("weight", torch.zeros(old.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(old.out_features))
        self.bias = old.bias
        self._kept: tuple[Any, Any] = (None, None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply."""
        if self.activations:
            if WHOLE_KERNELS and not self.training and not inputs.is_cuda and not torch.compiler.is_exporting():
                return torch.ops.quantized.linear_dynamic(inputs.float(), self._keep("packed", self._pack), True)
            inputs = _round_inputs(inputs)
        weight = self._real() if self.training else self._keep("real", self._real)
        return functional.linear(inputs, weight, self.bias)

    def _real(self) -> Tensor:
        return self.weight.to(self.scale.dtype) * self.scale[:, None]

    def _pack(self) -> Any:
        zeros = torch.zeros(self.out_features, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch means to drop these tensors one day; WHOLE_KERNELS watches for it
            whole = torch._make_per_channel_quantized_tensor(self.weight, self.scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(whole, None if self.bias is None else self.bias.detach())

    def _keep(self, kind: str, make: Any) -> Any:
        """Made once, and again only when the weights have changed or moved."""
        bias = 0 if self.bias is None else self.bias._version
        key = (kind, self.weight.device, self.weight._version, self.scale._version, bias)
        if self._kept[0] != key:
            with torch.inference_mode(False), torch.no_grad():  # what is kept must serve later calls of either mode
                self._kept = (key, make())
        return self._kept[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "WholeLinear":
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "_kept"})
        new._kept = (None, None)
        return new


def _round_inputs(inputs: Tensor) -> Tensor:
    """What rounding the inputs of one call to 8 bits does to them; the gradient passes straight through."""
    with torch.no_grad():
        low, high = inputs.amin().clamp(max=0), inputs.amax().clamp(min=0)
        step = ((high - low) / TOP).clamp(min=1e-12)  # seven bits, as the CPU kernels take them
        rounded = ((inputs - low) / step).round() * step + low
    return inputs + (rounded - inputs).detach()
