"""Bring a range of this process's memory onto a NUMA node, and tell where it came to lie. Edge.

Comes in: a range of fresh memory and the nodes it belongs on. Goes out: `Placement`, which is what the kernel says of
the pages, not what was asked: a call that succeeds proves nothing (gVisor accepts mbind and ignores it).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.errors import LibnumaError
from numapin.system import memory, numa
from numapin.system.numa_maps import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.base.cpu_set import CpuSet

NUMA_MAPS: Final = Path("/proc/self/numa_maps")

_SYS_NICE: Final = "run the container with --cap-add SYS_NICE (Kubernetes: securityContext)"
_REMEDY: Final = {
    errno.EPERM: f"seccomp forbids it; {_SYS_NICE}",
    errno.ENOSYS: "the kernel has no NUMA support",
    errno.EINVAL: "the kernel does not know the policy or does not allow the node; see: numapin topo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the pages of a range lie, as the kernel says: node -> pages, None for untouched ones.

    `pages` None: the kernel does not say. `shortfalls` are what was refused, each with its remedy.
    """

    pages: dict[int | None, int] | None
    shortfalls: tuple[str, ...] = ()


class Ledger:
    """How many bytes of this process's memory numapin has page-locked. Not for finalizers: it takes a lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come while it is held
        self._bytes: dict[int, int] = {}

    def add(self, num_bytes: int) -> None:
        """Count memory in that was page-locked."""
        with self._lock:
            # By process: a forked child has locked nothing.
            self._bytes[os.getpid()] = self.total + num_bytes

    def remove(self, num_bytes: int) -> None:
        """Count memory out that was unlocked."""
        self.add(-num_bytes)

    @property
    def total(self) -> int:
        """Return the bytes that are page-locked now."""
        return self._bytes.get(os.getpid(), 0)


PINNED: Final = Ledger()


def place(address: int, num_bytes: int, *, nodes: CpuSet, cpus: CpuSet, num_machine_nodes: int) -> Placement:
    """Bring fresh memory onto `nodes`, touch every page of it, and ask the kernel where the pages are.

    See `settle` and `check`. Raises OSError ENOMEM where memory runs out.
    """
    refused = settle(address, num_bytes, nodes=nodes, cpus=cpus, num_machine_nodes=num_machine_nodes)
    found = check(address, num_bytes, nodes=nodes, num_machine_nodes=num_machine_nodes)
    return Placement(pages=found.pages, shortfalls=(*refused, *found.shortfalls))


def settle(address: int, num_bytes: int, *, nodes: CpuSet, cpus: CpuSet, num_machine_nodes: int) -> tuple[str, ...]:
    """Bring fresh memory onto `nodes` and touch every page of it; return what was refused, each with its remedy.

    `address` is page aligned and the memory, private or shared, was never written: what is in it may be zeroed. No
    `nodes`: the memory policy of the calling thread decides. Where the kernel refuses to set the range's policy, a
    thread on `cpus` touches it. The calling thread's own CPUs and policy stay as they are.
    Raises OSError ENOMEM where memory runs out.
    """
    refused = tuple(_prefer(address, num_bytes, nodes)) if nodes and num_machine_nodes > 1 else ()
    if refused:
        return refused + tuple(_touch_from(cpus, address, num_bytes))
    _touch(address, num_bytes)
    return ()


def check(address: int, num_bytes: int, *, nodes: CpuSet, num_machine_nodes: int) -> Placement:
    """Ask the kernel where pages are that were touched, best of a whole mapping at once (see `find_pages`).

    On a machine with one node there is nothing to ask: `pages` says what must be.
    """
    if num_machine_nodes == 1:
        return Placement(pages=dict.fromkeys(nodes, -(-num_bytes // mmap.PAGESIZE)) or None)
    pages = find_pages(address, num_bytes)
    return Placement(pages=pages, shortfalls=tuple(_strays(pages, nodes)))


def find_pages(address: int, num_bytes: int, *, numa_maps: Path = NUMA_MAPS) -> dict[int | None, int] | None:
    """Return how many pages of a range lie on each node, None for untouched ones; None where the kernel does not say.

    Asks move_pages, and where that is refused, as in Docker's default profile, numa_maps: it knows whole mappings only.
    """
    try:
        return numa.nodes_of_range(address, num_bytes)
    except (OSError, LibnumaError):
        return read_numa_maps(address, num_bytes, numa_maps=numa_maps)


def read_numa_maps(address: int, num_bytes: int, *, numa_maps: Path = NUMA_MAPS) -> dict[int | None, int] | None:
    """Return what numa_maps says of the mapping that starts at `address`, in pages of the base size.

    None where there is no such mapping, where it holds more than the range, or where the kernel has no such file.
    Source: proc_pid_numa_maps(5); huge pages are counted as one there, with their size in kernelpagesize_kB.
    """
    try:
        with numa_maps.open(encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.startswith(f"{address:08x} ")), "")
    except OSError:
        return None
    sizes = next(parse(line)).bytes_by_node if line else {}
    if not sizes:  # no such mapping, or one without a page
        return None
    pages: dict[int | None, int] = {node: size // mmap.PAGESIZE for node, size in sizes.items()}
    untouched = -(-num_bytes // mmap.PAGESIZE) - sum(pages.values())
    if untouched < 0:
        return None
    return pages | {None: untouched} if untouched else pages


def _prefer(address: int, num_bytes: int, nodes: CpuSet) -> Iterator[str]:
    """Set the range's policy; what is refused is yielded. Preferred, because a full node must not wake the OOM killer.

    Several nodes need Linux 5.15; before it the first is preferred.
    """
    try:
        if len(nodes) > 1 and _try_many(address, num_bytes, nodes):
            return
        numa.bind_pages(address, num_bytes, numa.MPOL_PREFERRED, (min(nodes),))
    except OSError as error:
        remedy = _REMEDY.get(error.errno or 0, "see: numapin topo")
        yield f"memory on node {nodes} was refused ({error.strerror}): first touch decides; {remedy}"
    except LibnumaError as error:
        yield f"{error.message}: first touch decides; {error.hint}"


def _try_many(address: int, num_bytes: int, nodes: CpuSet) -> bool:
    try:
        numa.bind_pages(address, num_bytes, numa.MPOL_PREFERRED_MANY, nodes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _touch_from(cpus: CpuSet, address: int, num_bytes: int) -> Iterator[str]:
    """Touch the pages from a thread on the CPUs; Linux binds threads, so that the caller stays where it is."""

    def work() -> None:
        try:
            if cpus:
                os.sched_setaffinity(0, cpus)
        finally:
            _touch(address, num_bytes)

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(work).result()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        yield f"CPUs {cpus} were refused ({error.strerror}) for the first touch; see: numapin topo"


def _touch(address: int, num_bytes: int) -> None:
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
    """Say which pages lie elsewhere than on the nodes, or that it is not known."""
    if not nodes:
        return
    if pages is None:
        yield f"where the pages lie is unverified: the kernel refuses move_pages and numa_maps; {_SYS_NICE}"
        return
    elsewhere = {"no node" if n is None else f"node {n}": count for n, count in pages.items() if n not in nodes}
    if elsewhere:
        shares = ", ".join(f"{count / sum(pages.values()):.1%} on {node}" for node, count in elsewhere.items())
        yield (
            f"not all pages are on node {nodes}: {shares}; that node is full, its page cache included "
            "(see: numactl -H; free the cache with: sysctl vm.drop_caches=1), or the kernel ignores memory policies"
        )
