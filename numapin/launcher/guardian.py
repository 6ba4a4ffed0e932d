"""The guardian: a small process that ends what ranks started if the launcher is killed.

When a launcher ends, the kernel ends its ranks, but not what they started. A launcher that gets SIGKILL cannot do that
itself. So it has started a guardian, which sleeps until the launcher has ended, and then kills what is left of the
ranks. In all other cases the launcher ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress

from numapin.errors import MachineError
from numapin.rank import handover
from numapin.system import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from typing import Final

LOOK_S: Final = 0.05
"""Seconds between two looks at running processes. pidfds would need Linux 5.3."""
DEATH_S: Final = 30
"""Seconds to wait for killed processes before others replace them: giving back GPU memory takes seconds, and the new
ranks need it. A process that still exists after this time may never end."""
_PATIENCE_S: Final = 6
"""Seconds in which what ranks started may end by itself: torch's DataLoader workers look for their parent every 5 s,
and then remove their temporary files."""
_OF_RANKS: Final = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")  # a launcher has NUMAPIN_RUN_DIR, too


def main() -> None:
    """Kill the ranks of a launcher that is ending, and what they started.

    The arguments are the launcher's process id, the folder of its run, and the descriptor of the folder's lock, if it
    has one. All signals are blocked: the launcher ends its guardian by SIGKILL, so that Ctrl-C, or a scheduler that
    signals all processes of a job, does not end it first.

    This process has inherited the lock. So no other launcher sweeps the folder, or a nested run's in it, before this
    has ended.
    """
    launcher, folder, locks = int(sys.argv[1]), sys.argv[2], [*map(int, sys.argv[3:])]
    while os.getppid() == launcher:  # a caller of spawn may have closed all files that it did not open
        time.sleep(LOOK_S)
    for lock in locks:  # a run whose launcher has ended does not count as active
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    # The shims have recorded the process ids and start times of their ranks; those of the last round count.
    rounds: dict[int, dict[int, int]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # a full disk, or a cleaner of temporary files
        for path in handover.records(folder):
            record = json.loads(handover.read_text(path))
            rounds.setdefault(record["restart"], {})[record["pid"]] = record["start"]
    ranks = rounds[max(rounds)] if rounds else {}

    def left() -> list[int]:
        # While a session has a process, the kernel gives the id of its leader to no other process. So if another
        # process has that id, nothing is left of the session.
        led = [pid for pid, start in ranks.items() if proc.is_running(pid, start) or not proc.is_running(pid)]
        return of_ranks(led, folder)

    kill_after(time.monotonic() + _PATIENCE_S, left)


def of_ranks(sessions: Collection[int], folder: str) -> list[int]:
    """Return the processes in these sessions of ranks, and those that ranks of the run with this folder have detached.

    These have left the session; the environment that they inherited identifies them. Environments of processes that
    wait in the kernel are not read: the read could wait as long. Returns none if /proc cannot be read.
    """
    try:
        found = [*proc.processes()]
    except (OSError, MachineError):
        return []
    return [pid for pid, stat in found if stat.session in sessions or (stat.state != "D" and _is_marked(pid, folder))]


def _is_marked(pid: int, folder: str) -> bool:
    try:
        environ = proc.environment_of(pid) or {}
    except OSError:
        return False
    return environ.get("NUMAPIN_RUN_DIR") == folder and all(name in environ for name in _OF_RANKS)


def ask(pids: Iterable[int], number: int) -> None:
    """Send processes a signal, and let stopped ones continue to handle it."""
    for pid in pids:
        try:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            pass


def kill_after(deadline_s: float, find: Callable[[], list[int]]) -> None:
    """Wait until `find` returns no process; from the deadline (monotonic) on, kill what it returns."""
    while left := find():
        now_s = time.monotonic()
        if now_s >= deadline_s + DEATH_S:
            return
        if now_s >= deadline_s:
            ask(left, signal.SIGKILL)
        time.sleep(LOOK_S)
