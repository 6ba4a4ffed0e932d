"""The rank's end of the slots: lend them to batches, take them back, hand them to workers.

A slot is made by the worker that needs one, and arrives with its first batch. When nothing refers to that batch any
more, and no copy reads it, the slot is kept if recent batches can use it: it is pinned in the background, and handed to
a worker with its next task. Otherwise its memory goes back to the kernel.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from numapin.data.message import IN_MESSAGE, NO_GRANT, Grant
from numapin.data.opening.capture import no_capture
from numapin.data.slots.handover import Handover
from numapin.data.slots.mapping import hide_from_children, ordinary_memory
from numapin.data.slots.quarantine import Quarantine
from numapin.data.slots.settling import Settling
from numapin.data.slots.sizes import FreeSlots, RecentSizes, num_slots_for
from numapin.data.slots.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.locality import Locality
    from numapin.data.message import Head, PartHead
    from numapin.data.slots.slot import Lease
    from numapin.system.cuda import Driver

_SPARE: Final = 4  # the loop's batch, the one before, and two whose copies are under way
_CATCH_UP_S: Final = 0.05  # the longest wait for the GPU before a worker goes without a slot
_LOOK_S: Final = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The properties of a pool.

    Attributes:
        num_workers: The number of workers that use it.
        prefetch: The number of tasks that each of them may have.
        locality: Where the memory belongs.
        device: The device on whose behalf memory is pinned.
        driver: Pins the memory; None: it stays pageable.
        reader: Finds the driver of GPUs that may still read a slot after its last reference is gone. None: there are
            none.
        budget_bytes: Asked before a slot is kept for good (None: no limit).
        report: Reports a refusal.
        pins_at_once: Pin a slot when it arrives, because its first batch must be pinned too.
        poison: Overwrite slots that are free.
    """

    num_workers: int
    prefetch: int
    locality: Locality
    device: int
    driver: Driver | None
    reader: Callable[[], Driver | None]
    budget_bytes: Callable[[], int | None]
    report: Callable[[str], None]
    pins_at_once: bool = False
    poison: bool = False


_pools: Final[weakref.WeakValueDictionary[int, Pool]] = weakref.WeakValueDictionary()  # all of this process, by id
_starting: Final[list[int]] = []  # the threads that fork our own workers now, which read no batches
_orphans: dict[Slot, Pool] = {}  # given up while lent: they live until their batch is gone


