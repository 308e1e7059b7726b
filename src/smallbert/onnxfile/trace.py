"""An encoder as a plain ONNX graph, by torch's own exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from smallbert.errors import RunError
from smallbert.model.anatomy import anatomy
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.model.folders import probe_batch
from smallbert.texts.data import longest_input

OPSET = 20  # the first that knows Gelu as one operator, which runs faster than its parts
NAME = "smallbert-onnx"
LEAST = -1e30  # what is added to the score of padding; a real infinity would make no numbers of rows that see nothing


class Plain(nn.Module):
    """The encoder as a function of plain tensors."""

    def __init__(self, encoder: Encoder):
        """Nothing is copied."""
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Scores of padded texts."""
        size, longest = input_ids.shape
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        place = torch.arange(longest).expand(size, -1)
        return self.encoder(Batch(input_ids, types, place, attention_mask=attention_mask, size=size, longest=longest))


def input_names(encoder: Encoder) -> list[str]:
    """What the graph takes."""
    return ["input_ids", "attention_mask", *(["token_type_ids"] if anatomy(encoder.backbone).token_types else [])]


def named_inputs(encoder: Encoder, batch: Batch) -> dict[str, Tensor]:
    """A padded batch by the names of the inputs."""
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    every = {"input_ids": batch.input_ids, "attention_mask": mask, "token_type_ids": batch.token_type_ids}
    return {name: every[name] for name in input_names(encoder)}


def trace(encoder: Encoder) -> Any:
    """An ONNX model (a protobuf, weights inside) with free batch size and length."""
    from torch.export import Dim

    inputs = named_inputs(encoder, probe_batch(encoder, (6, 9)))
    free = {0: Dim("batch"), 1: Dim("length", min=1, max=longest_input(encoder))}
    settings: dict[str, Any] = {"dynamo": True, "verbose": False, "output_names": ["scores"], "opset_version": OPSET}
    copy = encoder.copy().eval()  # tracing leaves marks on what it walks through
    if copy.packable:
        copy.backbone.set_attn_implementation(NAME)
    try:
        with _quietly():
            program = torch.onnx.export(
                Plain(copy),
                tuple(inputs.values()),
                input_names=list(inputs),
                dynamic_shapes={name: free for name in inputs},
                custom_translation_table={torch.ops.smallbert.lstm.default: _lstm},
                **settings,
            )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = next((line for line in str(error).splitlines()[::-1] if "Error" in line), str(error).splitlines()[0])
        raise RunError(f"torch could not write this {encoder.family} model as ONNX: {reason.strip()[:300]}") from error
    assert program is not None
    model = program.model_proto
    if any(not size.dim_param for one in model.graph.input for size in one.type.tensor_type.shape.dim):
        raise RunError(f"torch could write this {encoder.family} model for one size of batch and one length only")
    for one in (model.graph, *model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer):
        del one.metadata_props[:]  # where in the code it comes from, which is long and tells of this machine
        one.doc_string = ""
    return model


def _lstm(values: Any, read: Any, recall: Any, read_bias: Any, recall_bias: Any) -> Any:
    """One direction of an LSTM; torch has its gates in the order in, forget, cell, out, ONNX in, out, forget, cell."""
    from onnxscript import opset20

    op: Any = opset20

    def in_order(rows: Any) -> Any:
        into, forget, cell, out = op.Split(rows, num_outputs=4, axis=0)
        return op.Concat(into, out, forget, cell, axis=0)

    first = op.Constant(value_ints=[0])
    weights = [op.Unsqueeze(in_order(one), first) for one in (read, recall)]
    bias = op.Unsqueeze(op.Concat(in_order(read_bias), in_order(recall_bias), axis=0), first)
    found, _, _ = op.LSTM(op.Transpose(values, perm=[1, 0, 2]), *weights, bias, hidden_size=recall.shape[1])
    return op.Transpose(op.Squeeze(found, op.Constant(value_ints=[1])), perm=[1, 0, 2])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in its plain parts: torch's own would bring guards against rows that see nothing, which cost time."""
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:  # added, which runs faster than choosing
        scores = scores + torch.zeros_like(attention_mask, dtype=scores.dtype).masked_fill(~attention_mask, LEAST)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's own talk on stdout and in logs: what matters of it comes as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
