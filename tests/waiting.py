"""Waiting for what other processes and threads do, so that no test depends on how fast this machine is.

Comes in: a condition and how long it may take, or a process's number. Goes out: what the condition gave last, or
whether the process is over. What it means that a condition never came, the test says: `assert wait_until(...), why`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PAUSE_S: Final = 0.02


def wait_until(condition: Callable[[], T], *, limit_s: float) -> T:
    """Return what `condition` gives as soon as that is true, or what it gave last when the time is up."""
    end = time.monotonic() + limit_s
    while not (got := condition()) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return got


def gone(pid: int) -> bool:
    """Return whether a process is over; one that nobody has waited for yet is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
