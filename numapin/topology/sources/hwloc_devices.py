"""GPUs, NICs and the links between GPUs in hwloc XML. Pure.

Comes in: the objects of the file. Goes out: readings for `build`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_ELEMENTS
from numapin.base.gpu_uuid import GPU_PREFIX
from numapin.topology.address import pci_address
from numapin.topology.model import GpuVendor, NicKind, NodeSource
from numapin.topology.readings import VGA, FabricLink, NicReading, PciReading, nic_kind, pci_class
from numapin.topology.sources.hwloc_objects import info, kind_of, numbers, of_kind, placed_of_kind, square
from numapin.topology.sources.vendors.table import BY_PCI_ID, KINDS, vendor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.base.cpu_set import CpuSet
    from numapin.topology.readings import GpuPart
    from numapin.topology.sources.hwloc_objects import Placed
    from numapin.topology.sources.vendors.seam import Vendor
    from numapin.topology.sources.xmlfile import Element

_IO: Final = frozenset({"Bridge", "PCIDev", "OSDev", "Misc"})
_PCI_TYPE: Final = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):[0-9a-f]{4}\].*", re.IGNORECASE)
_BRIDGE_PCI: Final = re.compile(r"([0-9a-f]{4,8}):\[([0-9a-f]{2})-[0-9a-f]{2}\]")

_FABRICS: Final = {
    "NVLinkBandwidth": (GpuVendor.NVIDIA, "NV"),
    "XGMIBandwidth": (GpuVendor.AMD, "XGMI"),
    "XeLinkBandwidth": (GpuVendor.INTEL, "XELINK"),
}
"""Matrix of bandwidths -> the GPUs that it is about, and the word for a link in it."""
_NVLINK_SPEEDS: Final = (
    (re.compile(r"\bP100\b"), 20_000),
    (re.compile(r"\b(?:V100|GV100|A100|A800|A30|A40|H100|H200|H800|H20|GH200)\b"), 25_000),
    (re.compile(r"\bG?B[123]00\b"), 50_000),
)
"""Models, and the bandwidth of one NVLink in MB/s a direction, as hwloc adds them up."""
_REFERENCE: Final = re.compile(r"(?:[A-Za-z0-9]{1,20}:)?([0-9]{1,18})")
_INFINIBAND_OCTETS: Final = 20  # of the address of an IP-over-InfiniBand interface


def read_pci_devices(
    objects: list[Placed], with_cpus: CpuSet, version: int, fabrics: frozenset[GpuVendor]
) -> Iterator[PciReading]:
    """Yield the GPUs and NICs on PCI; `fabrics` are the vendors whose links between GPUs the file has."""
    num_left = MAX_ELEMENTS
    for device, above in placed_of_kind(objects, "PCIDev"):
        inner = [element for element, _ in device.walk()]
        num_left -= len(inner)
        if num_left < 0:
            raise device.error("PCI devices are inside other PCI devices")
        below = of_kind(inner, "OSDev")
        for reading in _read_gpus(device, below) or _read_nic(device, below, version):
            placed = _placed(reading, above, with_cpus)
            yield replace(placed, reports_fabric=reading.vendor in fabrics)


def _read_gpus(device: Element, below: list[Element]) -> list[PciReading]:
    """Return a GPU or its partitions, known by the devices of its driver's library or by its PCI class."""
    device_class, vendor_id = _class_and_vendor(device)
    reading = PciReading(address=_address(device), name=info(device, "PCIDevice"), is_vga=device_class == VGA)
    driven = _gpu_devices(below)
    if driven:
        parts = [_as_gpu(reading, element) for element in driven]
        return [replace(part, partition=number) for number, part in enumerate(parts)] if len(parts) > 1 else parts
    kind = BY_PCI_ID.get(vendor_id)
    is_gpu = kind is not None and vendor(kind).is_gpu(device_class, reading.address)
    return [replace(reading, vendor=kind)] if is_gpu else []


def _gpu_devices(below: list[Element]) -> list[Element]:
    """Return the devices by which a vendor's library knows a GPU."""
    return [element for element in below if _vendor_and_number(element) is not None]


def _vendor_and_number(element: Element) -> tuple[Vendor, int] | None:
    for maker in map(vendor, KINDS):
        match = maker.hwloc_name.fullmatch(element.word("name"))
        if match is not None:
            return maker, int(match[1])
    return None


def _as_gpu(reading: PciReading, element: Element) -> PciReading:
    found = _vendor_and_number(element)
    assert found is not None  # noqa: S101 - only such elements are given
    maker, number = found
    name = info(element, "GPUModel") or info(element, "LevelZeroModel") or reading.name
    return replace(reading, vendor=maker.kind, index=number, uuid=_uuid(element, maker), name=name)


def _uuid(element: Element, maker: Vendor) -> str | None:
    """Return a GPU's UUID; hwloc writes AMD's without the prefix that ROCr gives it."""
    uuid = info(element, maker.hwloc_uuid)
    is_bare = uuid is not None and maker.kind is GpuVendor.AMD and not uuid.startswith(GPU_PREFIX)
    return f"{GPU_PREFIX}{uuid}" if is_bare else uuid


