"""Fault in, zero and copy memory."""

from __future__ import annotations

import ctypes
import os
from array import array
from functools import cache
from typing import TYPE_CHECKING, Final

from numapin.errors import LibraryError
from numapin.system.calls import call, function

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable

MADV_POPULATE_READ: Final = 22  # since Linux 5.14; EINVAL before
MADV_POPULATE_WRITE: Final = 23


def populate(address: int, num_bytes: int, advice: int = MADV_POPULATE_WRITE) -> None:
    """Fault in every page of a range without changing its contents. `address` is page aligned.

    Releases the GIL, unlike mmap.madvise. Raises OSError: EFAULT or ENOMEM if an access would fail, e.g. with SIGBUS;
    EINVAL before Linux 5.14.
    """
    call("madvise", address, num_bytes, advice)


Window = ctypes.Array[ctypes.c_ubyte]
"""A range of memory, from which memoryviews are made; it lives as long as any of them."""


def window(address: int, num_bytes: int, *, owner: object) -> Window:
    """Return a range of memory as a separate object, whose end a weakref can report; it keeps `owner` mapped.

    A slice of a memoryview would not do: it keeps the object under the memoryview, not the memoryview itself.
    """
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined] # ctypes objects take any attribute
    return memory


def view_of(memory: Window) -> memoryview:
    """Return a view of bytes, which keeps the memory, as do all objects made from the view."""
    return memoryview(memory).cast("B")


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return the address of a mapping or a writable view."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def zero(address: int, num_bytes: int) -> None:
    """Fill a range with zeros, read from /dev/zero: if memory runs out, that is OSError EFAULT instead of SIGBUS."""
    fd, end = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC), address + num_bytes
    try:
        while address < end:  # a read ends early at a signal, and at 2 GiB
            address += call("read", fd, address, end - address)
    finally:
        os.close(fd)


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copy a range to another one, without the GIL."""
    ctypes.memmove(target, source, num_bytes)


def keep_forever(thing: object) -> None:
    """Let an object never be destroyed, not even when Python ends, which clears all modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def may_pass_caches(machine: str) -> bool:
    """Return whether stores.c is written for a kind of machine, as `platform.machine` names it."""
    return machine in ("x86_64", "aarch64")


@cache
def can_pass_caches() -> bool:
    """Return whether `stack_past_caches` works: libstores.so was in the wheel, or compiled during the installation."""
    try:
        function("numapin_stack_past_caches")
    except LibraryError:
        return False
    return True


def stack_past_caches(target: int, sources: Iterable[int], num_bytes: int) -> None:
    """Copy blocks of `num_bytes` each to `target`, one after the other, with stores that bypass the caches.

    For memory that a GPU reads next: the copy causes a third less traffic on the memory bus. Raises LibraryError if
    `can_pass_caches` returns False.
    """
    addresses = array("Q", sources)
    call("numapin_stack_past_caches", target, addresses.buffer_info()[0], len(addresses), num_bytes)
