"""The slots of a pool that are free, by the worker that used them last."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.data.slots.slot import Slot

_REVIEW_EVERY: Final = 64  # returned slots between two looks at how many were never in use


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
