"""Put batches into a worker's slots.

A batch has one slot, taken at its first tensor and filled from its start. If it turns out to be too large for the slot,
it goes on at the same offset in a new one, into which the beginning is copied when the batch is sent. The batch is
pickled with its memory out of band (PEP 574); tensors that only torch can send stay in the pickle. A new slot's pages
are faulted in as they are needed, so that no more memory is used than the batch has, and that a lack of memory is an
error and no SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from operator import mul
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils.rnn import PackedSequence

from numapin.data.casting import cast_tensor
from numapin.data.message import (
    DTYPES,
    IN_MESSAGE,
    NO_SLOT,
    NOTHING,
    Head,
    Miss,
    Report,
    buffer,
    encode,
    move,
    packed_sequence,
)
from numapin.data.slots import align, capacity_for, map_memfd, ordinary_memory
from numapin.data.torch_names import (
    ExceptionWrapper,
    _rebuild_from_type_v2,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
)
from numapin.system import memory, pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.data.casting import Casts
    from numapin.data.handover import Handover
    from numapin.data.locality import Locality
    from numapin.data.message import Grant
    from numapin.system.memory import Window

    Room = tuple[int, int]  # the offset in the batch's memory, the length, in bytes
    Reduced = tuple[Callable[..., object], tuple[object, ...]]  # how pickle rebuilds an object

SLOT_NAME: Final = "numapin-slot"
"""The name of a slot's memfd, in /proc."""

MOST_KEPT: Final = 8
"""The number of batches whose memory a worker's code may keep; with more, later batches are copied into slots."""

LARGE_BYTES: Final = 4 << 20  # larger batches are worth threads, and do not belong in the caches
_IN_MESSAGE_BYTES: Final = 8 << 10  # a slot costs a loop that keeps many batches more than the copy does
_SEALABLE: Final = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_NEVER_EXECUTED: Final = 0x0008  # MFD_NOEXEC_SEAL, since Linux 6.3; Python has no name for it
_FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_UNKNOWN_BYTES: Final = 4 << 30  # address space, not memory, for a batch of unknown size, or one that was too large
_PIPE_BYTES: Final = 64 << 10  # what a pipe has room for; longer pickles take many calls to get through it
_LARGEST_ITEM_BYTES: Final = 16  # so that views of any dtype into the same range are aligned
_SMALL_BYTES: Final = 1024  # plain memory below this stays in the pickle, and a tensor below it is no miss
_PLAIN_KEYS: Final = frozenset((str, int))
_MAX_STORAGE_RATIO: Final = 4  # a view's whole storage is sent, so that views share it, unless it is larger than this
_ARRAY: Final[type | None] = getattr(sys.modules.get("numpy"), "ndarray", None)  # torch imports it if it is there
_UNCHANGED: Final[Reduced] = NotImplemented  # leaves an object to pickle
_DTYPE_NUMBERS: Final = {dtype: number for number, dtype in enumerate(DTYPES)}

own: Packer | None = None  # this worker's
handed_down: dict[int, tuple[torch.Tensor, int]] = {}  # the slots that this worker takes over, by number


