"""The memory of tensors: whether they are plain bytes, and the ranges of storages that go with a batch. Pure.

Comes in: the tensors of a batch. Goes out: for each the range of its storage that is sent, once for all of its views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# The whole storage of a view is sent, so that views still share it, unless it is this many times the view's size.
_MAX_STORAGE_RATIO: Final = 4


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but strided bytes of this process's memory."""
    return not (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()  # autograd's zero gradients, which have no memory
        or not tensor.numel()
    )


class Ranges(Generic[T]):
    """The ranges of storages that one batch needs. Tensors that share memory share a range."""

    def __init__(self, send: Callable[[torch.UntypedStorage, int, int], T], *, align_bytes: int) -> None:
        """Begin ranges at multiples of `align_bytes`.

        `send` is called with a storage and the first and last byte of each new range. A result of None is not kept.
        """
        self._send, self._align_bytes = send, align_bytes
        self._of_storage: dict[int, list[tuple[int, int, T]]] = {}  # by torch's storage: first byte, last byte, result

    def clear(self) -> None:
        """Forget all ranges."""
        self._of_storage.clear()

    def find(self, tensor: torch.Tensor) -> tuple[T, int]:
        """Return the result of the range that contains a plain tensor, and the tensor's offset in it, in bytes."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        begin, end = _byte_range(tensor)
        # Not by address: torch makes each tensor over one array a storage of its own.
        ranges = self._of_storage.setdefault(storage._cdata, [])
        for first, last, result in ranges:
            if first <= begin and end <= last:
                return result, begin - first
        is_whole = size <= _MAX_STORAGE_RATIO * (end - begin)
        first, last = (0, size) if is_whole else (begin - begin % self._align_bytes, end)
        result = self._send(storage, first, last)
        if result is not None:
            ranges.append((first, last, result))
        return result, begin - first


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the begin and end of a tensor in its storage, in bytes."""
    itemsize = tensor.itemsize
    begin = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last_element = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + itemsize * (1 + last_element)
