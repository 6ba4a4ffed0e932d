"""GPUs, NICs and the links between GPUs in hwloc XML."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_ELEMENTS
from numapin.base.gpu_uuid import GPU_PREFIX
from numapin.topology.address import pci_address
from numapin.topology.model import GpuVendor, NicInterface, NicKind, NodeSource
from numapin.topology.readings import VGA, FabricLink, NicReading, PciReading, nic_kind, pci_class
from numapin.topology.sources.hwloc_objects import info, kind_of, numbers, of_kind, placed_of_kind, square, words_in
from numapin.topology.vendors import BY_PCI_ID, VENDORS, is_gpu, support_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numapin.base.cpu_set import CpuSet
    from numapin.topology.readings import GpuPart
    from numapin.topology.sources.hwloc_objects import Placed
    from numapin.topology.sources.xmlfile import Element
    from numapin.topology.vendors import VendorSupport

_IO: Final = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*", re.IGNORECASE)
_BRIDGE_PCI: Final = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")

_WORDS: Final = {"NVLinkBandwidth": "NV", "XGMIBandwidth": "XGMI", "XeLinkBandwidth": "XELINK"}
"""Matrix of bandwidths -> the word for a link in it."""
_NVLINK_SPEEDS: Final = (
    (re.compile(r"\bP100\b"), 20_000),
    (re.compile(r"\b(?:V100|GV100|A100|A800|A30|A40|H100|H200|H800|H20|GH200)\b"), 25_000),
    (re.compile(r"\bG?B[123]00\b"), 50_000),
)
"""Models, and the bandwidth of one NVLink in MB/s a direction, as hwloc adds them up."""
_REFERENCE: Final = re.compile(r"(?:[A-Za-z0-9]{1,20}:)?([0-9]{1,18})")
_ACTIVE: Final = "4"  # IB_PORT_ACTIVE
_INFINIBAND_OCTETS: Final = 20  # of the address of an IP-over-InfiniBand interface


class _GpuDevice(NamedTuple):
    """A GPU's device of a vendor's library, such as nvml0, with the devices of its tiles (ze0.0, ze0.1)."""

    support: VendorSupport
    number: int
    element: Element
    tiles: tuple[Element | None, ...] = ()

    @property
    def parts(self) -> tuple[Element | None, ...]:
        """The elements of the devices that the runtime shows; None: the file does not have the tile's."""
        return self.tiles or (self.element,)


class PciDevice(NamedTuple):
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
    def may_compute(self) -> bool:
        """Whether a driver serves it for more than a screen."""
        return any(element.word("name").startswith(("renderD", "opencl")) for element in self.below)

    @property
    def parts(self) -> list[tuple[_GpuDevice, Element | None, int | None]]:
        """The GPU's devices, each with its element and the number of its partition if there are several."""
        parts = [(gpu, element) for gpu in self.gpus for element in gpu.parts]
        is_divided = len(parts) > 1
        return [(gpu, element, number if is_divided else None) for number, (gpu, element) in enumerate(parts)]


def find_pci_devices(objects: list[Placed]) -> list[PciDevice]:
    """Return the PCI devices. Raises MachineFileError if they are inside each other too often."""
    found: list[PciDevice] = []
    num_left = MAX_ELEMENTS
    for device, above in placed_of_kind(objects, "PCIDev"):
        inner = [element for element, _ in device.walk()]
        num_left -= len(inner)
        if num_left < 0:
            raise device.error("PCI devices are inside other PCI devices")
        below = of_kind(inner, "OSDev")
        found.append(PciDevice(device, above, below, _gpu_devices(below)))
    return found


def _gpu_devices(below: list[Element]) -> list[_GpuDevice]:
    """Return the devices by which a vendor's library knows a GPU."""
    by_name = {element.word("name"): element for element in below}
    found: list[_GpuDevice] = []
    for element, vendor in product(below, VENDORS):
        support = support_of(vendor)
        match = support.hwloc_name.fullmatch(element.word("name"))
        if match is not None:
            found.append(_GpuDevice(support, int(match[1]), element, _tiles(element, by_name)))
    return found


def _tiles(element: Element, by_name: Mapping[str, Element]) -> tuple[Element | None, ...]:
    """Return the tiles of an Intel GPU, each of which Level Zero shows as a device; none if it has only one."""
    number = _num_tiles(element)
    return tuple(by_name.get(f"{element.word('name')}.{tile}") for tile in range(number)) if number > 1 else ()


def _num_tiles(element: Element) -> int:
    digit = re.fullmatch(r"[0-9]", info(element, "LevelZeroSubdevices") or "")
    return int(digit[0]) if digit else 0


