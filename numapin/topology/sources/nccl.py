"""NCCL topology XML as readings. Pure.

Comes in: the <system> of the file that NCCL_TOPO_FILE names or NCCL_TOPO_DUMP_FILE wrote. Goes out: `Readings`, or only
the nodes of its PCI devices: cloud images have such a file because the hypervisor hides these nodes from sysfs.
Source: NCCL's graph/xml.cc and topo.cc.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_DEVICES, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import Pcie
from numapin.topology.readings import (
    DISPLAY,
    NETWORK,
    CpuReading,
    NodeReading,
    PciReading,
    Readings,
    nic_kind,
    pci_class,
    pcie_generation,
    pcie_width,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.topology.sources.xmlfile import Element

_NO_CORES: Final = "an NCCL topology file does not list cores: every CPU counts as a core of its own, SMT siblings too"
_NO_CPUS: Final = "this NCCL topology file does not list CPUs (no affinity): it is only useful as NCCL_TOPO_FILE"


def read_nccl(root: Element) -> Readings:
    """Read NCCL topology XML. Raises MachineFileError that names the file, the line and the element.

    It has CPUs, nodes, GPUs and NICs, but no cores, packages, caches, memory or distances.
    """
    elements = _cpu_elements(root)
    devices = chain.from_iterable(starmap(_read_pci, elements.items()))
    all_cpus = CpuSet().union(*elements.values())
    return Readings(
        host=None,
        source=root.source,
        cpus=tuple(CpuReading(cpu=cpu, siblings=CpuSet({cpu})) for cpu in sorted(all_cpus)),
        nodes=tuple(sorted(_read_nodes(elements), key=attrgetter("id"))),
        pci=tuple(islice(devices, MAX_DEVICES + 1)),  # `build` refuses that many
        notes=(_NO_CORES if all_cpus else _NO_CPUS,),
    )


def nccl_nodes(root: Element) -> dict[str, int]:
    """Return the node of every PCI address in NCCL topology XML. Raises MachineFileError as `read_nccl` does."""
    nodes: dict[str, int] = {}
    for element in _cpu_elements(root):
        node = element.optional_id("numaid")
        if node is not None:
            addresses = (_address(device) for device, _ in element.walk())
            nodes.update(dict.fromkeys(filter(None, addresses), node))
    return nodes


def _cpu_elements(root: Element) -> dict[Element, CpuSet]:
    """Return the <cpu> elements, which are NUMA nodes, with their CPUs."""
    elements = list(root.named("cpu"))
    if not elements:
        raise root.error("it has no <cpu>")
    if len(elements) > MAX_NODES:
        raise elements[MAX_NODES].error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    seen: set[int | None] = set()
    for element in elements:
        node = element.optional_id("numaid")
        if node is not None and node in seen:
            raise element.error(f"numaid={node} appears twice: the file describes several hosts")
        seen.add(node)
    return {element: element.members("affinity") for element in elements}


def _read_nodes(elements: dict[Element, CpuSet]) -> Iterator[NodeReading]:
    for element, cpus in elements.items():
        node = element.optional_id("numaid")
        if node is not None:
            yield NodeReading(id=node, cpus=cpus)


def _address(element: Element) -> str | None:
    """Return a <pci>'s address; None for a switch that the file's author made up (bus ffff:ff), and other elements."""
    address = pci_address(element.text("busid")) if element.tag == "pci" else None
    return None if address is None or address.startswith("ffff:ff:") else address


def _read_pci(cpu: Element, cpus: CpuSet) -> Iterator[PciReading]:
    node = cpu.optional_id("numaid")
    for pci, above in cpu.walk():
        address = _address(pci)
        reading = None if address is None else _read_gpu(pci, address) or _read_nic(pci, address)
        if reading is not None:
            parents = (pci_address(bridge.text("busid")) for bridge in above)
            yield replace(
                reading, node=node, local_cpus=cpus or None, parents=tuple(filter(None, parents)), pcie=_pcie(pci)
            )


def _read_gpu(pci: Element, address: str) -> PciReading | None:
    gpu = next(pci.named("gpu"), None)
    if gpu is not None:
        return PciReading(address=address, index=gpu.number("dev"))  # NVML's number
    return PciReading(address=address) if _base_class(pci) == DISPLAY else None


def _read_nic(pci: Element, address: str) -> PciReading | None:
    """Return a network device. Without NCCL's names for its interfaces, as on cloud images, its address is the name."""
    nic = next(pci.named("nic"), None)
    if nic is None and _base_class(pci) != NETWORK:
        return None
    nets = nic.named("net") if nic else ()
    names = [net.word("name") for net in nets if net.word("name")] or [address]
    kind = nic_kind(pci_class(pci.text("class")))
    return PciReading(address=address, interfaces=tuple((name, kind) for name in names))


def _base_class(pci: Element) -> int:
    return (pci_class(pci.text("class")) or 0) >> 8


def _pcie(pci: Element) -> Pcie:
    """Return the link's maximum, which NCCL plans with (it copies the kernel's max_link_speed)."""
    return Pcie(max_gen=pcie_generation(pci.text("link_speed")), max_width=pcie_width(pci.number("link_width")))
