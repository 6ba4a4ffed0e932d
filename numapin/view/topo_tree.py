"""A topology as a tree. Pure.

Comes in: a `Topology`, and optionally a `Plan`. Goes out: a rich Tree of packages, nodes, L3 groups, cores, GPUs and
NICs, with node distances and the plan's ranks.
"""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from rich.text import Text
from rich.tree import Tree

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import NodeKind
from numapin.view.marks import marks_of
from numapin.view.words import (
    NODE_KINDS,
    cuda_name,
    machine_size,
    memory,
    model_name,
    node_source,
    nodes_of,
    on_node,
    pcie_link,
    rank_names,
    shortened,
)

_MOST_DISTANCES: Final = 128  # of a node; with more, --format matrix or --json has them

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Gpu, Node, Topology
    from numapin.view.marks import Marks


def topo_tree(topology: Topology, plan: Plan | None = None) -> Tree:
    """Return the tree; nodes without a package, and devices of unknown node, are at the end, below the machine.

    Nodes and GPUs name their ranks in the plan. Raises UsageError for a plan of another machine.
    """
    marks = marks_of(topology, plan)
    host = Text(shortened(topology.host or topology.source), style="bold")
    tree = Tree(host.append(f"  {machine_size(topology)}", style="not bold"))
    for package in topology.packages:
        branch = tree.add(Text(f"package {package.id}", style="bold"))
        _add_nodes(branch, topology, marks, nodes_of(topology, package.id))
    _add_nodes(tree, topology, marks, nodes_of(topology, None))
    _add_devices(tree, topology, marks, None)
    return tree


def _add_nodes(branch: Tree, topology: Topology, marks: Marks, nodes: Iterable[Node]) -> None:
    by_lowest_cpu = {min(core.cpus): core for core in topology.cores}
    lines = cache(lambda cpus: _core_lines(_cores_within(cpus, by_lowest_cpu)))  # wrong firmware repeats a node's CPUs
    for node in nodes:
        ranks = rank_names(marks.on(node.cpus))
        leaf = branch.add(_node_line(node, ranks, allowed=node.id in topology.allowed.nodes))
        for line in lines(node.cpus):
            leaf.add(Text(line))
        _add_devices(leaf, topology, marks, node.id)


def _node_line(node: Node, ranks: str, *, allowed: bool) -> Text:
    cpus = f"CPUs {node.cpus}" if node.cpus else ""
    facts = (ranks, NODE_KINDS[node.kind], memory(node), cpus, _distances(node), "" if allowed else "not allowed")
    return _line(f"node {node.id}", "green" if node.kind is NodeKind.CPU else "magenta", facts)


def _distances(node: Node) -> str:
    others = sorted((other, distance) for other, distance in node.distances.items() if other != node.id)
    if not others or len(node.distances) > _MOST_DISTANCES:
        return ""
    return f"distances {' '.join(f'{other}:{distance}' for other, distance in others)}"


def _cores_within(cpus: CpuSet, by_lowest_cpu: Mapping[int, Core]) -> Iterator[Core]:
    for cpu in sorted(cpus):
        core = by_lowest_cpu.get(cpu)
        if core is not None and core.cpus <= cpus:
            yield core


def _core_lines(cores: Iterable[Core]) -> list[str]:
    """Return a line for each L3 group, the cores of unknown L3 last."""
    groups: dict[int | None, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    unknown = groups.pop(None, None)
    lines = [f"L3  {_cores(cores)}" for _, cores in sorted(groups.items(), key=itemgetter(0))]
    return [*lines, f"cores  {_cores(unknown)}"] if unknown else lines


def _cores(cores: Sequence[Core]) -> str:
    """Return "4 cores x 2 threads: CPUs 0-3,8-11"."""
    threads = "-".join(map(str, sorted({len(core.cpus) for core in cores})))
    smt = f" x {threads} threads" if threads != "1" else ""
    return f"{len(cores)} cores{smt}: CPUs {CpuSet().union(*(core.cpus for core in cores))}"


def _add_devices(branch: Tree, topology: Topology, marks: Marks, node: int | None) -> None:
    """Add the devices of a node; None: of unknown node."""
    for gpu in on_node(topology.gpus, node):
        branch.add(_gpu_line(gpu, rank_names(marks.gpus.get(gpu.index, ()))))
    for nic in on_node(topology.nics, node):
        branch.add(_line(nic.name, "yellow", (nic.pci, nic.kind)))


def _gpu_line(gpu: Gpu, ranks: str) -> Text:
    mig = f"{len(gpu.mig)} MIG" if gpu.mig else ""
    facts = (ranks, gpu.pci, cuda_name(gpu), model_name(gpu), pcie_link(gpu.pcie), mig, node_source(gpu))
    return _line(gpu.label, "cyan", facts)


def _line(name: str, color: str, facts: Iterable[str | None]) -> Text:
    """Return a name and the facts that are known."""
    return Text(name, style=f"bold {color}").append("  " + ", ".join(filter(None, facts)), style="not bold default")
