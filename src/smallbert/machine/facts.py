"""What numbers were measured on: the machine, and the versions of what ran there."""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from smallbert import __version__

GPU_PART = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "onnxruntime")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number; nothing is imported for it."""
    found = {"python": platform.python_version(), "smallbert": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the numbers were measured on; the host's name is left out, and torch is asked only if already imported.

    Of a GPU that is shared by parts, the part too, since random numbers may depend on how many processors torch sees.
    """
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    part = os.environ.get(GPU_PART) if gpu else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": cores,
        "memory_gb": _memory(),
        "gpu": gpu,
        **({"gpu_per_cent": float(part)} if part else {}),
    }


def cpu_maker() -> tuple[str, int]:
    """Who made the CPU, and which family of theirs it is, where the system says so: ("AuthenticAMD", 26)."""
    family = _cpu_line("cpu family")
    return _cpu_line("vendor_id") or platform.processor(), int(family) if family.isdecimal() else 0


def _cpu() -> str:
    """Its name, and what tells apart those of one name: "AMD EPYC, family 26, model 2"."""
    name, family, model = (_cpu_line(line) for line in ("model name", "cpu family", "model"))
    which = f", family {family}, model {model}" if family and model else ""
    return f"{name}{which}" if name else platform.processor() or platform.machine()


def _cpu_line(name: str) -> str:
    """What the system says of the first CPU; nothing, where it has no such list."""
    try:
        found = re.search(rf"^{name}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1).strip() if found else ""


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None
