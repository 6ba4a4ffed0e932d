"""Machines and plans as text."""

from __future__ import annotations

from dataclasses import replace

from numapin import Nic, Request, make_plan
from tests.machines.grids import grid
from tests.pictures import golden_machine


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
