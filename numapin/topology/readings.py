"""What a reader saw, before it is judged. Pure.

Comes in: whatever a reader (sysfs, libnuma, NVML, hwloc XML, NCCL XML) found. Goes out: plain records, which `build`
judges: it decides what to believe.
Unknown is None throughout: a reader never turns -1 into a node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numapin.topology.model import Mig, Pcie

if TYPE_CHECKING:
    from collections.abc import Mapping

_PCI = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])", re.ASCII)


def pci_address(text: str) -> str | None:
    """Return a PCI address in the kernel's spelling ("0000:1b:00.0"), or None where the text is not one.

    NVML writes 8 domain digits and upper case, hwloc and the kernel 4 and lower case; domains above 0xffff keep theirs.
    """
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """One online CPU: the CPUs of its core (itself included), its package, and the CPUs that share its L3."""

    cpu: int
    siblings: frozenset[int]
    package: int | None = None
    l3: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One online node."""

    id: int
    cpus: frozenset[int]
    memory_bytes: int | None = None
    free_bytes: int | None = None
    distances: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciReading:
    """One PCI device that is a GPU or a NIC.

    `parents` are the addresses of the bridges above it, nearest first; `host_bridge` names the root it hangs from;
    `parent_nodes` are the nodes of those bridges that tell one, nearest first; `interfaces` are (name, kind) of network
    devices. `node` is None where the kernel says -1 or nothing.
    """

    address: str
    is_gpu: bool
    node: int | None = None
    parent_nodes: tuple[int, ...] = ()
    local_cpus: frozenset[int] | None = None
    parents: tuple[str, ...] = ()
    host_bridge: str | None = None
    pcie: Pcie = Pcie()
    name: str | None = None
    uuid: str | None = None
    index: int | None = None
    """The driver's number for a GPU, where the source has one (hwloc: nvml3)."""
    interfaces: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """One GPU as NVML shows it. `memory_nodes` and `cpus` are None where NVML does not support the question."""

    index: int
    uuid: str
    pci: str
    name: str | None = None
    memory_nodes: frozenset[int] | None = None
    cpus: frozenset[int] | None = None
    own_node: int | None = None
    """The NUMA node that is this GPU's own memory."""
    pcie: Pcie = Pcie()
    mig: tuple[Mig, ...] = ()
    mig_enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReadings:
    """All that NVML told. `gpus` is None where there was no NVML to ask, and `notes` then say why.

    `links` are (GPU index, GPU index, word): "NV<count>" or a `LinkKind` word.
    """

    gpus: tuple[NvmlReading, ...] | None
    links: tuple[tuple[int, int, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything the readers saw of one machine.

    `nccl_nodes` maps PCI addresses to nodes, from the file that NCCL_TOPO_FILE names.
    """

    host: str | None
    source: str
    cpus: tuple[CpuReading, ...]
    nodes: tuple[NodeReading, ...]
    allowed_cpus: frozenset[int] | None = None
    allowed_nodes: frozenset[int] | None = None
    pci: tuple[PciReading, ...] = ()
    gpu_memory_nodes: frozenset[int] = frozenset()
    nvml: NvmlReadings = NvmlReadings(gpus=None)
    nccl_nodes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
