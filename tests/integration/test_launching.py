"""The tests' own way to wait for several processes: nothing is left of them if they take too long."""

from __future__ import annotations

import subprocess

import pytest

from numapin.system import proc
from tests.integration.launching import all_ended
from tests.waiting import gone, wait_until

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
