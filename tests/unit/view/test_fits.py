"""Tables and trees fit the terminal: nothing is cut, no column is dropped, and what repeats takes one line."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from numapin import Bind, Link, Nic, Request, Topology, make_plan
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine, many_nics, snc4
from tests.unit.view.seam import (
    CpuSet,
    NicKind,
    adapters,
    explained_plan,
    natural,
    other_warnings,
    policy,
    read_example,
    spanning_l3s,
    topo_matrix,
    topo_tree,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


WIDTHS = (60, 80, 120)


def _lines(renderable: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width, highlight=False, emoji=False, markup=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _example(name: str) -> Topology:
    return Topology.from_json(read_example(f"example:{name}"))


class TestMatrix:
    """`numapin topo --format matrix`."""

    @pytest.mark.parametrize("machine", [many_nics(), golden_machine("2pkg-2node-8gpu-16nic")], ids=["named", "golden"])
    @pytest.mark.parametrize("width", WIDTHS)
    def test_wraps_in_blocks_and_loses_nothing(self, width: int, machine: Topology) -> None:
        """With 8 GPUs and 16 NICs, each cell is whole, in a block under its column's name and in its row."""
        lines = _lines(topo_matrix(machine, width=width), width)
        assert max(map(len, lines)) <= width
        assert _cells(lines) == _wanted(machine)

    @pytest.mark.parametrize(
        ("word", "meaning"),
        [("NV12", "NV#"), ("XGMI4", "XGMI#"), ("NV", "NV"), ("XGMI", "XGMI"), ("XELINK", "XELINK"), ("NODE", "")],
    )
    def test_links_of_other_vendors(self, word: str, meaning: str) -> None:
        """Links that GPUs have of their own are explained in the legend, for each vendor."""
        machine = replace(grid(gpus=[0, 0]), links=(Link(a="gpu0", b="gpu1", kind=word),))
        legend = [
            line for line in _lines(topo_matrix(machine, width=80), 80) if line.startswith("  ") and "inks" in line
        ]
        assert [line.split()[0] for line in legend] == ([meaning] if meaning else [])
        assert all(("set of" in line) == meaning.endswith("#") for line in legend)

    def test_the_legend_explains_what_is_shown(self) -> None:
        """Words that the matrix does not have are not in its legend, and "?" is."""
        known = replace(grid(gpus=[0, 0]), links=(Link(a="gpu0", b="gpu1", kind="PIX"),))
        for machine, words in ((known, ["PIX"]), (grid(gpus=[0, 0]), ["?"])):
            lines = _lines(topo_matrix(machine, width=80), 80)
            assert [line.split()[0] for line in lines if line.startswith("  ") and "gpu" not in line] == words

    def test_long_names_are_folded(self) -> None:
        """A name or a list of CPUs that is wider than the terminal is folded, and nothing is lost."""
        long = "a_very_long_name_of_a_network_device_" * 3
        machine = replace(grid(gpus=[0]), nics=(Nic(name=long, node=0),))
        lines = _lines(topo_matrix(machine, width=60), 60)
        assert max(map(len, lines)) <= 60
        assert long in "".join(line.split()[0] for line in lines if line.split())


def _cells(lines: list[str]) -> dict[tuple[str, str], str]:
    """Return the cells of the device matrix by row and column, read from the blocks by position."""
    end = next(i for i, line in enumerate(lines) if line.startswith("  ") and "NVLinks" in line)
    found: dict[tuple[str, str], str] = {}
    starts: list[tuple[int, str]] = []
    for line in lines[:end]:
        if line.startswith(" "):
            starts = [(match.start(), match[0]) for match in re.finditer(r"\S+", line)]
        elif line:
            row = line.split()[0]
            ends = [start for start, _ in starts[1:]] + [len(line)]
            found |= {(row, name): line[at:to].strip() for (at, name), to in zip(starts, ends, strict=True)}
    return found


def _wanted(machine: Topology) -> dict[tuple[str, str], str]:
    names = [(gpu.label,) for gpu in machine.gpus] + [adapter.names for adapter in adapters(machine.nics)]
    kinds = {frozenset((link.a, link.b)): link.kind for link in machine.links}
    wanted = {}
    for row in names:
        for column in names:
            kind = "X" if row == column else kinds.get(frozenset((row[0], column[0])), "?")
            wanted["/".join(row), column[0]] = kind
    nodes = [*(gpu.node for gpu in machine.gpus), *(adapter.node for adapter in adapters(machine.nics))]
    wanted |= {("/".join(row), "node"): str(node) for row, node in zip(names, nodes, strict=True)}
    wanted |= {("/".join(row), "CPUs"): "" for row in names}
    return wanted | {(gpu.label, "CPUs"): str(gpu.cpus) for gpu in machine.gpus}


