"""Open parcels in the rank, in host memory.

`device.py` does the same on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from numapin.data.message import unpack

if TYPE_CHECKING:
    from numapin.data.message import Parcel

_SMALL_BYTES: Final = 256 << 10
_SMALL_RATIO: Final = 8


class Copier:
    """Opens batches over copies in torch's own host memory, for drivers on which a slot cannot be lent safely.

    It starts nothing ahead of time, and its copies end before it returns the batch.
    """

    lends = False

    def __init__(self, *, pins: bool) -> None:
        """With `pins`, separate memory is pinned."""
        self._pins = pins

    def arrived(self, parcel: Parcel) -> None:
        """Do nothing."""

    def restart(self) -> None:
        """Do nothing."""

    poll = drain = restart

    def open(self, parcel: Parcel) -> object:
        """Return the batch. Every tensor has its own storage, as if it had been allocated separately."""
        view = parcel.view
        lends = self.lends and (parcel.is_pinned or not self._pins)
        if lends and parcel.head.body_room is not None:  # a pickle that is longer than the tensors: they would keep it
            lends = len(view) >= len(parcel.body)

        def storage_at(start: int, size: int) -> tuple[torch.UntypedStorage, int]:
            found = torch.frombuffer(view, dtype=torch.uint8, count=size, offset=start)
            if not lends or is_small(size, len(view)):
                found = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pins).copy_(found)
            return found.untyped_storage(), 0

        def plain_at(start: int, size: int) -> memoryview:
            return view[start : start + size] if lends and not is_small(size, len(view)) else copied(view, start, size)

        def whole_at(start: int, num_bytes: int, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
            if lends and not is_small(num_bytes, len(view)):
                found = torch.frombuffer(view, dtype=dtype, count=num_bytes // dtype.itemsize, offset=start)
            else:  # copied as bytes: torch 2.9 cannot copy four-bit floats
                found = torch.frombuffer(view, dtype=torch.uint8, count=num_bytes, offset=start)
                found = torch.empty_like(found, pin_memory=True).copy_(found) if self._pins else found.clone()
                found = found.view(dtype)
            return found.resize_(size)

        return unpack(parcel, storage_at, plain_at, whole_at=whole_at)


class Lender(Copier):
    """Opens batches over the slot itself. Nothing is copied; the slot is free when the last reference is gone.

    Tensors that are small beside their batch, or beside its pickle, are copied: a loop that keeps the labels of all
    batches must not keep all images with them.
    """

    lends = True


def is_small(num_bytes: int, batch_bytes: int) -> bool:
    """Return whether a tensor is so small beside its batch that it must not keep the batch's memory alive."""
    return num_bytes <= _SMALL_BYTES and num_bytes * _SMALL_RATIO < batch_bytes


def copied(view: memoryview, start: int, size: int) -> memoryview:
    """Return plain memory (numpy's) outside the slot."""
    return memoryview(bytearray(view[start : start + size]))
