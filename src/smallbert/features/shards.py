"""One file of a store: safetensors, with a header of fixed length that holds a checksum of all that follows it.

Its length is known before anything is computed, equal content makes equal bytes, and its arrays can be memory-mapped.
"""

from __future__ import annotations

import json
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from smallbert.errors import RunError
from smallbert.machine.files import write_file

HEADER = 1024  # bytes before the first array: eight that say how long the rest is, JSON, spaces
PIECE = 2**23  # bytes read at a time for a checksum
TYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "int32": "I32"}
DTYPES = {name: dtype for dtype, name in TYPES.items()}
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # {"values": ("float16", (rows, width))}, in the order of the file


def file_bytes(shapes: Shapes) -> int:
    """How long the file of such arrays is."""
    return HEADER + sum(_bytes(dtype, shape) for dtype, shape in shapes.values())


def write_arrays(path: Path, arrays: dict[str, np.ndarray], about: dict[str, str]) -> None:
    """Write arrays and a few words about them into a file that appears whole or not at all."""
    checksum = 0
    for array in arrays.values():
        checksum = zlib.crc32(_raw(array), checksum)
    shapes: Shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    header = _header(shapes, {**about, "crc32": f"{checksum:08x}"})

    def write(aside: Path) -> None:
        with aside.open("wb") as file:
            file.write(header)
            for array in arrays.values():
                file.write(_raw(array))

    write_file(path, write)


def read_about(path: Path) -> tuple[Shapes, dict[str, str]] | None:
    """What the header says; None where the file is gone, cut, or not one of ours."""
    try:
        with path.open("rb") as file:
            header, size = file.read(HEADER), path.stat().st_size
        entries: dict[str, Any] = json.loads(header[8:])
        about = entries.pop("__metadata__")
        shapes: Shapes = {name: (DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in entries.items()}
        return (shapes, about) if _header(shapes, about) == header and size == file_bytes(shapes) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def checksum_of(path: Path) -> str:
    """The checksum (crc32) of all behind the header, read piece by piece."""
    checksum = 0
    with path.open("rb") as file:
        file.seek(HEADER)
        while piece := file.read(PIECE):
            checksum = zlib.crc32(piece, checksum)
    return f"{checksum:08x}"


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, memory-mapped."""
    found = read_about(path)
    if found is None:
        raise RunError(f"{path} is missing, truncated or not a file of a store")
    arrays: dict[str, np.ndarray] = {}
    offset = HEADER
    for name, (dtype, shape) in found[0].items():
        # Copy on write: nothing is ever written, but torch warns of arrays that cannot be.
        arrays[name] = np.memmap(path, dtype, "c", offset, shape)
        offset += _bytes(dtype, shape)
    return arrays


def _raw(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * prod(shape)


def _header(shapes: Shapes, about: dict[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name, (dtype, shape) in shapes.items():
        stop = start + _bytes(dtype, shape)
        entries[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode().ljust(HEADER - 8)
    return len(text).to_bytes(8, "little") + text
