"""`numapin.DataLoader`. Edge.

Comes in: the arguments of torch's DataLoader, and `device`, `pinned_budget`, `node` and `strict`. Goes out: the same
batches as torch's, in memory that is near the GPU and pinned, or on the GPU.
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
    """torch's DataLoader with a faster path for its batches. It can replace torch's anywhere.

    With workers, each batch is collated straight into memory that the rank shares with them: on the rank's NUMA node,
    and pinned. The rank's tensors use that memory, so nothing is copied on the way. Arguments and behavior are the same
    as for `torch.utils.data.DataLoader`, plus `device`, `pinned_budget`, `node` and `strict`.

    A forked child shares the memory of the batches, and this process reuses it once it has released them: give the
    child copies (`.clone()`). Use torch's own loader for batches of a few hundred bytes, and for CUDA tensors that
    workers create.

    Args:
        dataset: As in torch, like all arguments up to `in_order`.
        batch_size: As in torch.
        shuffle: As in torch.
        sampler: As in torch.
        batch_sampler: As in torch.
        num_workers: As in torch. The fast path needs at least one worker.
        collate_fn: As in torch.
        pin_memory: As in torch: batches are in pinned host memory, for the loop to copy.
        drop_last: As in torch.
        timeout: As in torch.
        worker_init_fn: As in torch.
        multiprocessing_context: As in torch.
        generator: As in torch.
        prefetch_factor: As in torch.
        persistent_workers: As in torch.
        pin_memory_device: As in torch.
        in_order: As in torch.
        device: The device for the batches. None: they stay on the host. With a GPU (`"cuda"`, 1, `torch.device`), all
            tensors of a batch take one copy, which starts before the batch is due and is ordered with the stream that
            is current at `next()`. A `.to()` in the loop then does nothing. numpy arrays stay on the host. With
            `num_workers=0`, only tensors in containers and objects with `.to()` are moved.
        pinned_budget: The most bytes that this loader pins. None: what `numapin.pinned.budget()` allows. 0: no slots.
            A small budget means fewer slots, or none.
        node: The NUMA node for memory, workers and pin thread. None: the node that `numapin run` planned, else the
            GPU's.
        strict: Raise BindingRefused at the next batch if the kernel or the driver refuses something that the loader
            needs. Otherwise the refusal is reported once, on stderr and in `stats().notes`.

    Raises:
        UsageError: The device, the node or the budget is invalid. torch's own errors are raised too.

    Example:
        ```python
        import numapin

        loader = numapin.DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8, device="cuda")
        for images, labels in loader:
            ...
        print(loader.stats())
        ```
    """

    device: torch.device | str | int | None
    pinned_budget: int | None
    node: int | None
    strict: bool

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
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
        """Check the arguments. Nothing starts before `iter`."""
        options = {"device": device, "pinned_budget": pinned_budget, "node": node, "strict": strict}
        for name, value in options.items():  # frameworks read them; a subclass's own attributes of these names stay
            self.__dict__.setdefault(name, value)
        target = None if device is None else torch.device(device)
        self._numapin_options = PathOptions(device=target, pinned_budget=pinned_budget, node=node, strict=strict)
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory),
            *(drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=mark(pin_memory_device, self._numapin_options),
            in_order=in_order,
        )
        install(only_copies=True)

    def stats(self) -> Stats:
        """Return the statistics of this loader so far.

        Returns:
            Batches, bytes, waiting times, hits and misses, and the placement of the memory.

        Raises:
            UsageError: The node does not exist.

        Example:
            ```python
            if loader.stats().misses:
                print(loader.stats().misses)
            ```
        """
        return self._numapin_path.stats()

    def close(self) -> None:
        """Stop persistent workers and release the memory.

        Batches that are still in use keep their memory. Iterating again starts new workers. The loader is also a
        context manager, which closes it.

        Example:
            ```python
            with numapin.DataLoader(dataset, num_workers=8, persistent_workers=True) as loader:
                for batch in loader:
                    ...
            ```
        """
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined] # noqa: SLF001 - torch has no public way
        self._numapin_path.close()

    def __enter__(self) -> Self:
        """Return the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the loader."""
        self.close()

    @property
    def _numapin_path(self) -> DataPath:
        return path_of(self, self._numapin_options)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self, self._numapin_options)
