"""Parts of batches, and comparison of batches before and after their transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.contract.describe import describe
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
    return describe(one).tree == describe(other).tree


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
