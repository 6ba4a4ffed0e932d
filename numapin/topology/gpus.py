"""GPUs, NICs, and the node of each."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, count, filterfalse, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_order
from numapin.topology.model import Gpu, GpuVendor, Nic, Node, NodeKind, NodeSource, Pcie
from numapin.topology.readings import NicReading, NvmlReading, PciReading, Readings
from numapin.topology.vendors import VENDORS, preferred, support_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence


class _Evidence(NamedTuple):
    """All findings about the node of one device."""

    nodes: NodeIndex
    pci: PciReading
    nvml_nodes: CpuSet | None = None
    nvml_cpus: CpuSet | None = None
    nccl_node: int | None = None


class NodeIndex:
    """The nodes on which a device can be (those with CPUs), and those that are the memory of a GPU."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._with_cpus = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
        self._of_gpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.GPU)
        self.single = only_member(self._with_cpus)
        self._around: dict[CpuSet, int | None] = {}

    @property
    def with_cpus(self) -> CpuSet:
        """The nodes that have CPUs."""
        return CpuSet(self._with_cpus)

    def cpus_of(self, node: int | None) -> CpuSet | None:
        """Return the CPUs of a node with CPUs."""
        return None if node is None else self._with_cpus.get(node)

    def gpu_memory(self, node: int | None) -> int | None:
        """Return the node if it is the memory of a GPU."""
        return node if node in self._of_gpus else None

    def only(self, candidates: Iterable[int | None] | None) -> int | None:
        """Return the only node with CPUs among the candidates, or None."""
        return only_member(self._with_cpus.keys() & set(candidates or ()))

    def around(self, cpus: CpuSet | None) -> int | None:
        """Return the only node that has all of these CPUs, or None."""
        if not cpus:
            return None
        if cpus not in self._around:
            matches = (node for node, own in self._with_cpus.items() if cpus <= own)
            self._around[cpus] = only_member(list(islice(matches, 2)))
        return self._around[cpus]


# `NodeSource` in its order, without the user's node, which `with_gpu_nodes` adds. The first may be a file
# instead (`PciReading.node_source`).
_LADDER: Final[tuple[tuple[NodeSource, Callable[[_Evidence], int | None]], ...]] = (
    (NodeSource.SYSFS, lambda e: e.nodes.only([e.pci.node])),
    (NodeSource.PCI_PARENT, lambda e: e.nodes.only(e.pci.parent_nodes[:1])),
    (NodeSource.NVML_MEMORY, lambda e: e.nodes.only(e.nvml_nodes)),
    (NodeSource.LOCAL_CPUS, lambda e: e.nodes.around(e.pci.local_cpus)),
    (NodeSource.NVML_CPUS, lambda e: e.nodes.around(e.nvml_cpus)),
    (NodeSource.NCCL_FILE, lambda e: e.nodes.only([e.nccl_node])),
    (NodeSource.SINGLE, lambda e: e.nodes.single),
)


def _locate(evidence: _Evidence) -> tuple[int, NodeSource] | tuple[None, None]:
    """Return the node from the first source that knows it; a node without CPUs (GPU memory, CXL) does not count."""
    for source, ask in _LADDER:
        node = ask(evidence)
        if node is not None:
            return node, evidence.pci.node_source if source is NodeSource.SYSFS else source
    return None, None


class FoundGpu(NamedTuple):
    """A GPU, and what was read of it on PCI."""

    gpu: Gpu
    pci: PciReading
    is_preferred: bool

    @property
    def has_no_driver(self) -> bool:
        """Whether it is known that no driver serves it."""
        return self.pci.is_driven is False

    @property
    def is_usable(self) -> bool:
        """Whether ranks can use it, as far as is known."""
        return self.is_preferred and not self.has_no_driver


def find_gpus(readings: Readings, nodes: NodeIndex) -> tuple[FoundGpu, ...]:
    """Return the GPUs of all vendors, those of the ranks' vendor first. Each has a number of its own."""
    first = preferred(readings)
    found: list[FoundGpu] = []
    for vendor in sorted(VENDORS, key=lambda vendor: vendor is not first):
        of_vendor = sorted(_gpus_of(vendor, readings, nodes, is_preferred=vendor is first), key=_own_number)
        found += _renumbered(of_vendor, after=max(map(_own_number, found))) if found else of_vendor
    return tuple(found)


