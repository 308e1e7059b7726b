"""Models as a benchmark sees them: something that takes a padded batch and gives scores, whatever runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smallbert.data import longest_input, tokenise
from smallbert.errors import UserError
from smallbert.measuring.cost import measure_bytes
from smallbert.measuring.evaluate import predict
from smallbert.measuring.metrics import score
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder, fingerprint
from smallbert.model.folders import load_folder
from smallbert.model.modelfiles import load_tokenizer
from smallbert.onnxfile.check import open_session
from smallbert.sources import find_model

if TYPE_CHECKING:
    from smallbert.tasks import Task

EXPORTS = ("onnx", "onnx-int8")


@dataclass(frozen=True)
class Variant:
    """One model: `open(threads)` gives a function from batches to scores."""

    name: str
    runs: str  # torch or onnxruntime
    bytes: int
    length: int  # the most tokens it can take
    words: int  # the size of its vocabulary
    kind: str | None  # of its head
    tokenizer: Any
    open: Callable[[int], Callable[[Batch], Tensor]]
    precision: str | None = None  # what an ONNX file multiplies


def read_variant(folder: Path | str, name: str | None = None) -> Variant:
    """A model out of a folder: an ONNX export, one of ours, or Hugging Face's."""
    folder = Path(folder)
    if (folder / "export.json").is_file():
        return _read_onnx(folder, name or folder.name)
    folder = find_model(str(folder))
    return _from_encoder(load_folder(folder), name or folder.name, measure_bytes(folder)["weights"])


def _from_encoder(encoder: Encoder, name: str, size: int) -> Variant:
    kind = encoder.head.kind if encoder.heads else None
    words = encoder.backbone.config.vocab_size
    return Variant(
        name, "torch", size, longest_input(encoder), words, kind, encoder.tokenizer, lambda _: encoder.eval()
    )


def _read_onnx(folder: Path, name: str) -> Variant:
    about = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    tokenizer, size = load_tokenizer(folder), sum(file.stat().st_size for file in folder.glob("model.onnx*"))
    if "length" not in about or not size:
        raise UserError(
            f"{folder} is no whole ONNX export; write it again: smallbert export MODEL --to onnx --out FOLDER"
        )

    def open_one(threads: int) -> Callable[[Batch], Tensor]:
        run, names = open_session(folder / "model.onnx", threads), about["inputs"]

        def call(batch: Batch) -> Tensor:
            mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
            every = {"input_ids": batch.input_ids, "attention_mask": mask, "token_type_ids": batch.token_type_ids}
            return torch.from_numpy(run({name: every[name].numpy() for name in names}))

        return call

    words = len(tokenizer) if tokenizer is not None else 100
    return Variant(
        name, "onnxruntime", size, about["length"], words, about["kind"], tokenizer, open_one, about.get("precision")
    )


def make_variants(folder: Path | str, names: list[str], into: Path, say: Any = None) -> list[Variant]:
    """Exports of a model, made now, or earlier of the very same model."""
    from smallbert.export import export_int8, export_onnx

    makers, names = {"onnx": export_onnx, "onnx-int8": export_int8}, [name.strip() for name in names]
    if unknown := [name for name in names if name not in makers]:
        raise UserError(f"--variants was given {unknown[0]!r}; write one or more of: {', '.join(makers)}")
    model = find_model(str(folder))
    mark = fingerprint(load_folder(model))
    for name in names:
        about = into / name / "export.json"
        if about.is_file() and json.loads(about.read_text(encoding="utf-8")).get("model") != mark:
            shutil.rmtree(into / name)  # of another model, or of this one before it was trained on
        if not about.is_file():
            makers[name](model, into / name, say=say)
    return [read_variant(into / name, name) for name in names]


def score_variant(variant: Variant, task: Task, split: str, say: Any = None) -> dict[str, Any]:
    """Scores on a split of a task, by the same code for all."""
    if variant.kind != task.kind:
        raise UserError(f"{variant.name} has a head for {variant.kind or 'nothing'}, and {task.name} is to {task.kind}")
    rows = task.split(split)
    stream = tokenise(variant.tokenizer, rows, task.kind, min(task.length, variant.length))
    call = variant.open(torch.get_num_threads())
    reader: Any = _Reader(call, variant.kind)
    return dict(score(task, predict(reader, stream, task, rows, say), rows))


class _Reader:
    """What reading scores wants of an encoder, around any function of batches."""

    def __init__(self, call: Callable[[Batch], Tensor], kind: str):
        self.call, self.head = call, SimpleNamespace(kind=kind)
        self.device, self.training = torch.device("cpu"), False

    def __call__(self, batch: Batch) -> Tensor:
        return self.call(batch)

    def eval(self) -> None:
        """It never trains."""

    def train(self, mode: bool) -> None:
        """It never trains."""
