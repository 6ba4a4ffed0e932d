"""A worker's end: put batches into its slots. Edge (writes memory).

Comes in: a batch of any type, and the worker's slots. Goes out: the message for the rank.

A batch has at most one slot, asked for at its first tensor; room in it is handed out upwards. What does not fit is
spilled to memory of its own; what only torch can send stays in the pickle and goes torch's own way.
"""

from __future__ import annotations

import io
import pickle
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.rnn import PackedSequence

from numapin.data.slots.control import align
from numapin.data.wire.parcel import SLOT, SPILL, Head, Miss, encode, move, packed_sequence, rebuild, tensor_over
from numapin.data.wire.spill import Spill
from numapin.system import memory

if TYPE_CHECKING:
    from numapin.data.slots.control import OwnSlots

# A view's whole storage is sent, so that views go on sharing it, up to this many times the view.
_MAX_STORAGE_RATIO: Final = 4
_LARGEST_ITEM_BYTES: Final = 16  # so that views of another dtype into the same range begin at a multiple of theirs
LARGE_BYTES: Final = 4 << 20  # from here on threads are worth their cost, and the caches are no place for a batch
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle


@dataclass(slots=True)
class _Part:
    """Memory that one batch is being written into: its slot, or what it spills to. `at`: the number of either."""

    at: int
    view: memoryview
    address: int
    end: int = 0
    is_sent: bool = False

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of free room; None where there is not enough."""
        start = self.end
        if start + num_bytes > len(self.view):
            return None
        self.end = align(start + num_bytes)
        return start

    def storage(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a range as a storage of its own."""
        return torch.frombuffer(self.view, dtype=torch.uint8, count=num_bytes, offset=start).untyped_storage()


def _part(at: int, view: memoryview) -> _Part:
    return _Part(at, view, memory.address_of(view))


class PackedRoom(NamedTuple):
    """Where something lies in a batch's memory: which part (SLOT or SPILL), the offset in it, the length, in bytes."""

    part: int
    start: int
    num_bytes: int


