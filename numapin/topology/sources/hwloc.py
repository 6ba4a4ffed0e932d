"""hwloc XML (versions 2 and 3) as readings.

Source: hwloc's topology-xml.c and hwloc2.dtd, which is valid for version 3 too. Of the values read here, two differ in
version 3: `osdev_type` is a set of bits instead of a number, and HostName belongs to the topology, not to the machine.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, filterfalse, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_DEVICES, MAX_ELEMENTS, MAX_LINKS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.gpu_uuid import GPU_PREFIX
from numapin.base.plural import listed
from numapin.topology.address import pci_address
from numapin.topology.model import GpuVendor, NicInterface, NicKind, NodeSource
from numapin.topology.readings import (
    VGA,
    CpuReading,
    FabricLink,
    NicReading,
    NodeReading,
    PciReading,
    Readings,
    core_notes,
    distinct_packages,
    nic_kind,
    pci_class,
)
from numapin.topology.vendors import BY_PCI_ID, VENDORS, is_gpu, support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numapin.topology.readings import GpuPart
    from numapin.topology.sources.xmlfile import Element
    from numapin.topology.vendors import VendorSupport

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

_WORDS: Final = {"NVLinkBandwidth": "NV", "XGMIBandwidth": "XGMI", "XeLinkBandwidth": "XELINK"}
"""Matrix of bandwidths -> the word for a link in it."""
_NVLINK_SPEEDS: Final = (
    (re.compile(r"\bP100\b"), 20_000),
    (re.compile(r"\b(?:V100|GV100|A100|A800|A30|A40|H100|H200|H800|H20|GH200)\b"), 25_000),
    (re.compile(r"\bG?B[123]00\b"), 50_000),
)
"""Models, and the bandwidth of one NVLink in MB/s a direction, as hwloc adds them up."""
_REFERENCE: Final = re.compile(r"(?:[A-Za-z0-9]{1,20}:)?([0-9]{1,18})")


def read_hwloc(root: Element) -> Readings:
    """Read hwloc XML. Raises MachineFileError that names the file, the line and the element.

    It has neither free memory nor PCI Express generations (`pci_link_speed` is a bandwidth).
    """
    version = _version(root)
    machine = next(root.named("object"), None)
    if machine is None or machine.text("type") != "Machine":
        raise root.error('the first element in it is not <object type="Machine">')
    objects: defaultdict[str | None, list[Placed]] = defaultdict(list)
    for element, above in machine.walk():
        if element.tag == "object":
            objects[_kind(element)].append((element, above))
    cpus, package_notes = _read_cpus(objects["PU"], machine)
    node_elements = _node_elements(objects["NUMANode"])
    nodes, doubtful = _read_nodes(node_elements, CpuSet(cpu.cpu for cpu in cpus), _distances(root))
    with_cpus = CpuSet(node.id for node in nodes if node.cpus)
    devices = _find_pci_devices(objects["PCIDev"])
    matrices = [matrix for matrix in root.named("distances2", "distances2hetero") if matrix.text("name") in _WORDS]
    gpus = _gpus_by_gp_index(devices) if matrices else {}
    indexes = {index for matrix in matrices for index in _numbers(matrix, "indexes", _REFERENCE)}
    linked = frozenset(gpus[index].part for index in indexes & gpus.keys())
    # hwloc writes an infinite set as "0xf...f".
    is_all = {name: machine.word(name).startswith("0xf...f") for name in _ALLOWED}
    notes = [*package_notes]
    if doubtful:
        problem = "list the same CPUs, and the file does not say which node owns them"
        assumed = "the smaller list, then the lower number, is assumed"
        remedy = "capture the machine's sysfs instead: hwloc-gather-topology"
        notes.append(f"{listed('node', doubtful)} {problem}; {assumed}; {remedy}")
    allowed_cpus, allowed_nodes = (None if is_all[name] else machine.mask(name) for name in _ALLOWED)
    return Readings(
        host=_info(machine, "HostName") or _info(root, "HostName"),
        source=root.source,
        cpus=cpus,
        nodes=nodes,
        allowed_cpus=allowed_cpus,
        allowed_nodes=allowed_nodes,
        # `build` refuses as many devices and interfaces as can be read here.
        pci=tuple(islice(_read_pci(devices, with_cpus, version, linked), MAX_DEVICES + 1)),
        nics=tuple(islice(_read_other_nics(objects["OSDev"], with_cpus, version), MAX_NICS + 1)),
        fabric=tuple(islice(chain.from_iterable(_fabric(matrix, gpus) for matrix in matrices), MAX_LINKS)),
        gpu_memory_nodes=CpuSet(
            node for node, element in node_elements.items() if element.word("subtype").endswith("GPUMemory")
        ),
        doubtful_nodes=doubtful,
        notes=(*notes, *core_notes(cpus)),
        allowed_known=all(map(machine.text, _ALLOWED)),
    )


def _version(root: Element) -> int:
    version = root.word("version")
    match = _VERSION.fullmatch(version)
    if match:
        return int(match[1])
    found = f"version {version!r}" if version else "no version, which is hwloc 1"
    problem = f"{found}; versions 2 and 3 are supported"
    is_old = not version or version.startswith("1.")
    raise root.error(problem, hint=_OLD) if is_old else root.error(problem)


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(objects: Iterable[Placed], machine: Element) -> tuple[tuple[CpuReading, ...], tuple[str, ...]]:
    """Return the CPUs, and notes on their packages."""
    around: dict[int, dict[str | None, Element]] = {}  # the elements above each CPU, by type
    for pu, above in objects:
        cpu = pu.id("os_index")
        if cpu in around:
            raise pu.error(f"os_index={cpu} appears twice")
        around[cpu] = {_kind(element): element for element in above}
    if not around:
        raise machine.error("it has no PU")
    members: defaultdict[Element | None, set[int]] = defaultdict(set)
    numbers: dict[Element | None, int | None] = {}
    for cpu, elements in sorted(around.items()):
        for kind in {"Core", "L3Cache"} & elements.keys():
            members[elements[kind]].add(cpu)
        if "Package" in elements:
            numbers[elements["Package"]] = elements["Package"].number("os_index")
    groups = {element: CpuSet(cpus) for element, cpus in members.items()}
    packages, notes = distinct_packages(numbers)
    cpus = tuple(
        CpuReading(
            cpu=cpu,
            siblings=groups.get(elements.get("Core")),
            package=packages.get(elements.get("Package")),
            l3=groups.get(elements.get("L3Cache")),
        )
        for cpu, elements in sorted(around.items())
    )
    return cpus, notes


def _node_elements(objects: Iterable[Placed]) -> dict[int, Element]:
    elements: dict[int, Element] = {}
    for element, _ in objects:
        node = element.id("os_index")
        if node in elements:
            raise element.error(f"os_index={node} appears twice")
        elements[node] = element
        if len(elements) > MAX_NODES:
            raise element.error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    return elements


def _read_nodes(
    elements: Mapping[int, Element], online: CpuSet, distances: Mapping[int, Mapping[int, int]]
) -> tuple[tuple[NodeReading, ...], CpuSet]:
    """Return the nodes, and those of which the file does not say whether they have the CPUs that it lists."""
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
    return readings, CpuSet(node for node in untyped if num_near[near[node]] > 1)


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
    nodes = _numbers(matrix, "indexes", _NUMBER)
    rows = _square(matrix, len(nodes))
    return {node: dict(zip(nodes, row, strict=True)) for node, row in zip(nodes, rows, strict=True)}


# --- GPUs and NICs ---------------------------------------------------------------------------------------------------


class _GpuDevice(NamedTuple):
    """A device that a GPU's runtime shows: the GPU, or one of its partitions or tiles.

    Attributes:
        support: Its vendor.
        number: The number in the name of the library's device, such as 0 of nvml0.
        library: The library's device; that of the whole GPU if it has tiles.
        element: The device's own element (ze0.1 of a tile). None: the file does not have the tile's.
        partition: Its number among the devices at this PCI address. None: there is only this one.
    """

    support: VendorSupport
    number: int
    library: Element
    element: Element | None
    partition: int | None = None


class _PciDevice(NamedTuple):
    """A PCI device: its element, those above it, the operating system's devices below it, and its GPUs."""

    element: Element
    above: tuple[Element, ...]
    below: list[Element]
    gpus: list[_GpuDevice]

    @property
    def address(self) -> str:
        """The PCI address. Raises MachineFileError if it is malformed."""
        address = pci_address(self.element.text("pci_busid"))
        if address is None:
            raise self.element.error(f"pci_busid={self.element.text('pci_busid')!r} is not a PCI address")
        return address

    @property
    def ids(self) -> tuple[int, int, int]:
        """Its class, its vendor and its model; 0: unknown."""
        match = _PCI_TYPE.fullmatch(self.element.word("pci_type"))
        return (pci_class(match[1]) or 0, int(match[2], 16), int(match[3], 16)) if match else (0, 0, 0)


