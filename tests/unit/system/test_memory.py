"""Memory on this machine's own kernel: nodes of pages, policies, placement, moves. See tests/vm."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numapin.errors import LibnumaError
from tests.recorded.screens import compare
from tests.unit.system import seam
from tests.unit.system.seam import (
    CpuSet,
    Ledger,
    Placement,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


PAGE: Final = mmap.PAGESIZE
CPUS: Final = CpuSet(os.sched_getaffinity(0))
BOTH: Final = CpuSet({1, 2})
REFUSE_POLICY: Final = Path(__file__).parents[2] / "vm" / "refuse_policy.py"
address_of = memory_calls.address_of


@pytest.fixture
def memory() -> mmap.mmap:
    """Map eight fresh pages."""
    return mmap.mmap(-1, 8 * PAGE)


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[mmap.mmap]:
    """Map four pages of a file that then loses the last two: to write there raises SIGBUS."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4 * PAGE)
        memory = mmap.mmap(file.fileno(), 4 * PAGE)
        file.truncate(2 * PAGE)
        yield memory


def placed(memory: mmap.mmap, *, node: int = 0, cpus: CpuSet = CPUS, num_machine_nodes: int = 2) -> Placement:
    """Place a mapping, by default as on a machine with two nodes."""
    return place(address_of(memory), len(memory), nodes=CpuSet({node}), cpus=cpus, num_machine_nodes=num_machine_nodes)


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Make one of our kernel calls fail."""

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
    ("nodes", "first", "is_old", "policy", "only"),
    [
        (BOTH, None, False, (numa.MPOL_PREFERRED_MANY, {1, 2}), None),
        (BOTH, None, True, (numa.MPOL_PREFERRED, {1}), 1),
        (BOTH, 2, True, (numa.MPOL_PREFERRED, {2}), 2),
        (BOTH, 7, True, (numa.MPOL_PREFERRED, {1}), 1),
        (CpuSet({3}), None, False, (numa.MPOL_PREFERRED, {3}), None),
        (CpuSet({3}), None, True, (numa.MPOL_PREFERRED, {3}), None),
    ],
)
def test_preferred_nodes(
    *, nodes: CpuSet, first: int | None, is_old: bool, policy: tuple[int, set[int]], only: int | None
) -> None:
    """All nodes are preferred if the kernel can (Linux 5.15), else the first if it is one of them, else the lowest."""
    policies: list[tuple[int, set[int]]] = []

    def set_policy(mode: int, nodes: Iterable[int]) -> None:
        if is_old and mode == numa.MPOL_PREFERRED_MANY:
            raise OSError(errno.EINVAL, "no such mode")
        policies.append((mode, set(nodes)))

    assert numa.prefer(set_policy, nodes, first=first) == only
    assert policies == [policy]


def test_another_error_is_not_tried_again_with_one_node() -> None:
    """Only a mode that the kernel does not know is replaced by another."""

    def refuse(_mode: int, _nodes: Iterable[int]) -> None:
        raise OSError(errno.EPERM, "forbidden")

    with pytest.raises(PermissionError, match="forbidden"):
        numa.prefer(refuse, BOTH)


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
    ticks, done, interval = [0], threading.Event(), sys.getswitchinterval()

    def tick() -> None:
        while not done.wait(0.0005):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(3600)
    try:
        during = 0
        for _ in range(500):
            memory = mmap.mmap(-1, 128 << 20)
            before = ticks[0]
            memory_calls.populate(address_of(memory), len(memory))
            during = ticks[0] - before  # read before this thread gives the GIL away again
            if during:
                break
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert during > 0


@pytest.mark.parametrize(("then", "output"), [("", "destroyed"), ("memory.keep_forever(thing)", "")])
def test_what_is_kept_forever_outlives_python(then: str, output: str) -> None:
    """An object that is kept is not destroyed when Python clears the modules, unlike others."""
    code = (
        "import os\n"
        "from numapin.system import memory\n"
        "class Loud:\n"
        "    def __del__(self, write=os.write): write(1, b'destroyed')\n"
        f"thing = Loud()\n{then}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == output


# --- placement -------------------------------------------------------------------------------------------------------


def _refusing(**numbers: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Make these kernel calls fail."""

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
        placed(cut_off)
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


