"""Put batches into a worker's slots. Edge (writes memory).

Comes in: a batch of any type, and the worker's slots. Goes out: the message for the rank.

A batch has at most one slot, taken at its first tensor and filled from its start. What does not fit is spilled to
separate memory. Tensors that only torch can send stay in the pickle.
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
from numapin.data.wire.message import SLOT, SPILL, Head, Miss, encode
from numapin.data.wire.spill import Spill
from numapin.data.wire.tensors import move, packed_sequence, rebuild, tensor_over
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.slots.control import OwnSlots

    Reduced = tuple[Callable[..., object], tuple[object, ...]]  # how pickle rebuilds an object
    Reducer = Callable[[torch.Tensor], str | tuple[Any, ...]]

# The whole storage of a view is sent, so that views still share it, unless it is this many times the view's size.
_MAX_STORAGE_RATIO: Final = 4
_LARGEST_ITEM_BYTES: Final = 16  # so that views of any dtype into the same range are aligned
LARGE_BYTES: Final = 4 << 20  # larger batches are worth threads, and do not belong in the caches
_UNCHANGED: Final[Reduced] = NotImplemented  # leaves an object to pickle
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle


@dataclass(slots=True)
class _Part:
    """Memory that one batch is being written to: a slot or a spill. `at` is the number of either."""

    at: int
    view: memoryview
    address: int
    end: int = 0
    is_sent: bool = False

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of free room; None if there is not enough."""
        start = self.end
        if start + num_bytes > len(self.view):
            return None
        self.end = align(start + num_bytes)
        return start

    def storage(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a range as a separate storage."""
        return torch.frombuffer(self.view, dtype=torch.uint8, count=num_bytes, offset=start).untyped_storage()


def _part(at: int, view: memoryview) -> _Part:
    return _Part(at, view, memory.address_of(view))


class PackedRoom(NamedTuple):
    """A range of a batch's memory: the part (SLOT or SPILL), the offset in it and the length, in bytes."""

    part: int
    start: int
    num_bytes: int


class Packer:
    """Puts batches into slots, one after the other. To be used in the thread that made it."""

    def __init__(self, slots: OwnSlots | None, *, worker: int, pins: bool, moves: bool) -> None:
        self._slots, self._worker, self.pins, self.moves = slots, worker, pins, moves
        self.passes_caches = (pins or moves) and memory.can_pass_caches()  # only a GPU reads the batch
        self._thread = threading.get_ident()
        self._parts: dict[int, _Part] = {}  # SLOT, SPILL
        self._spill: Spill | None = None
        self._num_spilled = 0
        self._has_asked = False  # for a slot
        self.refusal: Miss | None = None  # why this batch has no room in a slot

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialized contiguous tensor in this batch's memory; None if there is no room."""
        num_bytes = dtype.itemsize * torch.Size(size).numel()
        is_possible = num_bytes > 0 and threading.get_ident() == self._thread
        room = self.reserve(num_bytes) if is_possible else None
        if room is None:
            return None
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._storage(room))
        return tensor.resize_(size)

    def reserve(self, num_bytes: int) -> PackedRoom | None:
        """Return room in this batch's slot, else in its spill, else None. `refusal` says why not in the slot."""
        if self._slots is None:
            self.refusal = Miss.NO_RING
            return None
        if not self._has_asked:
            self._take_slot(self._slots)
        room = self._reserve_in(SLOT, num_bytes)
        if room is not None:
            return room
        self.refusal = self.refusal or Miss.TOO_LARGE
        if SPILL not in self._parts:
            self._begin_spill()
        return self._reserve_in(SPILL, num_bytes)

    def _take_slot(self, slots: OwnSlots) -> None:
        self._has_asked = True
        try:
            taken = slots.take()
        except OSError:  # no descriptor or no address space: the batch gets memory of its own, or goes torch's way
            taken = None
        if taken is None:
            self.refusal = _why_none(slots)
        else:
            self._parts[SLOT] = _part(*taken)

    def write(self, room: PackedRoom, source: memoryview) -> None:
        """Copy plain memory into its room."""
        self._parts[room.part].view[room.start : room.start + room.num_bytes] = source

    def copy(self, room: PackedRoom, storage: torch.UntypedStorage, base: int) -> None:
        """Copy a storage from byte `base` into its room."""
        source = tensor_over(storage, base, torch.uint8, (room.num_bytes,), (1,))
        target = torch.empty(0, dtype=torch.uint8).set_(self._storage(room))
        if self.passes_caches and room.num_bytes >= LARGE_BYTES:
            memory.stack_past_caches(target.data_ptr(), [source.data_ptr()], room.num_bytes)
        else:
            target.copy_(source)

    def find(self, address: int, num_bytes: int) -> PackedRoom | None:
        """Return where in this batch's memory an address lies; None if outside it."""
        for number, part in self._parts.items():
            if 0 <= address - part.address < part.end:
                return PackedRoom(number, address - part.address, num_bytes)
        return None

    def pack(self, number: int, batch: object) -> bytes:
        """Return the message for a batch, and be ready for the next one. Raises what pickling the batch raises."""
        pickler = _BatchPickler(self)
        try:
            pickler.dump(batch)
            for room in pickler.storages:
                self._parts[room.part].is_sent = True
            message = encode(self._head(number, pickler), pickler.body)
            self._send_spill()
        except BaseException:
            for part in self._parts.values():
                part.is_sent = False
            raise
        else:
            return message
        finally:
            pickler.clear_memo()  # it refers to itself, and would keep the batch until the next garbage collection
            self._finish()

    def _begin_spill(self) -> None:
        """Get separate memory for this batch; without it, torch sends the batch."""
        with suppress(OSError):
            self._spill = Spill()
            self._num_spilled += 1
            self._parts[SPILL] = _part(self._num_spilled, self._spill.view)

    def _send_spill(self) -> None:
        part = self._parts.get(SPILL)
        if part is not None and part.is_sent and self._spill is not None and self._slots is not None:
            self._spill.send(self._slots.handover, self._worker, part.at)

    def _reserve_in(self, number: int, num_bytes: int) -> PackedRoom | None:
        part = self._parts.get(number)
        start = None if part is None else part.reserve(num_bytes)
        return None if start is None else PackedRoom(number, start, num_bytes)

    def _storage(self, room: PackedRoom) -> torch.UntypedStorage:
        return self._parts[room.part].storage(room.start, room.num_bytes)

    def _head(self, number: int, pickler: _BatchPickler) -> Head:
        num_used_bytes = sum(part.end for part in self._parts.values())  # includes what was collated and then dropped
        return Head(
            number=number,
            worker=self._worker,
            generation=self._slots.generation if self._slots else -1,
            oldest_generation=self._slots.oldest() if self._slots else -1,
            parts=(self._sent(SLOT), self._sent(SPILL)),
            wanted_bytes=max(pickler.wanted_bytes, num_used_bytes),
            miss=pickler.batch_miss,
            storages=tuple((room.part, room.start, room.num_bytes) for room in pickler.storages),
            buffers=tuple(pickler.buffers),
        )

    def _sent(self, kind: int) -> tuple[int, int] | None:
        part = self._parts.get(kind)
        return (part.at, part.end) if part is not None and part.is_sent else None

    def _finish(self) -> None:
        slot = self._parts.get(SLOT)
        if self._slots is not None and slot is not None and not slot.is_sent:
            self._slots.give_back(slot.at)
        if self._spill is not None:
            self._spill.close()
            self._spill = None
        self._parts, self._has_asked, self.refusal = {}, False, None


