"""A topology as a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from rich.text import Text
from rich.tree import Tree

from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.topology.fast import fast_cores
from numapin.topology.model import NodeKind
from numapin.topology.nics import adapters
from numapin.view.marks import marks_of
from numapin.view.structure import empty_nodes, spanning_l3s
from numapin.view.words import (
    address,
    kind_of,
    machine_size,
    memory,
    model_name,
    node_source,
    nodes_of,
    on_node,
    own_nic,
    pcie_link,
    rank_names,
    shortened,
    torch_name,
)

_MOST_DISTANCES: Final = 128  # of a node
_FEWEST_ALIKE: Final = 3  # L3 groups and distances that share a line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Gpu, Node, Topology
    from numapin.topology.nics import Adapter, NearestNics
    from numapin.view.marks import Marks
    from numapin.view.structure import SpanningL3


def topo_tree(topology: Topology, plan: Plan | None = None) -> Tree:
    """Return the tree; nodes without a package, and devices of unknown node, are at the end, below the machine.

    Parts that are alike share a line: L3 groups of a node, and nodes without memory. Nodes and GPUs name their ranks in
    the plan. Raises UsageError for a plan of another machine.
    """
    machine = _Shown(topology, marks_of(topology, plan))
    host = Text(shortened(topology.host or topology.source), style="bold")
    tree = Tree(host.append(f"  {machine_size(topology)}", style="not bold"))
    for package in topology.packages:
        branch = tree.add(Text(f"package {package.id}", style="bold"))
        _add_nodes(branch, machine, nodes_of(topology, package.id))
    _add_nodes(tree, machine, nodes_of(topology, None))
    _add_empty_nodes(tree, machine)
    _add_devices(tree, machine, None)
    return tree


@dataclass(frozen=True)
class _Shown:
    """A machine, the places of ranks, and what several branches need of it."""

    topology: Topology
    marks: Marks

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        return adapters(self.topology.nics)

    @cached_property
    def nearest_nics(self) -> Mapping[int, NearestNics]:
        return self.topology.nearest_nics

    @cached_property
    def by_lowest_cpu(self) -> Mapping[int, Core]:
        return {min(core.cpus): core for core in self.topology.cores}

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
    def core_lines(self) -> dict[tuple[CpuSet, bool], list[str]]:
        """The lines of each node's cores: wrong firmware repeats a node's CPUs."""
        return {}


def _add_nodes(branch: Tree, machine: _Shown, nodes: Iterable[Node]) -> None:
    around: dict[CpuSet, Tree] = {}
    for node in nodes:
        l3 = machine.l3_of.get(node.id)
        if l3 is not None and l3.nodes not in around:
            around[l3.nodes] = branch.add(Text(f"L3 of nodes {l3.nodes}  {_cores(l3.cores)}"))
        if node.id not in machine.empty:
            _add_node(branch if l3 is None else around[l3.nodes], machine, node)


def _add_node(branch: Tree, machine: _Shown, node: Node) -> None:
    leaf = branch.add(_node_line(machine, node))
    for line in _lines_of_cores(machine, node):
        leaf.add(Text(line))
    _add_devices(leaf, machine, node.id)


def _node_line(machine: _Shown, node: Node) -> Text:
    topology = machine.topology
    facts = (
        rank_names(machine.marks.on(node.cpus)),
        kind_of(topology, node),
        memory(node),
        f"CPUs {node.cpus}" if node.cpus else "",
        machine.fast.get(node.id, ""),
        _distances(node),
        "" if node.id in topology.allowed.nodes else "not allowed",
    )
    return _line(f"node {node.id}", "green" if node.kind is NodeKind.CPU else "magenta", facts)


def _add_empty_nodes(tree: Tree, machine: _Shown) -> None:
    """Add one line for all nodes without anything on them."""
    if not machine.empty:
        return
    nodes = [node for node in machine.topology.nodes if node.id in machine.empty]
    allowed = machine.empty & machine.topology.allowed.nodes
    distances = set(chain.from_iterable(map(_distances_to_others, nodes)))
    facts = (
        f"nodes {machine.empty}: no memory, no CPUs",
        _range("distance", distances),
        "" if allowed else "not allowed",
    )
    tree.add(_line(f"{len(nodes)} empty nodes", "magenta", facts))


def _range(what: str, numbers: set[int]) -> str:
    """Return "distance 80" or "distances 80-120"."""
    if not numbers:
        return ""
    return f"{what} {min(numbers)}" if len(numbers) == 1 else f"{what}s {min(numbers)}-{max(numbers)}"


def _distances_to_others(node: Node) -> list[int]:
    return [distance for other, distance in node.distances.items() if other != node.id]


def _distances(node: Node) -> str:
    """Return the distances to other nodes; nodes at the same distance share an entry."""
    others = sorted((other, distance) for other, distance in node.distances.items() if other != node.id)
    if not others:
        return ""
    if len(others) > _MOST_DISTANCES:
        return "distances: see numapin topo --json"
    groups = _by_distance(others)
    if len(groups) == 1 and len(others) >= _FEWEST_ALIKE:
        return f"distance {others[0][1]} to all others"
    return f"distances {' '.join(f'{CpuSet(same)}:{distance}' for distance, same in groups.items())}"


def _by_distance(others: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for other, distance in others:
        groups.setdefault(distance, []).append(other)
    return groups


def _lines_of_cores(machine: _Shown, node: Node) -> list[str]:
    lines = machine.core_lines
    key = (node.cpus, node.id in machine.l3_of)
    if key not in lines:
        cores = list(_cores_within(node.cpus, machine.by_lowest_cpu))
        lines[key] = [f"cores  {_cores(cores)}"] if node.id in machine.l3_of else _core_lines(cores)
    return lines[key]


def _cores_within(cpus: CpuSet, by_lowest_cpu: Mapping[int, Core]) -> Iterator[Core]:
    for cpu in sorted(cpus):
        core = by_lowest_cpu.get(cpu)
        if core is not None and core.cpus <= cpus:
            yield core


def _core_lines(cores: Iterable[Core]) -> list[str]:
    """Return a line for each L3 group, or for all of the same size; the cores of unknown L3 are last."""
    groups: dict[int | None, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    unknown = groups.pop(None, None)
    in_order = [cores for _, cores in sorted(groups.items(), key=itemgetter(0))]
    lines = list(_l3_lines(in_order))
    return [*lines, f"cores  {_cores(unknown)}"] if unknown else lines


def _by_size(groups: Sequence[Sequence[Core]]) -> dict[str, list[Sequence[Core]]]:
    by_size: dict[str, list[Sequence[Core]]] = {}
    for cores in groups:
        by_size.setdefault(_size(cores), []).append(cores)
    return by_size


def _l3_lines(groups: Sequence[Sequence[Core]]) -> Iterator[str]:
    """Yield the lines of L3 groups; three or more of the same size share one."""
    for size, same in _by_size(groups).items():
        if len(same) < _FEWEST_ALIKE:
            yield from (f"L3  {_cores(cores)}" for cores in same)
        else:
            yield f"{len(same)} x L3  {size} each: CPUs {' | '.join(map(str, map(_cpus, same)))}"


def _cores(cores: Sequence[Core]) -> str:
    """Return "4 cores x 2 threads: CPUs 0-3,8-11"."""
    return f"{_size(cores)}: CPUs {_cpus(cores)}"


def _size(cores: Sequence[Core]) -> str:
    threads = "-".join(map(str, sorted({len(core.cpus) for core in cores})))
    smt = f" x {threads} threads" if threads != "1" else ""
    return f"{counted(len(cores), 'core')}{smt}"


def _cpus(cores: Sequence[Core]) -> CpuSet:
    return CpuSet().union(*(core.cpus for core in cores))


def _add_devices(branch: Tree, machine: _Shown, node: int | None) -> None:
    """Add the devices of a node; None: of unknown node."""
    for gpu in on_node(machine.topology.gpus, node):
        ranks = rank_names(machine.marks.gpus.get(gpu.index, ()))
        branch.add(_gpu_line(gpu, ranks, own_nic(machine.nearest_nics.get(gpu.index))))
    for adapter in on_node(machine.adapters, node):
        branch.add(_line(adapter.name, "yellow", (adapter.pci, adapter.kind)))


def _gpu_line(gpu: Gpu, ranks: str, nic: str) -> Text:
    mig = f"{len(gpu.mig)} MIG" if gpu.mig else ""
    facts = (ranks, address(gpu), torch_name(gpu), model_name(gpu), pcie_link(gpu.pcie), mig, node_source(gpu), nic)
    return _line(gpu.label, "cyan", facts)


def _line(name: str, color: str, facts: Iterable[str | None]) -> Text:
    """Return a name and the facts that are known."""
    return Text(name, style=f"bold {color}").append("  " + ", ".join(filter(None, facts)), style="not bold default")
