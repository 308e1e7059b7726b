"""Giving an encoder another backbone: shapes first, and the values that all new backbones can take from the old one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.errors import UserError
from smallbert.model.anatomy import anatomy, layers, part, replace_module, words
from smallbert.model.encoder import HEAD, Encoder, new_backbone, plain_config, skeleton
from smallbert.model.heads import Head, initialise
from smallbert.model.words import drop_word_head


def replace_backbone(encoder: Encoder, new: Encoder) -> None:
    """Let an encoder have the backbone of another one; its heads keep their kind and classes, in the new width."""
    device = encoder.device
    encoder.backbone, encoder.pooler, encoder.packable = new.backbone, new.pooler, new.packable
    encoder.order = list(new.order)
    drop_word_head(encoder)
    for name, old in list(encoder.heads.items()):
        if not isinstance(old, Head):
            raise UserError("a pooler reads the layers of the model it was made for; put pool_layers after the new")
        head = Head(old.kind, old.out.out_features, new.backbone.config, old.labels, old.pool)
        if encoder.pooler is not None and head.dense is not None:
            head.dense = encoder.pooler  # type: ignore[assignment]
        encoder.pooler = None
        encoder.heads[name] = head
    encoder.to(device)


def check_bare(encoder: Encoder, name: str) -> None:
    """Refuse to put a new model under what has learned to read the layers of the old one."""
    if not (encoder.mixture is encoder.connections is encoder.stride is None):
        raise UserError(
            f"{name} makes a new model, so what reads its layers comes after it: {name}(…) | mix_layers, not before"
        )


def pooler_of(encoder: Encoder, plan: dict[str, Any] | None = None) -> nn.Module | None:
    """The pretrained dense layer above the last one, in waiting or as part of a head that has taken it over."""
    if HEAD not in encoder.heads:
        return encoder.pooler
    plans = [plan] if plan is not None else [entry["plan"] for entry in encoder.history]
    taken = [one["from_pooler"] for one in plans if "from_pooler" in one]
    return encoder.head.dense if taken[-1:] == [True] else None


def bare(values: dict[str, Any], pooler: bool) -> Encoder:
    """An encoder of a config, its weights not yet set."""
    return skeleton({**values, "pooler": pooler})


def draw_backbone(encoder: Encoder, seed: int) -> None:
    """Draw every weight of a new backbone, and of the heads on it, as its family does."""
    values = plain_config(encoder.backbone.config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drawn = new_backbone(values).state_dict()
        for name, tensor in encoder.backbone.state_dict().items():
            source = drawn[name]
            tensor.copy_(source[tuple(slice(size) for size in tensor.shape)])  # layers may have lost some heads
        if encoder.pooler is not None:
            stem = f"{anatomy(encoder.backbone).pooler}."
            for name, tensor in encoder.pooler.state_dict().items():
                tensor.copy_(drawn[stem + name])
    draw_heads(encoder, seed)


def draw_heads(encoder: Encoder, seed: int, keep_dense: bool = False) -> None:
    """Draw the weights of the heads; a dense layer that came from a pooler may stay."""
    std = getattr(encoder.backbone.config, "initializer_range", 0.02)
    for head in encoder.heads.values():
        assert isinstance(head, Head)
        device, kept = head.out.weight.device, head.dense if keep_dense else None
        if kept is not None:
            head.dense = None
        initialise(head.to("cpu"), std, torch.Generator().manual_seed(seed))
        if kept is not None:
            head.dense = kept
        head.to(device)


def head_shape(encoder: Encoder) -> tuple[int, int]:
    """How many heads a layer has, and how large they are."""
    return head_count(encoder), encoder.width // encoder.backbone.config.num_attention_heads


def head_count(encoder: Encoder) -> int:
    """How many heads a layer has, which may be fewer than its config says; 0 where layers have none."""
    backbone, config = encoder.backbone, encoder.backbone.config
    if not anatomy(backbone).q or not layers(backbone):
        return 0
    out: Any = part(backbone, layers(backbone)[0], "out").module
    whole = getattr(config, "true_hidden_size", encoder.width)  # MobileBERT attends in a bottleneck
    return int(config.num_attention_heads * out.in_features // whole)


def resized(encoder: Encoder, width: int, heads: int, size: int, inner: int) -> Encoder:
    """The bare encoder of the same family and depth with other sizes: `heads` heads of `size`, `inner` neurons.

    Where heads * size is the width, the shape is one that a config can say; else each layer has fewer heads than that.
    """
    config, row = copy.deepcopy(encoder.backbone.config), anatomy(encoder.backbone)
    for name in ("embedding_size", "pooler_hidden_size"):
        if getattr(config, name, None) == config.hidden_size:
            setattr(config, name, width)
    config.hidden_size, config.num_attention_heads = width, width // size
    setattr(config, row.inner, inner)
    new = bare(plain_config(config), encoder.pooler is not None)
    new.order = list(encoder.order)
    if heads * size < width:
        _trim_heads(new, heads, size)
    return new


def _trim_heads(encoder: Encoder, heads: int, size: int) -> None:
    """Leave only so many heads in every layer."""
    backbone, row, rows = encoder.backbone, anatomy(encoder.backbone), heads * size
    for layer in layers(backbone):
        found = {one.path: one for one in (part(backbone, layer, role) for role in ("q", "k", "v", "out"))}
        for path, one in found.items():
            old: Any = one.module
            into, out = (rows, old.out_features) if path == row.out else (old.in_features, rows * one.blocks)
            replace_module(layer, path, nn.Linear(into, out, bias=old.bias is not None))
        for path in row.like_q:
            parent, _, name = path.rpartition(".")
            if (old := getattr(layer.get_submodule(parent), name, None)) is not None:
                replace_module(layer, path, nn.Linear(old.in_features, rows, bias=old.bias is not None))
        for module in layer.modules():  # what some families count by instead of looking at the shape
            for name, value in (("num_attention_heads", heads), ("all_head_size", rows)):
                if hasattr(module, name):
                    setattr(module, name, value)
    if row.style == "mpnet":
        old = backbone.encoder.relative_attention_bias
        backbone.encoder.relative_attention_bias = nn.Embedding(old.num_embeddings, heads)


def check_words(encoder: Encoder, size: int, method: str) -> None:
    """Refuse word embeddings that cannot be had in `size` numbers each."""
    table: Any = getattr(words(encoder.backbone), "weight", None)
    if not isinstance(table, nn.Parameter):
        raise UserError("the word embeddings are stored in few bits already; round them after the student is made")
    if size > table.shape[1]:
        raise UserError(
            f"{method}: the student's word embeddings cannot have {size} dimensions, as the teacher's have "
            f"{table.shape[1]}; write {method}(embed={table.shape[1]}) or fewer"
        )


def reduced_words(encoder: Encoder, size: int) -> Tensor:
    """The word embeddings in `size` numbers each: as they are, or their main directions (PCA without centring)."""
    table: Any = words(encoder.backbone).weight
    table = table.detach().float()
    if size == table.shape[1]:
        return table.clone()
    vectors = torch.linalg.eigh((table.T @ table).double().cpu())[1].flip(1)[:, :size]
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # a direction has no sign of its own
    return table @ (vectors * signs).float().to(table.device)
