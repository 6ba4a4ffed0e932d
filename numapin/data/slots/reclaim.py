"""Unlock page-locked memory once no device can be reading it any more.

The memory goes through a quarantine, as slots do. All CUDA calls are made by our own thread or by the next allocation,
never by the finalizer: finalizers run in any thread, at any time, even in the middle of a CUDA-graph capture.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Final

from numapin.system.cuda import CudaRefused, Driver
from numapin.system.pages import PINNED

_LONGEST_PAUSE_S: Final = 1.0
_ENDS_S: Final = 2.0


class ExitLock:
    """A lock for blocks of background threads: `with lock as may_work:`. When Python ends, it waits for the last one.

    A thread that is in torch when the interpreter ends aborts the process: torch takes the GIL again in destructors,
    where Python cannot end the thread. A thread that hangs in the driver must not keep a failed rank alive, so the wait
    is short.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """Memory that is page-locked, registered with the driver for a device, and counted in PINNED.

    `memory` owns it: the last reference unmaps it.
    """

    memory: object
    address: int
    num_bytes: int
    device: int


class Reclaimer:
    """Releases page-locked memory, from a daemon thread that sleeps while there is none."""

    def __init__(self, driver: Driver) -> None:
        from numapin.data.slots.quarantine import Quarantine  # brings torch

        self._driver, self._pid = driver, os.getpid()
        self._dead: SimpleQueue[Locked] = SimpleQueue()  # its put is reentrant, so finalizers may call it
        self._lock = ExitLock()
        self._quarantine: Quarantine[Locked] = Quarantine(lambda: driver)
        self._passed: list[Locked] = []
        Thread(target=self._run, name="numapin-reclaim", daemon=True).start()

    def add(self, locked: Locked) -> None:
        """Take memory that nothing refers to any more; for finalizers, in any thread. A no-op in a forked child."""
        if os.getpid() == self._pid:
            self._dead.put(locked)

    def release_unused(self) -> bool:
        """Release memory that no device can be using, and return whether some has to wait. Never raises.

        It never blocks, except on drivers before R555: they have no context events, so it waits for the devices. While
        torch captures a CUDA graph, the memory waits for its end. When Python ends, nothing is released.
        """
        with self._lock as may_work:
            if not may_work:
                return False
            with suppress(Empty):
                while True:
                    self._quarantine.admit(self._dead.get_nowait())
            with suppress(CudaRefused):
                self._passed += self._quarantine.passed()
                while self._passed and not self._lock.is_over:
                    locked = self._passed[-1]
                    self._driver.unregister(locked.device, locked.address)
                    PINNED.remove(locked.num_bytes)
                    self._passed.pop()
                    del locked  # the last reference, which unmaps: not after the lock is released
            return bool(self._passed or self._quarantine.is_in_use)

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            with suppress(Empty):
                self._dead.put(self._dead.get(timeout=pause_s))  # wait for one, and leave it to release_unused
            pause_s = min(2 * (pause_s or 0.001), _LONGEST_PAUSE_S) if self.release_unused() else None


def reclaimer(driver: Driver) -> Reclaimer:
    """Return this process's reclaimer."""
    return _of_process(driver, os.getpid())


@cache
def _of_process(driver: Driver, _pid: int) -> Reclaimer:
    return Reclaimer(driver)