class Packer:
    """Puts one batch after the other into slots. For the thread that made it only."""

    def __init__(self, slots: OwnSlots | None, *, worker: int, pins: bool, moves: bool) -> None:
        self._slots, self._worker, self.pins, self.moves = slots, worker, pins, moves
        self.passes_caches = (pins or moves) and memory.can_pass_caches()  # a GPU reads what is written, and no CPU
        self._thread = threading.get_ident()
        self._parts: list[_Part | None] = [None, None]
        self._spill: Spill | None = None
        self._num_spilled = 0
        self._is_asked = False
        self.refusal: Miss | None = None  # why this batch has no room in a slot

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor in this batch's memory; None where there is none."""
        num_bytes = dtype.itemsize * torch.Size(size).numel()
        room = self.reserve(num_bytes) if num_bytes and threading.get_ident() == self._thread else None
        if room is None:
            return None
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._storage(room))
        return tensor.resize_(size)

    def reserve(self, num_bytes: int) -> PackedRoom | None:
        """Return room in this batch's slot, else in what it spills to, else None; `refusal`: why not in the slot."""
        if self._slots is None:
            self.refusal = Miss.NO_RING
            return None
        if not self._is_asked:
            taken, self._is_asked = self._slots.take(), True
            if taken is None:
                self.refusal = self._why_none(self._slots)
            else:
                self._parts[SLOT] = _part(*taken)
        if (room := self._reserve_in(SLOT, num_bytes)) is not None:
            return room
        self.refusal = self.refusal or Miss.TOO_LARGE
        if self._parts[SPILL] is None:
            self._begin_spill()
        return self._reserve_in(SPILL, num_bytes)

    def write(self, room: PackedRoom, source: memoryview) -> None:
        """Copy plain memory into its room."""
        part = self._parts[room.part]
        assert part is not None  # noqa: S101 - reserve() has said yes
        part.view[room.start : room.start + room.num_bytes] = source

    def copy(self, room: PackedRoom, storage: torch.UntypedStorage, base: int) -> None:
        """Copy a storage, from byte `base` on, into its room."""
        source = tensor_over(storage, base, torch.uint8, (room.num_bytes,), (1,))
        target = torch.empty(0, dtype=torch.uint8).set_(self._storage(room))
        if self.passes_caches and room.num_bytes >= LARGE_BYTES:
            memory.stack_past_caches(target.data_ptr(), [source.data_ptr()], room.num_bytes)
        else:
            target.copy_(source)

    def find(self, address: int, num_bytes: int) -> PackedRoom | None:
        """Return where in this batch's memory an address lies; None outside it."""
        for number, part in enumerate(self._parts):
            if part is not None and 0 <= address - part.address < part.end:
                return PackedRoom(number, address - part.address, num_bytes)
        return None

    def pack(self, number: int, batch: object) -> bytes:
        """Return the message for a batch, and be ready for the next one. Raises what pickling the batch raises."""
        pickler = _BatchPickler(self)
        try:
            pickler.dump(batch)
            for room in pickler.storages:
                part = self._parts[room.part]
                assert part is not None  # noqa: S101 - there is something in it
                part.is_sent = True
            message = encode(self._head(number, pickler), pickler.body)
            self._send_spill()
        except BaseException:
            for part in filter(None, self._parts):
                part.is_sent = False
            raise
        else:
            return message
        finally:
            pickler.clear_memo()  # it refers to itself, and would keep the batch until the garbage collector comes
            self._finish()

    def _begin_spill(self) -> None:
        """Get memory of its own for this batch; without it the batch goes torch's way."""
        with suppress(OSError):
            self._spill = Spill()
            self._num_spilled += 1
            self._parts[SPILL] = _part(self._num_spilled, self._spill.view)

    def _send_spill(self) -> None:
        part = self._parts[SPILL]
        if part is not None and part.is_sent and self._spill is not None and self._slots is not None:
            self._spill.send(self._slots.handover, self._worker, part.at)

    def _reserve_in(self, number: int, num_bytes: int) -> PackedRoom | None:
        part = self._parts[number]
        start = part.reserve(num_bytes) if part is not None else None
        return None if start is None else PackedRoom(number, start, num_bytes)

    def _storage(self, room: PackedRoom) -> torch.UntypedStorage:
        part = self._parts[room.part]
        assert part is not None  # noqa: S101 - reserve() has said yes
        return part.storage(room.start, room.num_bytes)

    @staticmethod
    def _why_none(slots: OwnSlots) -> Miss:
        if slots.is_starting():
            return Miss.STARTING
        return Miss.KEPT if slots.keeps_free_slots() else Miss.NO_SLOT

    def _head(self, number: int, pickler: _BatchPickler) -> Head:
        return Head(
            number=number,
            worker=self._worker,
            generation=self._slots.generation if self._slots else -1,
            oldest_generation=self._slots.oldest() if self._slots else -1,
            parts=tuple((part.at, part.end) if part is not None and part.is_sent else None for part in self._parts),
            # What was collated and then dropped took room, too.
            wanted_bytes=max(pickler.wanted_bytes, sum(part.end for part in self._parts if part is not None)),
            miss=self._miss(pickler),
            storages=tuple((room.part, room.start, room.num_bytes) for room in pickler.storages),
            buffers=tuple(pickler.buffers),
        )

    @staticmethod
    def _miss(pickler: _BatchPickler) -> str | None:
        """Return why the batch is not in a slot as a whole; memory that was shared before takes nothing from that."""
        return None if pickler.miss is None or (pickler.miss is Miss.SHARED and pickler.storages) else str(pickler.miss)

    def _finish(self) -> None:
        slot = self._parts[SLOT]
        if self._slots is not None and slot is not None and not slot.is_sent:
            self._slots.give_back(slot.at)
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self._parts, self._is_asked, self.refusal = [None, None], False, None


