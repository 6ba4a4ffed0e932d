"""A topology as a tree. Pure.

Comes in: a `Topology`, and a `Plan` or none. Goes out: packages, nodes, L3 groups, cores, GPUs and NICs as a rich Tree,
with distances and the plan's ranks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

from rich.text import Text
from rich.tree import Tree

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import NodeKind
from numapin.view.marks import marks_of
from numapin.view.words import NODE_KINDS, machine_size, memory, pcie_link, rank_names, shortened

_MOST_DISTANCES: Final = 128  # in a line; beyond, --format matrix or --json has them

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Gpu, Nic, Node, Topology
    from numapin.view.marks import Marks


def topo_tree(topology: Topology, plan: Plan | None = None) -> Tree:
    """Return the tree; what has no package or no known node hangs from the machine itself, at the end.

    Nodes and GPUs name the ranks that the plan puts there. Raises UsageError for a plan of another machine.
    """
    marks = marks_of(topology, plan)
    host = Text(shortened(topology.host or topology.source), style="bold")
    tree = Tree(host.append(f"  {machine_size(topology)}", style="not bold"))
    for package in topology.packages:
        branch = tree.add(Text(f"package {package.id}", style="bold"))
        _add_nodes(branch, topology, marks, (n for n in topology.nodes if n.package == package.id))
    _add_nodes(tree, topology, marks, (n for n in topology.nodes if n.package is None))
    _add_devices(tree, topology, marks, None)
    return tree


def _add_nodes(branch: Tree, topology: Topology, marks: Marks, nodes: Iterable[Node]) -> None:
    by_lowest = {min(core.cpus): core for core in topology.cores}
    lines = cache(lambda cpus: _core_lines(_within(by_lowest, cpus)))  # firmware that is wrong lists all on every node
    for node in nodes:
        ranks = rank_names(marks.on(node.cpus))
        leaf = branch.add(_node_line(node, ranks, allowed=node.id in topology.allowed.nodes))
        for line in lines(node.cpus):
            leaf.add(Text(line))
        _add_devices(leaf, topology, marks, node.id)


def _node_line(node: Node, ranks: str, *, allowed: bool) -> Text:
    line = Text(f"node {node.id}", style="bold green" if node.kind is NodeKind.CPU else "bold magenta")
    far = sorted(node.distances.items()) if len(node.distances) <= _MOST_DISTANCES else ()
    others = [f"{other}:{distance}" for other, distance in far if other != node.id]
    facts = (
        ranks,
        NODE_KINDS[node.kind],
        memory(node),
        f"CPUs {node.cpus}" if node.cpus else "",
        f"distances {' '.join(others)}" if others else "",
        "" if allowed else "not allowed",
    )
    return line.append("  " + ", ".join(fact for fact in facts if fact), style="not bold default")


def _within(by_lowest: Mapping[int, Core], cpus: CpuSet) -> list[Core]:
    """Return the cores that lie in a set of CPUs."""
    found = (by_lowest[cpu] for cpu in sorted(cpus) if cpu in by_lowest)
    return [core for core in found if core.cpus <= cpus]


def _core_lines(cores: list[Core]) -> list[str]:
    """Return a line for each L3 group."""
    lines = []
    groups: dict[int | None, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    for l3 in sorted(groups, key=lambda group: (group is None, group or 0)):
        group = groups[l3]
        threads = sorted({len(core.cpus) for core in group})
        smt = f" x {'-'.join(map(str, threads))} threads" if threads != [1] else ""
        what = "cores" if l3 is None else "L3"
        cpus = str(CpuSet(cpu for core in group for cpu in core.cpus))
        lines.append(f"{what}  {len(group)} cores{smt}: CPUs {cpus}")
    return lines


def _add_devices(branch: Tree, topology: Topology, marks: Marks, node: int | None) -> None:
    for gpu in topology.gpus:
        if gpu.node == node:
            branch.add(_gpu_line(gpu, rank_names(marks.gpus.get(gpu.index, ()))))
    for nic in topology.nics:
        if nic.node == node:
            branch.add(_nic_line(nic))


def _gpu_line(gpu: Gpu, ranks: str) -> Text:
    cuda = f"cuda:{gpu.cuda_index}" if gpu.cuda_index is not None else "" if gpu.visible else "hidden from CUDA"
    source = f"node from {gpu.node_source}" if gpu.node_source else "node unknown"
    mig = f"{len(gpu.mig)} MIG" if gpu.mig else ""
    facts = (ranks, gpu.pci, cuda, gpu.name, pcie_link(gpu.pcie), mig, source)
    return Text(gpu.label, style="bold cyan").append("  " + ", ".join(f for f in facts if f), style="not bold default")


def _nic_line(nic: Nic) -> Text:
    facts = (nic.pci, nic.kind)
    return Text(nic.name, style="bold yellow").append("  " + ", ".join(f for f in facts if f), style="not bold default")
