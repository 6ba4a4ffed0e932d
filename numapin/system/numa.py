"""Memory policies and the nodes of pages, set and read through the kernel."""

from __future__ import annotations

import ctypes
import errno
import os

from numapin.base import cpu_set
from numapin.system.calls import call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Final

    from numapin.base.cpu_set import CpuSet

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
_PAGES_PER_CALL: Final = 1 << 16  # 256 MiB of 4 KiB pages; between calls other threads get the GIL


def set_memory_policy(mode: int, nodes: Iterable[int]) -> None:
    """Set this thread's memory policy; threads and processes started later inherit it, and exec keeps it.

    `mode` is one of the MPOL constants; `nodes` is empty for MPOL_DEFAULT and MPOL_LOCAL.
    Raises OSError: EPERM (seccomp), EINVAL (unknown mode or node), ENOSYS.
    """
    call("set_mempolicy", mode, *_mask(nodes))


def get_memory_policy() -> tuple[int, CpuSet]:
    """Return this thread's memory policy: an MPOL constant (flags masked off) and its nodes. Raises OSError."""
    mode, mask = ctypes.c_int(), _Mask()
    call("get_mempolicy", ctypes.byref(mode), mask, _MAX_NODES, None, 0)
    return mode.value & ~_MODE_FLAGS, cpu_set.from_words(mask, word_bits=_WORD_BITS)


def nodes_of_pages(addresses: Sequence[int], *, pid: int = 0) -> Sequence[int]:
    """Return the node of each page of process `pid` (0 is this one), or a negative errno (-ENOENT: not touched yet).

    `addresses` may lie anywhere in their pages. No page moves: move_pages(2) without nodes only reports.
    Raises OSError: EPERM (seccomp, or another user's process), ESRCH.
    """
    from array import array

    pages, status = array("Q", addresses), array("i", bytes(4 * len(addresses)))
    call("move_pages", pid, len(pages), pages.buffer_info()[0], None, status.buffer_info()[0], 0)
    return status


def nodes_of_range(address: int, num_bytes: int) -> dict[int | None, int]:
    """Return the number of pages of this process's memory on each node; None counts untouched pages.

    Pages that the range covers in part count whole. 1 GiB of 4 KiB pages takes about 0.1 s, mostly without the GIL.
    Raises OSError: EPERM (seccomp, as in Docker's default profile), ENOSYS.
    """
    from collections import Counter

    page = os.sysconf("SC_PAGESIZE")
    starts = range(address - address % page, address + num_bytes, page)
    counts: Counter[int] = Counter()  # by node, or by negative errno
    for at in range(0, len(starts), _PAGES_PER_CALL):
        counts.update(nodes_of_pages(starts[at : at + _PAGES_PER_CALL]))
    untouched = sum(count for status, count in counts.items() if status < 0)
    pages: dict[int | None, int] = {node: count for node, count in sorted(counts.items()) if node >= 0}
    return pages | {None: untouched} if untouched else pages


def bind_pages(address: int, num_bytes: int, mode: int, nodes: Iterable[int]) -> None:
    """Set the memory policy for the untouched pages of a range; touched pages stay where they are.

    On a shared mapping the policy belongs to the object, for every process that maps it. `address` is page aligned.
    Raises OSError: EPERM (seccomp), EINVAL (unknown mode or node, or not aligned), EFAULT (no such memory), ENOSYS.
    """
    call("mbind", address, num_bytes, mode, *_mask(nodes), 0)


def prefer(
    set_policy: Callable[[int, Iterable[int]], None], nodes: frozenset[int], *, first: int | None = None
) -> int | None:
    """Prefer all nodes if the kernel can (Linux 5.15), else one: `first` if it is one of them, or the lowest.

    `set_policy` takes a mode and nodes, and raises OSError. Returns the node that is preferred instead of several; None
    if all of them are preferred.
    """
    if len(nodes) > 1:
        try:
            set_policy(MPOL_PREFERRED_MANY, nodes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return None
    node = first if first in nodes else min(nodes)
    set_policy(MPOL_PREFERRED, (node,))
    return node if len(nodes) > 1 else None


def _mask(nodes: Iterable[int]) -> tuple[ctypes.Array[ctypes.c_ulong] | None, int]:
    """Return the mask of a set of nodes, and its length in the form that the kernel expects. No nodes: no mask."""
    members = sorted(nodes)
    if not members:
        return None, 0
    if not 0 <= members[0] <= members[-1] < _MAX_NODES:
        raise OSError(errno.EINVAL, f"no such NUMA node: {members}")
    mask = _Mask()
    for node in members:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return mask, _MAX_NODES + 1  # the kernel reads one bit less than the given length (mm/mempolicy.c, get_nodes)
