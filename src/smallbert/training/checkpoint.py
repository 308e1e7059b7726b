"""The whole state of a training phase as tensors and JSON, so that a killed run goes on as if it had never stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from smallbert.machine.files import write_folder, write_json
from smallbert.model.modelfiles import write_tensors
from smallbert.training.phase import Phase

STATE = "state.json"  # in the folder of a checkpoint


def gather_state(phase: Phase) -> dict[str, Tensor]:
    """All training state as one dictionary of tensors, by name."""
    state = {f"encoder.{name}": tensor for name, tensor in phase.encoder.state_dict().items()}
    state |= {f"modules.{name}": tensor for name, tensor in phase.modules.state_dict().items()}
    assert phase.optimiser is not None
    for number, entry in phase.optimiser.state_dict()["state"].items():
        for name, value in entry.items():
            state[f"optimiser.{number}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return state


def save_checkpoint(phase: Phase, folder: Path, key: str) -> None:
    """Save the state beside the last one, then take its place."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, Any]] = set()
    for name, tensor in gather_state(phase).items():
        spot = (tensor.data_ptr(), tensor.shape)
        tensors[name] = tensor.detach().cpu().contiguous() if spot not in seen else tensor.detach().cpu().clone()
        seen.add(spot)
    with write_folder(folder) as aside:
        write_tensors(aside / "state.safetensors", tensors)
        about = {"step": phase.step, "total": phase.total, "key": key, "notes": phase.notes, "traces": phase.traces}
        about["seconds"] = phase.earlier + time.monotonic() - phase.begun
        write_json(aside / STATE, about)


def read_about(file: Path) -> dict[str, Any] | None:
    """What was written down of kept training, its key at least; None where that is not there or not whole."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and isinstance(about.get("key"), str) else None


def load_checkpoint(phase: Phase, folder: Path, key: str) -> bool:
    """Go on from a checkpoint of the same work; False where there is none, or none that is whole."""
    about = read_about(folder / STATE)
    if about is not None and (about["key"] != key or about.get("total") != phase.total):
        return False  # another recipe, another data set or another length of training
    try:
        tensors = load_file(folder / "state.safetensors") if about is not None else None
    except FileNotFoundError:
        return False
    except (OSError, ValueError, SafetensorError):
        tensors = None
    if about is None or tensors is None:
        if (folder / STATE).exists():
            phase.notes.append("the last checkpoint was incomplete, so the phase started again")
        return False
    parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "modules": {}, "optimiser": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    phase.encoder.load_state_dict(parts["encoder"])
    phase.modules.load_state_dict(parts["modules"])
    assert phase.optimiser is not None
    whole = phase.optimiser.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimiser"].items():
        number, _, entry = name.partition(".")
        state.setdefault(int(number), {})[entry] = tensor
    phase.optimiser.load_state_dict({**whole, "state": state})
    phase.step, phase.traces = about["step"], about["traces"]
    phase.earlier = about.get("seconds", 0.0)  # which older checkpoints do not have
    return True
