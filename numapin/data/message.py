"""Messages between a worker and the rank, and the rebuilding of a batch from one.

A message is a value that marshal writes: a tuple for a batch (its `Head` and its pickle), bytes for the pickle of
anything else. Tensors are out-of-band buffers of the pickle (PEP 574): the head lists where each lies in the slot, and
the rank puts tensors over the slot, or over a copy of it on a device, in their place. So containers, custom types and
views need nothing special.
"""

from __future__ import annotations

import marshal
import pickle
from enum import StrEnum
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from weakref import ref

    from numapin.data.slots import Slot

_PART_BYTES: Final = 1 << 30  # of a pickle: marshal refuses bytes objects of 2 GiB and more
NO_MEMORY: Final = memoryview(b"")
DTYPES: Final = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
"""All of torch's; a head has their numbers, the same in the rank and its workers."""


class Miss(StrEnum):
    """The reason why a batch, or a part of it, did not travel in a slot."""

    NO_MEMORY = "the kernel had no memory for a slot"
    UNSUPPORTED = "a tensor that only torch can send"
    SHARED = "in shared memory already, which torch sends without a copy"
    NO_SLOTS = "slots are turned off"


class Grant(NamedTuple):
    """The slot that a worker gets with a task."""

    slot: int  # its number; NO_SLOT: none is free
    expected_bytes: int  # the size of a slot that the worker has to make; 0: unknown
    forgotten: tuple[int, ...]  # slots that the worker will not see again, and unmaps


NO_SLOT: Final = -1
NO_GRANT: Final = Grant(NO_SLOT, expected_bytes=0, forgotten=())


IN_MESSAGE: Final = -2
"""The number of memory that is no slot: its bytes are in the message."""


class Report(NamedTuple):
    """News of a worker's slots, sent to the rank with a batch."""

    kept: tuple[int, ...] = ()  # slots, besides the batch's own, that the worker still refers to
    refused: tuple[int, ...] = ()  # granted slots that the worker cannot use
    inherited: tuple[int, ...] = ()  # slots that a process may read from now on that the user's code forked there
    notes: tuple[str, ...] = ()  # texts for the rank to report


NOTHING: Final = Report()


class Head(NamedTuple):
    """The part of a batch's message before the pickle.

    `buffers` says what each out-of-band buffer of the pickle is, in order. A tensor: (storage, number in `DTYPES`,
    size, stride, offset in the storage in bytes, whether it is its whole storage and contiguous). Plain memory
    (numpy's): the number of its storage. A tensor that torch sends and that must be moved: None.
    """

    miss: Miss | None  # why the batch is not in a slot as a whole; None: it is, or has no memory
    number: int  # of the batch
    worker: int  # that sent it
    slot: int  # that it is in, from its start; NO_SLOT: none; IN_MESSAGE
    slot_bytes: int  # of the slot, up to the end of the batch
    made_bytes: int  # the size of a slot that was made for this batch; 0: the rank knows the slot
    num_bytes: int  # of its memory: what is used of the slot, and what had no room in one
    wanted_bytes: int  # the size that a slot must have for such a batch
    storages: tuple[tuple[int, int], ...]  # (offset, length), in bytes
    buffers: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...], int, bool] | int | None, ...]
    body_room: tuple[int, int] | None = None  # of the pickle, as in `storages`; None: it is in the message
    small: bytes = b""  # the batch's memory, if it is in the message
    report: Report = NOTHING


def encode(head: Head, body: bytes) -> bytes:
    """Return a batch as bytes. Its rooms must be plain tuples, which is all that marshal writes."""
    miss = None if head.miss is None else head.miss.value
    parts = [body[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES)]
    return marshal.dumps((miss, *head[1:-1], tuple(head.report), parts))


def encode_plain(message: object) -> bytes:
    """Return a message that is not a batch, such as the end of an iterable dataset."""
    return marshal.dumps(pickled(message))


def decode(message: bytes) -> tuple[Head | None, Any]:
    """Return a batch's head and its pickle, or None and the plain message."""
    fields = marshal.loads(message)  # noqa: S302 - from our own worker
    if type(fields) is bytes:
        return None, pickle.loads(fields)  # noqa: S301 - the same
    miss, *others, report, parts = fields
    return Head._make((None if miss is None else Miss(miss), *others, Report(*report))), b"".join(parts)


