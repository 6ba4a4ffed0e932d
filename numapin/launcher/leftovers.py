"""Processes that ranks started and that outlive them: find them, and end them before others take their place. Edge.

Comes in: the process ids of ranks, or the folder of a run. Goes out: nothing; the processes have ended, or got SIGKILL.

Each rank leads a session. What it starts stays in that session, in any process group, unless it calls setsid(2); then
the environment that it inherited identifies it. Out of reach: processes that have left the session and either got
another environment or overwrote theirs (setproctitle does so), that run as another user, or in another container.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

DEATH_S: Final = 30
"""Seconds to wait for killed processes before others replace them: giving back GPU memory takes seconds, and the new
ranks need it. A process that still exists after this time may never end."""
_LOOK_S: Final = 0.05
_OF_RANKS: Final = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")  # the launcher sets NUMAPIN_RUN_DIR for itself, too


def in_sessions(leaders: Collection[int]) -> list[int]:
    """Return the processes, other than the leaders, in sessions that ranks of this launcher lead.

    While such a process exists, the kernel gives the leader's id to no other process. So if a process that is not a
    child of this one has that id, nothing is left of the session.
    """
    found = dict(proc.processes())
    reused = {pid for pid in leaders if pid in found and found[pid].parent != os.getpid()}
    sessions = {*leaders} - reused
    return [pid for pid, process in found.items() if process.session in sessions and pid not in sessions]


def detached(folders: Collection[str]) -> list[int]:
    """Return the processes that ranks of the runs with these folders started, in any session."""
    return [pid for pid, _ in proc.processes() if pid != os.getpid() and _is_of_rank(pid, folders)]


def survival(ranks: str) -> str:
    """Return the sentence about ranks that SIGKILL has not ended, e.g. because the kernel waits for a device."""
    return f"{ranks}: still there {DEATH_S} s after SIGKILL; see: cat /proc/PID/stack"


def ranks_left() -> list[int]:
    """Return the ranks of this launcher that have not ended: its children that lead a session."""
    found = dict(proc.processes())
    return [pid for pid, process in found.items() if process.parent == os.getpid() and process.session == pid]


def ask(pids: Iterable[int], number: signal.Signals) -> None:
    """Send processes a signal, and let stopped ones continue to handle it."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)


def kill_after(deadline_s: float, find: Callable[[], list[int]]) -> None:
    """Wait until `find` returns no process; from the deadline (monotonic) on, kill what it returns."""
    while left := find():
        now_s = time.monotonic()
        if now_s >= deadline_s + DEATH_S:
            return
        if now_s >= deadline_s:
            ask(left, signal.SIGKILL)
        time.sleep(_LOOK_S)


def end_detached(folders: Collection[str], grace_s: float) -> None:
    """End what ranks of the runs with these folders started: SIGTERM, and SIGKILL after the grace period."""
    deadline_s = time.monotonic() + grace_s
    ask(detached(folders), signal.SIGTERM)
    kill_after(deadline_s, lambda: detached(folders))


def _is_of_rank(pid: int, folders: Collection[str]) -> bool:
    """Return whether a process has the environment of a rank of these runs."""
    try:
        environ = proc.environment_of(pid) or {}
    except OSError:
        return False
    return environ.get("NUMAPIN_RUN_DIR") in folders and all(name in environ for name in _OF_RANKS)
