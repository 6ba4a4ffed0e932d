"""The readers' findings, before `build` decides which of them to believe.

Unknown is None throughout: a reader never turns -1 into a node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from numapin.base.bounds import MAX_PARENTS
from numapin.base.cpu_set import CpuSet
from numapin.topology.model import CpuSpeed, Mig, NodeSource, Pcie
from numapin.topology.nics import Nic, NicKind
from numapin.topology.vendors import ACCELERATOR, DISPLAY, GpuVendor

if TYPE_CHECKING:
    from collections.abc import Mapping

GpuPart: TypeAlias = tuple[str, int | None]  # a PCI address, and the number of the partition if the GPU has several

_NETWORK: Final = 0x02  # the base class of network devices on PCI: the upper half of `pci_class`
_INTEL_MAX: Final = range(0x0BD0, 0x0BDC)  # PCI device ids of Data Center GPU Max, of which some have two tiles
VGA: Final = 0x0300
CONTROLLER_3D: Final = 0x0302
_OLD_INFINIBAND: Final = 0x0C06
_INFINIBAND: Final = frozenset({0x0207, _OLD_INFINIBAND})
_CLASS: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{4})(?:[0-9a-fA-F]{2})?")
_HEXADECIMAL: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,8})")
_GENERATIONS: Final = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
_RATE: Final = re.compile(r"[1-9][0-9]{0,8}")
# An unreachable device reads as all ones, which the kernel shows as width 63.
_WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})


def pci_class(text: str | None) -> int | None:
    """Return base class and subclass (0x0302) from the kernel's and NCCL's "0x030200" or hwloc's "0302"."""
    match = _CLASS.fullmatch(text or "")
    return int(match[1], 16) if match else None


def hexadecimal(text: str | None) -> int | None:
    """Return the number of a vendor or device as the kernel, lspci and NCCL write it ("0x10de", "10de")."""
    match = _HEXADECIMAL.fullmatch(text or "")
    return int(match[1], 16) if match else None


def is_network(pci_class: int) -> bool:
    """Return whether a PCI class is that of a network device; older InfiniBand adapters are serial bus controllers."""
    return pci_class >> 8 == _NETWORK or pci_class == _OLD_INFINIBAND


def may_be_gpu(pci_class: int) -> bool:
    """Return whether a PCI class is one that GPUs have."""
    return pci_class >> 8 == DISPLAY or pci_class == ACCELERATOR


def nic_kind(pci_class: int | None) -> NicKind:
    """Return the kind of a network device by its PCI class; adapters that can be either report Ethernet."""
    return NicKind.INFINIBAND if pci_class in _INFINIBAND else NicKind.ETHERNET


def pcie_generation(speed: str | None) -> int | None:
    """Return the PCI Express generation of a speed as the kernel writes it ("16.0 GT/s PCIe", "8 GT/s")."""
    match = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", speed or "")
    return _GENERATIONS.get(match[1].removesuffix(".0")) if match else None


def gbit_s(mbit_s: str | None) -> float | None:
    """Return a rate in Gbit/s; the kernel's -1 (old kernels: 4294967295) and 0 are unknown."""
    return int(mbit_s) / 1000 if mbit_s and _RATE.fullmatch(mbit_s) else None


def pcie_width(lanes: int | None) -> int | None:
    """Return a number of lanes that exists, or None."""
    return lanes if lanes in _WIDTHS else None


class CpuReading(NamedTuple):
    """One online CPU: the CPUs of its core (itself included), its package, and the CPUs that share its L3."""

    cpu: int
    siblings: CpuSet | None  # None: the source does not say which CPUs share a core
    package: int | None = None
    l3: CpuSet | None = None


class NodeReading(NamedTuple):
    """One online node."""

    id: int
    cpus: CpuSet
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)  # its `index` would hide a tuple's
class PciReading:
    """One device on PCI that is a GPU, a partition of a GPU, or a NIC. None: unknown."""

    address: str
    evidence: Mapping[NodeSource, CpuSet] = field(default_factory=dict)  # source -> the nodes, or CPUs, that it names
    parents: tuple[str, ...] = ()  # the addresses of the bridges above it, nearest first
    host_bridge: str | None = None  # the root of its PCI tree
    pcie: Pcie = Pcie()

    interfaces: tuple[Nic, ...] = ()  # the names of a NIC, without its place. The fields below are for GPUs only
    vendor: GpuVendor | None = None
    name: str | None = None
    uuid: str | None = None
    index: int | None = None  # the driver's number (hwloc: nvml3, rsmi3)
    device_id: int | None = None
    partition: int | None = None  # the number of a partition or tile
    tiles_known: bool = True  # whether the source reports the tiles of an Intel GPU that may have several
    memory_node: int | None = None  # the node that is its memory
    is_vga: bool = False  # whether it is a VGA controller, which may only serve a screen
    is_driven: bool | None = None  # whether its driver serves it here
    is_on_pci: bool = True  # whether PCI has a device at the address, if the driver names a GPU there
    reports_fabric: bool = False  # whether the source has the links that a GPU has besides PCI, such as NVLink

    @property
    def known_parents(self) -> tuple[str, ...] | None:
        """The bridges above it, nearest first. None: unknown, because the source has neither bridges nor a root."""
        return self.parents[:MAX_PARENTS] if self.parents or self.host_bridge else None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU; a NIC without an interface is not read."""
        return not self.interfaces

    @property
    def gpu_vendor(self) -> GpuVendor | None:
        """The maker of a GPU; NVIDIA if the source names none. None: it is a NIC."""
        return None if self.interfaces else self.vendor or GpuVendor.NVIDIA

    @property
    def may_be_board_vga(self) -> bool:
        """Whether it may be the VGA chip of a server's board: only a driver tells it from a GPU for computing."""
        return self.is_vga and self.gpu_vendor is not GpuVendor.NVIDIA

    def with_tiles_unread(self) -> PciReading:
        """Return the same GPU from a source that shows none of its tiles."""
        may_have_tiles = self.vendor is GpuVendor.INTEL and self.device_id in _INTEL_MAX
        return replace(self, tiles_known=not may_have_tiles)

    @property
    def part(self) -> GpuPart:
        """The name of a GPU, or of a partition, within the machine."""
        return self.address, self.partition


