"""Cast a batch's tensors while they are packed. Edge (writes memory).

Comes in: tensors that no collate has stacked into the slot. Goes out: narrower ones, in the slot if there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.data.casting import cast_tensor
from numapin.data.wire.tensors import tensor_over

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    Allocate = Callable[[torch.dtype, tuple[int, ...]], torch.Tensor | None]

# The whole storage of a view is cast, so that views still share it, unless it is this many times the view's size.
_MAX_STORAGE_RATIO: Final = 4


class _Range(NamedTuple):
    """Elements of a storage that were cast, from `first` up to `last`, and the result."""

    first: int
    last: int
    result: torch.Tensor


class Narrower:
    """Casts the tensors of one batch. Tensors of one dtype that share memory still do afterwards."""

    def __init__(self, casts: Mapping[torch.dtype, torch.dtype], allocate: Allocate) -> None:
        """Take the dtypes to cast, and what allocates in the batch's slot."""
        self._casts, self._allocate = casts, allocate
        self._ranges: dict[tuple[int, torch.dtype], list[_Range]] = {}
        self._others: list[torch.Tensor] = []  # kept, so that no address is used twice in a batch

    def narrow(self, tensor: torch.Tensor, *, is_plain: bool) -> torch.Tensor:
        """Return a tensor in its narrower dtype; the tensor itself if it has none. `is_plain`: it is strided memory."""
        target = self._casts.get(tensor.dtype)
        if target is None:
            return tensor
        if not is_plain:
            self._others.append(cast_tensor(tensor, self._casts))
            return self._others[-1]
        found = self._range(tensor, target)
        start = (int(tensor.storage_offset()) - found.first) * target.itemsize
        return tensor_over(found.result.untyped_storage(), start, target, tuple(tensor.shape), tensor.stride())

    def _range(self, tensor: torch.Tensor, target: torch.dtype) -> _Range:
        """Return the range that contains a tensor; cast it if that was not done yet."""
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset())
        end = begin + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        ranges = self._ranges.setdefault((storage.data_ptr(), tensor.dtype), [])
        for known in ranges:
            if known.first <= begin and end <= known.last:
                return known
        size = storage.nbytes() // tensor.itemsize
        first, last = (0, size) if size <= _MAX_STORAGE_RATIO * (end - begin) else (begin, end)
        source = tensor_over(storage, first * tensor.itemsize, tensor.dtype, (last - first,), (1,))
        ranges.append(_Range(first, last, self._cast(source, target)))
        return ranges[-1]

    def _cast(self, source: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        room = self._allocate(target, tuple(source.shape))
        return source.to(target) if room is None else room.copy_(source)
