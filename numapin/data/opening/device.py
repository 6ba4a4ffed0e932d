"""The device side: batches copied to a GPU, ahead of time. Edge (CUDA).

Comes in: `Parcel`s. Goes out: batches on the device, for whatever stream is current when they are opened.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.data.opening.capture import no_capture
from numapin.data.opening.host import Opener, copied, is_small, stand_ins
from numapin.data.slots.control import align
from numapin.data.wire.parcel import StoragePlace, unpack
from numapin.system import memory

if TYPE_CHECKING:
    from numapin.data.opening.host import Parcel
    from numapin.data.wire.parcel import Head
    from numapin.system.cuda import Driver

_AHEAD: Final = 2  # batches whose copies are started before they are due
_IN_FLIGHT: Final = 4  # copies; more would leave the workers without slots
_DRAIN_S: Final = 1.0
_TIMED_EVERY: Final = 16  # copies; two more events each
_SPLIT_BYTES: Final = 2 << 20  # what is small gets memory of its own in batches from here on


@dataclass(frozen=True, slots=True)
class _Copy:
    """A part's bytes on the device, once `event` has passed; what is small also apart, as `small`.

    `runs` are the (start, end) of what `small` holds, one after the other, in bytes of the part.
    """

    buffer: torch.Tensor
    event: torch.cuda.Event
    small: torch.Tensor | None
    runs: tuple[tuple[int, int], ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return what is allocated on the device."""
        return (self.buffer,) if self.small is None else (self.buffer, self.small)

    def place(self, start: int, num_bytes: int) -> StoragePlace:
        """Return where the storage is that has `num_bytes` from `start` in the part on."""
        base = 0
        for first, last in self.runs:
            if self.small is not None and first <= start and start + num_bytes <= last:
                return StoragePlace(self.small.untyped_storage(), base + start - first)
            base += last - first
        return StoragePlace(self.buffer.untyped_storage(), start)


def small_runs(head: Head, part: int) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) of what is small in a part, in bytes, neighbours joined; nothing for small batches."""
    written = head.parts[part]
    if written is None or written[1] < _SPLIT_BYTES:
        return ()
    runs: list[tuple[int, int]] = []
    for where, start, size in sorted(head.storages):
        if where == part and is_small(size, written[1]):
            end = start + align(size)
            joins = bool(runs) and start <= runs[-1][1]
            runs[-1:] = [(runs[-1][0], max(end, runs[-1][1]))] if joins else [*runs[-1:], (start, end)]
    return tuple((first, min(last, written[1])) for first, last in runs)


class Mover(Opener):
    """Opens batches on a device: one copy a batch, on one stream for the loader's life, ordered by events."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self.device, self._driver = device, driver
        self.timed_bytes, self.timed_ms = 0, 0.0
        self._stream = torch.cuda.Stream(device)
        self._reading: deque[tuple[torch.cuda.Event, memoryview]] = deque()  # slots that copies still read
        self._timings: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._num_ahead = 0
        self._num_copies = 0

    def arrived(self, parcel: Parcel) -> None:
        """Start the copy of a batch that is not due yet, if few enough are under way."""
        if self._num_ahead < _AHEAD:
            with suppress(torch.OutOfMemoryError):  # when it is due it is tried again, and the loop hears of it
                parcel.begun = self._start(parcel)
                self._num_ahead += 1

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch on the device, for the current stream to use; waits for nothing on the host."""
        if parcel.begun is not None:
            self._num_ahead -= 1
        copies: dict[int, _Copy] = parcel.begun if parcel.begun is not None else self._start(parcel)
        stream = self._consumer()
        for copy in copies.values():
            stream.wait_event(copy.event)
            for tensor in copy.tensors:
                tensor.record_stream(stream)
        return unpack(
            parcel.body, stand_ins(parcel, lambda part, start, size: copies[part].place(start, size), copied, self.move)
        )

    def move(self, tensor: Any) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return a tensor that went torch's way, on the device."""
        return tensor.to(self.device, non_blocking=True)

    def restart(self) -> None:
        """Forget what was started ahead: those parcels are never opened."""
        self._num_ahead = 0

    def drain(self) -> None:
        """Let go of all slots, once their copies have ended: a few milliseconds, or until a capture has ended."""
        until_s = time.monotonic() + _DRAIN_S
        while self._reading and time.monotonic() < until_s:
            with no_capture() as is_quiet:
                if is_quiet:
                    self._reading[-1][0].synchronize()
            self.poll()

    def poll(self) -> None:
        """Let go of the slots whose copies have ended. Asks nothing while a CUDA graph is captured: it may not."""
        if not self._reading:
            return
        with no_capture() as is_quiet:
            while is_quiet and self._reading and self._reading[0][0].query():
                self._reading.popleft()
            while is_quiet and self._timings and self._timings[0][1].query():
                began, ended, size = self._timings.popleft()
                self.timed_bytes, self.timed_ms = self.timed_bytes + size, self.timed_ms + began.elapsed_time(ended)

    def _start(self, parcel: Parcel) -> dict[int, _Copy]:
        """Start the copies of a batch's parts on our stream."""
        self._wait_for_room()
        with no_capture() as is_quiet, nullcontext() if is_quiet else self._driver.relaxed_capture():
            # The last one that is set again makes its device the current one.
            before = [_get_stream(index) for index in dict.fromkeys((self.device.index, torch.cuda.current_device()))]
            try:
                torch.cuda.set_stream(self._stream)  # a fifth of what torch.cuda.stream() costs
                return {part: self._begin(parcel.head, part, view) for part, view in enumerate(parcel.views) if view}
            finally:
                for stream in before:
                    _set_stream(stream)

    def _wait_for_room(self) -> None:
        """Let the GPU catch up, so that a loop which runs far ahead of it does not leave the workers without slots."""
        if len(self._reading) >= _IN_FLIGHT:
            with no_capture() as is_quiet:
                if is_quiet:
                    self._reading[-_IN_FLIGHT][0].synchronize()

    def _begin(self, head: Head, part: int, view: memoryview) -> _Copy:
        event = torch.cuda.Event(blocking=True)  # a new one: the loop may not have waited for an earlier one yet
        buffer = torch.empty(len(view), dtype=torch.uint8, device=self.device)
        self._copy(view, buffer)
        runs = small_runs(head, part)
        small = torch.cat([buffer[first:last] for first, last in runs]) if runs else None
        event.record(self._stream)
        self._reading.append((event, view))
        return _Copy(buffer, event, small, runs)

    def _consumer(self) -> torch.cuda.Stream:
        """Return the current stream of the device."""
        key = _get_stream(self.device.index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(self.device)
        return self._streams[key]

    def _copy(self, view: memoryview, buffer: torch.Tensor) -> None:
        """Put the copy on our stream; one in some is timed."""
        self._num_copies += 1
        began = None if self._num_copies % _TIMED_EVERY else self._mark()
        self._driver.copy_to_device(buffer.data_ptr(), memory.address_of(view), len(view), self._stream.cuda_stream)
        if began is not None:
            self._timings.append((began, self._mark(), len(view)))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def _get_stream(index: int) -> tuple[int, int, int]:
    """Return a device's current stream, as torch's own numbers: a tenth of what torch.cuda.current_stream costs."""
    key: tuple[int, int, int] = torch._C._cuda_getCurrentStream(index)  # noqa: SLF001
    return key


def _set_stream(key: tuple[int, int, int]) -> None:
    """Make a stream, and its device, the current one."""
    stream_id, device_index, device_type = key
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)  # noqa: SLF001
