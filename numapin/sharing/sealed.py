"""The memory of shared data: a file without a name, filled once, then sealed; and the nodes of its pages."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import time
import weakref
from enum import StrEnum
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Final, Self

from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError, NumapinError, UsageError
from numapin.system import memory, numa, pages
from numapin.system.refusals import REMEDIES
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator
    from typing import Protocol

    class _Sent(Protocol):
        """A descriptor on its way to a new process; multiprocessing has no public type for it."""

        def detach(self) -> int: ...


_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAP_NORESERVE: Final = 0x4000  # mmap has the name since Python 3.11; the same number on x86 and Arm
_SEAL_S: Final = 2.0
_POLL_S: Final = 0.01
_EXTENT_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64  # of arrays, as numpy and torch align theirs
_MEMS: Final = re.compile(r"^Mems_allowed_list:\s*(\S+)", re.MULTILINE)
_TOLERANCE: Final = 0.1  # of a node's part of interleaved pages
_FEW_PAGES: Final = 64


class Placing(StrEnum):
    """The placement of shared data on NUMA nodes."""

    INTERLEAVE = "interleave"
    """One copy, whose pages alternate between the nodes."""
    PER_NODE = "per-node"
    """A copy on the node of each rank."""


class Sealed(mmap.mmap):
    """A sealed file, mapped by this process. A write to the mapping copies the page for this process alone.

    The mapping is private because kernels before 6.7 refuse shared mappings of files that are sealed against writing.
    It is writable because torch has no read-only tensors: a write would end the process with SIGSEGV.
    """

    fd: int
    address: int

    def __new__(cls, fd: int) -> Self:
        """Map a sealed file, and take over its descriptor. Raises NumapinError."""
        try:
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            sealed = super().__new__(cls, fd, 0, flags=flags, prot=access)
        except OSError as error:
            os.close(fd)
            hint = "with vm.overcommit_memory=2, raise vm.overcommit_ratio: each process counts the memory as its own"
            raise NumapinError(f"shared data cannot be mapped: {error.strerror}", hint) from None
        sealed.fd, sealed.address = fd, memory.address_of(sealed)
        weakref.finalize(sealed, os.close, fd).atexit = False
        MAPPED.add(sealed)
        return sealed

    def __reduce__(self) -> tuple[object, ...]:
        """Send the descriptor to a process that multiprocessing is starting."""
        if get_spawning_popen() is None:
            raise UsageError(
                "shared data can be pickled only for a new process of multiprocessing",
                "call numapin.share before the process starts, and pass the result as an argument",
            )
        return _receive, (DupFd(self.fd),)


MAPPED: Final[weakref.WeakSet[Sealed]] = weakref.WeakSet()
"""The shared memory that this process has mapped."""


def _receive(sent: _Sent) -> Sealed:
    return Sealed(sent.detach())


def _new_file() -> int:
    return os.memfd_create("numapin-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seal(fd: int) -> None:
    """Seal a file. The kernel refuses while it moves a page of the file, or another process has just forked with it."""
    until_s = time.monotonic() + _SEAL_S
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return


class Unsealed:
    """A file that is being written, to be sealed at the end. Its pages go to `nodes` as they are written."""

    def __init__(self, placing: Placing, nodes: CpuSet) -> None:
        self._placing, self._nodes = placing, nodes
        self.fd = _new_file()
        self._file = os.fdopen(self.fd, "wb")
        self._end = self._room = 0
        self.shortfalls: list[str] = []

    def put(self, data: bytes | memoryview | array[int], *, is_aligned: bool = False) -> int:
        """Append bytes and return their position. Raises OSError if memory runs out."""
        view = memoryview(data).cast("B")
        padding = -self._end % _ALIGNMENT if is_aligned else 0
        start, self._end = self._end + padding, self._end + padding + len(view)
        if len(self._nodes) > 0:
            while self._room < self._end:
                self._make_room()
        self._file.write(bytes(padding))
        self._file.write(view)
        return start

    def finish(self) -> int:
        """Seal the file and return its descriptor."""
        self._file.flush()
        os.ftruncate(self.fd, self._end)
        fd = os.dup(self.fd)
        self._file.close()
        try:
            _seal(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def abandon(self) -> None:
        """Give the memory back."""
        self._file.close()

    def _make_room(self) -> None:
        """Extend the file. The policy that the new part gets belongs to the file, and outlives the mapping."""
        self._file.flush()
        os.ftruncate(self.fd, self._room + _EXTENT_BYTES)
        with mmap.mmap(self.fd, _EXTENT_BYTES, offset=self._room) as extent:
            self.shortfalls += _set_policy(memory.address_of(extent), _EXTENT_BYTES, self._placing, self._nodes)
        self._room += _EXTENT_BYTES


# --- nodes -----------------------------------------------------------------------------------------------------------


def usable_nodes() -> CpuSet:
    """Return the nodes whose memory this process may use and that have CPUs: GPU memory and CXL nodes have none."""
    tree = Tree("")
    nodes = tree.numbers(f"{NODES}/has_cpu") or CpuSet()
    for limit in (tree.numbers(f"{NODES}/has_memory"), tree.numbers("proc/self/status", line=_MEMS)):
        nodes = nodes if limit is None else nodes & limit
    return nodes


def cpus_of(node: int) -> CpuSet:
    """Return the CPUs of a node that this process may use."""
    return (Tree("").node_cpus(node) or CpuSet()) & os.sched_getaffinity(0)


def _set_policy(address: int, num_bytes: int, placing: Placing, nodes: CpuSet) -> Iterator[str]:
    """Set the nodes of untouched pages; yield what is refused."""
    if placing is Placing.PER_NODE:
        yield from pages.prefer(address, num_bytes, nodes)
        return
    try:
        numa.bind_pages(address, num_bytes, numa.MPOL_INTERLEAVE, nodes)
    except (OSError, LibnumaError) as error:
        number = error.errno or 0 if isinstance(error, OSError) else 0
        yield f"pages cannot be interleaved ({error}): they go where they are first touched; {REMEDIES.get(number, '')}"


def copy_to(node: int, sealed: Sealed) -> tuple[int, tuple[str, ...]]:
    """Copy shared memory to a node; return the copy's descriptor, and what the kernel did otherwise. Raises OSError."""
    size = len(sealed)
    fd = _new_file()
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as target:
            address = memory.address_of(target)
            placed = pages.place(address, size, nodes=CpuSet({node}), cpus=cpus_of(node), num_machine_nodes=2)
            memory.copy(address, sealed.address, size)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, placed.shortfalls


def shortfalls_of(sealed: Sealed, placing: Placing, nodes: CpuSet) -> tuple[str, ...]:
    """Ask the kernel where all pages are; return how that differs from what was asked for."""
    bytes(memoryview(sealed)[:: mmap.PAGESIZE])  # reads, and thereby maps, every page
    if placing is Placing.PER_NODE:
        return pages.check(sealed.address, len(sealed), nodes=nodes, num_machine_nodes=2).shortfalls
    found = pages.find_pages(sealed.address, len(sealed))
    if found is None:
        return ("the location of the pages is unverified: the kernel refuses move_pages and numa_maps",)
    fair = sum(found.values()) / len(nodes)
    is_even = all(abs(found.get(node, 0) - fair) <= _TOLERANCE * fair + _FEW_PAGES for node in nodes)
    if is_even and found.keys() <= nodes:
        return ()
    seen = ", ".join(f"{count} on {'no node' if node is None else f'node {node}'}" for node, count in found.items())
    return (f"the pages are not spread evenly over nodes {nodes}: {seen}; see: numactl -H",)
