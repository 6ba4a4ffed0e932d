"""The memory of shared data: a file without a name, filled once, then sealed; and the nodes of its pages."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import resource
import time
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Final, Self

from numapin.base.cpu_set import CpuSet
from numapin.errors import LibnumaError, NumapinError, UsageError
from numapin.system import memory, numa, pages
from numapin.system.calls import call
from numapin.system.refusals import REMEDIES
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

_SEALS: Final = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAP_NORESERVE: Final = 0x4000  # older Pythons' mmap does not have the name; the same number on x86 and Arm
_ALIGNMENT: Final = 64  # of arrays, as numpy and torch align theirs
_MEMS: Final = re.compile(r"^Mems_allowed_list:\s*(\S+)", re.MULTILINE)


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
            hint = "raise the limit: ulimit -n"
            if error.errno == errno.ENOMEM:
                hint = "with vm.overcommit_memory=2, raise vm.overcommit_ratio: the memory counts for each process"
            raise NumapinError(f"shared data cannot be mapped: {error.strerror}", hint) from None
        os.set_inheritable(fd, False)
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


def _receive(sent: Any) -> Sealed:  # noqa: ANN401 - multiprocessing has no public type for it
    return Sealed(sent.detach())


class Unsealed:
    """A file that is being written, to be sealed at the end.

    Its pages alternate between the nodes, or are on the only one; without any, the memory policy of the thread decides.
    """

    def __init__(self, nodes: CpuSet) -> None:
        self._file = os.fdopen(os.memfd_create("numapin-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb")
        self._end = 0
        self.shortfalls = tuple(_set_policy(self._file.fileno(), nodes)) if nodes else ()

    def put(self, data: bytes | memoryview | array[int] | Sealed, *, is_aligned: bool = False) -> int:
        """Append bytes and return their position. Raises OSError if memory runs out."""
        view = memoryview(data).cast("B")
        padding = -self._end % _ALIGNMENT if is_aligned else 0
        start, self._end = self._end + padding, self._end + padding + len(view)
        self._file.write(bytes(padding))
        self._file.write(view)
        return start

    def finish(self) -> Sealed:
        """Seal the file and map it. The kernel refuses while it moves a page, or another process has just forked."""
        self._file.flush()
        until_s = time.monotonic() + 2
        while True:
            try:
                fcntl.fcntl(self._file.fileno(), fcntl.F_ADD_SEALS, _SEALS)
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > until_s:
                    raise
                time.sleep(0.01)
            else:
                return Sealed(os.dup(self._file.fileno()))

    def close(self) -> None:
        """Give up the file; what has mapped it keeps it."""
        self._file.close()


# --- nodes -----------------------------------------------------------------------------------------------------------


def usable_nodes() -> CpuSet:
    """Return the nodes whose memory this process may use and that have CPUs: GPU memory and CXL nodes have none."""
    tree = Tree("")
    nodes = tree.numbers(f"{NODES}/has_cpu") or CpuSet()
    for limit in (tree.numbers(f"{NODES}/has_memory"), tree.numbers("proc/self/status", line=_MEMS)):
        nodes = nodes if limit is None else nodes & limit
    return nodes


def _set_policy(fd: int, nodes: CpuSet) -> Iterator[str]:
    """Set the nodes of all pages that an empty file can get; yield what is refused.

    The policy of a shared mapping belongs to the file, and outlives the mapping. A node that is full is passed over.
    """
    mode = numa.MPOL_PREFERRED if len(nodes) == 1 else numa.MPOL_INTERLEAVE
    num_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # takes no memory before it is written
    for kind, share in ((resource.RLIMIT_AS, 2), (resource.RLIMIT_FSIZE, 1)):  # the process is mapped already
        limit, _hard = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            num_bytes = min(num_bytes, limit // share // mmap.PAGESIZE * mmap.PAGESIZE)
    try:
        os.ftruncate(fd, num_bytes)
        # Without access: under mlockall, memory that can be read or written would be taken at once.
        address = call("mmap", None, num_bytes, 0, mmap.MAP_SHARED, fd, 0)
        try:
            numa.bind_pages(address, num_bytes, mode, nodes)
        finally:
            call("munmap", address, num_bytes)
    except (OSError, LibnumaError) as error:
        remedy = REMEDIES.get(error.errno or 0, "see: ulimit -a") if isinstance(error, OSError) else ""
        yield f"pages cannot be placed on nodes {nodes} ({error}): they go where they are first touched; {remedy}"
    finally:
        os.ftruncate(fd, 0)


def shortfalls_of(sealed: Sealed, nodes: CpuSet) -> tuple[str, ...]:
    """Ask the kernel where all pages are; return how that differs from evenly spread over the nodes."""
    bytes(memoryview(sealed)[:: mmap.PAGESIZE])  # reads, and thereby maps, every page
    placed = pages.check(sealed.address, len(sealed), nodes=nodes, num_machine_nodes=2)
    found = placed.pages or {}
    fair = sum(found.values()) / len(nodes)
    tolerance = 0.1 * fair + 64  # pages
    is_even = all(abs(found.get(node, 0) - fair) <= tolerance for node in nodes)
    if placed.shortfalls or is_even:
        return placed.shortfalls
    seen = ", ".join(f"{count} on node {node}" for node, count in found.items())
    return (f"the pages are not spread evenly over nodes {nodes}: {seen}; see: numactl -H",)