def _find_pci_devices(objects: Iterable[Placed]) -> list[_PciDevice]:
    """Return the PCI devices. Raises MachineFileError if they are inside each other too often."""
    found: list[_PciDevice] = []
    num_left = MAX_ELEMENTS
    for device, above in objects:
        inner = [element for element, _ in device.walk()]
        num_left -= len(inner)
        if num_left < 0:
            raise device.error("PCI devices are inside other PCI devices")
        below = [element for element in inner if _kind(element) == "OSDev"]
        found.append(_PciDevice(device, above, below, _gpu_devices(below)))
    return found


def _gpu_devices(below: list[Element]) -> list[_GpuDevice]:
    """Return the devices by which a vendor's library knows a GPU. Level Zero shows each tile as one, if several."""
    by_name = {element.word("name"): element for element in below}
    found: list[_GpuDevice] = []
    for name, element in ((element.word("name"), element) for element in below):
        for support in map(support_of, VENDORS):
            match = support.hwloc_name and support.hwloc_name.fullmatch(name)
            if not match:
                continue
            digit = re.fullmatch(r"[0-9]", _info(element, "LevelZeroSubdevices") or "")
            num_tiles = int(digit[0]) if digit else 0
            tiles = [by_name.get(f"{name}.{tile}") for tile in range(num_tiles)] if num_tiles > 1 else [element]
            found += [_GpuDevice(support, int(match[1]), element, tile) for tile in tiles]
    if len(found) == 1:
        return found
    return [gpu._replace(partition=number) for number, gpu in enumerate(found)]


