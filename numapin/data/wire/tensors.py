"""Tensors as out-of-band buffers of a pickle (PEP 574). Pure.

Comes in: the pickle of a batch, and the memory that the rank chose for each tensor. Goes out: the batch, over that
memory: the slot itself, or a copy of it on a device. Containers, custom types and views need nothing special.
"""

from __future__ import annotations

import pickle
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_NO_BUFFERS: Final = ()


def pickled(message: object) -> bytes:
    """Return the pickle of a message that is not a batch."""
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, TypeError, AttributeError):  # e.g. what only a process that is started may get
        return bytes(ForkingPickler.dumps(message))


def unpickle(data: bytes | memoryview, buffers: Iterable[object] = _NO_BUFFERS) -> object:
    """Return an object that the rank or one of its workers pickled.

    Args:
        data: The pickle.
        buffers: For each out-of-band buffer, in order, what takes its place: a `StoragePlace` for a tensor.
    """
    return pickle.loads(data, buffers=buffers)  # noqa: S301 - from our own processes


class Movable(Protocol):
    """A tensor, or any other object that can be put on a device."""

    def to(self, device: torch.device, *, non_blocking: bool) -> object:
        """Return the object on the device."""


class StoragePlace(NamedTuple):
    """The position of a tensor's own storage in a storage of the rank; `start` in bytes."""

    storage: torch.UntypedStorage
    start: int


def tensor_over(
    storage: torch.UntypedStorage, start: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over a storage that is not a view of another: `start` in bytes, size and stride in elements."""
    empty = _empty(dtype, storage.device, torch.is_inference_mode_enabled())
    return empty.data.set_(storage, start // dtype.itemsize, size, stride)


@cache
def _empty(dtype: torch.dtype, device: torch.device, _is_inference: bool) -> torch.Tensor:  # noqa: FBT001 - a key
    """Return a tensor whose `data` is a new empty tensor of the current mode, in half the time of torch.empty."""
    return torch.empty(0, dtype=dtype, device=device)


# The three functions that the pickle of a batch calls in the rank.


def rebuild(
    place: StoragePlace, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], start: int
) -> torch.Tensor:
    """Return a tensor over its place; `start` is in bytes from the beginning of its storage."""
    return tensor_over(place.storage, place.start + start, dtype, size, stride)


def move(mover: Callable[[Any], object], build: Callable[..., object], arguments: tuple[object, ...]) -> object:
    """Return a tensor that torch sent, moved to the batch's device."""
    return mover(build(*arguments))


def packed_sequence(
    data: torch.Tensor, batch_sizes: list[int], *indices: torch.Tensor | None
) -> torch.nn.utils.rnn.PackedSequence:
    """Return a PackedSequence on a device; its batch sizes must be on the host."""
    return torch.nn.utils.rnn.PackedSequence(data, torch.tensor(batch_sizes, device="cpu"), *indices)
