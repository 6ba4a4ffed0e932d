"""Open parcels in the rank, in host memory. Edge (torch, CUDA).

Comes in: `Parcel`s. Goes out: batches, over the slot itself (`Lender`), or over copies in torch's own host memory
(`Copier`). `device.py` does the same on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from numapin.data.wire.tensors import StoragePlace, unpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numapin.data.wire.parcel import Parcel

_SMALL_BYTES: Final = 256 << 10
_SMALL_RATIO: Final = 8


class Opener(Protocol):
    """Makes batches from parcels."""

    def open(self, parcel: Parcel) -> object:
        """Return the batch."""

    def arrived(self, parcel: Parcel) -> None:
        """Begin what can be begun before a parcel is due."""

    def restart(self) -> None:
        """Forget parcels that have arrived and are never opened."""

    def poll(self) -> None:
        """Release slots that our own copies no longer read."""

    def drain(self) -> None:
        """Release all slots that our own copies read, once these have ended."""


class Copier:
    """Opens batches over copies in torch's own host memory, for drivers on which a slot cannot be lent safely.

    It starts nothing ahead of time, and its copies end before it returns the batch.
    """

    def __init__(self, *, pins: bool) -> None:
        """With `pins`, separate memory is pinned."""
        self._pins = pins

    def arrived(self, parcel: Parcel) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def drain(self) -> None:
        """Do nothing."""

    def open(self, parcel: Parcel) -> object:
        """Return the batch; the slot is free at once."""
        return unpickle(parcel.body, stand_ins(parcel, partial(self._copy, parcel), copied))

    def _copy(self, parcel: Parcel, part: int, start: int, size: int) -> StoragePlace:
        """Return a place in new memory with a copy of a range."""
        copy = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pins)
        return StoragePlace(copy.copy_(parcel.bytes(part, start, size)).untyped_storage(), 0)


class Lender(Copier):
    """Opens batches over the slot itself. Nothing is copied; the slot is free when the last reference is gone.

    Tensors that are small beside their batch, or beside its pickle, are copied: a loop that keeps the labels of all
    batches must not keep all images with them.
    """

    def open(self, parcel: Parcel) -> object:
        """Return the batch. Every tensor has its own storage, as if it had been allocated separately."""
        if (self._pins and not parcel.is_pinned) or parcel.is_mostly_pickle:
            return super().open(parcel)
        return unpickle(parcel.body, stand_ins(parcel, partial(self._lend, parcel), _lent))

    def _lend(self, parcel: Parcel, part: int, start: int, size: int) -> StoragePlace:
        if is_small(size, parcel.num_bytes(part)):
            return self._copy(parcel, part, start, size)
        return StoragePlace(parcel.bytes(part, start, size).untyped_storage(), 0)


def stand_ins(
    parcel: Parcel,
    place: Callable[[int, int, int], StoragePlace],
    plain: Callable[[memoryview, int, int], object],
    mover: Callable[[Any], object] = lambda tensor: tensor,
) -> Iterator[object]:
    """Yield what takes the place of each out-of-band buffer of a parcel, in order.

    Args:
        parcel: The parcel. Tensors that share a storage get the same place.
        place: Makes the place of a storage from a part's number, the offset in it and the length, in bytes.
        plain: Makes plain memory from a part's view, the offset in it and the length, in bytes.
        mover: Takes the place of the buffer of a tensor that torch sends.
    """
    places: dict[int, StoragePlace] = {}
    for number in parcel.head.buffers:
        if number is None:
            yield mover
        elif number < 0:
            part, start, size = parcel.head.storages[~number]
            yield plain(parcel.view(part), start, size)
        else:
            if number not in places:
                places[number] = place(*parcel.head.storages[number])
            yield places[number]


def is_small(num_bytes: int, batch_bytes: int) -> bool:
    """Return whether a tensor is so small beside its batch that it must not keep the batch's memory alive."""
    return num_bytes <= _SMALL_BYTES and num_bytes * _SMALL_RATIO < batch_bytes


def copied(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's) outside the slot."""
    return memoryview(bytearray(view[start : start + size]))


def _lent(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's), in the slot unless it is small."""
    return copied(view, start, size) if is_small(size, len(view)) else view[start : start + size]
