"""Kernel calls that py-libnuma and Python lack, typed and checked. Edge.

Comes in: plain numbers. Goes out: plain numbers, or OSError with the kernel's errno. Together with
topology/libnuma.py and cuda.py the only module that knows ctypes. Works on kernels from 4.18 on; what a kernel lacks
comes back as its own errno.

The functions are libnuma's, which wraps the system calls of set_mempolicy(2), get_mempolicy(2), mbind(2) and
move_pages(2) one to one, and libc's; both set errno; and that of stores.c, which cannot fail. ctypes lets the GIL go
while they run.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from numapin import cpulist
from numapin.errors import LibnumaError, LibraryError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Sequence

INSTALL_LIBNUMA: Final = (
    "install it with: apt-get install libnuma1 (Debian, Ubuntu) or: dnf install numactl-libs (Fedora, RHEL)"
)

INSTALL_STORES: Final = "install a C compiler (apt-get install gcc libc6-dev), then numapin again"

MPOL_DEFAULT: Final = 0
MPOL_PREFERRED: Final = 1
MPOL_BIND: Final = 2
MPOL_INTERLEAVE: Final = 3
MPOL_LOCAL: Final = 4
MPOL_PREFERRED_MANY: Final = 5  # since Linux 5.15; EINVAL before

PR_SET_PDEATHSIG: Final = 1
MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14; EINVAL before
FALLOC_FL_KEEP_SIZE: Final = 1
FALLOC_FL_PUNCH_HOLE: Final = 2

_MODE_FLAGS: Final = 0xE000  # MPOL_F_STATIC_NODES, _RELATIVE_NODES, _NUMA_BALANCING, or'ed into the mode
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)
_MAX_NODES: Final = 1024  # the largest MAX_NUMNODES of any Linux build; get_mempolicy wants room for all of them
_Mask = ctypes.c_ulong * (_MAX_NODES // _WORD_BITS)

_LIBNUMA: Final = "libnuma.so.1"
_LIBC: Final = None  # what the process itself is linked with
_STORES: Final = os.path.join(os.path.dirname(__file__), "libstores.so")  # stores.c, where it could be built
_PAGES_PER_CALL: Final = 1 << 16  # 256 MiB of 4 KiB pages; between calls other threads get the GIL

# Library, result type and argument types by name; each returns a negative number on error, errno set.
_SIGNATURES: Final[dict[str, tuple[str | None, type, tuple[Any, ...]]]] = {
    "set_mempolicy": (_LIBNUMA, ctypes.c_long, (ctypes.c_int, ctypes.POINTER(ctypes.c_ulong), ctypes.c_ulong)),
    "get_mempolicy": (
        _LIBNUMA,
        ctypes.c_long,
        (
            ctypes.POINTER(ctypes.c_int),
            ctypes.POINTER(ctypes.c_ulong),
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_int,
        ),
    ),
    "mbind": (
        _LIBNUMA,
        ctypes.c_long,
        (
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_ulong),
            ctypes.c_ulong,
            ctypes.c_uint,
        ),
    ),
    "move_pages": (
        _LIBNUMA,
        ctypes.c_long,
        (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    ),
    "madvise": (_LIBC, ctypes.c_int, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)),
    "prctl": (_LIBC, ctypes.c_int, (ctypes.c_int, *(ctypes.c_ulong,) * 4)),
    "fallocate": (_LIBC, ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
    "numapin_stack_past_caches": (
        _STORES,
        ctypes.c_int,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
    ),
    "read": (_LIBC, ctypes.c_ssize_t, (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)),
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
    _call("set_mempolicy", mode, *_mask(nodes))


def get_memory_policy() -> tuple[int, frozenset[int]]:
    """Return this thread's memory policy: an MPOL constant (flags masked off) and its nodes. Raises OSError."""
    mode, mask = ctypes.c_int(), _Mask()
    _call("get_mempolicy", ctypes.byref(mode), mask, _MAX_NODES, None, 0)
    return mode.value & ~_MODE_FLAGS, cpulist.from_words(mask, word_bits=_WORD_BITS)


def end_with_parent(number: int) -> None:
    """Have this process get a signal when the thread that started it ends, however it ends; exec keeps that.

    What this process starts does not inherit it. Raises OSError: EINVAL.
    """
    _call("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_without_destructors() -> None:
    """Have this process, when it ends by exit(3), run no handler of C or C++ that was registered before.

    What a C stream still holds is lost. A C library without on_exit(3), as musl is, runs them all.
    """
    libc = ctypes.CDLL(_LIBC)
    with suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)


def nodes_of_pages(addresses: Sequence[int], *, pid: int = 0) -> tuple[int, ...]:
    """Return the node of each page of process `pid` (0 is this one), or a negative errno (-ENOENT: not touched yet).

    `addresses` may lie anywhere in their pages. Moves nothing: move_pages(2) without nodes only asks.
    Raises OSError: EPERM (seccomp, or another user's process), ESRCH.
    """
    return tuple(_nodes_of_pages(addresses, pid))


