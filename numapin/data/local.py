"""torch's iterator without workers, with its batches on our device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from numapin.data.casting import rebuild
from numapin.data.torch_names import _SingleProcessDataLoaderIter

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Changed:
    """A loader with some attributes changed, for torch's iterator to read. The user's loader stays as it is."""

    def __init__(self, loader: DataLoader[Any], **changes: object) -> None:
        self._loader = loader
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the loader that was not changed."""
        return getattr(self._loader, name)


def profile_name(torchs_class: str) -> str:
    """Return the name of the range that profilers show for a class of torch's iterators."""
    return f"enumerate(DataLoader)#{torchs_class}.__next__"


class DeviceIterator(_SingleProcessDataLoaderIter):
    """torch's iterator without workers, with its batches put on the device."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(Changed(loader, pin_memory=False))
        self._profile_name = profile_name(_SingleProcessDataLoaderIter.__name__)
        self._device = device

    def _next_data(self) -> Any:
        return put_on(self._device, super()._next_data())  # type: ignore[no-untyped-call]


def put_on(device: torch.device, data: object) -> object:
    """Return a batch with its tensors, and objects that can be moved, copied to a GPU in the order of its stream."""

    def move(value: Any) -> object:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_contiguous():
            value = value.pin_memory()
        return value.to(device, non_blocking=True)

    def can_move(value: object) -> bool:
        return hasattr(value, "to") and not isinstance(value, torch.UntypedStorage | torch.TypedStorage)

    return rebuild(data, move, is_leaf=can_move)
