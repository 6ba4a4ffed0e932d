"""The format of a message from a worker to the rank: a head, and the pickle of a batch. Pure.

Comes in (worker): the pickle of a batch, and where its tensors lie in the slot. Goes out (rank): the same.
"""

from __future__ import annotations

import marshal
import struct
from enum import StrEnum
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, NamedTuple

from numapin.data.wire.tensors import unpickle


class Miss(StrEnum):
    """The reason why a batch, or a part of it, was not in a slot.

    Such a batch was spilled to separate memory, or torch sent it.
    """

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
    """The facts about a batch that the rank needs before it unpickles it.

    Attributes:
        number: The number of the batch.
        worker: The worker that sent it.
        generation: The generation of its slot.
        oldest_generation: The oldest generation that the worker still needs.
        parts: The memory that was written: (slot, bytes) and (number of the spilled memory, bytes). None: nothing.
        wanted_bytes: The size that a slot must have for such a batch.
        miss: Why the batch is not in a slot as a whole. None: it is, or has no memory.
        storages: The storages as (part, offset, length), in bytes.
        buffers: The storage of each out-of-band buffer, in the order of the pickle: n >= 0 for a tensor's, ~n for plain
            memory (numpy's), None for a tensor that torch sends.
    """

    number: int
    worker: int
    generation: int
    oldest_generation: int
    parts: tuple[tuple[int, int] | None, ...]
    wanted_bytes: int
    miss: Miss | None
    storages: tuple[tuple[int, int, int], ...]
    buffers: tuple[int | None, ...]


def encode_plain(message: object) -> bytes:
    """Return a message that the rank's iterator must understand at once, such as the end of an iterable dataset."""
    return _HEAD.pack(_PLAIN, 0) + bytes(ForkingPickler.dumps(message))


def encode(head: Head, body: bytes | memoryview) -> bytes:
    """Return a batch as bytes."""
    # marshal cannot write enums.
    fields = tuple(head) if head.miss is None else tuple(head._replace(miss=head.miss.value))  # type: ignore[arg-type]
    packed = marshal.dumps(fields)
    return b"".join((_HEAD.pack(_PARCEL, len(packed)), packed, body))


def decode(message: bytes) -> tuple[Head | None, Any]:
    """Return a batch's head and its pickle, or None and the plain message."""
    kind, size = _HEAD.unpack_from(message)
    rest = memoryview(message)[_HEAD.size :]
    if kind == _PLAIN:
        return None, unpickle(rest)
    head = Head(*marshal.loads(rest[:size]))  # noqa: S302 - from our own worker
    if head.miss is not None:
        head = head._replace(miss=Miss(head.miss))
    return head, rest[size:]
