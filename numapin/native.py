"""Kernel calls that py-libnuma lacks, typed and checked. Edge.

Comes in: plain numbers. Goes out: plain numbers, or OSError with the kernel's errno. Together with
topology/libnuma.py the only module that knows ctypes. Works on kernels from 4.18 on; what a kernel lacks comes back as
its own errno.

The functions are taken from libnuma, which wraps the system calls of set_mempolicy(2), get_mempolicy(2) and
move_pages(2) one to one and sets errno.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from numapin import cpulist
from numapin.errors import LibnumaError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INSTALL_LIBNUMA: Final = (
    "install it with: apt-get install libnuma1 (Debian, Ubuntu) or: dnf install numactl-libs (Fedora, RHEL)"
)

MPOL_DEFAULT: Final = 0
MPOL_PREFERRED: Final = 1
MPOL_BIND: Final = 2
MPOL_INTERLEAVE: Final = 3
MPOL_LOCAL: Final = 4
MPOL_PREFERRED_MANY: Final = 5  # since Linux 5.15; EINVAL before

_MODE_FLAGS: Final = 0xE000  # MPOL_F_STATIC_NODES, _RELATIVE_NODES, _NUMA_BALANCING, or'ed into the mode
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_MAX_NODES: Final = 1024  # the largest MAX_NUMNODES of any Linux build; get_mempolicy wants room for all of them
_Mask = ctypes.c_ulong * (_MAX_NODES // _WORD_BITS)

# libnuma's signatures: name -> argument types; each returns a C long that is -1 on error, errno set.
_SIGNATURES: Final = {
    "set_mempolicy": (ctypes.c_int, ctypes.POINTER(ctypes.c_ulong), ctypes.c_ulong),
    "get_mempolicy": (
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_ulong),
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_int,
    ),
    "move_pages": (
        ctypes.c_int,
        ctypes.c_ulong,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_int,
    ),
}


def can_load(library: str) -> bool:
    """Return whether the dynamic linker finds and loads a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def set_memory_policy(mode: int, nodes: Iterable[int]) -> None:
    """Set this thread's memory policy; threads and processes started later inherit it, and so does exec.

    `mode` is one of the MPOL constants; `nodes` is empty for MPOL_DEFAULT and MPOL_LOCAL.
    Raises OSError: EPERM (seccomp), EINVAL (unknown mode or node), ENOSYS.
    """
    members = sorted(nodes)
    if members and not 0 <= members[0] <= members[-1] < _MAX_NODES:
        raise OSError(errno.EINVAL, f"no such NUMA node: {members}")
    mask = _Mask()
    for node in members:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel reads one bit less than it is told (mm/mempolicy.c, get_nodes).
    _call("set_mempolicy", mode, mask if members else None, _MAX_NODES + 1 if members else 0)


def get_memory_policy() -> tuple[int, frozenset[int]]:
    """Return this thread's memory policy: an MPOL constant (flags masked off) and its nodes. Raises OSError."""
    mode, mask = ctypes.c_int(), _Mask()
    _call("get_mempolicy", ctypes.byref(mode), mask, _MAX_NODES, None, 0)
    return mode.value & ~_MODE_FLAGS, cpulist.from_words(mask, word_bits=_WORD_BITS)


def nodes_of_pages(addresses: Sequence[int], *, pid: int = 0) -> tuple[int, ...]:
    """Return the node of each page of process `pid` (0 is this one), or a negative errno (-ENOENT: not touched yet).

    `addresses` may lie anywhere in their pages. Moves nothing: move_pages(2) without nodes only asks.
    Raises OSError: EPERM (seccomp, or another user's process), ESRCH.
    """
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    _call("move_pages", pid, count, pages, None, status, 0)
    return tuple(status)


def _call(name: str, *arguments: object) -> None:
    function = _function(name)
    if function(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@cache
def _function(name: str) -> Any:  # noqa: ANN401 - a ctypes function
    try:
        function = getattr(ctypes.CDLL("libnuma.so.1", use_errno=True), name)
    except (OSError, AttributeError) as error:
        raise LibnumaError(f"libnuma cannot be used: {error}", INSTALL_LIBNUMA) from None
    function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_long
    return function
