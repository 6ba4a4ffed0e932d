"""A worker's end: put batches into its slots. Edge (writes memory).

Comes in: a batch of any type, and the worker's slots. Goes out: the message for the rank.

A batch has at most one slot, asked for at its first tensor; room in it is handed out upwards. What does not fit, or
what only torch can send, stays in the pickle and goes torch's own way.
"""

from __future__ import annotations

import io
import pickle
import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import reduce_tensor

from numapin.data.parcel import Head, Miss, encode, move, rebuild, tensor_over
from numapin.data.slots import align

if TYPE_CHECKING:
    from numapin.data.slots import OwnSlots

_MAX_STORAGE_RATIO: Final = (
    4  # a view's whole storage is sent, so that views go on sharing it, up to this many times it
)
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle


@dataclass(slots=True)
class _Packing:
    """The slot that one batch is being written into."""

    slot: int
    view: memoryview
    address: int
    end: int = 0

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of free room; None where there is not enough."""
        start = self.end
        if start + num_bytes > len(self.view):
            return None
        self.end = align(start + num_bytes)
        return start

    def storage(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a range of the slot as a storage of its own."""
        return torch.frombuffer(self.view, dtype=torch.uint8, count=num_bytes, offset=start).untyped_storage()


class Packer:
    """Puts one batch after the other into slots. For the thread that made it only."""

    def __init__(self, slots: OwnSlots | None, *, worker: int, pins: bool, moves: bool) -> None:
        self._slots, self._worker, self.pins, self.moves = slots, worker, pins, moves
        self._packing: _Packing | None = None
        self._thread = threading.get_ident()
        self._asked = False
        self.refusal: Miss | None = None  # why this batch has no room (left)

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor in this batch's slot; None where there is no room."""
        num_bytes = dtype.itemsize * torch.Size(size).numel()
        start = self.reserve(num_bytes) if num_bytes and threading.get_ident() == self._thread else None
        if start is None or self._packing is None:
            return None
        tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(self._packing.storage(start, num_bytes))
        return tensor.resize_(size)

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of `num_bytes` in this batch's slot; None, with the reason in `refusal`, without room."""
        if not self._asked:
            self._packing, self._asked = self._take(), True
        start = self._packing.reserve(num_bytes) if self._packing else None
        if start is None:
            self.refusal = self.refusal or Miss.TOO_LARGE
        return start

    def write(self, start: int, source: memoryview) -> None:
        """Copy plain memory into the slot."""
        assert self._packing is not None  # noqa: S101 - reserve() has said yes
        self._packing.view[start : start + len(source)] = source

    def copy(self, start: int, storage: torch.UntypedStorage, base: int, num_bytes: int) -> None:
        """Copy `num_bytes` of a storage, from byte `base` on, into the slot."""
        assert self._packing is not None  # noqa: S101 - reserve() has said yes
        source = tensor_over(storage, base, torch.uint8, (num_bytes,), (1,))
        torch.empty(0, dtype=torch.uint8).set_(self._packing.storage(start, num_bytes)).copy_(source)

    def find(self, address: int) -> int | None:
        """Return where in this batch's slot an address lies; None outside it."""
        if self._packing is None:
            return None
        start = address - self._packing.address
        return start if 0 <= start < len(self._packing.view) else None

    def pack(self, number: int, batch: object) -> bytes:
        """Return the message for a batch, and be ready for the next one. Raises what pickling the batch raises."""
        pickler = _BatchPickler(self)
        is_sent = False
        try:
            pickler.dump(batch)
            is_sent = bool(pickler.storages)
            return encode(self._head(number, pickler), pickler.body)
        finally:
            pickler.clear_memo()  # it refers to itself, and would keep the batch until the garbage collector comes
            self._finish(is_sent=is_sent)

    def drop(self) -> None:
        """Give back the slot of a batch that is not sent."""
        self._finish(is_sent=False)

    def _take(self) -> _Packing | None:
        if self._slots is None:
            self.refusal = Miss.NO_RING
            return None
        taken = self._slots.take()
        if taken is None:
            self.refusal = self._why_none(self._slots)
            return None
        slot, view = taken
        return _Packing(slot, view, torch.frombuffer(view, dtype=torch.uint8, count=1).data_ptr())

    @staticmethod
    def _why_none(slots: OwnSlots) -> Miss:
        if slots.is_starting():
            return Miss.STARTING
        return Miss.KEPT if slots.keeps_free_slots() else Miss.NO_SLOT

    def _head(self, number: int, pickler: _BatchPickler) -> Head:
        packing = self._packing if pickler.storages else None
        return Head(
            number=number,
            worker=self._worker,
            generation=self._slots.generation if self._slots else -1,
            slot=packing.slot if packing else None,
            used_bytes=packing.end if packing else 0,
            wanted_bytes=pickler.wanted_bytes,
            miss=pickler.miss.value if pickler.miss else None,
            storages=tuple(pickler.storages),
            buffers=tuple(pickler.buffers),
        )

    def _finish(self, *, is_sent: bool) -> None:
        if self._packing is not None and self._slots is not None and not is_sent:
            self._slots.give_back(self._packing.slot)
        self._packing, self._asked, self.refusal = None, False, None


class _BatchPickler(ForkingPickler):
    """Pickles one batch; tensors, and the memory of what exports protocol-5 buffers, go into the slot."""

    def __init__(self, packer: Packer) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._packer = packer
        self._token = bytearray(1)  # stands for a tensor among the out-of-band buffers
        self._next: int | None = None
        self._copied: dict[int, list[tuple[int, int, int]]] = {}  # storage -> copied ranges (begin, end, number)
        self.storages: list[tuple[int, int]] = []
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
        if self._packer.moves and isinstance(thing, torch.Tensor):
            return self._leave(thing, ForkingPickler._extra_reducers.get(type(thing), _reduce_by_value))  # type: ignore[attr-defined] # noqa: SLF001
        return NotImplemented

    def _reduce(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - pickle's interface
        found = self._place(tensor) if _is_plain(tensor) else None
        if found is None:
            if tensor.layout is not torch.strided or tensor.numel():
                self.miss = self.miss or self._packer.refusal or Miss.UNSUPPORTED
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
        start = self._packer.reserve(raw.nbytes)
        if start is None:
            self.miss = self.miss or self._packer.refusal
            return True
        self._packer.write(start, raw)
        self.buffers.append(~self._add(start, raw.nbytes))
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
        first, last = (0, size) if size <= _MAX_STORAGE_RATIO * (end - begin) else (begin, end)
        start = self._bring(storage, address, first, last)
        if start is None:
            return None
        number = self._add(start, last - first)
        self._copied.setdefault(address, []).append((first, last, number))
        return number, begin - first

    def _bring(self, storage: torch.UntypedStorage, address: int, first: int, last: int) -> int | None:
        """Return where in the slot bytes `first` to `last` of a storage are, copying them there if need be."""
        self.wanted_bytes += align(last - first)
        inside = self._packer.find(address + first)
        if inside is not None:
            return inside
        if storage.is_shared() and not self._packer.pins:
            self.miss = self.miss or self._packer.refusal or Miss.SHARED
            return None
        start = self._packer.reserve(last - first)
        if start is not None:
            self._packer.copy(start, storage, first, last - first)
        return start

    def _add(self, start: int, num_bytes: int) -> int:
        self.storages.append((start, num_bytes))
        return len(self.storages) - 1


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but strided bytes of this process's memory."""
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or not tensor.numel()
    )


def _reduce_by_value(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - pickle's interface
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
