"""Wait for other processes and threads, so that no test depends on the speed of the machine.

Input: a condition and a time limit, or a process id. Output: the condition's last value, or whether the process has
ended. The test itself reports a condition that stayed false: `assert wait_until(...), why`.
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
    """Return the value of `condition` as soon as it is true, or its last value when the time is up."""
    end = time.monotonic() + limit_s
    while not (got := condition()) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return got


def gone(pid: int) -> bool:
    """Return whether a process has ended; zombies count as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
