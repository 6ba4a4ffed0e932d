"""Put batches into a worker's slots. Edge (writes memory).

Comes in: a batch of any type, and the worker's slots. Goes out: the message for the rank.

A batch has one slot, taken at its first tensor and filled from its start; a further one if it does not fit.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from numapin.data.wire.message import NOTHING, Head, Miss, PartHead, encode
from numapin.data.worker.pickling import BatchPickler
from numapin.data.worker.slots import SlotReport
from numapin.system import memory

if TYPE_CHECKING:
    from numapin.data.casting import Casts
    from numapin.data.slots.handover import Handover
    from numapin.data.wire.grant import Grant
    from numapin.data.worker.slots import BatchMemory, WorkerSlots

LARGE_BYTES: Final = 4 << 20  # larger batches are worth threads, and do not belong in the caches
_LONG_PICKLE: Final = 16 << 10  # a pickler's table of objects never shrinks, and is cleared as a whole after each batch
_PIPE_BYTES: Final = 64 << 10  # what a pipe has room for; longer pickles take many calls to get through it
# torch.frombuffer gives these no quantizer: resizing such a tensor crashes the process.
_QUANTIZED: Final = frozenset((torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4))


class PackedRoom(NamedTuple):
    """A place in a batch's memory: the part's number, the offset in it, the length, in bytes."""

    part: int
    start: int
    num_bytes: int


class Packer:
    """Puts one batch after the other into slots. For the thread that made it only."""

    def __init__(self, slots: WorkerSlots | None, *, worker: int, pins: bool, moves: bool, casts: Casts = ()) -> None:
        self._slots, self._worker, self.pins, self.moves = slots, worker, pins, moves
        self.casts = dict(casts)
        self.passes_caches = (pins or moves) and memory.can_pass_caches()  # a GPU reads what is written, and no CPU
        self._thread = threading.get_ident()
        self._parts: list[BatchMemory] = []
        self._first_refusal = Miss.NO_SLOTS if slots is None else None
        self.refusal: Miss | None = self._first_refusal  # why this batch has no room in a slot
        self.was_idle = False  # between the last task of this epoch and that of this batch
        self._pickler: BatchPickler | None = None  # that of the last batch

    def note_fork(self) -> None:
        """Write no more to what a process that the user's code has just forked may read."""
        if self._slots is not None:
            self._slots.note_fork()

    def refuse_in_child(self) -> None:
        """Give no more room in a child that the user's code forked: its parent writes to this memory."""
        self._thread = 0  # no thread has this id

    def accept(self, grant: Grant, descriptors: Handover) -> None:
        """Take over the slot that came with a task."""
        if self._slots is not None:
            self._slots.accept(grant, descriptors)

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialized contiguous tensor in this batch's memory; None if it has no room."""
        count = torch.Size(size).numel()
        if not count or dtype in _QUANTIZED or threading.get_ident() != self._thread:
            return None
        room = self.reserve(dtype.itemsize * count)
        if room is None:
            return None
        return self._parts[room.part].tensor(room.start, dtype, count).resize_(size)

    def reserve(self, num_bytes: int) -> PackedRoom | None:
        """Return room in this batch's memory. None: it has no room, and `refusal` says why."""
        try:
            start = self._parts[-1].reserve(num_bytes) if self._parts else None
            if start is None and not self._begin_part(num_bytes):
                return None
            part = self._parts[-1]
            if start is None:
                start = part.reserve(num_bytes)
        except OSError:
            start = None
        if start is None:
            self.refusal = Miss.NO_MEMORY
            return None
        return PackedRoom(len(self._parts) - 1, start, num_bytes)

    def write(self, room: PackedRoom, source: memoryview) -> None:
        """Copy plain memory into its room."""
        self._parts[room.part].view[room.start : room.start + room.num_bytes] = source

    def copy(self, room: PackedRoom, storage: torch.UntypedStorage, base: int) -> None:
        """Copy a storage, from byte `base` on, into its room."""
        target, source = self._parts[room.part].address + room.start, storage.data_ptr() + base
        if self.passes_caches and room.num_bytes >= LARGE_BYTES:
            memory.stack_past_caches(target, [source], room.num_bytes)
        else:
            memory.copy(target, source, room.num_bytes)

    def find(self, address: int, num_bytes: int) -> PackedRoom | None:
        """Return the place of an address in this batch's memory; None outside it."""
        for number, part in enumerate(self._parts):
            if 0 <= address - part.address < part.end:
                return PackedRoom(number, address - part.address, num_bytes)
        return None

    def pack(self, number: int, batch: object) -> bytes:
        """Return the message for a batch, and be ready for the next one. Raises what pickling the batch raises."""
        pickler, self._pickler = self._pickler or BatchPickler(self), None
        try:
            body = pickler.pickled(batch)
            body_room = self._write_body(body)
            sent = self._send(pickler, body_room)
            message = encode(self._head(number, pickler, sent, body_room), body if body_room is None else b"")
            if len(body) < _LONG_PICKLE:
                self._pickler = pickler
            return message
        finally:
            pickler.forget()
            self.finish()

    def finish(self) -> None:
        """End a batch, sent or not: keep the memory that was not sent for the next one."""
        if self._slots is not None:
            for part in self._parts:
                if not part.is_sent:
                    self._slots.put_back(part)
        self._parts, self.refusal = [], self._first_refusal

    def _begin_part(self, num_bytes: int) -> bool:
        if self._slots is None:
            return False
        part = self._slots.take(num_bytes, num_bytes_so_far=sum(part.end for part in self._parts))
        if part is None:
            self.refusal = Miss.NO_MEMORY
            return False
        self._parts.append(part)
        return True

    def _write_body(self, body: bytes) -> PackedRoom | None:
        """Write a long pickle into the batch's memory; None: it goes through the pipe."""
        room = self.reserve(len(body)) if len(body) >= _PIPE_BYTES else None
        if room is not None:
            self.write(room, memoryview(body))
        return room

    def _send(self, pickler: BatchPickler, body_room: PackedRoom | None) -> tuple[PartHead, ...]:
        """Hand the new slots among the batch's parts to the rank; parts of which nothing is sent have no bytes."""
        rooms = (*pickler.storages, body_room)
        used = {room.part for room in rooms if room is not None}
        sent = [part for number, part in enumerate(self._parts) if number in used]
        if self._slots is not None:
            self._slots.send(sent)
        for part in sent:  # only now: if one of them cannot be handed over, nothing is sent
            part.is_sent = True
        return tuple([part.head() if part.is_sent else NOTHING for part in self._parts])

    def _head(
        self, number: int, pickler: BatchPickler, parts: tuple[PartHead, ...], body_room: PackedRoom | None
    ) -> Head:
        report = self._slots.report() if self._slots else SlotReport()
        return Head(
            number=number,
            worker=self._worker,
            parts=parts,
            # Tensors that were collated and then dropped took room, too.
            wanted_bytes=max(pickler.wanted_bytes, sum(part.end for part in self._parts)),
            miss=pickler.miss,
            storages=tuple(pickler.storages),
            buffers=tuple(pickler.buffers),
            **report._asdict(),
            body_room=body_room,
        )
