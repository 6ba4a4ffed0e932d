"""Build a `Topology` from the readings. Pure.

Comes in: `Readings` of one machine. Goes out: its `Topology`, in which every GPU's node has a source or is None.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count, islice, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.topology.address import pci_order
from numapin.topology.links import links_of, with_moved
from numapin.topology.model import (
    Allowed,
    Core,
    Gpu,
    Nic,
    Node,
    NodeKind,
    NodeSource,
    Package,
    Pcie,
    Topology,
)
from numapin.topology.readings import CpuReading, NodeReading, NvmlReading, PciReading, Readings
from numapin.topology.visible import apply_visibility

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping


def build(readings: Readings, *, visible_devices: str | None = None, device_order: str | None = None) -> Topology:
    """Build a topology; the two texts are the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

    Raises ValueError (`Topology`'s own checks) if readings contradict each other and no rule below decides.
    """
    _require_counts(readings)
    cpus = {reading.cpu: reading for reading in readings.cpus}
    nodes = _nodes(readings, cpus)
    cores = _cores(cpus, nodes)
    homes = _Homes(nodes)
    gpus, visibility_notes = apply_visibility(
        _gpus(readings, nodes, homes), visible_devices=visible_devices, device_order=device_order
    )
    nics = _nics(readings, homes)
    links, links_notes = links_of(readings, gpus, nics)
    return Topology(
        host=readings.host,
        source=readings.source,
        packages=_packages(cpus, nodes),
        nodes=nodes,
        cores=cores,
        allowed=Allowed(
            cpus=_within(readings.allowed_cpus, CpuSet(cpus)),
            nodes=_within(readings.allowed_nodes, CpuSet(node.id for node in nodes)),
        ),
        gpus=gpus,
        nics=nics,
        links=links,
        notes=(*readings.notes, *_nvml_notes(readings), *visibility_notes, *links_notes),
    )


def _require_counts(readings: Readings) -> None:
    """Raise ValueError if there are more parts of a kind than any machine has, before they are put together."""
    for what, num, most in (
        ("CPUs", len(readings.cpus), MAX_CPUS),
        ("NUMA nodes", len(readings.nodes), MAX_NODES),
        ("GPUs", readings.num_gpus, MAX_GPUS),
        ("network interfaces", sum(len(reading.interfaces) for reading in readings.pci), MAX_NICS),
    ):
        if num > most:
            raise ValueError(f"more than {most} {what}, the most that are accepted")


def with_gpu_nodes(
    topology: Topology, pairs: Iterable[tuple[str, int]], *, source: NodeSource = NodeSource.USER
) -> Topology:
    """Put GPUs on the given nodes, which overrule every reading; notes say what they replaced.

    Args:
        topology: The machine as it was read.
        pairs: Pairs of a GPU (see `Topology.find_gpu`) and its node.
        source: Where the pairs come from.

    Returns:
        The same machine with these GPUs on these nodes, and with new links.

    Raises:
        UsageError: A GPU or node does not exist, a node has no CPUs, or a GPU is on two nodes.
    """
    chosen = _chosen_nodes(topology, pairs)
    cpus = {node.id: node.cpus for node in topology.nodes}
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    moved = {
        index: replace(by_index[index], node=node, node_source=source, cpus=cpus[node])
        for index, node in chosen.items()
    }
    gpus = tuple(moved.get(gpu.index, gpu) for gpu in topology.gpus)
    nodes = {nic.name: nic.node for nic in topology.nics} | {gpu.label: gpu.node for gpu in gpus}
    links = with_moved(topology.links, frozenset(gpu.label for gpu in moved.values()), nodes)
    return replace(topology, gpus=gpus, links=links, notes=(*topology.notes, *_replaced_notes(topology, chosen)))


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
    own = CpuSet(gpu.own_node for gpu in readings.nvml.gpus or () if gpu.own_node is not None)
    gpu_memory = readings.gpu_memory_nodes | own
    # A kernel without NUMA shows no nodes. It behaves as one node 0, which libnuma and hwloc also make up.
    found = readings.nodes or (NodeReading(id=0, cpus=CpuSet(cpus), distances={0: 10}),)
    inside, packages_of = cpu_set.Inside(cpus), _packages_of(cpus)
    in_order = sorted(found, key=attrgetter("id"))
    return tuple(_node(reading, inside.of(reading.cpus), packages_of, gpu_memory) for reading in in_order)


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
        package=_only(packages_of(online)),
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
            reading = cpus[cpu]
            members = CpuSet(reading.siblings & left | {cpu})  # of two overlapping sibling lists, the first counts
            left -= members
            node = _only({homes.get(member) for member in members})
            l3 = lowest(reading.l3) if reading.l3 else None
            cores.append(Core(id=cpu, cpus=members, node=node, package=reading.package, l3=l3))
    return tuple(cores)


def _only(members: Collection[int | None]) -> int | None:
    """Return the only member of a set, or None if there are several or none."""
    return next(iter(members)) if len(members) == 1 else None


def _unique_homes(nodes: tuple[Node, ...]) -> dict[int, int]:
    """Map each CPU to its node, without CPUs that several nodes claim (seen on machines with broken firmware)."""
    homes: dict[int, int] = {}
    contested: set[int] = set()
    claims: dict[CpuSet, list[int]] = {}
    for node in nodes:
        claims.setdefault(node.cpus, []).append(node.id)
    for cpus, ids in claims.items():
        contested |= homes.keys() & cpus
        if len(ids) > 1:
            contested |= cpus
        homes.update(dict.fromkeys(cpus, ids[0]))
    return {cpu: node for cpu, node in homes.items() if cpu not in contested}


def _packages(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...]) -> tuple[Package, ...]:
    packages_of = _packages_of(cpus)
    members: dict[int, set[int]] = {r.package: set() for r in cpus.values() if r.package is not None}
    for node in nodes:
        for package in members.keys() & packages_of(node.cpus):
            members[package].add(node.id)
    return tuple(Package(id=package, nodes=CpuSet(members[package])) for package in sorted(members))


def _within(allowed: CpuSet | None, existing: CpuSet) -> CpuSet:
    return existing if allowed is None else allowed & existing


# --- GPUs and their nodes --------------------------------------------------------------------------------------------


class _Evidence(NamedTuple):
    """All findings about the node of one device."""

    homes: _Homes
    pci: PciReading
    nvml_nodes: CpuSet | None = None
    nvml_cpus: CpuSet | None = None
    nccl_node: int | None = None


class _Homes:
    """The nodes on which a device can be: those with CPUs."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._with_cpus = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
        self.single = _only(self._with_cpus)
        self._around: dict[CpuSet, int | None] = {}

    def cpus_of(self, node: int | None) -> CpuSet | None:
        """Return the CPUs of a node with CPUs."""
        return None if node is None else self._with_cpus.get(node)

    def only(self, candidates: Iterable[int | None] | None) -> int | None:
        """Return the only node with CPUs among the candidates, or None."""
        return _only(self._with_cpus.keys() & set(candidates or ()))

    def around(self, cpus: CpuSet | None) -> int | None:
        """Return the only node that has all of these CPUs, or None."""
        if not cpus:
            return None
        if cpus not in self._around:
            matches = (node for node, own in self._with_cpus.items() if cpus <= own)
            self._around[cpus] = _only(list(islice(matches, 2)))
        return self._around[cpus]


# `NodeSource` in its order, without the two that `with_gpu_nodes` adds: the user's and the measured node.
_LADDER: Final[tuple[tuple[NodeSource, Callable[[_Evidence], int | None]], ...]] = (
    (NodeSource.SYSFS, lambda e: e.homes.only([e.pci.node])),
    (NodeSource.PCI_PARENT, lambda e: e.homes.only(e.pci.parent_nodes[:1])),
    (NodeSource.NVML_MEMORY, lambda e: e.homes.only(e.nvml_nodes)),
    (NodeSource.LOCAL_CPUS, lambda e: e.homes.around(e.pci.local_cpus)),
    (NodeSource.NVML_CPUS, lambda e: e.homes.around(e.nvml_cpus)),
    (NodeSource.NCCL_FILE, lambda e: e.homes.only([e.nccl_node])),
    (NodeSource.SINGLE, lambda e: e.homes.single),
)


def _locate(evidence: _Evidence) -> tuple[int, NodeSource] | tuple[None, None]:
    """Return the node from the first source that knows it; a node without CPUs (GPU memory, CXL) does not count."""
    for source, ask in _LADDER:
        node = ask(evidence)
        if node is not None:
            return node, source
    return None, None


def _gpus(readings: Readings, nodes: tuple[Node, ...], homes: _Homes) -> tuple[Gpu, ...]:
    pci = {reading.address: reading for reading in readings.pci if reading.is_gpu}
    if readings.nvml.gpus is None:
        found: Iterator[NvmlReading] = starmap(_as_nvml, _numbered(pci.values()))
    else:
        found = _without_cpuset(readings, nodes, readings.nvml.gpus)
    gpus = (_gpu(gpu, pci.get(gpu.pci, PciReading(address=gpu.pci)), readings, homes) for gpu in found)
    gpu_memory = CpuSet(node.id for node in nodes if node.kind is NodeKind.GPU)
    return tuple(gpu if gpu.memory_node in gpu_memory else replace(gpu, memory_node=None) for gpu in gpus)


def _numbered(devices: Collection[PciReading]) -> Iterator[tuple[int, PciReading]]:
    """Number GPUs as their source does; the others get the free numbers, in the order of their addresses."""
    taken = {reading.index for reading in devices}
    free = (number for number in count() if number not in taken)
    for reading in sorted(devices, key=_index_and_address):
        yield (next(free) if reading.index is None else reading.index), reading


def _index_and_address(reading: PciReading) -> tuple[bool, int, tuple[int, ...]]:
    return reading.index is None, reading.index or 0, pci_order(reading.address)


def _as_nvml(index: int, reading: PciReading) -> NvmlReading:
    """Return the identity of a GPU in NVML's form, for a machine without NVML."""
    return NvmlReading(index=index, uuid=reading.uuid, pci=reading.address)


def _without_cpuset(
    readings: Readings, nodes: tuple[Node, ...], gpus: tuple[NvmlReading, ...]
) -> Iterator[NvmlReading]:
    """Drop NVML affinities that may only reflect the launcher's own cpuset.

    NVML answers from inside the cpuset: if that holds a single node, a GPU of unknown place would look local to it.
    """
    online = readings.online
    with_cpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.CPU)
    for gpu in gpus:
        yield replace(
            gpu,
            cpus=_beyond_cpuset(gpu.cpus, readings.allowed_cpus, online),
            memory_nodes=_beyond_cpuset(gpu.memory_nodes, readings.allowed_nodes, with_cpus),
        )


def _beyond_cpuset(affinity: CpuSet | None, allowed: CpuSet | None, existing: CpuSet) -> CpuSet | None:
    """Return an affinity, or None if the allowed set is restricted and the affinity covers all of it."""
    inside = _within(allowed, existing)
    return None if affinity and inside != existing and affinity >= inside else affinity


def _gpu(nvml: NvmlReading, pci: PciReading, readings: Readings, homes: _Homes) -> Gpu:
    node, source = _locate(
        _Evidence(
            homes=homes,
            pci=pci,
            nvml_nodes=nvml.memory_nodes,
            nvml_cpus=nvml.cpus,
            nccl_node=readings.nccl_nodes.get(nvml.pci),
        )
    )
    cpus = homes.cpus_of(node)
    return Gpu(
        index=nvml.index,
        uuid=nvml.uuid,
        pci=nvml.pci,
        name=nvml.name or pci.name,
        node=node,
        node_source=source,
        cpus=(pci.local_cpus or nvml.cpus) if cpus is None else cpus,
        pcie=_merge_pcie(nvml.pcie, pci.pcie),
        mig=nvml.mig,
        memory_node=nvml.own_node,
    )


def _merge_pcie(first: Pcie, second: Pcie) -> Pcie:
    return Pcie(
        gen=_known(first.gen, second.gen),
        width=_known(first.width, second.width),
        max_gen=_known(first.max_gen, second.max_gen),
        max_width=_known(first.max_width, second.max_width),
    )


def _known(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def _nics(readings: Readings, homes: _Homes) -> tuple[Nic, ...]:
    found = []
    for reading in readings.pci:
        nccl_node = readings.nccl_nodes.get(reading.address)
        node, _ = _locate(_Evidence(homes=homes, pci=reading, nccl_node=nccl_node))
        found += [Nic(name=name, pci=reading.address, node=node, kind=kind) for name, kind in reading.interfaces]
    return tuple(sorted(found, key=lambda nic: (nic.name, nic.pci or "")))


# --- notes -----------------------------------------------------------------------------------------------------------


def _nvml_notes(readings: Readings) -> tuple[str, ...]:
    """Return NVML's notes; none if there is no driver and no NVIDIA GPU either."""
    return () if readings.nvml.is_absent and readings.num_gpus == 0 else readings.nvml.notes
