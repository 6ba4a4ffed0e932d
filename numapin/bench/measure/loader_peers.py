"""The peers of `bench loader`: numapin's loader in several ways, and torch's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader

from numapin.bench.measure.loader_data import InMemory, Written, collate_of, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numapin.bench.cases.loader import LoaderCase
    from numapin.bench.measure.loader_data import Batch
    from numapin.data.stats import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The arguments for building a peer. `device` is None for a case that ends in this process."""

    case: LoaderCase
    dataset: InMemory
    device: torch.device | None

    @property
    def indices(self) -> BatchSampler:
        """The lists of indices of the batches."""
        return BatchSampler(SequentialSampler(self.dataset), self.case.batch_size, drop_last=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A peer that is ready. Iterating over `batches` starts it; `stats` returns None for peers other than numapin."""

    batches: Iterable[Batch]
    stats: Callable[[], Stats | None] = lambda: None
    close: Callable[[], None] = lambda: None


def to_device(batch: Batch, device: torch.device | None) -> Batch:
    """Copy a batch to the device, asynchronously if it is pinned; return it as it is if there is no device."""
    if device is None:
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def moved(batches: Iterable[Batch], device: torch.device | None) -> Iterator[Batch]:
    """Copy each batch in this thread, as a training loop does."""
    for batch in batches:
        yield to_device(batch, device)


def _numapin(setup: Setup, **options: object) -> Source:
    loader = import_module("numapin").DataLoader(
        setup.dataset,
        batch_size=setup.case.batch_size,
        num_workers=setup.case.num_workers,
        prefetch_factor=setup.case.prefetch,
        collate_fn=collate_of(setup.case),
        **options,
    )
    batches = loader if "device" in options else moved(loader, setup.device)
    return Source(batches=batches, stats=loader.stats, close=loader.close)


def _numapin_device(setup: Setup, **options: object) -> Source:
    return _numapin(setup, device=setup.device, **options)


def _numapin_buffer(setup: Setup, *, passes_caches: bool) -> Source:
    """Build a loader whose dataset makes whole batches."""
    loader = import_module("numapin").DataLoader(
        Written(setup.dataset, passes_caches=passes_caches),
        batch_size=None,
        sampler=setup.indices,
        num_workers=setup.case.num_workers,
        prefetch_factor=setup.case.prefetch,
        device=setup.device,
    )
    return Source(batches=loader, stats=loader.stats, close=loader.close)


def _numapin_balanced(setup: Setup) -> Source:
    return _numapin(setup, balance=True, **({} if setup.device is None else {"device": setup.device}))


def _torch(setup: Setup) -> Source:
    loader = TorchDataLoader(
        setup.dataset,
        batch_size=setup.case.batch_size,
        num_workers=setup.case.num_workers,
        prefetch_factor=setup.case.prefetch,
        collate_fn=collate_of(setup.case),
        pin_memory=setup.device is not None,
    )
    return Source(batches=moved(loader, setup.device))


BUILDERS: Final[dict[str, Callable[[Setup], Source]]] = {
    "torch": _torch,
    "numapin-device": _numapin_device,
    "numapin-bf16": partial(_numapin_device, cast=torch.bfloat16),
    "numapin-buffer": partial(_numapin_buffer, passes_caches=False),
    "numapin-buffer-nt": partial(_numapin_buffer, passes_caches=True),
    "numapin-host": partial(_numapin, pin_memory=True),
    "numapin-transport": _numapin,
    "numapin-balanced": _numapin_balanced,
}
