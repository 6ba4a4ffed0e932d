"""Settle slots in the background: check where their pages lie, and pin them.

Pinning holds locks of the whole driver: a kernel launch of another thread took up to 16 ms meanwhile, instead of 0.3
(measured on an H200). So one thread does it for the whole process, and rests after each slot.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from numapin.base.formats import gib
from numapin.data.slots.reclaim import ExitLock
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.slots.pool import PoolSpec
    from numapin.data.slots.slot import Slot

_LONGEST_REST_S: Final = 0.05
_REST: Final = 0.1  # of the time that a slot took
_AT_ONCE: Final = 2  # slots of one pool; the workers need the others


class Settling:
    """The settling of one pool's slots. Its methods are for one thread; `close` also for finalizers."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec, self._pid = spec, os.getpid()
        self._done: deque[Slot] = deque()
        self.num_begun = 0
        self._can_pin = spec.driver is not None
        self._is_over_budget = self._has_reported = self._is_closed = False

    @property
    def is_needed(self) -> bool:
        """Return whether slots have to be checked or pinned."""
        return self._can_pin or self._spec.locality.num_machine_nodes > 1

    def begin(self, slot: Slot) -> bool:
        """Have a slot settled in the background; return whether that was begun."""
        if self.num_begun >= _AT_ONCE:
            return False  # it comes back
        self.num_begun += 1
        if _settler().submit(partial(self._settle_later, slot)):
            return True
        self.num_begun -= 1
        self._can_pin, slot.is_settled = False, True
        self._spec.report("batches are not pinned: no thread can be started; see: ulimit -u")
        return False

    def ended(self) -> Iterator[Slot]:
        """Yield and forget the slots that are settled."""
        while self._done:
            self.num_begun -= 1
            yield self._done.popleft()

    def close(self) -> None:
        """Have the slots that are being settled unpinned again."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        with suppress(IndexError):  # two threads may be here at once
            while True:
                self._done.popleft().unpin_later(self._spec.driver)

    def _settle_later(self, slot: Slot) -> None:
        """Settle a slot on the settling thread."""
        try:
            self.settle(slot)
        finally:
            self._done.append(slot)
            if self._is_closed:  # perhaps since the slot was pinned
                self._drop()

    def settle(self, slot: Slot) -> None:
        """Settle a slot now; never raises."""
        spec = self._spec
        try:
            if not self._is_closed and os.getpid() == self._pid:
                driver = spec.driver if self._can_pin and self._has_room(slot.num_bytes) else None
                self._report_first(slot.settle(spec.locality, driver, spec.device))
        except (NumapinError, OSError) as error:
            self._can_pin = False
            reason = f"{error.message}; {error.hint}" if isinstance(error, NumapinError) else str(error)
            spec.report(f"batches are not pinned from now on: {reason}")
        slot.is_settled = True

    def _report_first(self, shortfalls: tuple[str, ...]) -> None:
        """Report pages in the wrong place once: the shares in the text differ from slot to slot."""
        if not self._has_reported:
            for shortfall in shortfalls:
                self._has_reported = True
                self._spec.report(shortfall)

    def _has_room(self, num_bytes: int) -> bool:
        budget = self._spec.budget_bytes()
        if budget is None or num_bytes <= budget:
            return True
        if not self._is_over_budget:
            self._is_over_budget = True
            self._spec.report(
                f"the budget for pinned memory is used up: {gib(max(0, budget))} are left, and a batch needs "
                f"{gib(num_bytes)}; batches without pinned memory are copied more slowly; raise pinned_budget=, "
                "use fewer workers, or .clone() batches that the loop keeps; see numapin.pinned.budget()"
            )
        return False


class _Settler:
    """A thread that exists while there is work."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock, self._work = threading.Lock(), ExitLock()
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
            try:
                with self._work as may_work:
                    if may_work:
                        job()
                    del job  # it may have the last reference to a slot
            except BaseException:  # an error of ours: the next job starts another thread
                self._is_running = False
                raise
            time.sleep(min(_REST * (time.monotonic() - began_s), _LONGEST_REST_S))


def _settler() -> _Settler:
    """Return the one of this process."""
    return _of_process(os.getpid())


@cache
def _of_process(_pid: int) -> _Settler:
    return _Settler()
