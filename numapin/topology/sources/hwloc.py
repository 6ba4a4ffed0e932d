"""hwloc XML (versions 2 and 3) as readings. Pure.

Comes in: the <topology> that `lstopo --of xml` wrote. Goes out: `Readings`.
Source: hwloc's topology-xml.c and hwloc2.dtd, which serves version 3 too. Version 3 differs in what is read here in two
places: `osdev_type` is a set of bits instead of a number, and HostName belongs to the topology instead of the machine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.bounds import MAX_DEVICES, MAX_ELEMENTS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import NicKind
from numapin.topology.readings import DISPLAY, CpuReading, NodeReading, PciReading, Readings, nic_kind, pci_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.topology.sources.xmlfile import Element

    Placed = tuple[Element, tuple[Element, ...]]
    """An object and the elements above it, nearest first."""

_LATENCY: Final = 1 << 2  # HWLOC_DISTANCES_KIND_VALUE_LATENCY (MEANS_LATENCY in version 2)
_GROUPS: Final = frozenset({"Core", "L3Cache"})
_IO: Final = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):[0-9a-f]{4}\].*", re.IGNORECASE)
_NVIDIA: Final = "10de"
_NVML: Final = re.compile(r"nvml([0-9]{1,4})")
_BRIDGE_PCI: Final = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")


def read_hwloc(root: Element) -> Readings:
    """Read hwloc XML. Raises MachineFileError that names the file, the line and the element.

    It tells neither free memory nor PCI Express generations (`pci_link_speed` is a bandwidth).
    """
    version = _version(root)
    machine = next(root.named("object"), None)
    if machine is None or machine.text("type") != "Machine":
        raise root.error('the first thing in it is not <object type="Machine">')
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
        pci=tuple(islice(_read_pci(objects, with_cpus, version), MAX_DEVICES + 1)),  # `build` refuses as many
        gpu_memory_nodes=CpuSet(
            node.id("os_index")
            for node, _ in _of_type(objects, "NUMANode")
            if (node.text("subtype") or "").endswith("GPUMemory")
        ),
    )


def _version(root: Element) -> int:
    version = root.text("version")
    match = re.fullmatch(r"([23])\.[0-9.]{1,8}", version or "")
    if match is None:
        found = f"version {version!r}" if version else "no version, which is hwloc 1"
        raise root.error(f"{found}; versions 2 and 3 are understood")
    return int(match[1])


def _of_type(objects: list[Placed], kind: str) -> Iterator[Placed]:
    return (placed for placed in objects if placed[0].attributes.get("type") == kind)


def _info(element: Element, name: str) -> str | None:
    values = (info.text("value") for info in element.named("info") if info.text("name") == name)
    return next(values, None)


def _allowed(machine: Element, name: str) -> CpuSet | None:
    """Return what the process that wrote the file was allowed; hwloc writes an endless set as "0xf...f"."""
    return None if (machine.text(name) or "").startswith("0xf...f") else machine.mask(name)


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(objects: list[Placed], machine: Element) -> tuple[CpuReading, ...]:
    around: dict[int, dict[str | None, Element]] = {}
    members: defaultdict[Element, set[int]] = defaultdict(set)
    for pu, above in _of_type(objects, "PU"):
        cpu = pu.id("os_index")
        if cpu in around:
            raise pu.error(f"os_index={cpu} appears twice")
        around[cpu] = {element.attributes.get("type"): element for element in above}
        for element in around[cpu].values():
            members[element].add(cpu)
    if not around:
        raise machine.error("there is no PU in it")
    groups = {element: CpuSet(members[element]) for element in members if element.attributes.get("type") in _GROUPS}
    return tuple(_cpu(cpu, around[cpu], groups) for cpu in sorted(around))


def _cpu(cpu: int, around: dict[str | None, Element], groups: dict[Element, CpuSet]) -> CpuReading:
    core, package, l3 = around.get("Core"), around.get("Package"), around.get("L3Cache")
    return CpuReading(
        cpu=cpu,
        siblings=groups[core] if core else CpuSet({cpu}),
        package=package.number("os_index") if package else None,
        l3=groups[l3] if l3 else None,
    )


def _read_nodes(objects: list[Placed], online: CpuSet, distances: dict[int, dict[int, int]]) -> tuple[NodeReading, ...]:
    elements: dict[int, Element] = {}
    for element, _ in _of_type(objects, "NUMANode"):
        node = element.id("os_index")
        if node in elements:
            raise element.error(f"os_index={node} appears twice")
        elements[node] = element
        if len(elements) > MAX_NODES:
            raise element.error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    inside = cpu_set.Inside(online)
    near = {node: inside.of(element.mask("cpuset") or CpuSet()) for node, element in elements.items()}
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


def _own_cpus(near: dict[int, CpuSet], dram: CpuSet) -> dict[int, CpuSet]:
    """Give CPUs to the nodes that have them.

    For a node without CPUs hwloc writes the CPUs near it, which are those of another node. The owner is the node of
    plain memory, then the one with fewer CPUs near, then the one with the lower number (Linux numbers nodes with CPUs
    first).
    """
    own: dict[int, CpuSet] = {}
    taken: set[int] = set()
    for node in sorted(near, key=lambda n: (n not in dram, len(near[n]), n)):
        own[node] = near[node] if taken.isdisjoint(near[node]) else CpuSet()
        taken |= own[node]
    return own


def _distances(root: Element) -> dict[int, dict[int, int]]:
    """Return the matrix of latencies between NUMA nodes, the kernel's own (NUMALatency) before one a user added."""
    matrices = [
        matrix
        for matrix in root.named("distances2")
        if matrix.text("type") == "NUMANode"
        and matrix.text("indexing") == "os"
        and (matrix.number("kind") or 0) & _LATENCY
    ]
    matrices.sort(key=lambda matrix: matrix.text("name") != "NUMALatency")
    if not matrices:
        return {}
    nodes, values = _numbers(matrices[0], "indexes"), _numbers(matrices[0], "u64values")
    size = len(nodes)
    if size > MAX_NODES:
        raise matrices[0].error(f"distances of {size} nodes; at most {MAX_NODES} are accepted")
    if len(values) != size * size:
        raise matrices[0].error(f"{len(values)} values for {size} nodes, expected {size * size}")
    rows = (values[start : start + size] for start in range(0, len(values), size or 1))
    return {node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, rows, strict=True)}


def _numbers(matrix: Element, tag: str) -> list[int]:
    words = [word for part in matrix.named(tag) for word in "".join(part.texts).split()]
    if len(words) > MAX_NODES**2:
        raise matrix.error(f"{len(words)} numbers in <{tag}>; at most {MAX_NODES**2} are accepted")
    for word in words:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise matrix.error(f"{word[:40]!r} in <{tag}> is not a number")
    return [int(word) for word in words]


# --- PCI -------------------------------------------------------------------------------------------------------------


def _read_pci(objects: list[Placed], with_cpus: CpuSet, version: int) -> Iterator[PciReading]:
    left = MAX_ELEMENTS
    for device, above in _of_type(objects, "PCIDev"):
        match = _PCI_TYPE.fullmatch(device.text("pci_type") or "")
        device_class, vendor = (pci_class(match[1]) or 0, match[2].lower()) if match else (0, "")
        inner = [element for element, _ in device.walk()]
        left -= len(inner)
        if left < 0:
            raise device.error("PCI devices are inside of PCI devices")
        below = [element for element in inner if element.attributes.get("type") == "OSDev"]
        nvml = next((element for element in below if _NVML.fullmatch(element.text("name") or "")), None)
        if nvml or (vendor == _NVIDIA and device_class >> 8 == DISPLAY):
            model = _info(nvml, "GPUModel") if nvml else None
            yield replace(
                _device(device, above, with_cpus),
                # Its CUDA and OpenCL devices are numbered too, in other orders.
                index=int((nvml.text("name") or "")[4:]) if nvml else None,
                uuid=_info(nvml, "NVIDIAUUID") if nvml else None,
                name=model or _info(device, "PCIDevice"),
            )
        elif interfaces := tuple(_interfaces(below, nic_kind(device_class), version)):
            yield replace(_device(device, above, with_cpus), interfaces=interfaces)


def _device(device: Element, above: tuple[Element, ...], with_cpus: CpuSet) -> PciReading:
    """Place a device where hwloc hangs its branch of the PCI tree: below the machine where nothing is known."""
    address = pci_address(device.text("pci_busid") or "")
    if address is None:
        raise device.error(f"pci_busid={device.text('pci_busid')!r} is not a PCI address")
    home = next(element for element in above if element.attributes.get("type") not in _IO)
    nodes = (home.mask("nodeset") or CpuSet()) & with_cpus
    bridges = [element for element in above if element.attributes.get("type") == "Bridge"]
    parents = (pci_address(bridge.text("pci_busid") or "") for bridge in bridges)
    return PciReading(
        address=address,
        node=min(nodes) if len(nodes) == 1 else None,
        local_cpus=home.mask("cpuset"),
        parents=tuple(parent for parent in parents if parent),
        host_bridge=next(filter(None, map(_root_bus, bridges)), None),
    )


def _root_bus(bridge: Element) -> str | None:
    """Return a host bridge's bus in the kernel's spelling ("pci0000:17"); None for a bridge between PCI buses."""
    match = _BRIDGE_PCI.fullmatch(bridge.text("bridge_pci") or "")
    return f"pci{match[1]}:{match[2]}" if match and (bridge.text("bridge_type") or "").startswith("0-") else None


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[tuple[str, NicKind]]:
    # Version 2 numbers the types (2 network, 3 OpenFabrics), version 3 adds them up (16 network, 32 OpenFabrics).
    verbs = NicKind.INFINIBAND
    kinds = {2: network, 3: verbs} if version == 2 else {16: network, 32: verbs, 48: verbs}
    for device in devices:
        name, kind = device.text("name"), kinds.get(device.number("osdev_type") or 0)
        if name and kind:
            yield name, kind
