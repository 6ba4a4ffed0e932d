"""A last look at a failed job before its ranks are ended: where each one is, and how full /dev/shm is.

Each Python below the launcher has a file in memory into which a signal makes it write its stack; see
`rank/hook/numapin_hook_errors.py`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.launcher.failure import STACK_SIGNAL
from numapin.rank.signals import masks_of
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

_FILE: Final = "/memfd:numapin-stack"
_LIMIT_S: Final = 0.2
_LOOK_S: Final = 0.002


class LastLook(NamedTuple):
    """The state of a job when the failure was seen."""

    stacks: dict[int, str]  # of ranks that answered, by the process of the rank
    shm_bytes: int | None  # the size of /dev/shm, None if unknown
    shm_used: float | None  # the used share of it, from 0 to 1


def look(pids: Iterable[int]) -> LastLook:
    """Ask running ranks where they are, and wait at most 0.2 s for their answers."""
    shm_bytes = shm_used = None
    with suppress(OSError, ZeroDivisionError):
        shm = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
        shm_bytes = shm.f_blocks * shm.f_frsize
        shm_used = 1 - shm.f_bavail / shm.f_blocks
    asked = {}
    for pid in pids:
        python, file = _python_of(pid)
        masks = masks_of(python) if file else None
        # A process that does not handle the signal would die of it; one that blocks it does not answer.
        if file and masks and (masks.caught & ~masks.blocked) >> (STACK_SIGNAL - 1) & 1:
            with suppress(OSError):
                os.kill(python, STACK_SIGNAL)
                asked[pid] = file
    stacks: dict[int, str] = {}
    deadline_s = time.monotonic() + _LIMIT_S
    while asked and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        for pid, file in [*asked.items()]:
            try:
                text = file.read_text(encoding="ascii", errors="replace")
            except OSError:  # the rank has ended
                del asked[pid]
                continue
            if text and text == stacks.get(pid):  # it has written all of it
                del asked[pid]
            stacks[pid] = text
    return LastLook(stacks, shm_bytes, shm_used)


def _python_of(pid: int) -> tuple[int, Path | None]:
    """Return the rank, or the nearest Python below it, that has such a file; and the file, None if there is none."""
    below = [pid]
    for candidate in below:
        files = proc.open_files(candidate, _FILE)
        if files:
            return candidate, Path(proc.folder_of(candidate), "fd", str(files[0]))
        below += proc.children_in(candidate)
    return pid, None
