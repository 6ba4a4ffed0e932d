"""Hold memory whose last reference is gone until no copy can read it.

A copy that the user issued with `non_blocking=True` may still be reading when the tensor is gone: torch records events
only for memory of its own allocator (Copy.cu). So an event of each device's whole context is recorded after the last
reference is gone. It covers every stream, even those of other libraries.

Recording such an event while a stream of the context captures a CUDA graph breaks the capture (cuCtxRecordEvent), and
the driver has no call that reports whether any stream captures. So captures through torch are watched. Captures through
other libraries are not seen.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakSet

import torch

from numapin.system.cuda import CudaRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.system.cuda import Driver, Event

Held = TypeVar("Held")

capture_lock: Final = threading.RLock()
"""Held while a capture begins. Inside a block with it, nothing begins, and `is_capturing` says whether one goes on.

If so, the block must not record. Keep it short: the user's capture_begin waits for its end. It is reentrant, because a
signal handler or finalizer that captures inside a block of its own thread must not wait for itself.
"""
_capturing: Final[Any] = WeakSet()  # weak: a capture is over if its graph died without ending it
_watched: Final[WeakSet[type]] = WeakSet()


def watch_captures() -> None:
    """Watch the captures of torch.cuda.CUDAGraph from now on. A second call, or a torch without it, changes nothing.

    It replaces capture_begin, capture_end and reset of the class, so call it before the first capture begins.
    """
    graphs = getattr(torch.cuda, "CUDAGraph", None)
    if graphs is None or graphs in _watched:  # in a forked child, a thread of the parent may hold the lock forever
        return
    with capture_lock:
        if graphs in _watched:
            return
        _watched.add(graphs)
        for name in ("capture_begin", "capture_end", "reset"):
            setattr(graphs, name, _watching(getattr(graphs, name), begins=name == "capture_begin"))


def is_capturing() -> bool:
    """Return whether a capture of torch's is in progress."""
    return bool(_capturing.data)  # the set's own len() is written in Python, and each batch comes here


def _watching(method: Callable[..., None], *, begins: bool) -> Callable[..., None]:
    @wraps(method)
    def watching(graph: object, *args: object, **kwargs: object) -> None:
        if begins:
            with capture_lock:
                _capturing.add(graph)
        try:
            method(graph, *args, **kwargs)
        except BaseException:  # a capture that could not begin, or whose end failed, is over
            _capturing.discard(graph)
            raise
        if not begins:
            _capturing.discard(graph)

    return watching


class Quarantine(Generic[Held]):
    """Holds memory back. While `find_driver` returns None, only this process reads it, and it passes at once."""

    def __init__(self, find_driver: Callable[[], Driver | None]) -> None:
        self._find_driver = find_driver
        watch_captures()
        self._waiting: list[Held] = []  # not yet covered by an event
        self._covered: deque[tuple[list[Event], list[Held]]] = deque()

    def __len__(self) -> int:
        """Return the number of things that are held back."""
        return len(self._waiting) + sum(len(held) for _, held in self._covered)

    @property
    def is_in_use(self) -> bool:
        """Return whether anything is held back."""
        return bool(self._waiting or self._covered)

    def admit(self, held: Held) -> None:
        """Take in memory that nothing refers to."""
        self._waiting.append(held)

    def drop(self) -> None:
        """Forget all that is held back; copies may still read it."""
        driver = self._find_driver() if self._covered else None  # a finalizer must not load it
        self._waiting.clear()
        while self._covered:
            events, _held = self._covered.popleft()
            if driver is not None:
                driver.recycle(*events)

    def passed(self) -> list[Held]:
        """Return and forget the memory that no copy can read any more. It never blocks, but on drivers before R555.

        Nothing passes during the capture of a CUDA graph: recording an event would break the capture.
        """
        if not self.is_in_use:
            return []
        driver = self._find_driver()
        if driver is None:
            passed, self._waiting = self._waiting, []
            return passed
        with capture_lock:
            if is_capturing():
                return []
            with driver.relaxed_capture():  # for captures that torch does not know of
                self._cover(driver)
                num_passed = 0  # counted first: a query that fails loses nothing
                for events, _ in self._covered:
                    if not all(driver.has_passed(event) for event in events):
                        break
                    num_passed += 1
                passed = []
                for _ in range(num_passed):
                    events, held = self._covered.popleft()
                    driver.recycle(*events)
                    passed += held
                return passed

    def _cover(self, driver: Driver) -> None:
        """Record an event on every device for what waits for one."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        try:
            if driver.can_record_contexts:
                events = driver.record_everywhere()
            else:  # before R555, which has no events of contexts
                events = []
                for device in driver.active_devices():
                    torch.cuda.synchronize(device)
            self._covered.append((events, waiting))
        except (CudaRefused, RuntimeError):  # a capture that torch does not know of, or, in torch, a kernel's failure
            self._waiting += waiting  # tried again at the next look
