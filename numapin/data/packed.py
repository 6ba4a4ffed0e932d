"""`numapin.pack_bytes`: many pieces of bytes as one array, for a batch whose files the rank decodes."""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from numapin.data.buffer import batch_buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np


class PackedBytes:
    """Pieces of bytes in one numpy array, which stays on the host whatever the loader's device is.

    `len()` is the number of pieces. An index, or a loop, gives pieces as one-dimensional uint8 tensors on the host,
    without a copy.

    Attributes:
        data: The bytes of all pieces, one behind the other.
        bounds: Where each piece begins in `data`, and where the last one ends.
    """

    def __init__(self, data: np.ndarray[Any, Any], bounds: Sequence[int]) -> None:
        """Take the bytes and the bounds."""
        self.data, self.bounds = data, tuple(bounds)

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.bounds) - 1

    def __getitem__(self, index: SupportsIndex) -> torch.Tensor:
        """Return a piece."""
        at = range(len(self))[operator.index(index)]
        return torch.from_numpy(self.data[self.bounds[at] : self.bounds[at + 1]])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the pieces."""
        return (torch.from_numpy(self.data[first:last]) for first, last in pairwise(self.bounds))


def pack_bytes(pieces: Sequence[Any]) -> PackedBytes:
    """Return pieces of bytes as one array, in the memory in which the batch will travel.

    Use it in a collate_fn, for files that `device_transform` decodes. Bytes objects in a batch are pickled, and
    a tensor would be moved to the GPU, where decoders do not read.

    Args:
        pieces: Bytes-like objects, or one-dimensional uint8 tensors on the host.

    Returns:
        The pieces.

    Raises:
        TypeError: A piece is not a bytes-like object.

    Example:
        ```python
        def collate(samples):
            files, labels = zip(*samples)
            return numapin.pack_bytes(files), torch.tensor(labels)
        ```
    """
    arrays: list[Any] = [piece.numpy() if isinstance(piece, torch.Tensor) else piece for piece in pieces]
    views = [memoryview(array).cast("B") for array in arrays]
    bounds = [0, *accumulate(map(len, views))]
    data: Any = batch_buffer(bounds[-1], torch.uint8).numpy()
    whole = memoryview(data)
    for view, (first, last) in zip(views, pairwise(bounds), strict=True):
        whole[first:last] = view
    return PackedBytes(data, bounds)
