"""The guardian: a small process that ends what ranks started if the launcher is killed.

When a launcher ends, the kernel ends its ranks, but not what they started. The guardian sleeps until the launcher has
ended, and then kills what is left of the ranks. If the launcher can end them itself, it also ends the guardian.
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

LOOK_S: Final = 0.05  # between two looks at running processes; pidfds would need Linux 5.3
DEATH_S: Final = 30
"""Seconds to wait for killed processes before others replace them: giving back GPU memory takes seconds, and the new
ranks need it. A process that still exists after this time may never end."""
_PATIENCE_S: Final = 6
"""Seconds in which what ranks started may end by itself: torch's DataLoader workers look for their parent every 5 s,
and then remove their temporary files."""
_RANK_VARIABLES: Final = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")  # a launcher has NUMAPIN_RUN_DIR, too


def main() -> None:
    """Kill the ranks of a launcher that is ending, and what they started.

    All signals are blocked, so that Ctrl-C, or a scheduler that signals all processes of a job, does not end it first.
    """
    launcher, folder = int(sys.argv[1]), sys.argv[2]
    # The folder's lock is inherited, if there is one: until this has ended, no other launcher sweeps the folder.
    locks = [*map(int, sys.argv[3:])]
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

    These have left the session; the environment that they inherited identifies them.
    """
    found = []
    with suppress(OSError, MachineError):  # /proc cannot be read
        for pid, stat in proc.processes():
            environ = None
            # A process that waits in the kernel could let the read wait as long.
            if stat.session not in sessions and stat.state != "D":
                with suppress(OSError):
                    environ = proc.environment_of(pid)
            is_marked = environ and environ.get("NUMAPIN_RUN_DIR") == folder and environ.keys() >= {*_RANK_VARIABLES}
            if stat.session in sessions or is_marked:
                found.append(pid)
    return found


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
