"""Readings -> `Topology`: decides which source to believe."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, replace
from functools import cache
from itertools import chain, combinations, count, filterfalse, islice, product
from math import comb
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_CPUS, MAX_GPUS, MAX_LINKS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.text import not_none, printable, without_none
from numapin.errors import UsageError
from numapin.topology.address import pci_order
from numapin.topology.model import Allowed, Core, Gpu, Node, NodeKind, NodeSource, Package, Topology
from numapin.topology.nics import Link, LinkKind, Nic
from numapin.topology.readings import CpuReading, NodeReading, NvmlReading, PciReading, Readings
from numapin.topology.vendors import VENDORS, GpuVendor, preferred, seen_by_ranks, support_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

_NO_CORES: Final = (
    "the source does not say which CPUs are threads of one core: every CPU counts as a core, and thread counts assume "
    "two threads per core"
)


def build(readings: Readings, *, environ: Mapping[str, str] | None = None) -> Topology:
    """Build a topology; `environ` has the variables that hide and order GPUs, such as CUDA_VISIBLE_DEVICES.

    Raises ValueError (`Topology`'s own checks) if readings contradict each other and no rule below decides.
    """
    environ = environ or {}
    num_nvidia = max(len(readings.gpus_on_pci(GpuVendor.NVIDIA)), len(readings.nvml.gpus or ()))
    num_other_gpus = sum(reading.gpu_vendor not in (None, GpuVendor.NVIDIA) for reading in readings.pci)
    # More parts than any machine has are refused before they are put together.
    for what, num, most in (
        ("CPUs", len(readings.cpus), MAX_CPUS),
        ("NUMA nodes", len(readings.nodes), MAX_NODES),
        ("GPUs", num_nvidia + num_other_gpus, MAX_GPUS),
        ("network interfaces", len(readings.nics) + sum(len(device.interfaces) for device in readings.pci), MAX_NICS),
    ):
        if num > most:
            raise ValueError(f"more than {most} {what}, the most that are accepted")

    cpus = {reading.cpu: reading for reading in readings.cpus}
    # Cached, because the same few sets come again and again.
    packages_of = cache(lambda members: frozenset(cpus[cpu].package for cpu in members))
    nodes = _nodes(readings, cpus, packages_of)
    packages = sorted(set(not_none(reading.package for reading in readings.cpus)))
    nodes_of_package: defaultdict[int | None, set[int]] = defaultdict(set)
    for node in nodes:
        for package in packages_of(node.cpus):
            nodes_of_package[package].add(node.id)
    shared = _shared_cpus(nodes)
    overlapping = CpuSet(node.id for node in nodes if not node.cpus.isdisjoint(shared))
    places = _Places(nodes, readings.nccl_nodes)
    found = _find_gpus(readings, places)
    usable = [(device.gpu, device.pci) for device in found if device.is_usable]
    gpus, visibility_notes = seen_by_ranks(
        tuple(device.gpu for device in found),
        environ,
        unusable=frozenset(device.gpu.index for device in found if not device.is_usable),
    )
    order_note = support_of(usable[0][0].vendor).why_order_unknown(usable, environ) if len(usable) > 1 else ""
    nics = _find_nics(readings, places)
    links, links_notes = _links_of(readings, gpus, nics)
    siblings_known = all(cpu.siblings is not None for cpu in readings.cpus)
    # Without NVIDIA's driver, NVML only matters if there is a GPU of NVIDIA.
    has_no_driver = readings.nvml.gpus is None and not readings.nvml.broken
    nvml_notes = () if has_no_driver and num_nvidia == 0 else readings.nvml.notes
    return Topology(
        host=readings.host,
        source=readings.source,
        packages=tuple(Package(id=number, nodes=CpuSet(nodes_of_package[number])) for number in packages),
        nodes=nodes,
        cores=_cores(cpus, nodes, shared),
        allowed=Allowed(
            cpus=_within(readings.allowed_cpus, readings.online),
            nodes=_within(readings.allowed_nodes, CpuSet(node.id for node in nodes)),
        ),
        gpus=gpus,
        nics=nics,
        links=links,
        notes=(
            *readings.notes,
            *([] if siblings_known else [_NO_CORES]),
            *nvml_notes,
            *_gpu_notes(found),
            *map(printable, visibility_notes),  # variables may hold any bytes
            *filter(None, [order_note]),
            *links_notes,
        ),
        siblings_known=siblings_known,
        doubtful_nodes=readings.doubtful_nodes | overlapping,
        memory_bytes=readings.memory_bytes,
        speeds=readings.speeds,
        gpu_order_known=not order_note,
        allowed_known=readings.allowed_known,
    )


def with_gpu_nodes(topology: Topology, pairs: Iterable[tuple[str, int]]) -> Topology:
    """Put GPUs (see `Topology.find_gpu`) on the given nodes, which overrule every reading, and change their links.

    Notes say what they replaced. Raises UsageError if a GPU or node does not exist, a node has no CPUs, or a GPU is on
    two nodes.
    """
    cpus = {node.id: node.cpus for node in topology.cpu_nodes}
    moved: dict[str, Gpu] = {}
    for key, node in pairs:
        gpu = topology.find_gpu(key, option="--gpu-nodes")
        if node not in cpus:
            raise UsageError(
                f"--gpu-nodes: node {node} has no CPUs or does not exist; nodes with CPUs: {CpuSet(cpus)}",
                "list them with: numapin topo",
            )
        there = replace(gpu, node=node, node_source=NodeSource.USER, cpus=cpus[node])
        if moved.setdefault(gpu.label, there) != there:
            both = f"{moved[gpu.label].node} and {node}"
            raise UsageError(f"--gpu-nodes puts {gpu.label} on nodes {both}", "name it once")

    notes = [
        f"--gpu-nodes puts {gpu.label} on node {moved[gpu.label].node}; {gpu.node_source} says node {gpu.node}"
        for gpu in topology.gpus
        if gpu.label in moved and gpu.node not in (None, moved[gpu.label].node)
    ]
    gpus = tuple(moved.get(gpu.label, gpu) for gpu in topology.gpus)
    nodes = {nic.name: nic.node for nic in topology.nics} | {gpu.label: gpu.node for gpu in gpus}
    links: list[Link] = []
    for link in topology.links:
        # The words for nearer paths do not depend on nodes.
        is_far = link.kind in (LinkKind.SAME_NODE, LinkKind.SYSTEM)
        may_change = is_far and not moved.keys().isdisjoint((link.a, link.b))
        word = _by_nodes(nodes.get(link.a), nodes.get(link.b)) if may_change else None
        links.append(replace(link, kind=word) if word else link)
    return replace(topology, gpus=gpus, links=tuple(links), notes=(*topology.notes, *notes))


def _within(allowed: CpuSet | None, existing: CpuSet) -> CpuSet:
    """Return the allowed part of a set; None: all of it."""
    return existing if allowed is None else allowed & existing


def _only_member(members: Collection[int | None]) -> int | None:
    """Return the only member of a set, or None if there are several or none."""
    return next(iter(members)) if len(members) == 1 else None


# --- nodes, cores, packages ------------------------------------------------------------------------------------------


def _nodes(
    readings: Readings, cpus: Mapping[int, CpuReading], packages_of: Callable[[CpuSet], frozenset[int | None]]
) -> tuple[Node, ...]:
    gpu_memory = readings.gpu_memory_nodes.union(not_none(gpu.own_node for gpu in readings.nvml.gpus or ()))
    # A kernel without NUMA shows no nodes. It behaves as one node 0, which libnuma and hwloc also make up.
    found = readings.nodes or (NodeReading(id=0, cpus=CpuSet(cpus), distances={0: 10}),)
    online = CpuSet(cpus)
    online_of = cache(lambda members: members & online)  # broken firmware lists all CPUs on each of many nodes
    nodes: list[Node] = []
    for reading in sorted(found, key=attrgetter("id")):
        own = online_of(reading.cpus)
        without_cpus = NodeKind.GPU if reading.id in gpu_memory else NodeKind.MEMORY
        nodes.append(
            Node(
                id=reading.id,
                kind=NodeKind.CPU if own else without_cpus,
                cpus=own,
                package=_only_member(packages_of(own)),
                memory_bytes=reading.memory_bytes,
                free_bytes=reading.free_bytes,
                distances=dict(reading.distances),
            )
        )
    return tuple(nodes)


def _cores(cpus: Mapping[int, CpuReading], nodes: tuple[Node, ...], shared: CpuSet) -> tuple[Core, ...]:
    # CPUs that several nodes claim have no node. Of nodes with equal lists, all CPUs are shared.
    lists = {node.cpus: node.id for node in nodes}
    homes = {cpu: node for own, node in lists.items() for cpu in (own - shared if shared else own)}
    left = set(cpus)
    lowest = cache(min)  # of the L3 groups, which are large but few
    cores: list[Core] = []
    for cpu, reading in sorted(cpus.items()):
        if cpu not in left:
            continue
        siblings = reading.siblings or CpuSet()
        members = CpuSet(siblings & left | {cpu})  # of two overlapping sibling lists, the first counts
        left -= members
        node = _only_member({homes.get(member) for member in members})
        l3 = lowest(reading.l3) if reading.l3 else None
        cores.append(Core(id=cpu, cpus=members, node=node, package=reading.package, l3=l3))
    return tuple(cores)


def _shared_cpus(nodes: tuple[Node, ...]) -> CpuSet:
    """Return the CPUs that several nodes list (seen on machines with broken firmware)."""
    shared: set[int] = set()
    seen: set[int] = set()
    for cpus, number in Counter(node.cpus for node in nodes).items():
        shared |= cpus if number > 1 else seen & cpus
        seen |= cpus
    return CpuSet(shared)


# --- GPUs and NICs ---------------------------------------------------------------------------------------------------


class _Places:
    """The nodes on which a device can be (those with CPUs), and those that are the memory of a GPU.

    `nccl_nodes` are the nodes of PCI addresses in the file that NCCL_TOPO_FILE names.
    """

    def __init__(self, nodes: tuple[Node, ...], nccl_nodes: Mapping[str, int]) -> None:
        self.cpus_of = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
        self.of_gpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.GPU)
        self._nccl_nodes = nccl_nodes
        self._node_around = cache(self._find_node_around)

    def _find_node_around(self, cpus: CpuSet) -> int | None:
        """Return the only node that has all of these CPUs, or None."""
        matches = (node for node, own in self.cpus_of.items() if cpus and cpus <= own)
        return _only_member(list(islice(matches, 2)))  # two are enough to know that it is not the only one

    def locate(
        self, address: str, evidence: Mapping[NodeSource, CpuSet | None]
    ) -> tuple[int, NodeSource] | tuple[None, None]:
        """Return a PCI device's node, and the first source that knows it; nodes without CPUs (CXL) do not count."""
        if address in self._nccl_nodes:
            evidence = {NodeSource.NCCL_FILE: CpuSet({self._nccl_nodes[address]}), **evidence}
        for source in NodeSource:
            named = evidence.get(source) or CpuSet()
            if source in (NodeSource.LOCAL_CPUS, NodeSource.NVML_CPUS):  # these name CPUs, not nodes
                node = self._node_around(named)
            else:
                node = _only_member(self.cpus_of.keys() & named)
            if node is not None:
                return node, source
        single = _only_member(self.cpus_of)
        return (None, None) if single is None else (single, NodeSource.SINGLE)


class _FoundGpu(NamedTuple):
    """A GPU, what was read of it on PCI, and whether it is of the ranks' vendor."""

    gpu: Gpu
    pci: PciReading
    is_preferred: bool

    @property
    def is_usable(self) -> bool:
        """Whether ranks can use it, as far as is known."""
        return self.is_preferred and self.pci.is_driven is not False


def _find_gpus(readings: Readings, places: _Places) -> list[_FoundGpu]:
    """Return the GPUs of all vendors, those of the ranks' vendor first. Each has a number of its own."""
    first = preferred(readings)
    found: list[_FoundGpu] = []
    for vendor in sorted(VENDORS, key=lambda vendor: vendor is not first):
        on_pci = readings.gpus_on_pci(vendor)
        if vendor is GpuVendor.NVIDIA and readings.nvml.gpus is not None:
            by_address = {reading.address: reading for reading in on_pci}
            devices = [
                (gpu, by_address.get(gpu.pci, PciReading(address=gpu.pci, vendor=vendor)))
                for gpu in _without_cpuset(readings, CpuSet(places.cpus_of))
            ]
        else:
            # A VGA controller beside another vendor's GPUs is for the screen, and is left out.
            parts = {reading.part: reading for reading in on_pci if vendor is first or not reading.is_vga}
            # GPUs that the source does not number get the free numbers, in the order of their addresses.
            taken = {reading.index for reading in parts.values()}
            free = filterfalse(taken.__contains__, count())
            devices = [
                (NvmlReading(index=next(free) if pci.index is None else pci.index, uuid=pci.uuid, pci=pci.address), pci)
                for pci in sorted(parts.values(), key=lambda pci: (pci_order(pci.address), pci.partition or 0))
            ]
        of_vendor = [_FoundGpu(_gpu(nvml, pci, places), pci, vendor is first) for nvml, pci in devices]
        of_vendor.sort(key=lambda device: device.gpu.index)
        if found:  # NVIDIA and AMD both have a GPU 0
            unused = count(max(device.gpu.index for device in found) + 1)
            of_vendor = [device._replace(gpu=replace(device.gpu, index=next(unused))) for device in of_vendor]
        found += of_vendor
    return found


def _without_cpuset(readings: Readings, with_cpus: CpuSet) -> Iterator[NvmlReading]:
    """Yield NVML's GPUs without affinities that may only reflect the launcher's own cpuset.

    NVML answers from inside the cpuset: if that holds a single node, a GPU of unknown place would look local to it.
    Under a restricted set, an affinity that covers all of it carries no information.
    """
    online = readings.online
    allowed_cpus, allowed_nodes = _within(readings.allowed_cpus, online), _within(readings.allowed_nodes, with_cpus)
    for gpu in readings.nvml.gpus or ():
        cpus, memory_nodes = gpu.cpus, gpu.memory_nodes
        if cpus and allowed_cpus != online and cpus >= allowed_cpus:
            cpus = None
        if memory_nodes and allowed_nodes != with_cpus and memory_nodes >= allowed_nodes:
            memory_nodes = None
        yield replace(gpu, cpus=cpus, memory_nodes=memory_nodes)


def _gpu(nvml: NvmlReading, pci: PciReading, places: _Places) -> Gpu:
    by_nvml = {NodeSource.NVML_MEMORY: nvml.memory_nodes, NodeSource.NVML_CPUS: nvml.cpus}
    node, source = places.locate(nvml.pci, {**by_nvml, **pci.evidence})
    memory_node = pci.memory_node if nvml.own_node is None else nvml.own_node
    return Gpu(
        index=nvml.index,
        uuid=nvml.uuid,
        pci=nvml.pci,
        name=nvml.name or pci.name,
        node=node,
        node_source=source,
        cpus=(pci.evidence.get(NodeSource.LOCAL_CPUS) or nvml.cpus) if node is None else places.cpus_of[node],
        pcie=replace(pci.pcie, **without_none(asdict(nvml.pcie))),
        mig=nvml.mig,
        vendor=pci.gpu_vendor,
        partition=pci.partition,
        memory_node=memory_node if memory_node in places.of_gpus else None,
        pci_parents=pci.known_parents,
    )


def _gpu_notes(devices: Sequence[_FoundGpu]) -> Iterator[str]:
    """Yield notes on GPUs that the ranks cannot use, or whose place is unknown."""
    others = [f"{device.gpu.label} ({device.gpu.vendor})" for device in devices if not device.is_preferred]
    if others:
        verb = "is" if len(others) == 1 else "are"
        yield f"{', '.join(others)} {verb} not used: ranks use the GPUs of one vendor, here {devices[0].gpu.vendor}"
    undriven = [device.gpu for device in devices if device.is_preferred and not device.is_usable]
    if undriven:
        remedy = support_of(undriven[0].vendor).driver_remedy
        yield f"no driver serves {_with_addresses(undriven)} here; {remedy}"
    missing = [device.gpu for device in devices if not device.pci.is_on_pci]
    if missing:
        yield f"the driver lists {_with_addresses(missing)}, but no PCI device has that address"


def _with_addresses(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{gpu.label} ({gpu.pci})" for gpu in gpus)


def _find_nics(readings: Readings, places: _Places) -> tuple[Nic, ...]:
    nics = [replace(nic, node=nic.node if nic.node in places.cpus_of else None) for nic in readings.nics]
    for device in readings.pci:
        if device.interfaces:
            node, _ = places.locate(device.address, device.evidence)
            nics += [
                replace(nic, pci=device.address, node=node, pci_parents=device.known_parents)
                for nic in device.interfaces
            ]
    return tuple(sorted(nics, key=lambda nic: (nic.name, nic.pci or "")))


# --- links -----------------------------------------------------------------------------------------------------------


class _Endpoint(NamedTuple):
    """A GPU or NIC: its name, its PCI device if that was read, and its node."""

    name: str
    pci: PciReading | None
    node: int | None


def _links_of(
    readings: Readings, gpus: tuple[Gpu, ...], nics: tuple[Nic, ...]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Return the links between all GPUs and NICs, and notes: NVML's or the fabric's word for a pair, else PCI's."""
    by_part = {reading.part: reading for reading in readings.pci}
    if readings.nvml.gpus is not None:  # NVML reports NVLink
        nvidia = readings.gpus_on_pci(GpuVendor.NVIDIA)
        by_part |= {reading.part: replace(reading, reports_fabric=True) for reading in nvidia}
    label_of = {(gpu.pci, gpu.partition): gpu.label for gpu in gpus if gpu.pci is not None}
    words = {frozenset((f"gpu{a}", f"gpu{b}")): word for a, b, word in readings.nvml.links}
    for link in readings.fabric:
        if label_of.keys() >= {link.a, link.b}:
            words[frozenset((label_of[link.a], label_of[link.b]))] = link.word
    gpu_ends = [_Endpoint(gpu.label, by_part.get((gpu.pci or "", gpu.partition)), gpu.node) for gpu in gpus]
    nic_ends = [_Endpoint(nic.name, by_part.get((nic.pci or "", None)), nic.node) for nic in nics]
    # A host with hundreds of virtual functions would have millions of links. If there are more than a topology may
    # have, those between NICs are left out; if that is not enough, all links of NICs.
    pairs: Iterable[tuple[_Endpoint, _Endpoint]] = combinations([*gpu_ends, *nic_ends], 2)
    left_out = ""
    if comb(len(gpus) + len(nics), 2) > MAX_LINKS:
        pairs, left_out = chain(combinations(gpu_ends, 2), product(gpu_ends, nic_ends)), "links between"
        if comb(len(gpus), 2) + len(gpus) * len(nics) > MAX_LINKS:
            pairs, left_out = combinations(gpu_ends, 2), "links of"
    notes = (f"{left_out} network interfaces are left out: there are {len(nics)} interfaces on this machine",)
    links: list[Link] = []
    for a, b in pairs:
        word = words.get(frozenset((a.name, b.name))) or _pci_word(a, b)
        if word:
            links.append(Link(a=a.name, b=b.name, kind=word))
    return tuple(links), notes if left_out else ()


def _pci_word(a: _Endpoint, b: _Endpoint) -> str | None:
    """Return the word for the path between two PCI devices, or None if it is unknown."""
    if a.pci is None or b.pci is None:
        return None
    if a.pci.address == b.pci.address:
        return LinkKind.SAME_BOARD  # two names of one device: the network and the verbs side of a NIC; two partitions
    if a.pci.is_gpu and b.pci.is_gpu and not (a.pci.reports_fabric and b.pci.reports_fabric):
        return None  # they may have NVLink or xGMI, which their source does not show
    nearest = next((bridge for bridge in a.pci.parents if bridge in b.pci.parents), None)
    if nearest is not None:
        # One switch is its upstream port, above one downstream port per device.
        num_bridges = max(a.pci.parents.index(nearest), b.pci.parents.index(nearest))
        return LinkKind.ONE_SWITCH if num_bridges <= 1 else LinkKind.SWITCHES
    if a.pci.host_bridge is not None and a.pci.host_bridge == b.pci.host_bridge:
        return LinkKind.HOST_BRIDGE
    return _by_nodes(a.node, b.node)


def _by_nodes(a: int | None, b: int | None) -> LinkKind | None:
    """Return the word for the path between devices of different host bridges."""
    if a is None or b is None:
        return None
    return LinkKind.SAME_NODE if a == b else LinkKind.SYSTEM