class Pool:
    """The slots of one loader, and its iterators' workers one after the other."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec, self.pid = spec, os.getpid()
        self.quarantine: Quarantine[Slot] = Quarantine(spec.reader)
        self.sizes = RecentSizes()
        self.arrivals = Handover(child_sends=True)
        self._slots: dict[int, Slot] = {}  # all that may be used again, the oldest first
        self._free, self._settling = FreeSlots(spec.num_workers), Settling(spec)
        self._granted: list[dict[int, Slot]] = [{} for _ in range(spec.num_workers)]
        self._unclean: list[list[Slot]] = [[] for _ in range(spec.num_workers)]
        self._forgotten: list[deque[int]] = [deque() for _ in range(spec.num_workers)]
        self._cleaned: deque[Slot] = deque()  # to be poisoned if they are free
        self._ended: deque[Lease] = deque()  # appended when a batch is gone, in any thread
        self._serial = self._num_allowed = 0
        self._is_closed = False
        _pools[id(self)] = self
        _watch_forks()
        self._closings = itertools.count()  # close may be called by a finalizer, in the middle of itself

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return all slots that may be used again."""
        return tuple(self._slots.values())

    # --- batches arrive ----------------------------------------------------------------------------------------------

    def lend(self, head: Head) -> tuple[tuple[memoryview | None, ...], bool]:
        """Return a view of each of a batch's parts, None for those with nothing in them; and whether all are pinned.

        Raises OSError if a descriptor was lost or cannot be mapped.
        """
        worker = head.worker
        self.sizes.note(head.wanted_bytes)
        for note in head.notes:
            self.spec.report(note)
        for number in head.refused:
            self._give_up(self._granted[worker].pop(number, None))
        unclean = self._unclean[worker]
        if unclean:  # no other worker may write to slots that this one still refers to
            for slot in unclean:
                slot.is_clean = slot.number not in head.kept
                if self.spec.poison and slot.is_clean:
                    self._cleaned.append(slot)
            if head.kept:
                unclean[:] = [slot for slot in unclean if not slot.is_clean]
            else:
                unclean.clear()
        views: list[memoryview | None] = []
        is_pinned, failed = True, None
        for part in head.parts:
            if part.slot == IN_MESSAGE:
                view = ordinary_memory(part.num_bytes)
                view[:] = head.small
                views.append(view)
            elif part.slot < 0:
                views.append(None)
            else:
                try:
                    slot = self._adopt(part, worker) if part.is_new else self._granted[worker].pop(part.slot)
                except OSError as error:  # first take the other parts: their descriptors and slots would be lost
                    failed = failed or error
                    continue
                slot.is_clean = False
                if slot not in unclean:  # one slot in turn with itself would be added with every batch
                    unclean.append(slot)
                views.append(slot.lend(part.num_bytes, self._ended.append))
                if self._is_closed:  # meanwhile, by another thread
                    slot.retire()
                    _orphans[slot] = self
                    self._watch(slot)
                is_pinned = is_pinned and slot.pinned_on is not None
        if head.inherited:
            for number in self._slots.keys() & head.inherited:
                self._slots[number].is_inherited = True
        if failed is not None:
            raise failed
        return tuple(views), is_pinned

    def _adopt(self, part: PartHead, worker: int) -> Slot:
        """Take over a slot that a worker has made."""
        fd = self.arrivals.take(part.slot)
        try:
            slot = Slot.map(part.slot, fd, part.capacity, worker=worker)
        except OSError:
            os.close(fd)
            raise
        slot.is_settled = not self._settling.is_needed
        if self.spec.pins_at_once and not slot.is_settled:
            self._settling.settle(slot)
        self._slots[slot.number] = slot
        return slot

    def _max_slots(self) -> int:
        """Return the number of slots that may have descriptors; more are lent if the loop keeps many batches."""
        files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        usual = self.spec.num_workers * self.spec.prefetch + _SPARE
        return sys.maxsize if files == resource.RLIM_INFINITY else num_slots_for(files, usual)

    # --- slots come back ---------------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Take back the slots that are no longer needed here."""
        if self._cleaned:
            self._poison_cleaned()
        if len(self._slots) > self._num_allowed:
            self._limit_slots()
        if self._settling.num_begun:
            for slot in self._settling.ended():
                self._set_free(slot)
        if self._ended and os.getpid() == self.pid:  # otherwise: in a child that the user forked
            while self._ended:
                slot = self._ended.popleft().slot
                # A copy from a pageable slot has read it when its call returns.
                if slot.pinned_on is None or self.spec.reader() is None:
                    self._take_back(slot)
                else:
                    self.quarantine.admit(slot)
        if self.quarantine.is_in_use:
            self._take_passed()
            if len(self.quarantine) > _SPARE:
                self._wait_for_copies()

    def _limit_slots(self) -> None:
        """If there are too many slots, give up the oldest that are lent: the loop keeps their batches."""
        excess = len(self._slots) - self._max_slots()
        if excess <= 0:
            self._num_allowed = len(self._slots)
            return
        for slot in [slot for slot in self.slots if slot.lease is not None][:excess]:
            self._give_up(slot)

    def _poison_cleaned(self) -> None:
        """Poison the slots that were free while their workers may still have referred to them.

        Not where the batch arrives: that may be torch's pin thread, and the slot may be granted meanwhile.
        """
        for slot in [self._cleaned.popleft() for _ in range(len(self._cleaned))]:
            if slot.is_clean and slot in self._free:
                slot.poison()

    def _take_passed(self) -> None:
        for slot in self.quarantine.passed():
            self._take_back(slot)

    def _wait_for_copies(self) -> None:
        """Let the GPU catch up: a loop that runs far ahead of it leaves the workers without slots.

        Not for long: what the GPU does may depend on what this thread does next.
        """
        with no_capture() as is_quiet:
            if not is_quiet:
                return  # nothing can pass
        until_s = time.monotonic() + _CATCH_UP_S
        while len(self.quarantine) > _SPARE and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            self._take_passed()

    def _take_back(self, slot: Slot) -> None:
        slot.lease = None
        if slot.fd is None or self._is_closed:
            self._discard(slot)
        elif slot.is_inherited or not self.sizes.is_useful(slot.num_bytes) or self._free.is_surplus():
            self._give_up(slot)
        elif slot.is_settled or not self._settling.begin(slot):
            self._set_free(slot)

    def _set_free(self, slot: Slot) -> None:
        if self._is_closed or slot.fd is None:
            self._discard(slot)
            return
        if self.spec.poison and slot.is_clean:
            slot.poison()
        self._free.add(slot)

    def _give_up(self, slot: Slot | None) -> None:
        """Use a slot no more; its memory goes when the last batch over it is gone."""
        if slot is None:
            return
        if slot.lease is not None:
            _orphans[slot] = self
        self._slots.pop(slot.number, None)
        for worker in slot.mapped_by:
            self._forgotten[worker].append(slot.number)
        slot.retire()
        if slot.lease is None:
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        """Unpin a slot that nothing reads; it is unmapped with the last reference."""
        slot.retire()
        with suppress(ValueError):
            self._unclean[slot.worker].remove(slot)
        _orphans.pop(slot, None)
        slot.unpin(self.spec.driver)

    def next_serial(self) -> int:
        """Return the first of as many numbers as there are workers, for workers that are being started."""
        self._serial += self.spec.num_workers
        return self._serial

    # --- workers -----------------------------------------------------------------------------------------------------

    def grant(self, worker: int, offer: Callable[[int, int], bool]) -> Grant:
        """Return the grant for a worker's next task: a slot, if one is free, and the slots that it will not see again.

        `offer` hands (number, descriptor) to the worker, and returns whether it could.
        """
        forgotten: tuple[int, ...] = ()
        waiting = self._forgotten[worker]
        if waiting:  # torch's pin thread may add more meanwhile
            forgotten = tuple([waiting.popleft() for _ in range(len(waiting))])
        slot = None
        if len(self._granted[worker]) <= self.spec.prefetch:  # else the worker has not used the slots that it got
            slot = self._free.take(worker)
            while slot is not None and (slot.is_inherited or not self.sizes.is_useful(slot.num_bytes)):
                self._give_up(slot)
                slot = self._free.take(worker)
        is_new = slot is not None and worker not in slot.mapped_by
        if slot is not None and is_new and (slot.fd is None or not offer(slot.number, slot.fd)):
            self._set_free(slot)
            slot = None
        if slot is None:
            return NO_GRANT._replace(expected_bytes=self.sizes.expected_bytes, forgotten=forgotten)
        slot.mapped_by.add(worker)
        slot.worker = worker
        self._granted[worker][slot.number] = slot
        return Grant(slot.number, slot.num_bytes, is_new, self.sizes.expected_bytes, forgotten)

    def recover(self) -> None:
        """Take back the slots that the workers had. Only when they are all gone."""
        self.arrivals.discard()
        for worker, granted in enumerate(self._granted):
            for slot in granted.values():
                self._set_free(slot)
            granted.clear()
            self._forgotten[worker].clear()
            self._unclean[worker].clear()
        for slot in self._slots.values():
            slot.mapped_by.clear()
            slot.is_clean = True

    def close(self) -> None:
        """Give all memory back, now or, if batches still refer to it, when the last of them is gone."""
        if next(self._closings) or os.getpid() != self.pid:
            return
        self._is_closed = True
        # First what must not be lost if unpinning is interrupted: from now on finalizers release what is lent.
        _orphans.update((slot, self) for slot in self._slots.values() if slot.lease is not None)
        for slot in [slot for slot in list(_orphans) if _orphans.get(slot) is self]:
            self._watch(slot)
        self._ended.clear()
        for slot in self._slots.values():
            slot.retire()
        self._discard_unlent()
        for slot in self.quarantine.drop():
            _orphans.pop(slot, None)  # only a copy may read it; the reclaiming thread keeps it for that
            slot.lease = None
            slot.unpin_later(self.spec.driver)
        self._settling.close()
        self._slots.clear()
        self.arrivals.close()

    def _discard_unlent(self) -> None:
        """Discard the slots that are free or with workers. A batch keeps the pool: it must not keep their memory."""
        for slot in (*self._free.clear(), *(slot for granted in self._granted for slot in granted.values())):
            self._discard(slot)
        for granted, unclean in zip(self._granted, self._unclean, strict=True):
            granted.clear()
            unclean.clear()
        self._cleaned.clear()

    def _watch(self, slot: Slot) -> None:
        """Have a slot released when its batch is gone, now that `reclaim` is no longer called."""
        lease = slot.lease
        window = None if lease is None else lease()
        if window is not None:
            slot.watch(window, self._release)
        elif lease is not None:
            self._release(lease)

    def _release(self, lease: Lease, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let go of a slot whose batch ended when, or after, the pool was closed. Also a finalizer, in any thread."""
        # At the end of Python this module's own names may be gone. Otherwise: in a child that the user forked.
        if _is_ending() or os.getpid() != self.pid:
            return
        _orphans.pop(lease.slot, None)
        lease.slot.lease = None
        lease.slot.unpin_later(self.spec.driver)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_parent=_note_fork)


def _note_fork() -> None:
    """Mark the slots of batches in use: a child that was just forked may read them for as long as it lives."""
    if threading.get_ident() not in _starting:
        for slot in _all_slots():
            slot.is_inherited = slot.is_inherited or slot.is_in_use


def _all_slots() -> list[Slot]:
    """Return the slots of all pools of this process; a forked child inherits those of its parent."""
    pools = [pool for pool in (reference() for reference in _pools.valuerefs()) if pool is not None]
    return [slot for pool in pools if pool.pid == os.getpid() for slot in pool.slots]


@contextmanager
def unused_slots_hidden() -> Iterator[None]:
    """Keep slots out of processes that are forked in the block, but for those of batches that are in use.

    Such a process would hold their memory until it ends, whichever loader it works for.
    """
    unused = [slot for slot in _all_slots() if not slot.is_in_use]
    for slot in unused:
        hide_from_children(slot.owner, hide=True)
    _starting.append(threading.get_ident())
    try:
        yield
    finally:
        _starting.remove(threading.get_ident())
        for slot in unused:
            hide_from_children(slot.owner, hide=False)
