"""The peers of `bench loader`: numapin, torch and torchdata; SPDL and threads by hand are in files of their own.

Comes in: a `Setup`. Goes out: a `Source`, whose batches are where the case wants them: on the GPU, or in this process.
Libraries that not everybody has are imported when their peer is built: the harness skips one that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

from numapin.bench.measure.loader_data import Fetch, InMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numapin.bench.cases.loader import LoaderCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a peer is built from. `device` is None for a case that ends in this process."""

    case: LoaderCase
    dataset: InMemory
    device: torch.device | None

    @property
    def indices(self) -> BatchSampler:
        """Return the lists of indices that make the batches."""
        return BatchSampler(SequentialSampler(self.dataset), self.case.batch_size, drop_last=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A peer that is ready. Iterating `batches` starts it; `stats` says what it knows of itself, or None."""

    batches: Iterable[Any]
    stats: Callable[[], Any] = lambda: None
    close: Callable[[], None] = lambda: None


def to_device(batch: Any, device: torch.device | None) -> Any:  # noqa: ANN401 - any container of tensors
    """Copy a batch to the device, without waiting where it is pinned; leave it where there is no device."""
    if device is None:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(part, device) for name, part in batch.items()}
    return [to_device(part, device) for part in batch]


def moved(batches: Iterable[Any], device: torch.device | None) -> Iterator[Any]:
    """Copy each batch in this thread, as training loops do."""
    for batch in batches:
        yield to_device(batch, device)


def _numapin(setup: Setup, **options: object) -> Source:
    loader = import_module("numapin").DataLoader(
        setup.dataset,
        batch_size=setup.case.batch_size,
        num_workers=setup.case.num_workers,
        prefetch_factor=setup.case.prefetch,
        **options,
    )
    batches = loader if "device" in options else moved(loader, setup.device)
    return Source(batches=batches, stats=loader.stats, close=loader.close)


def _numapin_device(setup: Setup) -> Source:
    return _numapin(setup, device=setup.device)


def _torch_loader(setup: Setup, kind: Callable[..., Iterable[Any]]) -> Iterable[Any]:
    return kind(
        setup.dataset,
        batch_size=setup.case.batch_size,
        num_workers=setup.case.num_workers,
        prefetch_factor=setup.case.prefetch,
        pin_memory=setup.device is not None,
    )


def _torch(setup: Setup) -> Source:
    return Source(batches=moved(_torch_loader(setup, TorchDataLoader), setup.device))


def _torch_side_stream(setup: Setup) -> Source:
    return Source(batches=_on_side_stream(_torch_loader(setup, TorchDataLoader), setup.device))


def _on_side_stream(loader: Iterable[Any], device: torch.device | None) -> Iterator[Any]:
    """Copy each batch on another stream while its predecessor is used."""
    stream = torch.cuda.Stream(device)
    batches = iter(loader)

    def ahead() -> Any:  # noqa: ANN401 - a batch
        with torch.cuda.stream(stream):
            return to_device(next(batches), device)

    upcoming = ahead()
    while True:
        consumer = torch.cuda.current_stream(device)
        consumer.wait_stream(stream)
        batch = upcoming
        record(batch, consumer)
        upcoming = ahead()
        yield batch


def record(batch: Any, stream: torch.cuda.Stream) -> None:  # noqa: ANN401 - any container of tensors
    """Tell the allocator that another stream than the one that made the batch uses it."""
    if isinstance(batch, torch.Tensor):
        batch.record_stream(stream)
    else:
        for part in batch.values() if isinstance(batch, dict) else batch:
            record(part, stream)


def _torchdata_stateful(setup: Setup) -> Source:
    stateful = import_module("torchdata.stateful_dataloader")
    return Source(batches=moved(_torch_loader(setup, stateful.StatefulDataLoader), setup.device))


def _torchdata(setup: Setup, *, method: str) -> Source:
    """Build what torchdata's migration guide shows: batches of indices, a parallel map, pinning, prefetching."""
    nodes = import_module("torchdata.nodes")
    node = nodes.SamplerWrapper(setup.indices)
    node = nodes.ParallelMapper(
        node, map_fn=Fetch(setup.dataset), num_workers=setup.case.num_workers, in_order=True, method=method
    )
    if setup.device is not None:
        node = nodes.PinMemory(node)
    node = nodes.Prefetcher(node, prefetch_factor=setup.case.num_ahead)
    return Source(batches=moved(nodes.Loader(node), setup.device))


def _elsewhere(module: str, function: str, setup: Setup) -> Source:
    """Build a peer of a file that itself imports this one."""
    source: Source = getattr(import_module(module), function)(setup)
    return source


_SPDL: Final = "numapin.bench.measure.loader_spdl"

BUILDERS: Final[dict[str, Callable[[Setup], Source]]] = {
    "torch": _torch,
    "torch-side-stream": _torch_side_stream,
    "threads": partial(_elsewhere, "numapin.bench.measure.loader_threads", "threads"),
    "spdl": partial(_elsewhere, _SPDL, "pipeline"),
    "spdl-process": partial(_elsewhere, _SPDL, "processes"),
    "spdl-subprocess": partial(_elsewhere, _SPDL, "subprocess"),
    "torchdata": partial(_torchdata, method="process"),
    "torchdata-threads": partial(_torchdata, method="thread"),
    "torchdata-stateful": _torchdata_stateful,
    "numapin-device": _numapin_device,
    "numapin-host": partial(_numapin, pin_memory=True),
    "numapin-transport": _numapin,
}
