"""Map, fault in, zero and copy memory. Edge.

Comes in: descriptors, addresses, sizes in bytes. Goes out: mappings and views of them, or OSError.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Final

from numapin.errors import LibraryError
from numapin.system.calls import call, function

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable

MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; EINVAL before


FALLOC_FL_KEEP_SIZE: Final = 1


FALLOC_FL_PUNCH_HOLE: Final = 2


def populate(address: int, num_bytes: int) -> None:
    """Make every page of the range be there, as a write to it would; what is in them stays. `address` is page aligned.

    Without the GIL, unlike mmap.madvise. Raises OSError where a write would raise SIGBUS or worse: EFAULT or ENOMEM;
    EINVAL before Linux 5.14.
    """
    call("madvise", address, num_bytes, MADV_POPULATE_WRITE)


Window = ctypes.Array[ctypes.c_ubyte]
"""A range of memory: something that memoryviews are made of, and that lives as long as anything over it."""


def map_shared(fd: int, num_bytes: int, *, offset: int = 0) -> mmap.mmap:
    """Map a range of a file, shared and writable, in huge pages where the machine lets shared memory have them.

    It holds a descriptor of its own, and is unmapped when the last thing made of it is gone. Raises OSError.
    """
    import mmap  # here, because each rank imports this module before its own program starts

    mapped = mmap.mmap(fd, num_bytes, offset=offset)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def window(address: int, num_bytes: int, *, owner: object) -> Window:
    """Return a range of memory as an object of its own, whose end a weakref can tell; it keeps `owner`, who unmaps.

    A slice of a memoryview is no such thing: it keeps what the memoryview was made of, and not the memoryview.
    """
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined] # ctypes objects take any attribute
    return memory


def view_of(memory: Window) -> memoryview:
    """Return a view of bytes, which keeps the memory, as all that is made of it does."""
    return memoryview(memory).cast("B")


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return where a mapping, or a writable view, begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def zero(address: int, num_bytes: int) -> None:
    """Fill a range with zeros, read from /dev/zero: where there is no memory that is OSError EFAULT and not SIGBUS."""
    fd, end = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC), address + num_bytes
    try:
        while address < end:  # a signal, and 2 GiB, end a read early
            address += call("read", fd, address, end - address)
    finally:
        os.close(fd)


@cache
def can_pass_caches() -> bool:
    """Return whether `stack_past_caches` is there: on x86-64, where a C compiler was when numapin was installed."""
    try:
        function("numapin_stack_past_caches")
    except LibraryError:
        return False
    return True


def stack_past_caches(target: int, sources: Iterable[int], num_bytes: int) -> None:
    """Copy blocks of `num_bytes` each to `target`, one behind the other, with stores that leave the caches alone.

    For memory that a GPU reads next and no CPU: the copy makes a third less traffic on the memory bus. Raises
    LibraryError where `can_pass_caches` says no.
    """
    addresses = array("Q", sources)
    call("numapin_stack_past_caches", target, addresses.buffer_info()[0], len(addresses), num_bytes)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give the pages of a part of a memfd back; it reads as zeros then, and the file keeps its size.

    Raises OSError: EBADF, EINVAL, EOPNOTSUPP (a file system without holes), EPERM (sealed).
    """
    call("fallocate", fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, num_bytes)
