"""Phases that were finished before: kept in a folder each, so that a run that was stopped, or begins alike, goes on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallbert.errors import UserError
from smallbert.machine.files import write_folder, write_json
from smallbert.machine.processes import processes
from smallbert.model.folders import load_folder, save_folder
from smallbert.training.checkpoint import read_about

if TYPE_CHECKING:
    from smallbert.making.run import Outcome

PHASE = "phase.json"  # in the folder of a finished phase
MAY_BE_GONE = "(?: of [0-9a-f]{16}(?: [0-9a-f]{16})?)?"  # what a method has read, behind its settings
REMEMBERED = 4  # beginnings that runs of one process hold in memory


def find_finished(kept: Path, key: str, memory: dict[str, dict[str, Any]] | None = None) -> dict[str, Any] | None:
    """A phase of the same work that was finished before, if there is one."""
    found = (memory or {}).get(key)
    if found is None and (saved := read_record(kept, key)) is not None:
        try:
            found = {**saved, "encoder": load_folder(kept)}
        except (OSError, ValueError, UserError):  # not whole: it is done again
            return None
    if found is None or memory is None:
        return found
    if key not in memory and len(memory) >= REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = found
    return {**found, "encoder": found["encoder"].copy(), "remembered": found["encoder"]}


def read_record(kept: Path, key: str) -> dict[str, Any] | None:
    """What was written down of a finished phase of the same work, if there is one."""
    saved = read_about(kept / PHASE)
    return saved if saved is not None and is_same(saved["key"], key) else None


def is_same(saved: str, key: str) -> bool:
    """Whether two keys are of the same work; a folder that it read and that is gone cannot have changed."""
    return saved == key or re.fullmatch(re.escape(key).replace(r"\)", rf"\){MAY_BE_GONE}"), saved) is not None


def keep_finished(kept: Path, key: str, outcome: Outcome, notes: list[str]) -> None:
    """Save a finished phase, whole at once since others may look for it, then drop what led to it."""
    if not processes().is_main_process:
        return
    counts = [outcome.steps, outcome.epochs, outcome.packed]
    about = {"key": key, "counts": counts, "notes": notes, "seconds": outcome.seconds}
    with write_folder(kept) as aside:
        save_folder(outcome.encoder, aside)
        write_json(aside / PHASE, {**about, "traces": outcome.traces})
    for needed in (".checkpoint", ".states"):
        shutil.rmtree(kept.with_suffix(needed), ignore_errors=True)
