"""`numapin bench` that a signal ends: what was measured is kept, and no process stays."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import NUMAPIN, environment
from tests.integration.seam import proc
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_measured_is_kept(number: signal.Signals, tmp_path: Path) -> None:
    """Table and JSON are marked as partial, the status is the signal's, and the workers have ended.

    Until then, stderr shows the progress and the time that is left, if it is a terminal.
    """
    report = tmp_path / "alloc.json"
    options = ("--sizes", "4K", "--samples", "1", "--repeats", "1000000", "--output", str(report))
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*NUMAPIN, "bench", "alloc", *options], stdout=subprocess.PIPE, stderr=slave, env=environment()
    ) as bench:
        os.close(slave)
        seen = b""
        while b"repeat 3 " not in seen:
            seen += os.read(master, 1 << 16)
        workers = wait_until(lambda: proc.descendants(bench.pid, proc.children_of()), limit_s=60)
        assert workers
        bench.send_signal(number)
        out = bench.communicate()[0].decode()
    seen += os.read(master, 1 << 20)
    os.close(master)
    assert bench.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert wait_until(lambda: all(map(gone, workers)), limit_s=60)
    assert "partial" in out
    assert "reuse memory: " in out.splitlines()[-1]
    written = json.loads(report.read_text())
    assert written["is_complete"] is False
    assert written["verdict"]["text"] == out.splitlines()[-1]
    assert b" left" in seen
    assert f"stopped by {number.name}; the report covers".encode() in seen