class FabricLink(NamedTuple):
    """A link between two GPUs that is not PCI, with its word: "NV4", "XGMI"."""

    a: GpuPart
    b: GpuPart
    word: str


class GpuProcess(NamedTuple):
    """A process that computes on a GPU. In a container, `pid` may be that of the host."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """A GPU's faults as NVML counts them. None: unknown; `unread` then has the error, by the field's name."""

    uncorrected: int | None = None  # memory errors since the driver was loaded that ECC could not correct
    uncorrected_ever: int | None = None  # the same over the life of the GPU
    is_remapping_pending: bool | None = None
    """Whether a row of the GPU's memory waits for a reset to be replaced (Ampere and later)."""
    has_remapping_failed: bool | None = None
    is_retirement_pending: bool | None = None
    """Whether a page of the GPU's memory waits for a restart of the driver to be retired (before Ampere)."""
    slowdowns: tuple[str, ...] | None = None  # the hardware's reasons, now, for lower clocks than the job could have
    processes: tuple[GpuProcess, ...] | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)  # its `index` would hide a tuple's
class NvmlReading:
    """One GPU as NVML shows it. `memory_nodes` and `cpus` are None if NVML does not support the query."""

    index: int
    uuid: str | None
    pci: str
    name: str | None = None
    memory_nodes: CpuSet | None = None
    cpus: CpuSet | None = None
    own_node: int | None = None  # the NUMA node that is this GPU's own memory
    pcie: Pcie = Pcie()
    mig: tuple[Mig, ...] = ()
    persistence: bool | None = None  # whether the driver keeps the GPU initialized while it is not in use
    health: GpuHealth | None = None  # None: not asked for


class NvmlReadings(NamedTuple):
    """NVML's answers. `gpus` is None if NVML could not be used; `notes` then say why.

    `driver` is the version of the driver's libraries. `broken`: there is a driver, but it did not answer. `links` are
    (GPU index, GPU index, word): "NV<count>" or a `LinkKind` word. `lost` are the notes about GPUs that failed,
    `silent` those about GPUs left out for another reason than permissions, e.g. too little power.
    """

    gpus: tuple[NvmlReading, ...] | None
    driver: str | None = None
    broken: bool = False
    links: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


class GpuLoad(NamedTuple):
    """A GPU's load now; None is unknown."""

    busy_share: float | None = None  # the share of time in which a kernel ran
    h2d_gbps: float | None = None  # the rate received over PCIe in 1e9 bytes/s
    used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None


class Readings(NamedTuple):
    """Everything the readers saw of one machine.

    `nccl_nodes` maps PCI addresses to nodes, from the file that NCCL_TOPO_FILE names. `nics` are those that are not on
    PCI. `doubtful_nodes` are nodes whose CPUs the source does not tell apart from another node's. `memory_bytes` is the
    memory of the host. `speeds` are the kernel's ratings of CPUs. `allowed_known` is False if the source does not say
    what a process may use.
    """

    host: str | None
    source: str
    cpus: tuple[CpuReading, ...]
    nodes: tuple[NodeReading, ...]
    allowed_cpus: CpuSet | None = None
    allowed_nodes: CpuSet | None = None
    pci: tuple[PciReading, ...] = ()
    gpu_memory_nodes: CpuSet = CpuSet()
    nvml: NvmlReadings = NvmlReadings(gpus=None)
    nccl_nodes: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()
    nics: tuple[Nic, ...] = ()
    fabric: tuple[FabricLink, ...] = ()
    doubtful_nodes: CpuSet = CpuSet()
    memory_bytes: int | None = None
    speeds: tuple[CpuSpeed, ...] = ()
    allowed_known: bool = True

    @property
    def online(self) -> CpuSet:
        """The CPUs that are online."""
        return CpuSet(reading.cpu for reading in self.cpus)

    def gpus_on_pci(self, vendor: GpuVendor) -> list[PciReading]:
        """Return a vendor's GPUs and partitions of GPUs on PCI."""
        return [reading for reading in self.pci if reading.gpu_vendor is vendor]