def _gpus_of(vendor: GpuVendor, readings: Readings, nodes: NodeIndex, *, is_preferred: bool) -> Iterator[FoundGpu]:
    by_nvml = vendor is GpuVendor.NVIDIA and readings.nvml.gpus is not None
    find = _gpus_of_nvml if by_nvml else _gpus_on_pci
    return find(vendor, readings, nodes, is_preferred=is_preferred)


def _gpus_of_nvml(vendor: GpuVendor, readings: Readings, nodes: NodeIndex, *, is_preferred: bool) -> Iterator[FoundGpu]:
    by_address = {reading.address: reading for reading in readings.pci if reading.is_nvidia}
    for gpu in _without_cpuset(readings, nodes):
        pci = by_address.get(gpu.pci, PciReading(address=gpu.pci, vendor=vendor))
        yield FoundGpu(_gpu(gpu, pci, readings, nodes), pci, is_preferred)


def _gpus_on_pci(vendor: GpuVendor, readings: Readings, nodes: NodeIndex, *, is_preferred: bool) -> Iterator[FoundGpu]:
    """Yield a vendor's GPUs. A VGA controller beside another vendor's GPUs is for the screen, and is left out."""
    on_pci = readings.gpus_on_pci(vendor)
    parts = {reading.part: reading for reading in on_pci if is_preferred or not reading.is_vga}
    for index, pci in _numbered(parts.values()):
        yield FoundGpu(_gpu(_as_nvml(index, pci), pci, readings, nodes), pci, is_preferred)


def _renumbered(devices: list[FoundGpu], *, after: int) -> Iterator[FoundGpu]:
    """Yield GPUs with new numbers: NVIDIA and AMD both have a GPU 0."""
    for number, device in enumerate(devices, after + 1):
        yield device._replace(gpu=replace(device.gpu, index=number))


def _own_number(device: FoundGpu) -> int:
    return device.gpu.index


def unusable(devices: Iterable[FoundGpu]) -> Iterator[int]:
    """Yield the indices of GPUs of another vendor than the ranks', and of those that no driver serves."""
    return (device.gpu.index for device in devices if not device.is_usable)


def gpu_notes(devices: Sequence[FoundGpu]) -> tuple[str, ...]:
    """Return notes on GPUs that the ranks cannot use, or whose place is unknown."""
    return *_other_vendor_notes(devices), *_no_driver_notes(devices), *_not_on_pci_notes(devices)


def _other_vendor_notes(devices: Sequence[FoundGpu]) -> Iterator[str]:
    """Yield a note on GPUs of another vendor than the ranks'."""
    others = [f"{device.gpu.label} ({device.gpu.vendor})" for device in devices if not device.is_preferred]
    if others:
        verb = "is" if len(others) == 1 else "are"
        yield f"{', '.join(others)} {verb} not used: ranks use the GPUs of one vendor, here {devices[0].gpu.vendor}"


def _no_driver_notes(devices: Sequence[FoundGpu]) -> Iterator[str]:
    """Yield a note on GPUs of the ranks' vendor that no driver serves."""
    without = [device.gpu for device in devices if device.is_preferred and device.has_no_driver]
    if without:
        names = _with_addresses(without)
        yield f"no driver serves {names} here; {support_of(without[0].vendor).driver_remedy}"


def _not_on_pci_notes(devices: Sequence[FoundGpu]) -> Iterator[str]:
    """Yield a note on GPUs that their driver lists, but PCI does not."""
    missing = [device.gpu for device in devices if not device.pci.is_on_pci]
    if missing:
        names = _with_addresses(missing)
        yield f"the driver lists {names}, but no PCI device has that address"


def _with_addresses(gpus: Iterable[Gpu]) -> str:
    return ", ".join(f"{gpu.label} ({gpu.pci})" for gpu in gpus)


def why_order_unknown(devices: Sequence[FoundGpu], environ: Mapping[str, str]) -> str:
    """Return why ranks may use the GPUs in another order than `cuda_index`, or ""."""
    used = [(device.gpu, device.pci) for device in devices if device.is_usable]
    if len(used) < 2:
        return ""
    return support_of(used[0][0].vendor).why_order_unknown(used, environ)


def _numbered(devices: Collection[PciReading]) -> Iterator[tuple[int, PciReading]]:
    """Number GPUs as their source does; the others get the free numbers, in the order of their addresses."""
    taken = {reading.index for reading in devices}
    free = filterfalse(taken.__contains__, count())
    for reading in sorted(devices, key=_index_and_address):
        yield (next(free) if reading.index is None else reading.index), reading


