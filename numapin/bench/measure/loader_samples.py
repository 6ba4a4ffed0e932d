"""A bound for `bench loader`: processes that only make samples."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from typing import TYPE_CHECKING, Final, Self

import torch

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from numapin.bench.measure.loader_data import InMemory

_PAUSE_S: Final = 0.01


class SampleMakers:
    """Processes that make samples until they are ended, and count the batches."""

    def __init__(self, dataset: InMemory, *, batch_size: int, num_workers: int) -> None:
        """Start them, and return when each has made a batch."""
        context = multiprocessing.get_context()
        self._counts: MutableSequence[int] = context.RawArray("Q", num_workers)
        self._processes = [
            context.Process(target=_make, args=(dataset, batch_size, self._counts, number), daemon=True)
            for number in range(num_workers)
        ]
        for process in self._processes:
            process.start()
        while not all(self._counts):
            self._require_alive()
            self.wait()

    def __enter__(self) -> Self:
        """Return the makers."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    @property
    def num_batches(self) -> int:
        """Return the number of batches so far. Raises RuntimeError if a process has ended."""
        self._require_alive()
        return sum(self._counts)

    def wait(self) -> None:
        """Leave the CPUs to the processes for a moment."""
        time.sleep(_PAUSE_S)

    def _require_alive(self) -> None:
        if not all(process.is_alive() for process in self._processes):
            raise RuntimeError("a process that makes samples has ended")


def _make(dataset: InMemory, batch_size: int, counts: MutableSequence[int], number: int) -> None:
    torch.set_num_threads(1)
    for first in itertools.count(0, batch_size):
        _samples = [dataset[index] for index in range(first, first + batch_size)]
        counts[number] += 1
