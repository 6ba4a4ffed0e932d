"""Pages of memory: place those of this process on nodes and verify it, find and move those of other processes."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from array import array
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.system import memory, numa, proc
from numapin.system.calls import call
from numapin.system.numa import nodes_of_pages
from numapin.system.numa_maps import parse
from numapin.system.refusals import REMEDIES, SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUMA_MAPS: Final = Path("/proc/self/numa_maps")
_ANY: Final = CpuSet()

# --- this process's pages --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The number of pages of a range on each node, as the kernel reports it; node None is untouched pages.

    `pages` is None if the kernel does not say. `shortfalls` are the refused requests, each with its remedy.
    """

    pages: dict[int | None, int] | None
    shortfalls: tuple[str, ...] = ()


class Ledger:
    """The number of bytes of this process's memory that numapin has page-locked. Do not use it in finalizers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, because a finalizer may run while it is held
        self._bytes: dict[int, int] = {}

    def add(self, num_bytes: int) -> None:
        """Add page-locked memory."""
        with self._lock:
            # Per process: a forked child has locked nothing.
            self._bytes[os.getpid()] = self.total + num_bytes

    def remove(self, num_bytes: int) -> None:
        """Subtract memory that was unlocked."""
        self.add(-num_bytes)

    @property
    def total(self) -> int:
        """The bytes that are page-locked now."""
        return self._bytes.get(os.getpid(), 0)


PINNED: Final = Ledger()


def place(
    address: int, num_bytes: int, *, nodes: CpuSet, cpus: CpuSet, num_machine_nodes: int, within: CpuSet = _ANY
) -> Placement:
    """Place fresh memory on `nodes`, touch every page of it, and ask the kernel where the pages are (see `check`).

    `address` is page aligned. The memory, private or shared, was never written: its contents may be zeroed. Without
    `nodes`, the memory policy of the calling thread decides. If the kernel refuses to set the range's policy, or if
    pages must stay `within` some nodes, a thread on `cpus` touches it. The calling thread's own CPUs and policy do not
    change.
    Raises OSError ENOMEM if memory runs out.
    """
    has_policy = bool(nodes) and num_machine_nodes > 1
    refused = tuple(prefer(address, num_bytes, nodes, within=within)) if has_policy else ()
    if refused or (has_policy and within):
        refused += tuple(_touch_from(cpus, address, num_bytes))
    else:
        touch(address, num_bytes)
    found = check(address, num_bytes, nodes=nodes, num_machine_nodes=num_machine_nodes)
    return Placement(pages=found.pages, shortfalls=(*refused, *found.shortfalls))


def prefer(address: int, num_bytes: int, nodes: CpuSet, *, within: CpuSet = _ANY) -> Iterator[str]:
    """Set the range's policy and yield what is refused. Preferred, because a full node must not wake the OOM killer.

    Pages stay `within` these nodes if there are any, on the one nearest to the CPU that touches them: a preference
    would spill into GPU memory.
    """
    try:
        if within:
            numa.bind_pages(address, num_bytes, numa.MPOL_BIND, within)
        else:
            numa.prefer(partial(numa.bind_pages, address, num_bytes), nodes)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "see: numapin topo")
        yield f"memory on node {nodes} was refused ({error.strerror}): pages go where they are first touched; {remedy}"
    except LibnumaError as error:
        yield f"{error.message}: pages go where they are first touched; {error.hint}"


def touch(address: int, num_bytes: int) -> None:
    """Fault in every page of fresh memory. Raises OSError ENOMEM if the kernel has no memory; never SIGBUS."""
    try:
        try:
            memory.populate(address, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            memory.zero(address, num_bytes)  # a kernel before 5.14
    except OSError as error:
        problem = f"the kernel has no {num_bytes} bytes of memory for this ({error.strerror})"
        raise OSError(errno.ENOMEM, problem) from None


def _touch_from(cpus: CpuSet, address: int, num_bytes: int) -> Iterator[str]:
    """Touch the pages from a thread on the CPUs; Linux binds threads, so the calling thread is not affected."""
    from concurrent.futures import ThreadPoolExecutor  # takes some 10 ms

    def touch_on_cpus() -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
        finally:
            touch(address, num_bytes)

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(touch_on_cpus).result()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        yield f"CPUs {cpus} were refused ({error.strerror}) for the first touch; see: numapin topo"


def check(address: int, num_bytes: int, *, nodes: CpuSet, num_machine_nodes: int) -> Placement:
    """Ask the kernel where touched pages are, preferably for a whole mapping at once (see `find_pages`).

    On a machine with one node the kernel is not asked: `pages` follows from the size.
    """
    if num_machine_nodes == 1:
        return Placement(pages=dict.fromkeys(nodes, -(-num_bytes // mmap.PAGESIZE)) or None)
    pages = find_pages(address, num_bytes)
    shortfalls = []
    if nodes and pages is None:
        shortfalls = [
            f"the location of the pages is unverified: the kernel refuses move_pages and numa_maps; {SYS_NICE}"
        ]
    elif nodes and pages:
        elsewhere = ", ".join(
            f"{count / sum(pages.values()):.1%} on {'no node' if node is None else f'node {node}'}"
            for node, count in pages.items()
            if node not in nodes
        )
        if elsewhere:
            shortfalls = [
                f"not all pages are on node {nodes}: {elsewhere}; that node is full, its page cache included (see: "
                "numactl -H; free the cache with: sysctl vm.drop_caches=1), or the kernel ignores memory policies"
            ]
    return Placement(pages=pages, shortfalls=tuple(shortfalls))


def find_pages(address: int, num_bytes: int, *, numa_maps: Path = NUMA_MAPS) -> dict[int | None, int] | None:
    """Return the number of pages of a range on each node, key None for untouched ones; None if the kernel does not say.

    Asks move_pages. If that is refused, as in Docker's default profile, asks numa_maps, which has whole mappings only.
    """
    try:
        return numa.nodes_of_range(address, num_bytes)
    except (OSError, LibnumaError):
        return read_numa_maps(address, num_bytes, numa_maps=numa_maps)


def read_numa_maps(address: int, num_bytes: int, *, numa_maps: Path = NUMA_MAPS) -> dict[int | None, int] | None:
    """Return the nodes of the mapping that starts at `address` from numa_maps, in pages of the base size.

    None if there is no such mapping or page, if it is larger than the range, if its line has another form than we know,
    or if the kernel has no such file.
    """
    try:
        with numa_maps.open(encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith(f"{address:08x} ")), "")
        sizes = next(parse(line)).bytes_by_node
    except (OSError, ValueError):
        return None
    pages: dict[int | None, int] = {node: size // mmap.PAGESIZE for node, size in sizes.items()}
    untouched = -(-num_bytes // mmap.PAGESIZE) - sum(pages.values())
    if not pages or untouched < 0:
        return None
    return pages | {None: untouched} if untouched else pages


# --- pages of other processes ----------------------------------------------------------------------------------------
# move_pages(2) is used rather than migrate_pages(2). The latter takes a whole process in one call, which cannot be
# interrupted, says nothing about single pages, and with CAP_SYS_NICE also moves pages that other processes share.

_MOVE: Final = 1 << 1  # MPOL_MF_MOVE: only pages that no other process maps
_UNTOUCHED: Final = -(1 << 30)  # a status that the kernel does not write
_HUGE_PAGE: Final = 2 << 20
_FUTILE: Final = 3  # calls that move nothing, after which the rest of a huge page's range counts as locked


class Stay(StrEnum):
    """The reason why pages stay where they are."""

    SHARED = "shared"  # other processes map them
    LOCKED = "locked"  # a driver or the kernel holds them, e.g. for direct memory access
    FULL = "full"  # the node has no room
    FORBIDDEN = "forbidden"  # the process's cpuset does not allow the node
    REFUSED = "refused"  # the kernel refuses the call: seccomp, or a process that may not be examined
    FIXED = "fixed"  # memory of a device, which cannot be moved


_REASON_OF_PAGE: Final = {errno.EACCES: Stay.SHARED, errno.EFAULT: Stay.FIXED, errno.ENOMEM: Stay.FULL}
_REASON_OF_CALL: Final = {
    errno.EPERM: Stay.REFUSED,
    errno.ENOSYS: Stay.REFUSED,
    errno.EACCES: Stay.FORBIDDEN,
    errno.ENODEV: Stay.FORBIDDEN,
    errno.ENOMEM: Stay.FULL,
}
FINAL: Final = frozenset({Stay.REFUSED, Stay.FORBIDDEN, Stay.FULL})  # reasons that hold for all further pages


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
        raise proc.Gone from None
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
        count = len(todo)
        pages, nodes, status = array("Q", todo), array("i", [node]) * count, array("i", [_UNTOUCHED]) * count
        try:
            call("move_pages", pid, count, *(each.buffer_info()[0] for each in (pages, nodes, status)), _MOVE)
        except OSError as error:
            if error.errno not in _REASON_OF_CALL:
                raise
            return reasons | dict.fromkeys(todo, _REASON_OF_CALL[error.errno])
        reasons |= {
            at: _REASON_OF_PAGE.get(-each, Stay.LOCKED) for at, each in zip(todo, status, strict=True) if each < 0
        }

        # Since Linux 4.17 the call ends with the first group of pages of which one did not move. A group ends before a
        # page that cannot be queued, which has a status by then, or at the end. The statuses of the group's own pages
        # are not written. So if all groups before the last status have moved, the kernel has arrived at the end.
        # Source: mm/migrate.c, do_pages_move.
        last = max((at for at, each in enumerate(status) if each != _UNTOUCHED), default=0)
        unknown = [at for at, each in zip(todo[:last], status[:last], strict=True) if each == _UNTOUCHED]
        has_stopped = bool(unknown) and bool(_elsewhere(pid, unknown, within))
        rest = todo[last + 1 :] if has_stopped else []

        num_futile = num_futile + 1 if count - len(rest) <= 2 else 0
        if rest and num_futile >= _FUTILE:  # each call would try the same huge page again: go on after its range
            end = rest[0] - rest[0] % _HUGE_PAGE + _HUGE_PAGE
            rest = [address for address in rest if address >= end]
        todo = rest
        num_futile %= _FUTILE
    return reasons
