"""Loaders that each break the contract in one way, to prove that the tests notice.

Input: torch's own loader. Output: subclasses of it, named after their fault.
"""

from __future__ import annotations

import os
import random
import warnings
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


class _FaultyIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, with the loader's fault applied to each batch."""

    fault: Any

    def _next_data(self) -> Any:
        return self.fault(super()._next_data)


class Faulty(DataLoader[Any]):
    """A loader whose iterator passes the function that returns the next batch to `fault`."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch, with the fault."""
        return take()

    def _get_iterator(self) -> Any:
        iterator: Any = super()._get_iterator()
        if self.num_workers:
            iterator.__class__ = _FaultyIterator
            iterator.fault = self.fault
        return iterator


class MakesLists(Faulty):
    """Return lists in place of tuples of any kind."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch as a list."""
        batch = take()
        return list(batch) if isinstance(batch, tuple) else batch


class Copies(Faulty):
    """Copy each tensor by itself, which loses strides, identity and shared storages."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return copies."""
        batch = take()
        if isinstance(batch, dict):
            return {key: value.clone() for key, value in batch.items()}
        if isinstance(batch, list):
            return [value.clone() for value in batch]
        return batch.clone(memory_format=torch.contiguous_format) if isinstance(batch, torch.Tensor) else batch


class Demotes(Faulty):
    """Return float32 in place of float64."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch in single precision."""
        batch = take()
        return batch.float() if isinstance(batch, torch.Tensor) and batch.dtype == torch.float64 else batch


class Reuses(Faulty):
    """Return every batch after the first ones in the same memory."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.memory = torch.empty(4, 64, 64)

    def fault(self, take: Any) -> Any:  # type: ignore[override]
        """Return the batch in memory that the next batch reuses."""
        batch = take()
        return batch | {"x": self.memory.copy_(batch["x"])}


class KeepsBigStorage(Faulty):
    """Return tensors in a storage far larger than they are."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch inside a larger storage."""
        batch = take()
        return batch | {"x": torch.cat([batch["x"], torch.zeros(40, 64, 64)])[:4]}


class Locks(Faulty):
    """Return tensors that cannot be edited."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch as inference tensors."""
        batch = take()
        with torch.inference_mode():
            return batch | {"x": batch["x"].clone()}


class Swallows(Faulty):
    """Skip batches that failed."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch that does not fail."""
        try:
            return take()
        except ValueError:
            return take()


class Rewords(Faulty):
    """Raise another exception than the user's code."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch or raise a RuntimeError."""
        try:
            return take()
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class DrawsTwice(DataLoader[Any]):
    """Draw one more number from the generator for each iterator."""

    def _get_iterator(self) -> Any:
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super()._get_iterator()


class DrawsInPython(DataLoader[Any]):
    """Draw from the random module."""

    def _get_iterator(self) -> Any:
        random.random()  # noqa: S311
        return super()._get_iterator()


class SkipsInit(DataLoader[Any]):
    """Skip worker_init_fn."""

    def _get_iterator(self) -> Any:
        given, self.worker_init_fn = self.worker_init_fn, None
        try:
            return super()._get_iterator()
        finally:
            self.worker_init_fn = given


def reseed(_worker_id: int) -> None:
    """Seed a worker differently from torch."""
    torch.manual_seed(torch.initial_seed() + 1)


class Reseeds(DataLoader[Any]):
    """Seed workers differently from torch."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **{"worker_init_fn": reseed} | rest)


class Reverses(DataLoader[Any]):
    """Return the batches in reverse order."""

    @property
    def _index_sampler(self) -> Any:
        return list(super()._index_sampler)[::-1]


class DropsLast(DataLoader[Any]):
    """Drop the last batch."""

    @property
    def _index_sampler(self) -> Any:
        return list(super()._index_sampler)[:-1]


class LooksAhead(DataLoader[Any]):
    """Request more batches ahead than prefetch_factor allows."""

    def __init__(self, *arguments: Any, prefetch_factor: int = 2, **rest: Any) -> None:
        super().__init__(*arguments, prefetch_factor=prefetch_factor + 1, **rest)


class Thaws(DataLoader[Any]):
    """Allow every attribute to be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        object.__setattr__(self, name, value)


class Wraps(DataLoader[Any]):
    """Show a collate function that is not the user's."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.collate_fn = partial(default_collate)


class Renames(DataLoader[Any]):
    """Give the profiler another name."""

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        iterator._profile_name += "_ours"
        return iterator


class ForgetsLength(DataLoader[Any]):
    """Forget the length that it returned."""

    def __len__(self) -> int:
        """Return the length."""
        length = super().__len__()
        self._IterableDataset_len_called = None
        return length


class StartsAnew(DataLoader[Any]):
    """Start new workers for each epoch, even if they should persist."""

    def __iter__(self) -> Any:
        """Return a new iterator."""
        return self._get_iterator()


class LeavesPipes(DataLoader[Any]):
    """Open a pipe for each iterator and never close it."""

    def _get_iterator(self) -> Any:
        os.pipe()
        return super()._get_iterator()


class LeavesWorkers(DataLoader[Any]):
    """Keep the iterators."""

    iterators: tuple[Any, ...] = ()

    def _get_iterator(self) -> Any:
        LeavesWorkers.iterators = (*LeavesWorkers.iterators[-1:], super()._get_iterator())
        return self.iterators[-1]


class SharesIterator(DataLoader[Any]):
    """Return the same iterator to all callers as long as one is in use."""

    shared: Any = None

    def _get_iterator(self) -> Any:
        self.shared = self.shared or super()._get_iterator()
        return self.shared


class Warns(DataLoader[Any]):
    """Issue a warning."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        warnings.warn("this loader is fast", stacklevel=2)
