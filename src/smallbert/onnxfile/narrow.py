"""Making a graph do less for the same scores: of a text, a head that reads the first token needs no others at the end.

In the last layer keys and values are needed of every token, all else (queries, attention, the feed-forward part) of
the first one only, which saves 5/6 of that layer. No rule here knows a family: from the outputs upwards, each operator
whose result is read at the first place of an axis alone works there alone, as far as it treats places one by one.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from smallbert.onnxfile.graph import attribute, set_nodes

WHOLE = -1  # an axis that says: all of it is read
ONE_BY_ONE = {"Gelu", "Erf", "Tanh", "Relu", "Sigmoid", "Sqrt", "Cast", "Identity", "Not", "Neg"}
SPREAD = {"Add", "Sub", "Mul", "Div", "Sum", "Pow", "Where", "Max", "Min", "And", "Or"}
ALONG_LAST = {"Softmax", "LayerNormalization", "SimplifiedLayerNormalization"}


def avoid_slow_fusions(model: ModelProto) -> None:
    """Write some sums so that onnxruntime leaves them alone; scores stay as they are.

    An Add before a norm would become SkipLayerNormalization, and one before Gelu BiasGelu, whose CPU kernels take
    longer than their parts. Only behind products of whole numbers a bias has a better place: in the product.
    """
    maker = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        before = maker.get(node.input[0]) if node.op_type in ("LayerNormalization", "Gelu") else None
        if before is None or before.op_type != "Add":
            continue
        products = [maker[name].op_type for name in before.input if name in maker]
        if node.op_type == "LayerNormalization" or "MatMul" in products:
            before.op_type = "Sum"


def narrow(model: ModelProto) -> int:
    """Let operators work on first places alone where nothing else is read; gives how many do."""
    graph = _Graph(model)
    for node in reversed(model.graph.node):
        graph.visit(node)
    made: list[NodeProto] = []
    for node in model.graph.node:
        for place, axis in graph.reads[node.output[0]].items():
            node.input[place] = graph.cut(node.input[place], axis, made)
        made.append(node)
    set_nodes(model, made)
    return len(graph.narrowed)


class _Graph:
    """A graph with its shapes, and what of each tensor is read."""

    def __init__(self, model: ModelProto):
        self.model = model
        known = (*model.graph.value_info, *model.graph.input, *model.graph.output)
        self.shapes = {
            one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim] for one in known
        }
        self.constants = {one.name: one for one in model.graph.initializer}
        self.shapes |= {name: list(one.dims) for name, one in self.constants.items()}
        self.read: defaultdict[str, set[int]] = defaultdict(set)  # of a tensor: first places of these axes, or WHOLE
        for one in model.graph.output:
            self.read[one.name].add(WHOLE)
        self.reads: dict[
            str, dict[int, int]
        ] = {}  # of the maker of a tensor: {number of the input: the axis it is narrow on}
        self.narrowed: dict[str, int] = {}
        self.cuts: dict[tuple[str, int], str] = {}

    def visit(self, node: NodeProto) -> None:
        """See what this operator has to give, and so what it reads; all that read from it were seen before."""
        axes: list[int | None] = []
        if node.op_type == "Gather" and attribute(node, "axis", 0) > 0 and self._is_zero(node.input[1]):
            axes = [attribute(node, "axis", 0)]
        elif len(node.output) == 1 and len(wanted := self.read[node.output[0]]) == 1 and WHOLE not in wanted:
            axes = self._rule(node, axis := min(wanted))
            if axes:
                self.narrowed[node.output[0]] = axis
        self.reads[node.output[0]] = {place: axis for place, axis in enumerate(axes) if axis is not None}
        for place, name in enumerate(node.input):
            self.read[name].add(self.reads[node.output[0]].get(place, WHOLE))

    def _rule(self, node: NodeProto, axis: int) -> list[int | None]:
        """On which axis each input need be narrow only; nothing where this operator needs more than that."""
        kind, shape = node.op_type, self.shapes.get(node.output[0], [])
        inside = 0 <= axis < len(shape)
        if inside and kind in ONE_BY_ONE:
            return [axis]
        if inside and kind in ALONG_LAST and axis < len(shape) - 1:
            return [axis] if attribute(node, "axis", -1) in (-1, len(shape) - 1) else []
        if inside and kind in SPREAD and all(name in self.shapes for name in node.input):
            return [self._same_place(name, axis - len(shape)) for name in node.input]
        if inside and kind == "MatMul" and axis == len(shape) - 2:
            return [axis] if len(self.shapes.get(node.input[0], ())) == len(shape) else []
        if inside and kind == "Transpose":
            return [int(attribute(node, "perm", range(len(shape))[::-1])[axis])]
        if inside and kind == "Reshape":
            before, rest = self.shapes.get(node.input[0], []), shape[axis + 1 :]
            if before[: axis + 1] == shape[: axis + 1] and all(isinstance(size, int) for size in rest):
                node.input[1] = self._constant(np.array([0] * axis + [1, *rest], np.int64))
                del node.attribute[:]  # a zero there means "as before"
                return [axis]
        return []

    def _is_zero(self, name: str) -> bool:
        one = self.constants.get(name)
        return one is not None and not one.dims and not numpy_helper.to_array(one).any()

    def _same_place(self, name: str, from_end: int) -> int | None:
        """Where an input of an elementwise operator has this axis; None where it is spread over it."""
        shape = self.shapes[name]
        return None if len(shape) + from_end < 0 or shape[from_end] == 1 else len(shape) + from_end

    def cut(self, name: str, axis: int, made: list[NodeProto]) -> str:
        """The tensor with one place left on an axis: as it is, where it was made so."""
        if self.narrowed.get(name) == axis:
            return name
        if (name, axis) not in self.cuts:
            bounds = [self._constant(np.array([value], np.int64)) for value in (0, 1, axis)]
            self.cuts[name, axis] = f"{name}.first{axis}"
            made.append(helper.make_node("Slice", [name, *bounds], [f"{name}.first{axis}"]))
        return self.cuts[name, axis]

    def _constant(self, value: np.ndarray) -> str:
        name = f"narrow.{'_'.join(map(str, value))}"
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(value, name)
            self.model.graph.initializer.append(self.constants[name])
        return name
