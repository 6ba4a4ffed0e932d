"""A topology as a tree: sockets, nodes, PCIe switches, GPUs and NICs, with the plan's ranks.

What is the same for all GPUs is said once, and distances and GPU links take a line each, so that the tree of a usual
machine fits 80 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text
from rich.tree import Tree

from numapin.base.text import counted
from numapin.topology.model import NodeKind, NodeSource
from numapin.topology.nics import Adapter
from numapin.view.machine import (
    PcieGroup,
    address,
    buses,
    devices_on,
    distances,
    joined,
    kind_of,
    machine_view,
    memory,
    model_name,
    nic_state,
    node_source,
    own_nic,
    pcie_link,
    pcie_tree,
    rank_names,
    short_pci,
    shortened,
    torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Node, Topology
    from numapin.view.machine import Device, MachineView

_WIDE: Final = 80  # columns of the first line; longer facts have a line of their own
_USUAL_SOURCES: Final = (None, NodeSource.SYSFS, NodeSource.SINGLE)


def topo_tree(topology: Topology, plan: Plan | None = None) -> Tree:
    """Return the tree; nodes without a socket, and devices of unknown node, are at the end, below the machine.

    Nodes and GPUs name their ranks in the plan. Raises UsageError for a plan of another machine.
    """
    machine = machine_view(topology, plan)
    # The first line: the machine's size, and what all GPUs have in common.
    threads = sorted({len(core.cpus) for core in topology.cores})
    smt = "" if threads in ([], [1]) else f" x {'-'.join(map(str, threads))} threads"
    allowed, gpus = topology.allowed.cpus, topology.gpus
    common = joined(machine.model.removeprefix("NVIDIA "), machine.pcie)
    gpu_fact = f"{len(gpus)} x {common}" if machine.model else counted(len(gpus), "GPU")
    facts = joined(
        counted(len(topology.packages), "socket") if topology.packages else "",
        counted(len(topology.nodes), "node"),
        f"{counted(len(topology.cores), 'core')}{smt}",
        "" if len(allowed) == len(topology.cpus) else f"{len(allowed)} CPUs allowed ({allowed})",
        gpu_fact if gpus else "",
    )
    name = shortened(topology.host or topology.source)
    is_short = len(name) + 2 + len(facts) <= _WIDE
    tree = Tree(_line(name, "default", (facts,)) if is_short else Text(name, style="bold"))
    if not is_short:
        tree.add(Text(facts))
    packages = {package.id for package in topology.packages}
    for package in topology.packages:
        nodes = [node for node in topology.nodes if node.package == package.id]
        cores = [core for core in topology.cores if core.package == package.id]
        branch = tree.add(_line(f"socket {package.id}", "default", (counted(len(cores), "core"), _l3s(cores))))
        _add_nodes(branch, machine, nodes)
    _add_nodes(tree, machine, [node for node in topology.nodes if node.package not in packages])
    homeless = topology.cpus.difference(*(node.cpus for node in topology.nodes))
    if homeless:
        tree.add(_line("node unknown", "magenta", (f"CPUs {homeless}",)))
    if machine.empty:
        is_allowed = "" if machine.empty & topology.allowed.nodes else "not allowed"
        what = (f"nodes {machine.empty}: no memory, no CPUs", is_allowed)
        tree.add(_line(f"{len(machine.empty)} empty nodes", "magenta", what))
    _add_devices(tree, machine, pcie_tree(topology, devices_on(topology, None)))
    # What is said once for all GPUs: an unusual source of their nodes, and their links.
    is_unusual = machine.is_one_source and gpus[0].node_source not in _USUAL_SOURCES
    shared = [f"GPUs: {node_source(gpus[0])}"] if is_unusual else []
    for line in (*map(str, buses(topology)), *distances(topology), *shared):
        tree.add(Text(line))
    return tree


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


def _add_nodes(branch: Tree, machine: MachineView, nodes: Iterable[Node]) -> None:
    topology = machine.topology
    for node in nodes:
        if node.id not in machine.empty:
            facts = (
                rank_names(machine.places.on(node.cpus)),
                kind_of(topology, node),
                f"CPUs {node.cpus}" if node.cpus else "",
                memory(node),
                machine.fast.get(node.id, ""),
                "" if node.id in topology.allowed.nodes else "not allowed",
            )
            line = _line(f"node {node.id}", "green" if node.kind is NodeKind.CPU else "magenta", facts)
            _add_devices(branch.add(line), machine, pcie_tree(topology, devices_on(topology, node.id)))


def _add_devices(branch: Tree, machine: MachineView, parts: Sequence[PcieGroup | Device]) -> None:
    """Add the devices of a node in their PCIe tree."""
    for part in parts:
        if isinstance(part, PcieGroup):
            _add_devices(branch.add(Text(part.name)), machine, part.parts)
        elif isinstance(part, Adapter):
            branch.add(_line(part.name, "yellow", (short_pci(part.pci or ""), part.kind, nic_state(part))))
        else:
            is_usual = part.node_source in _USUAL_SOURCES or machine.is_one_source
            facts = (
                rank_names(machine.places.gpus.get(part.index, ())),
                address(part),
                "" if part.cuda_index == part.index else torch_name(part),
                "" if machine.model else model_name(part),
                "" if machine.pcie else pcie_link(part),
                f"{len(part.mig)} MIG" if part.mig else "",
                "" if is_usual and part.node is not None else node_source(part),
                own_nic(machine.nearest_nics.get(part.index)),
            )
            branch.add(_line(part.label, "cyan", facts))


def _line(name: str, color: str, facts: Iterable[str | None]) -> Text:
    """Return a name and the facts that are known."""
    return Text(name, style=f"bold {color}").append("  " + ", ".join(filter(None, facts)), style="not bold default")
