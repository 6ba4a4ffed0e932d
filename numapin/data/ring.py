"""The rank's end of the ring: memory for slots, and who may write them. Edge.

Comes in: how large a slot must be, as real batches tell. Goes out: views of slots, lent until the last reference to
anything over them is gone and no copy reads them.

The ring grows in the background, in generations: memory of the memfd is put on the rank's node, touched, locked for
DMA and only then published, piece by piece, so that the first slots serve while later ones are prepared; where its
pages are is checked at the end.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from numapin import native, region
from numapin.cuda import CudaRefused
from numapin.data.capture import no_capture
from numapin.data.parcel import Miss
from numapin.data.quarantine import Quarantine
from numapin.data.slots import GONE, MAX_FACTOR, MAX_GENERATIONS, NOT_READY, TAKEN, Control, Generation, align
from numapin.data.spill import map_spilled
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.cuda import Driver
    from numapin.data.locality import Locality
    from numapin.data.parcel import Head

_PIECE_BYTES: Final = 256 << 20  # at most this much is locked in one call; no slot crosses a piece
_HUGE_PAGE_BYTES: Final = 2 << 20
_GROWTH: Final = 1.25  # a larger generation has this much room to spare
_SPARE_SLOTS: Final = 4  # the loop's batch, the one before, and two whose copies are under way
_CATCH_UP_S: Final = 0.05
_LOOK_S: Final = 0.0001
_MANY_SHORT: Final = 2  # batches a worker: a loop that goes on keeping batches, and not one that once fell behind
_LAST_LOOK_S: Final = 0.05  # how often the memory of a closed ring is asked for


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
        return self.prefetch + -(-_SPARE_SLOTS // self.num_workers)


@dataclass(slots=True)
class _Memory:
    """A generation's memory in the rank, and the pieces that are locked, as (address, bytes)."""

    generation: Generation
    mapped: mmap.mmap
    address: int
    locked: list[tuple[int, int]] = field(default_factory=list)