def pickled(message: object) -> bytes:
    """Return the pickle of a message that is not a batch."""
    try:
        return pickle.dumps(message)
    except (pickle.PicklingError, TypeError, AttributeError):  # e.g. what only a process that is started may get
        return bytes(ForkingPickler.dumps(message))


class Parcel:
    """A batch that has arrived in the rank and is not opened yet."""

    __slots__ = ("__weakref__", "ahead", "begun", "body", "head", "slot", "view")

    def __init__(self, head: Head, body: bytes, view: memoryview = NO_MEMORY, slot: Slot | None = None) -> None:
        """Take a long pickle from the batch's memory, of which it is the end; `view` is of `slot`, if there is one."""
        self.head, self.view, self.slot = head, view, slot
        self.body: bytes | memoryview = body
        self.begun: Any = None  # the work that its opener started before the batch was due
        self.ahead: set[ref[Parcel]]  # the parcels of its iterator for which work was started; unset if none was for it
        if head.body_room is not None:
            start, num_bytes = head.body_room
            self.body, self.view = view[start : start + num_bytes], view[:start]


def unpack(
    parcel: Parcel,
    storage_at: Callable[[int, int], tuple[torch.UntypedStorage, int]],
    plain_at: Callable[[int, int], memoryview],
    mover: Callable[[Any], object] | None = None,
    whole_at: Callable[[int, int, torch.dtype, tuple[int, ...]], torch.Tensor] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> object:
    """Return the batch of a parcel, whose tensors that share a storage share one afterwards.

    `storage_at` makes memory for a storage on `device` from its offset and length in bytes, and returns a storage and
    the byte where the memory begins in it; `plain_at` makes plain memory, for numpy. `whole_at` makes a tensor that
    shares its storage with no other, of a dtype and a size, in half the time. `mover` moves a tensor that torch sent.
    """
    head, known = parcel.head, {}
    buffers: list[object] = []
    is_inference = torch.is_inference_mode_enabled()
    are_alone = whole_at is not None and len(head.buffers) == len(head.storages)  # each storage has at least one
    for entry in head.buffers:
        if entry is None:
            buffers.append(mover)
        elif isinstance(entry, int):
            buffers.append(plain_at(*head.storages[entry]))
        else:
            number, dtype, size, stride, start, is_whole = entry
            if is_whole and are_alone:
                buffers.append(whole_at(*head.storages[number], DTYPES[dtype], size))  # type: ignore[misc]
                continue
            if number not in known:
                known[number] = storage_at(*head.storages[number])
            storage, base = known[number]
            empty = _empty(DTYPES[dtype], device, is_inference)
            # Set through `data`, so that it is no view of another tensor.
            buffers.append(empty.data.set_(storage, (base + start) // empty.itemsize, size, stride))
    return pickle.loads(parcel.body, buffers=buffers)  # noqa: S301 - from our own worker


@cache
def _empty(dtype: torch.dtype, device: torch.device | str, _is_inference: bool) -> torch.Tensor:  # noqa: FBT001 - a key
    """Return a tensor whose `data` is a new empty tensor of the current mode, in half the time of torch.empty."""
    return torch.empty(0, dtype=dtype, device=device)


# The functions that the pickle of a batch calls in the rank. The buffers are what `unpack` has put there.


def buffer(found: object) -> object:
    """Return what stands in the place of an out-of-band buffer."""
    return found


def move(mover: Callable[[Any], object], build: Callable[..., object], arguments: tuple[object, ...]) -> object:
    """Return a tensor that torch sent, moved to the batch's device."""
    return mover(build(*arguments))


def packed_sequence(
    data: torch.Tensor, batch_sizes: list[int], *indices: torch.Tensor | None
) -> torch.nn.utils.rnn.PackedSequence:
    """Return a PackedSequence on a device; its batch sizes must be on the host."""
    return torch.nn.utils.rnn.PackedSequence(data, torch.tensor(batch_sizes, device="cpu"), *indices)
