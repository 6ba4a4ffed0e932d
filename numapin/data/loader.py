"""`numapin.DataLoader`, and what it shares with `numapin.StatefulDataLoader`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.utils.data

from numapin.data import torch_names
from numapin.data.casting import casts_of
from numapin.data.install import Mark, install
from numapin.data.iterator import iterator_of
from numapin.data.path import DataPath, PathOptions, path_of
from numapin.errors import BindingRefused, LoaderStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.context import BaseContext
    from types import TracebackType

    from torch.utils.data import Dataset, Sampler

    from numapin.data.stats import Stats
    from numapin.data.torch_names import _BaseDataLoaderIter

T_co = TypeVar("T_co", covariant=True)


class OnPath:
    """The additions of numapin's two loaders to the loaders that they extend."""

    num_workers: int
    _iterator: Any
    _numapin_package = torch_names.TORCH  # whose loader is extended
    _numapin_options: PathOptions

    def _numapin_begin(
        self,
        pin_memory_device: str,
        *,
        device: torch.device | str | int | None,
        cast: torch.dtype | Mapping[torch.dtype, torch.dtype] | None,
        **others: Any,  # noqa: ANN401 - as PathOptions has them
    ) -> Mark:
        """Take numapin's own arguments, and return the `pin_memory_device` that carries them to a copy of the loader.

        Raises UsageError for invalid arguments; BindingRefused with `strict` if the data path is off.
        """
        for name, value in {"device": device, "cast": cast, **others}.items():
            self.__dict__.setdefault(name, value)  # frameworks read them; a subclass's own attributes stay
        device = None if device is None else torch.device(device)
        self._numapin_options = PathOptions(device=device, casts=casts_of(cast), **others)
        install(only_copies=True)
        off = torch_names.explained(self._numapin_package)
        if self._numapin_options.strict and off:
            raise BindingRefused(off, "to run with torch's own loader, remove strict=True")
        mark = Mark(pin_memory_device)
        mark.options = self._numapin_options
        return mark

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
        stats, off = self._numapin_path.stats(), torch_names.explained(self._numapin_package)
        return replace(stats, notes=(off, *stats.notes)) if off else stats

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
        if not torch_names.why_off():  # else the workers end with the iterator
            iterator, self._iterator = self._iterator, None
            if iterator is not None and self.num_workers:
                iterator.is_cut_short = bool(iterator._task_info)  # noqa: SLF001 - else the epoch would end too soon
                iterator._shutdown_workers()  # noqa: SLF001 - torch has no public way
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
        return path_of(self, self._numapin_options)  # type: ignore[arg-type] # mixed into a loader


class DataLoader(OnPath, torch.utils.data.DataLoader[T_co]):
    """torch's DataLoader with a faster path for its batches. It can replace torch's anywhere.

    With workers, each batch is collated straight into memory that the rank shares with them: on the rank's NUMA node,
    and pinned. The rank's tensors use that memory, so nothing is copied on the way. Arguments and behavior are the same
    as for `torch.utils.data.DataLoader`, plus `device`, `pinned_budget`, `node`, `strict`, `cast`, `worker_threads`,
    `balance` and `device_transform`. A dataset can write a batch straight into its memory with `numapin.batch_buffer`.
    To resume in the middle of an epoch, use `numapin.StatefulDataLoader`.

    A child that you fork shares the memory of the batches in use, as with torch. Use torch's own loader for batches of
    a few hundred bytes, and for CUDA tensors that workers create.

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
        pinned_budget: The most bytes that this loader pins. None: what `numapin.pinned.budget()` allows. Batches beyond
            it are in pageable memory. 0: torch sends the batches its own way.
        node: The NUMA node for memory, workers and pin thread. None: the node that `numapin run` planned, else the
            GPU's.
        strict: Raise BindingRefused at the next batch if the kernel or the driver refuses something that the loader
            needs, or at once if this torch lacks a private name that the path is built on. Otherwise the refusal is
            reported once, on stderr and in `stats().notes`.
        cast: Narrow floating-point tensors while they are written into the batch's memory, so that half the bytes or
            less go to the GPU: `torch.bfloat16` or `torch.float16` for float32 and float64 tensors, or a mapping of
            dtypes, such as `{torch.float32: torch.bfloat16}`. Values are rounded as `Tensor.to` rounds. None: no cast.
            numpy arrays stay as they are. With `num_workers=0`, only tensors in containers are cast.
        worker_threads: The threads that numpy's BLAS, MKL, OpenMP libraries and OpenCV may each use in a worker. None:
            the environment variable NUMAPIN_WORKER_THREADS, or 1. 0: their own default, which is the number of threads
            of the rank. `worker_init_fn` runs later, and may change it. torch itself uses one thread.
        balance: Give each task to the worker that is expected to finish it first, instead of to one worker after the
            other. Batches keep their order and contents, and a slow worker no longer holds the others up. But timing
            decides which worker makes a batch, so the random numbers that a worker draws (`torch.rand`, `random`,
            `numpy.random` in `__getitem__` or `collate_fn`) go to other samples in each run. For reproducible runs,
            seed by the index of the sample, or leave it off. Iterable datasets and `in_order=False` stay as in torch.
        device_transform: A function that gets each batch on the device and returns what the loop gets, for example
            uint8 images as normalized floats. It is called in the loop's thread, inside `next()`, once for each batch
            and in their order. With a GPU it runs on the loader's stream, one batch ahead if the next one has arrived:
            its kernels run beside those of the loop, and the stream that is current at `next()` waits for them. Return
            new tensors: one batch ahead, a buffer that you fill again already holds the next batch. Its
            autocast, inference and gradient modes are those at `next()`. The memory of the tensors that it returns, in
            containers or attributes of objects, is recorded for that stream. On the host, and without workers, it runs
            when the batch is due. Its errors are raised when their batch is due and name its number, counted from 0 in
            each epoch.

    Raises:
        UsageError: The device, the node, the budget, the cast, the number of threads or the transform is invalid.
            torch's own errors are raised too.
        BindingRefused: With `strict`: torch's own loader would be used.

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
        cast: torch.dtype | Mapping[torch.dtype, torch.dtype] | None = None,
        worker_threads: int | None = None,
        balance: bool = False,
        device_transform: Callable[[Any], object] | None = None,
    ) -> None:
        """Check the arguments. Nothing starts before `iter`."""
        marked = self._numapin_begin(
            pin_memory_device,
            device=device,
            pinned_budget=pinned_budget,
            node=node,
            strict=strict,
            cast=cast,
            worker_threads=worker_threads,
            balance=balance,
            device_transform=device_transform,
        )
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory),
            *(drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=marked,
            in_order=in_order,
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Explain the state that this loader lacks. As for any missing attribute, `hasattr` returns False.

            Frameworks call methods of these names on their own: Accelerate with each batch, Lightning with each
            checkpoint.
            """
            if name in ("state_dict", "load_state_dict"):
                hint = "use numapin.StatefulDataLoader in place of numapin.DataLoader; its arguments are the same"
                raise LoaderStateError(f"{type(self).__name__}.{name}(): numapin.DataLoader has no state", hint)
            return super().__getattribute__(name)  # raises the error again: a property's may be about something else

    if not torch_names.why_off():

        def _get_iterator(self) -> _BaseDataLoaderIter:
            return iterator_of(self, self._numapin_options)
