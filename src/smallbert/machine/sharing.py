"""One machine shared by several processes: its cores, its memory and its GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from smallbert.machine.facts import GPU_PART

MOST = 8  # processes on one GPU, unless more are asked for
PATIENCE = 30.0  # seconds that the daemon of a shared GPU has to begin or to end
MPS = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def default_jobs(device: str | None) -> int:
    """One run at a time on a CPU, which it fills; several on a GPU."""
    return max(1, min(MOST, cores() // 2)) if _is_gpu(device) else 1


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_gpu(device: str | None) -> bool:
    return device != "cpu" and torch.cuda.is_available()


def is_memory(error: Exception) -> bool:
    """Whether there was too little memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def is_trouble_of_the_process(error: Exception) -> bool:
    """Whether another process might do better: memory, or an error of the GPU, which the next runs would meet too."""
    names = ("cuda", "cublas", "cudnn")
    return is_memory(error) or (isinstance(error, RuntimeError) and any(name in str(error).lower() for name in names))


def doubt_part(device: torch.device) -> str:
    """What to try where a loss is nan in a part of a GPU, since some parts compute wrongly (docs/LOG.md)."""
    part = os.environ.get(GPU_PART, "") if device.type == "cuda" else ""
    return f", in {part} % of a GPU: try without {GPU_PART}" if part not in ("", "100") else ""


@contextmanager
def shared_machine(workers: int, device: str | None) -> Iterator[dict[str, str]]:
    """Environment variables under which so many processes share cores, and the GPU where they run on it."""
    given = os.environ.get("OMP_NUM_THREADS", "")  # other studies may share the machine too: fewer were asked for
    threads = min(max(1, cores() // workers), int(given) if given.isdecimal() and int(given) else cores())
    with shared_gpu(_is_gpu(device)) as environment:
        yield {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"} | environment


@contextmanager
def shared_gpu(wanted: bool = True) -> Iterator[dict[str, str]]:
    """Environment variables under which processes run on one GPU at once instead of in turns, where that can be had.

    None has a part of the GPU of its own, though that is faster: in some parts losses become nan (docs/LOG.md).
    """
    folder, guard = None, None
    try:
        if wanted and shutil.which(MPS) and MPS_FOLDERS[0] not in os.environ:
            folder = tempfile.mkdtemp(prefix="smallbert-mps-")
            guard = _start_mps(folder)
        yield dict.fromkeys(MPS_FOLDERS, folder) if guard and folder else {}
    finally:
        if guard is not None:
            guard.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                guard.wait(PATIENCE)
        elif folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _start_mps(folder: str) -> subprocess.Popen[bytes] | None:
    """Start the daemon and a guard, which ends it when this process closes the guard's input or is gone."""
    environment = {**os.environ, **dict.fromkeys(MPS_FOLDERS, folder)}
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    try:
        started = subprocess.run([MPS, "-d"], stdin=subprocess.DEVNULL, timeout=PATIENCE, **silent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if started.returncode != 0:
        return None
    script = f'read line; echo quit | {MPS}; rm -rf "$0"'
    return subprocess.Popen(["sh", "-c", script, folder], stdin=subprocess.PIPE, start_new_session=True, **silent)
