"""Judge the readings. Pure.

Comes in: `Readings` of one machine. Goes out: its `Topology`, in which every GPU's node has a source, or is None.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count, islice
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
    from collections.abc import Callable, Iterable, Iterator, Mapping


def build(readings: Readings, *, visible_devices: str | None = None, device_order: str | None = None) -> Topology:
    """Turn readings into a topology; the two texts are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.

    Raises ValueError (`Topology`'s own checks) where readings contradict themselves and no rule below settles it.
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
    allowed_nodes = CpuSet(node.id for node in nodes)
    return Topology(
        host=readings.host,
        source=readings.source,
        packages=_packages(cpus, nodes),
        nodes=nodes,
        cores=cores,
        allowed=Allowed(
            cpus=_within(readings.allowed_cpus, CpuSet(cpus)), nodes=_within(readings.allowed_nodes, allowed_nodes)
        ),
        gpus=gpus,
        nics=nics,
        links=links,
        notes=(*readings.notes, *_nvml_notes(readings), *visibility_notes, *links_notes),
    )


def _require_counts(readings: Readings) -> None:
    """Raise ValueError where there is more of anything than any machine has, before it is put together."""
    for what, num, most in (
        ("CPUs", len(readings.cpus), MAX_CPUS),
        ("NUMA nodes", len(readings.nodes), MAX_NODES),
        ("GPUs", max(sum(reading.is_gpu for reading in readings.pci), len(readings.nvml.gpus or ())), MAX_GPUS),
        ("network interfaces", sum(len(reading.interfaces) for reading in readings.pci), MAX_NICS),
    ):
        if num > most:
            raise ValueError(f"more than {most} {what}, the most that are accepted")


def with_gpu_nodes(
    topology: Topology, pairs: Iterable[tuple[str, int]], *, source: NodeSource = NodeSource.USER
) -> Topology:
    """Put GPUs on the nodes that `source`, the user, named, by pairs of a GPU (see `Topology.find_gpu`) and a node.

    The user's word wins over every reading, and a note says what it replaced. Raises UsageError for a GPU or a node
    that is not there, a node without CPUs, and a GPU on two nodes.
    """
    homes = _homes(topology, pairs)
    cpus = {node.id: node.cpus for node in topology.nodes}
    gpus = tuple(
        gpu if (home := homes.get(gpu.index)) is None else replace(gpu, node=home, node_source=source, cpus=cpus[home])
        for gpu in topology.gpus
    )
    replaced = tuple(
        f"--gpu-nodes puts {gpu.label} on node {homes[gpu.index]}; {gpu.node_source} says node {gpu.node}"
        for gpu in topology.gpus
        if gpu.index in homes and gpu.node not in (None, homes[gpu.index])
    )
    moved = frozenset(gpu.label for gpu in gpus if gpu.index in homes)
    nodes = {nic.name: nic.node for nic in topology.nics} | {gpu.label: gpu.node for gpu in gpus}
    links = with_moved(topology.links, moved, nodes)
    return replace(topology, gpus=gpus, links=links, notes=(*topology.notes, *replaced))


def _homes(topology: Topology, pairs: Iterable[tuple[str, int]]) -> dict[int, int]:
    """Return the node that the user names for each GPU, by the GPU's index."""
    homes: dict[int, int] = {}
    for key, node in pairs:
        gpu = topology.find_gpu(key, option="--gpu-nodes")
        _require_cpu_node(topology, node)
        if homes.setdefault(gpu.index, node) != node:
            raise UsageError(f"--gpu-nodes puts {gpu.label} on nodes {homes[gpu.index]} and {node}", "name it once")
    return homes


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
    # A kernel without NUMA shows no node at all; it behaves as one node 0, which libnuma and hwloc also make up.
    seen = readings.nodes or (NodeReading(id=0, cpus=CpuSet(cpus), distances={0: 10}),)
    inside, packages_of = cpu_set.Inside(cpus), _packages_of(cpus)
    return tuple(
        _node(reading, inside.of(reading.cpus), packages_of, gpu_memory) for reading in sorted(seen, key=lambda r: r.id)
    )


def _packages_of(cpus: Mapping[int, CpuReading]) -> Callable[[CpuSet], frozenset[int | None]]:
    """Return what gives the packages of a set of CPUs; it is asked for the same few sets again and again."""
    return cache(lambda members: frozenset(cpus[cpu].package for cpu in members))


def _node(
    reading: NodeReading,
    online: CpuSet,
    packages_of: Callable[[CpuSet], frozenset[int | None]],
    gpu_memory: CpuSet,
) -> Node:
    packages = packages_of(online)
    without_cpus = NodeKind.GPU if reading.id in gpu_memory else NodeKind.MEMORY
    return Node(
        id=reading.id,
        kind=NodeKind.CPU if online else without_cpus,
        cpus=online,
        package=next(iter(packages)) if len(packages) == 1 else None,
        memory_bytes=reading.memory_bytes,
        free_bytes=reading.free_bytes,
        distances=dict(reading.distances),
    )


def _cores(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...]) -> tuple[Core, ...]:
    homes = _unique_homes(nodes)
    left = set(cpus)
    lowest = cache(min)  # of the L3 groups, which are as large as they are few
    cores = []
    for cpu in sorted(cpus):
        if cpu not in left:
            continue
        reading = cpus[cpu]
        members = CpuSet(reading.siblings & left | {cpu})  # a sibling list that overlaps another loses to the first
        left -= members
        core_nodes = {homes.get(member) for member in members}
        cores.append(
            Core(
                id=cpu,
                cpus=members,
                node=core_nodes.pop() if len(core_nodes) == 1 else None,
                package=reading.package,
                l3=lowest(reading.l3) if reading.l3 else None,
            )
        )
    return tuple(cores)


