"""How a parcel becomes the user's batch in the rank. Edge (torch, CUDA).

Comes in: `Parcel`s. Goes out: batches, over the slot itself (`Lender`), or over copies in torch's own host memory
(`Copier`); `transfer` does the same on a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.data.wire.parcel import StoragePlace, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.wire.parcel import Head

_SMALL_BYTES: Final = 256 << 10
_SMALL_RATIO: Final = 8


@dataclass(slots=True)
class Parcel:
    """A batch that has arrived: its head, its pickle, and the memory that its parts lie in."""

    head: Head
    body: memoryview
    views: tuple[memoryview | None, ...] = (None, None)
    begun: Any = None  # what its opener has begun before it is due

    def num_bytes(self, part: int) -> int:
        """Return how much was written to a part."""
        return len(self.views[part] or ())

    def bytes(self, part: int, start: int, num_bytes: int) -> torch.Tensor:
        """Return a stretch of a part as uint8."""
        view = self.views[part]
        assert view is not None  # noqa: S101 - the worker has written it
        return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes, offset=start)


class Opener(ABC):
    """Makes batches of parcels."""

    @abstractmethod
    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch."""

    def arrived(self, parcel: Parcel) -> None:  # noqa: B027 - most have nothing to do
        """Begin what can be begun before a parcel is due."""

    def restart(self) -> None:  # noqa: B027
        """Forget parcels that have arrived and are never opened."""

    def poll(self) -> None:  # noqa: B027
        """Let go of slots that copies of ours no longer read."""

    def drain(self) -> None:  # noqa: B027
        """Let go of all slots that copies of ours read, once these have ended."""


class Lender(Opener):
    """Opens batches over the slot itself: nothing is copied; the slot is theirs until the last reference is gone.

    But for what is small beside its batch: whoever keeps the labels of all batches must not keep all images with them.
    """

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch; every storage is its own, as if it had been allocated for it."""
        return unpack(parcel.body, stand_ins(parcel, partial(self._lend, parcel), _lent))

    def _lend(self, parcel: Parcel, part: int, start: int, size: int) -> StoragePlace:
        tensor = parcel.bytes(part, start, size)
        if is_small(size, parcel.num_bytes(part)):
            tensor = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins).copy_(tensor)
        return StoragePlace(tensor.untyped_storage(), 0)


class Copier(Opener):
    """Opens batches over copies in host memory of torch's own, for drivers on which a slot cannot be lent safely."""

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins

    def open(self, parcel: Parcel) -> Any:  # noqa: ANN401 - the user's batch
        """Return the batch; the slot is free at once."""
        return unpack(parcel.body, stand_ins(parcel, partial(self._place, parcel), copied))

    def _place(self, parcel: Parcel, part: int, start: int, size: int) -> StoragePlace:
        source = parcel.bytes(part, start, size)
        return StoragePlace(
            torch.empty(size, dtype=torch.uint8, pin_memory=self._pins).copy_(source).untyped_storage(), 0
        )


def stand_ins(
    parcel: Parcel,
    place: Callable[[int, int, int], StoragePlace],
    plain: Callable[[memoryview, int, int], object],
    mover: Callable[[Any], Any] = lambda tensor: tensor,
) -> Iterator[object]:
    """Yield what stands for each out-of-band buffer of a parcel, in order.

    `place` gets a part's number, `plain` its view, both an offset in it and a length, in bytes. Tensors that share a
    storage get the same place.
    """
    places: dict[int, StoragePlace] = {}
    for number in parcel.head.buffers:
        if number is None:
            yield mover
            continue
        part, start, size = parcel.head.storages[number if number >= 0 else ~number]
        view = parcel.views[part]
        assert view is not None  # noqa: S101 - the worker has written it
        if number < 0:
            yield plain(view, start, size)
            continue
        if number not in places:
            places[number] = place(part, start, size)
        yield places[number]


def is_small(num_bytes: int, batch_bytes: int) -> bool:
    """Return whether something is so small beside its batch that it must not keep the batch's memory alive."""
    return num_bytes <= _SMALL_BYTES and num_bytes * _SMALL_RATIO < batch_bytes


def copied(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's) outside the slot."""
    return memoryview(bytearray(view[start : start + size]))


def _lent(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's), in the slot unless it is small."""
    return copied(view, start, size) if is_small(size, len(view)) else view[start : start + size]
