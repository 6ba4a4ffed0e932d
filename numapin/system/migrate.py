"""Move pages of a process to a node, and ask the kernel where they are afterwards.

move_pages(2) is used rather than migrate_pages(2). The latter takes a whole process in one call, which cannot be
interrupted, says nothing about single pages, and with CAP_SYS_NICE also moves pages that other processes share.
"""

from __future__ import annotations

import errno
from array import array
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.system.calls import call
from numapin.system.numa import nodes_of_pages
from numapin.system.proc import Gone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.base.cpu_set import CpuSet

_MOVE: Final = 1 << 1  # MPOL_MF_MOVE: only pages that no other process maps
_UNTOUCHED: Final = -(1 << 30)  # a status that the kernel does not write
_HUGE_PAGE: Final = 2 << 20
_FUTILE: Final = 3  # calls that move nothing, after which the rest of a huge page's range counts as locked


class Stay(StrEnum):
    """The reason why pages stay where they are."""

    SHARED = "shared"
    """Other processes map them."""
    LOCKED = "locked"
    """A driver or the kernel holds them, e.g. for direct memory access."""
    FULL = "full"
    """The node has no room."""
    FORBIDDEN = "forbidden"
    """The process's cpuset does not allow the node."""
    REFUSED = "refused"
    """The kernel refuses the call: seccomp, or a process that may not be examined."""
    FIXED = "fixed"
    """Memory of a device, which cannot be moved."""


_OF_PAGE: Final = {errno.EACCES: Stay.SHARED, errno.EFAULT: Stay.FIXED, errno.ENOMEM: Stay.FULL}
_OF_CALL: Final = {
    errno.EPERM: Stay.REFUSED,
    errno.ENOSYS: Stay.REFUSED,
    errno.EACCES: Stay.FORBIDDEN,
    errno.ENODEV: Stay.FORBIDDEN,
    errno.ENOMEM: Stay.FULL,
}
FINAL: Final = frozenset({Stay.REFUSED, Stay.FORBIDDEN, Stay.FULL})
"""Reasons that hold for all further pages."""


class Moved(NamedTuple):
    """The number of pages that moved, and of those that stay on other nodes, by reason."""

    num_moved: int
    stays: Counter[Stay]


def move_pages(pid: int, addresses: Sequence[int], node: int, *, within: CpuSet) -> Moved:
    """Move the pages that are not `within` some nodes to `node`, which is one of them, and read back where they are.

    Untouched pages are left out. Pages that other processes map stay: they may be another user's. Raises Gone if the
    process has ended, and OSError: EPERM (seccomp, or a process that may not be examined), ENOSYS, EINVAL.
    """
    if node not in within:
        raise OSError(errno.EINVAL, f"node {node} is not one of {within}")
    try:
        far = _elsewhere(pid, addresses, within)
        if not far:
            return Moved(0, Counter())
        reasons = _move(pid, far, node, within)
        left = _elsewhere(pid, far, within)
    except ProcessLookupError:
        raise Gone from None
    return Moved(len(far) - len(left), Counter(reasons.get(address, Stay.LOCKED) for address in left))


def _elsewhere(pid: int, addresses: Sequence[int], within: CpuSet) -> list[int]:
    """Return the addresses whose pages exist and are on other nodes."""
    nodes = nodes_of_pages(addresses, pid=pid)
    return [address for address, node in zip(addresses, nodes, strict=True) if node >= 0 and node not in within]


def _move(pid: int, addresses: list[int], node: int, within: CpuSet) -> dict[int, Stay]:
    """Move pages; return the reasons that the kernel gave for pages, some of which may have moved later."""
    reasons: dict[int, Stay] = {}
    todo, num_futile = addresses, 0
    while todo:
        try:
            status = _call(pid, todo, node)
        except OSError as error:
            if error.errno not in _OF_CALL:
                raise
            return reasons | dict.fromkeys(todo, _OF_CALL[error.errno])
        reasons |= {at: _OF_PAGE.get(-each, Stay.LOCKED) for at, each in zip(todo, status, strict=True) if each < 0}
        rest = _not_attempted(pid, todo, status, within)
        num_futile = num_futile + 1 if len(todo) - len(rest) <= 2 else 0
        todo = _next_range(rest) if num_futile >= _FUTILE else rest
        num_futile %= _FUTILE
    return reasons


def _next_range(addresses: list[int]) -> list[int]:
    """Return the addresses after the huge page's range of the first: each call would try the same huge page again."""
    end = addresses[0] - addresses[0] % _HUGE_PAGE + _HUGE_PAGE if addresses else 0
    return [address for address in addresses if address >= end]


def _not_attempted(pid: int, addresses: list[int], status: array[int], within: CpuSet) -> list[int]:
    """Return the pages at which the kernel has not arrived.

    Since Linux 4.17 the call ends with the first group of pages of which one did not move. A group ends before a page
    that cannot be queued, which has a status by then, or at the end. The statuses of the group's own pages are not
    written. So if all groups before the last status have moved, the kernel has arrived at the end.
    Source: mm/migrate.c, do_pages_move.
    """
    last = max((at for at, each in enumerate(status) if each != _UNTOUCHED), default=None)
    if last is None:
        return []
    unknown = [at for at, each in zip(addresses[:last], status[:last], strict=True) if each == _UNTOUCHED]
    has_stopped = bool(unknown) and bool(_elsewhere(pid, unknown, within))
    return addresses[last + 1 :] if has_stopped else []


def _call(pid: int, addresses: list[int], node: int) -> array[int]:
    """Ask the kernel to move pages; return the status of each. Raises OSError."""
    count = len(addresses)
    pages, nodes, status = array("Q", addresses), array("i", [node]) * count, array("i", [_UNTOUCHED]) * count
    places = (each.buffer_info()[0] for each in (pages, nodes, status))
    call("move_pages", pid, count, *places, _MOVE)
    return status
