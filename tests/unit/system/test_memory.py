"""Memory on this machine's own kernel: nodes of pages, policies, placement, moves. See tests/vm."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numapin.errors import LibnumaError
from tests.recorded.screens import compare
from tests.unit.system import seam
from tests.unit.system.seam import (
    CpuSet,
    Ledger,
    Moved,
    Stay,
    calls,
    find_pages,
    move_pages,
    numa,
    pages,
    place,
    read_numa_maps,
)
from tests.unit.system.seam import memory as memory_calls

PAGE: Final = mmap.PAGESIZE
CPUS: Final = CpuSet(os.sched_getaffinity(0))
BOTH: Final = CpuSet({1, 2})
address_of = memory_calls.address_of


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 8 * PAGE)


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[mmap.mmap]:
    """Map four pages of a file that then loses the last two: to write there raises SIGBUS."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4 * PAGE)
        memory = mmap.mmap(file.fileno(), 4 * PAGE)
        file.truncate(2 * PAGE)
        yield memory


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fail(*_args: object) -> None:
        raise OSError(number, f"{call}: {os.strerror(number)}")

    monkeypatch.setattr(numa if hasattr(numa, call) else memory_calls, call, fail)


# --- calls -----------------------------------------------------------------------------------------------------------


def test_touched_and_untouched_pages(memory: mmap.mmap) -> None:
    """A written page is on a node; None counts the untouched pages; each page that a range covers in part counts."""
    memory[0] = memory[3 * PAGE] = 1
    pages = numa.nodes_of_range(address_of(memory), len(memory))
    assert pages.pop(None) == 6
    assert sum(pages.values()) == 2
    assert all(node is not None and node >= 0 for node in pages)
    untouched = address_of(memory) + 4 * PAGE
    for start, size, number in ((0, 1, 1), (PAGE - 1, 2, 2), (1, PAGE, 2), (PAGE, PAGE, 1)):
        assert numa.nodes_of_range(untouched + start, size) == {None: number}


