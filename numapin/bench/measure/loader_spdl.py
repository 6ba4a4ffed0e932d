"""SPDL as a peer of `bench loader`, in the three ways that its documentation shows.

Comes in: a `Setup`. Goes out: batches on the GPU. What spdl.io.transfer_tensor does is done with torch: pin, copy on a
stream of the stage's own thread, wait for that stream. Needs the package spdl-core.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.bench.measure.loader_data import Fetch, num_bytes
from numapin.bench.measure.loader_peers import Source, moved, record, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numapin.bench.measure.loader_peers import Setup

_ARENA_SLACK: Final = 1 << 20  # bytes: for alignment and small fields


def pipeline(setup: Setup) -> Source:
    """Return the multi-threaded pipeline: fetch and collate in threads, transfer in one thread of its own."""
    fetch, num_threads = Fetch(setup.dataset), setup.case.num_workers
    return _source(
        _import().PipelineBuilder().add_source(setup.indices).pipe(fetch, concurrency=num_threads), num_threads, setup
    )


def processes(setup: Setup) -> Source:
    """Return SPDL's counterpart of torch's DataLoader, with worker processes."""
    loader = import_module("spdl.dataloader").get_pytorch_dataloader(
        setup.dataset,
        batch_size=setup.case.batch_size,
        num_workers=setup.case.num_workers,
        pin_memory=setup.device is not None,
        prefetch_factor=setup.case.prefetch,
    )
    return Source(batches=moved(loader, setup.device))


def subprocess(setup: Setup) -> Source:
    """Return the pipeline in a subprocess, whose batches come through a pool of shared-memory segments."""
    spdl = _import()
    sample_batch = Fetch(setup.dataset)(range(setup.case.batch_size))
    arena = spdl.SharedMemorySegmentPool(2 * num_bytes(sample_batch) + _ARENA_SLACK, setup.case.num_ahead)
    iterable = spdl.iterate_in_subprocess(
        partial(_in_subprocess, setup),
        buffer_size=setup.case.num_ahead,
        daemon=True,
        arena=arena,
    )
    return _source(spdl.PipelineBuilder().add_source(iterable), 1, setup)


def _in_subprocess(setup: Setup) -> Iterator[Any]:
    torch.set_num_threads(1)
    fetch, num_threads = Fetch(setup.dataset), setup.case.num_workers
    builder = _import().PipelineBuilder().add_source(setup.indices).pipe(fetch, concurrency=num_threads)
    built = builder.add_sink(setup.case.num_ahead).build(num_threads=num_threads)
    with built.auto_stop():
        yield from built.get_iterator()


def _source(builder: Any, num_threads: int, setup: Setup) -> Source:  # noqa: ANN401 - spdl is not typed here
    """Add the transfer and build. The pipeline starts with the iteration and ends when the source is closed."""
    stack = ExitStack()
    if setup.device is not None:
        executor = stack.enter_context(ThreadPoolExecutor(1))
        builder = builder.pipe(_transfer(setup.device), executor=executor)
    built = builder.add_sink(setup.case.num_ahead).build(num_threads=num_threads)
    return Source(batches=_started(built, stack), close=stack.close)


def _started(built: Any, stack: ExitStack) -> Iterable[Any]:  # noqa: ANN401 - as above
    stack.enter_context(built.auto_stop())
    yield from built.get_iterator()


def _transfer(device: torch.device) -> Callable[[Any], Any]:
    consumer = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)

    def transfer(batch: Any) -> Any:  # noqa: ANN401 - any container of tensors
        with torch.cuda.stream(stream):
            moved_batch = to_device(_pinned(batch), device)
        stream.synchronize()
        record(moved_batch, consumer)
        return moved_batch

    return transfer


def _pinned(batch: Any) -> Any:  # noqa: ANN401 - as above
    if isinstance(batch, dict):
        return {name: tensor.pin_memory() for name, tensor in batch.items()}
    return [tensor.pin_memory() for tensor in batch]


def _import() -> Any:  # noqa: ANN401 - a module that not everybody has
    return import_module("spdl.pipeline")
