"""Memory that nothing holds any more goes back to the system."""

import re
import sys
from pathlib import Path

import pytest
import torch

from smallbert.machine.memory import hand_back


def held() -> float:
    """Megabytes of memory that this process has from the system."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) / 1000


@pytest.mark.skipif(sys.platform != "linux", reason="how much a process holds is read from /proc")
def test_what_is_freed_between_what_is_kept_goes_back():
    blocks = [torch.ones(25_000 if number % 2 else 250) for number in range(6000)]  # 300 MB in blocks of 100 kB
    before = held()
    kept = blocks[::2]
    del blocks
    stays = held()
    hand_back()
    assert before - held() > 200 and before - stays < 100  # which it would not have done by itself
    assert all(bool((tensor == 1).all()) for tensor in kept)
