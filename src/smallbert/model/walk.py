"""The one place that runs a backbone: embed, then layer after layer, whatever the family.

Hugging Face's modules do the arithmetic; the order in which they run is ours, so that a technique can skip,
replace or mix layers without knowing any family.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from smallbert.model.anatomy import anatomy, layers, part
from smallbert.model.batch import Batch
from smallbert.model.cpu import faster
from smallbert.model.stride import Stride

Arguments = Callable[[Any], dict[str, Any]]
Route = Callable[[int, Tensor, Callable[[Tensor], Tensor]], Tensor]
Connect = Callable[[int, list[Tensor]], Tensor]
Wanted = Mapping[str, Collection[int]]  # {"hidden": {0, 6}, "q": {5}}: hidden states and layers are counted from 0
Taps = dict[str, dict[int, Any]]


@dataclass
class States:
    """What a walk saw: the embedding output and every layer's output, and what was tapped on the way."""

    hidden: list[Tensor]
    taps: Taps = field(default_factory=dict)  # by part, then by the place of the layer

    @property
    def last(self) -> Tensor:
        """The output of the last layer."""
        return self.hidden[-1]


def walk(
    backbone: Any,
    order: list[int],
    batch: Batch,
    route: Route | None = None,
    connect: Connect | None = None,
    stride: Stride | None = None,
) -> Iterator[Tensor]:
    """Yield the embedding output, then each layer's output, in the order in which `order` runs the layers.

    route(i, hidden, layer) decides what the i-th step does; without one it is layer(hidden). connect(i, states) says
    what comes of it, given all hidden states so far. With a stride the layers see a shortened batch, and what they give
    is spread over all tokens again.
    """
    style = WALKS[anatomy(backbone).style]
    with faster(batch.input_ids):
        hidden = style.embed(backbone, batch)
    yield hidden
    spread = None
    if stride is not None:
        hidden, batch, spread = stride(hidden, batch)
    arguments = style.arguments(backbone, batch, hidden)
    stack = layers(backbone)
    before = [hidden] if connect is not None else []
    for place, number in enumerate(order):
        run = _caller(style, backbone, stack[number], arguments, place == 0, batch)
        hidden = run(hidden) if route is None else route(place, hidden, run)
        if connect is not None:
            before.append(hidden)  # as the layer made it, not as the next one reads it
            hidden = connect(place, before)
        last = place == len(order) - 1
        if last and style.finish is not None:
            hidden = style.finish(backbone, hidden)
        yield hidden if spread is None else spread(hidden, last)


def collect(
    backbone: Any,
    order: list[int],
    batch: Batch,
    route: Route | None = None,
    taps: tuple[str, ...] = (),
    connect: Connect | None = None,
    stride: Stride | None = None,
    depth: int | None = None,
) -> States:
    """Walk over `depth` layers, or all, and keep every hidden state and what `tap` knows of parts (q, k, v, …)."""
    seen: Taps = {}
    wanted = {role: range(len(order)) for role in taps}
    with closing(tap(walk(backbone, order, batch, route, connect, stride), backbone, wanted, seen)) as states:
        return States(list(islice(states, None if depth is None else depth + 1)), seen)


def tap(states: Iterator[Tensor], backbone: Any, wanted: Wanted, seen: Taps) -> Generator[Tensor]:
    """Hand a walk's states on and put into `seen` what is wanted of them on the way.

    "hidden" is a state itself; q, k, v, out, up and down what a layer's matrix puts out; "attention" what a layer
    attends with (an `Attending`), or its probabilities where a family's attention is its own.
    """
    place = 0
    seen.update({role: {} for role in wanted})

    def note(role: str, value: Any) -> None:
        # DeBERTa sends its relative positions through the same matrix afterwards: the first time counts.
        if place in wanted[role] and place not in seen[role]:
            seen[role][place] = value

    with ExitStack() as stack:
        for layer in layers(backbone):
            for role in wanted:
                if role != "hidden":
                    stack.enter_context(_listen(backbone, layer, role, note))
        for place, hidden in enumerate(states):
            if place in wanted.get("hidden", ()):
                seen["hidden"][place] = hidden
            yield hidden


