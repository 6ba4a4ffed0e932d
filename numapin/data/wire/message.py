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
    """The reason why a batch, or a part of it, did not travel in a slot."""

    NO_MEMORY = "the kernel had no memory for a slot"
    UNSUPPORTED = "a tensor that only torch can send"
    SHARED = "in shared memory already, which torch sends without a copy"
    NO_SLOTS = "slots are turned off"


_HEAD: Final = struct.Struct("<BI")  # kind, length of the head that follows
_PLAIN, _PARCEL = 0, 1


class PartHead(NamedTuple):
    """A slot that a batch, or a part of it, is in. `is_new`: it was made for this batch."""

    slot: int
    num_bytes: int
    capacity: int
    is_new: bool


NOTHING: Final = PartHead(-1, 0, 0, is_new=False)
"""A part of which nothing was sent."""


class Head(NamedTuple):
    """The part of a batch's message before the pickle.

    Attributes:
        number: The number of the batch.
        worker: The worker that sent it.
        parts: The slots that it is in, in the order in which they were written; mostly one.
        wanted_bytes: The size that a slot must have for such a batch.
        miss: Why the batch is not in slots as a whole. None: it is, or has no memory.
        storages: The storages as (part, offset, length), in bytes.
        buffers: The storage of each out-of-band buffer, in the order of the pickle: n >= 0 for a tensor's, ~n for plain
            memory (numpy's), None for a tensor that torch sends.
        refused: Granted slots that the worker cannot use.
        kept: Slots that the worker still refers to.
        inherited: Slots that a process may read from now on that the user's code has forked in the worker.
        notes: Texts for the rank to report.
        body_room: The room of the pickle in the batch's memory, as in `storages`. None: it follows the head.
    """

    number: int
    worker: int
    parts: tuple[PartHead, ...]
    wanted_bytes: int
    miss: Miss | None
    storages: tuple[tuple[int, int, int], ...]
    buffers: tuple[int | None, ...]
    refused: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    inherited: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    body_room: tuple[int, int, int] | None = None


def encode_plain(message: object) -> bytes:
    """Return a message that the rank's iterator must understand at once, such as the end of an iterable dataset."""
    return _HEAD.pack(_PLAIN, 0) + bytes(ForkingPickler.dumps(message))


def encode(head: Head, body: bytes | memoryview) -> bytes:
    """Return a batch as bytes."""
    # marshal writes neither enums nor named tuples.
    number, worker, parts, wanted, miss, storages, *others, body_room = head
    plain_parts, plain_storages = tuple(map(tuple, parts)), tuple(map(tuple, storages))
    plain_room = None if body_room is None else tuple(body_room)
    values = (number, worker, plain_parts, wanted, miss and miss.value, plain_storages, *others, plain_room)
    packed = marshal.dumps(values)
    return b"".join((_HEAD.pack(_PARCEL, len(packed)), packed, body))


def decode(message: bytes) -> tuple[Head | None, Any]:
    """Return a batch's head and its pickle, or None and the plain message."""
    kind, size = _HEAD.unpack_from(message)
    rest = memoryview(message)[_HEAD.size :]
    if kind == _PLAIN:
        return None, unpickle(rest)
    number, worker, parts, wanted, miss, *others = marshal.loads(rest[:size])  # noqa: S302 - from our own worker
    parts = tuple([PartHead(*part) for part in parts])
    return Head(number, worker, parts, wanted, miss and Miss(miss), *others), rest[size:]
