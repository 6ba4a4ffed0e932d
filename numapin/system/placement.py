"""Place a range of this process's memory on a NUMA node, and verify it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError
from numapin.system import memory, numa
from numapin.system.numa_maps import parse
from numapin.system.refusals import REMEDIES, SYS_NICE

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMA_MAPS: Final = Path("/proc/self/numa_maps")
_ANY: Final = CpuSet()


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


def check(address: int, num_bytes: int, *, nodes: CpuSet, num_machine_nodes: int) -> Placement:
    """Ask the kernel where touched pages are, preferably for a whole mapping at once (see `find_pages`).

    On a machine with one node the kernel is not asked: `pages` follows from the size.
    """
    if num_machine_nodes == 1:
        return Placement(pages=dict.fromkeys(nodes, -(-num_bytes // mmap.PAGESIZE)) or None)
    pages = find_pages(address, num_bytes)
    return Placement(pages=pages, shortfalls=tuple(_strays(pages, nodes)))


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

    None if there is no such mapping, if it is larger than the range, if its line has another form than we know, or if
    the kernel has no such file.
    Source: proc_pid_numa_maps(5); it counts a huge page as one page, with its size in kernelpagesize_kB.
    """
    sizes = _mapping_sizes(address, numa_maps)
    if not sizes:
        return None
    pages: dict[int | None, int] = {node: size // mmap.PAGESIZE for node, size in sizes.items()}
    untouched = -(-num_bytes // mmap.PAGESIZE) - sum(pages.values())
    if untouched < 0:
        return None
    return pages | {None: untouched} if untouched else pages


def _mapping_sizes(address: int, numa_maps: Path) -> dict[int, int]:
    """Return the bytes on each node of the mapping that starts at `address`; empty without such a mapping or page."""
    try:
        with numa_maps.open(encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith(f"{address:08x} ")), "")
        return next(parse(line)).bytes_by_node if line else {}
    except (OSError, ValueError):
        return {}


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


def _touch_from(cpus: CpuSet, address: int, num_bytes: int) -> Iterator[str]:
    """Touch the pages from a thread on the CPUs; Linux binds threads, so the calling thread is not affected."""
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_touch_on, cpus, address, num_bytes).result()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        yield f"CPUs {cpus} were refused ({error.strerror}) for the first touch; see: numapin topo"


def _touch_on(cpus: CpuSet, address: int, num_bytes: int) -> None:
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    finally:
        touch(address, num_bytes)


def touch(address: int, num_bytes: int) -> None:
    """Fault in every page of fresh memory. Raises OSError ENOMEM if the kernel has no memory; never SIGBUS."""
    try:
        memory.populate(address, num_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _out_of_memory(num_bytes, error) from None
        _zero(address, num_bytes)


def _zero(address: int, num_bytes: int) -> None:
    """Touch every page on kernels before 5.14."""
    try:
        memory.zero(address, num_bytes)
    except OSError as error:
        raise _out_of_memory(num_bytes, error) from None


def _out_of_memory(num_bytes: int, error: OSError) -> OSError:
    return OSError(errno.ENOMEM, f"the kernel has no {num_bytes} bytes of memory for this ({error.strerror})")


def _strays(pages: dict[int | None, int] | None, nodes: CpuSet) -> Iterator[str]:
    """Report pages that are not on the nodes, or that their location is unknown."""
    if not nodes:
        return
    if pages is None:
        yield f"the location of the pages is unverified: the kernel refuses move_pages and numa_maps; {SYS_NICE}"
        return
    total = sum(pages.values())
    shares = ", ".join(_share(node, count / total) for node, count in pages.items() if node not in nodes)
    if shares:
        yield (
            f"not all pages are on node {nodes}: {shares}; that node is full, its page cache included "
            "(see: numactl -H; free the cache with: sysctl vm.drop_caches=1), or the kernel ignores memory policies"
        )


def _share(node: int | None, share: float) -> str:
    return f"{share:.1%} on {'no node' if node is None else f'node {node}'}"
