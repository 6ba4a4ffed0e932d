"""NCCL topology XML as readings.

Source: NCCL's graph/xml.cc and topo.cc.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, islice, product, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_DEVICES, MAX_GPUS, MAX_LINKS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import NodeSource, Pcie
from numapin.topology.nics import NicInterface, NicKind
from numapin.topology.readings import (
    NO_CORES,
    VGA,
    CpuReading,
    FabricLink,
    NicReading,
    NodeReading,
    PciReading,
    Readings,
    gbit_s,
    is_network,
    may_be_gpu,
    nic_kind,
    pci_class,
    pcie_generation,
    pcie_width,
)
from numapin.topology.vendors import ACCELERATOR, BY_PCI_ID, GpuVendor, is_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.topology.readings import GpuPart
    from numapin.topology.sources.xmlfile import Element

_DISPLAY_OTHER: Final = 0x0380  # of AMD's accelerators before the MI300; NVIDIA's are 3D controllers
_NVSWITCH_CLASS: Final = 0x0680
_SWITCH: Final = "switch"
_HEXADECIMAL: Final = re.compile(r"0x[0-9a-fA-F]{1,4}")
_CXI: Final = re.compile(r"cxi[0-9]{1,10}")  # libfabric's name of a Slingshot NIC
_NO_CPUS: Final = "this NCCL topology file does not list CPUs (no affinity): it is only useful as NCCL_TOPO_FILE"


def read_nccl(root: Element) -> Readings:
    """Read NCCL topology XML. Raises MachineFileError that names the file, the line and the element.

    It has CPUs, nodes, GPUs and NICs, but no cores, packages, caches, memory or distances.
    """
    elements = _cpu_elements(root)
    found = list(islice(chain.from_iterable(starmap(_read_pci, elements.items())), MAX_DEVICES + 1))
    pci = tuple(_numbered_partitions([reading for reading, _ in found]))
    gpus = [(reading, element) for reading, (_, element) in zip(pci, found, strict=True) if reading.is_gpu]
    all_cpus = CpuSet().union(*elements.values())
    nodes = ((element.optional_id("numaid"), cpus) for element, cpus in elements.items())
    # NCCL puts all NICs that are not on PCI below its first <cpu>, so their node is unknown.
    nics = (_interfaces(nic, NicKind.ETHERNET) for element in elements for nic in element.named("nic"))
    return Readings(
        host=None,
        source=root.source,
        cpus=tuple(CpuReading(cpu=cpu, siblings=None) for cpu in sorted(all_cpus)),
        nodes=tuple(
            sorted((NodeReading(id=node, cpus=cpus) for node, cpus in nodes if node is not None), key=attrgetter("id"))
        ),
        pci=pci,  # `build` refuses too many
        nics=tuple(islice(chain.from_iterable(nics), MAX_NICS + 1)),
        fabric=tuple(islice(_fabric(gpus), MAX_LINKS)),
        allowed_known=False,
        notes=(NO_CORES if all_cpus else _NO_CPUS,),
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
    seen: set[int] = set()
    for element in elements:
        node = element.optional_id("numaid")
        if node in seen:
            raise element.error(f"numaid={node} appears twice: the file describes several hosts")
        if node is not None:
            seen.add(node)
    return {element: element.members("affinity") for element in elements}


def _address(element: Element) -> str | None:
    """Return a <pci>'s address; None for a switch that the file's author made up (bus ffff:ff), and other elements."""
    address = pci_address(element.text("busid")) if element.tag == "pci" else None
    return None if address is None or address.startswith("ffff:ff:") else address


def _read_pci(cpu: Element, cpus: CpuSet) -> Iterator[tuple[PciReading, Element]]:
    """Yield the GPUs and NICs of a node with their elements."""
    node = cpu.optional_id("numaid")
    # The CPUs of a known node say nothing more.
    evidence = {NodeSource.LOCAL_CPUS: cpus} if node is None else {NodeSource.NCCL_FILE: CpuSet({node})}
    for pci, above in cpu.walk():
        address = _address(pci)
        reading = None if address is None else _read_gpu(pci, address) or _read_nic(pci, address)
        if reading is None:
            continue
        parents = (pci_address(bridge.text("busid")) for bridge in above)
        placed = replace(
            reading,
            evidence=evidence,
            parents=tuple(filter(None, parents)),
            pcie=Pcie(  # the maximum, which NCCL plans with (it copies the kernel's max_link_speed)
                max_gen=pcie_generation(pci.text("link_speed")), max_width=pcie_width(pci.number("link_width"))
            ),
        )
        yield placed, pci


def _read_gpu(pci: Element, address: str) -> PciReading | None:
    gpu = next(pci.named("gpu"), None)
    device_class = pci_class(pci.text("class")) or 0
    vendor = _vendor(pci, gpu, device_class)
    device_id = _hexadecimal(pci.text("device"))
    reading = PciReading(address=address, vendor=vendor, is_vga=device_class == VGA, device_id=device_id)
    if gpu is None:
        counts = is_gpu(vendor, device_class, address) and not reading.may_be_board_vga
        return reading.with_tiles_unread() if counts else None
    # NCCL writes `dev`, the number in NVML or ROCm SMI, and `sm` when it looks for links, none of them included.
    return replace(reading, is_vga=False, index=gpu.number("dev"), reports_fabric=gpu.text("sm") is not None)


def _hexadecimal(text: str | None) -> int | None:
    return int(text, 16) if text and _HEXADECIMAL.fullmatch(text) else None


def _vendor(pci: Element, gpu: Element | None, device_class: int) -> GpuVendor | None:
    """Return a GPU's vendor. Older files do not have it, but AMD's devices have an attribute or class of their own."""
    number = pci.text("vendor")
    known = BY_PCI_ID.get(_hexadecimal(number) or 0)
    if known is not None:
        return known
    if gpu and gpu.text("gcn"):
        return GpuVendor.AMD
    if number:
        return None
    if device_class in (ACCELERATOR, _DISPLAY_OTHER):
        return GpuVendor.AMD
    return GpuVendor.NVIDIA if gpu is not None or may_be_gpu(device_class) else None


def _numbered_partitions(readings: list[PciReading]) -> Iterator[PciReading]:
    """Number the partitions of AMD's GPUs: several devices have one address."""
    num_at = Counter(reading.address for reading in readings if reading.vendor is GpuVendor.AMD)
    seen: Counter[str] = Counter()
    for reading in readings:
        if num_at[reading.address] > 1:
            yield replace(reading, partition=seen[reading.address])
            seen[reading.address] += 1
        else:
            yield reading


