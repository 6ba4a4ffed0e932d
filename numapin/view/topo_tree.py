"""A topology as a tree: sockets, nodes, PCIe switches, GPUs and NICs, with the plan's ranks.

What is the same for all GPUs is said once, and distances and GPU links take a line each, so that the tree of a usual
machine fits 80 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from rich.text import Text
from rich.tree import Tree

from numapin.base.plural import counted
from numapin.topology.fast import fast_cores
from numapin.topology.model import NodeKind, NodeSource
from numapin.topology.nics import Adapter
from numapin.view.machine import (
    PcieGroup,
    buses,
    devices_on,
    distances,
    empty_nodes,
    pcie_tree,
    rank_places,
    spanning_l3s,
)
from numapin.view.words import (
    address,
    joined,
    kind_of,
    memory,
    model_name,
    nic_state,
    node_source,
    nodes_of,
    own_nic,
    pcie_link,
    rank_names,
    short_pci,
    shortened,
    torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Gpu, Node, Topology
    from numapin.topology.nics import NearestNics
    from numapin.view.machine import Device, RankPlaces, SpanningL3

_WIDE: Final = 80  # columns of the first line; longer facts have a line of their own
_USUAL_SOURCES: Final = (None, NodeSource.SYSFS, NodeSource.SINGLE)


def topo_tree(topology: Topology, plan: Plan | None = None) -> Tree:
    """Return the tree; nodes without a socket, and devices of unknown node, are at the end, below the machine.

    Nodes and GPUs name their ranks in the plan. Raises UsageError for a plan of another machine.
    """
    machine = _Shown(topology, rank_places(topology, plan))
    name, facts = shortened(topology.host or topology.source), _machine_facts(machine)
    is_short = len(name) + 2 + len(facts) <= _WIDE
    tree = Tree(_line(name, "default", (facts,)) if is_short else Text(name, style="bold"))
    if not is_short:
        tree.add(Text(facts))
    for package in topology.packages:
        nodes = nodes_of(topology, package.id)
        cores = [core for core in topology.cores if core.package == package.id]
        is_spanned = any(node.id in machine.l3_of for node in nodes)
        l3s = "" if is_spanned else _l3s(cores)
        branch = tree.add(_line(f"socket {package.id}", "default", (counted(len(cores), "core"), l3s)))
        _add_nodes(branch, machine, nodes)
    _add_nodes(tree, machine, nodes_of(topology, None))
    _add_empty_nodes(tree, machine)
    _add_devices(tree, machine, pcie_tree(topology, devices_on(topology, None)))
    sources = {node_source(gpu) for gpu in topology.gpus if gpu.node_source not in _USUAL_SOURCES}
    shared = [f"GPUs: {sources.pop()}"] if len(sources) == 1 and machine.is_one_source else []
    for line in (*map(str, buses(topology)), *distances(topology), *shared):
        tree.add(Text(line))
    return tree


@dataclass(frozen=True)
class _Shown:
    """A machine, the places of ranks, and what several branches need of it."""

    topology: Topology
    places: RankPlaces

    @cached_property
    def nearest_nics(self) -> Mapping[int, NearestNics]:
        return self.topology.nearest_nics

    @cached_property
    def empty(self) -> CpuSet:
        """The nodes that share one line."""
        return empty_nodes(self.topology)

    @cached_property
    def l3_of(self) -> Mapping[int, SpanningL3]:
        """The cache around each node whose L3 cache spans nodes."""
        return spanning_l3s(self.topology)

    @cached_property
    def fast(self) -> Mapping[int, str]:
        """The fast CPUs of each node that has fast and slow ones."""
        return {fast.node: f"fast CPUs {fast.cpus}" for fast in fast_cores(self.topology)}

    @cached_property
    def model(self) -> str:
        """The model of several GPUs if all have the same one."""
        return self._same(model_name(gpu) for gpu in self.topology.gpus)

    @cached_property
    def pcie(self) -> str:
        """The PCIe link of several GPUs if all have the same one."""
        return self._same(pcie_link(gpu.pcie) for gpu in self.topology.gpus)

    @cached_property
    def is_one_source(self) -> bool:
        """Whether the nodes of several GPUs are from one source."""
        return len(self.topology.gpus) > 1 and len({gpu.node_source for gpu in self.topology.gpus}) == 1

    def _same(self, facts: Iterable[str]) -> str:
        distinct = set(facts)
        return distinct.pop() if len(distinct) == 1 < len(self.topology.gpus) else ""


def _machine_facts(machine: _Shown) -> str:
    """Return the machine's size, and what all GPUs have in common."""
    topology = machine.topology
    threads = sorted({len(core.cpus) for core in topology.cores})
    smt = "" if threads in ([], [1]) else f" x {'-'.join(map(str, threads))} threads"
    allowed, gpus = topology.allowed.cpus, topology.gpus
    common = joined(machine.model.removeprefix("NVIDIA "), machine.pcie, separator=", ")
    return joined(
        counted(len(topology.packages), "socket") if topology.packages else "",
        counted(len(topology.nodes), "node"),
        f"{counted(len(topology.cores), 'core')}{smt}",
        "" if len(allowed) == len(topology.cpus) else f"{len(allowed)} CPUs allowed ({allowed})",
        (f"{len(gpus)} x {common}" if machine.model else f"{counted(len(gpus), 'GPU')}") if gpus else "",
    )


