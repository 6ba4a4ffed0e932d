"""Hold slots whose last reference is gone until no copy can read them.

A copy that the user issued with `non_blocking=True` may still be reading a slot when its tensor is gone: torch records
events only for memory of its own allocator. So an event of the device's whole context is recorded after the last
reference is gone. It covers every stream, even those of other libraries.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from numapin.data.opening.capture import no_capture, watch_captures
from numapin.system.cuda import CudaRefused

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.slots.slot import Slot
    from numapin.system.cuda import Driver, Event


class Quarantine:
    """Holds slots back. While `find_driver` returns None, only this process reads them, and they pass at once."""

    def __init__(self, find_driver: Callable[[], Driver | None]) -> None:
        self._find_driver = find_driver
        watch_captures()
        self._waiting: list[Slot] = []  # not yet covered by an event
        self._covered: deque[tuple[list[Event], list[Slot]]] = deque()

    def __len__(self) -> int:
        """Return the number of slots that are held back."""
        return len(self._waiting) + sum(len(slots) for _, slots in self._covered)

    @property
    def is_in_use(self) -> bool:
        """Return whether slots are held back."""
        return bool(self._waiting or self._covered)

    def admit(self, slot: Slot) -> None:
        """Take in a slot that nothing refers to."""
        self._waiting.append(slot)

    def drop(self) -> list[Slot]:
        """Return and forget all slots that are held back; copies may still read them."""
        driver = self._find_driver() if self._covered else None  # a finalizer must not load it
        held, self._waiting = self._waiting, []
        while self._covered:
            events, slots = self._covered.popleft()
            held += slots
            if driver is not None:
                driver.recycle(*events)
        return held

    def passed(self) -> list[Slot]:
        """Return and forget the slots that no copy can read any more.

        Nothing passes during the capture of a CUDA graph: recording an event would break the capture.
        """
        if not self.is_in_use:
            return []
        driver = self._find_driver()
        if driver is None:
            slots, self._waiting = self._waiting, []
            return slots
        with no_capture() as is_quiet:
            if not is_quiet:
                return []
            self._cover(driver)
            with driver.relaxed_capture():  # for captures that torch does not know of
                return self._ended(driver)

    def _cover(self, driver: Driver) -> None:
        """Record an event on every device for the slots that wait for one."""
        if not self._waiting:
            return
        slots, self._waiting = self._waiting, []
        try:
            self._covered.append((driver.record_everywhere(), slots))
        except CudaRefused:  # a capture that torch does not know of: tried again at the next look
            self._waiting += slots

    def _ended(self, driver: Driver) -> list[Slot]:
        ended: list[Slot] = []
        while self._covered and all(driver.has_passed(event) for event in self._covered[0][0]):
            events, slots = self._covered.popleft()
            driver.recycle(*events)
            ended += slots
        return ended
