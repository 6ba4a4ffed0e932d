"""SPDL as a peer of `bench loader`, in the three ways that its documentation shows. Edge.

Comes in: a `Setup`. Goes out: batches on the GPU. The transfer does with torch what spdl.io.transfer_tensor does: pin,
copy on a stream of the stage's own thread, wait for that stream. It needs the package spdl-core.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol

import torch

from numapin.bench.measure.loader_data import Fetch, num_bytes, pinned
from numapin.bench.measure.loader_peers import Source, moved, record, to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager
    from types import ModuleType

    from numapin.bench.measure.loader_data import Batch
    from numapin.bench.measure.loader_peers import Setup

_ARENA_SLACK: Final = 1 << 20  # bytes, for alignment and small fields


class _SpdlPipeline(Protocol):
    """A built pipeline of SPDL, as far as it is used here."""

    def auto_stop(self) -> AbstractContextManager[object]: ...
    def get_iterator(self) -> Iterator[Batch]: ...


class _SpdlBuilder(Protocol):
    """SPDL's PipelineBuilder with a source, as far as it is used here."""

    def pipe(self, stage: Callable[[Batch], Batch], /, *, executor: Executor) -> _SpdlBuilder: ...
    def add_sink(self, buffer_size: int, /) -> _SpdlBuilder: ...
    def build(self, *, num_threads: int) -> _SpdlPipeline: ...


def pipeline(setup: Setup) -> Source:
    """Return the multi-threaded pipeline: fetch and collate in threads, transfer in one separate thread."""
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
    """Return the pipeline in a subprocess that sends batches through a pool of shared-memory segments."""
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


def _in_subprocess(setup: Setup) -> Iterator[Batch]:
    torch.set_num_threads(1)
    fetch, num_threads = Fetch(setup.dataset), setup.case.num_workers
    builder = _import().PipelineBuilder().add_source(setup.indices).pipe(fetch, concurrency=num_threads)
    built = builder.add_sink(setup.case.num_ahead).build(num_threads=num_threads)
    with built.auto_stop():
        yield from built.get_iterator()


def _source(builder: _SpdlBuilder, num_threads: int, setup: Setup) -> Source:
    """Add the transfer and build. The pipeline starts with the iteration and ends when the source is closed."""
    stack = ExitStack()
    if setup.device is not None:
        executor = stack.enter_context(ThreadPoolExecutor(1))
        builder = builder.pipe(_transfer(setup.device), executor=executor)
    built = builder.add_sink(setup.case.num_ahead).build(num_threads=num_threads)
    return Source(batches=_started(built, stack), close=stack.close)


def _started(built: _SpdlPipeline, stack: ExitStack) -> Iterable[Batch]:
    stack.enter_context(built.auto_stop())
    yield from built.get_iterator()


def _transfer(device: torch.device) -> Callable[[Batch], Batch]:
    consumer = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)

    def transfer(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            moved_batch = to_device(pinned(batch), device)
        stream.synchronize()
        record(moved_batch, consumer)
        return moved_batch

    return transfer


def _import() -> ModuleType:
    return import_module("spdl.pipeline")
