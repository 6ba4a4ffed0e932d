"""A topology as a tree. Pure.

Comes in: a `Topology`. Goes out: packages, nodes, L3 groups, cores, GPUs and NICs as a rich Tree, with distances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from numapin import cpulist
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.model import Core, Gpu, Nic, Node, Pcie, Topology


def topo_tree(topology: Topology) -> Tree:
    """Return the tree; what has no package or no known node hangs from the machine itself, at the end."""
    num_cpus, num_allowed = len(topology.cpus), len(topology.allowed.cpus)
    allowed = "" if num_cpus == num_allowed else f", {num_allowed} allowed ({cpulist.render(topology.allowed.cpus)})"
    host = Text(topology.host or topology.source, style="bold")
    tree = Tree(host.append(f"  {len(topology.cores)} cores, {num_cpus} CPUs{allowed}", style="not bold"))
    for package in topology.packages:
        branch = tree.add(Text(f"package {package.id}", style="bold"))
        _add_nodes(branch, topology, (n for n in topology.nodes if n.package == package.id))
    _add_nodes(tree, topology, (n for n in topology.nodes if n.package is None))
    _add_devices(tree, topology, None)
    return tree


def _add_nodes(branch: Tree, topology: Topology, nodes: Iterable[Node]) -> None:
    for node in nodes:
        leaf = branch.add(_node_line(node, allowed=node.id in topology.allowed.nodes))
        _add_cores(leaf, [core for core in topology.cores if core.cpus <= node.cpus])
        _add_devices(leaf, topology, node.id)


def _node_line(node: Node, *, allowed: bool) -> Text:
    line = Text(f"node {node.id}", style="bold green" if node.kind is NodeKind.CPU else "bold magenta")
    kind = {NodeKind.CPU: "", NodeKind.MEMORY: "memory only", NodeKind.GPU: "GPU memory"}[node.kind]
    others = [f"{other}:{distance}" for other, distance in sorted(node.distances.items()) if other != node.id]
    facts = (
        kind,
        _memory(node),
        f"CPUs {cpulist.render(node.cpus)}" if node.cpus else "",
        f"distances {' '.join(others)}" if others else "",
        "" if allowed else "not allowed",
    )
    return line.append("  " + ", ".join(fact for fact in facts if fact), style="not bold default")


def _memory(node: Node) -> str:
    if node.memory_bytes is None:
        return ""
    free = "" if node.free_bytes is None else f" ({_gib(node.free_bytes)} free)"
    return f"{_gib(node.memory_bytes)}{free}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _add_cores(leaf: Tree, cores: list[Core]) -> None:
    for l3 in sorted({core.l3 for core in cores}, key=lambda group: (group is None, group or 0)):
        group = [core for core in cores if core.l3 == l3]
        threads = sorted({len(core.cpus) for core in group})
        smt = f" x {'-'.join(map(str, threads))} threads" if threads != [1] else ""
        what = "cores" if l3 is None else "L3"
        cpus = cpulist.render(cpu for core in group for cpu in core.cpus)
        leaf.add(Text(f"{what}  {len(group)} cores{smt}: CPUs {cpus}"))


def _add_devices(branch: Tree, topology: Topology, node: int | None) -> None:
    for gpu in topology.gpus:
        if gpu.node == node:
            branch.add(_gpu_line(gpu))
    for nic in topology.nics:
        if nic.node == node:
            branch.add(_nic_line(nic))


def _gpu_line(gpu: Gpu) -> Text:
    cuda = f"cuda:{gpu.cuda_index}" if gpu.cuda_index is not None else "" if gpu.visible else "hidden from CUDA"
    source = f"node from {gpu.node_source}" if gpu.node_source else "node unknown"
    facts = (gpu.pci, cuda, gpu.name, _pcie(gpu.pcie), f"{len(gpu.mig)} MIG" if gpu.mig else "", source)
    return Text(gpu.label, style="bold cyan").append("  " + ", ".join(f for f in facts if f), style="not bold default")


def _pcie(pcie: Pcie) -> str:
    if pcie.gen is None or pcie.width is None:
        return ""
    full = pcie.gen == (pcie.max_gen or pcie.gen) and pcie.width == (pcie.max_width or pcie.width)
    return f"PCIe {pcie.gen} x{pcie.width}" + ("" if full else f" of {pcie.max_gen} x{pcie.max_width}")


def _nic_line(nic: Nic) -> Text:
    facts = (nic.pci, nic.kind)
    return Text(nic.name, style="bold yellow").append("  " + ", ".join(f for f in facts if f), style="not bold default")
