"""hwloc XML (versions 2 and 3) as readings. Pure.

Comes in: the <topology> that `lstopo --of xml` wrote. Goes out: `Readings`.
Source: hwloc's topology-xml.c and hwloc2.dtd, which is valid for version 3 too. Of the values read here, two differ in
version 3: `osdev_type` is a set of bits instead of a number, and HostName belongs to the topology, not to the machine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_DEVICES, MAX_ELEMENTS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import NicKind
from numapin.topology.readings import DISPLAY, CpuReading, NodeReading, PciReading, Readings, nic_kind, pci_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numapin.topology.sources.xmlfile import Element

    Placed = tuple[Element, tuple[Element, ...]]
    """An object, and the elements above it, nearest first."""
    Ancestors = dict[str | None, Element]
    """The elements above a CPU by their type."""

_LATENCY: Final = 1 << 2  # HWLOC_DISTANCES_KIND_VALUE_LATENCY (MEANS_LATENCY in version 2)
_GROUPS: Final = frozenset({"Core", "L3Cache"})
_IO: Final = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):[0-9a-f]{4}\].*", re.IGNORECASE)
_NVIDIA: Final = "10de"
_NVML: Final = re.compile(r"nvml([0-9]{1,4})")
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_BRIDGE_PCI: Final = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")


def read_hwloc(root: Element) -> Readings:
    """Read hwloc XML. Raises MachineFileError that names the file, the line and the element.

    It has neither free memory nor PCI Express generations (`pci_link_speed` is a bandwidth).
    """
    version = _version(root)
    machine = _machine(root)
    objects = [placed for placed in machine.walk() if placed[0].tag == "object"]
    cpus = _read_cpus(objects, machine)
    nodes = _read_nodes(objects, CpuSet(cpu.cpu for cpu in cpus), _distances(root))
    with_cpus = CpuSet(node.id for node in nodes if node.cpus)
    return Readings(
        host=_info(machine, "HostName") or _info(root, "HostName"),
        source=root.source,
        cpus=cpus,
        nodes=nodes,
        allowed_cpus=_allowed(machine, "allowed_cpuset"),
        allowed_nodes=_allowed(machine, "allowed_nodeset"),
        pci=tuple(islice(_read_pci(objects, with_cpus, version), MAX_DEVICES + 1)),  # `build` refuses that many
        gpu_memory_nodes=_gpu_memory_nodes(objects),
    )


def _machine(root: Element) -> Element:
    machine = next(root.named("object"), None)
    if machine is None or machine.text("type") != "Machine":
        raise root.error('the first element in it is not <object type="Machine">')
    return machine


def _version(root: Element) -> int:
    version = root.word("version")
    match = re.fullmatch(r"([23])\.[0-9.]{1,8}", version)
    if match is None:
        found = f"version {version!r}" if version else "no version, which is hwloc 1"
        raise root.error(f"{found}; versions 2 and 3 are supported")
    return int(match[1])


def _kind(element: Element) -> str | None:
    return element.attributes.get("type")


def _of_kind(elements: Iterable[Element], kind: str) -> list[Element]:
    return [element for element in elements if _kind(element) == kind]


def _placed_of_kind(objects: list[Placed], kind: str) -> Iterator[Placed]:
    return (placed for placed in objects if _kind(placed[0]) == kind)


def _info(element: Element, name: str) -> str | None:
    values = (info.text("value") for info in element.named("info") if info.text("name") == name)
    return next(values, None)


def _allowed(machine: Element, name: str) -> CpuSet | None:
    """Return the allowed set of the process that wrote the file; hwloc writes an infinite set as "0xf...f"."""
    return None if machine.word(name).startswith("0xf...f") else machine.mask(name)


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(objects: list[Placed], machine: Element) -> tuple[CpuReading, ...]:
    around = _ancestors(objects)
    if not around:
        raise machine.error("it has no PU")
    groups = _groups(around)
    return tuple(_cpu(cpu, around[cpu], groups) for cpu in sorted(around))


def _ancestors(objects: list[Placed]) -> dict[int, Ancestors]:
    """Return the elements above each CPU."""
    ancestors: dict[int, Ancestors] = {}
    for pu, above in _placed_of_kind(objects, "PU"):
        cpu = pu.id("os_index")
        if cpu in ancestors:
            raise pu.error(f"os_index={cpu} appears twice")
        ancestors[cpu] = {_kind(element): element for element in above}
    return ancestors


def _groups(ancestors: dict[int, Ancestors]) -> dict[Element, CpuSet]:
    """Return the CPUs below each core and each L3 cache."""
    members: defaultdict[Element, set[int]] = defaultdict(set)
    for cpu, above in ancestors.items():
        for kind in _GROUPS & above.keys():
            members[above[kind]].add(cpu)
    return {element: CpuSet(cpus) for element, cpus in members.items()}


def _cpu(cpu: int, around: Ancestors, groups: dict[Element, CpuSet]) -> CpuReading:
    core, package, l3 = around.get("Core"), around.get("Package"), around.get("L3Cache")
    return CpuReading(
        cpu=cpu,
        siblings=groups[core] if core else CpuSet({cpu}),
        package=package.number("os_index") if package else None,
        l3=groups[l3] if l3 else None,
    )


def _gpu_memory_nodes(objects: list[Placed]) -> CpuSet:
    nodes = (node for node, _ in _placed_of_kind(objects, "NUMANode"))
    return CpuSet(node.id("os_index") for node in nodes if node.word("subtype").endswith("GPUMemory"))


def _read_nodes(objects: list[Placed], online: CpuSet, distances: dict[int, dict[int, int]]) -> tuple[NodeReading, ...]:
    elements = _node_elements(objects)
    inside = cpu_set.Inside(online)
    near = {node: inside.of(element.members("cpuset")) for node, element in elements.items()}
    dram = CpuSet(node for node, element in elements.items() if element.text("subtype") == "DRAM")
    cpus = _own_cpus(near, dram)
    return tuple(
        NodeReading(
            id=node,
            cpus=cpus[node],
            memory_bytes=elements[node].number("local_memory") or 0,  # hwloc leaves a zero out
            distances=distances.get(node, {}),
        )
        for node in sorted(elements)
    )


def _node_elements(objects: list[Placed]) -> dict[int, Element]:
    elements: dict[int, Element] = {}
    for element, _ in _placed_of_kind(objects, "NUMANode"):
        node = element.id("os_index")
        if node in elements:
            raise element.error(f"os_index={node} appears twice")
        elements[node] = element
        if len(elements) > MAX_NODES:
            raise element.error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    return elements


def _own_cpus(near: dict[int, CpuSet], dram: CpuSet) -> dict[int, CpuSet]:
    """Return each node's own CPUs.

    For a node without CPUs, hwloc writes the CPUs near it, which belong to another node. The owner is the node of
    plain memory, then the node with fewer CPUs near it, then the node with the lower number (Linux numbers nodes with
    CPUs first).
    """
    own: dict[int, CpuSet] = {}
    taken: set[int] = set()
    for node in sorted(near, key=lambda n: (n not in dram, len(near[n]), n)):
        own[node] = near[node] if taken.isdisjoint(near[node]) else CpuSet()
        taken |= own[node]
    return own


def _distances(root: Element) -> dict[int, dict[int, int]]:
    """Return the latencies between NUMA nodes, from node to node."""
    matrix = min(filter(_has_latencies, root.named("distances2")), key=_is_added_by_user, default=None)
    if matrix is None:
        return {}
    nodes, values = _numbers(matrix, "indexes"), _numbers(matrix, "u64values")
    size = len(nodes)
    if size > MAX_NODES:
        raise matrix.error(f"distances of {size} nodes; at most {MAX_NODES} are accepted")
    if len(values) != size * size:
        raise matrix.error(f"{len(values)} values for {size} nodes, expected {size * size}")
    rows = (values[start : start + size] for start in range(0, len(values), size or 1))
    return {node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, rows, strict=True)}


def _has_latencies(matrix: Element) -> bool:
    is_of_nodes = matrix.text("type") == "NUMANode" and matrix.text("indexing") == "os"
    return is_of_nodes and (matrix.number("kind") or 0) & _LATENCY != 0


def _is_added_by_user(matrix: Element) -> bool:
    """Return whether a matrix is not the kernel's own, which is named NUMALatency."""
    return matrix.text("name") != "NUMALatency"


def _numbers(matrix: Element, tag: str) -> list[int]:
    words = [word for part in matrix.named(tag) for word in "".join(part.texts).split()]
    if len(words) > MAX_NODES**2:
        raise matrix.error(f"{len(words)} numbers in <{tag}>; at most {MAX_NODES**2} are accepted")
    bad = next(filterfalse(_NUMBER.fullmatch, words), None)
    if bad is not None:
        raise matrix.error(f"{bad[:40]!r} in <{tag}> is not a number")
    return list(map(int, words))


# --- PCI -------------------------------------------------------------------------------------------------------------


def _read_pci(objects: list[Placed], with_cpus: CpuSet, version: int) -> Iterator[PciReading]:
    num_left = MAX_ELEMENTS
    for device, above in _placed_of_kind(objects, "PCIDev"):
        inner = [element for element, _ in device.walk()]
        num_left -= len(inner)
        if num_left < 0:
            raise device.error("PCI devices are inside other PCI devices")
        below = _of_kind(inner, "OSDev")
        reading = _read_gpu(device, below) or _read_nic(device, below, version)
        if reading is not None:
            yield _placed(reading, above, with_cpus)


def _read_gpu(device: Element, below: list[Element]) -> PciReading | None:
    """Return an NVIDIA GPU, known by its NVML device or its PCI class."""
    model = _info(device, "PCIDevice")
    for element in below:
        match = _NVML.fullmatch(element.word("name"))  # its CUDA and OpenCL devices are numbered in other orders
        if match is not None:
            uuid, name = _info(element, "NVIDIAUUID"), _info(element, "GPUModel") or model
            return PciReading(address=_address(device), index=int(match[1]), uuid=uuid, name=name)
    device_class, vendor = _class_and_vendor(device)
    is_gpu = vendor == _NVIDIA and device_class >> 8 == DISPLAY
    return PciReading(address=_address(device), name=model) if is_gpu else None


