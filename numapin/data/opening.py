"""Open parcels in the rank: over the slot itself, over copies in host memory, or on a GPU, copied ahead of time."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch

from numapin.data.casting import rebuild
from numapin.data.forking import keep_in_children
from numapin.data.message import unpack
from numapin.data.quarantine import capture_lock, is_capturing
from numapin.data.slots import ALIGNMENT, align
from numapin.data.torch_names import ExceptionWrapper
from numapin.system import memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from numapin.data.message import Head, Parcel
    from numapin.system.cuda import Driver, Event

_AHEAD: Final = 2  # batches whose copies are started before they are due
_IN_FLIGHT: Final = 4  # copies; with more, the workers would run out of slots
_USUAL: Final = frozenset((torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.float16, torch.bool))
"""The dtypes that are copied as such; others as bytes, because torch 2.9 cannot copy four-bit floats."""


class Copier:
    """Opens batches over copies in torch's own host memory, for drivers on which a slot cannot be lent safely.

    It starts nothing ahead of time, and its copies end before it returns the batch.
    """

    lends = False

    def __init__(self, *, pins: bool) -> None:
        """With `pins`, separate memory is pinned."""
        self._pins = pins

    def arrived(self, parcel: Parcel, ahead: set[ref[Parcel]]) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    drain = poll

    def open(self, parcel: Parcel) -> object:
        """Return the batch. Every tensor has its own storage, as if it had been allocated separately."""
        view = parcel.view
        lends = self.lends
        if lends and self._pins:
            lends = parcel.slot is not None and parcel.slot.wait_until_settled()
        if lends and parcel.head.body_room is not None:  # a pickle that is longer than the tensors: they would keep it
            lends = len(view) >= len(parcel.body)

        def plain_at(start: int, size: int) -> memoryview:
            return view[start : start + size] if lends and not is_small(size, len(view)) else copied(view, start, size)

        def whole_at(start: int, num_bytes: int, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
            is_copied = not lends or is_small(num_bytes, len(view))
            kind = torch.uint8 if is_copied and dtype not in _USUAL else dtype
            found = torch.frombuffer(view, dtype=kind, count=num_bytes // kind.itemsize, offset=start)
            if is_copied:
                found = torch.empty_like(found, pin_memory=True).copy_(found) if self._pins else found.clone()
            found = found if kind is dtype else found.view(dtype)
            return found if len(size) == 1 else found.resize_(size)

        def storage_at(start: int, size: int) -> tuple[torch.UntypedStorage, int]:
            return whole_at(start, size, torch.uint8, (size,)).untyped_storage(), 0

        return unpack(parcel, storage_at, plain_at, whole_at=whole_at)


class Lender(Copier):
    """Opens batches over the slot itself. Nothing is copied; the slot is free when the last reference is gone.

    Tensors that are small beside their batch, or beside its pickle, are copied: a loop that keeps the labels of all
    batches must not keep all images with them.
    """

    lends = True


class Pinner(Lender):
    """Opens batches over pinned slots in the loop's thread, and pins there what is not in them.

    torch hands every batch to a thread for that, which then waits for the loop's thread to release the GIL. Once slots
    are pinned, there is nothing to hand over: a batch is tensors over pinned memory. Another thread pins a new slot
    when it arrives, and the loop waits for that. If a slot cannot be pinned, its batches are copied.
    """

    def __init__(self, driver: Driver, device_index: int) -> None:
        """Take the current device's index, which torch's text for an error names."""
        super().__init__(pins=True)
        # As torch's pin thread does: a thread that computes for the first time after this uses one thread. Without it,
        # a loop that read values used all CPUs beside the workers, and got 33 batches/s instead of 500 (16 CPUs).
        thread = Thread(target=torch.set_num_threads, args=(1,))
        thread.start()
        thread.join()
        self._driver, self._where = driver, f"in pin memory thread for device {device_index}"

    def open(self, parcel: Parcel) -> object:
        """Return the batch as torch's pin thread does, or the error of a user's type."""
        try:
            with self._driver.relaxed_capture():  # as on that thread: allocating pinned memory may query events
                opened = super().open(parcel)
                return rebuild(opened, methodcaller("pin_memory"), is_leaf=lambda value: hasattr(value, "pin_memory"))
        except Exception:  # noqa: BLE001 - a user's type may raise anything
            return ExceptionWrapper(where=self._where)


def is_small(num_bytes: int, batch_bytes: int) -> bool:
    """Return whether a tensor is so small beside its batch that it must not keep the batch's memory alive.

    That is up to 256 KiB, and less than an eighth of the batch.
    """
    return num_bytes <= 256 << 10 and num_bytes * 8 < batch_bytes


def copied(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's) outside the slot."""
    return memoryview(bytearray(view[start : start + size]))


