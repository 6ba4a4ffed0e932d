"""Tables and trees fit the terminal: nothing is cut and no column is dropped, however narrow it is.

What they show at 80 columns is recorded: tests/recorded/machines. `print` of a machine or plan is short. What `attach`
reports is recorded beside this file.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin import Bind, Nic, Request, make_plan
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine
from tests.recorded.screens import compare
from tests.unit.planned import PLANNED
from tests.unit.view.seam import (
    Attached,
    AttachedRank,
    BoundProcess,
    CpuSet,
    NicKind,
    ProcessPages,
    adapters,
    attach_table,
    explained_plan,
    natural,
    topo_matrix,
    topo_tree,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


WIDE = 1000


def _lines(renderable: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, highlight=False, emoji=False, markup=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [60, 120])
def test_a_narrow_terminal_loses_nothing(name: str, width: int) -> None:
    """Tree and plan have each character of the wide ones, the matrix each cell, and no line is too wide."""
    machine = golden_machine(name)
    plan = make_plan(machine, Request(bind=Bind.EXCLUSIVE))
    for shown in (topo_tree(machine, plan), explained_plan(plan)):
        narrow = _lines(shown, width)
        assert max(map(len, narrow)) <= width
        visible, wide = (Counter(filter(str.isalnum, "".join(lines))) for lines in (narrow, _lines(shown, WIDE)))
        assert visible == wide
    narrow, wide_lines = (
        _lines(topo_matrix(machine, width=width), width),
        _lines(topo_matrix(machine, width=WIDE), WIDE),
    )
    assert max(map(len, narrow)) <= width
    words, wide_words = (Counter(" ".join(lines).replace(",", " ").split()) for lines in (narrow, wide_lines))
    assert not wide_words - words


def test_natural_order() -> None:
    """Numbers in names count as numbers, even thousands of digits."""
    names = ["mlx5_17", "mlx5_9", "eth0", "mlx5_010", "a" + "1" * 9999]
    assert sorted(names, key=natural) == [names[4], "eth0", "mlx5_9", "mlx5_010", "mlx5_17"]


def test_names_of_one_device() -> None:
    """Names with one PCI address are one device, the verbs name first; without an address each is its own."""
    nics = [
        Nic(name="ib0", pci="0000:01:00.0", kind=NicKind.INFINIBAND),
        Nic(name="mlx5_0", pci="0000:01:00.0", kind=NicKind.INFINIBAND),
        Nic(name="eth1", pci="0000:02:00.0"),
        Nic(name="mlx5_1", pci="0000:02:00.0", kind=NicKind.INFINIBAND),
        Nic(name="eth2"),
        Nic(name="eth3"),
    ]
    assert [adapter.name for adapter in adapters(nics)] == ["eth2", "eth3", "mlx5_0/ib0", "mlx5_1/eth1"]


# --- machines and plans as text --------------------------------------------------------------------------------------


def test_a_machine_as_text() -> None:
    """`print(topology)` has the size and a line per node with CPUs or devices; other nodes share one."""
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


def test_text_is_printable() -> None:
    """Names that contain control characters do not reach the terminal."""
    assert "\x1b" not in str(replace(grid(), host="\x1b[31m"))


# --- the report of `numapin attach` as text --------------------------------------------------------------------------


MIB = 1 << 20
PAGES = ProcessPages(
    policy="default",
    before={0: 3 * MIB, 1: MIB},
    after={0: MIB, 1: 3 * MIB},
    far_bytes=3 * MIB,
    moved_bytes=2 * MIB,
    stays={"shared": MIB},
)
PROCESS = BoundProcess(
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
RANK = AttachedRank(pid=4711, gpu_source="--gpu", requested=PLANNED, processes=(PROCESS,))
UNDO = "taskset -acp 0 4711"
DONE = Attached(dry_run=False, migrate=True, interrupted=False, undo=(UNDO,), warnings=(), ranks=(RANK,))


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
    text = ""
    for sentence, report in REPORTS.items():
        out = io.StringIO()
        Console(file=out, width=200).print(attach_table(report))
        text += "\n".join((f"=== {sentence}", *(line.rstrip() for line in out.getvalue().splitlines()), ""))
    compare(text, str(Path(__file__).with_name("attached.txt")))
