"""NCCL topology XML as readings. Pure.

Comes in: the <system> of the file that NCCL_TOPO_FILE names or NCCL_TOPO_DUMP_FILE wrote. Goes out: `Readings`, or only
the nodes of its PCI devices, which is what a cloud image's file is for: the hypervisor hides them from sysfs.
Source: NCCL's graph/xml.cc and topo.cc.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_DEVICES, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import NicKind, Pcie
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

_NO_CORES: Final = "an NCCL topology file tells no cores: every CPU counts as a core of its own, SMT siblings too"
_NO_CPUS: Final = "this NCCL topology file tells no CPUs (affinity is missing): it is of use as NCCL_TOPO_FILE only"


def read_nccl(root: Element) -> Readings:
    """Read NCCL topology XML. Raises MachineFileError that names the file, the line and the element.

    It tells CPUs, nodes, GPUs and NICs; neither cores, packages, caches, memory nor distances.
    """
    elements = _cpu_elements(root)
    nodes = sorted(
        (node, cpus) for element, cpus in elements.items() if (node := element.optional_id("numaid")) is not None
    )
    devices = (device for element, cpus in elements.items() for device in _read_pci(element, cpus))
    all_cpus = sorted(CpuSet().union(*elements.values()))
    return Readings(
        host=None,
        source=root.source,
        cpus=tuple(CpuReading(cpu=cpu, siblings=CpuSet({cpu})) for cpu in all_cpus),
        nodes=tuple(NodeReading(id=node, cpus=cpus) for node, cpus in nodes),
        pci=tuple(islice(devices, MAX_DEVICES + 1)),  # `build` refuses as many
        notes=(_NO_CORES if all_cpus else _NO_CPUS,),
    )


def nccl_nodes(root: Element) -> dict[str, int]:
    """Return the node of every PCI address in NCCL topology XML. Raises MachineFileError as `read_nccl` does."""
    return {
        address: node
        for element in _cpu_elements(root)
        if (node := element.optional_id("numaid")) is not None
        for device, _ in element.walk()
        if device.tag == "pci" and (address := _address(device)) is not None
    }


def _cpu_elements(root: Element) -> dict[Element, CpuSet]:
    """Return the <cpu> elements, which are NUMA nodes, with their CPUs."""
    elements = list(root.named("cpu"))
    if not elements:
        raise root.error("there is no <cpu> in it")
    if len(elements) > MAX_NODES:
        raise elements[MAX_NODES].error(f"there are more than {MAX_NODES} NUMA nodes, the most that are accepted")
    seen: set[int] = set()
    for element in elements:
        node = element.optional_id("numaid")
        if node in seen:
            raise element.error(f"numaid={node} appears twice: the file describes several hosts")
        seen |= set() if node is None else {node}
    return {element: element.mask("affinity") or CpuSet() for element in elements}


def _address(pci: Element) -> str | None:
    """Return a <pci>'s address; None for a switch that the file's author made up (bus ffff:ff)."""
    address = pci_address(pci.text("busid") or "")
    return None if address is None or address.startswith("ffff:ff:") else address


def _read_pci(cpu: Element, cpus: CpuSet) -> Iterator[PciReading]:
    for pci, above in cpu.walk():
        device_class = pci_class(pci.text("class")) or 0
        address = _address(pci) if pci.tag == "pci" else None
        gpu, nic = next(pci.named("gpu"), None), next(pci.named("nic"), None)
        is_gpu = gpu is not None or device_class >> 8 == DISPLAY
        is_nic = nic is not None or device_class >> 8 == NETWORK
        if address is None or not (is_gpu or is_nic):
            continue
        yield PciReading(
            address=address,
            node=cpu.optional_id("numaid"),
            local_cpus=cpus or None,
            parents=tuple(filter(None, (pci_address(bridge.text("busid") or "") for bridge in above))),
            pcie=_pcie(pci),
            index=gpu.number("dev") if gpu else None,  # NVML's number
            interfaces=() if is_gpu else _interfaces(nic, nic_kind(device_class), address),
        )


def _pcie(pci: Element) -> Pcie:
    """Return what the link can do at most, which is what NCCL plans with (it copies the kernel's max_link_speed)."""
    return Pcie(max_gen=pcie_generation(pci.text("link_speed")), max_width=pcie_width(pci.number("link_width")))


def _interfaces(nic: Element | None, kind: NicKind, address: str) -> tuple[tuple[str, NicKind], ...]:
    """Name a NIC's interfaces as NCCL does, or by its address: the files of cloud images leave the names to NCCL."""
    names = [name for net in nic.named("net") if (name := net.text("name"))] if nic else []
    return tuple((name, kind) for name in names or [address])
