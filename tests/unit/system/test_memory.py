"""The calls on ranges of memory, on this machine's own kernel. Several nodes: tests/vm."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.unit.system.seam import CpuSet, numa
from tests.unit.system.seam import memory as memory_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PAGE = mmap.PAGESIZE
BOTH = CpuSet({1, 2})
REFUSE_POLICY = Path(__file__).parents[2] / "vm" / "refuse_policy.py"


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping, without keeping it open."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.fixture
def memory() -> mmap.mmap:
    """Map eight fresh pages."""
    return mmap.mmap(-1, 8 * PAGE)


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[mmap.mmap]:
    """Map four pages of a file that then loses the last two: to write there raises SIGBUS."""
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4 * PAGE)
        with mmap.mmap(file.fileno(), 4 * PAGE) as memory:
            file.truncate(2 * PAGE)
            yield memory


class TestNodesOfRange:
    """The nodes of pages."""

    def test_touched_and_untouched_pages(self, memory: mmap.mmap) -> None:
        """A written page is on a node; None counts the untouched pages."""
        memory[0] = memory[3 * PAGE] = 1
        pages = numa.nodes_of_range(address_of(memory), len(memory))
        assert pages.pop(None) == 6
        assert sum(pages.values()) == 2
        assert all(node is not None and node >= 0 for node in pages)

    @pytest.mark.parametrize(("start", "size", "pages"), [(0, 1, 1), (PAGE - 1, 2, 2), (1, PAGE, 2), (PAGE, PAGE, 1)])
    def test_pages_in_part(self, memory: mmap.mmap, start: int, size: int, pages: int) -> None:
        """A range need not be aligned: each page that it covers in part counts."""
        assert numa.nodes_of_range(address_of(memory) + start, size) == {None: pages}

    def test_many_pages_are_counted_in_pieces_and_fast(self) -> None:
        """1 GiB and one page take more than one call, and far less than a second of CPU time."""
        memory = mmap.mmap(-1, (1 << 30) + PAGE)
        start = time.thread_time()
        assert numa.nodes_of_range(address_of(memory), len(memory)) == {None: len(memory) // PAGE}
        assert time.thread_time() - start < 0.5


class TestBindPages:
    """The policy of a range."""

    @pytest.mark.parametrize(("mode", "word"), [(numa.MPOL_PREFERRED, "prefer"), (numa.MPOL_BIND, "bind")])
    def test_the_kernel_names_the_policy(self, memory: mmap.mmap, mode: int, word: str) -> None:
        """numa_maps confirms the policy; the thread's own policy does not change."""
        before = numa.get_memory_policy()
        numa.bind_pages(address_of(memory), len(memory), mode, [0])
        lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
        assert next(words[1] for words in lines if int(words[0], 16) == address_of(memory)).startswith(word)
        assert numa.get_memory_policy() == before

    def test_what_the_kernel_refuses(self, memory: mmap.mmap) -> None:
        """A node that does not exist, and an unaligned range, are refused."""
        for address, node in ((address_of(memory), 1000), (address_of(memory) + 1, 0)):
            with pytest.raises(OSError, match="mbind: Invalid argument"):
                numa.bind_pages(address, PAGE, numa.MPOL_PREFERRED, [node])

    def test_seccomp(self) -> None:
        """Docker's default profile refuses mbind and move_pages with EPERM."""
        code = (
            "from numapin.system import numa\n"
            "for call in (lambda: numa.bind_pages(4096, 4096, 1, [0]), lambda: numa.nodes_of_range(4096, 4096)):\n"
            "    try:\n        call()\n    except PermissionError as error:\n        print(error.strerror)\n"
        )
        command = [sys.executable, str(REFUSE_POLICY), sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [f"{name}: Operation not permitted" for name in ("mbind", "move_pages")]


class TestPrefer:
    """The preferred policy, set by whatever call; kernels before 5.15 prefer one node only."""

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
    def test_the_policy(
        self,
        *,
        nodes: CpuSet,
        first: int | None,
        is_old: bool,
        policy: tuple[int, set[int]],
        only: int | None,
    ) -> None:
        """All nodes are preferred if the kernel can, else the first if it is one of them, else the lowest."""
        policies: list[tuple[int, set[int]]] = []

        def set_policy(mode: int, nodes: Iterable[int]) -> None:
            if is_old and mode == numa.MPOL_PREFERRED_MANY:
                raise OSError(errno.EINVAL, "no such mode")
            policies.append((mode, set(nodes)))

        assert numa.prefer(set_policy, nodes, first=first) == only
        assert policies == [policy]

    def test_other_errors(self) -> None:
        """A refusal for another reason is not tried again with one node."""

        def refuse(_mode: int, _nodes: Iterable[int]) -> None:
            raise OSError(errno.EPERM, "forbidden")

        with pytest.raises(PermissionError, match="forbidden"):
            numa.prefer(refuse, BOTH)


class TestPopulate:
    """Pages that are faulted in ahead of use."""

    def test_every_page_is_there_and_keeps_its_bytes(self, memory: mmap.mmap) -> None:
        """Every page has a node afterwards, and keeps its contents."""
        memory[5] = 42
        memory_calls.populate(address_of(memory), len(memory))
        assert None not in numa.nodes_of_range(address_of(memory), len(memory))
        assert memory[5] == 42

    def test_no_memory_is_an_error_and_no_signal(self, cut_off: mmap.mmap) -> None:
        """Beyond the end of a file it is an error, where a write would raise SIGBUS."""
        with pytest.raises(OSError, match="madvise: Bad address") as caught:
            memory_calls.populate(address_of(cut_off), len(cut_off))
        assert caught.value.errno == errno.EFAULT

    def test_other_threads_run_meanwhile(self) -> None:
        """Unlike mmap.madvise it releases the GIL: another thread runs while 128 MiB are faulted in."""
        memory, ticks, done = mmap.mmap(-1, 128 << 20), [0], threading.Event()

        def tick() -> None:
            while not done.wait(0.0005):
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        before = ticks[0]
        memory_calls.populate(address_of(memory), len(memory))
        during = ticks[0] - before  # read before this thread gives the GIL away again
        done.set()
        thread.join()
        assert during > 0


class TestZero:
    """Zeroing, for kernels that cannot populate."""

    def test_it_fills_exactly_the_range(self, memory: mmap.mmap) -> None:
        """Bytes before and after the range do not change."""
        memory[:] = b"\xff" * len(memory)
        memory_calls.zero(address_of(memory) + 1, 2 * PAGE)
        assert memory[: 2 * PAGE + 2] == b"\xff" + b"\0" * 2 * PAGE + b"\xff"

    def test_no_memory_is_an_error_and_no_signal(self, cut_off: mmap.mmap) -> None:
        """Existing memory is filled, then the read fails."""
        cut_off[PAGE] = 1
        with pytest.raises(OSError, match="read: Bad address"):
            memory_calls.zero(address_of(cut_off), len(cut_off))
        assert cut_off[PAGE] == 0


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
