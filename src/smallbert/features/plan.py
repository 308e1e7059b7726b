"""What a store will hold, decided before anything is computed: texts, shards, bytes, and hashes that tell it apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smallbert.errors import UserError
from smallbert.features.parts import ROLE, Name, in_order
from smallbert.features.shards import Shapes, file_bytes, read_about
from smallbert.features.store import FORMAT, KINDS, shard_name, store_name
from smallbert.model.encoder import Encoder
from smallbert.texts.data import STUDENT, Stream, Tokens, tokenizer_key

SHARD = 2**28  # bytes a shard should have, about
SAID = {  # what a store is made of, in the words of a refusal; None where the value itself says nothing
    "model": "the model",
    "tokenizer": "the tokenizer",
    "data": "the texts",
    "length": None,
    "layers": None,
    "tokens": None,
    "dtype": None,
    "scores": None,
    "texts_per_shard": None,
}
OF_TEXTS = ("classify", "regress")  # kinds of heads that score a text as a whole


@dataclass(frozen=True)
class Plan:
    """What will be written, all of it known before the model runs."""

    about: dict[str, Any]  # store.json without shards
    counts: np.ndarray  # how many tokens of each text are kept

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Which texts each shard has."""
        step, total = self.about["texts_per_shard"], len(self.counts)
        return [(start, min(start + step, total)) for start in range(0, total, step)]

    def shapes(self, number: int) -> Shapes:
        """The arrays of a shard."""
        start, stop = self.ranges[number]
        tokens, dtype = int(self.counts[start:stop].sum()), self.about["dtype"]
        rows, made = tokens * len(self.about["layers"]), Shapes()
        if rows and dtype == "int8":
            made["scales"] = ("float16", (rows,))
        if rows:
            made["values"] = (dtype, (rows, self.about["width"]))
        if scores := self.about.get("scores"):
            made["scores"] = ("float32", (stop - start if scores["of"] == "texts" else tokens, scores["classes"]))
        return made

    def bytes(self, number: int) -> int:
        """How long the file of a shard will be."""
        return file_bytes(self.shapes(number))

    @property
    def total(self) -> int:
        """How long all shards will be together."""
        return sum(self.bytes(number) for number in range(len(self.ranges)))

    def is_whole(self, out: Path, number: int) -> bool:
        """Whether a shard of this very store is there; its checksum is looked at when it is read."""
        found = read_about(out / shard_name(number))
        return found is not None and found[0] == self.shapes(number) and found[1]["store"] == self.about["store"]


def plan_store(
    encoder: Encoder,
    stream: Stream,
    *,
    layers: str | Sequence[Name] = "all",
    tokens: str = "all",
    dtype: str = "float16",
    length: int | None = None,
    scores: str = "",
    model: str = "",
    about: dict[str, Any] | None = None,
    shard_bytes: int = SHARD,
    shard_texts: int | None = None,
) -> Plan:
    """Decide what a store of these texts holds; `about` is said in store.json, such as the name of the model.

    `scores` names a head whose scores are kept too, in float32; `layers` may then be none, and the `model` is known by
    a hash of all of it. A shard has at most `shard_texts` texts.
    """
    check_kinds(tokens, dtype)
    if not len(stream):
        raise UserError("there are no texts to store hidden states of")
    view = stream.views[STUDENT]
    counts = view.lengths if tokens == "all" else np.ones(len(view), np.int64)
    facts: dict[str, Any] = {
        "model": model or states_fingerprint(encoder),
        "tokenizer": _digest(tokenizer_key(encoder.tokenizer).encode()),
        "data": tokens_fingerprint(view),
        "length": length,
        "texts": len(view),
        "text_tokens": int(view.lengths.sum()),
        "layers": [] if scores and not layers else _layers(layers, len(encoder.order) + 1),
        "tokens": tokens,
        "dtype": dtype,
        "width": encoder.width,
        "texts_per_shard": len(view),
    }
    if scores:
        head: Any = encoder.heads[scores]
        facts["scores"] = {
            "head": scores,
            "classes": head.outputs,
            "of": "texts" if head.kind in OF_TEXTS else "tokens",
        }
    whole = Plan(facts, counts).bytes(0) / len(view)
    facts["texts_per_shard"] = max(1, min(shard_texts or len(view), len(view), int(shard_bytes / whole)))
    facts["store"] = store_name(facts)
    return Plan({"format": FORMAT, **(about or {}), **facts}, counts)


def check_kinds(tokens: str, dtype: str) -> None:
    """Refuse what is not known."""
    for name, value in (("tokens", tokens), ("dtype", dtype)):
        if value not in KINDS[name]:
            raise UserError(f"{name} was given {value!r}; write one of: {', '.join(KINDS[name])}")


def difference(known: dict[str, Any], wanted: dict[str, Any]) -> str:
    """In what two stores differ: "the model is another one, and dtype is int8, not float16"."""
    said = [
        f"{words} {'differ' if words.endswith('s') else 'differs'}"
        if words
        else f"{name} is {known.get(name)}, not {wanted.get(name)}"
        for name, words in SAID.items()
        if known.get(name) != wanted.get(name) and (name != "texts_per_shard" or known.get("data") == wanted["data"])
    ]
    return ", and ".join(said) or "what store.json says of them differs"


def states_fingerprint(encoder: Encoder) -> str:
    """A short hash of all that decides an encoder's hidden states: not its head, not its mixture, not its history."""
    digest = hashlib.sha256(json.dumps([encoder.base, encoder.order], sort_keys=True, default=str).encode())
    for part in (encoder.backbone, encoder.connections, encoder.stride):
        if part is not None:
            # What decides beside weights which of them are used.
            numbers = [getattr(part, name) for name in ("dilation", "period", "step") if hasattr(part, name)]
            digest.update(str(numbers or "").encode())
            # The same weights compute otherwise in a layer that rounds its inputs too.
            kinds = [(n, type(m).__name__, getattr(m, "activations", None) is True) for n, m in part.named_modules()]
            digest.update(str(kinds).encode())
            for name, tensor in sorted(part.state_dict().items()):
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def tokens_fingerprint(tokens: Tokens) -> str:
    """A short hash of sequences of token numbers."""
    return _digest(*(np.ascontiguousarray(part).data for part in (tokens.ids, tokens.types, tokens.offsets)))


def text_keys(tokens: Tokens) -> np.ndarray:
    """A hash of each sequence by itself, 16 bytes, the last never zero: numpy takes zeros at the end for nothing."""
    ends, ids, types = tokens.offsets.tolist(), tokens.ids.astype(np.int32), tokens.types.astype(np.uint8)
    pieces = (ids[start:stop].tobytes() + types[start:stop].tobytes() for start, stop in pairwise(ends))
    return np.array([hashlib.blake2b(piece, digest_size=15).digest() + b"\1" for piece in pieces], "S16")


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def _layers(wanted: str | Sequence[Name], count: int) -> list[Name]:
    if wanted == "all":
        return list(range(count))
    given = [wanted] if isinstance(wanted, str) else wanted
    named = {f"{part} {layer}" for part in ROLE for layer in range(1, count)}
    parts = [one for one in given if isinstance(one, str) and one in named]
    numbers = [one for one in given if isinstance(one, int) and -count <= one < count]
    if not given or len(parts) + len(numbers) < len(given):
        raise UserError(
            f"layers was given {wanted!r}; write all, or indices of hidden states: 0 is the embedding output, "
            f"1 to {count - 1} the layers, and -1 the last of them"
        )
    return in_order([*(int(number) % count for number in numbers), *parts])
