"""The end of a run: all of its processes are stopped. Edge.

Comes in: the launcher, and a function that lists what is left of its job. Goes out: nothing is left.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from numapin.bench.harness import remove_leftovers

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Collection

_POLL_S: Final = 0.1
_KILL_S: Final = 10.0  # a process in an uninterruptible wait cannot be killed


def stop(process: subprocess.Popen[bytes], left: Callable[[], Collection[int]], *, grace_s: float) -> None:
    """Send SIGTERM to the launcher's group, and SIGKILL to every process that is left after `grace_s` seconds."""
    _signal_group(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    seen = set(left())
    try:
        while time.monotonic() < deadline_s and (process.poll() is None or left()):
            time.sleep(_POLL_S)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        seen |= _kill_all(left)
        process.wait()
        remove_leftovers(seen)


def _kill_all(left: Callable[[], Collection[int]]) -> set[int]:
    """Kill remaining processes until there are no more, because a dying one may start others. Return all of them."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + _KILL_S
    while (pids := left()) and time.monotonic() < deadline_s:
        killed.update(pids)
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S / 5)
    return killed


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
