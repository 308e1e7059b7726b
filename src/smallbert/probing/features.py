"""Hidden states of every layer, one vector a text, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smallbert.errors import RunError
from smallbert.machine.files import write_file, write_json
from smallbert.model.batch import Batch
from smallbert.model.encoder import Encoder
from smallbert.probing.roles import Roles, arrange
from smallbert.tasks.task import Task
from smallbert.texts.batches import Layout, make_batch, sort_into_batches
from smallbert.texts.data import STUDENT, Stream, tokenise, tokenizer_key

Say = Callable[[str, int, int, str], None]

POOLS: dict[str, Callable[[Batch, torch.Tensor], torch.Tensor]] = {"mean": Batch.mean, "first": Batch.first}
LARGEST = float(np.finfo(np.float16).max)
ABANDONED = 3600.0  # seconds; what a killed run left half written is removed when it is older than this


@dataclass(frozen=True)
class Features:
    """What was read: for each split an array (embedding output and layers, texts, width) of float16, memory-mapped."""

    splits: dict[str, np.ndarray]
    roles: Roles
    notes: list[str]

    @property
    def depth(self) -> int:
        """How many hidden states a text has: one more than there are layers."""
        return len(next(iter(self.splits.values())))

    def rows(self, role: str, layer: int) -> np.ndarray:
        """The vectors of one layer for "fit", "choose" or "score": (texts, width)."""
        split, index = getattr(self.roles, role)
        whole = self.splits[split][layer]
        return whole if len(index) == len(whole) else whole[index]


def read_features(
    encoder: Encoder, task: Task, out: Path | str, *, model: str, pool: str, length: int, say: Say
) -> Features:
    """Features of every split of a task, from disk where they are there; `model` is the fingerprint of the encoder.

    They are in out/features/<key>/<split>.npy, and the key is made of all they depend on.
    """
    facts = facts_of(encoder, task, model, pool, length)
    folder = Path(out) / "features" / digest(facts)
    about = folder / "features.json"
    known = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    notes: dict[str, list[str]] = known.get("notes", {}) if known.get("facts") == facts else {}
    shape = (len(encoder.order) + 1, encoder.width)
    for name, split in task.splits.items():
        path = folder / f"{name}.npy"
        if name in notes and _fits(path, len(split), shape):
            continue
        _clear_abandoned(folder, path.name)
        notes[name] = _write(encoder, task, name, path, pool, length, say)
        write_json(about, {"facts": facts, "notes": notes})
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in task.splits}
    return Features(arrays, arrange(task), [note for name in task.splits for note in notes[name]])


def facts_of(encoder: Encoder, task: Task, model: str, pool: str, length: int) -> dict[str, Any]:
    """All that features depend on."""
    return {
        "model": model,
        "tokenizer": digest(tokenizer_key(encoder.tokenizer)),
        "task": task.fingerprint,
        "texts": {name: digest([split.texts, split.pairs]) for name, split in task.splits.items()},
        "length": length,
        "pool": pool,
    }


def _write(encoder: Encoder, task: Task, split: str, path: Path, pool: str, length: int, say: Say) -> list[str]:
    """Compute the features of one split into a file that appears when it is whole, and give notes on them."""
    stream = tokenise(encoder.tokenizer, task.split(split), task.kind, length)
    notes = list(stream.notes)

    def write(aside: Path) -> None:
        notes.extend(_compute(encoder, stream, pool, aside, f"{task.name}: reading {split} texts", say))

    write_file(path, write)
    return [f"{split}: {note}" for note in notes]


@torch.inference_mode()
def _compute(encoder: Encoder, stream: Stream, pool: str, path: Path, stage: str, say: Say) -> list[str]:
    """Write the pooled hidden states of a stream to a file, and give notes on them."""
    encoder.eval()
    lengths = stream.views[STUDENT].lengths
    shape = (len(encoder.order) + 1, len(stream), encoder.width)
    made = np.lib.format.open_memmap(path, "w+", np.float16, shape)
    done, clipped = 0, 0
    for index in sort_into_batches(lengths, 2**15 if encoder.device.type == "cuda" else 2**11):
        batch = make_batch(stream, index, Layout(False, 0)).to(encoder.device)
        hidden = torch.stack([POOLS[pool](batch, layer.float()) for layer in encoder.states(batch).hidden])
        if not torch.isfinite(hidden).all():
            layer = int((~torch.isfinite(hidden)).flatten(1).any(1).nonzero()[0])
            raise RunError(f"hidden state {layer} of this model has values that are not finite; it cannot be probed")
        clipped += int((hidden.abs() > LARGEST).sum())
        made[:, index] = hidden.clamp(-LARGEST, LARGEST).cpu().numpy()
        done += len(index)
        say(stage, done, len(stream), "")
    made.flush()
    return [f"{clipped} values beyond {LARGEST:.0f} were clipped there"] if clipped else []


def _fits(path: Path, rows: int, shape: tuple[int, int]) -> bool:
    try:
        return np.load(path, mmap_mode="r").shape == (shape[0], rows, shape[1])
    except (OSError, ValueError, EOFError):  # gone, or not what was written
        return False


def _clear_abandoned(folder: Path, name: str) -> None:
    for aside in folder.glob(f".{name}.*"):
        if time.time() - aside.stat().st_mtime > ABANDONED:
            aside.unlink(missing_ok=True)


def digest(value: Any) -> str:
    """Sixteen hex digits that tell values apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def file_name(task: str) -> str:
    """The name of a task as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", task)
