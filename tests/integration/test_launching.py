"""The tests' own way to wait for several processes: nothing is left of them if they take too long."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import all_ended
from tests.integration.seam import proc
from tests.waiting import gone, wait_until

if TYPE_CHECKING:
    from pathlib import Path

STAYS = "echo 'it stays'; setsid sleep 300 & echo $! >&2; wait"
ENDS = "echo 'it ends'; echo why >&2; exit 3"


def _started(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("first", ["stays", "ends"])
def test_processes_that_take_too_long(first: str) -> None:
    """All of them end with what they started, their pipes are closed, and the failure shows the output of each."""
    processes = [_started(text) for text in ((STAYS, ENDS) if first == "stays" else (ENDS, STAYS))]
    stays, ends = processes if first == "stays" else reversed(processes)
    assert wait_until(lambda: proc.descendants(stays.pid, proc.children_of()), limit_s=20)
    assert wait_until(lambda: ends.poll() is not None, limit_s=20)
    with pytest.raises(pytest.fail.Exception) as failure:
        all_ended(*processes, limit_s=1)
    said = str(failure.value)
    assert "it stays" in said
    assert "had ended with 3\nit ends\n\nwhy\n" in said
    assert all(process.poll() is not None for process in processes)
    assert all(pipe is not None and pipe.closed for process in processes for pipe in (process.stdout, process.stderr))
    (pid,) = [int(line) for line in said.splitlines() if line.isdigit()]
    assert wait_until(lambda: gone(pid), limit_s=10)


def test_a_process_that_writes_much_does_not_stop_those_that_wait_for_it(tmp_path: Path) -> None:
    """All pipes are read at the same time."""
    os.mkfifo(tmp_path / "fifo")
    waits = _started(f"read line < {tmp_path}/fifo && echo $line")
    writes = _started(f"head -c 1000000 /dev/zero && echo written > {tmp_path}/fifo")
    first, second = all_ended(waits, writes, limit_s=30)
    assert (first.status, first.out, second.status, len(second.out)) == (0, "written\n", 0, 1_000_000)
