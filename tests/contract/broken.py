"""Loaders that each break the contract in one way, named after their fault, to prove that the tests notice."""

from __future__ import annotations

import os
import random
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.watching import LoaderClass


class _FaultyIterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, with the loader's fault applied to each batch."""

    fault: Any

    def _next_data(self) -> Any:
        return self.fault(super()._next_data)


class _Faulty(DataLoader[Any]):
    """A loader whose iterator passes the function that returns the next batch to `fault`."""

    fault: Any

    def _get_iterator(self) -> Any:
        iterator: Any = super()._get_iterator()
        if self.num_workers:
            iterator.__class__ = _FaultyIterator
            iterator.fault = self.fault
        return iterator


def takes(fault: Callable[[Callable[[], Any]], Any]) -> LoaderClass:
    """Return a loader that takes each batch in this way."""
    return type(fault.__name__, (_Faulty,), {"fault": staticmethod(fault)})


def changes(change: Callable[[Any], Any]) -> LoaderClass:
    """Return a loader that changes each batch in this way."""
    return type(change.__name__, (_Faulty,), {"fault": staticmethod(lambda take: change(take()))})


def starts(before: Callable[[Any], object]) -> LoaderClass:
    """Return a loader that does this before it makes an iterator."""

    def get_iterator(self: Any) -> Any:
        before(self)
        return DataLoader._get_iterator(self)

    return type(before.__name__, (DataLoader,), {"_get_iterator": get_iterator})


def samples(order: Callable[[list[Any]], list[Any]]) -> LoaderClass:
    """Return a loader whose batches are sampled in another order."""
    torchs: Any = DataLoader._index_sampler
    sampler = property(lambda self: order([*torchs.fget(self)]))
    return type(order.__name__, (DataLoader,), {"_index_sampler": sampler})


@changes
def makes_lists(batch: Any) -> Any:
    """Return lists in place of tuples of any kind."""
    return list(batch) if isinstance(batch, tuple) else batch


def _copy(value: Any) -> Any:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
    return value.clone(memory_format=torch.contiguous_format) if is_dense else value


@changes
def copies(batch: Any) -> Any:
    """Copy each tensor by itself, which loses strides, identity and shared storages."""
    if type(batch) is dict:
        return {key: _copy(value) for key, value in batch.items()}
    return [_copy(value) for value in batch] if type(batch) is list else _copy(batch)


@changes
def demotes(batch: Any) -> Any:
    """Return float32 in place of float64."""
    return batch.float() if isinstance(batch, torch.Tensor) and batch.dtype == torch.float64 else batch


_MEMORY = torch.empty(4, 64, 64)


@changes
def reuses(batch: Any) -> Any:
    """Return every batch in the same memory."""
    return batch | {"x": _MEMORY.copy_(batch["x"])}


@changes
def keeps_big_storage(batch: Any) -> Any:
    """Return tensors in a storage far larger than they are."""
    return batch | {"x": torch.cat([batch["x"], torch.zeros(40, 64, 64)])[:4]}


@changes
def locks(batch: Any) -> Any:
    """Return tensors that cannot be edited."""
    with torch.inference_mode():
        return batch | {"x": batch["x"].clone()}


@takes
def swallows(take: Callable[[], Any]) -> Any:
    """Skip batches that failed."""
    try:
        return take()
    except ValueError:
        return take()


@takes
def rewords(take: Callable[[], Any]) -> Any:
    """Raise another exception than the user's code."""
    try:
        return take()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


@starts
def draws_twice(loader: Any) -> None:
    """Draw one more number from the generator for each iterator."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


@starts
def draws_in_python(_loader: Any) -> None:
    """Draw from the random module."""
    random.random()  # noqa: S311


@starts
def skips_init(loader: Any) -> None:
    """Skip worker_init_fn."""
    loader.worker_init_fn = None


@starts
def reseeds(loader: Any) -> None:
    """Seed workers differently from torch."""
    loader.worker_init_fn = lambda _worker: torch.manual_seed(torch.initial_seed() + 1)


@starts
def leaves_pipes(_loader: Any) -> None:
    """Open a pipe for each iterator and never close it."""
    os.pipe()


@samples
def reverses(order: list[Any]) -> list[Any]:
    """Return the batches in reverse order."""
    return order[::-1]


@samples
def drops_last(order: list[Any]) -> list[Any]:
    """Drop the last batch."""
    return order[:-1]


class LooksAhead(DataLoader[Any]):
    """Request more batches ahead than prefetch_factor allows."""

    def __init__(self, *arguments: Any, prefetch_factor: int = 2, **rest: Any) -> None:
        super().__init__(*arguments, prefetch_factor=prefetch_factor + 1, **rest)


class Thaws(DataLoader[Any]):
    """Allow every attribute to be set."""

    __setattr__ = object.__setattr__  # type: ignore[assignment] # torch names its parameters otherwise


class Wraps(DataLoader[Any]):
    """Show a collate function that is not the user's, with a warning."""

    def __init__(self, *arguments: Any, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.collate_fn = partial(default_collate)
        warnings.warn("this loader is fast", stacklevel=2)


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


class SharesIterator(DataLoader[Any]):
    """Return the same iterator to all callers as long as one is in use."""

    shared: Any = None

    def _get_iterator(self) -> Any:
        self.shared = self.shared or super()._get_iterator()
        return self.shared


class StartsAnew(DataLoader[Any]):
    """Start new workers for each epoch, even if they should persist, and keep all of them."""

    iterators: tuple[Any, ...] = ()

    def __iter__(self) -> Any:
        """Return a new iterator."""
        StartsAnew.iterators = (*StartsAnew.iterators[-1:], self._get_iterator())
        return self.iterators[-1]
