"""Memory placed on a node: on this machine's own kernel, and with single calls refused. Several nodes: tests/vm."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from numapin.errors import LibnumaError
from tests.unit.system import seam
from tests.unit.system.seam import CpuSet, Ledger, Placement, calls, find_pages, numa, place, read_numa_maps
from tests.unit.system.seam import memory as memory_calls

PAGE = mmap.PAGESIZE
REFUSE_POLICY = Path(__file__).parents[2] / "vm" / "refuse_policy.py"
CPUS = CpuSet(os.sched_getaffinity(0))


def address_of(memory: mmap.mmap) -> int:
    """Return the address of a mapping, without keeping it open."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.fixture
def memory() -> mmap.mmap:
    """Map eight fresh pages."""
    return mmap.mmap(-1, 8 * PAGE)


def placed(memory: mmap.mmap, *, node: int = 0, cpus: CpuSet = CPUS, num_machine_nodes: int = 2) -> Placement:
    """Place a mapping, by default as on a machine with two nodes."""
    return place(address_of(memory), len(memory), nodes=CpuSet({node}), cpus=cpus, num_machine_nodes=num_machine_nodes)


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """Make one of our kernel calls fail."""

    def fail(*_args: object) -> None:
        raise OSError(number, f"{call}: {os.strerror(number)}")

    monkeypatch.setattr(numa if hasattr(numa, call) else memory_calls, call, fail)


