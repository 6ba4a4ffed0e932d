"""Processes that the kernel is ending."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.system.seam import proc

FIELDS = (
    "4711 (python) {state} 1 4711 4711 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 123 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 3 0"
)


@pytest.mark.parametrize(
    ("state", "flags", "is_dying"),
    [
        ("S", 0x400000, False),
        ("D", 0x400004, True),
        ("D", 0x400200, True),
        ("S", 0x400400, True),
        ("Z", 0x400000, True),
    ],
    ids=["running", "exiting", "core dump", "signalled", "zombie"],
)
def test_flags(state: str, flags: int, *, is_dying: bool) -> None:
    """A process that exits, writes a core dump, was killed, or is a zombie is dying; a running one is not."""
    assert proc.Stat(FIELDS.format(state=state, flags=flags)).is_dying == is_dying


def test_processes() -> None:
    """A running process is not dying; a killed one is, reaped or not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not proc.is_dying(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert proc.is_dying(process.pid)
    assert proc.is_dying(process.pid)