def _l3s(cores: Iterable[Core]) -> str:
    """Return how many cores share an L3 cache: "L3 for every 4 cores"; "" if some are unknown."""
    sizes: dict[int | None, int] = {}
    for core in cores:
        sizes[core.l3] = sizes.get(core.l3, 0) + 1
    if not sizes or None in sizes:
        return ""
    if len(sizes) == 1:
        return "one L3"
    each = " or ".join(map(str, sorted(set(sizes.values()))))
    return f"L3 for every {each} cores" if each != "1" else "L3 for every core"


def _add_nodes(branch: Tree, machine: _Shown, nodes: Iterable[Node]) -> None:
    around: dict[CpuSet, Tree] = {}
    for node in nodes:
        l3 = machine.l3_of.get(node.id)
        if l3 is not None and l3.nodes not in around:
            around[l3.nodes] = branch.add(Text(f"L3 of nodes {l3.nodes}  {counted(len(l3.cores), 'core')}"))
        if node.id not in machine.empty:
            leaf = (branch if l3 is None else around[l3.nodes]).add(_node_line(machine, node))
            _add_devices(leaf, machine, pcie_tree(machine.topology, devices_on(machine.topology, node.id)))


def _node_line(machine: _Shown, node: Node) -> Text:
    topology = machine.topology
    facts = (
        rank_names(machine.places.on(node.cpus)),
        kind_of(topology, node),
        f"CPUs {node.cpus}" if node.cpus else "",
        memory(node),
        machine.fast.get(node.id, ""),
        "" if node.id in topology.allowed.nodes else "not allowed",
    )
    return _line(f"node {node.id}", "green" if node.kind is NodeKind.CPU else "magenta", facts)


def _add_empty_nodes(tree: Tree, machine: _Shown) -> None:
    """Add one line for all nodes without anything on them."""
    if machine.empty:
        allowed = "" if machine.empty & machine.topology.allowed.nodes else "not allowed"
        facts = (f"nodes {machine.empty}: no memory, no CPUs", allowed)
        tree.add(_line(f"{len(machine.empty)} empty nodes", "magenta", facts))


def _add_devices(branch: Tree, machine: _Shown, parts: Sequence[PcieGroup | Device]) -> None:
    """Add the devices of a node in their PCIe tree."""
    for part in parts:
        if isinstance(part, PcieGroup):
            _add_devices(branch.add(Text(part.name)), machine, part.parts)
        elif isinstance(part, Adapter):
            branch.add(_line(part.name, "yellow", (short_pci(part.pci or ""), part.kind, nic_state(part))))
        else:
            branch.add(_gpu_line(machine, part))


def _gpu_line(machine: _Shown, gpu: Gpu) -> Text:
    is_usual = gpu.node_source in _USUAL_SOURCES or machine.is_one_source
    facts = (
        rank_names(machine.places.gpus.get(gpu.index, ())),
        address(gpu, short=True),
        "" if gpu.cuda_index == gpu.index else torch_name(gpu),
        "" if machine.model else model_name(gpu),
        "" if machine.pcie else pcie_link(gpu.pcie),
        f"{len(gpu.mig)} MIG" if gpu.mig else "",
        "" if is_usual and gpu.node is not None else node_source(gpu),
        own_nic(machine.nearest_nics.get(gpu.index)),
    )
    return _line(gpu.label, "cyan", facts)


def _line(name: str, color: str, facts: Iterable[str | None]) -> Text:
    """Return a name and the facts that are known."""
    return Text(name, style=f"bold {color}").append("  " + ", ".join(filter(None, facts)), style="not bold default")