def read_pci_devices(
    devices: list[PciDevice], with_cpus: CpuSet, version: int, linked: frozenset[GpuPart]
) -> Iterator[PciReading]:
    """Yield the GPUs and NICs on PCI; `linked` are the GPUs whose links to others the file has."""
    for device in devices:
        for reading in _read_gpus(device) or _read_nic(device, version):
            placed = _placed(reading, device.above, with_cpus)
            yield replace(placed, reports_fabric=reading.part in linked)


def _read_gpus(device: PciDevice) -> list[PciReading]:
    """Return a GPU or its partitions, known by the devices of its driver's library or by its PCI class."""
    ids = _ids(device.element)
    vendor = BY_PCI_ID.get(ids.vendor)
    reading = PciReading(
        address=device.address,
        name=info(device.element, "PCIDevice"),
        vendor=vendor,
        device_id=ids.device,
        is_vga=ids.device_class == VGA,
    )
    if device.gpus:
        return [_as_gpu(reading, gpu, partition) for gpu, _, partition in device.parts]
    may_compute = device.may_compute or not reading.may_be_board_vga
    counts = may_compute and is_gpu(vendor, ids.device_class, reading.address)
    return [reading.with_tiles_unread()] if counts else []


def _as_gpu(reading: PciReading, gpu: _GpuDevice, partition: int | None) -> PciReading:
    name = info(gpu.element, "GPUModel") or info(gpu.element, "LevelZeroModel") or reading.name
    return replace(
        reading,
        vendor=gpu.support.vendor,
        index=None if gpu.support.vendor is GpuVendor.INTEL else gpu.number,  # tiles are counted, too
        uuid=None if gpu.tiles else _uuid(gpu),
        name=name,
        partition=partition,
    )


def _uuid(gpu: _GpuDevice) -> str | None:
    """Return a GPU's UUID; hwloc writes AMD's without the prefix that ROCr gives it."""
    uuid = info(gpu.element, gpu.support.hwloc_uuid)
    is_bare = uuid is not None and gpu.support.vendor is GpuVendor.AMD and not uuid.startswith(GPU_PREFIX)
    return f"{GPU_PREFIX}{uuid}" if is_bare else uuid


def _read_nic(device: PciDevice, version: int) -> list[PciReading]:
    """Return a network device that has interfaces."""
    interfaces = tuple(_interfaces(device.below, nic_kind(_ids(device.element).device_class), version))
    return [PciReading(address=device.address, interfaces=interfaces)] if interfaces else []


def read_other_interfaces(objects: list[Placed], with_cpus: CpuSet, version: int) -> Iterator[NicReading]:
    """Yield the network interfaces that are not below a PCI device."""
    others = ((device, above) for device, above in placed_of_kind(objects, "OSDev") if not of_kind(above, "PCIDev"))
    for device, above in others:
        for nic in _interfaces([device], NicKind.ETHERNET, version):
            yield nic._replace(node=_node_of(_home(above), with_cpus))


class _PciIds(NamedTuple):
    """The class of a PCI device, its vendor and its model; 0: unknown."""

    device_class: int = 0
    vendor: int = 0
    device: int = 0


def _ids(device: Element) -> _PciIds:
    match = _PCI_TYPE.fullmatch(device.word("pci_type"))
    return _PciIds(pci_class(match[1]) or 0, int(match[2], 16), int(match[3], 16)) if match else _PciIds()


def _home(above: tuple[Element, ...]) -> Element:
    """Return the element that hwloc attaches a device's PCI tree to: the machine if its place is unknown."""
    return next(element for element in above if kind_of(element) not in _IO)


def _node_of(home: Element, with_cpus: CpuSet) -> int | None:
    nodes = home.members("nodeset") & with_cpus
    return min(nodes) if len(nodes) == 1 else None


def _placed(reading: PciReading, above: tuple[Element, ...], with_cpus: CpuSet) -> PciReading:
    """Return the device with its place."""
    home = _home(above)
    bridges = of_kind(above, "Bridge")
    parents = (pci_address(bridge.text("pci_busid")) for bridge in bridges)
    return replace(
        reading,
        node=_node_of(home, with_cpus),
        node_source=NodeSource.HWLOC_FILE,
        local_cpus=home.mask("cpuset"),
        parents=tuple(filter(None, parents)),
        host_bridge=next(filter(None, map(_root_bus, bridges)), None),
    )