def nodes_of_range(address: int, num_bytes: int) -> dict[int | None, int]:
    """Return how many pages of this process's memory are on each node; None counts those that were never touched.

    Pages that the range covers in part count whole. 1 GiB of 4 KiB pages takes about 0.1 s, mostly without the GIL.
    Raises OSError: EPERM (seccomp, as in Docker's default profile), ENOSYS.
    """
    page = os.sysconf("SC_PAGESIZE")
    starts = range(address - address % page, address + num_bytes, page)
    counts: Counter[int] = Counter()
    for at in range(0, len(starts), _PAGES_PER_CALL):
        counts.update(_nodes_of_pages(starts[at : at + _PAGES_PER_CALL], 0))
    untouched = sum(count for status, count in counts.items() if status < 0)
    pages: dict[int | None, int] = {node: count for node, count in sorted(counts.items()) if node >= 0}
    return pages | {None: untouched} if untouched else pages


def bind_pages(address: int, num_bytes: int, mode: int, nodes: Iterable[int]) -> None:
    """Set the memory policy of a range of pages that are still to be touched; those that are there stay where they are.

    On a shared mapping the policy is the object's, for every process that maps it. `address` is page aligned.
    Raises OSError: EPERM (seccomp), EINVAL (unknown mode or node, or not aligned), EFAULT (no such memory), ENOSYS.
    """
    _call("mbind", address, num_bytes, mode, *_mask(nodes), 0)


def populate(address: int, num_bytes: int) -> None:
    """Make every page of the range be there, as a write to it would; what is in them stays. `address` is page aligned.

    Without the GIL, unlike mmap.madvise. Raises OSError where a write would raise SIGBUS or worse: EFAULT or ENOMEM;
    EINVAL before Linux 5.14.
    """
    _call("madvise", address, num_bytes, MADV_POPULATE_WRITE)


Window = ctypes.Array[ctypes.c_ubyte]
"""A range of memory: something that memoryviews are made of, and that lives as long as anything over it."""


def map_shared(fd: int, num_bytes: int, *, offset: int = 0) -> mmap.mmap:
    """Map a range of a file, shared and writable, in huge pages where the machine lets shared memory have them.

    It holds a descriptor of its own, and is unmapped when the last thing made of it is gone. Raises OSError.
    """
    import mmap  # here, because each rank imports this module before its own program starts

    mapped = mmap.mmap(fd, num_bytes, offset=offset)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def window(address: int, num_bytes: int, *, owner: object) -> Window:
    """Return a range of memory as an object of its own, whose end a weakref can tell; it keeps `owner`, who unmaps.

    A slice of a memoryview is no such thing: it keeps what the memoryview was made of, and not the memoryview.
    """
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined] # ctypes objects take any attribute
    return memory


def view_of(memory: Window) -> memoryview:
    """Return a view of bytes, which keeps the memory, as all that is made of it does."""
    return memoryview(memory).cast("B")


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Return where a mapping, or a writable view, begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def zero(address: int, num_bytes: int) -> None:
    """Fill a range with zeros, read from /dev/zero: where there is no memory that is OSError EFAULT and not SIGBUS."""
    fd, end = os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC), address + num_bytes
    try:
        while address < end:  # a signal, and 2 GiB, end a read early
            address += _call("read", fd, address, end - address)
    finally:
        os.close(fd)


@cache
def can_pass_caches() -> bool:
    """Return whether `stack_past_caches` is there: on x86-64, where a C compiler was when numapin was installed."""
    try:
        _function("numapin_stack_past_caches")
    except LibraryError:
        return False
    return True


def stack_past_caches(target: int, sources: Iterable[int], num_bytes: int) -> None:
    """Copy blocks of `num_bytes` each to `target`, one behind the other, with stores that leave the caches alone.

    For memory that a GPU reads next and no CPU: the copy makes a third less traffic on the memory bus. Raises
    LibraryError where `can_pass_caches` says no.
    """
    addresses = array("Q", sources)
    _call("numapin_stack_past_caches", target, addresses.buffer_info()[0], len(addresses), num_bytes)


def punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Give the pages of a part of a memfd back; it reads as zeros then, and the file keeps its size.

    Raises OSError: EBADF, EINVAL, EOPNOTSUPP (a file system without holes), EPERM (sealed).
    """
    _call("fallocate", fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, num_bytes)


def _nodes_of_pages(addresses: Sequence[int], pid: int) -> array[int]:
    pages, status = array("Q", addresses), array("i", bytes(4 * len(addresses)))
    _call("move_pages", pid, len(pages), pages.buffer_info()[0], None, status.buffer_info()[0], 0)
    return status


def _mask(nodes: Iterable[int]) -> tuple[ctypes.Array[ctypes.c_ulong] | None, int]:
    """Return the mask of a set of nodes, and its length as the kernel wants it told. No nodes: no mask."""
    members = sorted(nodes)
    if not members:
        return None, 0
    if not 0 <= members[0] <= members[-1] < _MAX_NODES:
        raise OSError(errno.EINVAL, f"no such NUMA node: {members}")
    mask = _Mask()
    for node in members:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return mask, _MAX_NODES + 1  # the kernel reads one bit less than it is told (mm/mempolicy.c, get_nodes)


def _call(name: str, *arguments: object) -> int:
    result: int = _function(name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


@cache
def _function(name: str) -> Any:  # noqa: ANN401 - a ctypes function
    library, result, arguments = _SIGNATURES[name]
    try:
        function = getattr(ctypes.CDLL(library, use_errno=True), name)
    except (OSError, AttributeError) as error:
        if library == _STORES:
            raise LibraryError(f"libstores.so cannot be used: {error}", INSTALL_STORES) from None
        raise LibnumaError(f"libnuma cannot be used: {error}", INSTALL_LIBNUMA) from None
    function.argtypes, function.restype = arguments, result
    return function
