"""How a parcel becomes the user's batch in the rank. Edge (torch, CUDA).

Comes in: `Parcel`s. Goes out: batches, over the slot itself (`Lender`), or over a copy of it in torch's own host memory
(`Copier`) or on a device (`Mover`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from numapin.data.capture import no_capture
from numapin.data.parcel import Head, Place, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Spare = Callable[[int, int], object]  # what stands for plain memory (start, length) of the slot

_AHEAD: Final = 2  # copies to the device that are started before their batch is due
_IN_FLIGHT: Final = 4  # copies; more would leave the workers without slots
_TIMED_EVERY: Final = 16  # copies; two more events each


@dataclass(slots=True)
class Parcel:
    """A batch that has arrived: its head, its pickle, the slot that it lies in, and its copy where one was started."""

    head: Head
    body: memoryview
    view: memoryview | None
    copy: _Copy | None = None


@dataclass(slots=True)
class _Copy:
    """A slot's bytes on the device, once `event` has passed."""

    buffer: torch.Tensor
    event: torch.cuda.Event


class Opener(Protocol):
    """Makes batches of parcels; `arrived` is told of a parcel before it is due."""

    def arrived(self, parcel: Parcel) -> None:
        """Begin what can be begun."""

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch."""

    def poll(self) -> None:
        """Let go of slots that are no longer read."""

    def restart(self) -> None:
        """Forget parcels that have arrived and are never opened."""


class Lender:
    """Opens batches over the slot itself: nothing is copied; the slot is theirs until the last reference is gone."""

    def arrived(self, parcel: Parcel) -> None:
        """Do nothing."""

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch; every storage is its own, as if it had been allocated for it."""
        return unpack(parcel.body, _lent(parcel))

    def poll(self) -> None:
        """Do nothing: the ring hears of the end of references by itself."""

    def restart(self) -> None:
        """Do nothing."""


def _lent(parcel: Parcel) -> Iterator[object]:
    head, view = parcel.head, parcel.view
    places: dict[int, Place] = {}
    for number in head.buffers:
        if number is None or view is None:
            yield _as_it_is
            continue
        start, size = head.storages[number if number >= 0 else ~number]
        if number < 0:
            yield view[start : start + size]
            continue
        if number not in places:
            tensor = torch.frombuffer(view, dtype=torch.uint8, count=size, offset=start)
            places[number] = Place(tensor.untyped_storage(), 0)
        yield places[number]


def _over_copy(head: Head, view: memoryview | None, buffer: torch.Tensor | None, move: object) -> Iterator[object]:
    """Yield what stands for each out-of-band buffer where the slot was copied to `buffer` as a whole."""
    storage = buffer.untyped_storage() if buffer is not None else None
    for number in head.buffers:
        if number is None or view is None or storage is None:
            yield move
        elif number < 0:
            start, size = head.storages[~number]
            yield memoryview(bytearray(view[start : start + size]))  # numpy's: stays on the host, out of the slot
        else:
            yield Place(storage, head.storages[number][0])


def _as_it_is(tensor: Any) -> Any:  # noqa: ANN401 - whatever torch has rebuilt
    return tensor


class Copier:
    """Opens batches over a copy in host memory of torch's own, for drivers on which a slot cannot be lent safely."""

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins

    def arrived(self, parcel: Parcel) -> None:
        """Do nothing."""

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch, in one allocation of torch's; the slot is free at once."""
        buffer = None
        if parcel.view is not None:
            source = torch.frombuffer(parcel.view, dtype=torch.uint8)
            buffer = torch.empty(len(source), dtype=torch.uint8, pin_memory=self._pins).copy_(source)
        return unpack(parcel.body, _over_copy(parcel.head, parcel.view, buffer, _as_it_is))

    def poll(self) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""


class Mover:
    """Opens batches on a device: one copy a batch, on one stream for the loader's life, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timed_bytes, self.timed_ms = 0, 0.0
        self._stream = torch.cuda.Stream(device)
        self._reading: deque[tuple[torch.cuda.Event, memoryview]] = deque()  # slots that copies still read
        self._timings: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._idle: list[torch.cuda.Event] = []
        self._streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}
        self._num_ahead = 0
        self._num_copies = 0

    def arrived(self, parcel: Parcel) -> None:
        """Start the copy of a batch that is not due yet, if few enough are under way."""
        if parcel.view is not None and self._num_ahead < _AHEAD:
            self._num_ahead += 1
            self._start(parcel, parcel.view)

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch on the device, for the current stream to use; waits for nothing on the host."""
        if parcel.copy is not None:
            self._num_ahead -= 1
        elif parcel.view is not None:
            self._start(parcel, parcel.view)
        copy = parcel.copy
        if copy is not None:
            stream = self._consumer()
            stream.wait_event(copy.event)
            copy.buffer.record_stream(stream)
        return unpack(parcel.body, _over_copy(parcel.head, parcel.view, copy.buffer if copy else None, self.move))

    def move(self, tensor: Any) -> Any:  # noqa: ANN401 - a tensor of any kind
        """Return a tensor that went torch's way, on the device."""
        return tensor.to(self.device, non_blocking=True)

    def restart(self) -> None:
        """Forget what was started ahead: those parcels are never opened."""
        self._num_ahead = 0

    def poll(self) -> None:
        """Let go of the slots whose copies have ended. Asks nothing while a CUDA graph is captured: it may not."""
        if not self._reading:
            return
        with no_capture() as is_quiet:
            while is_quiet and self._reading and self._reading[0][0].query():
                self._idle.append(self._reading.popleft()[0])
            while is_quiet and self._timings and self._timings[0][1].query():
                began, ended, size = self._timings.popleft()
                self.timed_bytes, self.timed_ms = self.timed_bytes + size, self.timed_ms + began.elapsed_time(ended)

    def _start(self, parcel: Parcel, view: memoryview) -> None:
        if len(self._reading) >= _IN_FLIGHT:
            self._reading[-_IN_FLIGHT][0].synchronize()
        event = self._idle.pop() if self._idle else torch.cuda.Event(blocking=True)
        before = torch.cuda.current_device()
        current = _get_stream(before)
        torch.cuda.set_stream(self._stream)  # a fifth of what torch.cuda.stream() costs
        try:
            parcel.copy = _Copy(self._copy(view), event)
            event.record(self._stream)
        finally:
            _set_stream(current)
        self._reading.append((event, view))

    def _consumer(self) -> torch.cuda.Stream:
        """Return the current stream of the device."""
        key = _get_stream(self.device.index)
        if key not in self._streams:
            self._streams[key] = torch.cuda.current_stream(self.device)
        return self._streams[key]

    def _copy(self, view: memoryview) -> torch.Tensor:
        """Return the slot's bytes on the device, once the stream is there."""
        source = torch.frombuffer(view, dtype=torch.uint8)
        buffer = torch.empty(len(view), dtype=torch.uint8, device=self.device)
        self._num_copies += 1
        if self._num_copies % _TIMED_EVERY:
            return buffer.copy_(source, non_blocking=True)
        began = self._mark()
        buffer.copy_(source, non_blocking=True)
        self._timings.append((began, self._mark(), len(view)))
        return buffer

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
