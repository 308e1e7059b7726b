"""Whether this CPU multiplies the 8-bit numbers of an ONNX file without losing any; asked without torch and onnx."""

from __future__ import annotations

from functools import cache

import numpy as np

# A file of one MatMulInteger, y = a (uint8) times b (int8), as onnx writes it: servers have no package that could.
PRODUCT = (
    b"\x08\x08"
    b':>\n\x18\n\x01a\n\x01b\x12\x01y"\rMatMulInteger\x12\x01g'
    b"Z\t\n\x01a\x12\x04\n\x02\x08\x02Z\t\n\x01b\x12\x04\n\x02\x08\x03b\t\n\x01y\x12\x04\n\x02\x08\x06"
    b"B\x04\n\x00\x10\n"
)
INEXACT = (
    "Sums of 8-bit products saturate on this CPU (it has no VNNI), so int8 files give other scores here than "
    "elsewhere; `smallbert export MODEL --to onnx` writes one that does not."
)


def is_exact(precision: str | None) -> bool:
    """Whether a file that multiplies so, by its export.json, loses nothing on this CPU."""
    return "int8" not in (precision or "") or are_exact()


@cache
def are_exact() -> bool:
    """Whether the largest 8-bit numbers add up right; CPUs without VNNI add up pairs in 16 bits, which are too few."""
    import onnxruntime

    session = onnxruntime.InferenceSession(PRODUCT, providers=["CPUExecutionProvider"])
    inputs, weights = np.full((64, 256), 255, np.uint8), np.full((256, 64), 127, np.int8)
    found = (sign * session.run(None, {"a": inputs, "b": sign * weights})[0] for sign in (1, -1))
    return all(bool((sums == 256 * 255 * 127).all()) for sums in found)
