"""The memory of the ring's generations: sized, placed on the rank's node, faulted in, pinned, checked. Edge.

Comes in: a `RingSpec`, and the size of a slot. Goes out: a `Generation` to publish, and its `SlotMemory` in the rank.
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

SPARE_SLOTS: Final = 4  # the loop's batch, the previous one, and two whose copies are under way
_HUGE_PAGE_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """The properties of a ring.

    Attributes:
        num_workers: The workers that write into it.
        prefetch: The batches that each may be asked for.
        locality: The place of its memory.
        device: The device that the memory is pinned for.
        driver: The driver that pins it. None: it is not pinned.
        reader: Finds the driver of the devices that may still read a slot after its last reference in this process is
            gone; None if nothing can.
        budget_bytes: Returns the bytes that may be used, when memory is needed. None: no bound.
        report: Reports a shortfall.
        poison: Whether free slots are overwritten, for tests.
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

    @property
    def slots_per_worker(self) -> int:
        """Return the slots that a worker needs: one for each batch it may be asked for, and its share of the spares."""
        return self.prefetch + -(-SPARE_SLOTS // self.num_workers)


@dataclass(slots=True, kw_only=True)
class SlotMemory:
    """A generation's memory in the rank.

    Attributes:
        fd: The ring's memfd.
        generation: The generation.
        spec: The properties of the ring.
        mapped: The mapping.
        address: The address of the mapping.
        locked: The pinned pieces as (address, bytes).
        pages: The number of pages by node, as the kernel reports it. None: not asked yet, or not reported.
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
        """Place a piece on the node, fault it in and pin it. After NumapinError or OSError it has no pages."""
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
            spec.report(shortfall)

    def check(self) -> None:
        """Ask the kernel where the pages are, and report pages elsewhere."""
        locality = self.spec.locality
        found = placement.check(
            self.address,
            self.generation.num_bytes,
            nodes=locality.nodes,
            num_machine_nodes=locality.num_machine_nodes,
        )
        for shortfall in found.shortfalls:
            self.spec.report(shortfall)
        self.pages = found.pages

    def unlock(self) -> None:
        """Unpin the memory."""
        for address, size in self.locked:
            if self.spec.driver is not None:
                self.spec.driver.unregister(self.spec.device, address)
            placement.PINNED.remove(size)

    def give_back(self) -> None:
        """Return the pages to the kernel."""
        self._punch(0, self.generation.num_bytes)

    def _punch(self, start: int, num_bytes: int) -> None:
        """Free pages. If the kernel refuses, they are freed with the ring."""
        with suppress(OSError):
            memory.punch_hole(self.fd, self.generation.offset + start, num_bytes)


def design(control: Control, spec: RingSpec, slot_bytes: int, *, factor: int) -> Generation | None:
    """Decide the number of slots of a new generation: `factor` times the pipeline's need, fewer if the budget is small.

    None if that would be no more of the same size than there are. Raises NumapinError if there is room for none.
    """
    wanted, budget = spec.slots_per_worker * factor, spec.budget_bytes()
    per_worker = wanted if budget is None else min(wanted, budget // slot_bytes // spec.num_workers)
    num_slots = per_worker * spec.num_workers
    number = control.num_generations
    last = control.generation(number - 1) if number else Generation(control.num_bytes, 0, 0, 0)
    if slot_bytes == last.slot_bytes and num_slots <= last.num_slots:
        return None
    if per_worker < wanted:
        _report_budget(spec, slot_bytes, per_worker, wanted=wanted, budget=budget)
    end = last.offset + last.num_bytes
    return Generation(align(end, _HUGE_PAGE_BYTES), slot_bytes, last.first_slot + last.num_slots, num_slots)


def _report_budget(spec: RingSpec, slot_bytes: int, per_worker: int, *, wanted: int, budget: int | None) -> None:
    """Report that the budget allows fewer slots than wanted. Raises NumapinError if it allows none."""
    if per_worker == 0:
        message = f"{spec.num_workers} workers need {spec.num_workers * slot_bytes} bytes, the budget is {budget}"
        raise NumapinError(message, "raise pinned_budget=, or use fewer workers; see numapin.pinned.budget()")
    slots = "1 slot" if per_worker == 1 else f"{per_worker} slots"
    spec.report(f"{slots} per worker instead of {wanted}: the budget is {budget} bytes")
