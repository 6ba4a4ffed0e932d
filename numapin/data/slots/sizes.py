"""The sizes of slots, decided from recent batches, and the choice of a free slot for a worker."""

from __future__ import annotations

import mmap
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.data.slots.slot import Slot

ALIGNMENT: Final = 256  # bytes; what cudaMalloc gives, so that every dtype and vector load fits

_NUM_RECENT: Final = 32
_TAIL: Final = 10  # one batch in this many may be larger than expected; a single outlier does not count
_MAX_RATIO: Final = 2  # a slot may be this many times as large as the expected size
_STEPS: Final = 8  # sizes of slots per power of two, so that batches of slightly different sizes share slots
_REVIEW_EVERY: Final = 64  # returned slots between two looks at how many were never in use


def align(num_bytes: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to` bytes."""
    return -(-num_bytes // to) * to


def num_slots_for(num_files: int, usual: int) -> int:
    """Return how many slots may have descriptors, in a process that may have `num_files` of them.

    At most one descriptor in four belongs to a slot, or one in two if as many as `usual` need them.
    """
    return min(max(usual, num_files // 4), num_files // 2)


def capacity_for(num_bytes: int) -> int:
    """Return the size of a slot for a batch of `num_bytes`: at most an eighth larger, in whole pages."""
    step = (1 << max(0, num_bytes - 1).bit_length()) // (2 * _STEPS)
    return align(max(1, num_bytes), max(step, mmap.PAGESIZE))


class RecentSizes:
    """The sizes of the last batches."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=_NUM_RECENT)
        self.expected_bytes = 0
        """The size of a new slot: nine of ten recent batches fit into it. 0 before the first batch."""
        self._smallest, self._largest = 0, 0

    def note(self, num_bytes: int) -> None:
        """Add a batch."""
        if len(self._sizes) == _NUM_RECENT and num_bytes == self._sizes[0]:
            self._sizes.append(num_bytes)  # one leaves, the same comes: nothing changes
            return
        self._sizes.append(num_bytes)
        ranked = sorted(self._sizes)
        self.expected_bytes = capacity_for(ranked[-1 - len(ranked) // _TAIL])
        self._smallest, self._largest = ranked[len(ranked) // 2], _MAX_RATIO * self.expected_bytes

    def is_useful(self, capacity: int) -> bool:
        """Return whether a slot holds at least every other batch, and is not far larger than what batches need."""
        return self._smallest <= capacity <= self._largest


class FreeSlots:
    """Free slots. A worker gets its own first: it has them mapped, and parts of them in its caches."""

    def __init__(self, num_workers: int) -> None:
        self._of_worker: list[list[Slot]] = [[] for _ in range(num_workers)]
        self._num = self._fewest = self._num_returns = self._num_surplus = 0

    def __iter__(self) -> Iterator[Slot]:
        """Yield all free slots."""
        return chain.from_iterable(self._of_worker)

    def __contains__(self, slot: Slot) -> bool:
        """Return whether a slot is free."""
        return slot in self._of_worker[slot.worker]

    def add(self, slot: Slot) -> None:
        """Add a slot."""
        self._of_worker[slot.worker].append(slot)
        self._num += 1

    def clear(self) -> list[Slot]:
        """Remove and return all slots."""
        slots = list(self)
        for own in self._of_worker:
            own.clear()
        self._num = 0
        return slots

    def take(self, worker: int) -> Slot | None:
        """Remove and return the slot that a worker used last, else one of the worker with the most; None: no slot.

        Another worker's slot must be clean, and not that worker's only one.
        """
        own = self._of_worker[worker]
        if own:
            self._num -= 1
            return own.pop()
        others = max(self._of_worker, key=len)
        at = next((i for i in reversed(range(len(others))) if others[i].is_clean), None) if len(others) > 1 else None
        if at is None:
            return None
        self._num -= 1
        return others.pop(at)

    def is_surplus(self) -> bool:
        """Count a slot that came back, and return whether there are enough without it.

        One for each worker is not too many: a worker gets its next task while its last batch is in use.
        """
        self._fewest = min(self._fewest, self._num)
        self._num_returns += 1
        if self._num_returns % _REVIEW_EVERY == 0:
            self._num_surplus, self._fewest = max(0, self._fewest - len(self._of_worker)), self._num
        if not self._num_surplus:
            return False
        self._num_surplus -= 1
        return True
