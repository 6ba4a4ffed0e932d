"""Datasets, samplers and functions for workers; rows of 16 KiB are more than a loader may leave in its messages."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROW = (64, 64)


def row(index: int, shape: tuple[int, ...] = ROW) -> torch.Tensor:
    """Return a float32 row whose elements all depend on the index."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).add_(1000 * index)


class Rows(Dataset[Any]):
    """`size` rows as dicts of a tensor, its index and a string; each takes `delay_s` to make."""

    def __init__(self, size: int = 48, *, delay_s: float = 0.0, shape: tuple[int, ...] = ROW) -> None:
        self.size, self.delay_s, self.shape = size, delay_s, shape

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.size

    def __getitem__(self, index: int) -> Any:
        """Return row `index`; IndexError beyond the end."""
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
        """Return the number of items."""
        return self.size

    def __getitem__(self, index: Any) -> Any:
        """Return item `index`."""
        time.sleep(self.pause_s)
        return self.make(index)


def cached(make: Callable[[int], Any], period: int) -> Callable[[int], Any]:
    """Return a function that keeps what another one makes, and makes item n of n modulo `period`."""
    kept: dict[int, Any] = {}

    def get(index: int) -> Any:
        if index % period not in kept:
            kept[index % period] = make(index % period)
        return kept[index % period]

    return get


class ListedRows(Rows):
    """Rows that are read a batch at a time."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the rows of one batch, marked as read together."""
        return [self[index] | {"together": len(indices)} for index in indices]


class GrowingRows(Rows):
    """Rows of 4 KiB, 8 KiB, 12 KiB and so on in groups of eight, then small ones again."""

    def __getitem__(self, index: int) -> Any:
        """Return row `index`, whose length depends on the index."""
        time.sleep(self.delay_s)
        return row(index, (1024 * (1 + index // 8 % 6),))


class Stream(IterableDataset[Any]):
    """An iterable dataset: worker w yields `lengths[w]` rows; without workers all rows are yielded."""

    def __init__(self, *lengths: int, claims: int | None = None) -> None:
        self.lengths, self.claims = lengths, claims

    def __len__(self) -> int:
        """Return the length that this dataset claims, true or not."""
        if self.claims is None:
            raise TypeError("this stream has no length")
        return self.claims

    def __repr__(self) -> str:
        """Return a text without an address, because torch's warnings contain it."""
        return f"Stream{self.lengths}"

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's rows."""
        info = get_worker_info()
        shares = range(len(self.lengths)) if info is None else (info.id,)
        for share in shares:
            for index in range(self.lengths[share]):
                yield row(100 * share + index), share


class Seeds(Dataset[Any]):
    """The random numbers and the worker info of each worker, one item at a time."""

    def __len__(self) -> int:
        """Return the number of items."""
        return 24

    def __getitem__(self, index: int) -> Any:
        """Draw from torch, random and numpy, and return the numbers with the worker's info."""
        info = get_worker_info()
        told = info and (info.id, info.num_workers, info.seed, type(info.dataset).__name__, info.dataset is self)
        drawn = (torch.initial_seed(), torch.rand(1024), random.random(), np.random.rand())  # noqa: NPY002, S311
        # also `threads`: torch gives each worker one
        return {"index": index, "info": told, "drawn": drawn, "threads": torch.get_num_threads() if info else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class At(Dataset[Any]):
    """Rows with an action before one index."""

    index: int
    act: Callable[[], object]
    size: int = 24

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.size

    def __getitem__(self, index: int) -> Any:
        """Return row `index`, or the result of the action."""
        if index == self.index:
            self.act()
        return row(index)


class CountingSampler:
    """A sampler of indices in order; `drawn` counts the requested ones."""

    def __init__(self, size: int) -> None:
        self.size, self.drawn = size, 0

    def __iter__(self) -> Iterator[int]:
        """Yield indices and count them."""
        for index in range(self.size):
            self.drawn += 1
            yield index

    def __len__(self) -> int:
        """Return the number of indices."""
        return self.size


class ManyArgumentsError(Exception):
    """An exception that cannot be re-created from one text."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True, slots=True)
class Raise:
    """A callable that raises an exception with these arguments."""

    kind: type[BaseException]
    arguments: tuple[Any, ...] = ("row 7 is broken: \u00e9\u2028",)

    def __call__(self, *_: object) -> Any:
        """Raise the exception."""
        raise self.kind(*self.arguments)


class Reduced:
    """A value that calls a function when it is sent, which returns how it is made again."""

    def __init__(self, reduce: Callable[[], Any]) -> None:
        self.reduce = reduce

    def __reduce__(self) -> Any:
        """Call it."""
        return self.reduce()


def raise_from() -> None:
    """Raise an exception that has a cause."""
    try:
        {}["missing"]  # type: ignore[index]
    except KeyError as error:
        raise ValueError("the row has no such field") from error


def kill_worker() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash_worker() -> None:
    """End this process like a segmentation fault."""
    os.kill(os.getpid(), signal.SIGSEGV)


def exit_worker() -> None:
    """Exit with status 3."""
    sys.exit(3)


def sleep_long() -> None:
    """Take longer than the test's time-out."""
    time.sleep(2)


def lock_of(_rows: object) -> object:
    """Collate to an object that cannot be pickled."""
    return threading.Lock()


def collate_one_tensor(rows: Any) -> object:
    """Pass default_collate a tensor instead of a list of tensors."""
    one: Any = torch.stack(rows)
    return default_collate(one)


def collate_deque(rows: Any) -> object:
    """Pass default_collate an object that has a length but no slices."""
    several: Any = deque(rows)
    return default_collate(several)


def with_history(rows: list[torch.Tensor]) -> torch.Tensor:
    """Collate to a tensor in the middle of an autograd graph, which torch refuses to send."""
    return torch.stack(rows).requires_grad_() * 2
