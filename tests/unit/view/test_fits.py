"""Tables, trees and the block at the end of a failed job fit the terminal: nothing is cut, no column is dropped.

What they show at 80 columns is recorded: tests/recorded/machines. `print` of a machine or plan is short. What `attach`
reports is recorded beside this file.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from numapin import Bind, Link, Nic, Request, make_plan
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine
from tests.recorded.failures import DEEP, ENDS, WORST, block, ended
from tests.recorded.screens import compare, rendered
from tests.unit.planned import PLANNED
from tests.unit.view import seam
from tests.unit.view.seam import CpuSet, JobFailure, failure_text, traceback_lines

WIDE = 1000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [60, 120])
def test_a_narrow_terminal_loses_nothing(name: str, width: int) -> None:
    """Tree and plan have each letter and digit of the wide ones, the matrix each cell; no line is too wide."""
    machine = golden_machine(name)
    plan = make_plan(machine, Request(bind=Bind.EXCLUSIVE))
    for shown in (seam.topo_tree(machine, plan), seam.explained_plan(plan)):
        narrow = rendered(shown, width).splitlines()
        assert max(map(len, narrow)) <= width
        assert "," not in map(str.strip, narrow)
        visible, wide = (
            Counter(filter(str.isalnum, "".join(lines))) for lines in (narrow, rendered(shown, WIDE).splitlines())
        )
        assert visible == wide
    narrow, wide_lines = (
        rendered(seam.topo_matrix(machine, width=width), width).splitlines(),
        rendered(seam.topo_matrix(machine, width=WIDE), WIDE).splitlines(),
    )
    assert max(map(len, narrow)) <= width
    words, wide_words = (Counter(" ".join(lines).replace(",", " ").split()) for lines in (narrow, wide_lines))
    assert not wide_words - words


def test_natural_order() -> None:
    """Numbers in names count as numbers, even thousands of digits."""
    names = ["mlx5_17", "mlx5_9", "eth0", "mlx5_010", "a" + "1" * 9999]
    assert sorted(names, key=seam.natural) == [names[4], "eth0", "mlx5_9", "mlx5_010", "mlx5_17"]


def test_names_of_one_device() -> None:
    """Names with one PCI address are one device, the verbs name first; without an address each is its own."""
    nics = [
        Nic(name="ib0", pci="0000:01:00.0", kind=seam.NicKind.INFINIBAND),
        Nic(name="mlx5_0", pci="0000:01:00.0", kind=seam.NicKind.INFINIBAND),
        Nic(name="eth1", pci="0000:02:00.0"),
        Nic(name="mlx5_1", pci="0000:02:00.0", kind=seam.NicKind.INFINIBAND),
        Nic(name="eth2"),
        Nic(name="eth3"),
    ]
    assert [adapter.name for adapter in seam.adapters(nics)] == ["eth2", "eth3", "mlx5_0/ib0", "mlx5_1/eth1"]


def test_what_a_machine_file_may_have() -> None:
    """Large numbers of sockets, a node of an unlisted one, a half-known PCIe link, a link of senseless count.

    CPUs that no node lists are shown, too.
    """
    machine = grid(packages=3, nodes=2, cores=1, smt=1, gpus=[0, 0])
    machine = replace(
        machine,
        packages=tuple(replace(package, id=3000 + package.id) for package in machine.packages[:2]),
        nodes=tuple(replace(node, package=3000 + (node.package or 0)) for node in machine.nodes),
        gpus=(replace(machine.gpus[0], pcie=seam.Pcie(gen=4, width=8, max_width=16)), machine.gpus[1]),
        links=(Link(a="gpu0", b="gpu1", kind="NV" + "9" * 5000),),
    )
    shown = rendered(seam.topo_tree(machine), WIDE)
    assert "PCIe 4 x8 of 4 x16" in shown
    assert "NVLink" not in shown
    assert all(f"node {number} " in shown for number in range(6))
    assert shown.endswith("node distances (10 is local): 12 within a socket, 32 between sockets\n")
    first, second = grid().nodes
    shown = rendered(seam.topo_tree(replace(grid(), nodes=(replace(first, cpus=CpuSet({0, 8})), second))), WIDE)
    assert "\n├── node unknown  CPUs 1-3,9-11\n" in shown


# --- machines and plans as text --------------------------------------------------------------------------------------


def test_a_machine_as_text() -> None:
    """`print(topology)` has the size and a line per node with CPUs or devices; other nodes share one.

    Control characters in names do not reach the terminal.
    """
    assert "\x1b" not in str(replace(grid(), host="\x1b[31m"))
    machine = replace(golden_machine("2pkg-34node-gpumem-4gpu"), host="tray", nics=(Nic(name="eth0"),))
    lines = str(machine).splitlines()
    assert lines[0] == "tray: 2 sockets, 34 NUMA nodes, 4 GPUs, 144 cores, 144 CPUs"
    assert lines[1].startswith("  node 0: CPUs 0-71, ")
    assert lines[1].endswith(", gpu0, gpu1")
    assert lines[3:] == ["  without CPUs: nodes 2-33", "  node unknown: eth0"]


def test_a_plan_as_text() -> None:
    """`print(plan)` has a line per rank, which says if it is not exact."""
    plan = make_plan(grid(nodes=2, gpus=[0, 1]), Request(cpus_per_rank=16))
    assert str(plan).splitlines() == [
        "2 ranks, bind node, memory preferred",
        "  rank 0: GPU 0, node 0, CPUs 0-3,8-11, memory preferred 0, 4 threads (not exact)",
        "  rank 1: GPU 1, node 1, CPUs 4-7,12-15, memory preferred 1, 4 threads (not exact)",
    ]
    assert "no GPU, node unknown" in str(make_plan(grid(), Request(bind="none")))


# --- the report of `numapin attach` as text --------------------------------------------------------------------------


MIB = 1 << 20
PAGES = seam.ProcessPages(
    policy="default",
    before={0: 3 * MIB, 1: MIB},
    after={0: MIB, 1: 3 * MIB},
    far_bytes=3 * MIB,
    moved_bytes=2 * MIB,
    stays={"shared": MIB},
)
PROCESS = seam.BoundProcess(
    pid=4711,
    name="python",
    threads=9,
    changed=7,
    narrower=2,
    ended=0,
    cpus_before=CpuSet({0}),
    cpus=CpuSet(range(4, 8)),
    pages=PAGES,
    shortfalls=("1.0 MiB stay",),
)
RANK = seam.AttachedRank(pid=4711, gpu_source="--gpu", requested=PLANNED, processes=(PROCESS,))
UNDO = "taskset -acp 0 4711"
DONE = seam.Attached(dry_run=False, migrate=True, interrupted=False, undo=(UNDO,), warnings=(), ranks=(RANK,))


GONE = replace(RANK, processes=(), problem="it ended before")
REPORTS = {
    "a row has the threads that changed, the CPUs before and now, the memory elsewhere, and what was moved": DONE,
    "a dry run changes nothing, so there is nothing to undo": replace(DONE, dry_run=True, undo=()),
    "after Ctrl-C the table shows what was done": replace(DONE, interrupted=True),
    "a process that ended was not bound": replace(DONE, ranks=(GONE,), undo=()),
    "the source of a GPU is reported for ranks with a GPU only": replace(
        DONE, ranks=(replace(RANK, requested=replace(PLANNED, gpu=None)),)
    ),
}


def test_each_report_is_the_recorded_one() -> None:
    """NUMAPIN_UPDATE_GOLDEN=1 records them anew."""
    tables = ((sentence, rendered(seam.attach_table(report), 200)) for sentence, report in REPORTS.items())
    text = "".join(f"=== {sentence}\n{table}" for sentence, table in tables)
    compare(text, str(Path(__file__).with_name("attached.txt")))


# --- the block at the end of a failed job; what it says is recorded: tests/recorded/failures.txt ----------------------


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("file", ["", "/run/x", "/n" * 400, f"/{'名前' * 200}"], ids=["none", "short", "long", "wide"])
def test_it_fits(name: str, file: str) -> None:
    """However long, wide or hostile the facts are, the block fits and has visible characters only."""
    others = [ended(n, exitcode, was_ended=n > 3) for n, exitcode in enumerate((1, 0, 3, -15, -15, -9, 2, 5), 1)]
    lines = block(*WORST[name].ranks, *others, file=file, **WORST[name].facts)
    assert len(lines) <= 20
    assert max(map(cell_len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("text", ["x" * (1 << 24), "x\n" * (1 << 23)], ids=["one word", "lines"])
def test_the_largest_exception_takes_no_time(text: str) -> None:
    """A message of 16 MiB, the largest error file that is read, is cut before its lines are made."""
    start = time.process_time()
    rank = ended(text=text)
    assert len(block(rank)) <= 20
    assert len(JobFailure(ranks=(rank,), program="train.py", host="node7").summary) < 1000
    assert time.process_time() - start < 10


def test_text_has_all_frames_of_all_ranks() -> None:
    """The file has each rank's end and whole traceback, in lines of visible characters, and names one that stays."""
    found = JobFailure(program="t.py", host="h", ranks=(ended(text="E: x", trace=DEEP), ended(1, -9)))
    text = failure_text(found)
    assert DEEP in text
    assert text.startswith(
        "t.py failed on h: rank 0 failed first: E: x\n--- rank 0 (pid 1000), failed: exit status 1\n"
    )
    assert text.endswith("--- rank 1 (pid 1001), failed: SIGKILL\nno exception was recorded\n")
    assert traceback_lines(ended(text="\x1b[2J")) == ["\ufffd[2J"]
    stays = JobFailure(program="t.py", host="h", ranks=ENDS["others crash while they are ended, or stay"].ranks)
    assert "--- rank 3 (pid 1003), left: still there after SIGKILL\n" in failure_text(stays)
