"""Pickle a batch, with its memory out of band. Edge (writes memory).

Comes in: a batch of any type, and the packer that has its slot. Goes out: the pickle, and the places of the memory.
Tensors that only torch can send stay in the pickle.
"""

from __future__ import annotations

import io
import pickle
import sys
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.rnn import PackedSequence

from numapin.data.slots.sizes import align
from numapin.data.wire.message import Miss
from numapin.data.wire.tensors import move, packed_sequence, rebuild
from numapin.data.worker.narrow import Narrower
from numapin.data.worker.storages import Ranges, is_plain
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.worker.packing import PackedRoom, Packer

    Reduced = tuple[Callable[..., object], tuple[object, ...]]  # how pickle rebuilds an object
    Reducer = Callable[[torch.Tensor], str | tuple[Any, ...]]

_LARGEST_ITEM_BYTES: Final = 16  # so that views of any dtype into the same range are aligned
_UNCHANGED: Final[Reduced] = NotImplemented  # leaves an object to pickle
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle, and a tensor below it is no miss
_COPYING_PROTOCOL: Final = 4  # of pickle: NumPy puts a copy of an array's bytes into the pickle
_ARRAY: Final[type | None] = getattr(sys.modules.get("numpy"), "ndarray", None)  # torch imports it if it is there


class BatchPickler(ForkingPickler):
    """Pickles one batch after the other; tensors, and what exports protocol-5 buffers, go into the slot.

    One instance pickles many batches: making it takes longer than pickling a batch of a few tensors.

    Attributes:
        storages: The places of the last batch's storages.
        buffers: What its out-of-band buffers are, as in `Head.buffers`.
        wanted_bytes: The room that it would have needed.
        miss: Why a part of it is not in the slot.
    """

    def __init__(self, packer: Packer) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._packer, self._narrower = packer, Narrower(packer.casts, packer.allocate)
        self._token = bytearray(1)  # stands for a tensor among the out-of-band buffers
        self._next: int | None = None
        self._ranges = Ranges(self._bring, align_bytes=_LARGEST_ITEM_BYTES)
        self.storages: list[PackedRoom] = []
        self.buffers: list[int | None] = []
        self.wanted_bytes = 0
        self.miss: Miss | None = None

    def pickled(self, batch: object) -> bytes:
        """Return the pickle of a batch, and describe it in the attributes. Raises what pickling the batch raises."""
        self.dump(batch)
        return self._file.getvalue()

    def forget(self) -> None:
        """Drop a batch, pickled or not, and be ready for the next one."""
        self.clear_memo()
        self._file.seek(0)
        self._file.truncate()
        self._narrower.forget()
        self._ranges.clear()
        self.storages.clear()
        self.buffers.clear()
        self.wanted_bytes, self.miss = 0, None

    def reducer_override(self, thing: object) -> Reduced:
        """Reduce a tensor to its place in the slot; leave everything else as it is."""
        if isinstance(thing, torch.Tensor):
            return self._reduce_cast(thing) if self._packer.casts else self._reduce_any(thing)
        if type(thing) is _ARRAY:
            return self._reduce_array(thing)
        if self._packer.moves and type(thing) is PackedSequence:
            return packed_sequence, (thing.data, thing.batch_sizes.tolist(), *thing[2:])
        return _UNCHANGED

    def _reduce_cast(self, tensor: torch.Tensor) -> Reduced:
        is_memory = type(tensor) is torch.Tensor and is_plain(tensor)
        narrow = self._narrower.narrow(tensor, is_plain=is_memory)
        reduced = self._reduce_any(narrow)
        if reduced is _UNCHANGED and narrow is not tensor:  # pickle would send the tensor as it was
            return cast("Reduced", _torchs_reducer(narrow)(narrow))
        return reduced

    def _reduce_any(self, tensor: torch.Tensor) -> Reduced:
        return self._reduce(tensor) if type(tensor) is torch.Tensor else self._reduce_subclass(tensor)

    def _reduce_subclass(self, tensor: torch.Tensor) -> Reduced:
        """Reduce a tensor of a subclass as its class does, but for the memory, which goes into the slot."""
        reduce: Reducer = self.dispatch_table.get(type(tensor), _reduce_by_value)
        if reduce is _reduce_by_value and type(tensor).__reduce_ex__ is torch.Tensor.__reduce_ex__:
            build, arguments = _reduce_by_value(tensor)
            placed = self._placed(_as_plain(tensor)) if _is_over_memory(build, arguments) else None
            if placed is not None:
                return build, (placed[0], arguments[1], placed[1], arguments[3])
        self._note_outside(tensor)
        return self._leave(tensor, reduce) if self._packer.moves else _UNCHANGED

    def _reduce(self, tensor: torch.Tensor) -> Reduced:
        placed = self._placed(tensor)
        if placed is not None:
            return placed
        self._note_outside(tensor)
        return self._leave(tensor, reduce_tensor) if self._packer.moves else _UNCHANGED

    def _placed(self, tensor: torch.Tensor) -> Reduced | None:
        """Return how the rank rebuilds a plain tensor from the slot; None if it is not there."""
        if not is_plain(tensor):
            return None
        number, start = self._ranges.find(tensor)
        if number is None:
            return None
        return rebuild, (self._stand_in(number), tensor.dtype, tuple(tensor.shape), tensor.stride(), start)

    def _reduce_array(self, array: Any) -> Reduced:  # noqa: ANN401 - numpy is not a dependency
        """Reduce an array so that it arrives as from torch: writable, contiguous, in this machine's byte order."""
        if array.dtype.byteorder in "<>":  # not the machine's, which is "="
            swapped: Reduced = array.__reduce_ex__(_COPYING_PROTOCOL)
            return swapped
        if not array.flags.forc:  # in neither C's nor Fortran's order: NumPy would keep the order of its axes
            in_order: Reduced = array.copy().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return in_order
        if array.flags.writeable:
            return _UNCHANGED
        build, arguments, *_state = array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if not isinstance(arguments[0], pickle.PickleBuffer):  # not in one piece, or objects: NumPy copies it
            return _UNCHANGED
        raw = arguments[0].raw()
        number = self._store(raw) if raw.nbytes >= _SMALL_BYTES else None
        if number is None:
            copy: Reduced = array.__reduce_ex__(_COPYING_PROTOCOL)
            return copy
        return build, (self._stand_in(number), *arguments[1:])

    def _note_outside(self, tensor: torch.Tensor) -> None:
        """Note that only torch can send a tensor, unless it is small or has no memory."""
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse to answer
            is_strided = tensor.layout is torch.strided and not tensor.is_nested
            is_large = not is_strided or (tensor.device.type != "meta" and tensor.nbytes >= _SMALL_BYTES)
        if is_large:
            self.miss = self.miss or Miss.UNSUPPORTED

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
        number = self._store(raw)
        if number is None:
            return True
        self.buffers.append(number)
        return False

    def _store(self, raw: memoryview) -> int | None:
        """Copy plain memory into the slot; return its number for `Head.buffers`, None if there is no room."""
        self.wanted_bytes += align(raw.nbytes)
        inside = None if raw.readonly else self._packer.find(memory.address_of(raw), raw.nbytes)
        room = inside or self._packer.reserve(raw.nbytes)
        self.miss = self.miss or self._packer.refusal
        if room is None:
            return None
        if inside is None:
            self._packer.write(room, raw)
        return ~self._add(room)

    def _bring(self, storage: torch.UntypedStorage, first: int, last: int) -> int | None:
        """Have bytes `first` to `last` of a storage in the slot; return their number, None if there is no room."""
        room = self._room_for(storage, first, last)
        self.miss = self.miss or self._packer.refusal
        return None if room is None else self._add(room)

    def _room_for(self, storage: torch.UntypedStorage, first: int, last: int) -> PackedRoom | None:
        """Return the place of these bytes in the batch's memory; copy them there unless they are there already."""
        self.wanted_bytes += align(last - first)
        inside = self._packer.find(storage.data_ptr() + first, last - first)
        if inside is not None:
            return inside
        if storage.is_shared() and not self._packer.pins:
            # The rank's tensor is the worker's memory, as with torch, so a copy would not be the same.
            if last - first >= _SMALL_BYTES:
                self.miss = self.miss or self._packer.refusal or Miss.SHARED  # torch's own collate shares memory
            return None
        room = self._packer.reserve(last - first)
        if room is not None:
            self._packer.copy(room, storage, first)
        return room

    def _add(self, room: PackedRoom) -> int:
        self.storages.append(room)
        return len(self.storages) - 1


def _torchs_reducer(tensor: torch.Tensor) -> Reducer:
    reducers: dict[type, Reducer] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    return reducers.get(type(tensor), _reduce_by_value)


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass as one of torch's own, over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():  # else the subclass decides what it returns
        return tensor.as_subclass(torch.Tensor)


def _is_over_memory(build: object, arguments: tuple[Any, ...]) -> bool:
    """Return whether a tensor of a subclass is rebuilt from (function, class, its storage and shape, attributes)."""
    if build is not _rebuild_from_type_v2 or arguments[0] not in (_rebuild_tensor_v2, _rebuild_tensor_v3):
        return False
    *_, hooks = arguments[2][:6]
    return not hooks


def _reduce_by_value(tensor: torch.Tensor) -> tuple[Any, ...]:
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced
