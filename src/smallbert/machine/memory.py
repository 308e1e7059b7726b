"""Memory that nothing holds any more."""

import ctypes
import sys


def hand_back() -> None:
    """Give freed memory to the system; glibc keeps it for later, in pieces that the next model may not fit in."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
