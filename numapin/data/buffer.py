"""Memory for a batch, in the slot that the batch will travel in: `numapin.batch_buffer`, and `numapin.pack_bytes`.

`pack_bytes` is for a batch whose files the rank decodes.
"""

from __future__ import annotations

import operator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from numapin.data import packing
from numapin.data.pinning import sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np


def batch_buffer(shape: int | Iterable[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized CPU tensor for a whole batch, or for a part of one.

    In a worker of `numapin.DataLoader` it lies in the slot that the batch will travel in. Data that is written there
    (by a decoder with an output argument, `readinto`, `numpy.take(..., out=)`) is not copied on its way to the rank.
    Return the tensor, a view of it, or `.numpy()` of either as the batch or in it. Memory that is not part of the batch
    is not sent if the batch has no other buffer.

    Call it for each batch, in the thread that returns the batch: in `__getitems__`, in a collate_fn, in the
    `__getitem__` of a dataset with `batch_size=None`, or before a `yield` of an iterable dataset. As with torch, do not
    write to a batch after you returned it. A buffer that you keep stays valid, and is copied if it is returned with a
    later batch; so is a sample that the default collate_fn stacks.

    Elsewhere (another thread, torch's own loader, a loader with `num_workers=0` or `pinned_budget=0`, no loader) it is
    an ordinary tensor.

    Args:
        shape: A size, or several.
        dtype: The data type. None: torch's default. With `cast=`, allocate the narrower type: it is then not cast.

    Returns:
        The tensor, contiguous.

    Raises:
        UsageError: A size is negative.
        RuntimeError: torch cannot allocate a tensor of this size.

    Example:
        ```python
        import numpy
        import torch

        import numapin


        class Rows(torch.utils.data.Dataset):
            def __init__(self, path):
                self.rows = numpy.load(path, mmap_mode="r")

            def __len__(self):
                return len(self.rows)

            def __getitem__(self, indices):
                batch = numapin.batch_buffer((len(indices), *self.rows.shape[1:]), torch.float32)
                numpy.take(self.rows, indices, axis=0, out=batch.numpy(), mode="clip")
                return batch


        batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(dataset), 256, drop_last=False)
        loader = numapin.DataLoader(dataset, batch_size=None, sampler=batches, num_workers=8)
        ```
    """
    sizes = sizes_of(shape)
    # Untouched, it takes no memory; torch refuses sizes that would fill the machine's.
    ordinary = torch.empty(sizes, dtype=dtype, device="cpu")
    in_slot = None if ordinary.is_quantized else packing.allocate(ordinary.dtype, sizes)
    return ordinary if in_slot is None else in_slot


# --- many pieces of bytes as one array -------------------------------------------------------------------------------


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
