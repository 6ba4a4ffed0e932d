"""`numapin.DataLoader`. Edge.

Comes in: the arguments of torch's DataLoader, and four of ours. Goes out: the same batches as torch's, in memory that
is near the GPU and locked for DMA, or on the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.utils.data

from numapin.data.install import install, mark
from numapin.data.iterator import iterator_of
from numapin.data.path import DataPath, PathOptions, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.context import BaseContext
    from types import TracebackType

    from torch.utils.data import Dataset, Sampler
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from numapin.data.stats import Stats

T_co = TypeVar("T_co", covariant=True)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader with another way for the batches; takes its place anywhere.

    With workers, a batch is collated straight into memory that the rank has mapped, on the rank's NUMA node, and locked
    for DMA; the rank's tensors lie over it, so nothing is copied on the way. Arguments and behaviour are those of
    `torch.utils.data.DataLoader`, and:

    device: where batches are to be. None: on the host (pinned with pin_memory=True), for the loop to copy. A GPU
        ("cuda", 1, torch.device): on it, all tensors of a batch with one copy, started before the batch is due, ordered
        with the stream that is current at next(). The loop needs no .to(); one that is there does nothing. Memory that
        numpy arrays have stays on the host. With num_workers=0 only what is in containers, or has .to(), is moved.
    pinned_budget: at most this many bytes are locked by this loader; None: what `numapin.pinned.budget()` allows; 0: no
        ring. Where it is short there are fewer slots, then none.
    node: the NUMA node for memory, workers and pin thread; None: what `numapin run` planned, else the node of the GPU.
    strict: raise numapin.BindingRefused at the next batch where the kernel or the driver refuses what is needed for
        this; without it that is said once, on stderr and in `stats().notes`.

    A child that is forked shares the batches' memory, which is written again when this process is done with them: give
    it copies (.clone()).
    Raises, besides what torch's raises, numapin.UsageError for a device, node or budget that cannot be.
    Use torch's own for batches of a few hundred bytes, and for CUDA tensors made in workers.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - torch's signature
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        drop_last: bool = False,  # noqa: FBT001, FBT002
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | int | None = None,
        pinned_budget: int | None = None,
        node: int | None = None,
        strict: bool = False,
    ) -> None:
        """Check the arguments; nothing is started before `iter`."""
        target = None if device is None else torch.device(device)
        self._options = PathOptions(device=target, pinned_budget=pinned_budget, node=node, strict=strict)
        self.device, self.pinned_budget, self.node, self.strict = device, pinned_budget, node, strict
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=mark(pin_memory_device, self._options),
            in_order=in_order,
        )
        install(only_copies=True)

    def stats(self) -> Stats:
        """Return what this loader has done so far: batches, bytes, waits, hits and misses, memory and where it lies."""
        return self._path.stats()

    def close(self) -> None:
        """Stop persistent workers and give the memory back; batches that are still referred to keep theirs.

        Iterating again afterwards starts anew.
        """
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public way
        self._path.close()

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def _path(self) -> DataPath:
        return path_of(self, self._options)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self, self._options)
