"""The sizes of slots, decided from recent batches, and a worker's free slots."""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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


class FreeSlots(list["Slot"]):
    """The free slots of one worker. The last one to come back goes first: parts of it are most likely in a cache."""

    _fewest = _num_returns = _num_surplus = 0

    def is_surplus(self) -> bool:
        """Count a slot that came back, and return whether there are enough without it.

        One free slot is not too many: the worker gets its next task while its last batch is in use.
        """
        self._fewest = min(self._fewest, len(self))
        self._num_returns += 1
        if self._num_returns % _REVIEW_EVERY == 0:
            self._num_surplus, self._fewest = max(0, self._fewest - 1), len(self)
        if not self._num_surplus:
            return False
        self._num_surplus -= 1
        return True
