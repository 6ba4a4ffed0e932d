"""NCCL topology XML as readings. Source: NCCL's graph/xml.cc and topo.cc."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain, combinations, islice, product, starmap
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_DEVICES, MAX_GPUS, MAX_LINKS, MAX_NICS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.text import not_none
from numapin.topology.address import pci_address
from numapin.topology.model import NodeSource, Pcie
from numapin.topology.nics import Nic, NicInterface, NicKind
from numapin.topology.readings import (
    VGA,
    CpuReading,
    FabricLink,
    NodeReading,
    PciReading,
    Readings,
    gbit_s,
    hexadecimal,
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

    from numapin.topology.sources.xmlfile import Element

_DISPLAY_OTHER: Final = 0x0380  # of AMD's accelerators before the MI300; NVIDIA's are 3D controllers
_NVSWITCH_CLASS: Final = 0x0680
_SWITCH: Final = "switch"
_CXI: Final = re.compile(r"cxi[0-9]{1,10}")  # libfabric's name of a Slingshot NIC
_NO_CPUS: Final = "this NCCL topology file does not list CPUs (no affinity): it is only useful as NCCL_TOPO_FILE"


def read_nccl(root: Element) -> Readings:
    """Read NCCL topology XML. Raises MachineFileError that names the file, the line and the element.

    It has CPUs, nodes, GPUs and NICs, but no cores, packages, caches, memory or distances.
    """
    elements = _cpu_elements(root)
    found = list(islice(chain.from_iterable(starmap(_read_pci, elements.items())), MAX_DEVICES + 1))
    # Several of AMD's devices at one address are the partitions of a GPU.
    num_at = Counter(device.address for device, _ in found if device.vendor is GpuVendor.AMD)
    seen: Counter[str] = Counter()
    for position, (device, pci) in enumerate(found):
        if num_at[device.address] > 1:
            found[position] = replace(device, partition=seen[device.address]), pci
            seen[device.address] += 1
    all_cpus = CpuSet().union(*elements.values())
    numbers = {element.optional_id("numaid"): cpus for element, cpus in elements.items()}
    # NCCL puts all NICs that are not on PCI below its first <cpu>, so their node is unknown.
    nics = (_interfaces(nic, NicKind.ETHERNET) for element in elements for nic in element.named("nic"))
    return Readings(
        host=None,
        source=root.source,
        cpus=tuple(CpuReading(cpu=cpu, siblings=None) for cpu in sorted(all_cpus)),
        nodes=tuple(NodeReading(id=node, cpus=numbers[node]) for node in sorted(not_none(numbers))),
        pci=tuple(device for device, _ in found),  # `build` refuses too many
        nics=tuple(islice(chain.from_iterable(nics), MAX_NICS + 1)),
        fabric=tuple(islice(_fabric([(device, pci) for device, pci in found if device.is_gpu]), MAX_LINKS)),
        allowed_known=False,
        notes=() if all_cpus else (_NO_CPUS,),
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
        address, device_class = _address(pci), pci_class(pci.text("class")) or 0
        if address is None:
            continue
        gpu, nic = next(pci.named("gpu"), None), next(pci.named("nic"), None)
        vendor, device_id = _vendor(pci, gpu, device_class), hexadecimal(pci.text("device"))
        reading = PciReading(address=address, vendor=vendor, device_id=device_id, is_vga=device_class == VGA)
        if gpu is not None:
            # `dev` is the number in NVML or ROCm SMI. NCCL writes `sm` when it looks for links, even if it finds none.
            reading = replace(reading, is_vga=False, index=gpu.number("dev"), reports_fabric=gpu.text("sm") is not None)
        elif is_gpu(vendor, device_class, address) and not reading.may_be_board_vga:
            reading = reading.with_tiles_unread()
        elif nic is not None or is_network(device_class):
            kind = nic_kind(device_class)
            # Without NCCL's names for the interfaces, as on cloud images, the address is the name.
            interfaces = _interfaces(nic, kind) if nic is not None else ()
            reading = PciReading(address=address, interfaces=interfaces or (Nic(name=address, kind=kind),))
        else:
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


def _vendor(pci: Element, gpu: Element | None, device_class: int) -> GpuVendor | None:
    """Return a GPU's vendor. Older files do not have it, but AMD's devices have an attribute or class of their own."""
    number = pci.text("vendor")
    known = BY_PCI_ID.get(hexadecimal(number) or 0)
    if known is not None:
        return known
    if gpu and gpu.text("gcn"):
        return GpuVendor.AMD
    if number:
        return None
    if device_class in (ACCELERATOR, _DISPLAY_OTHER):
        return GpuVendor.AMD
    return GpuVendor.NVIDIA if gpu is not None or may_be_gpu(device_class) else None


def _interfaces(nic: Element, by_class: NicKind) -> tuple[Nic, ...]:
    """Return the names of a network device with their rates, which NCCL writes in Mbit/s.

    NCCL writes port 0 for devices that it uses through sockets, and their own port, from 1, for verbs devices. A device
    with several ports has its name for each; the first one counts.
    """
    by_name: dict[str, Nic] = {}
    for net in nic.named("net"):
        name, port = net.word("name"), net.word("port")
        if name and name not in by_name:
            kind, interface = by_class, NicInterface.NETWORK if port else None
            if _CXI.fullmatch(name):  # the plugin for libfabric (aws-ofi-nccl) gives it port 1
                kind, interface = NicKind.SLINGSHOT, NicInterface.CXI
            elif port not in ("", "0", "-1"):
                kind, interface = NicKind.INFINIBAND, NicInterface.VERBS
            by_name[name] = Nic(name=name, kind=kind, interface=interface, rate_gbit_s=gbit_s(net.text("speed")))
    return tuple(by_name.values())


# --- links of GPUs that are not PCI ----------------------------------------------------------------------------------


def _fabric(gpus: list[tuple[PciReading, Element]]) -> Iterator[FabricLink]:
    """Yield the links between GPUs, each once; GPUs with NVLinks to a switch are linked through it."""
    if len(gpus) > MAX_GPUS:  # `build` refuses that many
        return
    parts: defaultdict[str, list[PciReading]] = defaultdict(list)
    links: defaultdict[str, Counter[str | None]] = defaultdict(Counter)  # how many a GPU has to each address
    for gpu, pci in gpus:
        counts: Counter[str | None] = Counter()
        for link in chain.from_iterable(element.named("nvlink", "xgmi") for element in pci.named("gpu")):
            is_switch = pci_class(link.text("tclass")) == _NVSWITCH_CLASS
            counts[_SWITCH if is_switch else pci_address(link.text("target"))] += link.number("count") or 0
        parts[gpu.address].append(gpu)
        links[gpu.address] |= counts  # the partitions of a GPU have the same links
    for a, b in combinations(parts, 2):
        number = links[a][b] or links[b][a] or min(links[a][_SWITCH], links[b][_SWITCH])
        if number:
            word = "XGMI" if parts[a][-1].vendor is GpuVendor.AMD else "NV"
            yield from (FabricLink(one.part, two.part, f"{word}{number}") for one, two in product(parts[a], parts[b]))