def _unique_homes(nodes: tuple[Node, ...]) -> dict[int, int]:
    """Map each CPU to its node, leaving out CPUs that several nodes claim (seen on machines with broken firmware)."""
    homes: dict[int, int] = {}
    contested: set[int] = set()
    claims: dict[CpuSet, list[int]] = {}
    for node in nodes:
        claims.setdefault(node.cpus, []).append(node.id)
    for cpus, ids in claims.items():
        contested |= homes.keys() & cpus
        contested |= cpus if len(ids) > 1 else set()
        homes.update(dict.fromkeys(cpus, ids[0]))
    return {cpu: node for cpu, node in homes.items() if cpu not in contested}


def _packages(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...]) -> tuple[Package, ...]:
    packages_of = _packages_of(cpus)
    members: dict[int, set[int]] = {r.package: set() for r in cpus.values() if r.package is not None}
    for node in nodes:
        for package in packages_of(node.cpus):
            if package is not None:
                members[package].add(node.id)
    return tuple(Package(id=package, nodes=CpuSet(members[package])) for package in sorted(members))


def _within(allowed: CpuSet | None, there: CpuSet) -> CpuSet:
    return there if allowed is None else allowed & there


# --- GPUs and their nodes --------------------------------------------------------------------------------------------


class _Evidence(NamedTuple):
    """What is known about where one device is."""

    homes: _Homes
    pci: PciReading
    nvml_nodes: CpuSet | None = None
    nvml_cpus: CpuSet | None = None
    nccl_node: int | None = None