class TestPlace:
    """Placement, and its report."""

    def test_all_pages_are_on_the_node(self, memory: mmap.mmap) -> None:
        """All pages are touched and verified, without shortfalls."""
        found = placed(memory)
        assert found == Placement(pages={0: 8})
        assert numa.nodes_of_range(address_of(memory), len(memory)) == {0: 8}

    def test_the_caller_keeps_its_cpus_and_policy(self, memory: mmap.mmap) -> None:
        """Placing a range does not affect the calling thread."""
        before = os.sched_getaffinity(0), numa.get_memory_policy()
        placed(memory)
        assert (os.sched_getaffinity(0), numa.get_memory_policy()) == before

    def test_one_node_costs_no_call(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither a policy is set nor the kernel asked, but every page is touched."""
        ask = numa.nodes_of_range
        for call in ("bind_pages", "nodes_of_range"):
            refuse(monkeypatch, call, errno.EPERM)
        assert placed(memory, num_machine_nodes=1) == Placement(pages={0: 8})
        assert ask(address_of(memory), len(memory)) == {0: 8}

    def test_no_nodes_leave_it_to_the_policy(self, memory: mmap.mmap) -> None:
        """The pages are reported all the same."""
        found = place(address_of(memory), len(memory), nodes=CpuSet(), cpus=CPUS, num_machine_nodes=2)
        assert found == Placement(pages={0: 8})

    def test_a_node_that_is_not_there(self, memory: mmap.mmap) -> None:
        """The kernel refuses it and the pages are elsewhere; both are reported with a remedy."""
        found = placed(memory, node=1000)
        assert found.pages == {0: 8}
        refused, strays = found.shortfalls
        assert refused.startswith(
            "memory on node 1000 was refused (mbind: Invalid argument): pages go where they are first touched; "
        )
        assert "see: numapin topo" in refused
        assert strays.startswith("not all pages are on node 1000: 100.0% on node 0; that node is full")
        assert "numactl -H" in strays

    def test_pages_in_part_elsewhere(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full node, and a kernel that accepts mbind and ignores it, look the same: the pages are what counts."""
        monkeypatch.setattr(numa, "nodes_of_range", lambda *_args: {0: 6, 1: 2})
        found = placed(memory)
        assert found.pages == {0: 6, 1: 2}
        assert [text.partition(";")[0] for text in found.shortfalls] == [
            "not all pages are on node 0: 25.0% on node 1",
        ]

    def test_a_kernel_that_cannot_populate(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before Linux 5.14 pages are touched by zeroing them."""
        refuse(monkeypatch, "populate", errno.EINVAL)
        assert placed(memory) == Placement(pages={0: 8})

    @pytest.mark.parametrize("refused", ["", "populate"])
    def test_no_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
        """It is ENOMEM with the size instead of SIGBUS, on old kernels too."""
        if refused:
            refuse(monkeypatch, refused, errno.EINVAL)
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(2 * PAGE)
            memory = mmap.mmap(file.fileno(), 2 * PAGE)
            file.truncate(PAGE)
            with pytest.raises(OSError, match=f"no {2 * PAGE} bytes of memory") as caught:
                placed(memory)
        assert caught.value.errno == errno.ENOMEM

    def test_several_nodes_on_an_old_kernel(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before Linux 5.15 only one node can be preferred: the lowest of those wanted."""
        calls: list[tuple[int, list[int]]] = []

        def bind_pages(_address: int, _num_bytes: int, mode: int, nodes: Any) -> None:
            calls.append((mode, sorted(nodes)))
            if mode == numa.MPOL_PREFERRED_MANY:
                raise OSError(errno.EINVAL, "mbind: Invalid argument")

        monkeypatch.setattr(numa, "bind_pages", bind_pages)
        found = place(address_of(memory), len(memory), nodes=CpuSet({0, 1}), cpus=CPUS, num_machine_nodes=4)
        assert calls == [(numa.MPOL_PREFERRED_MANY, [0, 1]), (numa.MPOL_PREFERRED, [0])]
        assert found == Placement(pages={0: 8})

    def test_beside_gpu_memory(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pages are bound to the host's nodes, without a preference that spills, and touched on the node's CPUs."""
        calls: list[tuple[int, list[int]]] = []
        touched_on: list[set[int]] = []
        touch = memory_calls.populate

        def bind_pages(_address: int, _num_bytes: int, mode: int, nodes: Any) -> None:
            calls.append((mode, sorted(nodes)))

        def populate(address: int, num_bytes: int) -> None:
            touched_on.append(os.sched_getaffinity(0))
            touch(address, num_bytes)

        monkeypatch.setattr(numa, "bind_pages", bind_pages)
        monkeypatch.setattr(memory_calls, "populate", populate)
        own, host = CpuSet({min(CPUS)}), CpuSet({0, 1})
        found = place(address_of(memory), len(memory), nodes=CpuSet({0}), cpus=own, num_machine_nodes=4, within=host)
        assert calls == [(numa.MPOL_BIND, [0, 1])]
        assert touched_on == [set(own)]
        assert found == Placement(pages={0: 8})


class TestRefused:
    """mbind forbidden."""

    def test_a_thread_on_the_cpus_touches(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """A bound thread touches the pages first, which places them; the calling thread is not bound."""
        refuse(monkeypatch, "bind_pages", errno.EPERM)
        seen: list[set[int]] = []
        populate = memory_calls.populate

        def watched(address: int, num_bytes: int) -> None:
            seen.append(os.sched_getaffinity(0))
            populate(address, num_bytes)

        monkeypatch.setattr(memory_calls, "populate", watched)
        found = placed(memory, cpus=CpuSet({max(CPUS)}))
        assert seen == [{max(CPUS)}]
        assert CpuSet(os.sched_getaffinity(0)) == CPUS
        assert found.pages == {0: 8}
        assert len(found.shortfalls) == 1
        assert "--cap-add SYS_NICE" in found.shortfalls[0]

    def test_cpus_that_are_not_there(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """This is reported as well; the pages are touched from wherever the thread runs."""
        refuse(monkeypatch, "bind_pages", errno.ENOSYS)
        found = placed(memory, cpus=CpuSet({9999}))
        assert found.pages == {0: 8}
        assert [text.partition(" (")[0] for text in found.shortfalls] == [
            "memory on node 0 was refused",
            "CPUs 9999 were refused",
        ]

    def test_no_libnuma(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without libnuma memory is not placed; the report says how to install it."""

        def fail(*_args: object) -> None:
            raise LibnumaError("libnuma cannot be used: gone", calls.INSTALL_LIBNUMA)

        for call in ("bind_pages", "nodes_of_range"):
            monkeypatch.setattr(numa, call, fail)
        found = placed(memory)
        assert found.pages == {0: 8}  # numa_maps tells
        assert found.shortfalls == (
            f"libnuma cannot be used: gone: pages go where they are first touched; {calls.INSTALL_LIBNUMA}",
        )

    def test_seccomp(self) -> None:
        """Under Docker's real profile mbind and move_pages are refused, and numa_maps has the pages."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from tests.unit.system.test_placement import *\n"
            "memory = mmap.mmap(-1, 8 * PAGE)\n"
            "found = placed(memory)\n"
            "print(found.pages, len(found.shortfalls), 'SYS_NICE' in found.shortfalls[0])"
        )
        command = [sys.executable, str(REFUSE_POLICY), sys.executable, "-c", code, str(Path(__file__).parents[3])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "{0: 8} 1 True\n"

    def test_nobody_tells(self, memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The report says that the location is unverified, without shares."""
        refuse(monkeypatch, "nodes_of_range", errno.EPERM)
        monkeypatch.setattr(seam.pages, "read_numa_maps", lambda *_args, **_rest: None)
        found = placed(memory)
        assert found.pages is None
        assert found.shortfalls[0].startswith("the location of the pages is unverified")
        monkeypatch.undo()
        assert find_pages(address_of(memory), len(memory), numa_maps=tmp_path / "missing") == {0: 8}


class TestNumaMaps:
    """Lines in the kernel's format."""

    LINES = (
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
    def test_lines(self, tmp_path: Path, address: int, num_bytes: int, pages: dict[int | None, int] | None) -> None:
        """Pages of the base size per node; None if the mapping is not the range."""
        path = tmp_path / "numa_maps"
        path.write_text(self.LINES)
        assert read_numa_maps(address, num_bytes, numa_maps=path) == pages

    def test_no_such_file(self, tmp_path: Path) -> None:
        """A kernel without NUMA has no such file."""
        assert read_numa_maps(0, 1, numa_maps=tmp_path / "numa_maps") is None

    def test_it_agrees_with_move_pages(self, memory: mmap.mmap) -> None:
        """numa_maps and move_pages agree about one mapping."""
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
