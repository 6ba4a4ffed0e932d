"""Loaders that break the contract in one way each, for the proof that the tests notice.

Comes in: torch's own loader. Goes out: subclasses of it, each with its fault in its name.
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
    """A loader whose iterator hands the function that gives the next batch to `fault`."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch, wrongly."""
        return take()

    def _get_iterator(self) -> Any:
        iterator: Any = super()._get_iterator()
        if self.num_workers:
            iterator.__class__ = _FaultyIterator
            iterator.fault = self.fault
        return iterator


class MakesLists(Faulty):
    """Gives lists for tuples of any kind."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch as a list."""
        batch = take()
        return list(batch) if isinstance(batch, tuple) else batch


class Copies(Faulty):
    """Copies each tensor by itself: strides, identity and shared storages are lost."""

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
    """Gives float32 for float64."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch in single precision."""
        batch = take()
        return batch.float() if isinstance(batch, torch.Tensor) and batch.dtype == torch.float64 else batch


class Reuses(Faulty):
    """Gives every batch in the same memory after the first ones."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.memory = torch.empty(4, 64, 64)

    def fault(self, take: Any) -> Any:  # type: ignore[override]
        """Return the batch in memory that the next one gets too."""
        batch = take()
        return batch | {"x": self.memory.copy_(batch["x"])}


class KeepsBigStorage(Faulty):
    """Gives tensors that lie in a storage far larger than they are."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch within a larger one."""
        batch = take()
        return batch | {"x": torch.cat([batch["x"], torch.zeros(40, 64, 64)])[:4]}


class Locks(Faulty):
    """Gives tensors that cannot be edited."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the batch as inference tensors."""
        batch = take()
        with torch.inference_mode():
            return batch | {"x": batch["x"].clone()}


class Swallows(Faulty):
    """Leaves out what failed."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch that does not fail."""
        try:
            return take()
        except ValueError:
            return take()


class Rewords(Faulty):
    """Raises something else than the user's code did."""

    @staticmethod
    def fault(take: Any) -> Any:
        """Return the next batch or raise a RuntimeError."""
        try:
            return take()
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class DrawsTwice(DataLoader[Any]):
    """Draws one more number from the generator for each iterator."""

    def _get_iterator(self) -> Any:
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return super()._get_iterator()


class DrawsInPython(DataLoader[Any]):
    """Draws from the random module."""

    def _get_iterator(self) -> Any:
        random.random()  # noqa: S311
        return super()._get_iterator()


class SkipsInit(DataLoader[Any]):
    """Does not call worker_init_fn."""

    def _get_iterator(self) -> Any:
        given, self.worker_init_fn = self.worker_init_fn, None
        try:
            return super()._get_iterator()
        finally:
            self.worker_init_fn = given


def reseed(_worker_id: int) -> None:
    """Seed a worker with something else than torch's seed."""
    torch.manual_seed(torch.initial_seed() + 1)


class Reseeds(DataLoader[Any]):
    """Seeds workers by itself."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **{"worker_init_fn": reseed} | rest)


class Reverses(DataLoader[Any]):
    """Gives the batches from the last to the first."""

    @property
    def _index_sampler(self) -> Any:
        return list(super()._index_sampler)[::-1]


class DropsLast(DataLoader[Any]):
    """Leaves the last batch out."""

    @property
    def _index_sampler(self) -> Any:
        return list(super()._index_sampler)[:-1]


class LooksAhead(DataLoader[Any]):
    """Asks for more batches than prefetch_factor says."""

    def __init__(self, *arguments: Any, prefetch_factor: int = 2, **rest: Any) -> None:
        super().__init__(*arguments, prefetch_factor=prefetch_factor + 1, **rest)


class Thaws(DataLoader[Any]):
    """Lets every attribute be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it."""
        object.__setattr__(self, name, value)


class Wraps(DataLoader[Any]):
    """Shows a collate function that is not the user's."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.collate_fn = partial(default_collate)


class Renames(DataLoader[Any]):
    """Gives the profiler another name."""

    def _get_iterator(self) -> Any:
        iterator = super()._get_iterator()
        iterator._profile_name += "_ours"
        return iterator


class ForgetsLength(DataLoader[Any]):
    """Does not remember what it said its length was."""

    def __len__(self) -> int:
        """Return the length."""
        length = super().__len__()
        self._IterableDataset_len_called = None
        return length


class StartsAnew(DataLoader[Any]):
    """Makes new workers for each epoch, whatever was asked for."""

    def __iter__(self) -> Any:
        """Return a new iterator."""
        return self._get_iterator()


class LeavesPipes(DataLoader[Any]):
    """Opens a pipe for each iterator and never closes it."""

    def _get_iterator(self) -> Any:
        os.pipe()
        return super()._get_iterator()


class LeavesWorkers(DataLoader[Any]):
    """Keeps the iterators."""

    iterators: tuple[Any, ...] = ()

    def _get_iterator(self) -> Any:
        LeavesWorkers.iterators = (*LeavesWorkers.iterators[-1:], super()._get_iterator())
        return self.iterators[-1]


class SharesIterator(DataLoader[Any]):
    """Gives all who iterate the same iterator, as long as one is in use."""

    shared: Any = None

    def _get_iterator(self) -> Any:
        self.shared = self.shared or super()._get_iterator()
        return self.shared


class Warns(DataLoader[Any]):
    """Is chatty."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        warnings.warn("this loader is fast", stacklevel=2)