@dataclass(slots=True)
class _Copy:
    """A batch's bytes on the device."""

    buffer: torch.Tensor  # all bytes of the batch, once `event` has passed
    storage: torch.UntypedStorage  # of `buffer`
    event: Event  # the end of the copies; another copy's once `is_done`
    small: torch.Tensor | None  # a separate copy of the small tensors, if there are any
    runs: tuple[tuple[int, int], ...]  # the (start, end) of the ranges that `small` holds, in bytes of the batch
    timing: tuple[Event, Event] | None = None  # the beginning and the end of the copy to `buffer`, before `event`
    is_done: bool = False  # whether the copy was seen to have ended

    def place(self, start: int, num_bytes: int) -> tuple[torch.UntypedStorage, int]:
        """Return where the `num_bytes` from `start` of the batch are: a storage, and the byte where they begin."""
        if self.small is None:
            return self.storage, start
        base = 0
        for first, last in self.runs:
            if first <= start and start + num_bytes <= last:
                return self.small.untyped_storage(), base + start - first
            base += last - first
        return self.storage, start


def small_runs(head: Head) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) of a batch's small tensors, in bytes, neighbors joined; none for small batches.

    Each begins at a multiple of ALIGNMENT, even if an array does not: the tensors after it must stay aligned.
    """
    num_bytes = head.slot_bytes
    if num_bytes < 2 << 20:
        return ()
    runs: list[tuple[int, int]] = []
    for start, size in sorted(head.storages):
        if is_small(size, num_bytes):
            first, last = start - start % ALIGNMENT, min(align(start + size), num_bytes)
            if runs and first <= runs[-1][1]:
                first, last = runs[-1][0], max(runs.pop()[1], last)
            runs.append((first, last))
    return tuple(runs)


class Mover:
    """An opener on a device: one copy per batch, on one stream for the loader's life, ordered by events.

    It holds no object whose destructor calls CUDA but the memory of batches, which forked children never free: a child
    may collect it as garbage. Streams of torch's pool are never destroyed.
    """

    def __init__(self, device: torch.device, driver: Driver, *, lends_plain: bool = False) -> None:
        """With `lends_plain`, plain memory (numpy's) that is not small stays in the slot."""
        self.device, self._driver, self._lends_plain = device, driver, lends_plain
        self._timed_bytes, self._timed_ms = 0, 0.0
        self._stream = torch.cuda.Stream(device)
        self._template = torch.empty(0, dtype=torch.uint8, device=device)
        self._key = (self._stream.stream_id, self._stream.device_index, self._stream.device_type)
        self._handle = self._stream.cuda_stream
        with driver.relaxed_capture():
            self._context = driver.context(device.index)
        self._threads = threading.local()  # those that have a current context
        self._reading: deque[tuple[_Copy, memoryview]] = deque()  # slots that copies still read
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lost: list[memoryview] = []  # slots of copies that began and whose end cannot be known
        self._num_copies = 0

    @property
    def gbps(self) -> float | None:
        """Return the speed of the copies that were timed, in 1e9 bytes per second; None before the first."""
        return self._timed_bytes / self._timed_ms / 1e6 if self._timed_ms else None

    def arrived(self, parcel: Parcel, ahead: set[ref[Parcel]]) -> None:
        """Start the copy of a batch that is not due yet, if few enough of its iterator are under way: those `ahead`."""
        if parcel.slot is not None:
            parcel.slot.is_private = True
        is_pinned = parcel.slot is None or parcel.slot.is_settled  # else it is being pinned, and the loop goes on
        if parcel.view and is_pinned and len(ahead) < _AHEAD:
            parcel.ahead = ahead
            try:
                parcel.begun = self._start(parcel)
            except torch.OutOfMemoryError:  # tried again when it is due; then the loop gets the error
                return
            ahead.add(ref(parcel, ahead.discard))  # an epoch that is left early drops its parcels

    def open(self, parcel: Parcel) -> object:
        """Return the batch on the device, for use by the current stream; never blocks the host."""
        copy: _Copy | None = parcel.begun
        if copy is not None:
            parcel.ahead.discard(ref(parcel))
        elif parcel.view:
            copy = self._start(parcel)
        handle = _get_handle(self.device.index)
        stream = self._loop_stream(handle)
        storage_at: Any = None  # for a batch without memory
        if copy is not None:
            storage_at = copy.place
            copy.buffer.record_stream(stream)
            if copy.small is not None:
                copy.small.record_stream(stream)
            if not copy.is_done:
                with self._in_context():
                    self._driver.let_wait(handle, copy.event)
        return unpack(parcel, storage_at, partial(self._plain_at, parcel), self.move, device=self.device)

    def _loop_stream(self, handle: int) -> torch.cuda.Stream:
        """Return torch's object for the current stream, whose number this is."""
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def _plain_at(self, parcel: Parcel, start: int, size: int) -> memoryview:
        view = parcel.view
        if not self._lends_plain or is_small(size, len(view)):
            return copied(view, start, size)
        if parcel.slot is not None:
            parcel.slot.is_private = False  # the user may start copies from it
        return view[start : start + size]

    def move(self, tensor: Any) -> object:  # noqa: ANN401 - or anything else with `to`
        """Return a tensor that torch sent, on the device."""
        return tensor.to(self.device, non_blocking=True)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make our stream and device the current ones, for work that may go on beside another thread's capture."""
        current = _get_device()
        ours, others = _get_stream(self.device.index), _get_stream(current)
        with self._driver.relaxed_capture(), self._in_context():
            try:
                _set_stream(self._key)
                yield
            finally:
                _set_stream(ours)
                _set_stream(others)  # this also restores the current device

    def mark(self) -> Event:
        """Return the event that ends the work on our stream so far."""
        with self._in_context():
            return self._driver.record(self.device.index, stream=self._handle)

    def recycle(self, event: Event) -> None:
        """Take back an event for which nothing waits."""
        self._driver.recycle(event)

    def hand_over(self, storages: Iterable[torch.UntypedStorage], event: Event) -> None:
        """Let the loop's stream wait for an event, and let the memory that was filled before it wait for that stream.

        The event is used up.
        """
        handle = _get_handle(self.device.index)
        with self._in_context():
            self._driver.let_wait(handle, event)
        self._driver.recycle(event)
        stream = self._loop_stream(handle)
        for storage in storages:
            if storage.device == self._template.device:
                keep_in_children(storage)
                # Not the tensors themselves: torch refuses that for conjugated and nested ones, for example.
                self._empty(0).set_(storage).record_stream(stream)

    def wait_for_loop(self) -> None:
        """Let our stream wait for what the loop's has now."""
        with self._in_context():
            event = self._driver.record(self.device.index, stream=_get_handle(self.device.index))
            self._driver.let_wait(self._handle, event)
        self._driver.recycle(event)

    def drain(self) -> None:
        """Release all slots, once their copies have ended: a few milliseconds, or until a capture has ended."""
        until_s = time.monotonic() + 1
        while self._reading and time.monotonic() < until_s:
            if not self._wait_for(self._reading[-1][0]):
                time.sleep(0.001)
            self.poll()

    def poll(self) -> None:
        """Release the slots whose copies have ended; none during the capture of a CUDA graph, which forbids queries."""
        if not self._reading:
            return
        with capture_lock:
            while not is_capturing() and self._reading and self._driver.has_passed(self._reading[0][0].event):
                copy, view = self._reading.popleft()
                copy.is_done = True
                self._driver.recycle(copy.event)
                if copy.timing is not None:
                    self._timed_bytes += len(view)
                    self._timed_ms += self._driver.elapsed_ms(*copy.timing)
                    self._driver.recycle(*copy.timing)

    def _wait_for(self, copy: _Copy) -> bool:
        """Wait on the host until a copy has ended; return False during a capture, which forbids that."""
        with capture_lock:
            if is_capturing():
                return False
            self._driver.wait(copy.event)
        return True

    def _start(self, parcel: Parcel) -> _Copy:
        """Start the copy of a batch on our stream, once its slot is pinned: a pageable copy blocks the host."""
        if parcel.slot is not None:
            parcel.slot.wait_until_settled()
        if len(self._reading) >= _IN_FLIGHT:  # a loop that runs far ahead of the GPU leaves the workers without slots
            self._wait_for(self._reading[-_IN_FLIGHT][0])
        with capture_lock:
            if not is_capturing():
                return self._start_in_context(parcel)
            with self._driver.relaxed_capture():
                return self._start_in_context(parcel)

    def _start_in_context(self, parcel: Parcel) -> _Copy:
        current = _get_device()  # in the block of our context it is our device
        if self._has_context(current):
            return self._start_on_our_stream(parcel.head, parcel.view, current)
        with self._context:
            return self._start_on_our_stream(parcel.head, parcel.view, current)

    def _in_context(self) -> AbstractContextManager[None]:
        """Return a block in which the device's context is the calling thread's."""
        return nullcontext() if self._has_context(_get_device()) else self._context

    def _has_context(self, current: int) -> bool:
        """Return whether the device's context is the calling thread's, whose current device is `current`.

        torch makes a device's context current together with the device, but not in a new thread. To push and pop it at
        each batch would cost as much as the copy.
        """
        if current != self.device.index:
            return False
        if not hasattr(self._threads, "have_context"):
            self._driver.use_context(self.device.index)
            self._threads.have_context = True
        return True

    def _start_on_our_stream(self, head: Head, view: memoryview, current: int) -> _Copy:
        driver, index, stream = self._driver, self.device.index, self._handle
        ours = _get_stream(index)
        others = None if current == index else _get_stream(current)
        try:
            _set_stream(self._key)  # a tenth of what torch.cuda.stream() costs
            runs = small_runs(head)
            # All memory before the first copy: without memory, the slot is free again, and nothing may read it.
            buffer = self._empty(len(view))
            storage = buffer.untyped_storage()
            keep_in_children(storage)
            small = None
            if runs:
                small = self._empty(sum(last - first for first, last in runs))
                keep_in_children(small.untyped_storage())
            source = memory.address_of(view)
            self._num_copies += 1
            is_timed = self._num_copies % 16 == 0  # not each: it takes two more events
            began = driver.record(index, stream=stream, is_timed=True) if is_timed else None
            try:
                driver.copy_to_device(storage.data_ptr(), source, len(view), stream)
                timing = None if began is None else (began, driver.record(index, stream=stream, is_timed=True))
                if small is not None and len(runs) > 4:  # one kernel gathers what would be many copies
                    torch.cat([buffer[first:last] for first, last in runs], out=small)
                elif small is not None:
                    target = small.data_ptr()
                    for first, last in runs:
                        driver.copy_to_device(target, source + first, last - first, stream)
                        target += last - first
                copy = _Copy(buffer, storage, driver.record(index, stream=stream), small, runs, timing)
            except BaseException:
                self._lost.append(view)  # the GPU may still read it
                raise
            self._reading.append((copy, view))
            return copy
        finally:
            _set_stream(ours)
            if others is not None:  # this also restores the current device
                _set_stream(others)

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._template.new_empty(num_bytes)  # less to parse than for torch.empty


def _get_handle(index: int) -> int:
    """Return a device's current stream as the driver's own number."""
    return torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001


def _get_stream(index: int) -> tuple[int, int, int]:
    """Return a device's current stream as torch's own numbers, ten times as fast as torch.cuda.current_stream."""
    return torch._C._cuda_getCurrentStream(index)  # noqa: SLF001


def _get_device() -> int:
    """Return the current device, five times as fast as torch.cuda.current_device."""
    return torch._C._cuda_getDevice()  # noqa: SLF001


def _set_stream(key: tuple[int, int, int]) -> None:
    stream_id, device_index, device_type = key
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)  # noqa: SLF001
