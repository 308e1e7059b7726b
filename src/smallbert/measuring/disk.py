"""What a saved model takes on disk: bytes of the files that running it needs, part by part."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from smallbert.errors import UserError
from smallbert.model.anatomy import FAMILIES
from smallbert.model.folders import describe, read_tensors
from smallbert.model.modelfiles import save_tokenizer

if TYPE_CHECKING:
    from smallbert.model.encoder import Encoder

PARTS = ("embeddings", "encoder", "head", "other")
NEEDED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "encoder.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
)
EXPORTED = (*NEEDED, "model.onnx*", "export.json")


def measure_bytes(folder: Path | str) -> dict[str, int]:
    """The size on disk of the files that running the model needs; the parts add up to the weights.

    "encoder" is the backbone without its embeddings; file headers and a mixture of layers are "other".
    """
    folder = Path(folder)
    files = _matching(folder, NEEDED)
    weights = sorted(path for path in files if path.suffix == ".safetensors")
    if not weights:
        raise UserError(f"{folder} holds no weights; a model folder has a file model.safetensors")
    sizes: dict[str, int] = {}
    for path in weights:
        sizes |= tensor_bytes(path)
    parts, part_of = dict.fromkeys(PARTS, 0), _sorter(folder, list(sizes))
    for name, size in sizes.items():
        parts[part_of(name)] += size
    whole = _size(weights)
    parts["other"] += whole - sum(parts.values())
    return {"total": _size(files), "weights": whole, **parts}


def export_bytes(folder: Path | str) -> int:
    """The same of an ONNX export: the file, what it says about itself, the tokenizer."""
    return _size(_matching(Path(folder), EXPORTED))


def bytes_beside_weights(encoder: Encoder) -> int:
    """What the tokenizer and the description of a model that is not saved yet will take on disk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if encoder.tokenizer is not None:
            save_tokenizer(encoder, folder)
        describe(encoder, folder, "smallbert")
        return _size(_matching(folder, NEEDED))


def tensor_bytes(path: Path) -> dict[str, int]:
    """How many bytes each tensor of a safetensors file takes, from its header."""
    read_tensors(path, only_check=True)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: stop - start for name, (start, stop) in places.items()}


def _matching(folder: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _sorter(folder: Path, names: list[str]) -> Callable[[str], str]:
    """A function that tells which part of the model a stored name belongs to, in our layout or Hugging Face's."""
    row = FAMILIES[_family(folder)]
    # The word embedding shows under which prefix the backbone stands: "backbone.", "bert." or none.
    prefix = next((name.partition(row.words)[0] for name in names if f"{row.words}." in name), "backbone.")
    heads = ("heads", "pooler", f"{prefix}pooler", "head", "classifier", "qa_outputs", row.dense, row.classifier)
    starts = {
        "head": tuple(f"{head}." for head in heads),
        "embeddings": (f"{prefix}{row.words.split('.')[0]}.",),
        "encoder": (prefix,),
    }
    return lambda name: next((part for part, start in starts.items() if name.startswith(start)), "other")


def _family(folder: Path) -> str:
    for path in (folder / "encoder.json", folder / "config.json"):
        if path.is_file():
            about = json.loads(path.read_text(encoding="utf-8"))
            family = about.get("config", about).get("model_type")
            if family in FAMILIES:
                return family
    raise UserError(f"{folder} does not say which kind of model it holds; supported: {', '.join(FAMILIES)}")
