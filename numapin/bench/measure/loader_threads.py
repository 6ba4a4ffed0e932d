"""A peer of `bench loader`: threads that stack samples into torch's pinned memory, the best hand-written loader. Edge.

Comes in: a `Setup`. Goes out: batches in order, copied to the GPU by the consuming thread. A few pinned buffers are
used in turn; a buffer is reused after the event that follows its copy. Work that holds the GIL is serialized here.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from numapin.bench.measure.loader_data import Fetch, pinned, tensors
from numapin.bench.measure.loader_peers import Source, to_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numapin.bench.measure.loader_data import Batch, Sample
    from numapin.bench.measure.loader_peers import Setup

_SPARE: Final = 2  # more buffers than threads: one with the consumer, one being copied


@dataclass(slots=True)
class _Buffer:
    """One batch's memory, and the event after its last copy, None before the first copy or without a GPU."""

    batch: Batch
    free: torch.cuda.Event | None = None


def threads(setup: Setup) -> Source:
    """Return the peer."""
    executor = ThreadPoolExecutor(setup.case.num_workers)
    return Source(batches=_batches(setup, executor), close=lambda: executor.shutdown(wait=False, cancel_futures=True))


def _batches(setup: Setup, executor: ThreadPoolExecutor) -> Iterator[Batch]:
    """Yield batches in order. A batch gets its buffer when it is requested, so that none waits for a later one."""
    indices = iter(setup.indices)
    buffers = [_Buffer(_memory(setup)) for _ in range(setup.case.num_workers + _SPARE)]
    under_way = deque(executor.submit(_fill, setup, buffer, next(indices)) for buffer in buffers)
    while True:
        buffer = under_way.popleft().result()
        batch = to_device(buffer.batch, setup.device)
        if setup.device is None:
            yield batch  # the consumer has finished with it when it requests the next one
        else:
            buffer.free = torch.cuda.Event()
            buffer.free.record()
        under_way.append(executor.submit(_fill, setup, buffer, next(indices)))
        if setup.device is not None:
            yield batch


def _memory(setup: Setup) -> Batch:
    """Return memory for a batch, pinned if it goes to a GPU."""
    batch = Fetch(setup.dataset)(range(setup.case.batch_size))
    return batch if setup.device is None else pinned(batch)


def _fill(setup: Setup, buffer: _Buffer, indices: list[int]) -> _Buffer:
    """Stack samples into a buffer after the last copy from it has ended."""
    if buffer.free is not None:
        buffer.free.synchronize()
    samples = [setup.dataset[index] for index in indices]
    columns = zip(*map(_parts, samples), strict=True)
    for column, out in zip(columns, tensors(buffer.batch), strict=True):
        if isinstance(column[0], torch.Tensor):
            torch.stack(column, out=out)
        else:
            out.copy_(torch.tensor(column))
    return buffer


def _parts(sample: Sample) -> Iterable[torch.Tensor | int]:
    return sample.values() if isinstance(sample, dict) else sample