def _index_and_address(reading: PciReading) -> tuple[bool, int, tuple[int, ...], int]:
    return reading.index is None, reading.index or 0, pci_order(reading.address), reading.partition or 0


def _as_nvml(index: int, reading: PciReading) -> NvmlReading:
    """Return the identity of a GPU in NVML's form, for a GPU that NVML does not list."""
    return NvmlReading(index=index, uuid=reading.uuid, pci=reading.address)


def _without_cpuset(readings: Readings, nodes: NodeIndex) -> Iterator[NvmlReading]:
    """Yield NVML's GPUs without affinities that may only reflect the launcher's own cpuset.

    NVML answers from inside the cpuset: if that holds a single node, a GPU of unknown place would look local to it.
    """
    online = readings.online
    for gpu in readings.nvml.gpus or ():
        yield replace(
            gpu,
            cpus=_beyond_cpuset(gpu.cpus, readings.allowed_cpus, online),
            memory_nodes=_beyond_cpuset(gpu.memory_nodes, readings.allowed_nodes, nodes.with_cpus),
        )


def _beyond_cpuset(affinity: CpuSet | None, allowed: CpuSet | None, existing: CpuSet) -> CpuSet | None:
    """Return an affinity, or None if the allowed set is restricted and the affinity covers all of it."""
    inside = within(allowed, existing)
    return None if affinity and inside != existing and affinity >= inside else affinity


def _gpu(nvml: NvmlReading, pci: PciReading, readings: Readings, nodes: NodeIndex) -> Gpu:
    node, source = _locate(
        _Evidence(
            nodes=nodes,
            pci=pci,
            nvml_nodes=nvml.memory_nodes,
            nvml_cpus=nvml.cpus,
            nccl_node=readings.nccl_nodes.get(nvml.pci),
        )
    )
    cpus = nodes.cpus_of(node)
    return Gpu(
        index=nvml.index,
        uuid=nvml.uuid,
        pci=nvml.pci,
        name=nvml.name or pci.name,
        node=node,
        node_source=source,
        cpus=(pci.local_cpus or nvml.cpus) if cpus is None else cpus,
        pcie=_merge_pcie(nvml.pcie, pci.pcie),
        mig=nvml.mig,
        vendor=pci.gpu_vendor,
        partition=pci.partition,
        memory_node=nodes.gpu_memory(_known(nvml.own_node, pci.memory_node)),
        pci_parents=pci.known_parents,
    )


def _merge_pcie(first: Pcie, second: Pcie) -> Pcie:
    return Pcie(
        gen=_known(first.gen, second.gen),
        width=_known(first.width, second.width),
        max_gen=_known(first.max_gen, second.max_gen),
        max_width=_known(first.max_width, second.max_width),
    )


def _known(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def find_nics(readings: Readings, nodes: NodeIndex) -> tuple[Nic, ...]:
    """Return the network interfaces, sorted by name."""
    on_pci = chain.from_iterable(_nics_of(reading, readings, nodes) for reading in readings.pci)
    others = (_nic(nic, nodes.only([nic.node])) for nic in readings.nics)
    return tuple(sorted(chain(on_pci, others), key=_name_and_address))


def _nics_of(reading: PciReading, readings: Readings, nodes: NodeIndex) -> list[Nic]:
    nccl_node = readings.nccl_nodes.get(reading.address)
    node, _ = _locate(_Evidence(nodes=nodes, pci=reading, nccl_node=nccl_node))
    return [_nic(nic, node, reading) for nic in reading.interfaces]


def _nic(nic: NicReading, node: int | None, pci: PciReading | None = None) -> Nic:
    return Nic(
        name=nic.name,
        pci=pci.address if pci else None,
        node=node,
        kind=nic.kind,
        interface=nic.interface,
        is_up=nic.is_up,
        rate_gbit_s=nic.rate_gbit_s,
        pci_parents=pci.known_parents if pci else None,
    )


def _name_and_address(nic: Nic) -> tuple[str, str]:
    return nic.name, nic.pci or ""


def within(allowed: CpuSet | None, existing: CpuSet) -> CpuSet:
    """Return the allowed part of a set; None: all of it."""
    return existing if allowed is None else allowed & existing


def only_member(members: Collection[int | None]) -> int | None:
    """Return the only member of a set, or None if there are several or none."""
    return next(iter(members)) if len(members) == 1 else None
