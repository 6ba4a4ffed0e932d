"""A worker's end of the slots: write a batch into a granted slot, or into one that it makes. Edge (memory).

Comes in: grants, one with each task. Goes out: memory for a batch, on the rank's NUMA node, and the descriptor of a new
slot for the rank.

A new slot's pages are faulted in as they are needed, so that no more memory is used than the batch has, and that a lack
of memory is an error and no SIGBUS.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from numapin.data.slots.mapping import fault_in, map_memfd
from numapin.data.slots.sizes import align, capacity_for
from numapin.data.wire.message import PartHead
from numapin.system import memory, placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.data.locality import Locality
    from numapin.data.slots.handover import Handover
    from numapin.data.wire.grant import Grant
    from numapin.system.memory import Window

SLOT_NAME: Final = "numapin-slot"
"""The name of a slot's memfd, in /proc."""

_GROWTH: Final = 4  # a further slot has room for this many times the batch so far
_UNKNOWN_BYTES: Final = 4 << 30  # address space, not memory, for a batch of unknown size


@dataclass(slots=True, kw_only=True, eq=False)
class BatchMemory:
    """Memory that one batch is being written into. Attributes in bytes.

    Attributes:
        number: The slot's number.
        fd: The descriptor of a slot that was made for this batch, None for a granted one.
        capacity: The slot's size.
        end: Where free room begins.
        populated: Up to where pages exist for sure.
        is_sent: Whether something in it was sent.
        is_new: Whether it was made for this batch.
    """

    number: int
    fd: int | None
    view: memoryview
    address: int
    capacity: int
    end: int = 0
    populated: int
    is_sent: bool = False
    is_new: bool

    def head(self) -> PartHead:
        """Return its entry in the head of the batch's message."""
        return PartHead(self.number, self.end, self.capacity, self.is_new)

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of free room, None if there is not enough. Raises OSError if the kernel has no memory."""
        start, stop = self.end, self.end + num_bytes
        if stop > self.capacity:
            return None
        if stop > self.populated:
            until = min(align(stop, os.sysconf("SC_PAGESIZE")), self.capacity)
            placement.touch(self.address + self.populated, until - self.populated)
            self.populated = until
        self.end = align(stop)
        return start

    def tensor(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return `count` elements from byte `start` on, as a tensor with a storage of its own."""
        return torch.frombuffer(self.view, dtype=dtype, count=count, offset=start)


