"""Call libnuma, libc and our own stores.c through ctypes: one table of signatures; how this process ends.

Works on kernels from 4.18 on, except `open_inside`; a call that the kernel lacks fails with the kernel's errno. libnuma
wraps set_mempolicy(2), get_mempolicy(2), mbind(2) and move_pages(2) one to one. ctypes releases the GIL in each call.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_long,
    c_size_t,
    c_ssize_t,
    c_uint,
    c_uint64,
    c_ulong,
    c_void_p,
    sizeof,
)

from numapin.errors import LibnumaError, LibraryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

INSTALL_LIBNUMA: Final = (
    "install it with: apt-get install libnuma1 (Debian, Ubuntu) or: dnf install numactl-libs (Fedora, RHEL)"
)
INSTALL_STORES: Final = "install a C compiler (apt-get install gcc libc6-dev), then numapin again"
LIBC: Final = None  # the name for the libraries that the process itself is linked with
_PR_SET_PDEATHSIG: Final = 1
_LIBNUMA: Final = "libnuma.so.1"
_STORES: Final = os.path.join(os.path.dirname(__file__), "libstores.so")  # stores.c, if it could be built

# Library, result type and argument types by name; on error each returns a negative number and sets errno.
_SIGNATURES: Final[dict[str, tuple[str | None, type, tuple[Any, ...]]]] = {
    "set_mempolicy": (_LIBNUMA, c_long, (c_int, POINTER(c_ulong), c_ulong)),
    "get_mempolicy": (_LIBNUMA, c_long, (POINTER(c_int), POINTER(c_ulong), c_ulong, c_void_p, c_int)),
    "mbind": (_LIBNUMA, c_long, (c_void_p, c_ulong, c_int, POINTER(c_ulong), c_ulong, c_uint)),
    "move_pages": (_LIBNUMA, c_long, (c_int, c_ulong, c_void_p, c_void_p, c_void_p, c_int)),
    "madvise": (LIBC, c_int, (c_void_p, c_size_t, c_int)),
    "mmap": (LIBC, c_long, (c_void_p, c_size_t, c_int, c_int, c_int, c_long)),
    "munmap": (LIBC, c_int, (c_void_p, c_size_t)),
    "prctl": (LIBC, c_int, (c_int, c_ulong, c_ulong, c_ulong, c_ulong)),
    "numapin_stack_past_caches": (_STORES, c_int, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "read": (LIBC, c_ssize_t, (c_int, c_void_p, c_size_t)),
    # openat2(2), since Linux 5.6. The C library has no function for it, and its number is the same on all machines.
    "syscall": (LIBC, c_long, (c_long, c_int, c_char_p, c_void_p, c_size_t)),
}
_OPENAT2: Final = 437
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 0x10, 0x02  # include/uapi/linux/openat2.h
_NUM_TRIES: Final = 1000  # EAGAIN: a folder was moved somewhere while the kernel followed a ".."


def can_load(library: str) -> bool:
    """Return whether the dynamic linker finds and loads a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def call(name: str, *arguments: object) -> int:
    """Call a function of the table. Raises OSError with errno, LibnumaError or LibraryError."""
    result = function(name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


_loaded: Final[dict[str, Callable[..., int]]] = {}


def function(name: str) -> Callable[..., int]:
    """Return a function of the table with its types set. Raises LibnumaError or LibraryError."""
    if name not in _loaded:
        library, result, arguments = _SIGNATURES[name]
        try:
            found = ctypes.CDLL(library, use_errno=True)[name]
        except (OSError, AttributeError) as error:
            if library == _STORES:
                raise LibraryError(f"libstores.so cannot be used: {error}", INSTALL_STORES) from None
            raise LibnumaError(f"libnuma cannot be used: {error}", INSTALL_LIBNUMA) from None
        found.argtypes, found.restype = arguments, result
        _loaded[name] = found
    return _loaded[name]


def open_inside(root: int, path: str, flags: int) -> int:
    """Open a path as if the opened folder `root` were "/": no link in it leads out. Raises OSError.

    ENOSYS or EPERM: the kernel has no openat2, or its seccomp filter does not know it.
    """
    how = (c_uint64 * 3)(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    num_left = _NUM_TRIES
    while True:
        try:
            return call("syscall", _OPENAT2, root, os.fsencode(path), byref(how), sizeof(how))
        except BlockingIOError:
            num_left -= 1
            if not num_left:
                raise


def end_with_parent(number: int) -> None:
    """Request a signal to this process when the thread that started it ends, however it ends; exec keeps the request.

    Children of this process do not inherit it. Raises OSError: EINVAL.
    """
    call("prctl", _PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_without_destructors() -> None:
    """Skip all C and C++ exit handlers registered so far when this process ends by exit(3).

    Unwritten data in C streams is lost. A C library without on_exit(3), such as musl, still runs them all.
    """
    from contextlib import suppress  # here, because each rank imports this module before its own program starts

    libc = ctypes.CDLL(LIBC)
    with suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc["_exit"], c_void_p), None)
