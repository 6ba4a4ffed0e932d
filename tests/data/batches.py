"""Parts of batches, and comparison of batches before and after their transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.data.seam import Copier, Lender

if TYPE_CHECKING:
    from tests.data.loopback import Loopback
    from tests.data.seam import Head


@dataclass
class Sample:
    """A user's own type."""

    image: Any
    label: int
    more: Any = None


def same(one: Any, other: Any) -> bool:
    """Return whether two batches are of the same types, values, sizes and strides."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        looks: list[Any] = [(t.dtype, t.shape, t.stride(), t.layout, t.requires_grad) for t in (one, other)]
        return looks[0] == looks[1] and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        arrays = [(a.dtype, a.shape, a.flags.fnc, a.flags.writeable, a.tolist()) for a in (one, other)]
        return arrays[0] == arrays[1]
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in their order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def ramp(*size: int) -> torch.Tensor:
    """Return a tensor of distinct elements."""
    return torch.arange(torch.Size(size).numel(), dtype=torch.float32).reshape(size)


def in_slot(loop: Loopback, batch: Any) -> Head:
    """Assert that a batch travels in one slot as a whole and comes out unchanged; return its head."""
    parcel = loop.send(batch)
    for opened in (Copier(pins=False).open(parcel), Lender(pins=False).open(parcel)):
        assert same(opened, batch)
    head = parcel.head
    assert (head.miss, head.slot >= 0) == (None, True)
    return head