class TestPlan:
    """`numapin plan`."""

    def test_reasons_are_below_and_grouped(self) -> None:
        """Ranks that share a node share the line of their reason; the GPU's name is in the table only."""
        machine = _example("dgx-h100")
        lines = _lines(explained_plan(make_plan(machine, Request())), 80)
        assert lines[0].split() == ["rank", "GPU", "node", "CPUs", "memory", "threads", "NIC"]
        assert lines[10:] == [
            "ranks 0-3  its GPU is on node 0 (sysfs); all 112 CPUs of node 0",
            "ranks 4-7  its GPU is on node 1 (sysfs); all 112 CPUs of node 1",
            "all ranks  CPUs shared by 4 ranks; NIC: nearest (PXB)",
        ]

    def test_doubts_are_said_once(self) -> None:
        """What is unknown for all ranks is in one line, and the warnings do not repeat it."""
        plan = make_plan(golden_machine("2pkg-2node-8gpu-4nic.nccl"), Request())
        text = " ".join(" ".join(_lines(explained_plan(plan), 80)).split())
        assert text.count("which CPUs share a core is unknown") == 1
        assert any("which CPUs share a core is unknown" in warning for warning in plan.warnings)
        assert not any("which CPUs share a core is unknown" in warning for warning in other_warnings(plan))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_loses_nothing(self, name: str, width: int) -> None:
        """Every rank's CPUs, GPU and memory are there, perhaps folded, and no line is too wide."""
        plan = make_plan(golden_machine(name), Request(bind=Bind.EXCLUSIVE))
        lines = _lines(explained_plan(plan), width)
        assert max(map(len, lines)) <= width
        starts = [match.start() for match in re.finditer(r"\S+", lines[0])]
        nics = [rank.nics[0] for rank in plan.ranks if rank.nics]
        assert lines[0].split() == ["rank", "GPU", "node", "CPUs", "memory", "threads", *(["NIC"] if nics else [])]
        table = lines[1 : lines.index("")]
        cpus = "".join(line[starts[3] : starts[4]].strip() for line in table)
        assert cpus == "".join(str(rank.cpus) for rank in plan.ranks)
        policies = " ".join(line[starts[4] : starts[5]].strip() for line in table)
        assert " ".join(policies.split()) == " ".join(map(policy, plan.ranks))
        assert not nics or "".join(line[starts[6] :].strip() for line in table) == "".join(nics)

    def test_numbers_of_cpus_are_whole(self) -> None:
        """Lists of CPUs are broken after a comma only."""
        plan = make_plan(_example("dgx-a100"), Request(bind=Bind.SOCKET))
        for width in WIDTHS:
            lines = _lines(explained_plan(plan), width)
            start = lines[0].index("CPUs")
            column = [line[start : lines[0].index("memory")].strip() for line in lines[1 : lines.index("")]]
            numbers = re.split(r",|\s+", " ".join(column))
            wanted = re.split(r",|\s+", " ".join(str(rank.cpus) for rank in plan.ranks))
            assert list(filter(None, numbers)) == wanted


