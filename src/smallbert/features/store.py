"""A store: hidden states of many texts on disk, memory-mapped, read a few texts at a time in any order.

A folder holds store.json, lengths.safetensors (how many tokens of each text are kept) and shards of equally many
texts. The rows of a text stand together, layer after layer and token after token, so that few bytes are read in vain
whether one layer is wanted or all of them. Beside them, or alone, there may be a head's scores. Each text is also known
by a key of its own, by which it is found again among others and in another order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smallbert.errors import RunError, UserError
from smallbert.features.shards import checksum_of, map_arrays, read_about

FORMAT = 1
MANIFEST = "store.json"
LENGTHS = "lengths.safetensors"
KINDS = {"tokens": ("all", "first", "mean"), "dtype": ("float32", "float16", "int8")}
REPAIR = "delete it if it is there, and repeat the command that made the store: only what is missing is written"
FACTS = (  # what a store is known by
    "model",
    "tokenizer",
    "data",
    "length",
    "texts",
    "text_tokens",
    "layers",
    "tokens",
    "dtype",
    "width",
    "texts_per_shard",
    "scores",
)
AGAIN = "delete the folder {} and repeat the command that made the store"
KEYS = ("store", "model", "data", "texts", "layers", "tokens", "dtype", "width", "texts_per_shard", "shards")


def many(count: int, what: str) -> str:
    """A number of things: "1 shard", "2 shards"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def shard_name(number: int) -> str:
    """What the file of a shard is called."""
    return f"{number:05d}.safetensors"


def row_places(begin: np.ndarray, tokens: np.ndarray, layers: np.ndarray, first: bool = False) -> np.ndarray:
    """In which row each token of each layer stands, given where texts begin and how many tokens they have.

    row_places([0, 6], [3, 1], [0, 1])  ->  [[0, 1, 2, 6], [3, 4, 5, 7]]
    """
    many = np.ones_like(tokens) if first else tokens
    within = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
    return (np.repeat(begin, many) + within)[None] + layers[:, None] * np.repeat(tokens, many)[None]