def test_seccomp() -> None:
    """Under Docker's real profile mbind and move_pages are refused, and numa_maps has the pages."""
    code = """if True:
        import mmap, os
        from numapin.base.cpu_set import CpuSet
        from numapin.system import memory, numa, pages
        for call in (lambda: numa.bind_pages(4096, 4096, 1, [0]), lambda: numa.nodes_of_range(4096, 4096)):
            try:
                call()
            except PermissionError as error:
                print(error.strerror)
        block, cpus = mmap.mmap(-1, 8 * 4096), CpuSet(os.sched_getaffinity(0))
        at = memory.address_of(block)
        found = pages.place(at, 8 * 4096, nodes=CpuSet({0}), cpus=cpus, num_machine_nodes=2)
        print(found.pages, len(found.shortfalls), "SYS_NICE" in found.shortfalls[0])
    """
    command = [sys.executable, str(REFUSE_POLICY), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused = [f"{name}: Operation not permitted" for name in ("mbind", "move_pages")]
    assert done.stdout.splitlines() == [*refused, "{0: 8} 1 True"]


def test_the_file_of_numa_maps_may_be_missing(memory: mmap.mmap, tmp_path: Path) -> None:
    """Then the kernel is asked."""
    memory_calls.populate(address_of(memory), len(memory))
    assert find_pages(address_of(memory), len(memory), numa_maps=tmp_path / "missing") == {0: 8}


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


def test_numa_maps_agrees_with_move_pages(memory: mmap.mmap) -> None:
    """Both have the same of one mapping."""
    numa.bind_pages(address_of(memory), len(memory), numa.MPOL_PREFERRED, [0])  # a mapping of its own
    memory_calls.populate(address_of(memory), 5 * PAGE)
    pages = read_numa_maps(address_of(memory), len(memory))
    assert pages == numa.nodes_of_range(address_of(memory), len(memory)) == {0: 5, None: 3}


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


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> object:
    """Give a function that installs a model of the kernel."""

    def install(kinds: str, *, fails: int = 0) -> _Kernel:
        made = _Kernel(kinds, fails=fails)
        monkeypatch.setattr(pages, "call", made.call)
        monkeypatch.setattr(pages, "nodes_of_pages", made.nodes_of_pages)
        return made

    return install


@given(st.text(alphabet="msl-", min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_everything_that_can_move_moves(kinds: str) -> None:
    """Each movable page arrives, whatever lies between, up to where a huge page's range counts as locked."""
    with pytest.MonkeyPatch.context() as patch:
        made = _Kernel(kinds)
        patch.setattr(pages, "call", made.call)
        patch.setattr(pages, "nodes_of_pages", made.nodes_of_pages)
        moved = move_pages(1, range(0, len(kinds) << 12, 4096), THERE, within=WITHIN)
    assert moved.num_moved == made.nodes.count(THERE)
    assert moved.num_moved + moved.stays.total() == len(kinds) - kinds.count(UNTOUCHED)
    if LOCKED not in kinds:
        assert moved.num_moved == kinds.count(MOVABLE)
        assert moved.stays[Stay.SHARED] == kinds.count(SHARED)
    assert set(moved.stays) <= {Stay.SHARED, Stay.LOCKED}


def test_pages_behind_a_locked_one(kernel: type[_Kernel]) -> None:
    """A call ends at a locked page's group; the pages behind it are tried by the next one."""
    made = kernel(MOVABLE * 8 + LOCKED * 4 + SHARED + MOVABLE * 8 + UNTOUCHED)
    moved = move_pages(1, range(0, 22 << 12, 4096), THERE, within=WITHIN)
    assert moved == (16, Counter({Stay.LOCKED: 4, Stay.SHARED: 1}))
    assert made.num_calls == 2


def test_nothing_to_move(kernel: type[_Kernel]) -> None:
    """Untouched memory, and pages that are there, need no call that moves."""
    made = kernel(UNTOUCHED * 4)
    assert move_pages(1, range(0, 4 << 12, 4096), THERE, within=WITHIN) == (0, Counter())
    assert made.num_calls == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EPERM, Stay.REFUSED), (errno.EACCES, Stay.FORBIDDEN), (errno.ENOMEM, Stay.FULL)],
)
def test_refused_calls(kernel: type[_Kernel], number: int, reason: Stay) -> None:
    """An error of the whole call is the reason of all pages, and holds for all further ones."""
    kernel(MOVABLE * 4, fails=number)
    assert move_pages(1, range(0, 4 << 12, 4096), THERE, within=WITHIN) == (0, Counter({reason: 4}))
    assert reason in pages.FINAL


def test_node_must_be_planned() -> None:
    """A target that is not one of the planned nodes makes no sense."""
    with pytest.raises(OSError, match="node 0 is not one of 1"):
        move_pages(1, [0], HERE, within=WITHIN)