class SlotReport(NamedTuple):
    """News of a worker's slots for the rank. The fields are those of `Head`."""

    refused: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    inherited: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class WorkerSlots:
    """The slots that one worker has: granted ones, and those it makes. `serial` is unique among a loader's workers."""

    def __init__(self, arrivals: Handover, locality: Locality, *, serial: int) -> None:
        self._arrivals, self._locality = arrivals, locality
        self._next_number = serial << 32
        self._expected_bytes = 0
        self._mapped: dict[int, torch.Tensor] = {}
        self._held: list[tuple[int, int]] = []  # granted and not used yet: number, size
        self._windows: dict[int, weakref.ref[Window]] = {}  # of batches that were made here
        self._inherited: set[int] = set()  # that a child of this worker may read; not written again
        self._new_inherited: list[int] = []  # of these, what the rank has not heard of
        self._refused: list[int] = []
        self._notes: dict[str, bool] = {}  # texts for the rank to report, and whether they were sent

    def accept(self, grant: Grant, descriptors: Handover) -> None:
        """Take over the grant of a task."""
        for number in grant.forgotten:
            self._mapped.pop(number, None)
            self._inherited.discard(number)
        self._expected_bytes = grant.expected_bytes
        if grant.slot < 0:
            return
        try:
            if grant.is_new:
                self._map(grant.slot, descriptors.take(grant.slot), grant.capacity)
        except OSError:  # no descriptor, no address space or no memory is left
            self._refused.append(grant.slot)
            return
        if self._is_kept(grant.slot):  # a collate_fn or a dataset keeps what was in it
            self._refused.append(grant.slot)
        else:
            self._held.append((grant.slot, grant.capacity))

    def take(self, num_bytes: int, *, num_bytes_so_far: int = 0) -> BatchMemory | None:
        """Return memory for at least `num_bytes`; None if the kernel refuses it.

        A batch that has bytes in other slots already is larger than expected, so a further slot has far more room than
        those before: a batch of many tensors then needs few.
        """
        fitting = [held for held in self._held if held[1] >= num_bytes and not self._is_kept(held[0])]
        if not fitting:
            if len(self._held) > 1:  # they are of no use to this worker
                self._refused.append(self._held.pop(0)[0])
            return self._make(max(num_bytes, _GROWTH * num_bytes_so_far)) or self._make(num_bytes)
        self._held.remove(fitting[-1])
        number, capacity = fitting[-1]
        return self._memory(number, None, self._mapped[number], capacity=capacity, populated=capacity)

    def put_back(self, memory: BatchMemory) -> None:
        """Keep a granted slot that was taken and not sent for the next batch; a new one is dropped."""
        if not memory.is_new:
            self._held.append((memory.number, memory.capacity))
        elif memory.fd is not None:  # None: it could not be sent, and is closed
            os.close(memory.fd)

    def send(self, memories: Sequence[BatchMemory]) -> None:
        """Hand a batch's new slots to the rank, all or none; call it before the message about them. Raises OSError."""
        files: dict[int, int] = {}
        try:
            for made in memories:
                if made.fd is not None:
                    files[made.number], made.fd = made.fd, None
                    made.capacity = min(made.capacity, capacity_for(max(made.end, self._expected_bytes)))
                    os.ftruncate(files[made.number], made.capacity)
            if files:
                self._arrivals.send(files)
        finally:
            for fd in files.values():
                os.close(fd)

    def report(self) -> SlotReport:
        """Return what the rank is told with the next message."""
        refused, self._refused = tuple(self._refused), []
        inherited, self._new_inherited = tuple(self._new_inherited), []
        if len(self._windows) > 1:
            self._windows = {number: window for number, window in self._windows.items() if window() is not None}
        notes = tuple(note for note, is_sent in self._notes.items() if not is_sent)
        self._notes.update(dict.fromkeys(notes, True))
        return SlotReport(refused=refused, kept=tuple(self._windows), inherited=inherited, notes=notes)

    def note_fork(self) -> None:
        """Never write again to slots that a child forked here may read: its end is not watched."""
        windows = self._windows.copy()  # in one step: another thread may have forked
        new = [number for number, window in windows.items() if window() is not None and number not in self._inherited]
        self._inherited.update(new)
        self._new_inherited += new

    def _is_kept(self, number: int) -> bool:
        window = self._windows.get(number)
        return (window is not None and window() is not None) or number in self._inherited

    def _map(self, number: int, fd: int, capacity: int) -> None:
        try:
            mapped = self._mapped[number] = map_memfd(fd, capacity)
        finally:
            os.close(fd)
        fault_in(mapped)

    def _make(self, num_bytes: int) -> BatchMemory | None:
        capacity = capacity_for(max(num_bytes, self._expected_bytes or _UNKNOWN_BYTES))
        try:
            fd = os.memfd_create(SLOT_NAME)
        except OSError:
            return None
        try:
            os.ftruncate(fd, capacity)
            owner = map_memfd(fd, capacity)
        except OSError:
            os.close(fd)
            return None
        self._place(owner.data_ptr(), capacity)
        self._next_number += 1
        return self._memory(self._next_number, fd, owner, capacity=capacity, populated=0)

    def _place(self, address: int, num_bytes: int) -> None:
        locality = self._locality
        if locality.nodes and locality.num_machine_nodes > 1:
            for refusal in placement.prefer(address, num_bytes, locality.nodes, within=locality.within):
                self._notes.setdefault(refusal, False)

    def _memory(
        self, number: int, fd: int | None, owner: torch.Tensor, *, capacity: int, populated: int
    ) -> BatchMemory:
        window = memory.window(owner.data_ptr(), capacity, owner=owner)
        self._windows[number] = weakref.ref(window)
        view = memory.view_of(window)
        return BatchMemory(
            number=number,
            fd=fd,
            is_new=fd is not None,
            view=view,
            address=owner.data_ptr(),
            capacity=capacity,
            populated=populated,
        )
