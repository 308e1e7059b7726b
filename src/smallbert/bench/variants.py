"""Models as a benchmark sees them: something that takes a padded batch and gives scores, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smallbert.errors import UserError
from smallbert.measuring.disk import export_bytes, measure_bytes
from smallbert.measuring.evaluate import predict
from smallbert.model.answering import check_head, order_labels
from smallbert.model.batch import Batch
from smallbert.model.encoder import HEAD, Encoder, fingerprint
from smallbert.model.folders import load_folder
from smallbert.model.modelfiles import load_tokenizer
from smallbert.onnxfile.check import open_session
from smallbert.onnxfile.exactness import is_exact
from smallbert.onnxfile.exported import FILE, INPUTS, check_scores, read_exported, told_of
from smallbert.sources import find_model
from smallbert.texts.data import longest_input, tokenise

if TYPE_CHECKING:
    from smallbert.tasks import Task

CALIBRATED = "onnx-int8-calibrated"
EXPORTS = ("onnx", "onnx-int8", CALIBRATED)


@dataclass(frozen=True)
class Variant:
    """One model: `open(threads)` gives a function from batches to scores."""

    name: str
    runs: str  # torch or onnxruntime
    bytes: int  # of all that running it needs, as on cards
    length: int  # the most tokens it can take
    words: int  # the size of its vocabulary
    tokenizer: Any
    open: Callable[[int], Callable[[Batch], Tensor]]
    kind: str | None  # of its head, as are the next two
    outputs: int
    labels: list[str]
    precision: str | None = None  # what an ONNX file multiplies
    exact: bool = True  # whether this CPU does that without losing any of it


def read_variant(folder: Path | str, name: str | None = None) -> Variant:
    """A model out of a folder: an ONNX export, one of ours, or Hugging Face's."""
    folder = Path(folder)
    if (folder / FILE).is_file():
        return _read_onnx(folder, name or folder.name)
    folder = find_model(str(folder))
    return _from_encoder(load_folder(folder), name or folder.name, measure_bytes(folder)["total"])


def _from_encoder(encoder: Encoder, name: str, size: int) -> Variant:
    head = encoder.head if HEAD in encoder.heads else None
    about = (head.kind, head.outputs, head.labels) if head is not None else (None, 0, [])
    words, length = encoder.backbone.config.vocab_size, longest_input(encoder)
    return Variant(name, "torch", size, length, words, encoder.tokenizer, lambda _: encoder.eval(), *about)


def _read_onnx(folder: Path, name: str) -> Variant:
    about, path = read_exported(folder), folder / "model.onnx"
    tokenizer, size = load_tokenizer(folder), export_bytes(folder)
    if about.length is None or not path.is_file():
        raise UserError(
            f"{folder} is not a complete ONNX export; write it again: smallbert export MODEL --to onnx --out FOLDER"
        )

    def open_one(threads: int) -> Callable[[Batch], Tensor]:
        with told_of(path, "cannot be loaded"):
            run = open_session(path, threads)

        def call(batch: Batch) -> Tensor:
            mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
            every = dict(zip(INPUTS, (batch.input_ids, mask, batch.token_type_ids), strict=True))
            return torch.from_numpy(run({name: every[name].numpy() for name in about.inputs}))

        with told_of(folder, "does not run"):
            ids = torch.ones(1, 1, dtype=torch.long)
            scores = call(Batch(ids, torch.zeros_like(ids), torch.zeros_like(ids), size=1, longest=1))
        check_scores(folder, about, [scores.numpy()])
        return call

    words = len(tokenizer) if tokenizer is not None else 100
    facts = (about.kind, about.outputs, about.labels, about.precision, is_exact(about.precision))
    return Variant(name, "onnxruntime", size, about.length, words, tokenizer, open_one, *facts)


def read_names(text: str, with_task: bool = True) -> list[str]:
    """Names of exports with commas between them, each of them known and such as can be made with or without a task."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in EXPORTS]:
        raise UserError(f"--variants was given {unknown[0]!r}; write one or more of: {', '.join(EXPORTS)}")
    if CALIBRATED in names and not with_task:
        raise UserError(f"--variants {CALIBRATED} finds its ranges on training texts: give --task, such as --task sst2")
    return names


def make_variants(
    folder: Path | str, names: list[str], into: Path, say: Any = None, task: Task | None = None
) -> list[Variant]:
    """Exports of a model, made now, or earlier of the very same model; ranges are found on texts of the task."""
    from smallbert.export import export_int8, export_onnx

    writers = (export_onnx, export_int8, partial(export_int8, calibrate=task))
    makers: dict[str, Callable[..., Any]] = dict(zip(EXPORTS, writers, strict=True))
    model = find_model(str(folder))
    mark = fingerprint(load_folder(model))
    there = [name for name in names if (into / name / FILE).is_file()]
    for name in there:
        about, texts = read_exported(into / name), task.fingerprint if task and name == CALIBRATED else None
        if (about.model, about.calibrated) != (mark, texts):
            raise UserError(
                f"{into / name} holds an export of another model, or of {model.name} before it was trained on, or with "
                "ranges of other texts; remove that folder, or give another --out"
            )
    for name in names:
        if name not in there:
            makers[name](model, into / name, say=say)
    return [read_variant(into / name, name) for name in names]


def predict_variant(variant: Variant, task: Task, split: str, say: Any = None) -> Any:
    """What it says of each example of a split of a task, by the same code for all."""
    check_head(variant, task, variant.name)
    rows = task.split(split)
    stream = tokenise(variant.tokenizer, rows, task.kind, min(task.length, variant.length))
    call, order = variant.open(torch.get_num_threads()), order_labels(variant.labels, task, variant.name)
    reader: Any = _Reader(call if order is None else lambda batch: call(batch)[..., order], task.kind)
    return predict(reader, stream, task, rows, say)


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