def _read_nic(pci: Element, address: str) -> PciReading | None:
    """Return a network device. Without NCCL's names for its interfaces, as on cloud images, its address is the name."""
    nic = next(pci.named("nic"), None)
    device_class = pci_class(pci.text("class")) or 0
    if nic is None and not is_network(device_class):
        return None
    kind = nic_kind(device_class)
    named = _interfaces(nic, kind) if nic else ()
    return PciReading(address=address, interfaces=named or (NicReading(address, kind),))


def _interfaces(nic: Element, by_class: NicKind) -> tuple[NicReading, ...]:
    """Return the names of a network device with their rates, which NCCL writes in Mbit/s.

    NCCL writes port 0 for devices that it uses through sockets, and their own port, from 1, for verbs devices. A device
    with several ports has its name for each; the first one counts.
    """
    by_name: dict[str, NicReading] = {}
    for net in nic.named("net"):
        name, port = net.word("name"), net.word("port")
        if name and name not in by_name:
            kind, interface = by_class, NicInterface.NETWORK if port else None
            if _CXI.fullmatch(name):  # the plugin for libfabric (aws-ofi-nccl) gives it port 1
                kind, interface = NicKind.SLINGSHOT, NicInterface.CXI
            elif port not in ("", "0", "-1"):
                kind, interface = NicKind.INFINIBAND, NicInterface.VERBS
            by_name[name] = NicReading(
                name=name,
                kind=kind,
                interface=interface,
                rate_gbit_s=gbit_s(net.text("speed")),
            )
    return tuple(by_name.values())


# --- links of GPUs that are not PCI ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Board:
    """A GPU with its partitions, the word for its links, and how many it has to each address or to switches."""

    word: str = ""
    parts: list[GpuPart] = field(default_factory=list)
    counts: Counter[str | None] = field(default_factory=Counter)


def _fabric(gpus: list[tuple[PciReading, Element]]) -> Iterator[FabricLink]:
    """Yield the links between GPUs, each once; GPUs with NVLinks to a switch are linked through it."""
    if len(gpus) > MAX_GPUS:  # `build` refuses that many
        return
    boards: defaultdict[str, _Board] = defaultdict(_Board)
    for reading, pci in gpus:
        board = boards[reading.address]
        board.word = "XGMI" if reading.vendor is GpuVendor.AMD else "NV"
        board.parts.append(reading.part)
        counts: Counter[str | None] = Counter()
        for link in chain.from_iterable(gpu.named("nvlink", "xgmi") for gpu in pci.named("gpu")):
            is_switch = pci_class(link.text("tclass")) == _NVSWITCH_CLASS
            counts[_SWITCH if is_switch else pci_address(link.text("target"))] += link.number("count") or 0
        board.counts |= counts  # the partitions of a GPU have the same links

    for (at_a, a), (at_b, b) in combinations(boards.items(), 2):
        number = a.counts[at_b] or b.counts[at_a] or min(a.counts[_SWITCH], b.counts[_SWITCH])
        if number:
            yield from (FabricLink(one, other, f"{a.word}{number}") for one, other in product(a.parts, b.parts))
