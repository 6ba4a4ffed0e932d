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
    from collections.abc import Callable, Iterator, Sequence

    Spare = Callable[[int, int], object]  # what stands for plain memory (start, length) of the slot

_AHEAD: Final = 2  # copies to the device that are started before their batch is due
_IN_FLIGHT: Final = 4  # copies; more would leave the workers without slots
_TIMED_EVERY: Final = 16  # copies; two more events each


@dataclass(slots=True)
class Parcel:
    """A batch that has arrived: its head, its pickle, the memory that its parts lie in, and their copies if started."""

    head: Head
    body: memoryview
    views: tuple[memoryview | None, ...] = (None, None)
    copies: tuple[_Copy | None, ...] | None = None


@dataclass(slots=True)
class _Copy:
    """A part's bytes on the device, once `event` has passed."""

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
    """Yield what stands for each out-of-band buffer: its own stretch of the slot."""
    places: dict[int, Place] = {}
    for number in parcel.head.buffers:
        if number is None:
            yield _as_it_is
            continue
        part, start, size = parcel.head.storages[number if number >= 0 else ~number]
        view = parcel.views[part]
        assert view is not None  # noqa: S101 - the worker has written it
        if number < 0:
            yield view[start : start + size]
            continue
        if number not in places:
            tensor = torch.frombuffer(view, dtype=torch.uint8, count=size, offset=start)
            places[number] = Place(tensor.untyped_storage(), 0)
        yield places[number]


def _over_copies(parcel: Parcel, buffers: Sequence[torch.Tensor | None], mover: object) -> Iterator[object]:
    """Yield what stands for each out-of-band buffer where the parts were copied to `buffers` as a whole."""
    storages = [None if buffer is None else buffer.untyped_storage() for buffer in buffers]
    for number in parcel.head.buffers:
        if number is None:
            yield mover
            continue
        part, start, size = parcel.head.storages[number if number >= 0 else ~number]
        view, storage = parcel.views[part], storages[part]
        assert view is not None and storage is not None  # noqa: S101, PT018 - the worker has written it
        if number < 0:
            yield memoryview(bytearray(view[start : start + size]))  # numpy's: stays on the host, out of the slot
        else:
            yield Place(storage, start)


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
        buffers = [None if view is None else self._copy(view) for view in parcel.views]
        return unpack(parcel.body, _over_copies(parcel, buffers, _as_it_is))

    def _copy(self, view: memoryview) -> torch.Tensor:
        source = torch.frombuffer(view, dtype=torch.uint8)
        return torch.empty(len(view), dtype=torch.uint8, pin_memory=self._pins).copy_(source)

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
        if self._num_ahead < _AHEAD:
            self._num_ahead += 1
            self._start(parcel)

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch on the device, for the current stream to use; waits for nothing on the host."""
        if parcel.copies is None:
            self._start(parcel)
        else:
            self._num_ahead -= 1
        stream = self._consumer()
        buffers: list[torch.Tensor | None] = []
        for copy in parcel.copies or ():
            if copy is not None:
                stream.wait_event(copy.event)
                copy.buffer.record_stream(stream)
            buffers.append(copy.buffer if copy else None)
        return unpack(parcel.body, _over_copies(parcel, buffers, self.move))

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

    def _start(self, parcel: Parcel) -> None:
        if len(self._reading) >= _IN_FLIGHT:
            self._reading[-_IN_FLIGHT][0].synchronize()
        current = _get_stream(torch.cuda.current_device())
        torch.cuda.set_stream(self._stream)  # a fifth of what torch.cuda.stream() costs
        try:
            parcel.copies = tuple(None if view is None else self._begin(view) for view in parcel.views)
        finally:
            _set_stream(current)

    def _begin(self, view: memoryview) -> _Copy:
        """Begin to copy a part, on our stream."""
        event = self._idle.pop() if self._idle else torch.cuda.Event(blocking=True)
        copy = _Copy(self._copy(view), event)
        event.record(self._stream)
        self._reading.append((event, view))
        return copy

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
