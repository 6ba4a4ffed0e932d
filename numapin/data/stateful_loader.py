"""`numapin.StatefulDataLoader`. Importing this needs torchdata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from numapin.data import stateful, torch_names
from numapin.data.loader import OnPath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.context import BaseContext

    import torch
    from torch.utils.data import DataLoader, Dataset, Sampler

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:  # torchdata has no types

    class _TorchdataLoader(DataLoader[T_co]):
        def __init__(self, *arguments: Any, **options: Any) -> None: ...
        def state_dict(self) -> dict[str, Any]: ...
        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

else:
    from torchdata.stateful_dataloader import StatefulDataLoader as _TorchdataLoader


class StatefulDataLoader(OnPath, _TorchdataLoader[T_co]):
    """`numapin.DataLoader` that can resume in the middle of an epoch: torchdata's StatefulDataLoader on numapin's path.

    `state_dict()` and `load_state_dict()` are torchdata's, and so are the states: either loader can load a state of the
    other. torchdata does more work per batch in the rank's process. It must be installed:
    `pip install 'torchdata>=0.11'`. The arguments are those of `numapin.DataLoader` without `balance`, and
    `snapshot_every_n_steps`.

    Args:
        in_order: As in torch. torchdata guarantees nothing about states with `in_order=False`.
        snapshot_every_n_steps: As in torchdata: how often the workers' states are taken, in batches. After
            `load_state_dict()` the batches since then are made again and dropped.

    Raises:
        UsageError: The device, the node, the budget, the cast, the number of threads or the transform is invalid.
            torch's own errors are raised too.
        BindingRefused: With `strict`: torch's own loader would be used.

    Example:
        ```python
        loader = numapin.StatefulDataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)
        if checkpoint.exists():
            loader.load_state_dict(torch.load(checkpoint)["loader"])
        for batch in loader:  # the rest of the epoch
            train(batch)
            torch.save({"net": net.state_dict(), "loader": loader.state_dict()}, checkpoint)
        ```
    """

    _numapin_package = torch_names.TORCHDATA

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
        snapshot_every_n_steps: int = 1,
        device: torch.device | str | int | None = None,
        pinned_budget: int | None = None,
        node: int | None = None,
        strict: bool = False,
        cast: torch.dtype | Mapping[torch.dtype, torch.dtype] | None = None,
        worker_threads: int | None = None,
        device_transform: Callable[[Any], object] | None = None,
    ) -> None:
        """Check the arguments. Nothing starts before `iter` or `state_dict`."""
        marked = self._numapin_begin(
            pin_memory_device,
            device=device,
            pinned_budget=pinned_budget,
            node=node,
            strict=strict,
            cast=cast,
            worker_threads=worker_threads,
            device_transform=device_transform,
        )
        super().__init__(
            *(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory),
            *(drop_last, timeout, worker_init_fn, multiprocessing_context, generator),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=marked,
            in_order=in_order,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )

    def close(self) -> None:
        """Stop the workers and release the memory, as `numapin.DataLoader.close` does. Take the state before."""
        super().close()
        super().load_state_dict({})  # forgets an iterator that state_dict() has started

    if not torch_names.why_off(torch_names.TORCHDATA):

        def _get_iterator(self) -> Any:
            return stateful.iterator_of(self, self._numapin_options)
