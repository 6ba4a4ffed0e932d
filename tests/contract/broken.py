"""Loaders that each break the contract in one way, named after their fault, to prove that the tests notice."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
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


@takes
def swallows(take: Callable[[], Any]) -> Any:
    """Skip batches that failed."""
    try:
        return take()
    except ValueError:
        return take()


@starts
def draws_twice(loader: Any) -> None:
    """Draw one more number from the generator for each iterator."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


@starts
def leaves_pipes(_loader: Any) -> None:
    """Open a pipe for each iterator and never close it."""
    os.pipe()