def _listen(backbone: Any, layer: nn.Module, role: str, note: Callable[[str, Any], None]) -> Any:
    """Have a layer tell what one of its parts does, as long as the returned hook lasts."""
    if role != "attention":
        spot = part(backbone, layer, role)
        return spot.module.register_forward_hook(
            lambda module, inputs, output: note(role, output.chunk(spot.blocks, -1)[spot.block])
        )
    if path := anatomy(backbone).attended:
        return attrgetter(path)(layer).register_forward_pre_hook(lambda module, inputs: note(role, inputs[0]))

    def ask(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return inputs, {**named, "show": lambda found: note(role, found)}  # handed on to our attention

    return layer.register_forward_pre_hook(ask, with_kwargs=True)


def _caller(
    style: Style, backbone: Any, layer: nn.Module, arguments: Arguments, first: bool, batch: Batch
) -> Callable[[Tensor], Tensor]:
    def run(hidden: Tensor) -> Tensor:
        with faster(hidden):  # not around the whole walk, which stops at each state while others run
            output = layer(hidden, **arguments(layer))
        output = output[0] if isinstance(output, tuple) else output
        return style.after_first(backbone, hidden, output, batch) if first and style.after_first else output

    return run


@dataclass(frozen=True)
class Style:
    """How one kind of backbone is walked."""

    embed: Callable[[Any, Batch], Tensor]
    arguments: Callable[[Any, Batch, Tensor], Arguments]
    finish: Callable[[Any, Tensor], Tensor] | None = None
    after_first: Callable[[Any, Tensor, Tensor, Batch], Tensor] | None = None


def _positions(backbone: Any, batch: Batch) -> Tensor:
    return batch.position_ids + (backbone.embeddings.padding_idx + 1 if anatomy(backbone).offset else 0)


def _embed(backbone: Any, batch: Batch) -> Tensor:
    extra = {}
    if anatomy(backbone).token_types:  # a model that knows one type only (RoBERTa) may come with a tokenizer of two
        types = batch.token_type_ids
        extra["token_type_ids"] = types if backbone.config.type_vocab_size > 1 else torch.zeros_like(types)
    hidden = backbone.embeddings(input_ids=batch.input_ids, position_ids=_positions(backbone, batch), **extra)
    project = getattr(backbone, "embeddings_project", None)
    return hidden if project is None else project(hidden)


def _embed_albert(backbone: Any, batch: Batch) -> Tensor:
    return backbone.encoder.embedding_hidden_mapping_in(_embed(backbone, batch))


def _embed_deberta(backbone: Any, batch: Batch) -> Tensor:
    return backbone.embeddings(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        token_type_ids=batch.token_type_ids,
        mask=_mask(batch),
    )


def _embed_modernbert(backbone: Any, batch: Batch) -> Tensor:
    return backbone.embeddings(input_ids=batch.input_ids)


def _embed_mobilebert(backbone: Any, batch: Batch) -> Tensor:
    """Each word beside its neighbours; none where the text begins or ends, whatever stands there in the batch."""
    parts = backbone.embeddings
    middle = parts.word_embeddings(batch.input_ids)
    if parts.trigram_input:
        inside = (batch.position_ids > 0).unsqueeze(-1)  # has a word before it
        real = middle * batch.tokens().unsqueeze(-1)
        before = torch.roll(real, 1, 1) * inside
        after = torch.roll(real * inside, -1, 1)  # what came round to the end was a first word, and is none now
        middle = torch.cat([after, middle, before], -1)
    if parts.trigram_input or parts.embedding_size != parts.hidden_size:
        middle = parts.embedding_transformation(middle)
    place, kind = parts.position_embeddings(batch.position_ids), parts.token_type_embeddings(batch.token_type_ids)
    return parts.dropout(parts.LayerNorm(middle + place + kind))


def _mask(batch: Batch) -> Tensor:
    return torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask


def _key_mask(batch: Batch) -> Tensor | None:
    """True where a token may be attended to: (batch, 1, 1, tokens)."""
    return None if batch.attention_mask is None else batch.attention_mask.bool()[:, None, None, :]


def _packing(batch: Batch) -> dict[str, Any]:
    return {"bounds": batch.bounds, "longest": batch.longest} if batch.packed else {}


def _plain_arguments(backbone: Any, batch: Batch, hidden: Tensor) -> Arguments:
    shared = {"attention_mask": _key_mask(batch), **_packing(batch)}
    return lambda layer: shared


def _mpnet_arguments(backbone: Any, batch: Batch, hidden: Tensor) -> Arguments:
    place = batch.position_ids[0]  # the model's own function would go by way of the CPU, which no graph can record
    bucket = backbone.encoder.relative_position_bucket(place[None, :] - place[:, None])
    bias = backbone.encoder.relative_attention_bias(bucket).permute(2, 0, 1)[None].expand(hidden.shape[0], -1, -1, -1)
    mask = torch.zeros_like(batch.input_ids, dtype=hidden.dtype)
    if batch.attention_mask is not None:
        mask = mask.masked_fill(batch.attention_mask == 0, torch.finfo(hidden.dtype).min)
    shared = {"attention_mask": mask[:, None, None, :], "position_bias": bias}
    return lambda layer: shared


def _deberta_arguments(backbone: Any, batch: Batch, hidden: Tensor) -> Arguments:
    shared = {
        "attention_mask": backbone.encoder.get_attention_mask(_mask(batch)),
        "relative_pos": backbone.encoder.get_rel_pos(hidden),
        "rel_embeddings": backbone.encoder.get_rel_embedding(),
    }
    return lambda layer: shared


def _modernbert_arguments(backbone: Any, batch: Batch, hidden: Tensor) -> Arguments:
    def prepare(kind: str) -> dict[str, Any]:
        mask = _key_mask(batch)
        if kind == "sliding_attention" and not batch.packed:
            place = batch.position_ids
            near = (place[:, :, None] - place[:, None, :]).abs() <= backbone.config.sliding_window
            mask = near[:, None] if mask is None else near[:, None] & mask
        rotary = backbone.rotary_emb(hidden, batch.position_ids, kind)
        return {"attention_mask": mask, "position_embeddings": rotary, **_packing(batch)}

    table = {kind: prepare(kind) for kind in set(backbone.config.layer_types)}
    return lambda layer: table[layer.attention_type]


def _deberta_convolution(backbone: Any, before: Tensor, after: Tensor, batch: Batch) -> Tensor:
    conv = backbone.encoder.conv
    return after if conv is None else conv(before, after, _mask(batch))


WALKS: dict[str, Style] = {
    "bert": Style(_embed, _plain_arguments),
    "bilstm": Style(lambda backbone, batch: backbone(batch), _plain_arguments),
    "mobilebert": Style(_embed_mobilebert, _plain_arguments),
    "albert": Style(_embed_albert, _plain_arguments),
    "mpnet": Style(_embed, _mpnet_arguments),
    "deberta": Style(_embed_deberta, _deberta_arguments, after_first=_deberta_convolution),
    "modernbert": Style(
        _embed_modernbert, _modernbert_arguments, finish=lambda backbone, hidden: backbone.final_norm(hidden)
    ),
}
