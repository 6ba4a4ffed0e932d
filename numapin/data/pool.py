"""The rank's end of the slots: lend them to batches, take them back, offer them to their workers.

A slot is made by the worker that needs one, arrives with its first batch, and is pinned for it. When nothing refers to
that batch any more, and no copy reads it, the slot is kept if recent batches can use it, and its worker gets it with
the next task. Otherwise its memory goes back to the kernel. A slot never goes to another worker, which could not see
whether the first one still refers to it. A new worker gets the slots of the one before it.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from numapin.data.handover import Handover
from numapin.data.message import IN_MESSAGE, NO_MEMORY, NO_SLOT, Grant
from numapin.data.pinning import Settling
from numapin.data.quarantine import Quarantine, is_capturing
from numapin.data.slots import FreeSlots, RecentSizes, Slot, hide_from_children, map_memfd, ordinary_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.locality import Locality
    from numapin.data.message import Head
    from numapin.data.slots import Lease
    from numapin.system.cuda import Driver

_SPARE: Final = 4  # the loop's batch, the one before, and two whose copies are under way
_CATCH_UP_S: Final = 0.05  # the longest wait for the GPU before a worker goes without a slot
_LOOK_S: Final = 0.0002
_HANDED_DOWN: Final = 64  # multiprocessing sends a process at most 256 descriptors


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The properties of a pool."""

    num_workers: int  # that use it
    prefetch: int  # tasks that each of them may have
    locality: Locality  # where the memory belongs
    device: int  # on whose behalf memory is pinned
    driver: Driver | None  # pins the memory; None: it stays pageable
    reader: Callable[[], Driver | None]  # of GPUs that may read a slot after its last reference; None: none
    budget_bytes: Callable[[], int | None]  # asked before a slot is pinned; None: no limit
    report: Callable[[str], None]  # reports a refusal
    poison: bool = False  # overwrite slots that are free


_pools: Final[weakref.WeakValueDictionary[int, Pool]] = weakref.WeakValueDictionary()  # all of this process, by id


