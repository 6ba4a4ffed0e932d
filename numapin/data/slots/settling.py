"""Settle slots in the background: check where their pages lie, and pin them. Edge (a thread).

Comes in: slots that came back for the first time. Goes out: the same slots, pinned.

Pinning holds locks of the whole driver: a kernel launch of another thread took up to 16 ms meanwhile, instead of 0.3
(measured on an H200). So one thread does it for the whole process, and rests after each slot as long as it took.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_REST_S: Final = 0.05


class Settler:
    """A thread that exists while there is work."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Have a job done; it must not raise. Return False if no thread can be started."""
        with self._lock:
            self._jobs.append(job)
            if self._is_running:
                return True
            try:
                threading.Thread(target=self._run, name="numapin-settle", daemon=True).start()
            except RuntimeError:
                self._jobs.clear()
                return False
            self._is_running = True
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            began_s = time.monotonic()
            job()
            time.sleep(min(time.monotonic() - began_s, _LONGEST_REST_S))


def settler() -> Settler:
    """Return the one of this process."""
    return _of_process(os.getpid())


@cache
def _of_process(_pid: int) -> Settler:
    return Settler()