def test_many_pages_are_counted_in_pieces_and_fast() -> None:
    """1 GiB and one page take more than one call, and a moment of CPU time."""
    memory = mmap.mmap(-1, (1 << 30) + PAGE)
    start = time.thread_time()
    assert numa.nodes_of_range(address_of(memory), len(memory)) == {None: len(memory) // PAGE}
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(("mode", "word"), [(numa.MPOL_PREFERRED, "prefer"), (numa.MPOL_BIND, "bind")])
def test_the_kernel_names_the_policy(memory: mmap.mmap, mode: int, word: str) -> None:
    """numa_maps confirms the policy; the thread's own policy does not change."""
    before = numa.get_memory_policy()
    numa.bind_pages(address_of(memory), len(memory), mode, [0])
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    assert next(words[1] for words in lines if int(words[0], 16) == address_of(memory)).startswith(word)
    assert numa.get_memory_policy() == before


def test_what_the_kernel_refuses(memory: mmap.mmap) -> None:
    """A node that does not exist, and an unaligned range, are refused."""
    for address, node in ((address_of(memory), 1000), (address_of(memory) + 1, 0)):
        with pytest.raises(OSError, match="mbind: Invalid argument"):
            numa.bind_pages(address, PAGE, numa.MPOL_PREFERRED, [node])


@pytest.mark.parametrize(
    ("nodes", "first", "refused", "policy", "only"),
    [
        (BOTH, None, None, (numa.MPOL_PREFERRED_MANY, {1, 2}), None),
        (BOTH, 2, errno.EINVAL, (numa.MPOL_PREFERRED, {2}), 2),
        (BOTH, 7, errno.EINVAL, (numa.MPOL_PREFERRED, {1}), 1),
        (CpuSet({3}), None, errno.EINVAL, (numa.MPOL_PREFERRED, {3}), None),
        (BOTH, None, errno.EPERM, None, None),
    ],
)
def test_preferred_nodes(
    nodes: CpuSet, first: int | None, refused: int | None, policy: tuple[int, set[int]] | None, only: int | None
) -> None:
    """All nodes are preferred if the kernel can (Linux 5.15), else the first if it is one of them, else the lowest.

    After another error than that of a mode that the kernel does not know, nothing else is tried.
    """
    policies: list[tuple[int, set[int]]] = []

    def set_policy(mode: int, nodes: Iterable[int]) -> None:
        if refused and mode == numa.MPOL_PREFERRED_MANY:
            raise OSError(refused, "refused")
        policies.append((mode, set(nodes)))

    with nullcontext() if policy else pytest.raises(PermissionError, match="refused"):
        assert numa.prefer(set_policy, nodes, first=first) == only
    assert policies == ([policy] if policy else [])


def test_every_page_is_there_and_keeps_its_bytes(memory: mmap.mmap) -> None:
    """Every page has a node after `populate`, and keeps its contents; `zero` fills exactly its range."""
    memory[5] = 42
    memory_calls.populate(address_of(memory), len(memory))
    assert None not in numa.nodes_of_range(address_of(memory), len(memory))
    assert memory[5] == 42
    memory[:] = b"\xff" * len(memory)
    memory_calls.zero(address_of(memory) + 1, 2 * PAGE)
    assert memory[: 2 * PAGE + 2] == b"\xff" + b"\0" * 2 * PAGE + b"\xff"


def test_no_memory_is_an_error_and_no_signal(cut_off: mmap.mmap) -> None:
    """Beyond the end of a file it is an error, where a write would raise SIGBUS; `zero` fills what is there."""
    with pytest.raises(OSError, match="madvise: Bad address") as caught:
        memory_calls.populate(address_of(cut_off), len(cut_off))
    assert caught.value.errno == errno.EFAULT
    cut_off[PAGE] = 1
    with pytest.raises(OSError, match="read: Bad address"):
        memory_calls.zero(address_of(cut_off), len(cut_off))
    assert cut_off[PAGE] == 0


def test_other_threads_run_meanwhile() -> None:
    """Unlike mmap.madvise, `populate` releases the GIL: another thread runs while memory is faulted in.

    No thread is made to give the GIL away here, so the other one can run only then; a busy machine needs some tries.
    """
    memory = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin, ran, interval = threading.Event(), threading.Event(), sys.getswitchinterval()

    def run() -> None:
        begin.wait()
        ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(3600)
    try:
        begin.set()
        for _ in range(500):
            memory_calls.populate(address_of(memory), len(memory))
            if has_run := ran.is_set():
                break
            memory.madvise(mmap.MADV_DONTNEED)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert has_run


# --- placement -------------------------------------------------------------------------------------------------------


def _refusing(**numbers: int) -> Callable[[pytest.MonkeyPatch], None]:
    def arrange(patch: pytest.MonkeyPatch) -> None:
        for call, number in numbers.items():
            refuse(patch, call, number)

    return arrange


def _without_libnuma(patch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise LibnumaError("libnuma cannot be used: gone", calls.INSTALL_LIBNUMA)

    for call in ("bind_pages", "nodes_of_range"):
        patch.setattr(numa, call, fail)


def _unknown(patch: pytest.MonkeyPatch) -> None:
    refuse(patch, "nodes_of_range", errno.EPERM)
    patch.setattr(seam.pages, "read_numa_maps", lambda *_args, **_rest: None)


PLACED: Final[dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]]] = {
    "all pages are on the node": (_refusing(), {}),
    "before Linux 5.14 they are touched by zeroing": (_refusing(populate=errno.EINVAL), {}),
    "one node costs no call: no policy is set, and the kernel is not asked": (
        _refusing(bind_pages=errno.EPERM, nodes_of_range=errno.EPERM),
        {"num_machine_nodes": 1},
    ),
    "no nodes leave it to the policy": (_refusing(), {"nodes": CpuSet()}),
    "a node that is not there is refused, and the pages are elsewhere": (_refusing(), {"nodes": CpuSet({1000})}),
    "a full node, or a kernel that ignores mbind, has pages in part elsewhere": (
        lambda patch: patch.setattr(numa, "nodes_of_range", lambda *_args: {0: 6, 1: 2}),
        {},
    ),
    "CPUs that are not there are reported as well": (_refusing(bind_pages=errno.ENOSYS), {"cpus": CpuSet({9999})}),
    "without libnuma memory is not placed": (_without_libnuma, {}),
    "the location of the pages is unverified, without shares": (_unknown, {}),
}


def test_each_placement_is_the_recorded_one() -> None:
    """Pages and shortfalls are the recorded ones; every page is touched, and the caller keeps its CPUs and policy."""
    text = ""
    before = os.sched_getaffinity(0), numa.get_memory_policy()
    for sentence, (arrange, more) in PLACED.items():
        memory = mmap.mmap(-1, 8 * PAGE)
        usual: dict[str, Any] = {"nodes": CpuSet({0}), "cpus": CPUS, "num_machine_nodes": 2}
        with pytest.MonkeyPatch.context() as patch:
            arrange(patch)
            found = place(address_of(memory), len(memory), **{**usual, **more})
        assert numa.nodes_of_range(address_of(memory), len(memory)) == {0: 8}
        assert (os.sched_getaffinity(0), numa.get_memory_policy()) == before
        text += "\n".join((f"=== {sentence}", f"pages {found.pages}", *found.shortfalls, ""))
    compare(text, str(Path(__file__).with_name("placed.txt")))


