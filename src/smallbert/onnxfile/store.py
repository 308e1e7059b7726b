"""Weights that are stored in few bits stay so in an ONNX file, and layers that round their inputs multiply integers.

weights only      codes, Cast, Mul by scales: onnxruntime makes the real weights of them once, when the file is loaded
inputs by token   each by its own largest number, MatMulInteger: whole numbers all the way
inputs by range   QuantizeLinear, DequantizeLinear before MatMul (QDQ), which onnxruntime runs as whole numbers
tables            rows are looked up as codes, and made real then
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import nn

from smallbert.errors import RunError
from smallbert.model.encoder import Encoder
from smallbert.model.packing import unpack
from smallbert.model.products import MIDDLE, TOP
from smallbert.model.quantised import Book, Stored, StoredLinear, Whole, stored_parts
from smallbert.model.rounding import LEAST, input_steps
from smallbert.model.zeros import SparseLinear
from smallbert.onnxfile.graph import attribute, set_nodes

FEW = 4  # bits that ONNX has a type for, besides 8
HALF_BYTES = 21  # the first operator set with that type; what else a graph here uses is the same in it


def tell_apart(plain: Encoder, parts: dict[str, Stored]) -> dict[str, Stored]:
    """The parts by a hash of the numbers that they have in an encoder with real weights, which is about to be traced.

    Parts are known by their numbers, since the exporter turns and renames weights as it likes. Where two have the same
    ones, they may still round their inputs differently, so that one gets a mark; with its numbers that is replaced.
    """
    known: dict[str, Stored] = {}
    for name, part in parts.items():
        weight = plain.get_parameter(f"{name}.weight").detach()
        while (key := _key(weight.numpy())) in known:
            weight[0, 0] += 1.0
        known[key] = part
    return known


def keep_few_bits(model: ModelProto, known: dict[str, Stored]) -> int:
    """Replace the real weights of these parts, by hash, in a graph by what is stored; gives how many were found."""
    graph = _Writer(model, known)
    for node in list(model.graph.node):
        graph.write(node)
    set_nodes(model, graph.nodes, list(graph.constants.values()))
    if any(one.data_type in (TensorProto.INT4, TensorProto.UINT4) for one in graph.constants.values()):
        model.opset_import[0].version = HALF_BYTES
    marked = [key for key, part in known.items() if key not in graph.found and key != _key(part.real().numpy())]
    if marked:
        raise RunError("one of two equal matrices was not found in the graph, so no file was written")
    return len(graph.found)


def bits_of(part: Stored) -> int:
    """How many bits a number of a part takes in the model."""
    return part.grid.bits if isinstance(part, Whole) else getattr(part, "bits", 32)


def file_bits(part: Stored) -> int:
    """How many it takes in a file: 8 where whole numbers are multiplied, else as many as the next type of ONNX has."""
    if isinstance(part, StoredLinear) and part.activations and part.is_whole:
        return 8
    return next((bits for bits in (FEW, 8) if bits_of(part) <= bits), 32)


def arithmetic(encoder: Encoder) -> str:
    """What a file multiplies, and what it stores.

    "float32", "int8", "float32 products of 4-bit weights", "int8 and float32 products of 8-bit weights", …
    """
    parts = [part for name, part in stored_parts(encoder).items() if not name.startswith("pooler.")]
    if not parts:
        return "float32"
    layers = [part for part in parts if isinstance(part, StoredLinear)]
    whole = [part for part in layers if part.activations and part.is_whole]
    plain = [
        name
        for name, part in encoder.named_modules()
        if (type(part) is nn.Linear or isinstance(part, SparseLinear)) and not name.endswith(".out")
    ]
    bits = sorted({file_bits(part) for part in parts})
    if bits == [8] and layers and len(whole) == len(layers) and not plain:
        return "int8"
    kinds = [name for name, some in (("int8", whole), ("float32", len(whole) < len(layers) or plain)) if some]
    weights = f"{bits[0]}-bit" if len(bits) == 1 else f"{bits[0]}- to {bits[-1]}-bit"
    inputs = any(part.activations == "static" and not part.is_whole for part in layers)
    products = " and ".join(kinds or ["float32"])
    return f"{products} products of {weights} weights{' and 8-bit inputs' if inputs else ''}"


class _Writer:
    """A graph as it is written anew."""

    def __init__(self, model: ModelProto, known: dict[str, Stored]):
        self.known, self.found = known, set[str]()
        self.weights = {one.name: one for one in model.graph.initializer if len(one.dims) == 2}
        self.keys: dict[str, str] = {}
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.made: dict[tuple[Any, ...], str] = {}

    def write(self, node: NodeProto) -> None:
        """One operator, with the matrix it reads as it is stored."""
        kind = node.op_type
        if kind == "Gather" and (part := self._part(node.input[0])):
            self._look_up(node, part)
        elif kind == "MatMul" and (part := self._part(node.input[1], turned=True)):
            self._multiply(node.input[0], part, node.output[0])
        elif kind == "Gemm" and (part := self._part(node.input[1])) and _turns_second(node):
            bias = list(node.input[2:])
            self._multiply(node.input[0], part, f"{node.output[0]}.product" if bias else node.output[0])
            if bias:  # with Add onnxruntime would make a Gemm of real numbers again
                self.add("Sum", [f"{node.output[0]}.product", *bias], out=node.output[0])
        else:
            self.nodes.append(node)

    def _part(self, name: str, turned: bool = False) -> Stored | None:
        if name not in self.weights:
            return None
        if name not in self.keys:
            array = numpy_helper.to_array(self.weights[name])
            self.keys[name] = _key(array.T if turned else array)
        part = self.known.get(self.keys[name])
        if part is not None:
            self.found.add(self.keys[name])
        return part

    def _multiply(self, inputs: str, part: Stored, out: str) -> None:
        activations, inputs = getattr(part, "activations", False), self._scaled(inputs, part)
        if not activations or not part.is_whole:
            self.add("MatMul", [self._rounded(inputs, part), self._turned(part)], out=out)
        elif activations == "static":
            codes, scale, *zeros = self._whole(part)
            weight = self.once("DequantizeLinear", [codes, scale, *zeros], part, axis=1)
            self.add("MatMul", [self._rounded(inputs, part), weight], out=out)
        else:
            codes, scale, *zeros = self._whole(part)
            given, step, zero = self._whole_inputs(inputs)
            product = self.add("MatMulInteger", [given, codes, zero, *zeros], out=f"{out}.whole")
            real = self.add("Cast", [product], out=f"{out}.cast", to=TensorProto.FLOAT)
            # One after the other: given their product, onnxruntime would take the step for a single number.
            self.add("Mul", [self.add("Mul", [real, scale], out=f"{out}.columns"), step], out=out)

    def _whole(self, part: Any) -> list[str]:
        """Codes of a matrix, turned as products take them, and for each column a scale, and a zero where it has one."""
        codes, scale, zero = part.whole()
        numbers = {"codes": np.ascontiguousarray(codes.numpy().T), "scale": scale.numpy().copy()}
        if zero is not None:  # without a sign: such zeros are what onnxruntime has whole products for
            numbers["codes"] = (numbers["codes"].astype(np.int16) + MIDDLE).astype(np.uint8)
            numbers["zero"] = (zero.numpy() + MIDDLE).astype(np.uint8)
        return [self.constant(part, name, value) for name, value in numbers.items()]

    def _scaled(self, name: str, part: Any) -> str:
        """Inputs times the layer's own factors, where it has some; layers with the same ones share them."""
        factor = getattr(part, "input_factor", None)
        if factor is None or bool((factor == 1).all()):
            return name
        key = (name, factor.numpy().tobytes())
        if key not in self.made:
            given = [name, self.constant(part, "input factor", factor.numpy())]
            self.made[key] = self.add("Mul", given, out=f"{name}.scaled{len(self.made)}")
        return self.made[key]

    def _whole_inputs(self, name: str) -> tuple[str, str, str]:
        """Codes of inputs, a step for each token, and the code of zero.

        DynamicQuantizeLinear would be one operator, but has one step for all texts of a batch, so that what a text gets
        would depend on its company. Codes are unsigned, around 128: the kernels for signed ones take ten times as long.
        """
        middle = self._number("middle", np.array(MIDDLE, np.uint8))
        if (name, "whole") not in self.made:
            most = self._number("most", np.array(TOP, np.float32))
            last = self._number("last axis", np.array([-1]))
            high = self.add("ReduceMax", [name, last], out=f"{name}.high", keepdims=1)
            low = self.add("ReduceMin", [name, last], out=f"{name}.low", keepdims=1)
            ends = [
                high,
                self.add("Neg", [low], out=f"{name}.depth"),
                self._number("least", np.array(LEAST, np.float32)),
            ]
            top = self.add("Max", ends, out=f"{name}.top")
            self.add("Div", [top, most], out=f"{name}.step")
            grown = self.add("Mul", [name, self.add("Div", [most, top], out=f"{name}.inverse")], out=f"{name}.grown")
            one = self._number("one", np.array(1, np.float32))
            self.made[name, "whole"] = self.add("QuantizeLinear", [grown, one, middle], out=f"{name}.codes")
        return f"{name}.codes", f"{name}.step", middle

    def _rounded(self, name: str, part: Stored) -> str:
        """Inputs as the layer rounds them by its own range, where it has one."""
        if not isinstance(part, StoredLinear) or part.activations != "static":
            return name
        step, zero = (value.item() for value in input_steps(*part.input_range))
        key = (name, step, zero)
        if key not in self.made:
            place = f"{name}.range{len(self.made)}"
            grid = [
                self.constant(part, "input step", np.array(step, np.float32)),
                self.constant(part, "input zero", np.array(zero, np.uint8)),
            ]
            codes = self.add("QuantizeLinear", [name, *grid], out=f"{place}.codes")
            self.made[key] = self.add("DequantizeLinear", [codes, *grid], out=place)
        return self.made[key]

    def _turned(self, part: Stored) -> str:
        return self.once("Transpose", [self._real(part)], part, perm=[1, 0])

    def _real(self, part: Any) -> str:
        """The real matrix, by operators on constants alone: done once, on loading."""
        rows, columns = part.shape
        if isinstance(part, Book):
            codes = unpack(part.codes.view(rows, -1), part.bits, columns).numpy().reshape(-1)
            places = self.once(
                "Cast", [self.constant(part, "codes", _few(codes, part.bits))], part, to=TensorProto.INT32
            )
            flat = self.once("Gather", [self.constant(part, "table", part.table.numpy()), places], part)
            outliers = [
                self.constant(part, name, getattr(part, name).numpy().astype(kind))
                for name, kind in (("places", np.int64), ("outliers", np.float32))
            ]
            flat = self.once("ScatterElements", [flat, *outliers], part, axis=0)
            return self.once("Reshape", [flat, self.constant(part, "shape", np.array([rows, columns]))], part)
        if not isinstance(part, Whole):
            return self.constant(part, "real", part.real().numpy())
        group = part.grid.group if part.grid.scope == "group" else columns
        wide = -columns % group
        codes, zero = part.steps().numpy(), None
        if not part.grid.symmetric:
            zero = _in_groups(part.zero.numpy().astype(np.float32), part)
            codes = unpack(part.codes.view(rows, -1), part.grid.bits, columns).numpy()
        grouped = np.pad(codes, ((0, 0), (0, wide))).reshape(rows, -1, group)
        steps = self.constant(part, "codes", _few(grouped, part.grid.bits, signed=zero is None))
        steps = self.once("Cast", [steps], part, to=TensorProto.FLOAT)
        if zero is not None:
            steps = self.once("Sub", [steps, self.constant(part, "zero", zero)], part)
        real = self.once("Mul", [steps, self.constant(part, "scale", _in_groups(part.scale.numpy(), part))], part)
        real = self.once("Reshape", [real, self.constant(part, "wide", np.array([rows, columns + wide]))], part)
        if wide:
            bounds = [self.constant(part, f"cut{value}", np.array([value])) for value in (0, columns, 1)]
            real = self.once("Slice", [real, *bounds], part)
        return real

    def _look_up(self, node: NodeProto, part: Any) -> None:
        ids, out = node.input[1], node.output[0]
        if not (part.is_whole and part.grid.symmetric and part.grid.scope == "row"):
            self.add("Gather", [self._real(part), ids], out=out)
            return
        codes = self.constant(part, "codes", _few(part.steps().numpy(), part.grid.bits))
        if part.grid.bits <= FEW:  # nothing is looked up in half bytes; on loading they become whole ones
            codes = self.once("Cast", [codes], part, to=TensorProto.INT8)
        rows = self.add("Gather", [codes, ids], out=f"{out}.codes")
        scale = self.add("Gather", [self.constant(part, "scale", part.scale.numpy()[:, None]), ids], out=f"{out}.scale")
        self.add("Mul", [self.add("Cast", [rows], out=f"{out}.steps", to=TensorProto.FLOAT), scale], out=out)

    def add(self, kind: str, inputs: list[str], out: str, **attributes: Any) -> str:
        """An operator; gives the name of what it makes."""
        self.nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def once(self, kind: str, inputs: list[str], part: Stored, **attributes: Any) -> str:
        """The same for what belongs to a part, however often that is used."""
        key = (id(part), kind, *inputs)
        if key not in self.made:
            self.made[key] = self.add(kind, inputs, f"{inputs[0]}.{kind.lower()}", **attributes)
        return self.made[key]

    def constant(self, part: Stored, what: str, value: np.ndarray) -> str:
        """A weight of the new graph."""
        return self._number(f"{list(self.known.values()).index(part)}.{what}", value)

    def _number(self, what: str, value: np.ndarray) -> str:
        name = f"stored{what}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(value, name)
        return name


def _in_groups(values: np.ndarray, part: Any) -> np.ndarray:
    return values.reshape(1, 1, 1) if part.grid.scope == "tensor" else values.reshape(part.shape[0], -1, 1)


def _few(codes: np.ndarray, bits: int, signed: bool = True) -> np.ndarray:
    """Codes in the smallest type that ONNX has for so many bits."""
    import ml_dtypes

    signed = signed and bool((codes < 0).any())
    few, whole = (ml_dtypes.int4, np.int8) if signed else (ml_dtypes.uint4, np.uint8)
    return codes.astype(np.int8 if signed else np.uint8).astype(few if bits <= FEW else whole)


def _turns_second(node: NodeProto) -> bool:
    usual = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
    return usual and attribute(node, "transB", 0) == 1 and attribute(node, "transA", 0) == 0


def _key(array: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(array, np.float32).data).hexdigest() + str(array.shape)