class Pool:
    """The slots of one loader, and its iterators' workers one after the other."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec, self.pid = spec, os.getpid()
        self.quarantine: Quarantine[Slot] = Quarantine(spec.reader)
        self.sizes = RecentSizes()
        self.arrivals = Handover()
        self._slots: dict[int, Slot] = {}  # all that may be used again, the oldest first
        self._settling = Settling(spec)
        self._free = [FreeSlots() for _ in range(spec.num_workers)]
        self._granted: list[dict[int, Slot]] = [{} for _ in range(spec.num_workers)]
        self._forgotten: list[deque[int]] = [deque() for _ in range(spec.num_workers)]
        self._ended: deque[Lease] = deque()  # appended when a batch is gone, in any thread
        self._serial = 0
        self._is_closed = False
        # At most one in four of the process's descriptors belongs to a slot, or one in two if the tasks need them.
        num_files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_files = sys.maxsize if num_files == resource.RLIM_INFINITY else num_files
        self._most_slots = min(max(spec.num_workers * spec.prefetch + _SPARE, num_files // 4), num_files // 2)
        _pools[id(self)] = self
        _watch_forks()
        self._closings = itertools.count()  # close may be called by a finalizer, in the middle of itself

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return all slots that may be used again."""
        return tuple(self._slots.values())

    # --- batches arrive ----------------------------------------------------------------------------------------------

    def lend(self, head: Head) -> tuple[memoryview, Slot | None]:
        """Return a view of a batch's memory, and the slot that it is in, if any.

        Raises OSError if a descriptor was lost or cannot be mapped.
        """
        worker = head.worker
        self.sizes.note(head.wanted_bytes)
        for note in head.report.notes:
            self.spec.report(note)
        for number in head.report.refused:
            self._give_up(self._granted[worker].pop(number, None))
        if self.spec.poison:
            for slot in self.slots:
                slot.is_unkept = slot.is_unkept or (slot.worker == worker and slot.number not in head.report.kept)
        self.note_inherited(head)
        if head.slot == NO_SLOT:
            return NO_MEMORY, None
        if head.slot == IN_MESSAGE:
            view = ordinary_memory(head.slot_bytes)
            view[:] = head.small
            return view, None
        slot = self._adopt(head) if head.made_bytes else self._granted[worker].pop(head.slot)
        slot.is_unkept = False
        view = slot.lend(head.slot_bytes, self._ended.append)
        if self._is_closed:  # meanwhile, by another thread
            slot.let_go(self.spec.driver)
        return view, slot

    def note_inherited(self, head: Head) -> None:
        """Mark the slots that a child may read which was forked in the worker; also of a batch that is never lent."""
        if head.report.inherited:
            for number in self._slots.keys() & head.report.inherited:
                self._slots[number].is_inherited = True

    def _adopt(self, head: Head) -> Slot:
        fd = None
        try:
            fd = self.arrivals.take(head.slot)
            owner = map_memfd(fd, head.made_bytes)
            slot = Slot(
                number=head.slot,
                fd=fd,
                num_bytes=head.made_bytes,
                address=owner.data_ptr(),
                owner=owner,
                worker=head.worker,
                is_settled=not self._settling.is_needed,
                is_inherited=head.slot in head.report.inherited,
            )
            self._slots[slot.number] = slot  # before it is pinned: `close` unpins what is here
        except BaseException:  # Ctrl-C, too
            self._slots.pop(head.slot, None)
            if fd is not None:
                os.close(fd)
            self._forgotten[head.worker].append(head.slot)  # it has the slot mapped
            raise
        if not slot.is_settled:
            try:
                self._settling.begin(slot)
            except RuntimeError:  # no thread can be started: the batch gets the error
                self._give_up(slot)
                raise
        return slot

    # --- slots come back ---------------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Take back the slots that are no longer needed here."""
        if len(self._slots) > self._most_slots:  # the loop keeps batches: give up the oldest
            lent = [slot for slot in self.slots if slot.lease is not None]
            for slot in lent[: len(self._slots) - self._most_slots]:
                self._give_up(slot)
        if self._ended and os.getpid() == self.pid:  # otherwise: in a child that the user forked
            while self._ended:
                slot = self._ended.popleft().slot
                # A copy from a pageable slot has read it when its call returns.
                if slot.is_private or slot.pinned_on is None:
                    self._take_back(slot)
                else:
                    self.quarantine.admit(slot)
        if self.quarantine.is_in_use:
            self._take_passed()
            if len(self.quarantine) > _SPARE:  # a loop that runs far ahead of the GPU leaves the workers without slots
                until_s = time.monotonic() + _CATCH_UP_S
                # Nothing passes during a capture, and what the GPU does may depend on what this thread does next.
                while len(self.quarantine) > _SPARE and time.monotonic() < until_s and not is_capturing():
                    time.sleep(_LOOK_S)
                    self._take_passed()
        if self.spec.poison:
            # Not where a batch says so: that may be torch's pin thread, and the slot may be granted meanwhile.
            for slot in itertools.chain.from_iterable(self._free):
                if slot.is_unkept:
                    slot.poison()
                    slot.is_unkept = False

    def _take_passed(self) -> None:
        for slot in self.quarantine.passed():
            self._take_back(slot)

    def _take_back(self, slot: Slot) -> None:
        slot.lease = None
        if slot.fd is None or self._is_closed:
            slot.let_go(self.spec.driver)
        elif slot.is_inherited or not self.sizes.is_useful(slot.num_bytes) or self._free[slot.worker].is_surplus():
            self._give_up(slot)
        else:
            self._free[slot.worker].append(slot)

    def _give_up(self, slot: Slot | None) -> None:
        """Use a slot no more; its memory goes when the last batch over it is gone."""
        if slot is not None:
            slot.retire()  # first: if Ctrl-C comes in between, it is never granted again
            self._forgotten[slot.worker].append(slot.number)
            self._slots.pop(slot.number, None)
            slot.let_go(self.spec.driver)

    def next_serial(self) -> int:
        """Return the first of as many numbers as there are workers, for workers that are being started."""
        self._serial += self.spec.num_workers
        return self._serial

    # --- workers -----------------------------------------------------------------------------------------------------

    def grant(self, worker: int) -> Grant:
        """Return the grant for a worker's next task: a slot, if one is free, and slots that it will not see again."""
        number, free = NO_SLOT, self._free[worker]
        # With more granted than there are tasks, all of which `balance` may give it, it does not use the slots it gets.
        most = self.spec.num_workers * self.spec.prefetch
        while free and number == NO_SLOT and len(self._granted[worker]) <= most:
            slot = free.pop()
            if slot.is_inherited or not self.sizes.is_useful(slot.num_bytes):
                self._give_up(slot)
            else:
                number = slot.number
                self._granted[worker][number] = slot
        waiting = self._forgotten[worker]  # torch's pin thread may add more meanwhile
        forgotten = tuple([waiting.popleft() for _ in range(len(waiting))]) if waiting else ()
        return Grant(number, self.sizes.expected_bytes, forgotten)

    def files_of(self, worker: int) -> list[tuple[int, int, int]]:
        """Return (number, size, descriptor) of a worker's slots, for the one that is being started in its place.

        Not more than can travel to a process in one message. The worker refuses the others, and makes new ones.
        """
        own = [slot for slot in self.slots if slot.worker == worker]
        return [(slot.number, slot.num_bytes, slot.fd) for slot in own[-_HANDED_DOWN:] if slot.fd is not None]

    def recover(self) -> None:
        """Take back the slots that the workers had. Only when they are all gone."""
        self.arrivals.discard()
        for free, granted, forgotten in zip(self._free, self._granted, self._forgotten, strict=True):
            free.extend(granted.values())
            granted.clear()
            forgotten.clear()
        for slot in set(self.slots).difference(*self._free):
            if slot.lease is None:  # Ctrl-C arrived while it was taken in, or taken back
                self._give_up(slot)
        for slot in self._slots.values():
            slot.is_unkept = True

    def close(self) -> None:
        """Give all memory back, now or, if batches still refer to it, when the last of them is gone."""
        if next(self._closings) or os.getpid() != self.pid:
            return
        self._is_closed = True
        others = []
        for slot in self.slots:
            if slot.lease is None:
                others.append(slot)
            else:  # first what must not be lost if unpinning is interrupted
                slot.let_go(self.spec.driver)
        self._ended.clear()
        for free, granted in zip(self._free, self._granted, strict=True):
            for slot in (*free, *granted.values()):
                slot.let_go(self.spec.driver)
            free.clear()
            granted.clear()
        for slot in others:  # Ctrl-C, or another thread, was about to lend it or to take it back
            slot.retire()
            slot.unpin_later(self.spec.driver)
        self.quarantine.drop()
        self._slots.clear()
        self.arrivals.close()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_parent=_note_fork)


def _note_fork() -> None:
    """Mark the slots of batches in use: a child that was just forked may read them for as long as it lives.

    So may a worker of ours: its dataset can refer to a batch that the loop has kept.
    """
    for slot in _all_slots():
        slot.is_inherited = slot.is_inherited or slot.is_in_use


def _all_slots() -> list[Slot]:
    """Return the slots of all pools of this process; a forked child inherits those of its parent."""
    pools = [pool for pool in (reference() for reference in _pools.valuerefs()) if pool is not None]
    return [slot for pool in pools if pool.pid == os.getpid() for slot in pool.slots]


@contextmanager
def unused_slots_hidden() -> Iterator[None]:
    """Keep slots out of processes that are forked in the block, but for those of batches that are in use.

    Such a process would hold their memory until it ends, whichever loader it works for. It also has this list, in a
    frame that it never leaves: without it, a slot of a loader that it collects as garbage would be unmapped there,
    where the kernel may have put other memory.
    """
    unused = [slot for slot in _all_slots() if not slot.is_in_use]
    try:
        for slot in unused:
            hide_from_children(slot.owner, hide=True)
        yield
    finally:
        for slot in unused:
            hide_from_children(slot.owner, hide=False)