def _read_nic(device: Element, below: list[Element], version: int) -> list[PciReading]:
    """Return a network device that has interfaces."""
    device_class, _ = _class_and_vendor(device)
    interfaces = tuple(_interfaces(below, nic_kind(device_class), version))
    return [PciReading(address=_address(device), interfaces=interfaces)] if interfaces else []


def read_other_interfaces(objects: list[Placed], with_cpus: CpuSet, version: int) -> Iterator[NicReading]:
    """Yield the network interfaces that are not below a PCI device."""
    for device, above in placed_of_kind(objects, "OSDev"):
        if not of_kind(above, "PCIDev"):
            place = _placed(PciReading(address=""), above, with_cpus)
            for name, kind in _interfaces([device], NicKind.ETHERNET, version):
                yield NicReading(name=name, kind=kind, node=place.node)


def _class_and_vendor(device: Element) -> tuple[int, int]:
    match = _PCI_TYPE.fullmatch(device.word("pci_type"))
    return (pci_class(match[1]) or 0, int(match[2], 16)) if match else (0, 0)


def _address(device: Element) -> str:
    address = pci_address(device.text("pci_busid"))
    if address is None:
        raise device.error(f"pci_busid={device.text('pci_busid')!r} is not a PCI address")
    return address


def _placed(reading: PciReading, above: tuple[Element, ...], with_cpus: CpuSet) -> PciReading:
    """Return the device with its place: hwloc attaches its PCI tree there, or to the machine if it is unknown."""
    home = next(element for element in above if kind_of(element) not in _IO)
    nodes = home.members("nodeset") & with_cpus
    bridges = of_kind(above, "Bridge")
    parents = (pci_address(bridge.text("pci_busid")) for bridge in bridges)
    return replace(
        reading,
        node=min(nodes) if len(nodes) == 1 else None,
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


def _interfaces(devices: list[Element], network: NicKind, version: int) -> Iterator[tuple[str, NicKind]]:
    # Version 2 numbers the types (2 network, 3 OpenFabrics); version 3 adds them up (16 network, 32 OpenFabrics).
    verbs = NicKind.INFINIBAND
    kinds = {2: network, 3: verbs} if version == 2 else {16: network, 32: verbs, 48: verbs}
    for device in devices:
        name, kind = device.text("name"), kinds.get(device.number("osdev_type") or 0)
        if name and kind:
            yield name, verbs if _is_infiniband(device) else kind


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

    def __init__(self, root: Element, objects: list[Placed]) -> None:
        matrices = root.named("distances2", "distances2hetero")
        self._matrices = [matrix for matrix in matrices if matrix.text("name") in _FABRICS]
        self._objects = objects

    @property
    def kinds(self) -> frozenset[GpuVendor]:
        """The vendors whose links the file has."""
        return frozenset(_FABRICS[matrix.word("name")][0] for matrix in self._matrices)

    def links(self) -> Iterator[FabricLink]:
        """Yield the links between GPUs, each once; GPUs of one switch are linked through it."""
        gpus = _gpus_by_gp_index(self._objects) if self._matrices else {}
        for matrix in self._matrices:
            names = numbers(matrix, "indexes", _REFERENCE)
            rows = square(matrix, len(names))
            ends = {row: gpus[name] for row, name in enumerate(names) if name in gpus}
            switches = [row for row in _rows_of_switches(matrix) if row not in ends]
            to_switch = {row: sum(rows[row][switch] for switch in switches) for row in ends}
            for a, b in combinations(ends, 2):
                speed = rows[a][b] or min(to_switch[a], to_switch[b])
                if speed:
                    yield FabricLink(ends[a].part, ends[b].part, _fabric_word(matrix, speed, ends[a].model))


def _fabric_word(matrix: Element, speed: int, model: str) -> str:
    """Return the word for a link, with the number of NVLinks if the bandwidth of one is known for the GPU's model."""
    _, word = _FABRICS[matrix.word("name")]
    one = next((one for models, one in _NVLINK_SPEEDS if models.search(model)), 0) if word == "NV" else 0
    return f"{word}{speed // one}" if one and speed % one == 0 else word


def _rows_of_switches(matrix: Element) -> Iterator[int]:
    """Yield the rows of PCI devices. Processors (POWER) have links as well, but do not forward."""
    words = (word for part in matrix.named("indexes") for word in "".join(part.texts).split())
    return (row for row, word in enumerate(words) if word.startswith("PCIDev:"))


def _gpus_by_gp_index(objects: list[Placed]) -> dict[int, _FabricEnd]:
    """Return the GPU of each device of a vendor's library, by hwloc's number for the device."""
    found: dict[int, _FabricEnd] = {}
    for device, _ in placed_of_kind(objects, "PCIDev"):
        elements = _gpu_devices(of_kind((element for element, _ in device.walk()), "OSDev"))
        for number, element in enumerate(elements):
            gp_index = element.number("gp_index")
            if gp_index is not None:
                part = _address(device), number if len(elements) > 1 else None
                found[gp_index] = _FabricEnd(part=part, model=info(element, "GPUModel") or "")
    return found