class Ring:
    """The slots of one iterator. For one thread, but for `lend`, and for references, which may end on any."""

    def __init__(self, spec: RingSpec) -> None:
        """Make an empty ring: no slot exists until `prepare`. Raises OSError where there is no memfd."""
        self.spec = spec
        self.control = Control.create(num_workers=spec.num_workers, slots_per_worker=spec.slots_per_worker)
        self.pages: Counter[int | None] = Counter()  # node -> pages, as the kernel says
        self.is_verified = True
        self.quarantine = Quarantine(spec.reader)
        self._pid = os.getpid()
        self._memories: dict[int, _Memory] = {}  # by number of generation
        self._loans: dict[int, weakref.ref[native.Memory]] = {}
        self._ended: deque[int] = deque()  # filled by weakref callbacks, on any thread: they do nothing else
        self._stamp = 1
        self._needed = [-1] * spec.num_workers  # the oldest generation that each worker may still use or refer to
        self._builder: threading.Thread | None = None
        self._wanted_bytes = 0
        self._num_short = 0  # batches that found no slot since the last generation
        self._factor = 1  # how many times the slots that the pipeline needs there are to be
        self._refused_bytes: int | None = None  # slots of this size were refused
        self._is_closed = False
        self._lock = threading.Lock()  # for the life of the memory: builder against close

    @property
    def slot_bytes(self) -> int:
        """Return the size of the newest slots, 0 before there are any."""
        number = self.control.num_generations
        return self.control.generation(number - 1).slot_bytes if number else 0

    @property
    def is_refused(self) -> bool:
        """Return whether there are no slots and will be none."""
        return self._refused_bytes is not None and not self._memories

    @property
    def pinned_bytes(self) -> int:
        """Return how much memory is locked for DMA."""
        return sum(size for memory in list(self._memories.values()) for _, size in list(memory.locked))

    @property
    def num_slots(self) -> int:
        """Return how many slots there are, of all generations."""
        return sum(memory.generation.num_slots for memory in list(self._memories.values()))

    @property
    def num_bytes(self) -> int:
        """Return how much memory the slots have."""
        return sum(memory.generation.num_bytes for memory in list(self._memories.values()))

    @property
    def num_on_loan(self) -> int:
        """Return how many slots the rank holds: referred to, or in quarantine."""
        return len(self._loans)

    def want(self, head: Head) -> None:
        """Note what a batch would have needed."""
        self._wanted_bytes = max(self._wanted_bytes, head.wanted_bytes)
        self._num_short += head.miss == Miss.NO_SLOT

    def prepare(self) -> None:
        """Have slots made in the background where batches need larger ones, or a few times found none free.

        Not where they are under way, were refused, or have grown in number twice.
        """
        if self._builder is not None or self._is_closed or self.control.num_generations == MAX_GENERATIONS:
            return
        size = self.slot_bytes
        if self._wanted_bytes > size:
            slot_bytes = align(int(self._wanted_bytes * _GROWTH) if size else self._wanted_bytes, mmap.PAGESIZE)
        elif self._num_short >= _MANY_SHORT * self.spec.num_workers and self._factor < MAX_FACTOR:
            self._factor, slot_bytes = 2 * self._factor, size
        else:
            return
        self._num_short = 0
        if self._refused_bytes is not None and slot_bytes >= self._refused_bytes:
            return
        self._builder = threading.Thread(target=self._build, args=(slot_bytes,), name="numapin-ring", daemon=True)
        try:
            self._builder.start()
        except RuntimeError:  # no more threads
            self._builder, self._refused_bytes = None, slot_bytes
            self.spec.tell("no ring, so batches get memory of their own: no thread can be started; see: ulimit -u")

    def lend(self, head: Head) -> tuple[memoryview | None, memoryview | None]:
        """Return views of the slot and of the spilled memory that a batch is in, None where it is not there."""
        slot, spill = head.parts
        self._needed[head.worker] = head.oldest_generation
        return (
            None if slot is None else self._lend_slot(head.generation, *slot),
            None if spill is None else self._map_spill(*spill, worker=head.worker),
        )

    def _lend_slot(self, generation: int, slot: int, num_bytes: int) -> memoryview:
        """Return a view of a slot that a worker has filled: lent until the view and all that is over it are gone."""
        memory = self._memories[generation]
        start = memory.address + memory.generation.start_of(slot)
        lease = native.window(start, memory.generation.slot_bytes, owner=memory.mapped)
        self._loans[slot] = weakref.ref(lease, partial(self._note_end, slot))
        return native.view_of(lease)[:num_bytes]

    def _map_spill(self, number: int, num_bytes: int, *, worker: int) -> memoryview:
        fd = self.control.handover.take(worker, number)
        try:
            return map_spilled(fd, num_bytes)
        finally:
            os.close(fd)

    def reclaim(self) -> None:
        """Give the workers the slots that are no longer needed here."""
        if self._ended:
            self.quarantine.admit(self._ended.popleft() for _ in range(len(self._ended)))
        self._free_passed()
        if len(self.quarantine) > _SPARE_SLOTS:
            self._wait_for_copies()
        if len(self._memories) > 1:
            self._retire()

    def _free_passed(self) -> None:
        for slot in self.quarantine.passed():
            self._free(slot)

    def _wait_for_copies(self) -> None:
        """Let the GPU catch up: a loop that runs far ahead of it leaves the workers without slots.

        Not for long: what the GPU does may depend on what this thread does next.
        """
        with no_capture() as is_quiet:
            if not is_quiet:
                return  # nothing can pass
        until_s = time.monotonic() + _CATCH_UP_S
        while len(self.quarantine) > _SPARE_SLOTS and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            self._free_passed()

    def recover(self) -> None:
        """Take back what the workers held. Only when they are all gone."""
        for memory in list(self._memories.values()):  # the builder may add one
            first = memory.generation.first_slot
            for slot in range(first, first + memory.generation.num_slots):
                if self.control.state(slot) == TAKEN and slot not in self._loans:
                    self._set_free(slot)
        self._needed = [-1] * self.spec.num_workers
        self.control.handover.discard()

    def close(self) -> None:
        """Give all memory back, now or, where batches still refer to it, when the last of them is gone."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed or os.getpid() != self._pid:
            return
        self.reclaim()
        if self._loans or self._builder is not None:
            threading.Thread(target=self._close_later, name="numapin-close", daemon=True).start()
        else:
            self._destroy()

    def _note_end(self, slot: int, _reference: object) -> None:
        if os.getpid() == self._pid:  # not in a child that the user forked
            self._ended.append(slot)

    def _free(self, slot: int) -> None:
        del self._loans[slot]
        if self.spec.poison:
            self._poison(slot)
        self._set_free(slot)

    def _set_free(self, slot: int) -> None:
        self._stamp += 1
        self.control.set_state(slot, self._stamp)

    def _poison(self, slot: int) -> None:
        """Overwrite a free slot, so that whoever still reads it finds out at once."""
        for memory in self._memories.values():
            generation = memory.generation
            if generation.first_slot <= slot < generation.first_slot + generation.num_slots:
                start = generation.start_of(slot)
                torch.frombuffer(memory.mapped, dtype=torch.uint8, count=generation.slot_bytes, offset=start).fill_(
                    0xA5
                )

    def _retire(self) -> None:
        """Give back the memory of generations that no worker takes slots from any more, once all of it is free."""
        oldest = min(self._needed)
        for number in [number for number in self._memories if number < oldest]:
            generation = self._memories[number].generation
            slots = range(generation.first_slot, generation.first_slot + generation.num_slots)
            if all(self.control.state(slot) != TAKEN for slot in slots):
                self._release(self._memories.pop(number))
                self._punch(generation.offset, generation.num_bytes)

    def _release(self, memory: _Memory) -> None:
        for address, size in memory.locked:
            if self.spec.driver is not None:
                self.spec.driver.unregister(self.spec.device, address)
            region.PINNED.remove(size)

    def _destroy(self) -> None:
        for memory in self._memories.values():
            self._release(memory)
        self._memories.clear()
        self.control.close()

    def _close_later(self) -> None:
        with suppress(CudaRefused):  # a kernel has failed, and with it the context: the process is at its end
            while self._loans or self._builder is not None:
                time.sleep(_LAST_LOOK_S)
                self.reclaim()
            self._destroy()

    def _build(self, slot_bytes: int) -> None:
        """Make a generation; runs on a thread of its own."""
        try:
            self._make(slot_bytes)
        except (NumapinError, OSError, RuntimeError) as error:
            self._refused_bytes = slot_bytes
            self._give_up_rest()
            reason = f"{error.message}; {error.hint}" if isinstance(error, NumapinError) else str(error)
            self.spec.tell(f"no slots of {slot_bytes} bytes, so batches get memory of their own: {reason}")
        finally:
            self._builder = None

    def _give_up_rest(self) -> None:
        """Mark what is missing of the newest generation, so that no worker takes it for being under way."""
        number = self.control.num_generations
        generation = self.control.generation(number - 1) if number else None
        for slot in range(generation.first_slot, generation.first_slot + generation.num_slots) if generation else ():
            if self.control.state(slot) == NOT_READY:
                self.control.set_state(slot, GONE)

    def _make(self, slot_bytes: int) -> None:
        generation = self._design(slot_bytes)
        if generation is None:
            return
        os.ftruncate(self.control.fd, generation.offset + generation.num_bytes)
        mapped = native.map_shared(self.control.fd, generation.num_bytes, offset=generation.offset)
        memory = _Memory(generation, mapped, native.address_of(mapped))
        number = self.control.num_generations
        per_piece = max(1, _PIECE_BYTES // slot_bytes)
        for first in range(0, generation.num_slots, per_piece):
            count = min(per_piece, generation.num_slots - first)
            self._prepare(memory, first * slot_bytes, count * slot_bytes)
            if not first:
                self._memories[number] = memory
                self.control.publish(generation)
            for slot in range(generation.first_slot + first, generation.first_slot + first + count):
                self._set_free(slot)
            if self._is_closed:
                return
        self._check(memory)

    def _design(self, slot_bytes: int) -> Generation | None:
        """Decide how many slots there will be: as many as the pipeline needs, fewer where the budget is small.

        None where that would be no more of the same size than there are.
        """
        spec, number = self.spec, self.control.num_generations
        budget = spec.budget_bytes()
        per_worker = wanted = spec.slots_per_worker * self._factor
        if budget is not None:
            per_worker = min(per_worker, budget // slot_bytes // spec.num_workers)
        last = self.control.generation(number - 1) if number else None
        if last is not None and slot_bytes == last.slot_bytes and per_worker * spec.num_workers <= last.num_slots:
            return None
        if per_worker == 0:
            message = f"{spec.num_workers} workers need {spec.num_workers * slot_bytes} bytes, the budget is {budget}"
            raise NumapinError(message, "raise pinned_budget=, or use fewer workers; see numapin.pinned.budget()")
        if per_worker < wanted:
            slots = "1 slot" if per_worker == 1 else f"{per_worker} slots"
            spec.tell(f"{slots} a worker instead of {wanted}: the budget is {budget} bytes")
        end = last.offset + last.num_bytes if last else self.control.num_bytes
        first_slot = last.first_slot + last.num_slots if last else 0
        return Generation(align(end, _HUGE_PAGE_BYTES), slot_bytes, first_slot, per_worker * spec.num_workers)

    def _prepare(self, memory: _Memory, start: int, num_bytes: int) -> None:
        """Put a piece on the node, touch it, lock it."""
        spec, locality, address = self.spec, self.spec.locality, memory.address + start
        try:
            refused = region.settle(
                address,
                num_bytes,
                nodes=locality.nodes,
                cpus=locality.cpus,
                num_machine_nodes=locality.num_machine_nodes,
            )
            if spec.driver is not None:
                spec.driver.register(spec.device, address, num_bytes)
                memory.locked.append((address, num_bytes))
                region.PINNED.add(num_bytes)
        except (NumapinError, OSError):
            self._punch(memory.generation.offset + start, num_bytes)
            raise
        for shortfall in refused:
            spec.tell(shortfall)

    def _check(self, memory: _Memory) -> None:
        """Ask the kernel where a generation's pages are."""
        locality = self.spec.locality
        found = region.check(
            memory.address,
            memory.generation.num_bytes,
            nodes=locality.nodes,
            num_machine_nodes=locality.num_machine_nodes,
        )
        for shortfall in found.shortfalls:
            self.spec.tell(shortfall)
        self.pages.update(found.pages or {})
        self.is_verified = self.is_verified and found.pages is not None

    def _punch(self, offset: int, num_bytes: int) -> None:
        """Give memory back to the kernel; where it refuses, the memory is freed with the ring."""
        with suppress(OSError):
            native.punch_hole(self.control.fd, offset, num_bytes)
