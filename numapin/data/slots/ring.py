"""The rank's end of the ring: its slots, and who may write to them. Edge.

Comes in: the sizes of real batches. Goes out: views of slots, lent until the last reference to their memory is gone and
no copy reads it.

The ring grows in the background, in generations. Their memory is prepared and then published, piece by piece: the first
slots are in use while later ones are prepared.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from numapin.data.opening.capture import no_capture
from numapin.data.slots.control import GONE, MAX_FACTOR, MAX_GENERATIONS, NOT_READY, TAKEN, Control, align
from numapin.data.slots.memory import SPARE_SLOTS, SlotMemory, design
from numapin.data.slots.quarantine import Quarantine
from numapin.data.wire.message import Miss
from numapin.data.wire.spill import map_spilled
from numapin.errors import NumapinError
from numapin.system.cuda import CudaRefused
from numapin.system.memory import Window, view_of, window

if TYPE_CHECKING:
    from numapin.data.slots.memory import RingSpec
    from numapin.data.wire.message import Head

_PIECE_BYTES: Final = 256 << 20  # the most that is pinned in one call; no slot crosses a piece
_GROWTH: Final = 1.25  # a larger generation has this much room to spare
_CATCH_UP_S: Final = 0.05
_LOOK_S: Final = 0.0001
_MANY_SHORT: Final = 2  # batches per worker: a loop that keeps batches, not one that fell behind once
_LAST_LOOK_S: Final = 0.05  # between attempts to free the memory of a closed ring


class Ring:
    """The slots of one iterator. To be used in one thread, except `lend`; references may end in any thread."""

    def __init__(self, spec: RingSpec) -> None:
        """Make an empty ring: no slot exists until `prepare`. Raises OSError if no memfd can be made."""
        self.spec = spec
        self.control = Control.create(num_workers=spec.num_workers, slots_per_worker=spec.slots_per_worker)
        self.quarantine = Quarantine(spec.reader)
        self._pid = os.getpid()
        self._memories: dict[int, SlotMemory] = {}  # by number of generation
        self._loans: dict[int, weakref.ref[Window]] = {}
        self._ended: deque[int] = deque()  # filled by weakref callbacks, in any thread
        self._stamp = 1
        self._needed = [-1] * spec.num_workers  # the oldest generation that each worker may still use or refer to
        self._builder: threading.Thread | None = None
        self._wanted_bytes = 0
        self._num_short = 0  # batches that found no slot since the last generation
        self._factor = 1  # the wanted number of slots, as a multiple of the pipeline's need
        self._refused_bytes: int | None = None  # slots of this size were refused
        self._is_closed = False
        self._closings = itertools.count()  # close may be called by a finalizer, in the middle of itself

    @property
    def slot_bytes(self) -> int:
        """Return the size of the newest slots; 0 if there are none."""
        number = self.control.num_generations
        return self.control.generation(number - 1).slot_bytes if number else 0

    @property
    def is_refused(self) -> bool:
        """Return whether slots were refused, so that there are none."""
        return self._refused_bytes is not None and not self._memories

    @property
    def pages(self) -> Counter[int | None]:
        """Return the number of pages on each node, as far as the kernel has reported it."""
        memories = list(self._memories.values())
        return sum((Counter(memory.pages) for memory in memories if memory.pages), start=Counter())

    @property
    def is_verified(self) -> bool:
        """Return whether the kernel has reported the node of every page."""
        return all(memory.pages is not None for memory in list(self._memories.values()))

    @property
    def pinned_bytes(self) -> int:
        """Return the number of pinned bytes."""
        return sum(size for memory in list(self._memories.values()) for _, size in list(memory.locked))

    @property
    def num_slots(self) -> int:
        """Return the number of slots of all generations."""
        return sum(memory.generation.num_slots for memory in list(self._memories.values()))

    @property
    def num_bytes(self) -> int:
        """Return the size of all slots together."""
        return sum(memory.generation.num_bytes for memory in list(self._memories.values()))

    @property
    def num_on_loan(self) -> int:
        """Return the number of slots that the rank holds: referred to, or in quarantine."""
        return len(self._loans)

    def want(self, head: Head) -> None:
        """Note the slot that a batch needed."""
        self._wanted_bytes = max(self._wanted_bytes, head.wanted_bytes)
        self._num_short += head.miss is Miss.NO_SLOT

    def prepare(self) -> None:
        """Start to make slots in the background, if batches need larger ones or repeatedly found none free.

        Do nothing while slots are being made, after they were refused, or once their number has doubled twice.
        """
        if self._builder is not None or self._is_closed or self.control.num_generations == MAX_GENERATIONS:
            return
        slot_bytes = self._next_slot_bytes()
        if slot_bytes is None:
            return
        self._num_short = 0
        is_refused = self._refused_bytes is not None and slot_bytes >= self._refused_bytes
        if not is_refused:
            self._start_builder(slot_bytes)

    def _next_slot_bytes(self) -> int | None:
        """Return the slot size of the next generation; None if none is needed. More slots count in `_factor`."""
        size = self.slot_bytes
        if self._wanted_bytes > size:
            return align(int(self._wanted_bytes * _GROWTH) if size else self._wanted_bytes, mmap.PAGESIZE)
        if self._num_short >= _MANY_SHORT * self.spec.num_workers and self._factor < MAX_FACTOR:
            self._factor *= 2
            return size
        return None

    def _start_builder(self, slot_bytes: int) -> None:
        self._builder = threading.Thread(target=self._build, args=(slot_bytes,), name="numapin-ring", daemon=True)
        try:
            self._builder.start()
        except RuntimeError:  # no more threads
            self._builder, self._refused_bytes = None, slot_bytes
            self.spec.report("no ring, so each batch gets separate memory: no thread can be started; see: ulimit -u")

    def lend(self, head: Head) -> tuple[memoryview | None, memoryview | None]:
        """Return views of a batch's slot and of its spilled memory; None if it has none."""
        slot, spill = head.parts
        self._needed[head.worker] = head.oldest_generation
        return (
            None if slot is None else self._lend_slot(head.generation, *slot),
            None if spill is None else self._map_spill(*spill, worker=head.worker),
        )

    def _lend_slot(self, generation: int, slot: int, num_bytes: int) -> memoryview:
        """Return a view of a slot that a worker has filled, lent until the view and everything over it are gone."""
        memory = self._memories[generation]
        start = memory.address + memory.generation.start_of(slot)
        lease = window(start, memory.generation.slot_bytes, owner=memory.mapped)
        self._loans[slot] = weakref.ref(lease, partial(self._note_end, slot))
        return view_of(lease)[:num_bytes]

    def _map_spill(self, number: int, num_bytes: int, *, worker: int) -> memoryview:
        fd = self.control.handover.take(worker, number)
        try:
            return map_spilled(fd, num_bytes)
        finally:
            os.close(fd)

    def reclaim(self) -> None:
        """Return slots that are no longer needed here to the workers."""
        if self._ended:
            self.quarantine.admit(self._ended.popleft() for _ in range(len(self._ended)))
        self._free_passed()
        if len(self.quarantine) > SPARE_SLOTS:
            self._wait_for_copies()
        if len(self._memories) > 1:
            self._retire()

    def _free_passed(self) -> None:
        for slot in self.quarantine.passed():
            self._free(slot)

    def _wait_for_copies(self) -> None:
        """Let the GPU catch up: if a loop runs far ahead of it, the workers run out of slots.

        Wait for a short time only: the GPU's work may depend on what this thread does next.
        """
        with no_capture() as is_quiet:
            if not is_quiet:
                return  # nothing can pass
        until_s = time.monotonic() + _CATCH_UP_S
        while len(self.quarantine) > SPARE_SLOTS and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            self._free_passed()

    def recover(self) -> None:
        """Take back the slots that the workers held. Call it only when they are all gone."""
        for memory in list(self._memories.values()):  # the builder may add one
            for slot in memory.generation.slots:
                if self.control.state(slot) == TAKEN and slot not in self._loans:
                    self._set_free(slot)
        self._needed = [-1] * self.spec.num_workers
        self.control.handover.discard()

    def close(self) -> None:
        """Free all memory, now or, if batches still refer to it, when the last of them is gone."""
        self._is_closed = True
        if next(self._closings) or os.getpid() != self._pid:
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
        """Overwrite a free slot, so that code that still reads it fails at once."""
        for memory in self._memories.values():
            generation = memory.generation
            if slot in generation.slots:
                start = generation.start_of(slot)
                torch.frombuffer(memory.mapped, dtype=torch.uint8, count=generation.slot_bytes, offset=start).fill_(
                    0xA5
                )

    def _retire(self) -> None:
        """Free the memory of generations that no worker uses any more, once all their slots are free."""
        oldest = min(self._needed)
        for number in [number for number in self._memories if number < oldest]:
            generation = self._memories[number].generation
            if all(self.control.state(slot) != TAKEN for slot in generation.slots):
                memory = self._memories.pop(number)
                memory.unlock()
                memory.give_back()

    def _destroy(self) -> None:
        for memory in self._memories.values():
            memory.unlock()
        self._memories.clear()
        self.control.close()

    def _close_later(self) -> None:
        with suppress(CudaRefused):  # a kernel has failed, and with it the context: the process cannot continue
            while self._loans or self._builder is not None:
                time.sleep(_LAST_LOOK_S)
                self.reclaim()
            self._destroy()

    def _build(self, slot_bytes: int) -> None:
        """Make a generation, in a separate thread."""
        try:
            self._make(slot_bytes)
        except (NumapinError, OSError, RuntimeError) as error:
            self._refused_bytes = slot_bytes
            self._give_up_rest()
            reason = f"{error.message}; {error.hint}" if isinstance(error, NumapinError) else str(error)
            self.spec.report(f"no slots of {slot_bytes} bytes, so each batch gets separate memory: {reason}")
        finally:
            self._builder = None

    def _give_up_rest(self) -> None:
        """Mark the missing slots of the newest generation, so that no worker waits for them."""
        number = self.control.num_generations
        generation = self.control.generation(number - 1) if number else None
        for slot in generation.slots if generation else ():
            if self.control.state(slot) == NOT_READY:
                self.control.set_state(slot, GONE)

    def _make(self, slot_bytes: int) -> None:
        generation = design(self.control, self.spec, slot_bytes, factor=self._factor)
        if generation is None:
            return
        memory = SlotMemory.reserve(self.control.fd, generation, self.spec)
        number = self.control.num_generations
        per_piece = max(1, _PIECE_BYTES // slot_bytes)
        for first in range(0, generation.num_slots, per_piece):
            count = min(per_piece, generation.num_slots - first)
            memory.prepare(first * slot_bytes, count * slot_bytes)
            if not first:
                self._memories[number] = memory
                self.control.publish(generation)
            for slot in generation.slots[first : first + count]:
                self._set_free(slot)
            if self._is_closed:
                return
        memory.check()
