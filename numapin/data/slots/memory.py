"""The memory of the ring's generations: how many slots, on the rank's node, touched, locked for DMA, checked. Edge.

Comes in: a `RingSpec`, and how large a slot must be. Goes out: a `Generation` to publish, and its `SlotMemory` in the
rank.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from numapin.data.slots.control import Generation, align
from numapin.errors import NumapinError
from numapin.system import memory, placement

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping

    from numapin.data.locality import Locality
    from numapin.data.slots.control import Control
    from numapin.system.cuda import Driver

SPARE_SLOTS: Final = 4  # the loop's batch, the one before, and two whose copies are under way
_HUGE_PAGE_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """What a ring is made of.

    `driver` locks the memory for DMA on `device`, None does without. `reader` finds the driver of whatever may still
    read a slot after its last reference in this process is gone, None where nothing can. `budget_bytes` is asked when
    memory is needed (None: no bound). `tell` is told of everything that is not as it should be.
    """

    num_workers: int
    prefetch: int
    locality: Locality
    device: int
    driver: Driver | None
    reader: Callable[[], Driver | None]
    budget_bytes: Callable[[], int | None]
    tell: Callable[[str], None]
    poison: bool = False

    @property
    def slots_per_worker(self) -> int:
        """Return how many slots a worker needs: one for each batch it may be asked for, and its share of the spare."""
        return self.prefetch + -(-SPARE_SLOTS // self.num_workers)


@dataclass(slots=True, kw_only=True)
class SlotMemory:
    """A generation's memory in the rank; `locked`: its locked pieces, as (address, bytes); `pages`: node -> pages.

    `pages` is what the kernel says, None before it was asked and where it does not say.
    """

    fd: int
    generation: Generation
    spec: RingSpec
    mapped: mmap.mmap
    address: int
    locked: list[tuple[int, int]] = field(default_factory=list)
    pages: Mapping[int | None, int] | None = None

    @classmethod
    def reserve(cls, fd: int, generation: Generation, spec: RingSpec) -> Self:
        """Map a generation's part of the memfd; it has no pages yet. Raises OSError."""
        os.ftruncate(fd, generation.offset + generation.num_bytes)
        mapped = memory.map_shared(fd, generation.num_bytes, offset=generation.offset)
        return cls(fd=fd, generation=generation, spec=spec, mapped=mapped, address=memory.address_of(mapped))

    def prepare(self, start: int, num_bytes: int) -> None:
        """Put a piece on the node, touch it, lock it. Raises NumapinError and OSError, and has then no pages there."""
        spec, locality, address = self.spec, self.spec.locality, self.address + start
        try:
            refused = placement.settle(
                address,
                num_bytes,
                nodes=locality.nodes,
                cpus=locality.cpus,
                num_machine_nodes=locality.num_machine_nodes,
            )
            if spec.driver is not None:
                spec.driver.register(spec.device, address, num_bytes)
                self.locked.append((address, num_bytes))
                placement.PINNED.add(num_bytes)
        except (NumapinError, OSError):
            self._punch(start, num_bytes)
            raise
        for shortfall in refused:
            spec.tell(shortfall)

    def check(self) -> None:
        """Ask the kernel where the pages are."""
        locality = self.spec.locality
        found = placement.check(
            self.address,
            self.generation.num_bytes,
            nodes=locality.nodes,
            num_machine_nodes=locality.num_machine_nodes,
        )
        for shortfall in found.shortfalls:
            self.spec.tell(shortfall)
        self.pages = found.pages

    def unlock(self) -> None:
        """Take the locks off."""
        for address, size in self.locked:
            if self.spec.driver is not None:
                self.spec.driver.unregister(self.spec.device, address)
            placement.PINNED.remove(size)

    def give_back(self) -> None:
        """Give the pages back to the kernel."""
        self._punch(0, self.generation.num_bytes)

    def _punch(self, start: int, num_bytes: int) -> None:
        """Free pages; where the kernel refuses, they are freed with the ring."""
        with suppress(OSError):
            memory.punch_hole(self.fd, self.generation.offset + start, num_bytes)


def design(control: Control, spec: RingSpec, slot_bytes: int, *, factor: int) -> Generation | None:
    """Decide how many slots a new generation has: `factor` times what the pipeline needs, fewer where the budget ends.

    None where that would be no more of the same size than there are. Raises NumapinError where there is room for none.
    """
    number = control.num_generations
    budget = spec.budget_bytes()
    per_worker = wanted = spec.slots_per_worker * factor
    if budget is not None:
        per_worker = min(per_worker, budget // slot_bytes // spec.num_workers)
    last = control.generation(number - 1) if number else None
    if last is not None and slot_bytes == last.slot_bytes and per_worker * spec.num_workers <= last.num_slots:
        return None
    if per_worker == 0:
        message = f"{spec.num_workers} workers need {spec.num_workers * slot_bytes} bytes, the budget is {budget}"
        raise NumapinError(message, "raise pinned_budget=, or use fewer workers; see numapin.pinned.budget()")
    if per_worker < wanted:
        slots = "1 slot" if per_worker == 1 else f"{per_worker} slots"
        spec.tell(f"{slots} a worker instead of {wanted}: the budget is {budget} bytes")
    end = last.offset + last.num_bytes if last else control.num_bytes
    first_slot = last.first_slot + last.num_slots if last else 0
    return Generation(align(end, _HUGE_PAGE_BYTES), slot_bytes, first_slot, per_worker * spec.num_workers)
