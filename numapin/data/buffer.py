"""`numapin.batch_buffer`: memory for a batch, in the slot that the batch will travel in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.utils.data import get_worker_info

from numapin.base.stderr import say
from numapin.data import packing
from numapin.data.arguments import sizes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_reported: Final[set[str]] = set()


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
    an ordinary tensor. In a process that uses CUDA and is no worker it is pinned, so that copies to the GPU need not
    stage it.

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
    if get_worker_info() is not None:
        in_slot = None if ordinary.is_quantized else packing.allocate(ordinary.dtype, sizes)
        return ordinary if in_slot is None else in_slot
    if not torch.cuda.is_initialized():
        return ordinary
    try:
        return torch.empty_like(ordinary, pin_memory=True)  # torch's own memory, which it reuses
    except RuntimeError as error:
        reason = f"{error}".partition("\n")[0]
        if reason not in _reported:
            _reported.add(reason)
            say(f"warning: batch_buffer() is not pinned: {reason}; see: numapin.pinned.budget()")
        return ordinary