@dataclass
class Store:
    """An opened store.

    >>> store = open_store("states")
    >>> store.read([7, 2]).shape      # (layers, tokens of text 7 and then of text 2, width)
    """

    path: Path
    about: dict[str, Any]
    counts: np.ndarray  # how many tokens of each text are kept
    verify: bool = True
    _shards: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Find where in its shard each text begins."""
        before = np.cumsum(self.counts) - self.counts
        self.starts = before - before[np.arange(len(self.counts)) // self.per_shard * self.per_shard]

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def layers(self) -> list[int | str]:
        """The numbers of the hidden states it holds, 0 the embedding output, and the names of parts of layers."""
        return list(self.about["layers"])

    @property
    def per_shard(self) -> int:
        """How many texts a shard has."""
        return int(self.about["texts_per_shard"])

    @property
    def bytes(self) -> int:
        """The length of all shards together."""
        return sum(shard["bytes"] for shard in self.about["shards"])

    @property
    def kind(self) -> torch.dtype:
        """In what precision states are read."""
        return torch.float16 if self.about["dtype"] == "float16" else torch.float32

    def read(
        self,
        index: Any,
        layers: Sequence[int | str] | None = None,
        first: bool = False,
        out: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of some texts, one behind the other: (layers, tokens, width), float32 or float16 as stored.

        `layers` are numbers of hidden states and names of parts, all that are there by default; `first` reads first
        tokens only. With `out`, (layers, places, width), the tokens are put into its `columns` instead, those of a text
        side by side.
        """
        index = np.asarray(index, np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"this store holds texts 0 to {len(self) - 1}")
        held = {number: place for place, number in enumerate(self.layers)}
        wanted = np.array([held[number] for number in (self.layers if layers is None else layers)])
        tokens = self.counts[index]
        if not first and tokens.max(initial=0) > 1:
            return self._read_whole(index, wanted, out, columns)
        rows = torch.from_numpy(row_places(self.starts[index] * len(held), tokens, wanted, first))
        shard_of = np.repeat(index // self.per_shard, 1 if first else tokens)
        if out is None:
            out = torch.empty(len(wanted), rows.shape[1], self.about["width"], dtype=self.kind)
        for arrays, here in self._shards_with(shard_of):
            chosen = rows[:, here].flatten()
            found = arrays["values"].index_select(0, chosen)
            if "scales" in arrays:
                found = found * arrays["scales"].index_select(0, chosen).float().unsqueeze(1)
            places = (here if columns is None else columns[here]).numpy()
            # numpy copies whole rows, torch number by number: four times slower.
            out.numpy()[:, places] = found.view(len(wanted), len(here), -1).to(out.dtype).numpy()
        return out

    def _read_whole(self, index: np.ndarray, wanted: np.ndarray, out: Tensor | None, columns: Tensor | None) -> Tensor:
        """All tokens of some texts, each text copied at once since its rows stand together: five times as fast."""
        tokens, held, width = self.counts[index], len(self.layers), self.about["width"]
        begins = np.cumsum(tokens) - tokens
        if out is None:
            out = torch.empty(len(wanted), int(tokens.sum()), width, dtype=self.kind)
        if columns is not None:
            begins = columns.numpy()[begins]
        some = None if np.array_equal(wanted, np.arange(held)) else torch.from_numpy(wanted)
        for text, count, to in zip(index.tolist(), tokens.tolist(), begins.tolist(), strict=True):
            arrays, start = self._shard(text // self.per_shard), int(self.starts[text]) * held
            parts = {name: array[start : start + held * count] for name, array in arrays.items() if name != "scores"}
            found = parts["values"].view(held, count, width)
            if "scales" in parts:
                found = found * parts["scales"].float().view(held, count, 1)
            out[:, to : to + count].copy_(found if some is None else found.index_select(0, some))
        return out

    def read_scores(self, index: Any, out: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """The head's scores of some texts, one behind the other: (texts or their tokens, classes); as in `read`."""
        index, about = np.asarray(index, np.int64), self.about["scores"]
        rows, shard_of = index % self.per_shard, index // self.per_shard
        if about["of"] == "tokens":
            rows = row_places(self.starts[index], self.counts[index], np.zeros(1, np.int64))[0]
            shard_of = np.repeat(shard_of, self.counts[index])
        if out is None:
            out = torch.empty(len(rows), about["classes"])
        places = torch.from_numpy(rows)
        for arrays, here in self._shards_with(shard_of):
            spots = here if columns is None else columns[here]
            out.numpy()[spots.numpy()] = arrays["scores"].index_select(0, places[here]).numpy()
        return out

    def check(self, number: int) -> str:
        """What is wrong with a shard, read from end to end; nothing if it is as it was written."""
        shard = self.about["shards"][number]
        path = self.path / shard["file"]
        found = read_about(path)
        if found is None or path.stat().st_size != shard["bytes"]:
            return f"{path} is missing, truncated or has a damaged header; {REPAIR}"
        if found[1]["crc32"] != shard["crc32"] or found[1]["store"] != self.about["store"]:
            return f"{path} belongs to another store, or its header is damaged; {REPAIR}"
        if (now := checksum_of(path)) != shard["crc32"]:
            return f"{path} is damaged: its checksum is {now}, not {shard['crc32']} as when it was written; {REPAIR}"
        return ""

    def _shards_with(self, shard_of: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Each shard of those that rows stand in, and which rows these are."""
        for number in np.unique(shard_of):
            yield self._shard(int(number)), torch.from_numpy(np.flatnonzero(shard_of == number))

    def _shard(self, number: int) -> dict[str, Tensor]:
        """The arrays of a shard; its checksum is looked at the first time."""
        if number not in self._shards:
            if self.verify and (wrong := self.check(number)):
                raise RunError(wrong)
            found = map_arrays(self.path / shard_name(number))
            self._shards[number] = {name: torch.from_numpy(array) for name, array in found.items()}
        return self._shards[number]


def open_store(path: Path | str, verify: bool = True, whole: bool = True) -> Store:
    """Open a finished store; shards that are gone or have another length are named at once, unless not `whole`.

    With `verify`, each shard's checksum is compared when the shard is first read.
    """
    path = Path(path)
    about = read_manifest(path)
    if about is None:
        raise UserError(f"{path} holds no store of hidden states: there is no {MANIFEST} in it")
    if not about["shards"]:
        total = -(-about["texts"] // about["texts_per_shard"])
        written = sum((path / shard_name(number)).is_file() for number in range(total))
        raise UserError(
            f"the store in {path} is not finished: it has {written:,} of {many(total, 'shard')}; build it again with "
            "the same command, which continues"
        )
    for shard in about["shards"] if whole else ():
        file = path / shard["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes instead of {shard['bytes']:,}"
            raise RunError(f"{file} {found}; {REPAIR}")
    lengths = path / LENGTHS
    if not is_sound(lengths, about["store"]):
        raise RunError(f"{lengths} is missing or damaged; {REPAIR}")
    return Store(path, about, np.array(map_arrays(lengths)["lengths"], np.int64), verify)


def is_sound(file: Path, store: str) -> bool:
    """Whether a file of this store is there and as it was written; all of it is read."""
    known = read_about(file)
    return known is not None and known[1]["store"] == store and checksum_of(file) == known[1]["crc32"]


def read_keys(path: Path) -> np.ndarray:
    """The key of each text of a store, finished or not (see plan.text_keys)."""
    return np.array(map_arrays(path / LENGTHS)["keys"]).view("S16")[:, 0]


def store_name(about: dict[str, Any]) -> str:
    """A short hash of all that decides what is in a store."""
    facts = {name: about[name] for name in FACTS if name in about}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(path: Path) -> dict[str, Any] | None:
    """What store.json says, finished or not; None where there is none."""
    file = path / MANIFEST
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError("it holds no JSON object")
        known = about["format"]
        if known == FORMAT:
            parts = [(about, KEYS), *((shard, ("file", "bytes", "crc32")) for shard in about.get("shards", ()))]
            for missing in (name for part, names in parts for name in names if name not in part):
                raise ValueError(f"it has no {missing!r}")
            if store_name(about) != about["store"]:
                raise ValueError("its content is not what was written")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); {AGAIN.format(path)}") from None
    if known != FORMAT:
        raise UserError(f"{file} has format {known}; this version reads {FORMAT}; {AGAIN.format(path)}")
    return dict(about)
