"""The rank's end of the slots: lend them to batches, take them back, hand them to workers. Edge (memory, CUDA).

Comes in: heads of batches that have arrived. Goes out: views of their memory; and with each task a free slot.

A slot comes into being in the worker that needs one, and arrives with its first batch. When nothing refers to that batch
any more, and no copy reads it, the slot is kept if recent batches can use it: it is pinned in the background, and handed
to a worker with its next task. Otherwise its memory goes back to the kernel.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from numapin.base import sizes
from numapin.data.opening.capture import no_capture
from numapin.data.slots.handover import Handover
from numapin.data.slots.mapping import hide_from_children
from numapin.data.slots.quarantine import Quarantine
from numapin.data.slots.settling import settler
from numapin.data.slots.sizes import RecentSizes, capacity_for
from numapin.data.slots.slot import Slot
from numapin.data.wire.grant import Grant
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.locality import Locality
    from numapin.data.wire.message import Head, PartHead
    from numapin.system.cuda import Driver

_SPARE: Final = 4  # the loop's batch, the one before, and two whose copies are under way
_CATCH_UP_S: Final = 0.05  # the longest wait for the GPU before a worker goes without a slot
_LOOK_S: Final = 0.0002
_REVIEW_EVERY: Final = 64  # returns between two looks at how many slots were never in use
_SHARE_OF_FILES: Final = 4  # at most one in so many of this process's descriptors is a slot's


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool is made of.

    Attributes:
        num_workers: How many workers use it.
        prefetch: How many tasks each of them may have.
        locality: Where the memory belongs.
        device: The device on whose behalf memory is pinned.
        driver: What pins it; None: it stays pageable.
        reader: Finds the driver of whatever may still read a slot after its last reference is gone, None if nothing can.
        budget_bytes: Asked before a slot is kept for good (None: no limit).
        report: Reports what is not as it should be.
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
    poison: bool = False


_orphans: set[Slot] = set()  # lent when their pool was closed: they live until their batch is gone


class Pool:
    """The slots of one loader, and its iterators' workers one after the other."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec, self._pid = spec, os.getpid()
        self.quarantine = Quarantine(spec.reader)
        self.sizes = RecentSizes()
        self.arrivals = Handover(child_sends=True)
        self._slots: dict[int, Slot] = {}  # all that may be used again, the oldest first
        self._free: list[list[Slot]] = [[] for _ in range(spec.num_workers)]  # by home, the last released last
        self._granted: list[dict[int, Slot]] = [{} for _ in range(spec.num_workers)]
        self._unclean: list[list[Slot]] = [[] for _ in range(spec.num_workers)]
        self._forgotten: list[list[int]] = [[] for _ in range(spec.num_workers)]
        self._ended: deque[Slot] = deque()  # finalizers append, in any thread
        self._settled: deque[Slot] = deque()
        self._num_settling = 0
        self._num_returns = self._serial = 0
        self._fewest_free = self._num_surplus = 0
        self._can_pin = spec.driver is not None
        self._is_closed = False
        self._closings = itertools.count()  # close may be called by a finalizer, in the middle of itself

    # --- what the statistics show ------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Return how much memory they have."""
        return sum(slot.num_bytes for slot in list(self._slots.values()))

    @property
    def slot_bytes(self) -> int:
        """Return the size of the largest slot, 0 before there are any."""
        return max((slot.num_bytes for slot in list(self._slots.values())), default=0)

    @property
    def pinned_bytes(self) -> int:
        """Return how much memory is pinned."""
        return sum(slot.num_bytes for slot in list(self._slots.values()) if slot.pinned_on is not None)

    @property
    def num_on_loan(self) -> int:
        """Return how many slots the rank holds: referred to, or in quarantine."""
        return sum(slot.lease is not None for slot in list(self._slots.values()))

    @property
    def pages(self) -> Counter[int | None]:
        """Return how many pages lie on each node, as far as the kernel has said."""
        slots = list(self._slots.values())
        return sum((Counter(slot.pages) for slot in slots if slot.pages), start=Counter())

    @property
    def is_verified(self) -> bool:
        """Return whether the kernel has said where the pages of all settled slots lie."""
        return all(slot.pages is not None for slot in list(self._slots.values()) if slot.is_settled)

    # --- batches arrive ----------------------------------------------------------------------------------------------

    def lend(self, head: Head) -> tuple[memoryview | None, ...]:
        """Return a view of each of a batch's parts, None for those with nothing in them. Raises OSError if a descriptor was lost or cannot be mapped."""
        worker = head.worker
        self.sizes.note(head.wanted_bytes)
        for note in head.notes:
            self.spec.report(note)
        for number in head.refused:
            self._give_up(self._granted[worker].pop(number, None))
        self._note_kept(worker, head.kept)
        return tuple([self._lend(part, worker) if part.slot >= 0 else None for part in head.parts])

    def _lend(self, part: PartHead, worker: int) -> memoryview:
        slot = self._granted[worker].pop(part.slot, None) or self._adopt(part, worker)
        slot.is_clean = False
        self._unclean[worker].append(slot)
        return slot.lend(part.num_bytes, partial(self._note_end, slot))

    def _adopt(self, part: PartHead, worker: int) -> Slot:
        """Take over a slot that a worker has made."""
        fd = self.arrivals.take(part.slot)
        try:
            slot = Slot.map(part.slot, fd, part.capacity, home=worker)
        except OSError:
            os.close(fd)
            raise
        slot.is_settled = not self._can_pin and self.spec.locality.num_machine_nodes == 1
        self._slots[slot.number] = slot
        if len(self._slots) > self._max_slots():
            self._give_up(next((old for old in list(self._slots.values()) if old.lease is not None), None))
        return slot

    def _note_kept(self, worker: int, kept: tuple[int, ...]) -> None:
        """Note which slots a worker still refers to: no other worker may write to them."""
        unclean = self._unclean[worker]
        if unclean:
            self._unclean[worker] = [slot for slot in unclean if slot.number in kept]
            for slot in unclean:
                slot.is_clean = slot.number not in kept
                if self.spec.poison and slot.is_clean and slot in self._free[slot.home]:
                    slot.poison()  # it was free before, while its worker may still have referred to it

    def _max_slots(self) -> int:
        """Return how many slots may have descriptors; more are lent if the loop keeps many batches."""
        files, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(self.spec.num_workers * self.spec.prefetch + _SPARE, files // _SHARE_OF_FILES)

    # --- slots come back ---------------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Take back the slots that are no longer needed here."""
        while self._settled:
            self._num_settling -= 1
            self._set_free(self._settled.popleft())
        if self._ended:
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            self.quarantine.admit(slot for slot in ended if slot.pinned_on is not None)
            for slot in ended:
                if slot.pinned_on is None:  # a copy from pageable memory has read it when its call returns
                    self._take_back(slot)
        self._take_passed()
        if len(self.quarantine) > _SPARE:
            self._wait_for_copies()

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

    def _note_end(self, slot: Slot, _reference: object, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Note that nothing refers to a slot any more. Called by finalizers, in any thread, at any time."""
        # At the end of Python this module's own names may be gone. Otherwise: in a child that the user forked.
        if _is_ending() or os.getpid() != self._pid:
            return
        self._ended.append(slot)
        if self._is_closed:
            self._release_ended()

    def _take_back(self, slot: Slot) -> None:
        slot.lease = None
        if slot.fd is None or self._is_closed:
            self._discard(slot)
        elif not self._is_worth_keeping(slot):
            self._give_up(slot)
        elif slot.is_settled or not self._settle(slot):
            self._set_free(slot)

    def _is_worth_keeping(self, slot: Slot) -> bool:
        if not self.sizes.is_useful(slot.num_bytes):
            return False
        self._review()
        if self._num_surplus:
            self._num_surplus -= 1
            return False
        return True

    def _review(self) -> None:
        """Find out how many slots were never in use for a while, beyond one for each worker."""
        self._fewest_free = min(self._fewest_free, sum(map(len, self._free)))
        self._num_returns += 1
        if self._num_returns % _REVIEW_EVERY == 0:
            self._num_surplus = max(0, self._fewest_free - self.spec.num_workers)
            self._fewest_free = len(self._slots)

    def _set_free(self, slot: Slot) -> None:
        if self._is_closed or slot.fd is None:
            self._discard(slot)
            return
        if self.spec.poison and slot.is_clean:
            slot.poison()
        self._free[slot.home].append(slot)

    def _give_up(self, slot: Slot | None) -> None:
        """Use a slot no more; its memory goes when the last batch over it is gone."""
        if slot is None:
            return
        self._slots.pop(slot.number, None)
        for worker in slot.mapped_by:
            self._forgotten[worker].append(slot.number)
        slot.retire()
        if slot.lease is None:
            self._discard(slot)

    def _discard(self, slot: Slot) -> None:
        """Unpin a slot that nothing reads; it is unmapped with the last reference."""
        slot.retire()
        _orphans.discard(slot)
        slot.unpin(self.spec.driver)

    # --- settling ----------------------------------------------------------------------------------------------------

    def _settle(self, slot: Slot) -> bool:
        """Have a slot checked and pinned in the background; return whether that was begun."""
        if self._num_settling > self.spec.num_workers:
            return False  # the workers need it more; it comes back
        self._num_settling += 1
        if settler().submit(partial(self._settle_now, slot)):
            return True
        self._num_settling -= 1
        self._can_pin, slot.is_settled = False, True
        self.spec.report("batches are not pinned: no thread can be started; see: ulimit -u")
        return False

    def _settle_now(self, slot: Slot) -> None:
        """Settle a slot; runs on the settling thread, and never raises."""
        spec = self.spec
        try:
            if not self._is_closed and os.getpid() == self._pid:
                driver = spec.driver if self._can_pin and self._has_room(slot.num_bytes) else None
                for shortfall in slot.settle(spec.locality, driver, spec.device):
                    spec.report(shortfall)
        except (NumapinError, OSError) as error:
            self._can_pin = False
            reason = f"{error.message}; {error.hint}" if isinstance(error, NumapinError) else str(error)
            spec.report(f"batches are not pinned from now on: {reason}")
        finally:
            slot.is_settled = True
            self._settled.append(slot)

    def _has_room(self, num_bytes: int) -> bool:
        budget = self.spec.budget_bytes()
        if budget is None or num_bytes <= budget:
            return True
        self._can_pin = False
        self.spec.report(
            f"the budget for pinned memory is used up: {sizes.gib(self.pinned_bytes)} are pinned, and a slot needs "
            f"{sizes.gib(num_bytes)} more; batches without pinned memory are copied more slowly; raise pinned_budget=, "
            "use fewer workers, or .clone() batches that the loop keeps; see numapin.pinned.budget()"
        )
        return False

    def next_serial(self) -> int:
        """Return the first of as many numbers as there are workers, for workers that are being started."""
        self._serial += self.spec.num_workers
        return self._serial

    # --- workers -----------------------------------------------------------------------------------------------------

    def grant(self, worker: int, offer: Callable[[int, int], bool]) -> Grant:
        """Return the slot that a worker gets with its next task, if one is free, and what else it should know.

        `offer` hands (number, descriptor) to the worker, and returns whether it could.
        """
        forgotten, self._forgotten[worker] = tuple(self._forgotten[worker]), []
        expected = capacity_for(self.sizes.expected_bytes) if self.sizes.expected_bytes else 0
        slot = self._pick(worker)
        if slot is None:
            return Grant(-1, 0, False, expected, forgotten)
        is_new = worker not in slot.mapped_by
        if is_new and (slot.fd is None or not offer(slot.number, slot.fd)):
            self._free[slot.home].append(slot)
            return Grant(-1, 0, False, expected, forgotten)
        slot.mapped_by.add(worker)
        slot.home = worker
        self._granted[worker][slot.number] = slot
        return Grant(slot.number, slot.num_bytes, is_new, expected, forgotten)

    def _pick(self, worker: int) -> Slot | None:
        """Choose a free slot: the one that this worker used last, else one of the worker with the most."""
        if len(self._granted[worker]) > self.spec.prefetch:
            return None  # its batches are so small that they need none
        own = self._free[worker]
        while own:
            slot = own.pop()
            if self.sizes.is_useful(slot.num_bytes):
                return slot
            self._give_up(slot)
        others = max(self._free, key=len)
        at = next((i for i in reversed(range(len(others))) if others[i].is_clean), None) if len(others) > 1 else None
        return None if at is None else others.pop(at)

    def hide(self, *, hide: bool) -> None:
        """Keep free slots out of workers that are being forked, which would hold their memory; or end that."""
        for slot in itertools.chain.from_iterable(self._free):
            hide_from_children(slot.owner, hide=hide)

    def recover(self) -> None:
        """Take back what the workers had. Only when they are all gone."""
        self.arrivals.discard()
        for worker, granted in enumerate(self._granted):
            for slot in granted.values():
                self._set_free(slot)
            granted.clear()
            self._forgotten[worker], self._unclean[worker] = [], []
        for slot in self._slots.values():
            slot.mapped_by.clear()
            slot.is_clean = True

    def close(self) -> None:
        """Give all memory back, now or, if batches still refer to it, when the last of them is gone."""
        self._is_closed = True
        if next(self._closings) or os.getpid() != self._pid:
            return
        for slot in self._slots.values():
            slot.retire()
            if slot.lease is not None:
                _orphans.add(slot)
        for slot in itertools.chain(*self._free, *(granted.values() for granted in self._granted)):
            self._discard(slot)
        for slot in self.quarantine.drop():
            slot.unpin_later(self.spec.driver)
        self._slots.clear()
        self._release_ended()
        self.arrivals.close()

    def _release_ended(self) -> None:
        """Let go of slots that ended when, or after, the pool was closed."""
        while self._ended:
            slot = self._ended.popleft()
            _orphans.discard(slot)
            slot.unpin_later(self.spec.driver)
