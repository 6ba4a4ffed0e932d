"""A peer of `bench loader`: threads that stack samples into torch's own pinned memory. The best one can do by hand.

Comes in: a `Setup`. Goes out: batches in order, copied to the GPU by the consuming thread. A few pinned buffers go
round; one is written again when the event after its copy has passed. Work that holds the GIL takes turns here.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import default_collate

from numapin.bench.measure.loader_data import tensors
from numapin.bench.measure.loader_peers import Source, to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.bench.measure.loader_peers import Setup

_SPARE: Final = 2  # buffers more than threads: one with the consumer, one on its way


@dataclass(slots=True)
class _Buffer:
    """One batch's memory, and the event after its last copy; None before the first, and without a GPU."""

    batch: Any
    free: torch.cuda.Event | None = field(default=None)


def threads(setup: Setup) -> Source:
    """Return the peer."""
    executor = ThreadPoolExecutor(setup.case.num_workers)
    return Source(batches=_batches(setup, executor), close=lambda: executor.shutdown(wait=False, cancel_futures=True))


def _batches(setup: Setup, executor: ThreadPoolExecutor) -> Iterator[Any]:
    """Yield batches in order. The buffer of each is chosen when it is asked for, so none waits for a later one."""
    indices = iter(setup.indices)
    buffers = [_Buffer(_memory(setup)) for _ in range(setup.case.num_workers + _SPARE)]
    under_way = deque(executor.submit(_fill, setup, buffer, next(indices)) for buffer in buffers)
    while True:
        buffer = under_way.popleft().result()
        batch = to_device(buffer.batch, setup.device)
        if setup.device is None:
            yield batch  # the consumer is done with it when it asks for the next one
        else:
            buffer.free = torch.cuda.Event()
            buffer.free.record()
        under_way.append(executor.submit(_fill, setup, buffer, next(indices)))
        if setup.device is not None:
            yield batch


def _memory(setup: Setup) -> Any:  # noqa: ANN401 - a batch
    """Return memory for a batch, pinned where it goes to a GPU."""
    batch = default_collate([setup.dataset[index] for index in range(setup.case.batch_size)])
    return batch if setup.device is None else _pinned(batch)


def _pinned(batch: Any) -> Any:  # noqa: ANN401 - a batch
    if isinstance(batch, dict):
        return {name: tensor.pin_memory() for name, tensor in batch.items()}
    return [tensor.pin_memory() for tensor in batch]


def _fill(setup: Setup, buffer: _Buffer, indices: list[int]) -> _Buffer:
    """Stack samples into a buffer once the copy that read it last is over."""
    if buffer.free is not None:
        buffer.free.synchronize()
    samples = [setup.dataset[index] for index in indices]
    columns = zip(*(sample.values() if isinstance(sample, dict) else sample for sample in samples), strict=True)
    for column, out in zip(columns, tensors(buffer.batch), strict=True):
        if isinstance(column[0], torch.Tensor):
            torch.stack(column, out=out)
        else:
            out.copy_(torch.tensor(column))
    return buffer