class TestTree:
    """`numapin topo`."""

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_grace_host_fits_a_screen(self, width: int) -> None:
        """The tree of a GB200 tray takes 40 lines at most; empty nodes share a line, and GPU memory names its GPU."""
        lines = _lines(topo_tree(_example("gb200")), width)
        assert len(lines) <= 40
        assert sum("empty nodes" in line for line in lines) == 1
        text = " ".join(" ".join(lines).split())
        assert "28 empty nodes nodes 3-9,11-17,19-25,27-33" in text
        assert re.findall(r"node (\d+) memory of (gpu\d)", text) == [
            ("2", "gpu0"),
            ("10", "gpu1"),
            ("18", "gpu2"),
            ("26", "gpu3"),
        ]

    def test_gpu_memory_of_an_unknown_gpu(self) -> None:
        """If the GPU is unknown or ambiguous, the node is GPU memory only."""
        machine = _example("gb200")
        gpus = tuple(replace(gpu, memory_node=2 if gpu.index < 2 else None) for gpu in machine.gpus)
        text = "\n".join(_lines(topo_tree(replace(machine, gpus=gpus)), 120))
        assert text.count("GPU memory,") == 4

    def test_l3_caches_are_in_the_line_of_the_socket(self) -> None:
        """A socket says how many of its cores share an L3 cache; unknown caches are left out."""
        for machine, text in (
            (_example("ndv4"), "48 cores, L3 for every 4 cores"),
            (_example("p4d"), "24 cores, one L3"),
            (grid(l3=None), "8 cores"),
        ):
            assert any(line.endswith(text) for line in _lines(topo_tree(machine), 120))

    @pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "gb200", "ndv4", "p4d"])
    def test_no_line_of_a_built_in_machine_wraps_at_80_columns(self, name: str) -> None:
        """Each built-in machine's tree has the same lines at 80 columns as in a file."""
        tree = topo_tree(_example(name))
        assert _lines(tree, 80) == _lines(tree, 400)

    def test_facts_that_differ_are_at_each_gpu(self) -> None:
        """Models, links and sources that all GPUs share are said once; others are in the line of each GPU."""
        machine = golden_machine("2pkg-2node-8gpu-4nic.nccl")
        lines = _lines(topo_tree(machine), 120)
        assert sum("nccl-topology-file" in line for line in lines) == 1
        first, *others = machine.gpus
        other = replace(first, name="NVIDIA B200", cuda_index=None, visible=False, node=None, node_source=None)
        lines = _lines(topo_tree(replace(machine, gpus=(other, *others))), 120)
        (line,) = (line for line in lines if "gpu0 " in line)
        assert all(text in line for text in ("hidden from CUDA", "NVIDIA B200", "node unknown"))
        assert sum("nccl-topology-file" in line for line in lines) == len(others)

    def test_nics_have_state_and_rate(self) -> None:
        """A NIC's line has its rate, or that it is down."""
        nics = (Nic(name="a", node=0, rate_gbit_s=400.0), Nic(name="b", node=0, is_up=False))
        lines = _lines(topo_tree(replace(grid(), nics=nics)), 80)
        assert [line.rpartition("── ")[2] for line in lines if "ethernet" in line] == [
            "a  ethernet, 400 Gbit/s",
            "b  ethernet, down",
        ]

    def test_a_cache_over_nodes_is_there_once(self) -> None:
        """With sub-NUMA clustering, each package has one L3 line, and its four nodes are below it."""
        lines = _lines(topo_tree(snc4()), 120)
        caches = [line for line in lines if "L3" in line]
        assert [line.partition("L3")[2] for line in caches] == [
            " of nodes 0-3  16 cores",
            " of nodes 4-7  16 cores",
        ]
        assert sum(bool(re.search("── node [0-9]", line)) for line in lines) == 8
        assert any(line.startswith("│   └── L3 of nodes 0-3") for line in lines)

    def test_a_cache_that_contradicts_itself_stays_in_its_nodes(self) -> None:
        """A cache that spans packages, or shares a node with another one, is not drawn around nodes."""
        machine = snc4()
        over_packages = replace(machine, cores=tuple(replace(core, l3=0) for core in machine.cores))
        mixed = replace(machine, cores=(replace(machine.cores[0], l3=None), *machine.cores[1:]))
        assert spanning_l3s(over_packages) == {}
        found = {node: l3.nodes for node, l3 in spanning_l3s(mixed).items()}
        assert found == dict.fromkeys(range(4, 8), CpuSet(range(4, 8)))
        assert not any("of nodes" in line for line in _lines(topo_tree(over_packages), 120))

    def test_one_empty_node_has_its_line(self) -> None:
        """A single empty node is shown as any other."""
        machine = grid(nodes=2, memory_nodes=[2], memoryless=[2])
        assert any("node 2  memory only, 0.0 GiB" in line for line in _lines(topo_tree(machine), 120))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_loses_nothing(self, name: str, width: int) -> None:
        """Every node, GPU and NIC is named, and no line is too wide."""
        machine = golden_machine(name)
        lines = _lines(topo_tree(machine, make_plan(machine, Request())), width)
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert all(f"{gpu.label} " in text for gpu in machine.gpus)
        assert all(f"{adapter.name} " in text for adapter in adapters(machine.nics))


class TestStructure:
    """Names in natural order, and NICs with several names."""

    def test_natural_order(self) -> None:
        """Numbers in names count as numbers, even thousands of digits."""
        names = ["mlx5_17", "mlx5_9", "eth0", "mlx5_010", "a" + "1" * 9999]
        assert sorted(names, key=natural) == [names[4], "eth0", "mlx5_9", "mlx5_010", "mlx5_17"]

    def test_names_of_one_device(self) -> None:
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
