"""The two things that every change of an ONNX graph needs."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, helper


def set_nodes(model: ModelProto, nodes: list[NodeProto], weights: list[TensorProto] | None = None) -> None:
    """Let these operators (and further weights) be the graph; what nobody reads is left out, as are stale shapes."""
    read, kept = {one.name for one in model.graph.output}, list[NodeProto]()
    for node in reversed(nodes):
        if read.intersection(node.output):
            kept.append(_copied(node))
            read.update(node.input)
    every = [_copied(one) for one in (*model.graph.initializer, *(weights or ())) if one.name in read]
    del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
    model.graph.node.extend(reversed(kept))
    model.graph.initializer.extend(every)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """A setting of an operator."""
    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def _copied(one: Any) -> Any:
    """A repeated field can only be filled with what does not belong to it."""
    new = type(one)()
    new.CopyFrom(one)
    return new