def allocate(dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
    """Return an uninitialized tensor in the memory of the batch that is being made; None if it has no room."""
    return None if own is None else own.allocate(dtype, size)


def pack(number: int, batch: object, *, where: str) -> bytes:
    """Return the message for a batch. If it cannot be pickled, the rank raises that error when the batch is due.

    torch's own queue prints such an error in the worker, and the rank waits forever.
    """
    packer = own or Packer(None, worker=0, pins=False, moves=False)
    try:
        return packer.pack(number, batch)
    except Exception:  # a user's __reduce__ may raise anything
        return packer.pack(number, ExceptionWrapper(where=where))


@dataclass(slots=True, eq=False)
class BatchMemory:
    """A slot that one batch is being written into. Numbers in bytes."""

    number: int  # the slot's, or IN_MESSAGE
    owner: torch.Tensor | None  # the slot's memory; None in the message
    view: memoryview
    address: int
    capacity: int
    populated: int  # up to where pages exist for sure
    is_new: bool = False  # whether it was made for this batch
    fd: int | None = None  # of a new slot, until it is sent
    end: int = 0  # where free room begins
    start: int = 0  # the batch before this is in another memory

    def reserve(self, num_bytes: int) -> int | None:
        """Return the offset of free room, None if there is not enough. Raises OSError if the kernel has no memory."""
        start, stop = self.end, self.end + num_bytes
        if stop > self.capacity:
            return None
        if stop > self.populated:
            until = min(align(stop, os.sysconf("SC_PAGESIZE")), self.capacity)
            pages.touch(self.address + self.populated, until - self.populated)
            self.populated = until
        self.end = align(stop)
        return start


class WorkerSlots:
    """The slots that one worker has: granted ones, and those that it makes."""

    def __init__(
        self,
        arrivals: Handover,
        locality: Locality,
        handed_down: dict[int, tuple[torch.Tensor, int]],
        *,
        serial: int,
        makes_small: bool = True,
    ) -> None:
        """Take over the slots of the worker before this one.

        `serial` is unique among a loader's workers. `makes_small`: make slots for small batches, too.
        """
        self._arrivals, self._locality, self._makes_small = arrivals, locality, makes_small
        self._next_number = serial << 32
        self._expected_bytes = 0
        self._mapped = handed_down.copy()
        """The slots, by number: their memory, and up to where pages exist for sure."""
        self._held: list[int] = []  # granted and not used yet
        self._windows: dict[int, weakref.ref[Window]] = {}  # of batches that were made here
        self._inherited: set[int] = set()  # that a child of this worker may read; not written again
        self._new_inherited: list[int] = []  # of these, what the rank has not heard of
        self._refused: list[int] = []
        self._notes: list[str] = []  # texts for the rank to report

    def accept(self, grant: Grant) -> None:
        """Take over the grant of a task. A slot that cannot be written to is refused."""
        for number in grant.forgotten:
            self._mapped.pop(number, None)
            self._inherited.discard(number)
        self._expected_bytes = grant.expected_bytes
        if grant.slot == NO_SLOT:
            return
        # There was no memory to map it, or a collate_fn or a dataset keeps a batch in it.
        if grant.slot not in self._mapped or self._is_kept(grant.slot):
            self._refused.append(grant.slot)
        else:
            self._held.append(grant.slot)

    def take(self, num_bytes: int) -> BatchMemory:
        """Return memory for a batch of at least `num_bytes`, in a slot or the message. Raises OSError."""
        for number in reversed(self._held):
            owner, populated = self._mapped[number]
            if owner.nbytes >= num_bytes and not self._is_kept(number):
                self._held.remove(number)
                return self._memory(number, None, owner, populated)
        if len(self._held) > 1:  # they are of no use to this worker
            self._refused.append(self._held.pop(0))
        if not self._makes_small and max(num_bytes, self._expected_bytes) <= _IN_MESSAGE_BYTES:
            view, size = ordinary_memory(_IN_MESSAGE_BYTES), _IN_MESSAGE_BYTES
            return BatchMemory(IN_MESSAGE, None, view, memory.address_of(view), size, populated=size)
        return self._make(max(num_bytes, self._expected_bytes or _UNKNOWN_BYTES))

    def grow(self, full: BatchMemory, num_bytes: int) -> BatchMemory:
        """Return memory in which a batch goes on, from its `start`, that is in `full` so far. Raises OSError."""
        needed = full.end + num_bytes
        try:
            larger = self._make(max(needed, _UNKNOWN_BYTES))
        except OSError:  # address space is limited
            larger = self._make(needed)
        try:
            larger.reserve(needed)  # memory for the beginning, too
        except OSError:
            self.put_back(larger)
            raise
        larger.start = full.end
        return larger

    def put_back(self, made: BatchMemory) -> None:
        """Keep a granted slot that was taken and not sent for the next batch; a new one is dropped."""
        if made.fd is not None:
            os.close(made.fd)
        elif not made.is_new and made.number != IN_MESSAGE:  # else it could not be sent, and is closed
            self._held.append(made.number)

    def send(self, written: BatchMemory) -> None:
        """Hand a batch's slot to the rank, if it is new; call it before the message about it. Raises OSError."""
        owner = written.owner
        if owner is None:
            return
        fd, written.fd = written.fd, None
        try:
            if fd is not None:
                written.capacity = min(written.capacity, capacity_for(max(written.end, self._expected_bytes)))
                os.ftruncate(fd, written.capacity)
                # A process that cuts the file would end all that have it mapped with SIGBUS.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
                self._arrivals.send(written.number, fd)
            if fd is not None and owner.nbytes > written.capacity:
                with suppress(OSError):  # no address space: the slot is refused when it is granted
                    mapped = map_memfd(fd, written.capacity)
                    self._mapped[written.number] = mapped, min(written.populated, written.capacity)
            else:
                self._mapped[written.number] = owner, written.populated
        finally:
            if fd is not None:
                os.close(fd)

    def report(self, own: int) -> Report:
        """Return what the rank is told with a batch in slot `own`."""
        kept = [number for number, window in self._windows.items() if window() is not None and number != own]
        if len(self._windows) > len(self._mapped):  # some are of slots that the rank has given up
            self._windows = {number: window for number, window in self._windows.items() if window() is not None}
        if not (kept or self._refused or self._new_inherited or self._notes):
            return NOTHING
        notes = tuple(dict.fromkeys(self._notes))
        told = Report(tuple(kept), tuple(self._refused), tuple(self._new_inherited), notes)
        self._refused, self._new_inherited, self._notes = [], [], []
        return told

    def note_fork(self) -> None:
        """Never write again to slots that a child forked here may read: its end is not watched."""
        windows = self._windows.copy()  # in one step: another thread may have forked
        new = [number for number, window in windows.items() if window() is not None and number not in self._inherited]
        self._inherited.update(new)
        self._new_inherited += new

    def _is_kept(self, number: int) -> bool:
        window = self._windows.get(number)
        return (window is not None and window() is not None) or number in self._inherited

    def _make(self, num_bytes: int) -> BatchMemory:
        """Make a slot whose pages will be on the rank's node. Raises OSError."""
        capacity, fd = capacity_for(num_bytes), _memfd()
        try:
            os.ftruncate(fd, capacity)
            owner = map_memfd(fd, capacity)
        except OSError:
            os.close(fd)
            raise
        where = self._locality
        if where.nodes and where.num_machine_nodes > 1:
            self._notes += pages.prefer(owner.data_ptr(), capacity, where.nodes, within=where.within)
        self._next_number += 1
        return self._memory(self._next_number, fd, owner, 0)

    def _memory(self, number: int, fd: int | None, owner: torch.Tensor, populated: int) -> BatchMemory:
        """Return a slot's memory, whose window tells whether anything still refers to it."""
        address, capacity = owner.data_ptr(), owner.nbytes
        window = memory.window(address, capacity, owner=owner)
        self._windows[number] = weakref.ref(window)
        return BatchMemory(number, owner, memory.view_of(window), address, capacity, populated, fd is not None, fd)


def _memfd() -> int:
    """Return the descriptor of an empty memfd. Raises OSError."""
    try:
        return os.memfd_create(SLOT_NAME, _SEALABLE | _NEVER_EXECUTED)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(SLOT_NAME, _SEALABLE)  # an older kernel


class Packer(ForkingPickler):
    """Puts one batch after the other into slots, for the thread that made it only.

    It is one pickler for all batches: making one takes longer than pickling a batch of a few tensors.
    """

    def __init__(self, slots: WorkerSlots | None, *, worker: int, pins: bool, moves: bool, casts: Casts = ()) -> None:
        """Take where batches must end up: in pinned memory (`pins`), or on a device (`moves`)."""
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL, True, self._take_out)
        self._slots, self._worker, self.pins, self.moves = slots, worker, pins, moves
        self.casts = dict(casts)
        self.passes_caches = (pins or moves) and memory.can_pass_caches()  # a GPU reads what is written, and no CPU
        self.is_collating = True  # False: a collate_fn that runs now is not the loader's, but one inside a sample
        self._thread = threading.get_ident()
        self._memories: list[BatchMemory] = []  # of this batch: each goes on where the one before it was full
        self._refusal = Miss.NO_SLOTS if slots is None else None  # why this batch has no room in a slot
        self._mark = pickle.PickleBuffer(bytearray(1))  # stands for a tensor among the out-of-band buffers
        self._placed = pickle.PickleBuffer(bytearray(1))  # stands for a tensor that is in `_buffers`
        self._next: tuple[Any, ...] | None = None  # the tensor that the next mark stands for, as in `Head.buffers`
        self._cast_ones: list[torch.Tensor] = []  # kept, so that no address is used twice in a batch
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}  # by torch's storage: first, last byte; its number
        self._storages: list[Room] = []
        self._buffers: list[tuple[Any, ...] | int | None] = []
        self._missing_bytes = 0  # of this batch, without room in a slot
        self._are_many_kept = False
        self._miss: Miss | None = None

    def accept(self, grant: Grant) -> None:
        """Take over the slot that came with a task."""
        if self._slots is not None:
            self._slots.accept(grant)

    def refuse_in_child(self) -> None:
        """Give no more room in a child that the user's code forked: its parent writes to this memory."""
        self._thread = 0  # no thread has this id

    # --- room in the slots -------------------------------------------------------------------------------------------

    def allocate(self, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor | None:
        """Return an uninitialized contiguous tensor in this batch's memory; None if it has no room.

        Not for quantized dtypes: torch.frombuffer gives them no quantizer, and resizing one crashes the process.
        A worker whose code keeps many batches gets none either: each would keep a slot, and so more and more memory.
        """
        count = torch.Size(size).numel()
        if not count or self._are_many_kept or threading.get_ident() != self._thread:
            return None
        room = self._reserve(dtype.itemsize * count)
        if room is None:
            return None
        flat = torch.frombuffer(self._memories[-1].view, dtype=dtype, count=count, offset=room[0])
        return flat.resize_(*size) if len(size) > 1 else flat.resize_(size)

    def _reserve(self, num_bytes: int) -> Room | None:
        """Return room in this batch's last memory. None: it has no room, and `_refusal` says why."""
        if self._slots is None:
            return None
        try:
            if not self._memories:
                self._memories.append(self._slots.take(num_bytes))
            start = self._memories[-1].reserve(num_bytes)
            if start is None and self._refusal is not Miss.NO_MEMORY:
                self._memories.append(self._slots.grow(self._memories[-1], num_bytes))
                start = self._memories[-1].start
        except OSError:
            start = None
        if start is None:
            self._refusal = Miss.NO_MEMORY
            return None
        return start, num_bytes

    def _find(self, address: int, num_bytes: int) -> Room | None:
        """Return the place of an address in this batch's memory; None outside it."""
        for each in self._memories:
            start = address - each.address
            if each.start <= start < each.end:
                return start, num_bytes
        return None

    # --- a batch -----------------------------------------------------------------------------------------------------

    def pack(self, number: int, batch: object) -> bytes:
        """Return the message for a batch, and be ready for the next one. Raises what pickling the batch raises."""
        try:
            self.dump(self._with_marks(batch))
            body = self._file.getvalue()
            body_room = self._write(body) if len(body) >= _PIPE_BYTES else None
            rooms = self._storages if body_room is None else [*self._storages, body_room]
            end, num_bytes = max(map(sum, rooms), default=0), sum(size for _, size in rooms)
            slot, made_bytes, small, report = NO_SLOT, 0, b"", NOTHING
            # Tensors that were collated and then dropped took room, too.
            wanted_bytes = self._memories[-1].end if self._memories else 0
            if self._slots is not None:
                if end:
                    *others, written = self._memories
                    for full in others:
                        start = full.start
                        memory.copy(written.address + start, full.address + start, full.end - start)
                    self._slots.send(written)
                    self._memories.pop()  # only now: what could not be sent is put back
                    slot = written.number
                    made_bytes = written.capacity if written.is_new else 0
                    small = bytes(written.view[:end]) if slot == IN_MESSAGE else b""
                report = self._slots.report(slot)
            missing = self._missing_bytes
            sizes = end, made_bytes, num_bytes + missing, wanted_bytes + missing
            places = tuple(self._storages), tuple(self._buffers), body_room, small
            head = Head(self._miss, number, self._worker, slot, *sizes, *places, report)
            self._are_many_kept = len(report.kept) > MOST_KEPT
            return encode(head, body if body_room is None else b"")
        finally:
            self.memo = {}  # a new table: the old one never shrinks
            self._file.seek(0)
            self._file.truncate()
            self._cast_ones.clear()  # they refer to the slot
            self._ranges.clear()
            self._storages.clear()
            self._buffers.clear()
            self._missing_bytes, self._miss, self._next = 0, None, None
            self.finish()

    def finish(self) -> None:
        """End a batch, sent or not: keep the memory that was not sent for the next one."""
        if self._slots is not None:
            self._refusal = None
            while self._memories:
                self._slots.put_back(self._memories.pop())

    def _with_marks(self, batch: Any) -> object:
        """Return a list, tuple or dict of plain tensors with marks in their places, and any other batch as it is.

        Most batches are such ones, and a mark needs no function that the pickle names and the rank calls.
        """
        kind = type(batch)
        if kind is dict and _PLAIN_KEYS.issuperset(map(type, batch)):  # memory of a key would come between the marks
            tensors = list(batch.values())
        elif kind is list or kind is tuple:
            tensors = batch
        else:
            return batch
        if set(map(type, tensors)) != {torch.Tensor} or self.casts or len(set(map(id, tensors))) < len(tensors):
            return batch
        for tensor in tensors:
            if not self._put(tensor):
                self._buffers.clear()
                self._missing_bytes, self._miss = 0, None  # it is counted again
                return batch
            self._buffers.append(self._next)
        marks = [self._placed] * len(tensors)
        return dict(zip(batch, marks, strict=True)) if kind is dict else kind(marks)

    def reducer_override(self, thing: object) -> Reduced:
        """Reduce a tensor to its place in the slot; leave everything else as it is."""
        if isinstance(thing, torch.Tensor):
            return self._reduce_tensor(thing)
        if type(thing) is _ARRAY:
            array: Any = thing
            is_usual = array.flags.forc and array.flags.writeable and array.dtype.byteorder not in "<>"  # "=" is native
            # Others stay in the pickle, which makes them writable, contiguous and native, as from torch.
            return _UNCHANGED if is_usual else array.__reduce__()
        if type(thing) is ExceptionWrapper:  # also beside the state of torchdata's worker
            try:
                pickle.dumps(thing.exc_type)
            except Exception:  # its class cannot be imported; the text names it
                thing.exc_type = RuntimeError
        if self.moves and type(thing) is PackedSequence:
            return packed_sequence, (thing.data, thing.batch_sizes.tolist(), *thing[2:])
        return _UNCHANGED

    def _reduce_tensor(self, given: torch.Tensor) -> Reduced:
        """Cast a tensor and put it into the slot. If only torch can send it, have it moved to the batch's device."""
        tensor = self._cast(given) if self.casts and given.dtype in self.casts else given
        if type(tensor) is torch.Tensor and self._put(tensor):
            return buffer, (self._mark,)
        reduce: Callable[[Any], Any] = self.dispatch_table.get(type(tensor), _reduce_by_value)
        if type(tensor) is torch.Tensor:
            # Views whose values are computed when they are read. torch sends what is below them, and so other values.
            if not tensor.requires_grad and (tensor.is_conj() or tensor.is_neg()):
                view: Callable[[Any], Any] = torch.conj if tensor.is_conj() else torch.Tensor._neg_view
                return view, (view(tensor),)
        elif reduce is _reduce_by_value and type(tensor).__reduce_ex__ is torch.Tensor.__reduce_ex__:
            build, arguments = _reduce_by_value(tensor)
            # From (function, class, its storage and shape, attributes). Other functions rebuild what has no memory.
            if build is _rebuild_from_type_v2 and arguments[0] in (_rebuild_tensor_v2, _rebuild_tensor_v3):
                with torch._C.DisableTorchFunctionSubclass():  # else the subclass decides what as_subclass returns
                    plain = tensor.as_subclass(torch.Tensor)
                if self._put(plain):
                    return build, (buffer, arguments[1], (self._mark,), arguments[3])
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may refuse to answer
            is_strided = tensor.layout is torch.strided and not tensor.is_nested
            is_large = not is_strided or (tensor.device.type != "meta" and tensor.nbytes >= _SMALL_BYTES)
        if is_large:
            self._miss = self._miss or Miss.UNSUPPORTED
        reduced: Reduced = reduce(tensor)
        if self.moves and len(reduced) == 2:
            self._next = None
            return move, (self._mark, *reduced)
        return reduced

    def _cast(self, wide: torch.Tensor) -> torch.Tensor:
        """Return a tensor in its narrower dtype; a contiguous one is cast straight into the slot, if there is room."""
        room = None
        if type(wide) is torch.Tensor and is_plain(wide) and wide.is_contiguous():
            room = self.allocate(self.casts[wide.dtype], wide.shape)
        cast = cast_tensor(wide, self.casts) if room is None else room.copy_(wide)
        self._cast_ones.append(cast)
        return cast

    def _put(self, tensor: torch.Tensor) -> bool:
        """Have a plain tensor in the slot, and let the next mark stand for it; return False if it cannot be there.

        The batch needs ranges of storages: tensors that share memory share a range.
        """
        if not is_plain(tensor):
            return False
        storage, dtype, itemsize = tensor.untyped_storage(), tensor.dtype, tensor.itemsize
        begin, is_contiguous = int(tensor.storage_offset()) * itemsize, tensor.is_contiguous()
        if is_contiguous:
            end = begin + tensor.nbytes
        else:
            last_element = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            end = begin + itemsize * (1 + last_element)
        # Not by address: torch makes each tensor over one array a storage of its own.
        ranges = self._ranges.setdefault(storage._cdata, [])
        for known in ranges:
            first, last, number = known
            if first <= begin and end <= last:
                break
        else:
            first, last = 0, storage.nbytes()
            if last > _MAX_STORAGE_RATIO * (end - begin):
                first, last = begin - begin % _LARGEST_ITEM_BYTES, end  # where an item of any dtype may begin
            found = self._bring(storage, first, last)
            if found is None:
                return False
            number = found
            ranges.append((first, last, number))
        shape, stride = tuple(tensor.shape), tensor.stride()
        is_whole = is_contiguous and tensor.nbytes == self._storages[number][1]
        if is_whole and 1 in shape:  # a contiguous tensor may have any stride there, as channels_last does
            is_whole = stride[::-1] == tuple(accumulate(shape[:0:-1], mul, initial=1))
        self._next = (number, _DTYPE_NUMBERS[dtype], shape, stride, begin - first, is_whole)
        return True

    def _take_out(self, out_of_band: pickle.PickleBuffer) -> bool:
        """Return whether a buffer stays in the pickle. pickle calls this for each one, in order."""
        if out_of_band is self._placed:
            return False
        if out_of_band is self._mark:
            self._buffers.append(self._next)
            return False
        raw = out_of_band.raw()
        if raw.nbytes < _SMALL_BYTES:
            return True
        room = None if raw.readonly else self._find(memory.address_of(raw), raw.nbytes)
        if room in self._storages:  # a tensor's, or another array's
            number: int | None = self._storages.index(room)
        else:
            number = self._add(room or self._write(raw), raw.nbytes)
        if number is None:
            return True
        self._buffers.append(number)
        return False

    def _write(self, source: memoryview | bytes) -> Room | None:
        """Copy plain memory into the slot; return its place, None if there is no room."""
        room = self._reserve(len(source))
        if room is not None:
            start, num_bytes = room
            self._memories[-1].view[start : start + num_bytes] = source
        return room

    def _bring(self, storage: torch.UntypedStorage, first: int, last: int) -> int | None:
        """Have bytes `first` to `last` of a storage in the slot; return their number, None if they are not there."""
        address = storage.data_ptr() + first
        room = self._find(address, last - first)
        if room is None and storage.is_shared() and not self.pins:
            # The rank's tensor is the worker's memory, as with torch, so a copy would not be the same.
            self._missing_bytes += align(last - first)
            if last - first >= _SMALL_BYTES:
                self._miss = self._miss or self._refusal or Miss.SHARED  # torch's own collate shares memory
            return None
        if room is None:
            room = self._reserve(last - first)
            if room is not None:
                target = self._memories[-1].address + room[0]
                if self.passes_caches and last - first >= LARGE_BYTES:
                    memory.stack_past_caches(target, [address], last - first)
                else:
                    memory.copy(target, address, last - first)
        return self._add(room, last - first)

    def _add(self, room: Room | None, num_bytes: int) -> int | None:
        """Note where memory of the batch lies in the slot; return the number of its storage, None without room."""
        self._miss = self._miss or self._refusal
        if room is None:
            self._missing_bytes += align(num_bytes)
            return None
        self._storages.append(room)
        return len(self._storages) - 1


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but strided bytes of this process's memory."""
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()  # autograd's zero gradients, which have no memory
        or not tensor.numel()
    )


def _reduce_by_value(tensor: torch.Tensor) -> tuple[Any, ...]:
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced
