"""hwloc XML (versions 2 and 3) as readings.

Source: hwloc's topology-xml.c and hwloc2.dtd, which is valid for version 3 too. Of the values read here, two differ in
version 3: `osdev_type` is a set of bits instead of a number, and HostName belongs to the topology, not to the machine.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import filterfalse, islice, product
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_DEVICES, MAX_ELEMENTS, MAX_GPUS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.text import GPU_PREFIX, listed
from numapin.topology.address import pci_address
from numapin.topology.model import NodeSource
from numapin.topology.nics import Nic, NicInterface, NicKind
from numapin.topology.readings import (
    VGA,
    CpuReading,
    NodeReading,
    PciReading,
    Readings,
    nic_kind,
    pci_class,
)
from numapin.topology.vendors import BY_PCI_ID, VENDORS, GpuVendor, is_gpu, support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numapin.topology.sources.xmlfile import Element

    Placed = tuple[Element, tuple[Element, ...]]
    """An object, and the elements above it, nearest first."""

_VERSION: Final = re.compile(r"([23])\.[0-9.]{1,8}")
_OLD: Final = "convert it with hwloc 2 or newer: lstopo -i old.xml --of xml new.xml"
_ALLOWED: Final = ("allowed_cpuset", "allowed_nodeset")
_LATENCY: Final = 1 << 2  # HWLOC_DISTANCES_KIND_VALUE_LATENCY (MEANS_LATENCY in version 2)
_NUMBER: Final = re.compile(r"[0-9]{1,18}")

_IO: Final = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*", re.IGNORECASE)
_BRIDGE_PCI: Final = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")
_ACTIVE: Final = "4"  # IB_PORT_ACTIVE
_INFINIBAND_OCTETS: Final = 20  # of the address of an IP-over-InfiniBand interface


def read_hwloc(root: Element) -> Readings:
    """Read hwloc XML. Raises MachineFileError that names the file, the line and the element.

    Not read are free memory and PCI Express generations, which it lacks, and matrices of bandwidths: planning uses no
    links between GPUs.
    """
    version_text = root.word("version")
    match = _VERSION.fullmatch(version_text)
    if match is None:
        found = f"version {version_text!r}" if version_text else "no version, which is hwloc 1"
        problem = f"{found}; versions 2 and 3 are supported"
        is_old = not version_text or version_text.startswith("1.")
        raise root.error(problem, hint=_OLD) if is_old else root.error(problem)
    version = int(match[1])
    machine = next(root.named("object"), None)
    if machine is None or machine.text("type") != "Machine":
        raise root.error('the first element in it is not <object type="Machine">')
    objects: defaultdict[str | None, list[Placed]] = defaultdict(list)
    for element, above in machine.walk():
        if element.tag == "object":
            objects[_kind(element)].append((element, above))

    cpus = _read_cpus(objects["PU"], machine)
    nodes, doubtful = _read_nodes(objects["NUMANode"], CpuSet(cpu.cpu for cpu in cpus), _distances(root))
    doubts: tuple[str, ...] = ()
    if doubtful:
        problem = "list the same CPUs, and the file does not say which node owns them"
        assumed = "the smaller list, then the lower number, is assumed"
        remedy = "capture the machine's sysfs instead: hwloc-gather-topology"
        doubts = (f"{listed('node', doubtful)} {problem}; {assumed}; {remedy}",)
    # hwloc writes an infinite set as "0xf...f".
    allowed_cpus, allowed_nodes = (
        machine.members(name) if machine.text(name) and not machine.word(name).startswith("0xf...f") else None
        for name in _ALLOWED
    )

    with_cpus = CpuSet(node.id for node in nodes if node.cpus)
    # One more than `build` accepts is read, so that it refuses the file.
    devices = tuple(islice(_read_pci(objects["PCIDev"], with_cpus, version), MAX_DEVICES + 1))
    other_nics = (
        replace(nic, node=_home(above, with_cpus)[1])
        for device, above in objects["OSDev"]
        if all(_kind(element) != "PCIDev" for element in above)
        for nic in _interfaces([device], NicKind.ETHERNET, version)
    )
    nics = tuple(islice(other_nics, MAX_NICS + 1))
    return Readings(
        host=_info(machine, "HostName") or _info(root, "HostName"),
        source=root.source,
        cpus=cpus,
        nodes=nodes,
        allowed_cpus=allowed_cpus,
        allowed_nodes=allowed_nodes,
        pci=devices,
        nics=nics,
        gpu_memory_nodes=CpuSet(
            node.id("os_index") for node, _ in objects["NUMANode"] if node.word("subtype").endswith("GPUMemory")
        ),
        doubtful_nodes=doubtful,
        notes=doubts,
        allowed_known=all(map(machine.text, _ALLOWED)),
    )


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(objects: Iterable[Placed], machine: Element) -> tuple[CpuReading, ...]:
    around: dict[int, dict[str | None, Element]] = {}  # the elements above each CPU, by type
    for pu, above in objects:
        cpu = pu.id("os_index")
        if cpu in around:
            raise pu.error(f"os_index={cpu} appears twice")
        around[cpu] = {_kind(element): element for element in above}
    if not around:
        raise machine.error("it has no PU")
    members: defaultdict[Element | None, set[int]] = defaultdict(set)
    for cpu, elements in around.items():
        for kind in {"Core", "L3Cache"} & elements.keys():
            members[elements[kind]].add(cpu)
    groups = {element: CpuSet(cpus) for element, cpus in members.items()}
    return tuple(
        CpuReading(
            cpu=cpu,
            siblings=groups.get(elements.get("Core")),
            package=elements["Package"].number("os_index") if "Package" in elements else None,
            l3=groups.get(elements.get("L3Cache")),
        )
        for cpu, elements in sorted(around.items())
    )


def _read_nodes(
    objects: Iterable[Placed], online: CpuSet, distances: Mapping[int, Mapping[int, int]]
) -> tuple[tuple[NodeReading, ...], CpuSet]:
    """Return the nodes, and those whose CPUs are in doubt."""
    elements: dict[int, Element] = {}
    for element, _ in objects:
        node = element.id("os_index")
        if node in elements:
            raise element.error(f"os_index={node} appears twice")
        elements[node] = element
        if len(elements) > MAX_NODES:
            raise element.error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    online_of = cache(lambda members: members & online)  # broken firmware lists all CPUs on each of many nodes
    near = {node: online_of(element.members("cpuset")) for node, element in elements.items()}
    # For a node without CPUs, hwloc writes the CPUs near it, which belong to another node. The owner is the node of
    # plain memory, then the node with fewer CPUs near it, then the node with the lower number (Linux numbers nodes
    # with CPUs first).
    own: dict[int, CpuSet] = {}
    taken: set[int] = set()
    for node in sorted(near, key=lambda n: (elements[n].text("subtype") != "DRAM", len(near[n]), n)):
        own[node] = near[node] if taken.isdisjoint(near[node]) else CpuSet()
        taken |= own[node]
    # Without a kind of memory, only these two rules decide between nodes near the same CPUs.
    untyped = [node for node, element in elements.items() if near[node] and element.text("subtype") is None]
    num_near = Counter(near[node] for node in untyped)
    readings = tuple(
        NodeReading(
            id=node,
            cpus=own[node],
            memory_bytes=elements[node].number("local_memory") or 0,  # hwloc leaves a zero out
            distances=distances.get(node, {}),
        )
        for node in sorted(elements)
    )
    # There is no doubt if another node has the CPUs, as with the empty nodes of a Grace host, which are near all CPUs.
    owned = {own[node] for node in untyped}
    return readings, CpuSet(node for node in untyped if near[node] in owned and num_near[near[node]] > 1)


def _distances(root: Element) -> dict[int, dict[int, int]]:
    """Return the latencies between NUMA nodes, from node to node."""
    of_nodes = (
        matrix
        for matrix in root.named("distances2")
        if matrix.text("type") == "NUMANode" and matrix.text("indexing") == "os"
    )
    latencies = [matrix for matrix in of_nodes if (matrix.number("kind") or 0) & _LATENCY]
    if not latencies:
        return {}
    # The kernel's own matrix is named NUMALatency; others were added by a user.
    matrix = min(latencies, key=lambda matrix: matrix.text("name") != "NUMALatency")
    nodes = _numbers(matrix, "indexes")
    size = len(nodes)
    if size > MAX_NODES:
        raise matrix.error(f"distances of {size} objects; at most {MAX_NODES} are accepted")
    values = _numbers(matrix, "u64values")
    if len(values) != size * size:
        raise matrix.error(f"{len(values)} values for {size} objects, expected {size * size}")
    rows = (values[start : start + size] for start in range(0, size * size, size or 1))
    return {node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, rows, strict=True)}


# --- GPUs and NICs ---------------------------------------------------------------------------------------------------


def _read_pci(objects: Iterable[Placed], with_cpus: CpuSet, version: int) -> Iterator[PciReading]:
    """Yield the GPUs, their partitions or tiles, and the NICs on PCI. Raises MachineFileError."""
    num_left = MAX_ELEMENTS
    for element, above in objects:
        inner = [each for each, _ in element.walk()]
        num_left -= len(inner)
        if num_left < 0:
            raise element.error("PCI devices are inside other PCI devices")
        below = [each for each in inner if _kind(each) == "OSDev"]
        address = pci_address(element.text("pci_busid"))
        if address is None:
            raise element.error(f"pci_busid={element.text('pci_busid')!r} is not a PCI address")
        match = _PCI_TYPE.fullmatch(element.word("pci_type"))
        device_class, vendor_id, device_id = (
            (pci_class(match[1]) or 0, int(match[2], 16), int(match[3], 16)) if match else (0, 0, 0)
        )
        whole = PciReading(
            address=address,
            name=_info(element, "PCIDevice"),
            vendor=BY_PCI_ID.get(vendor_id),
            device_id=device_id,
            is_vga=device_class == VGA,
        )
        found = _read_library_devices(whole, below)
        if not found:
            # A driver serves it for more than a screen if it has one of these devices.
            may_compute = any(each.word("name").startswith(("renderD", "opencl")) for each in below)
            interfaces = tuple(_interfaces(below, nic_kind(device_class), version))
            if (may_compute or not whole.may_be_board_vga) and is_gpu(whole.vendor, device_class, address):
                found = [whole.with_tiles_unread()]
            elif interfaces:
                found = [PciReading(address=address, interfaces=interfaces)]
            else:
                continue

        home, node = _home(above, with_cpus)
        if node is None:
            evidence = {NodeSource.LOCAL_CPUS: home.members("cpuset")}
        else:
            evidence = {NodeSource.HWLOC_FILE: CpuSet({node})}
        bridges = [each for each in above if _kind(each) == "Bridge"]
        parents = tuple(filter(None, (pci_address(bridge.text("pci_busid")) for bridge in bridges)))
        # A host bridge's bus in the kernel's spelling ("pci0000:17"); other bridges are between PCI buses.
        host_bridges = (bridge for bridge in bridges if bridge.word("bridge_type").startswith("0-"))
        buses = filter(None, (_BRIDGE_PCI.fullmatch(bridge.word("bridge_pci")) for bridge in host_bridges))
        host_bridge = next((f"pci{bus[1]}:{bus[2]}" for bus in buses), None)
        for reading in found:
            yield replace(reading, evidence=evidence, parents=parents, host_bridge=host_bridge)


def _read_library_devices(whole: PciReading, below: list[Element]) -> list[PciReading]:
    """Return the devices by which a vendor's library knows a GPU: itself, its partitions or its tiles.

    Level Zero shows each tile as a device if there are several.
    """
    found: list[PciReading] = []
    for library, vendor in product(below, VENDORS):
        support = support_of(vendor)
        match = support.hwloc_name.fullmatch(library.word("name"))
        if not match:
            continue
        if len(found) > MAX_GPUS:  # `build` refuses that many
            break
        reading = replace(
            whole,
            vendor=vendor,
            index=None if vendor is GpuVendor.INTEL else int(match[1]),  # Intel's numbers count tiles, too
            name=_info(library, "GPUModel") or _info(library, "LevelZeroModel") or whole.name,
        )
        tiles = re.fullmatch(r"[2-9]", _info(library, "LevelZeroSubdevices") or "")
        if tiles is not None:
            found += [reading] * int(tiles[0])
            continue
        uuid = _info(library, support.hwloc_uuid)
        if uuid is not None and vendor is GpuVendor.AMD and not uuid.startswith(GPU_PREFIX):
            uuid = f"{GPU_PREFIX}{uuid}"  # hwloc writes AMD's without the prefix that ROCr gives it
        found.append(replace(reading, uuid=uuid))
    if len(found) == 1:
        return found
    return [replace(reading, partition=number) for number, reading in enumerate(found)]


def _home(above: tuple[Element, ...], with_cpus: CpuSet) -> tuple[Element, int | None]:
    """Return the element that hwloc attaches a device to (the machine if its place is unknown), and its node."""
    home = next(element for element in above if _kind(element) not in _IO)
    nodes = home.members("nodeset") & with_cpus
    return home, min(nodes) if len(nodes) == 1 else None


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[Nic]:
    # Version 2 numbers the types (2 network, 3 OpenFabrics); version 3 adds them up (16 network, 32 OpenFabrics).
    net, verbs = NicInterface.NETWORK, NicInterface.VERBS
    interfaces = {2: net, 3: verbs} if version == 2 else {16: net, 32: verbs, 48: verbs}
    for device in devices:
        name, interface = device.text("name"), interfaces.get(device.number("osdev_type") or 0)
        if not name or not interface:
            continue
        # A network interface of InfiniBand has a verbs identity or the long address of IP over InfiniBand.
        num_octets = len((_info(device, "Address") or "").split(":"))
        has_verbs_identity = num_octets == _INFINIBAND_OCTETS or _info(device, "NodeGUID") is not None
        kind = NicKind.INFINIBAND if interface is verbs or has_verbs_identity else network
        if device.word("subtype") == "Slingshot":  # hsn0; since hwloc 2.14 also cxi0
            kind = NicKind.SLINGSHOT
            interface = NicInterface.CXI if name.startswith("cxi") else interface
        state = _info(device, "Port1State")
        yield Nic(name=name, kind=kind, interface=interface, is_up=state == _ACTIVE if state else None)


# --- objects and matrices --------------------------------------------------------------------------------------------


def _kind(element: Element) -> str | None:
    return element.attributes.get("type")


def _info(element: Element, name: str) -> str | None:
    values = (entry.text("value") for entry in element.named("info") if entry.text("name") == name)
    return next(values, None)


def _numbers(matrix: Element, tag: str) -> list[int]:
    words = [word for part in matrix.named(tag) for word in "".join(part.texts).split()]
    if len(words) > MAX_NODES**2:
        raise matrix.error(f"{len(words)} numbers in <{tag}>; at most {MAX_NODES**2} are accepted")
    bad = next(filterfalse(_NUMBER.fullmatch, words), None)
    if bad is not None:
        raise matrix.error(f"{bad[:40]!r} in <{tag}> is not a number")
    return list(map(int, words))