def _why_none(slots: OwnSlots) -> Miss:
    """Return why a worker gets no slot."""
    if slots.is_starting():
        return Miss.STARTING
    return Miss.KEPT if slots.keeps_free_slots() else Miss.NO_SLOT


class _BatchPickler(ForkingPickler):
    """Pickles one batch; tensors, and memory that is exported as protocol-5 buffers, go into the slot."""

    def __init__(self, packer: Packer) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._packer = packer
        self._token = bytearray(1)  # stands for a tensor among the out-of-band buffers
        self._next: int | None = None
        self._copied: dict[int, list[tuple[int, int, int]]] = {}  # address -> copied ranges (begin, end, number)
        self.storages: list[PackedRoom] = []
        self.buffers: list[int | None] = []
        self.wanted_bytes = 0
        self.miss: Miss | None = None

    @property
    def body(self) -> memoryview:
        """Return the pickle."""
        return self._file.getbuffer()

    @property
    def batch_miss(self) -> Miss | None:
        """Return why the batch is not in a slot as a whole; parts in shared memory do not count beside others."""
        is_in_slot = self.miss is Miss.SHARED and bool(self.storages)
        return None if is_in_slot else self.miss

    def reducer_override(self, thing: object) -> Reduced:
        """Reduce a tensor to its place in the slot; leave everything else as it is."""
        if type(thing) is torch.Tensor:
            return self._reduce(thing)
        if isinstance(thing, torch.Tensor):
            return self._reduce_subclass(thing)
        if self._packer.moves and type(thing) is PackedSequence:
            return packed_sequence, (thing.data, thing.batch_sizes.tolist(), *thing[2:])
        return _UNCHANGED

    def _reduce_subclass(self, tensor: torch.Tensor) -> Reduced:
        self.miss = self.miss or Miss.UNSUPPORTED
        if not self._packer.moves:
            return _UNCHANGED
        reducers: dict[type, Reducer] = ForkingPickler._extra_reducers  # type: ignore[attr-defined] # noqa: SLF001
        return self._leave(tensor, reducers.get(type(tensor), _reduce_by_value))

    def _reduce(self, tensor: torch.Tensor) -> Reduced:
        found = self._place(tensor) if is_plain(tensor) else None
        if found is not None:
            number, start = found
            return rebuild, (self._stand_in(number), tensor.dtype, tuple(tensor.shape), tensor.stride(), start)
        if tensor.layout is not torch.strided or tensor.numel():
            self.miss = self.miss or Miss.UNSUPPORTED
        return self._leave(tensor, reduce_tensor) if self._packer.moves else _UNCHANGED

    def _leave(self, tensor: torch.Tensor, reduce: Reducer) -> Reduced:
        """Let torch send a tensor, which the rank then moves to the device."""
        reduced = reduce(tensor)
        return (move, (self._stand_in(None), *reduced)) if len(reduced) == 2 else _UNCHANGED

    def _stand_in(self, number: int | None) -> pickle.PickleBuffer:
        self._next = number
        return pickle.PickleBuffer(self._token)

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle. pickle calls this for each one, in order."""
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
        """Return the number of a tensor's storage and the tensor's offset in it; None if there is no room."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        begin, end = _byte_range(tensor)
        copied = self._copied.setdefault(address, [])
        for first, last, number in copied:
            if first <= begin and end <= last:
                return number, begin - first
        is_whole = size <= _MAX_STORAGE_RATIO * (end - begin)
        first, last = (0, size) if is_whole else (begin - begin % _LARGEST_ITEM_BYTES, end)
        room = self._bring(storage, first, last)
        self.miss = self.miss or self._packer.refusal
        if room is None:
            return None
        number = self._add(room)
        copied.append((first, last, number))
        return number, begin - first

    def _bring(self, storage: torch.UntypedStorage, first: int, last: int) -> PackedRoom | None:
        """Return where bytes `first` to `last` of a storage are in the batch's memory; copy them there if need be."""
        self.wanted_bytes += align(last - first)
        inside = self._packer.find(storage.data_ptr() + first, last - first)
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


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the begin and end of a tensor in its storage, in bytes."""
    itemsize = tensor.itemsize
    begin = int(tensor.storage_offset()) * itemsize
    last_element = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + itemsize * (1 + last_element)


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
        or tensor._is_zerotensor()  # noqa: SLF001 - autograd's zero gradients, which have no memory
        or not tensor.numel()
    )


def _reduce_by_value(tensor: torch.Tensor) -> str | tuple[Any, ...]:
    reduced: str | tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced
