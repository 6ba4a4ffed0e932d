"""Put batches into a worker's slots. Edge (writes memory).

Comes in: a batch of any type, and the worker's slots. Goes out: the message for the rank.

A batch has one slot, taken at its first tensor and filled from its start; a further one if it does not fit. Tensors
that only torch can send stay in the pickle.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.rnn import PackedSequence

from numapin.data.slots.sizes import align
from numapin.data.wire.message import NOTHING, Head, Miss, PartHead, encode
from numapin.data.wire.tensors import move, packed_sequence, rebuild
from numapin.data.worker.narrow import Narrower
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.casting import Casts
    from numapin.data.slots.handover import Handover
    from numapin.data.wire.grant import Grant
    from numapin.data.worker.slots import BatchMemory, WorkerSlots

    Reduced = tuple[Callable[..., object], tuple[object, ...]]  # how pickle rebuilds an object
    Reducer = Callable[[torch.Tensor], str | tuple[Any, ...]]

# The whole storage of a view is sent, so that views still share it, unless it is this many times the view's size.
_MAX_STORAGE_RATIO: Final = 4
_LARGEST_ITEM_BYTES: Final = 16  # so that views of any dtype into the same range are aligned
LARGE_BYTES: Final = 4 << 20  # larger batches are worth threads, and do not belong in the caches
_UNCHANGED: Final[Reduced] = NotImplemented  # leaves an object to pickle
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle, and a tensor below it is no miss
_COPYING_PROTOCOL: Final = 4  # of pickle: NumPy puts a copy of an array's bytes into the pickle
_ARRAY: Final[type | None] = getattr(sys.modules.get("numpy"), "ndarray", None)  # torch imports it if it is there


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
        self.refusal: Miss | None = None  # why this batch has no room in a slot

    def accept(self, grant: Grant, descriptors: Handover) -> None:
        """Take over the slot that came with a task."""
        if self._slots is not None:
            self._slots.accept(grant, descriptors)

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialised contiguous tensor in this batch's memory; None if there is none."""
        num_bytes = dtype.itemsize * torch.Size(size).numel()
        room = self.reserve(num_bytes) if num_bytes and threading.get_ident() == self._thread else None
        if room is None:
            return None
        storage = self._parts[room.part].storage(room.start, room.num_bytes)
        tensor: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage)
        return tensor.resize_(size)

    def reserve(self, num_bytes: int) -> PackedRoom | None:
        """Return room in this batch's memory, None if there is none; `refusal`: why."""
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
        pickler = _BatchPickler(self)
        try:
            pickler.dump(batch)
            sent = self._send(pickler)
            return encode(self._head(number, pickler, sent), pickler.body)
        finally:
            pickler.clear_memo()  # it refers to itself, and would keep the batch until the garbage collector comes
            self.finish()

    def finish(self) -> None:
        """End a batch, sent or not: keep the memory that was not sent for the next one."""
        if self._slots is not None:
            for part in self._parts:
                if not part.is_sent:
                    self._slots.put_back(part)
        self._parts, self.refusal = [], None

    def _begin_part(self, num_bytes: int) -> bool:
        if self._slots is None:
            self.refusal = Miss.NO_SLOTS
            return False
        part = self._slots.take(num_bytes)
        if part is None:
            self.refusal = Miss.NO_MEMORY
            return False
        self._parts.append(part)
        return True

    def _send(self, pickler: _BatchPickler) -> tuple[PartHead, ...]:
        """Hand the new slots among the batch's parts to the rank; parts of which nothing is sent have no bytes."""
        used = {room.part for room in pickler.storages}
        sent = [part for number, part in enumerate(self._parts) if number in used]
        for part in sent:
            if self._slots is not None:
                self._slots.send(part)
        for part in sent:  # only now: if one of them cannot be handed over, nothing is sent
            part.is_sent = True
        return tuple([part.head() if part.is_sent else NOTHING for part in self._parts])

    def _head(self, number: int, pickler: _BatchPickler, parts: tuple[PartHead, ...]) -> Head:
        refused, kept, notes = self._slots.report() if self._slots else ((), (), ())
        return Head(
            number=number,
            worker=self._worker,
            parts=parts,
            # What was collated and then dropped took room, too.
            wanted_bytes=max(pickler.wanted_bytes, sum(part.end for part in self._parts)),
            miss=pickler.miss,
            storages=tuple((room.part, room.start, room.num_bytes) for room in pickler.storages),
            buffers=tuple(pickler.buffers),
            refused=refused,
            kept=kept,
            notes=notes,
        )


class _BatchPickler(ForkingPickler):
    """Pickles one batch; tensors, and memory that is exported as protocol-5 buffers, go into the slot."""

    def __init__(self, packer: Packer) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._packer, self._narrower = packer, Narrower(packer.casts, packer.allocate)
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
        found = self._place(tensor) if is_plain(tensor) else None
        if found is None:
            return None
        number, start = found
        return rebuild, (self._stand_in(number), tensor.dtype, tuple(tensor.shape), tensor.stride(), start)

    def _reduce_array(self, array: Any) -> Reduced:  # noqa: ANN401 - numpy is not a dependency
        """Reduce an array so that it arrives as in torch's messages: writable, and in this machine's byte order."""
        if array.dtype.byteorder in "<>":  # not the machine's, which is "="
            swapped: Reduced = array.__reduce_ex__(_COPYING_PROTOCOL)
            return swapped
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
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - a subclass may refuse to answer
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
            # The rank's tensor is the worker's memory, as with torch, so a copy would not be the same.
            if last - first >= _SMALL_BYTES:
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
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
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


def _torchs_reducer(tensor: torch.Tensor) -> Reducer:
    reducers: dict[type, Reducer] = ForkingPickler._extra_reducers  # type: ignore[attr-defined] # noqa: SLF001
    return reducers.get(type(tensor), _reduce_by_value)


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass as one of torch's own, over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - else the subclass decides what it returns
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