class _Homes:
    """The nodes on which a device can be."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._with_cpus = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
        self.single = next(iter(self._with_cpus)) if len(self._with_cpus) == 1 else None
        self._around: dict[CpuSet, int | None] = {}

    def cpus_of(self, node: int | None) -> CpuSet | None:
        """Return the CPUs of a node with CPUs."""
        return None if node is None else self._with_cpus.get(node)

    def only(self, candidates: Iterable[int | None] | None) -> int | None:
        """Return the one node with CPUs among the candidates, or None where there is none or more than one."""
        found = self._with_cpus.keys() & set(candidates or ())
        return found.pop() if len(found) == 1 else None

    def around(self, cpus: CpuSet | None) -> int | None:
        """Return the one node in which these CPUs lie, or None."""
        if not cpus:
            return None
        if cpus not in self._around:
            found = list(islice((node for node, own in self._with_cpus.items() if cpus <= own), 2))
            self._around[cpus] = found[0] if len(found) == 1 else None
        return self._around[cpus]


# `NodeSource` in its order, but for the user's word and what was measured, which `with_gpu_nodes` adds.
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
    """Ask the sources in order; a source that names a node without CPUs (GPU memory, CXL) knows nothing."""
    for source, ask in _LADDER:
        node = ask(evidence)
        if node is not None:
            return node, source
    return None, None


def _gpus(readings: Readings, nodes: tuple[Node, ...], homes: _Homes) -> tuple[Gpu, ...]:
    pci = {reading.address: reading for reading in readings.pci if reading.is_gpu}
    if readings.nvml.gpus is None:
        return tuple(
            _gpu(_as_nvml(index, reading), reading, readings, homes) for index, reading in _numbered(pci.values())
        )
    told = (_without_cpuset(gpu, readings, nodes) for gpu in readings.nvml.gpus)
    return tuple(_gpu(gpu, pci.get(gpu.pci, PciReading(address=gpu.pci)), readings, homes) for gpu in told)


def _numbered(devices: Iterable[PciReading]) -> Iterator[tuple[int, PciReading]]:
    """Number GPUs as their source does; the others take the numbers that are left, in the order of their addresses."""
    ordered = sorted(devices, key=lambda r: (r.index is None, r.index or 0, pci_order(r.address)))
    taken = {reading.index for reading in ordered}
    free = (number for number in count() if number not in taken)
    return ((next(free) if reading.index is None else reading.index, reading) for reading in ordered)


def _as_nvml(index: int, reading: PciReading) -> NvmlReading:
    """Return what is left for NVML to say of a GPU where there is no NVML: who it is."""
    return NvmlReading(index=index, uuid=reading.uuid, pci=reading.address)


def _without_cpuset(gpu: NvmlReading, readings: Readings, nodes: tuple[Node, ...]) -> NvmlReading:
    """Drop NVML affinities that may be no more than the launcher's own cpuset.

    NVML answers from inside the cpuset: under one that holds a single node, a GPU of unknown place would look local to
    it. An affinity that covers all that is allowed, where not all is allowed, tells nothing.
    """
    cpus, memory = gpu.cpus, gpu.memory_nodes
    online = CpuSet(reading.cpu for reading in readings.cpus)
    allowed_cpus = _within(readings.allowed_cpus, online)
    with_cpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.CPU)
    allowed_nodes = _within(readings.allowed_nodes, with_cpus)
    return replace(
        gpu,
        cpus=None if cpus and allowed_cpus != online and cpus >= allowed_cpus else cpus,
        memory_nodes=None if memory and allowed_nodes != with_cpus and memory >= allowed_nodes else memory,
    )


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
    )


def _merge_pcie(first: Pcie, second: Pcie) -> Pcie:
    def pick(a: int | None, b: int | None) -> int | None:
        return b if a is None else a

    return Pcie(
        gen=pick(first.gen, second.gen),
        width=pick(first.width, second.width),
        max_gen=pick(first.max_gen, second.max_gen),
        max_width=pick(first.max_width, second.max_width),
    )


def _nics(readings: Readings, homes: _Homes) -> tuple[Nic, ...]:
    found = []
    for reading in readings.pci:
        nccl_node = readings.nccl_nodes.get(reading.address)
        node, _ = _locate(_Evidence(homes=homes, pci=reading, nccl_node=nccl_node))
        found += [Nic(name=name, pci=reading.address, node=node, kind=kind) for name, kind in reading.interfaces]
    return tuple(sorted(found, key=lambda nic: (nic.name, nic.pci or "")))


# --- notes -----------------------------------------------------------------------------------------------------------


def _nvml_notes(readings: Readings) -> tuple[str, ...]:
    """Pass on why NVML told nothing where it is broken, or there is an NVIDIA GPU that it should have told of."""
    unasked = readings.nvml.gpus is None and not readings.nvml.broken
    silent = unasked and not any(reading.is_gpu for reading in readings.pci)
    return () if silent else readings.nvml.notes
