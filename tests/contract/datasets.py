"""Datasets, samplers and functions for workers; rows of 16 KiB are more than a loader may leave in its messages."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

ROW = (64, 64)


def row(index: int, shape: tuple[int, ...] = ROW) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).add_(1000 * index)


class Rows(Dataset[Any]):
    def __init__(self, size: int = 48, *, delay_s: float = 0.0, shape: tuple[int, ...] = ROW) -> None:
        self.size, self.delay_s, self.shape = size, delay_s, shape

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        time.sleep(self.delay_s)
        return {"x": row(index, self.shape), "index": index, "name": f"row {index}"}


@dataclass(frozen=True)
class Made(Dataset[Any]):
    """Items that a function makes of an index, or of what else a sampler yields, after a pause."""

    make: Callable[[Any], Any] = int
    size: int = 24
    pause_s: float = 0.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.pause_s)
        return self.make(index)


def cached(make: Callable[[int], Any], period: int) -> Callable[[int], Any]:
    """Return a function that keeps what another one makes, and makes item n of n modulo `period`."""
    kept = cache(make)
    return lambda index: kept(index % period)


class ListedRows(Rows):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] | {"together": len(indices)} for index in indices]


class Stream(IterableDataset[Any]):
    """An iterable dataset: worker w yields `lengths[w]` rows; without workers all rows are yielded."""

    def __init__(self, *lengths: int, claims: int | None = None) -> None:
        self.lengths, self.claims = lengths, claims

    def __len__(self) -> int:
        if self.claims is None:
            raise TypeError("this stream has no length")
        return self.claims

    def __repr__(self) -> str:
        """Return a text without an address, because torch's warnings contain it."""
        return f"Stream{self.lengths}"

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        shares = range(len(self.lengths)) if info is None else (info.id,)
        for share in shares:
            for index in range(self.lengths[share]):
                yield row(100 * share + index), share


class Seeds(Dataset[Any]):
    """The random numbers and the worker info of each worker, one item at a time."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        told = info and (info.id, info.num_workers, info.seed, type(info.dataset).__name__, info.dataset is self)
        drawn = (torch.initial_seed(), torch.rand(1024), random.random(), np.random.rand())  # noqa: NPY002, S311
        # also `threads`: torch gives each worker one
        return {"index": index, "info": told, "drawn": drawn, "threads": torch.get_num_threads() if info else None}


def rows_with(act: Callable[[], object], *, at: int, size: int = 24) -> Made:
    """Return rows with an action before one index."""

    def make(index: int) -> torch.Tensor:
        if index == at:
            act()
        return row(index)

    return Made(make, size)


class CountingSampler:
    def __init__(self, size: int) -> None:
        self.size, self.drawn = size, 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.size):
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        return self.size


class ManyArgumentsError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True, slots=True)
class Raise:
    kind: type[BaseException]
    arguments: tuple[Any, ...] = ("row 7 is broken: \u00e9\u2028",)

    def __call__(self, *_: object, **_options: object) -> Any:
        raise self.kind(*self.arguments)


class Reduced:
    """A value that calls a function when it is sent, which returns how it is made again."""

    def __init__(self, reduce: Callable[[], Any]) -> None:
        self.reduce = reduce

    def __reduce__(self) -> Any:
        return self.reduce()


def raise_from() -> None:
    try:
        {}["missing"]  # type: ignore[index]
    except KeyError as error:
        raise ValueError("the row has no such field") from error


kill_worker = partial(signal.raise_signal, signal.SIGKILL)