def _root_bus(bridge: Element) -> str | None:
    """Return a host bridge's bus in the kernel's spelling ("pci0000:17"); None for a bridge between PCI buses."""
    is_host_bridge = bridge.word("bridge_type").startswith("0-")
    match = _BRIDGE_PCI.fullmatch(bridge.word("bridge_pci"))
    return f"pci{match[1]}:{match[2]}" if match and is_host_bridge else None


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[NicReading]:
    # Version 2 numbers the types (2 network, 3 OpenFabrics); version 3 adds them up (16 network, 32 OpenFabrics).
    net, verbs = NicInterface.NETWORK, NicInterface.VERBS
    interfaces = {2: net, 3: verbs} if version == 2 else {16: net, 32: verbs, 48: verbs}
    for device in devices:
        name, interface = device.text("name"), interfaces.get(device.number("osdev_type") or 0)
        if name and interface:
            is_infiniband = interface is verbs or _is_infiniband(device)
            state = info(device, "Port1State")
            yield NicReading(
                name=name,
                kind=NicKind.INFINIBAND if is_infiniband else network,
                interface=interface,
                is_up=state == _ACTIVE if state else None,
            )


def _is_infiniband(device: Element) -> bool:
    """Return whether an interface has a verbs identity or the long address of IP over InfiniBand."""
    num_octets = len((info(device, "Address") or "").split(":"))
    return num_octets == _INFINIBAND_OCTETS or info(device, "NodeGUID") is not None


# --- links of GPUs that are not PCI ----------------------------------------------------------------------------------


class _FabricEnd(NamedTuple):
    """A GPU in a matrix of bandwidths."""

    part: GpuPart
    model: str


class Fabrics:
    """The matrices of NVLink, xGMI and Xe Link bandwidths."""

    def __init__(self, root: Element, devices: list[PciDevice]) -> None:
        matrices = root.named("distances2", "distances2hetero")
        self._matrices = [matrix for matrix in matrices if matrix.text("name") in _WORDS]
        self._gpus = _gpus_by_gp_index(devices) if self._matrices else {}

    @property
    def parts(self) -> frozenset[GpuPart]:
        """The GPUs whose links the file has."""
        names = {name for matrix in self._matrices for name in numbers(matrix, "indexes", _REFERENCE)}
        return frozenset(self._gpus[name].part for name in names & self._gpus.keys())

    def links(self) -> Iterator[FabricLink]:
        """Yield the links between GPUs, each once; GPUs of one switch are linked through it."""
        return chain.from_iterable(map(self._links_in, self._matrices))

    def _links_in(self, matrix: Element) -> Iterator[FabricLink]:
        names = numbers(matrix, "indexes", _REFERENCE)
        ends = {row: self._gpus[name] for row, name in enumerate(names) if name in self._gpus}
        for a, b, speed in _linked_rows(matrix, len(names), list(ends)):
            is_one_gpu = ends[a].part[0] == ends[b].part[0]  # hwloc gives its tiles a made-up bandwidth
            if not is_one_gpu:
                yield FabricLink(ends[a].part, ends[b].part, _fabric_word(matrix, speed, ends[a].model))


def _linked_rows(matrix: Element, size: int, gpus: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of two GPUs with a link between them, directly or through switches, and its bandwidth."""
    rows = square(matrix, size)
    switches = set(_rows_of_switches(matrix)).difference(gpus)
    to_switch = {gpu: sum(rows[gpu][switch] for switch in switches) for gpu in gpus}
    for a, b in combinations(gpus, 2):
        speed = rows[a][b] or min(to_switch[a], to_switch[b])
        if speed:
            yield a, b, speed


def _fabric_word(matrix: Element, speed: int, model: str) -> str:
    """Return the word for a link, with the number of NVLinks if the bandwidth of one is known for the GPU's model."""
    word = _WORDS[matrix.word("name")]
    one = _nvlink_speed(model) if word == "NV" else None
    return f"{word}{speed // one}" if one and speed % one == 0 else word


def _nvlink_speed(model: str) -> int | None:
    return next((one for models, one in _NVLINK_SPEEDS if models.search(model)), None)


def _rows_of_switches(matrix: Element) -> Iterator[int]:
    """Yield the rows of PCI devices. Processors (POWER) have links as well, but do not forward."""
    return (row for row, word in enumerate(words_in(matrix, "indexes")) if word.startswith("PCIDev:"))


def _gpus_by_gp_index(devices: list[PciDevice]) -> dict[int, _FabricEnd]:
    """Return the GPU of each device of a vendor's library, by hwloc's number for the device."""
    return dict(chain.from_iterable(map(_ends_by_gp_index, devices)))


def _ends_by_gp_index(device: PciDevice) -> Iterator[tuple[int, _FabricEnd]]:
    for gpu, element, partition in device.parts:
        gp_index = element.number("gp_index") if element else None
        if gp_index is not None:
            part = device.address, partition
            yield gp_index, _FabricEnd(part=part, model=info(gpu.element, "GPUModel") or "")
