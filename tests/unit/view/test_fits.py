"""Tables and trees fit the terminal: nothing is cut and no column is dropped, however narrow it is.

What they show at 80 columns is recorded: tests/recorded/machines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin import Bind, Nic, Request, Topology, make_plan
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine, many_nics, snc4
from tests.unit.view.seam import (
    CpuSet,
    NicKind,
    adapters,
    example_names,
    explained_plan,
    natural,
    read_example,
    spanning_l3s,
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
@pytest.mark.parametrize("width", [60, 80, 120])
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


@pytest.mark.parametrize("name", example_names())
def test_no_line_of_a_built_in_machine_wraps_at_80_columns(name: str) -> None:
    """Each built-in machine's tree has the same lines at 80 columns as in a file, 40 of them at most."""
    tree = topo_tree(Topology.from_json(read_example(name)))
    assert _lines(tree, 80) == _lines(tree, 400)
    assert len(_lines(tree, 80)) <= 40


def test_the_cells_of_a_matrix_in_blocks_are_those_of_the_whole() -> None:
    """With 8 GPUs and 16 NICs, each block has the cells of its columns, in their rows."""
    machine = many_nics()
    columns = [*(gpu.label for gpu in machine.gpus), *(adapter.names[0] for adapter in adapters(machine.nics))]
    found: dict[str, list[str]] = {}
    for line in _lines(topo_matrix(machine, width=60), 60):
        first, *cells = line.split() or [""]
        if first.partition("/")[0] in columns and not line.startswith(" "):
            found.setdefault(first, []).extend(cells)
    wide = {line.split()[0]: line.split()[1:] for line in _lines(topo_matrix(machine, width=WIDE), WIDE)[1:25]}
    assert found == wide
    assert len(found) == 24


def test_long_names_are_folded() -> None:
    """A name that is wider than the terminal is folded, and nothing is lost."""
    long = "a_very_long_name_of_a_network_device_" * 3
    lines = _lines(topo_matrix(replace(grid(gpus=[0]), nics=(Nic(name=long, node=0),)), width=60), 60)
    assert max(map(len, lines)) <= 60
    assert long in "".join(line.split()[0] for line in lines if line.split())


def test_facts_that_differ_are_at_each_gpu() -> None:
    """Models, links and sources that all GPUs share are said once; others are in the line of each GPU."""
    machine = golden_machine("2pkg-2node-8gpu-4nic.nccl")
    assert sum("nccl-topology-file" in line for line in _lines(topo_tree(machine), 120)) == 1
    first, *others = machine.gpus
    other = replace(first, name="NVIDIA B200", cuda_index=None, visible=False, node=None, node_source=None)
    lines = _lines(topo_tree(replace(machine, gpus=(other, *others))), 120)
    (line,) = (line for line in lines if "gpu0 " in line)
    assert all(text in line for text in ("hidden from CUDA", "NVIDIA B200", "node unknown"))
    assert sum("nccl-topology-file" in line for line in lines) == len(others)


def test_nics_have_state_and_rate() -> None:
    """A NIC's line has its rate, or that it is down."""
    nics = (Nic(name="a", node=0, rate_gbit_s=400.0), Nic(name="b", node=0, is_up=False))
    lines = _lines(topo_tree(replace(grid(), nics=nics)), 80)
    shown = [line.rpartition("── ")[2] for line in lines if "ethernet" in line]
    assert shown == ["a  ethernet, 400 Gbit/s", "b  ethernet, down"]


def test_a_cache_that_shares_a_node_with_another_stays_in_its_node() -> None:
    """Only the caches of the other package are drawn around nodes."""
    machine = snc4()
    mixed = replace(machine, cores=(replace(machine.cores[0], l3=None), *machine.cores[1:]))
    found = {node: l3.nodes for node, l3 in spanning_l3s(mixed).items()}
    assert found == dict.fromkeys(range(4, 8), CpuSet(range(4, 8)))


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
