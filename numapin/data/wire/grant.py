"""The slot that a worker gets with each task. Pure.

Comes in (rank): a free slot, if there is one. Goes out (worker): the same.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_FIXED: Final = struct.Struct("<qq?qI")
_NUMBER_BYTES: Final = 8


class Grant(NamedTuple):
    """A slot for a batch.

    Attributes:
        slot: Its number; -1: none is free.
        capacity: Its size in bytes.
        is_new: Whether the worker has yet to map it: a descriptor was handed over.
        expected_bytes: The size of a slot that the worker has to make; 0: unknown.
        forgotten: Slots that the worker will not see again, and unmaps.
    """

    slot: int
    capacity: int
    is_new: bool
    expected_bytes: int
    forgotten: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the grant as bytes, to stand before a task."""
        fixed = _FIXED.pack(self.slot, self.capacity, self.is_new, self.expected_bytes, len(self.forgotten))
        return fixed + struct.pack(f"<{len(self.forgotten)}q", *self.forgotten) if self.forgotten else fixed


NO_GRANT: Final = Grant(-1, 0, is_new=False, expected_bytes=0, forgotten=())


def decode_grant(message: bytes) -> tuple[Grant, memoryview]:
    """Return the grant and the task that follows it."""
    slot, capacity, is_new, expected, count = _FIXED.unpack_from(message)
    end = _FIXED.size + count * _NUMBER_BYTES
    forgotten = struct.unpack_from(f"<{count}q", message, _FIXED.size) if count else ()
    return Grant(slot, capacity, is_new, expected, forgotten), memoryview(message)[end:]
