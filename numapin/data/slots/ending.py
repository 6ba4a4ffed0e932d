"""Let background threads come to rest before Python ends.

A thread that is in torch when the interpreter ends aborts the process: torch takes the GIL again in destructors, where
Python cannot end the thread. A thread that hangs in the driver must not keep a failed rank alive, so the wait is short.
"""

from __future__ import annotations

import atexit
import os
from threading import Lock
from typing import Final

_ENDS_S: Final = 2.0


class ExitLock:
    """A lock for such blocks: `with lock as may_work:`. When Python ends, it waits for the block in progress."""

    def __init__(self) -> None:
        self._lock, self._pid = Lock(), os.getpid()
        self.is_over = False
        atexit.register(self._end)

    def __enter__(self) -> bool:
        """Return whether the block may do anything."""
        self._lock.acquire()
        return not self.is_over

    def __exit__(self, *_: object) -> None:
        """Let the next one in."""
        self._lock.release()

    def _end(self) -> None:
        if os.getpid() == self._pid:  # a child that the user forked may have inherited a held lock
            self.is_over = True
            if self._lock.acquire(timeout=_ENDS_S):
                self._lock.release()