def _read_nic(device: Element, below: list[Element], version: int) -> PciReading | None:
    """Return a network device that has interfaces."""
    device_class, _ = _class_and_vendor(device)
    interfaces = tuple(_interfaces(below, nic_kind(device_class), version))
    return PciReading(address=_address(device), interfaces=interfaces) if interfaces else None


def _class_and_vendor(device: Element) -> tuple[int, str]:
    match = _PCI_TYPE.fullmatch(device.word("pci_type"))
    return (pci_class(match[1]) or 0, match[2].lower()) if match else (0, "")


def _address(device: Element) -> str:
    address = pci_address(device.text("pci_busid"))
    if address is None:
        raise device.error(f"pci_busid={device.text('pci_busid')!r} is not a PCI address")
    return address


def _placed(reading: PciReading, above: tuple[Element, ...], with_cpus: CpuSet) -> PciReading:
    """Return the device with its place: hwloc attaches its PCI tree there, or to the machine if it is unknown."""
    home = next(element for element in above if _kind(element) not in _IO)
    nodes = home.members("nodeset") & with_cpus
    bridges = _of_kind(above, "Bridge")
    parents = (pci_address(bridge.text("pci_busid")) for bridge in bridges)
    return replace(
        reading,
        node=min(nodes) if len(nodes) == 1 else None,
        local_cpus=home.mask("cpuset"),
        parents=tuple(filter(None, parents)),
        host_bridge=next(filter(None, map(_root_bus, bridges)), None),
    )


def _root_bus(bridge: Element) -> str | None:
    """Return a host bridge's bus in the kernel's spelling ("pci0000:17"); None for a bridge between PCI buses."""
    is_host_bridge = bridge.word("bridge_type").startswith("0-")
    match = _BRIDGE_PCI.fullmatch(bridge.word("bridge_pci"))
    return f"pci{match[1]}:{match[2]}" if match and is_host_bridge else None


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[tuple[str, NicKind]]:
    # Version 2 numbers the types (2 network, 3 OpenFabrics); version 3 adds them up (16 network, 32 OpenFabrics).
    verbs = NicKind.INFINIBAND
    kinds = {2: network, 3: verbs} if version == 2 else {16: network, 32: verbs, 48: verbs}
    for device in devices:
        name, kind = device.text("name"), kinds.get(device.number("osdev_type") or 0)
        if name and kind:
            yield name, kind