def _read_pci(
    devices: Iterable[_PciDevice], with_cpus: CpuSet, version: int, linked: frozenset[GpuPart]
) -> Iterator[PciReading]:
    """Yield the GPUs and NICs on PCI; `linked` are the GPUs whose links to others the file has."""
    for device in devices:
        found = _read_gpus(device)
        if not found:
            interfaces = tuple(_interfaces(device.below, nic_kind(device.ids[0]), version))
            found = [PciReading(address=device.address, interfaces=interfaces)] if interfaces else []
        for reading in found:
            yield replace(_placed(reading, device.above, with_cpus), reports_fabric=reading.part in linked)


def _read_gpus(device: _PciDevice) -> list[PciReading]:
    """Return a GPU or its partitions, known by the devices of its driver's library or by its PCI class."""
    device_class, vendor_id, device_id = device.ids
    vendor = BY_PCI_ID.get(vendor_id)
    reading = PciReading(
        address=device.address,
        name=_info(device.element, "PCIDevice"),
        vendor=vendor,
        device_id=device_id,
        is_vga=device_class == VGA,
    )
    if not device.gpus:
        # A driver serves it for more than a screen if it has one of these devices.
        may_compute = any(element.word("name").startswith(("renderD", "opencl")) for element in device.below)
        counts = (may_compute or not reading.may_be_board_vga) and is_gpu(vendor, device_class, reading.address)
        return [reading.with_tiles_unread()] if counts else []

    found: list[PciReading] = []
    for gpu in device.gpus:
        vendor = gpu.support.vendor
        uuid = _info(gpu.library, gpu.support.hwloc_uuid) if gpu.element is gpu.library else None  # not of a tile
        if uuid is not None and vendor is GpuVendor.AMD and not uuid.startswith(GPU_PREFIX):
            uuid = f"{GPU_PREFIX}{uuid}"  # hwloc writes AMD's without the prefix that ROCr gives it
        found.append(
            replace(
                reading,
                vendor=vendor,
                index=None if vendor is GpuVendor.INTEL else gpu.number,  # Intel's numbers count tiles, too
                uuid=uuid,
                name=_info(gpu.library, "GPUModel") or _info(gpu.library, "LevelZeroModel") or reading.name,
                partition=gpu.partition,
            )
        )
    return found


def _placed(reading: PciReading, above: tuple[Element, ...], with_cpus: CpuSet) -> PciReading:
    """Return the device with its place."""
    bridges = [element for element in above if _kind(element) == "Bridge"]
    parents = (pci_address(bridge.text("pci_busid")) for bridge in bridges)
    # A host bridge's bus in the kernel's spelling ("pci0000:17"); other bridges are between PCI buses.
    host_bridges = (bridge for bridge in bridges if bridge.word("bridge_type").startswith("0-"))
    buses = filter(None, (_BRIDGE_PCI.fullmatch(bridge.word("bridge_pci")) for bridge in host_bridges))
    home, node = _home(above, with_cpus)
    evidence = {NodeSource.HWLOC_FILE: CpuSet({node})} if node is not None else None
    return replace(
        reading,
        evidence=evidence or {NodeSource.LOCAL_CPUS: home.members("cpuset")},
        parents=tuple(filter(None, parents)),
        host_bridge=next((f"pci{bus[1]}:{bus[2]}" for bus in buses), None),
    )


