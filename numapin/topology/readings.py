"""The readers' findings, before `build` decides which of them to believe. Pure.

Comes in: what a reader (sysfs, libnuma, NVML, hwloc XML, NCCL XML) found. Goes out: plain records for `build`.
Unknown is None throughout: a reader never turns -1 into a node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import Mig, NicKind, Pcie

if TYPE_CHECKING:
    from collections.abc import Mapping

DISPLAY: Final = 0x03
NETWORK: Final = 0x02
"""Base classes of PCI devices: the upper half of `pci_class`."""
CONTROLLER_3D: Final = 0x0302
_INFINIBAND: Final = 0x0207
_CLASS: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{4})(?:[0-9a-fA-F]{2})?")
_GENERATIONS: Final = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
# An unreachable device reads as all ones, which the kernel shows as width 63.
_WIDTHS: Final = frozenset({1, 2, 4, 8, 12, 16, 32})


def pci_class(text: str | None) -> int | None:
    """Return base class and subclass (0x0302) from the kernel's and NCCL's "0x030200" or hwloc's "0302"."""
    match = _CLASS.fullmatch(text or "")
    return int(match[1], 16) if match else None


def nic_kind(pci_class: int | None) -> NicKind:
    """Return the kind of a network device by its PCI class; adapters that can be either report Ethernet."""
    return NicKind.INFINIBAND if pci_class == _INFINIBAND else NicKind.ETHERNET


def pcie_generation(speed: str | None) -> int | None:
    """Return the PCI Express generation of a speed as the kernel writes it ("16.0 GT/s PCIe", "8 GT/s")."""
    match = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", speed or "")
    return _GENERATIONS.get(match[1].removesuffix(".0")) if match else None


def pcie_width(lanes: int | None) -> int | None:
    """Return a number of lanes that exists, or None."""
    return lanes if lanes in _WIDTHS else None


class CpuReading(NamedTuple):
    """One online CPU: the CPUs of its core (itself included), its package, and the CPUs that share its L3."""

    cpu: int
    siblings: CpuSet
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
    """One PCI device that is a GPU or a NIC.

    `parents` are the addresses of the bridges above it, nearest first; `host_bridge` is the root of its PCI tree;
    `parent_nodes` are the nodes of those bridges that report one, nearest first; `interfaces` are (name, kind) of a
    NIC. `node` is None if the kernel reports -1 or nothing.
    """

    address: str
    node: int | None = None
    parent_nodes: tuple[int, ...] = ()
    local_cpus: CpuSet | None = None
    parents: tuple[str, ...] = ()
    host_bridge: str | None = None
    pcie: Pcie = Pcie()
    name: str | None = None
    uuid: str | None = None
    index: int | None = None
    """The driver's number for a GPU, if the source has one (hwloc: nvml3)."""
    interfaces: tuple[tuple[str, NicKind], ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU; a NIC without an interface is not read."""
        return not self.interfaces


@dataclass(frozen=True, slots=True, kw_only=True)  # its `index` would hide a tuple's
class NvmlReading:
    """One GPU as NVML shows it. `memory_nodes` and `cpus` are None if NVML does not support the query."""

    index: int
    uuid: str | None
    pci: str
    name: str | None = None
    memory_nodes: CpuSet | None = None
    cpus: CpuSet | None = None
    own_node: int | None = None
    """The NUMA node that is this GPU's own memory."""
    pcie: Pcie = Pcie()
    mig: tuple[Mig, ...] = ()
    persistence: bool | None = None
    """Whether the driver keeps the GPU initialized while it is not in use."""


class NvmlReadings(NamedTuple):
    """NVML's answers. `gpus` is None if NVML could not be used; `notes` then say why.

    `driver` is the version of the driver's libraries. `broken`: there is a driver, but it did not answer. `links` are
    (GPU index, GPU index, word): "NV<count>" or a `LinkKind` word.
    """

    gpus: tuple[NvmlReading, ...] | None
    driver: str | None = None
    broken: bool = False
    links: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_absent(self) -> bool:
        """Whether there is no driver, as opposed to a broken one."""
        return self.gpus is None and not self.broken


class GpuLoad(NamedTuple):
    """A GPU's load now: the share of time in which a kernel ran, and the rate received over PCIe in 1e9 bytes/s."""

    busy_share: float | None = None
    h2d_gbps: float | None = None


class Readings(NamedTuple):
    """Everything the readers saw of one machine.

    `nccl_nodes` maps PCI addresses to nodes, from the file that NCCL_TOPO_FILE names.
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

    @property
    def online(self) -> CpuSet:
        """The CPUs that are online."""
        return CpuSet(reading.cpu for reading in self.cpus)

    @property
    def num_gpus(self) -> int:
        """The number of GPUs in the source that reports more of them."""
        return max(sum(reading.is_gpu for reading in self.pci), len(self.nvml.gpus or ()))
