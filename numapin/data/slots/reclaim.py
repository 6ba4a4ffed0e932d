"""Unlock page-locked memory once no device can be reading it any more.

A copy that the user started with non_blocking=True may still be reading when the last tensor is freed, and torch
records an event only for memory of its own allocator (Copy.cu). So the memory waits for an event of each device's whole
context. All CUDA calls are made by our own thread or by the next allocation, never by the finalizer: finalizers run in
any thread, at any time, even in the middle of a CUDA-graph capture.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from numapin.data.slots.ending import ExitLock
from numapin.system.cuda import CudaRefused, Driver, Event
from numapin.system.pages import PINNED

_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """Memory that is page-locked, registered with the driver for a device, and counted in PINNED.

    `memory` owns it: the last reference unmaps it.
    """

    memory: object
    address: int
    num_bytes: int
    device: int


@dataclass(slots=True)
class _Batch:
    """Memory that was freed before the same events were recorded. Events that have passed are removed."""

    locked: list[Locked]
    events: list[Event]


class Reclaimer:
    """Releases page-locked memory, from a daemon thread that sleeps while there is none."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._pid = driver, os.getpid()
        self._dead: SimpleQueue[Locked] = SimpleQueue()  # its put is reentrant, so finalizers may call it
        self._lock = ExitLock()
        self._unfenced: list[Locked] = []
        self._batches: list[_Batch] = []
        Thread(target=self._run, name="numapin-reclaim", daemon=True).start()

    def add(self, locked: Locked) -> None:
        """Take memory that nothing refers to any more; for finalizers, in any thread. A no-op in a forked child."""
        if os.getpid() == self._pid:
            self._dead.put(locked)

    def release_unused(self) -> bool:
        """Release memory that no device can be using, and return whether some has to wait. Never raises.

        It never blocks, except on drivers before R555: they have no context events, so it waits for the devices. While
        torch captures a CUDA graph, newly added memory waits for its end. When Python ends, nothing is released.
        """
        with self._lock as may_work:
            if not may_work:
                return False
            with suppress(CudaRefused), self._driver.relaxed_capture():
                self._take_dead()
                self._fence()
                for batch in self._batches:
                    self._release(batch)
            self._batches = [batch for batch in self._batches if batch.locked]
            return bool(self._unfenced or self._batches)

    def _take_dead(self) -> None:
        with suppress(Empty):
            while True:
                self._unfenced.append(self._dead.get_nowait())

    def _fence(self) -> None:
        if not self._unfenced:
            return
        from numapin.data.opening.capture import no_capture  # brings torch

        with no_capture() as is_free:
            if is_free:
                events: list[Event] = []
                if self._driver.can_record_contexts:
                    events = self._driver.record_everywhere()
                else:  # an older driver
                    for device in self._driver.active_devices():
                        _wait_for(device)
                self._batches.append(_Batch(self._unfenced, events))
                self._unfenced = []

    def _release(self, batch: _Batch) -> None:
        while batch.events and self._driver.has_passed(batch.events[-1]):
            self._driver.recycle(batch.events.pop())
        while batch.locked and not batch.events and not self._lock.is_over:
            locked = batch.locked[-1]
            self._driver.unregister(locked.device, locked.address)
            PINNED.remove(locked.num_bytes)
            batch.locked.pop()  # `locked` is the last reference, which unmaps

    def _run(self) -> None:
        pause_s: float | None = None
        while True:
            with suppress(Empty):
                self._dead.put(self._dead.get(timeout=pause_s))  # wait for one, and leave it to release_unused
            pause_s = min(2 * (pause_s or 0.001), _LONGEST_PAUSE_S) if self.release_unused() else None


def _wait_for(device: int) -> None:
    import torch

    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:  # a kernel's failure
        raise CudaRefused(str(error)) from None


def reclaimer(driver: Driver) -> Reclaimer:
    """Return this process's reclaimer."""
    return _of_process(driver, os.getpid())


@cache
def _of_process(driver: Driver, _pid: int) -> Reclaimer:
    return Reclaimer(driver)