class _BatchPickler(ForkingPickler):
    """Pickles one batch; tensors, and the memory of what exports protocol-5 buffers, go into the slot."""

    def __init__(self, packer: Packer) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._packer = packer
        self._token = bytearray(1)  # stands for a tensor among the out-of-band buffers
        self._next: int | None = None
        self._copied: dict[int, list[tuple[int, int, int]]] = {}  # storage -> copied ranges (begin, end, number)
        self.storages: list[PackedRoom] = []
        self.buffers: list[int | None] = []
        self.wanted_bytes = 0
        self.miss: Miss | None = None

    @property
    def body(self) -> memoryview:
        """Return the pickle."""
        return self._file.getbuffer()

    def reducer_override(self, thing: Any) -> Any:  # noqa: ANN401 - pickle's interface
        """Reduce a tensor to its place in the slot; leave everything else as it is."""
        if type(thing) is torch.Tensor:
            return self._reduce(thing)
        if self._packer.moves and type(thing) is PackedSequence:
            return packed_sequence, (thing.data, thing.batch_sizes.tolist(), *thing[2:])
        if isinstance(thing, torch.Tensor):
            self.miss = self.miss or Miss.UNSUPPORTED
        if self._packer.moves and isinstance(thing, torch.Tensor):
            return self._leave(thing, ForkingPickler._extra_reducers.get(type(thing), _reduce_by_value))  # type: ignore[attr-defined] # noqa: SLF001
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - pickle's interface
        found = self._place(tensor) if is_plain(tensor) else None
        if found is None:
            if tensor.layout is not torch.strided or tensor.numel():
                self.miss = self.miss or Miss.UNSUPPORTED
            return self._leave(tensor, reduce_tensor) if self._packer.moves else NotImplemented
        number, start = found
        return rebuild, (self._stand_in(number), tensor.dtype, tuple(tensor.shape), tensor.stride(), start)

    def _leave(self, tensor: torch.Tensor, reduce: Any) -> Any:  # noqa: ANN401 - pickle's interface
        """Let a tensor go torch's own way, to be moved to the device in the rank."""
        reduced = reduce(tensor)
        return (move, (self._stand_in(None), *reduced)) if len(reduced) == 2 else NotImplemented

    def _stand_in(self, number: int | None) -> pickle.PickleBuffer:
        self._next = number
        return pickle.PickleBuffer(self._token)

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle; pickle calls this for each, in order."""
        raw = buffer.raw()
        if raw.obj is self._token:
            self.buffers.append(self._next)
            return False
        if raw.nbytes < _SMALL_BYTES:
            return True
        self.wanted_bytes += align(raw.nbytes)
        room = self._packer.reserve(raw.nbytes)
        self.miss = self.miss or self._packer.refusal
        if room is None:
            return True
        self._packer.write(room, raw)
        self.buffers.append(~self._add(room))
        return False

    def _place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the number of the storage that a tensor has in the slot, and where in it the tensor begins."""
        storage, itemsize = tensor.untyped_storage(), tensor.itemsize
        address, size = storage.data_ptr(), storage.nbytes()
        begin = int(tensor.storage_offset()) * itemsize
        end = begin + itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        for first, last, number in self._copied.get(address, ()):
            if first <= begin and end <= last:
                return number, begin - first
        whole = size <= _MAX_STORAGE_RATIO * (end - begin)
        first, last = (0, size) if whole else (begin - begin % _LARGEST_ITEM_BYTES, end)
        room = self._bring(storage, address, first, last)
        self.miss = self.miss or self._packer.refusal
        if room is None:
            return None
        number = self._add(room)
        self._copied.setdefault(address, []).append((first, last, number))
        return number, begin - first

    def _bring(self, storage: torch.UntypedStorage, address: int, first: int, last: int) -> PackedRoom | None:
        """Return where in the batch's memory bytes `first` to `last` of a storage are; copy them there if need be."""
        self.wanted_bytes += align(last - first)
        inside = self._packer.find(address + first, last - first)
        if inside is not None:
            return inside
        if storage.is_shared() and not self._packer.pins:
            self.miss = self.miss or Miss.SHARED
            return None
        room = self._packer.reserve(last - first)
        if room is not None:
            self._packer.copy(room, storage, first)
        return room

    def _add(self, room: PackedRoom) -> int:
        self.storages.append(room)
        return len(self.storages) - 1


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but strided bytes of this process's memory."""
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()  # noqa: SLF001 - what autograd uses for gradients that are zero: it has no memory
        or not tensor.numel()
    )


def _reduce_by_value(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - pickle's interface
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
