"""What travels from a worker to the rank: a batch, pickled around its tensors.

Comes in (worker): the pickle of a batch and where its tensors lie in the slot. Goes out (rank): the same batch, over
whatever memory the rank chose: the slot itself, or a copy of it on a device.

Tensors are out-of-band buffers of the pickle (PEP 574): containers, custom types and views need nothing special.
"""

from __future__ import annotations

import marshal
import pickle
import struct
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Miss(StrEnum):
    """Why a batch, or a part of it, was not in a slot: it was spilled or, where it could not be, went torch's way."""

    STARTING = "the ring was being set up"
    NO_SLOT = "no slot was free"
    KEPT = "the worker keeps references to earlier batches"
    TOO_LARGE = "larger than a slot"
    UNSUPPORTED = "a tensor that only torch can send"
    SHARED = "in shared memory already, which torch sends without a copy"
    NO_RING = "there is no ring"


SLOT, SPILL = 0, 1  # the parts of a batch's memory

_HEAD: Final = struct.Struct("<BI")  # kind, length of the head that follows
_PLAIN, _PARCEL = 0, 1


class Head(NamedTuple):
    """What the rank must know of a batch before it is unpickled.

    `generation` is the slot's, `oldest_generation` the oldest that the worker still needs. `parts` are what was
    written: (slot, bytes) and (number of the spilled memory, bytes), None where nothing was. `storages` are (part,
    offset, length) in bytes; `buffers` names the storage of each out-of-band buffer, in the order of the pickle: n >= 0
    for a tensor's, ~n for plain memory (numpy's), None for a tensor that went torch's way. `wanted_bytes` is what a
    slot must have for such a batch.
    """

    number: int
    worker: int
    generation: int
    oldest_generation: int
    parts: tuple[tuple[int, int] | None, ...]
    wanted_bytes: int
    miss: str | None
    storages: tuple[tuple[int, int, int], ...]
    buffers: tuple[int | None, ...]


def encode_plain(message: object) -> bytes:
    """Return a message that the rank's iterator must understand at once, such as the end of an iterable dataset."""
    return _HEAD.pack(_PLAIN, 0) + bytes(ForkingPickler.dumps(message))


def encode(head: Head, body: bytes | memoryview) -> bytes:
    """Return a batch as bytes."""
    packed = marshal.dumps(tuple(head))
    return b"".join((_HEAD.pack(_PARCEL, len(packed)), packed, body))


def decode(message: bytes) -> tuple[Head | None, Any]:
    """Return a batch's head and its pickle, or None and the plain message."""
    kind, size = _HEAD.unpack_from(message)
    rest = memoryview(message)[_HEAD.size :]
    if kind == _PLAIN:
        return None, pickle.loads(rest)  # noqa: S301 - from our own worker
    return Head(*marshal.loads(rest[:size])), rest[size:]  # noqa: S302 - same


def unpack(body: memoryview, buffers: Iterable[object]) -> Any:  # noqa: ANN401 - the user's batch
    """Return the batch, with each tensor over the `StoragePlace` given for it, in the order of `Head.buffers`."""
    return pickle.loads(body, buffers=buffers)  # noqa: S301 - from our own worker


class StoragePlace(NamedTuple):
    """Where a tensor's own storage begins in a storage of the rank, in bytes."""

    storage: torch.UntypedStorage
    start: int


def tensor_over(
    storage: torch.UntypedStorage, start: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over a storage, no view of another: `start` in bytes, size and stride in elements."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start // dtype.itemsize, size, stride)


# The three functions that the pickle of a batch calls in the rank.
def rebuild(place: StoragePlace, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], start: int) -> Any:  # noqa: ANN401
    """Return a tensor over its place; `start` is in bytes from the beginning of its storage."""
    return tensor_over(place.storage, place.start + start, dtype, size, stride)


def move(mover: Callable[[Any], Any], build: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """Return what went torch's way, moved to where the batch is going."""
    return mover(build(*arguments))


def packed_sequence(data: Any, batch_sizes: list[int], *indices: Any) -> Any:  # noqa: ANN401
    """Return a PackedSequence on a device: its batch sizes have to be on the host."""
    return torch.nn.utils.rnn.PackedSequence(data, torch.tensor(batch_sizes), *indices)