def _home(above: tuple[Element, ...], with_cpus: CpuSet) -> tuple[Element, int | None]:
    """Return the element that hwloc attaches a device to (the machine if its place is unknown), and its node."""
    home = next(element for element in above if _kind(element) not in _IO)
    nodes = home.members("nodeset") & with_cpus
    return home, min(nodes) if len(nodes) == 1 else None


def _read_other_nics(objects: Iterable[Placed], with_cpus: CpuSet, version: int) -> Iterator[NicReading]:
    """Yield the network interfaces that are not below a PCI device."""
    for device, above in objects:
        if all(_kind(element) != "PCIDev" for element in above):
            _, node = _home(above, with_cpus)
            yield from (nic._replace(node=node) for nic in _interfaces([device], NicKind.ETHERNET, version))


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[NicReading]:
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
        yield NicReading(
            name=name,
            kind=kind,
            interface=interface,
            is_up=state == _ACTIVE if state else None,
        )


# --- links of GPUs that are not PCI ----------------------------------------------------------------------------------


class _FabricEnd(NamedTuple):
    """A GPU in a matrix of bandwidths."""

    part: GpuPart
    model: str


def _gpus_by_gp_index(devices: Iterable[_PciDevice]) -> dict[int, _FabricEnd]:
    """Return the GPU of each device of a vendor's library, by hwloc's number for the device."""
    ends: dict[int, _FabricEnd] = {}
    for device in devices:
        for gpu in device.gpus:
            gp_index = gpu.element.number("gp_index") if gpu.element else None
            if gp_index is not None:
                ends[gp_index] = _FabricEnd((device.address, gpu.partition), _info(gpu.library, "GPUModel") or "")
    return ends


def _fabric(matrix: Element, gpus: Mapping[int, _FabricEnd]) -> Iterator[FabricLink]:
    """Yield the links between GPUs in a matrix of bandwidths, each once; GPUs of one switch are linked through it."""
    indexes = _numbers(matrix, "indexes", _REFERENCE)
    ends = {row: gpus[index] for row, index in enumerate(indexes) if index in gpus}
    rows = _square(matrix, len(indexes))
    # PCI devices are switches. Processors (POWER) have links as well, but do not forward.
    switches = {row for row, word in enumerate(_words_in(matrix, "indexes")) if word.startswith("PCIDev:")}
    to_switch = {gpu: sum(rows[gpu][switch] for switch in switches - ends.keys()) for gpu in ends}
    word = _WORDS[matrix.word("name")]
    for a, b in combinations(ends, 2):
        speed = rows[a][b] or min(to_switch[a], to_switch[b])
        is_one_gpu = ends[a].part[0] == ends[b].part[0]  # hwloc gives its tiles a made-up bandwidth
        if speed and not is_one_gpu:
            # The number of NVLinks is known if the bandwidth of one is known for the GPU's model.
            of_model = (one for models, one in _NVLINK_SPEEDS if word == "NV" and models.search(ends[a].model))
            one = next(of_model, 0)
            number = speed // one if one and speed % one == 0 else ""
            yield FabricLink(ends[a].part, ends[b].part, f"{word}{number}")


# --- objects and matrices --------------------------------------------------------------------------------------------


def _kind(element: Element) -> str | None:
    """Return the type of an object."""
    return element.attributes.get("type")


def _info(element: Element, name: str) -> str | None:
    """Return an info value of an object."""
    values = (entry.text("value") for entry in element.named("info") if entry.text("name") == name)
    return next(values, None)


def _square(matrix: Element, size: int) -> list[list[int]]:
    """Return the rows of a matrix. Raises MachineFileError if it is not square or too large."""
    if size > MAX_NODES:
        raise matrix.error(f"distances of {size} objects; at most {MAX_NODES} are accepted")
    values = _numbers(matrix, "u64values", _NUMBER)
    if len(values) != size * size:
        raise matrix.error(f"{len(values)} values for {size} objects, expected {size * size}")
    return [values[start : start + size] for start in range(0, len(values), size or 1)]


def _words_in(matrix: Element, tag: str) -> Iterator[str]:
    """Yield the words in the elements of a name."""
    return (word for part in matrix.named(tag) for word in "".join(part.texts).split())


def _numbers(matrix: Element, tag: str, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the elements of a name; one may follow a type, as in "OSDev:3"."""
    words = list(_words_in(matrix, tag))
    if len(words) > MAX_NODES**2:
        raise matrix.error(f"{len(words)} numbers in <{tag}>; at most {MAX_NODES**2} are accepted")
    bad = next(filterfalse(pattern.fullmatch, words), None)
    if bad is not None:
        raise matrix.error(f"{bad[:40]!r} in <{tag}> is not a number")
    return [int(word.rpartition(":")[2]) for word in words]
