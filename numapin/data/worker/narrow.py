"""Cast a batch's tensors while they are packed. Edge (writes memory).

Comes in: tensors that no collate has stacked into the slot. Goes out: narrower ones, in the slot if there is room.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from numapin.data.casting import cast_tensor
from numapin.data.wire.tensors import tensor_over
from numapin.data.worker.storages import Ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Allocate = Callable[[torch.dtype, tuple[int, ...]], torch.Tensor | None]


class Narrower:
    """Casts the tensors of one batch. Tensors of one dtype that share memory still do afterwards."""

    def __init__(self, casts: Mapping[torch.dtype, torch.dtype], allocate: Allocate) -> None:
        """Take the dtypes to cast, and the function that allocates in the batch's slot."""
        self._casts, self._allocate = casts, allocate
        self._ranges = {
            source: Ranges(partial(self._cast, source, target), align_bytes=source.itemsize)
            for source, target in casts.items()
        }
        self._others: list[torch.Tensor] = []  # kept, so that no address is used twice in a batch

    def narrow(self, tensor: torch.Tensor, *, is_plain: bool) -> torch.Tensor:
        """Return a tensor in its narrower dtype; the tensor itself if it has none. `is_plain`: see `storages`."""
        target = self._casts.get(tensor.dtype)
        if target is None:
            return tensor
        if not is_plain:
            self._others.append(cast_tensor(tensor, self._casts))
            return self._others[-1]
        source = tensor.dtype
        narrowed, offset = self._ranges[source].find(tensor)
        start = offset // source.itemsize * target.itemsize
        return tensor_over(narrowed.untyped_storage(), start, target, tuple(tensor.shape), tensor.stride())

    def forget(self) -> None:
        """Drop the tensors: they refer to the slot."""
        for ranges in self._ranges.values():
            ranges.clear()
        self._others.clear()

    def _cast(
        self, source: torch.dtype, target: torch.dtype, storage: torch.UntypedStorage, first: int, last: int
    ) -> torch.Tensor:
        size = ((last - first) // source.itemsize,)
        wide = tensor_over(storage, first, source, size, (1,))
        room = self._allocate(target, size)
        return wide.to(target) if room is None else room.copy_(wide)
