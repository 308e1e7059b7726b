"""Memory that nothing holds any more goes back to the system."""

import subprocess
import sys

import pytest
from toys import run, small, toy_task

CODE = """
import re
from pathlib import Path
from smallbert.machine.memory import hand_back

def held():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1000

blocks = [bytearray(b"1" * (100_000 if number % 2 else 1000)) for number in range(4000)]  # 200 MB
before, kept = held(), blocks[::2]
del blocks
freed = held()
hand_back()
print(before - freed, before - held(), all(set(block) == {49} for block in kept))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how much a process holds is read from /proc")
def test_what_is_freed_between_what_is_kept_goes_back():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    by_itself, handed_back, whole = done.stdout.split()
    assert int(by_itself) < 20 and int(handed_back) > 150 and whole == "True"


def test_every_phase_hands_back_what_it_freed(monkeypatch):
    called = []
    monkeypatch.setattr("smallbert.making.run.hand_back", lambda: called.append(1))
    run("head | quantize(8)", small(), toy_task())
    assert len(called) == 2