@pytest.mark.parametrize("refused", ["", "populate"])
def test_no_memory_to_place(cut_off: mmap.mmap, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """It is ENOMEM with the size instead of SIGBUS, on old kernels too."""
    if refused:
        refuse(monkeypatch, refused, errno.EINVAL)
    with pytest.raises(OSError, match=f"no {4 * PAGE} bytes of memory") as caught:
        place(address_of(cut_off), len(cut_off), nodes=CpuSet({0}), cpus=CPUS, num_machine_nodes=2)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize(("refused", "within"), [(errno.EPERM, CpuSet()), (0, CpuSet({0, 1}))])
def test_a_thread_on_the_cpus_touches(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, refused: int, within: CpuSet
) -> None:
    """It does so where mbind is refused, and beside GPU memory; the caller is not bound."""
    policies: list[tuple[int, list[int]]] = []
    touched_on: list[set[int]] = []
    populate = memory_calls.populate

    def bind_pages(_address: int, _num_bytes: int, mode: int, nodes: Any) -> None:
        policies.append((mode, sorted(nodes)))
        if refused:
            raise OSError(refused, "mbind")

    def watched(address: int, num_bytes: int) -> None:
        touched_on.append(os.sched_getaffinity(0))
        populate(address, num_bytes)

    monkeypatch.setattr(numa, "bind_pages", bind_pages)
    monkeypatch.setattr(memory_calls, "populate", watched)
    own = CpuSet({max(CPUS)})
    found = place(address_of(memory), len(memory), nodes=CpuSet({0}), cpus=own, num_machine_nodes=4, within=within)
    assert policies == [(numa.MPOL_BIND, [0, 1]) if within else (numa.MPOL_PREFERRED, [0])]
    assert touched_on == [set(own)]
    assert CpuSet(os.sched_getaffinity(0)) == CPUS
    assert found.pages == {0: 8}
    assert ["--cap-add SYS_NICE" in text for text in found.shortfalls] == ([True] if refused else [])


# --- numa_maps -------------------------------------------------------------------------------------------------------

LINES: Final = (
    "55a0000 default file=/usr/bin/a\\040b mapped=2 N0=2 kernelpagesize_kB=4\n"
    "7f0000000000 prefer:1 file=/memfd:slot\\040(deleted) dirty=8 active=0 N0=2 N1=6 kernelpagesize_kB=4\n"
    "7f1000000000 bind:1 file=/anon_hugepage huge dirty=2 N1=2 kernelpagesize_kB=2048\n"
    "7f2000000000 default\n"
    "7f3000000000 best=5000 N0=2 kernelpagesize_kB=4\n"
)


@pytest.mark.parametrize(
    ("address", "num_bytes", "pages"),
    [
        (0x7F0000000000, 8 * 4096, {0: 2, 1: 6}),
        (0x7F0000000000, 8 * 4096 - 1, {0: 2, 1: 6}),
        (0x7F0000000000, 10 * 4096, {0: 2, 1: 6, None: 2}),
        (0x7F0000000000, 4 * 4096, None),  # the mapping holds more than what is asked about
        (0x7F1000000000, 4 << 20, {1: 1024}),  # huge pages count as one there
        (0x7F2000000000, 4096, None),  # nothing touched
        (0x7F3000000000, 8192, None),  # a policy of a kernel that we do not know
        (0x55A0000, 2 * 4096, None),  # the kernel writes eight digits at least
        (0x7F0000001000, 4096, None),  # begins inside a mapping
        (0x7F00000, 4096, None),  # only the beginning of an address
    ],
)
@pytest.mark.skipif(PAGE != 4096, reason="the lines are of a kernel with pages of 4 KiB")
def test_lines_of_numa_maps(tmp_path: Path, address: int, num_bytes: int, pages: dict[int | None, int] | None) -> None:
    """Pages of the base size per node; None if the mapping is not the range, or without the file."""
    path = tmp_path / "numa_maps"
    assert read_numa_maps(address, num_bytes, numa_maps=path) is None
    path.write_text(LINES)
    assert read_numa_maps(address, num_bytes, numa_maps=path) == pages


def test_numa_maps_agrees_with_move_pages(memory: mmap.mmap, tmp_path: Path) -> None:
    """Both have the same of one mapping; without the file the kernel is asked."""
    numa.bind_pages(address_of(memory), len(memory), numa.MPOL_PREFERRED, [0])  # a mapping of its own
    memory_calls.populate(address_of(memory), 5 * PAGE)
    found = [read_numa_maps(address_of(memory), len(memory)), numa.nodes_of_range(address_of(memory), len(memory))]
    assert [*found, find_pages(address_of(memory), len(memory), numa_maps=tmp_path / "missing")] == [
        {0: 5, None: 3}
    ] * 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_ledger_counts_in_its_own_process() -> None:
    """Bytes are added and subtracted; a forked child starts at zero and counts for itself."""
    ledger = Ledger()
    ledger.add(5)
    ledger.add(7)
    ledger.remove(5)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        ledger.add(1)
        os.write(writer, str(ledger.total).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert (os.read(reader, 9), ledger.total) == (b"1", 7)
    os.close(reader)
    os.close(writer)


# --- moving pages, against a model of the kernel's move_pages (mm/migrate.c) -----------------------------------------


HERE, THERE = 0, 1
WITHIN = CpuSet({THERE})
MOVABLE, SHARED, LOCKED, UNTOUCHED = "msl-"


class _Kernel:
    """Pages of 4 KiB from address 0, each with a letter for its kind; `fails` ends every call that moves."""

    def __init__(self, kinds: str, *, fails: int = 0) -> None:
        self.kinds, self.fails = kinds, fails
        self.nodes = [-errno.ENOENT if kind == UNTOUCHED else HERE for kind in kinds]
        self.num_calls = 0

    def nodes_of_pages(self, addresses: list[int], *, pid: int) -> tuple[int, ...]:
        del pid
        return tuple(self.nodes[address >> 12] for address in addresses)

    def call(self, name: str, *arguments: int) -> int:
        """Do what do_pages_move does: queue pages, and flush the queue before a page that cannot be queued."""
        assert name == "move_pages"
        _, count, pages, nodes, statuses, flags = arguments
        assert (flags, set((ctypes.c_int * count).from_address(nodes))) == (2, {THERE})
        self.num_calls += 1
        if self.fails:
            raise OSError(self.fails, "move_pages")
        status, start = (ctypes.c_int * count).from_address(statuses), 0
        numbers = [address >> 12 for address in (ctypes.c_ulong * count).from_address(pages)]
        for at, number in enumerate(numbers):
            if self.nodes[number] == HERE and self.kinds[number] != SHARED:
                continue
            status[at] = -errno.EACCES if self.nodes[number] == HERE else self.nodes[number]
            failed = self._flush(numbers, status, start, at)
            if failed:
                return failed + count - at - 1
            start = at + 1
        return self._flush(numbers, status, start, count)

    def _flush(self, numbers: list[int], status: ctypes.Array[ctypes.c_int], start: int, end: int) -> int:
        """Move a group; return how many of it did not move. Only if all did, their statuses are written."""
        failed = [number for number in numbers[start:end] if self.kinds[number] == LOCKED]
        for number in set(numbers[start:end]) - set(failed):
            self.nodes[number] = THERE
        if not failed:
            status[start:end] = [THERE] * (end - start)
        return len(failed)


def moved(kernel: _Kernel) -> Moved:
    """Move all pages of a model of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "call", kernel.call)
        patch.setattr(pages, "nodes_of_pages", kernel.nodes_of_pages)
        return move_pages(1, range(0, len(kernel.kinds) << 12, 4096), THERE, within=WITHIN)


@given(st.text(alphabet="msl-", min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_everything_that_can_move_moves(kinds: str) -> None:
    """Each movable page arrives, whatever lies between, up to where a huge page's range counts as locked."""
    kernel = _Kernel(kinds)
    num_moved, stays = moved(kernel)
    assert num_moved == kernel.nodes.count(THERE)
    assert num_moved + stays.total() == len(kinds) - kinds.count(UNTOUCHED)
    if LOCKED not in kinds:
        assert (num_moved, stays[Stay.SHARED]) == (kinds.count(MOVABLE), kinds.count(SHARED))
    assert set(stays) <= {Stay.SHARED, Stay.LOCKED}


@pytest.mark.parametrize(
    ("kinds", "fails", "expected", "num_calls"),
    [
        # A call ends at a locked page's group; the pages behind it are tried by the next one.
        (MOVABLE * 8 + LOCKED * 4 + SHARED + MOVABLE * 8 + UNTOUCHED, 0, (16, {Stay.LOCKED: 4, Stay.SHARED: 1}), 2),
        (UNTOUCHED * 4, 0, (0, {}), 0),
        # An error of the whole call is the reason of all pages, and holds for all further ones.
        (MOVABLE * 4, errno.EPERM, (0, {Stay.REFUSED: 4}), 1),
        (MOVABLE * 4, errno.EACCES, (0, {Stay.FORBIDDEN: 4}), 1),
        (MOVABLE * 4, errno.ENOMEM, (0, {Stay.FULL: 4}), 1),
    ],
)
def test_calls_that_move(kinds: str, fails: int, expected: tuple[int, dict[Stay, int]], num_calls: int) -> None:
    """No more calls are made than necessary; untouched memory, and pages that are there, need none.

    A target that is not one of the planned nodes makes no sense.
    """
    kernel = _Kernel(kinds, fails=fails)
    assert moved(kernel) == expected
    assert kernel.num_calls == num_calls
    assert not fails or set(expected[1]) <= pages.FINAL
    with pytest.raises(OSError, match="node 0 is not one of 1"):
        move_pages(1, [0], HERE, within=WITHIN)
