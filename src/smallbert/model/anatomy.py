"""Where each family keeps its parts: one table, so that no technique ever spells a module path.

Paths in a row are relative to the backbone (`layers`, `words`) or to one layer (`q` … `down`). A part written
"attn.Wqkv 1/3" is the second third of the rows of a fused matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError

if TYPE_CHECKING:
    from torch import nn

ROLES = ("q", "k", "v", "out", "up", "down")


@dataclass(frozen=True)
class Anatomy:
    """One family: where its parts are, how it is walked, and what its classification head looks like."""

    layers: str
    words: str
    q: str = ""  # an empty path: this family has no such part
    k: str = ""
    v: str = ""
    out: str = ""
    up: str = ""
    down: str = ""
    like_q: tuple[str, ...] = ()  # further matrices whose rows are laid out in heads, as those of q are
    also: tuple[str, ...] = ()  # further matrices of a layer, by patterns such as "ffn.*.dense"
    attended: str = ""  # the module that attention probabilities pass through, where attention is the family's own
    style: str = "bert"  # the row of walk.WALKS that runs it
    offset: bool = False  # positions count from the padding number + 1
    token_types: bool = True
    recordable: bool = True  # its forward stays on the device, so that a CUDA graph can record it
    shared: bool = False  # layers are one module, run again and again
    count: str = "num_hidden_layers"  # the config's name for the number of layers
    inner: str = "intermediate_size"  # the config's name for the number of inner neurons of a layer
    activation: str = "tanh"  # of the classification head
    dense: str = "classifier.dense"  # names in Hugging Face's own classification models; empty: the head has none
    classifier: str = "classifier.out_proj"
    pooler: str | None = None  # a pretrained dense layer of the bare model that the head starts from


_BERT: dict[str, Any] = {
    "layers": "encoder.layer",
    "words": "embeddings.word_embeddings",
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}

FAMILIES: dict[str, Anatomy] = {
    "bert": Anatomy(**_BERT, dense="bert.pooler.dense", classifier="classifier", pooler="pooler.dense"),
    "roberta": Anatomy(**_BERT, offset=True),
    "xlm-roberta": Anatomy(**_BERT, offset=True),
    "electra": Anatomy(**_BERT, activation="gelu"),
    "distilbert": Anatomy(
        layers="transformer.layer",
        words="embeddings.word_embeddings",
        q="attention.q_lin",
        k="attention.k_lin",
        v="attention.v_lin",
        out="attention.out_lin",
        up="ffn.lin1",
        down="ffn.lin2",
        token_types=False,
        count="n_layers",
        inner="hidden_dim",
        activation="relu",
        dense="pre_classifier",
        classifier="classifier",
    ),
    "albert": Anatomy(
        layers="encoder.albert_layer_groups",
        words="embeddings.word_embeddings",
        q="albert_layers.0.attention.query",
        k="albert_layers.0.attention.key",
        v="albert_layers.0.attention.value",
        out="albert_layers.0.attention.dense",
        up="albert_layers.0.ffn",
        down="albert_layers.0.ffn_output",
        style="albert",
        shared=True,
        dense="albert.pooler",
        classifier="classifier",
        pooler="pooler",
    ),
    "mpnet": Anatomy(
        layers="encoder.layer",
        words="embeddings.word_embeddings",
        q="attention.attn.q",
        k="attention.attn.k",
        v="attention.attn.v",
        out="attention.attn.o",
        up="intermediate.dense",
        down="output.dense",
        attended="attention.attn.dropout",
        style="mpnet",
        offset=True,
        token_types=False,
    ),
    "modernbert": Anatomy(
        layers="layers",
        words="embeddings.tok_embeddings",
        q="attn.Wqkv 0/3",
        k="attn.Wqkv 1/3",
        v="attn.Wqkv 2/3",
        out="attn.Wo",
        up="mlp.Wi",
        down="mlp.Wo",
        style="modernbert",
        token_types=False,
        activation="gelu",
        dense="head.dense",
        classifier="classifier",
    ),
    "deberta-v2": Anatomy(
        **{**_BERT, "q": "attention.self.query_proj", "k": "attention.self.key_proj", "v": "attention.self.value_proj"},
        like_q=("attention.self.pos_query_proj", "attention.self.pos_key_proj"),
        attended="attention.self.dropout",
        style="deberta",
        recordable=False,
        activation="gelu",
        dense="pooler.dense",
        classifier="classifier",
    ),
    "mobilebert": Anatomy(
        **_BERT,
        also=("bottleneck.*.dense", "ffn.*.dense", "output.bottleneck.dense"),
        style="mobilebert",
        dense="mobilebert.pooler.dense",
        classifier="classifier",
        pooler="pooler.dense",
    ),
    "bilstm": Anatomy(
        layers="layers", words="embeddings.word_embeddings", style="bilstm", token_types=False, dense="", classifier=""
    ),
}


@dataclass(frozen=True)
class Part:
    """One matrix of a layer: the module that holds it, its path, and which of how many equal row blocks it is."""

    path: str
    module: nn.Module
    block: int = 0
    blocks: int = 1


def anatomy(backbone: Any) -> Anatomy:
    """The row of the backbone's family."""
    family = backbone.config.model_type
    if family not in FAMILIES:
        raise UserError(f"models of type {family!r} are not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[family]


def layers(backbone: Any) -> nn.ModuleList:
    """The layers that exist (a family that shares them has fewer than it runs)."""
    return attrgetter(anatomy(backbone).layers)(backbone)


def words(backbone: Any) -> nn.Module:
    """The word embedding."""
    return attrgetter(anatomy(backbone).words)(backbone)


def part(backbone: Any, layer: nn.Module, role: str) -> Part:
    """Where a layer keeps the matrix of a role, one of q, k, v, out, up, down."""
    path, _, piece = getattr(anatomy(backbone), role).partition(" ")
    if not path:
        raise UserError(f"a model of type {backbone.config.model_type!r} has no part {role!r}")
    block, blocks = map(int, piece.split("/")) if piece else (0, 1)
    return Part(path, attrgetter(path)(layer), block, blocks)


def linears(backbone: Any) -> Iterator[tuple[str, nn.Module]]:
    """Each matrix of the layers once, with its name in the backbone; a fused or a tied matrix comes as one.

    encoder.layer.0.attention.self.query, …, encoder.layer.11.output.dense
    """
    row = anatomy(backbone)
    stem, roles = row.layers, [role for role in ROLES if getattr(row, role)]
    seen: set[int] = set()
    for number, layer in enumerate(layers(backbone)):
        found = [(one.path, one.module) for one in (part(backbone, layer, role) for role in roles)]
        if row.also:
            found += [(p, m) for p, m in layer.named_modules() if any(fnmatch(p, pattern) for pattern in row.also)]
        for path, module in found:
            if id(module) not in seen:
                seen.add(id(module))
                yield f"{stem}.{number}.{path}", module


def replace_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path, and in every other place that is tied to it; it trains where the old one did."""
    old = root.get_submodule(path)
    module.train(old.training)
    for place in [place for place, found in root.named_modules(remove_duplicate=False) if found is old]:
        parent, _, name = place.rpartition(".")
        setattr(root.get_submodule(parent), name, module)


def check_layers(encoder: Any, name: str) -> None:
    """Refuse a model without layers to whatever works on layers."""
    if not encoder.order:
        raise UserError(f"{name} works on layers, and a model of type {encoder.family!r} has none")
