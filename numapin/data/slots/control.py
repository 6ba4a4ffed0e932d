"""The ring as both sides see it: the control page, and a worker's own slots. Edge (maps memory).

Comes in: the ring's memfd. Goes out: slots to write batches into, without a lock between processes.

The memfd begins with a control page of 64-bit words, followed by generations of slots. A generation's record is written
once, before it is counted, and never changes. A slot's word is written by one side at a time: the rank frees a slot by
writing a positive stamp (larger for later releases), and its worker takes it by writing TAKEN. The slots of a
generation are dealt to the workers in turn, so that each owns the same number and a killed worker can hold no slot of
another.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from numapin.data.wire import descriptors
from numapin.data.wire.spill import Handover
from numapin.system import memory
from numapin.system.memory import Window, view_of

if TYPE_CHECKING:
    from numapin.data.wire.descriptors import SentDescriptor

MAX_GENERATIONS: Final = 8
MAX_FACTOR: Final = 4  # a generation may have this many times the slots that the pipeline needs
ALIGNMENT: Final = 256  # bytes, as cudaMalloc: enough for every dtype and vector load
NOT_READY: Final = 0  # the content of a new memfd
TAKEN: Final = -1
GONE: Final = -2  # never made: its memory was refused

_RECORD_WORDS: Final = 4
_RECORDS_AT: Final = 1  # word 0 counts the generations
_STATES_AT: Final = _RECORDS_AT + MAX_GENERATIONS * _RECORD_WORDS
_WORD_BYTES: Final = 8


def align(num_bytes: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to` bytes."""
    return -(-num_bytes // to) * to


@dataclass(frozen=True, slots=True)
class Generation:
    """Slots of one size, from `offset` of the memfd. Slot numbers continue from one generation to the next."""

    offset: int
    slot_bytes: int
    first_slot: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        """Return the length in the memfd."""
        return self.slot_bytes * self.num_slots

    @property
    def slots(self) -> range:
        """Return the numbers of all slots."""
        return range(self.first_slot, self.first_slot + self.num_slots)

    def start_of(self, slot: int) -> int:
        """Return the start of a slot, in bytes from the start of the generation."""
        return (slot - self.first_slot) * self.slot_bytes

    def slots_of(self, worker: int, num_workers: int) -> range:
        """Return the numbers of a worker's own slots."""
        return self.slots[worker::num_workers]


class Control:
    """The control page, mapped: generation records and one word a slot. Travels to child processes."""

    def __init__(self, fd: int, num_bytes: int, num_workers: int, handover: Handover) -> None:
        self.fd, self.num_bytes, self.num_workers, self.handover = fd, num_bytes, num_workers, handover
        self._words = memoryview(memory.map_shared(fd, num_bytes)).cast("q")

    @classmethod
    def create(cls, *, num_workers: int, slots_per_worker: int) -> Self:
        """Make an empty memfd with a control page, for generations of `slots_per_worker` each.

        Raises OSError if the kernel has no memfd or refuses the memory.
        """
        num_words = _STATES_AT + MAX_GENERATIONS * MAX_FACTOR * num_workers * slots_per_worker
        num_bytes = align(num_words * _WORD_BYTES, mmap.PAGESIZE)
        with ExitStack() as undo:
            fd = os.memfd_create("numapin-ring")
            undo.callback(os.close, fd)
            os.ftruncate(fd, num_bytes)
            handover = Handover()
            undo.callback(handover.close)
            control = cls(fd, num_bytes, num_workers, handover)
            undo.pop_all()
        return control

    def __reduce__(self) -> tuple[object, ...]:
        """Send the descriptor to a process that is being started."""
        return _attach, (descriptors.send(self.fd), self.num_bytes, self.num_workers, self.handover)

    @property
    def num_generations(self) -> int:
        """Return the number of published generations."""
        return self._words[0]

    def generation(self, number: int) -> Generation:
        """Return a published generation, counted from 0."""
        start = _RECORDS_AT + number * _RECORD_WORDS
        return Generation(*self._words[start : start + _RECORD_WORDS])

    def publish(self, generation: Generation) -> None:
        """Publish a further generation; its slots become usable one by one, with `set_state`."""
        number = self.num_generations
        words = (generation.offset, generation.slot_bytes, generation.first_slot, generation.num_slots)
        for i, word in enumerate(words, _RECORDS_AT + number * _RECORD_WORDS):
            self._words[i] = word
        self._words[0] = number + 1

    def state(self, slot: int) -> int:
        """Return a slot's word: NOT_READY, TAKEN, or the stamp of its release."""
        return self._words[_STATES_AT + slot]

    def set_state(self, slot: int, state: int) -> None:
        """Write a slot's word."""
        self._words[_STATES_AT + slot] = state

    def close(self) -> None:
        """Close the descriptors in this process. Mappings stay."""
        os.close(self.fd)
        self.handover.close()


def _attach(fd: SentDescriptor, num_bytes: int, num_workers: int, handover: Handover) -> Control:
    return Control(fd.detach(), num_bytes, num_workers, handover)


class OwnSlots:
    """A worker's own slots, mapped when first used."""

    def __init__(self, control: Control, worker: int) -> None:
        self._control, self._worker = control, worker
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}  # with the address
        self._kept: dict[int, weakref.ref[Window]] = {}
        self._stamps: dict[int, int] = {}
        self.generation = -1  # the newest in which this worker has a slot; it never returns to an older one

    def take(self) -> tuple[int, memoryview] | None:
        """Take the free slot that was released last, whose memory is most likely in a cache; None if none is free.

        A slot is not free while anything in this worker refers to its memory: a collate_fn may keep its tensors.
        Raises OSError if the memory cannot be mapped.
        """
        self._advance()
        if self.generation < 0:
            return None
        states = ((self._control.state(slot), slot) for slot in self._own())
        free = [(stamp, slot) for stamp, slot in states if stamp > 0 and not self._is_kept(slot)]
        if not free:
            return None
        stamp, slot = max(free)
        memory = self._window(slot)
        self._control.set_state(slot, TAKEN)
        self._stamps[slot], self._kept[slot] = stamp, weakref.ref(memory)
        return slot, view_of(memory)

    @property
    def handover(self) -> Handover:
        """Return the socket for spilled memory."""
        return self._control.handover

    def give_back(self, slot: int) -> None:
        """Make a slot free again that was taken but not sent."""
        self._control.set_state(slot, self._stamps[slot])

    def oldest(self) -> int:
        """Return the oldest generation in which this worker still refers to a slot, or may take one."""
        if self.generation <= 0:
            return self.generation
        newest = self._control.generation(self.generation)
        self._kept = {slot: view for slot, view in self._kept.items() if slot in newest.slots or view() is not None}
        oldest_slot = min(self._kept, default=newest.first_slot)
        generations = map(self._control.generation, range(self.generation + 1))
        return next(number for number, generation in enumerate(generations) if oldest_slot in generation.slots)

    def is_starting(self) -> bool:
        """Return whether some slots of this worker are still being prepared."""
        return self.generation < 0 or any(self._control.state(slot) == NOT_READY for slot in self._own())

    def keeps_free_slots(self) -> bool:
        """Return whether slots that the rank freed cannot be used because this worker still refers to them."""
        return any(self._is_kept(slot) and self._control.state(slot) > 0 for slot in self._own())

    def _own(self) -> range:
        return self._control.generation(self.generation).slots_of(self._worker, self._control.num_workers)

    def _advance(self) -> None:
        for number in range(self._control.num_generations - 1, self.generation, -1):
            if self._control.state(self._control.generation(number).first_slot + self._worker) != NOT_READY:
                self.generation = number
                return

    def _is_kept(self, slot: int) -> bool:
        view = self._kept.get(slot)
        return view is not None and view() is not None

    def _window(self, slot: int) -> Window:
        """Return a slot's memory, which lives as long as anything that uses it."""
        generation = self._control.generation(self.generation)
        if self.generation not in self._maps:
            mapped = memory.map_shared(self._control.fd, generation.num_bytes, offset=generation.offset)
            self._maps[self.generation] = mapped, memory.address_of(mapped)
        whole, address = self._maps[self.generation]
        return memory.window(address + generation.start_of(slot), generation.slot_bytes, owner=whole)
