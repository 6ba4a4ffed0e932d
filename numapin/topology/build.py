"""Build a `Topology` from the readings."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from numapin.base import cpu_set
from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.errors import UsageError
from numapin.topology.fast import speed_notes
from numapin.topology.gpus import (
    NodeIndex,
    find_gpus,
    find_nics,
    gpu_notes,
    only_member,
    unusable,
    why_order_unknown,
    within,
)
from numapin.topology.links import links_of, with_moved
from numapin.topology.model import (
    Allowed,
    Core,
    Node,
    NodeKind,
    NodeSource,
    Package,
    Topology,
)
from numapin.topology.readings import CpuReading, NodeReading, Readings, siblings_known
from numapin.topology.vendors import seen_by_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numapin.topology.model import Gpu


def build(readings: Readings, *, environ: Mapping[str, str] | None = None) -> Topology:
    """Build a topology; `environ` has the variables that hide and order GPUs, such as CUDA_VISIBLE_DEVICES.

    Raises ValueError (`Topology`'s own checks) if readings contradict each other and no rule below decides.
    """
    environ = environ or {}
    _require_counts(readings)
    cpus = {reading.cpu: reading for reading in readings.cpus}
    nodes = _nodes(readings, cpus)
    cores = _cores(cpus, nodes)
    index = NodeIndex(nodes)
    found = find_gpus(readings, index)
    gpus, visibility_notes = seen_by_ranks(
        tuple(device.gpu for device in found), environ, unusable=frozenset(unusable(found))
    )
    order_note = why_order_unknown(found, environ)
    nics = find_nics(readings, index)
    links, links_notes = links_of(readings, gpus, nics)
    topology = Topology(
        host=readings.host,
        source=readings.source,
        packages=_packages(cpus, nodes),
        nodes=nodes,
        cores=cores,
        allowed=_allowed(readings, nodes),
        gpus=gpus,
        nics=nics,
        links=links,
        notes=(
            *readings.notes,
            *_nvml_notes(readings),
            *gpu_notes(found),
            *visibility_notes,
            *filter(None, [order_note]),
            *links_notes,
        ),
        siblings_known=siblings_known(readings.cpus),
        doubtful_nodes=readings.doubtful_nodes | _overlapping(nodes),
        memory_bytes=readings.memory_bytes,
        speeds=readings.speeds,
        gpu_order_known=not order_note,
        allowed_known=readings.allowed_known,
    )
    notes = speed_notes(topology)
    return replace(topology, notes=(*topology.notes, *notes)) if notes else topology


def _require_counts(readings: Readings) -> None:
    """Raise ValueError if there are more parts of a kind than any machine has, before they are put together."""
    for what, num, most in (
        ("CPUs", len(readings.cpus), MAX_CPUS),
        ("NUMA nodes", len(readings.nodes), MAX_NODES),
        ("GPUs", readings.num_gpus, MAX_GPUS),
        ("network interfaces", readings.num_nics, MAX_NICS),
    ):
        if num > most:
            raise ValueError(f"more than {most} {what}, the most that are accepted")


def _allowed(readings: Readings, nodes: Iterable[Node]) -> Allowed:
    return Allowed(
        cpus=within(readings.allowed_cpus, readings.online),
        nodes=within(readings.allowed_nodes, CpuSet(node.id for node in nodes)),
    )


def with_gpu_nodes(topology: Topology, pairs: Iterable[tuple[str, int]]) -> Topology:
    """Put GPUs on the given nodes, which overrule every reading; notes say what they replaced.

    Args:
        topology: The machine as it was read.
        pairs: Pairs of a GPU (see `Topology.find_gpu`) and its node.

    Returns:
        The same machine with these GPUs on these nodes, and with new links.

    Raises:
        UsageError: A GPU or node does not exist, a node has no CPUs, or a GPU is on two nodes.
    """
    chosen = _chosen_nodes(topology, pairs)
    gpus = _moved_gpus(topology, chosen)
    nodes = {nic.name: nic.node for nic in topology.nics} | {gpu.label: gpu.node for gpu in gpus}
    links = with_moved(topology.links, frozenset(gpu.label for gpu in gpus if gpu.index in chosen), nodes)
    return replace(topology, gpus=gpus, links=links, notes=(*topology.notes, *_replaced_notes(topology, chosen)))


def _moved_gpus(topology: Topology, chosen: Mapping[int, int]) -> tuple[Gpu, ...]:
    """Return all GPUs, the chosen ones on their nodes."""
    cpus = {node.id: node.cpus for node in topology.nodes}
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    for index, node in chosen.items():
        by_index[index] = replace(by_index[index], node=node, node_source=NodeSource.USER, cpus=cpus[node])
    return tuple(by_index.values())


def _chosen_nodes(topology: Topology, pairs: Iterable[tuple[str, int]]) -> dict[int, int]:
    """Return the node that the user gave for each GPU, by the GPU's index."""
    chosen: dict[int, int] = {}
    for key, node in pairs:
        gpu = topology.find_gpu(key, option="--gpu-nodes")
        _require_cpu_node(topology, node)
        if chosen.setdefault(gpu.index, node) != node:
            raise UsageError(f"--gpu-nodes puts {gpu.label} on nodes {chosen[gpu.index]} and {node}", "name it once")
    return chosen


def _replaced_notes(topology: Topology, chosen: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(
        f"--gpu-nodes puts {gpu.label} on node {chosen[gpu.index]}; {gpu.node_source} says node {gpu.node}"
        for gpu in topology.gpus
        if gpu.index in chosen and gpu.node not in (None, chosen[gpu.index])
    )


def _require_cpu_node(topology: Topology, node: int) -> None:
    usable = CpuSet(n.id for n in topology.cpu_nodes)
    if node not in usable:
        raise UsageError(
            f"--gpu-nodes: node {node} has no CPUs or does not exist; nodes with CPUs: {usable}",
            "list them with: numapin topo",
        )


# --- nodes, cores, packages ------------------------------------------------------------------------------------------


def _nodes(readings: Readings, cpus: Mapping[int, CpuReading]) -> tuple[Node, ...]:
    gpu_memory = _gpu_memory_nodes(readings)
    # A kernel without NUMA shows no nodes. It behaves as one node 0, which libnuma and hwloc also make up.
    found = readings.nodes or (NodeReading(id=0, cpus=CpuSet(cpus), distances={0: 10}),)
    inside, packages_of = cpu_set.Inside(cpus), _packages_of(cpus)
    in_order = sorted(found, key=attrgetter("id"))
    return tuple(_node(reading, inside.of(reading.cpus), packages_of, gpu_memory) for reading in in_order)


def _gpu_memory_nodes(readings: Readings) -> CpuSet:
    return readings.gpu_memory_nodes.union(not_none(gpu.own_node for gpu in readings.nvml.gpus or ()))


def _packages_of(cpus: Mapping[int, CpuReading]) -> Callable[[CpuSet], frozenset[int | None]]:
    """Return a function for the packages of a set of CPUs, cached because the same few sets come again and again."""
    return cache(lambda members: frozenset(cpus[cpu].package for cpu in members))


def _node(
    reading: NodeReading,
    online: CpuSet,
    packages_of: Callable[[CpuSet], frozenset[int | None]],
    gpu_memory: CpuSet,
) -> Node:
    without_cpus = NodeKind.GPU if reading.id in gpu_memory else NodeKind.MEMORY
    return Node(
        id=reading.id,
        kind=NodeKind.CPU if online else without_cpus,
        cpus=online,
        package=only_member(packages_of(online)),
        memory_bytes=reading.memory_bytes,
        free_bytes=reading.free_bytes,
        distances=dict(reading.distances),
    )


def _cores(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    homes = _unique_homes(nodes)
    left = set(cpus)
    lowest = cache(min)  # of the L3 groups, which are large but few
    cores = []
    for cpu in sorted(cpus):
        if cpu in left:
            siblings = cpus[cpu].siblings or CpuSet()
            members = CpuSet(siblings & left | {cpu})  # of two overlapping sibling lists, the first counts
            left -= members
            cores.append(_core(cpus[cpu], members, homes, lowest))
    return tuple(cores)


def _core(reading: CpuReading, members: CpuSet, homes: Mapping[int, int], lowest: Callable[[CpuSet], int]) -> Core:
    """Return the core of a CPU, its lowest; it has no node if its members are on several."""
    node = only_member({homes.get(member) for member in members})
    l3 = lowest(reading.l3) if reading.l3 else None
    return Core(id=reading.cpu, cpus=members, node=node, package=reading.package, l3=l3)


def _shared_cpus(nodes: tuple[Node, ...]) -> CpuSet:
    """Return the CPUs that several nodes list (seen on machines with broken firmware)."""
    shared: set[int] = set()
    seen: set[int] = set()
    for cpus, number in Counter(node.cpus for node in nodes).items():
        shared |= cpus if number > 1 else seen & cpus
        seen |= cpus
    return CpuSet(shared)


def _overlapping(nodes: tuple[Node, ...]) -> CpuSet:
    """Return the nodes that list a CPU of another node."""
    shared = _shared_cpus(nodes)
    return CpuSet(node.id for node in nodes if not node.cpus.isdisjoint(shared)) if shared else CpuSet()


def _unique_homes(nodes: tuple[Node, ...]) -> dict[int, int]:
    """Map each CPU to its node, without CPUs that several nodes claim."""
    lists = {node.cpus: node.id for node in nodes}  # nodes with equal lists have shared CPUs only
    shared = _shared_cpus(nodes)
    return {cpu: node for cpus, node in lists.items() for cpu in (cpus - shared if shared else cpus)}


def _packages(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...]) -> tuple[Package, ...]:
    packages_of = _packages_of(cpus)
    members: defaultdict[int | None, set[int]] = defaultdict(set)
    for node in nodes:
        for package in packages_of(node.cpus):
            members[package].add(node.id)
    return tuple(Package(id=package, nodes=CpuSet(members[package])) for package in _package_numbers(cpus))


def _package_numbers(cpus: Mapping[int, CpuReading]) -> list[int]:
    return sorted({reading.package for reading in cpus.values() if reading.package is not None})


# --- notes -----------------------------------------------------------------------------------------------------------


def _nvml_notes(readings: Readings) -> tuple[str, ...]:
    """Return NVML's notes; none if there is no driver and no NVIDIA GPU either."""
    return () if readings.nvml.is_absent and readings.num_nvidia == 0 else readings.nvml.notes
