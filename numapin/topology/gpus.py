"""GPUs, NICs, and the node of each. Pure.

Comes in: `Readings` and the nodes that were built from them. Goes out: GPUs and NICs, whose node has a source or is
None.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_order
from numapin.topology.model import Gpu, GpuVendor, Nic, Node, NodeKind, NodeSource, Pcie
from numapin.topology.readings import NvmlReading, PciReading, Readings
from numapin.topology.sources.vendors.table import KINDS, preferred, vendor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence


class _Evidence(NamedTuple):
    """All findings about the node of one device."""

    homes: Homes
    pci: PciReading
    nvml_nodes: CpuSet | None = None
    nvml_cpus: CpuSet | None = None
    nccl_node: int | None = None


class Homes:
    """The nodes on which a device can be (those with CPUs), and those that are the memory of a GPU."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self._with_cpus = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
        self._of_gpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.GPU)
        self.single = only_member(self._with_cpus)
        self._around: dict[CpuSet, int | None] = {}

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


# `NodeSource` in its order, without the two that `with_gpu_nodes` adds: the user's and the measured node. The first may
# be a file instead (`PciReading.node_source`).
_LADDER: Final[tuple[tuple[NodeSource, Callable[[_Evidence], int | None]], ...]] = (
    (NodeSource.SYSFS, lambda e: e.homes.only([e.pci.node])),
    (NodeSource.PCI_PARENT, lambda e: e.homes.only(e.pci.parent_nodes[:1])),
    (NodeSource.NVML_MEMORY, lambda e: e.homes.only(e.nvml_nodes)),
    (NodeSource.LOCAL_CPUS, lambda e: e.homes.around(e.pci.local_cpus)),
    (NodeSource.NVML_CPUS, lambda e: e.homes.around(e.nvml_cpus)),
    (NodeSource.NCCL_FILE, lambda e: e.homes.only([e.nccl_node])),
    (NodeSource.SINGLE, lambda e: e.homes.single),
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


def find_gpus(readings: Readings, nodes: tuple[Node, ...], homes: Homes) -> tuple[FoundGpu, ...]:
    """Return the GPUs of all vendors, those of the ranks' vendor first. Each has a number of its own."""
    kind = preferred(readings)
    found: list[FoundGpu] = []
    for vendor in sorted(KINDS, key=lambda vendor: vendor is not kind):
        of_vendor = _gpus_of(vendor, readings, nodes, homes, is_preferred=vendor is kind)
        taken = {device.gpu.index for device in found}
        in_order = sorted(of_vendor, key=_own_number)
        found += _renumbered(in_order, after=max(taken)) if taken else in_order
    return tuple(found)


def _gpus_of(
    kind: GpuVendor, readings: Readings, nodes: tuple[Node, ...], homes: Homes, *, is_preferred: bool
) -> Iterator[FoundGpu]:
    """Yield a vendor's GPUs. A VGA controller beside another vendor's GPUs is for the screen, and is left out."""
    on_pci = [reading for reading in readings.pci if reading.is_gpu and (reading.vendor or GpuVendor.NVIDIA) is kind]
    if kind is GpuVendor.NVIDIA and readings.nvml.gpus is not None:
        by_address = {reading.address: reading for reading in on_pci}
        for gpu in _without_cpuset(readings, nodes, readings.nvml.gpus):
            pci = by_address.get(gpu.pci, PciReading(address=gpu.pci, vendor=kind))
            yield FoundGpu(_gpu(gpu, pci, readings, homes), pci, is_preferred)
        return
    parts = {reading.part: reading for reading in on_pci if is_preferred or not reading.is_vga}
    for index, pci in _numbered(parts.values()):
        yield FoundGpu(_gpu(_as_nvml(index, pci), pci, readings, homes), pci, is_preferred)


def _renumbered(devices: list[FoundGpu], *, after: int) -> Iterator[FoundGpu]:
    """Yield GPUs with new numbers: NVIDIA and AMD both have a GPU 0."""
    for number, device in enumerate(devices, after + 1):
        yield device._replace(gpu=replace(device.gpu, index=number))


def _own_number(device: FoundGpu) -> int:
    return device.gpu.index


def unusable(devices: Iterable[FoundGpu]) -> Iterator[int]:
    """Yield the indices of GPUs of another vendor than the ranks', and of those that no driver serves."""
    return (device.gpu.index for device in devices if not device.is_preferred or device.pci.is_driven is False)


def unusable_notes(devices: tuple[FoundGpu, ...]) -> Iterator[str]:
    """Yield notes on GPUs that the ranks cannot use."""
    others = [device.gpu for device in devices if not device.is_preferred]
    if others:
        names = ", ".join(f"{gpu.label} ({gpu.vendor})" for gpu in others)
        used = devices[0].gpu.vendor
        yield f"{names}: not used, because ranks use the GPUs of one vendor, and this machine has GPUs of {used}"
    undriven = [device.gpu for device in devices if device.is_preferred and device.pci.is_driven is False]
    if undriven:
        names = ", ".join(f"{gpu.label} ({gpu.pci})" for gpu in undriven)
        remedy = "load the driver, or give the container its devices: docker run --device /dev/kfd --device /dev/dri"
        yield f"no driver serves {names} here; {remedy}"


def why_order_unknown(devices: Sequence[FoundGpu], environ: Mapping[str, str]) -> str:
    """Return why ranks may use the GPUs in another order than `cuda_index`, or ""."""
    hidden = frozenset(unusable(devices))
    used = [device for device in devices if device.gpu.index not in hidden]
    if len(used) < 2:
        return ""
    return vendor_of(used[0].gpu).why_order_unknown([device.pci for device in used], environ)


def _numbered(devices: Collection[PciReading]) -> Iterator[tuple[int, PciReading]]:
    """Number GPUs as their source does; the others get the free numbers, in the order of their addresses."""
    taken = {reading.index for reading in devices}
    free = (number for number in count() if number not in taken)
    for reading in sorted(devices, key=_index_and_address):
        yield (next(free) if reading.index is None else reading.index), reading


def _index_and_address(reading: PciReading) -> tuple[bool, int, tuple[int, ...], int]:
    return reading.index is None, reading.index or 0, pci_order(reading.address), reading.partition or 0


def _as_nvml(index: int, reading: PciReading) -> NvmlReading:
    """Return the identity of a GPU in NVML's form, for a machine without NVML."""
    return NvmlReading(index=index, uuid=reading.uuid, pci=reading.address)


def _without_cpuset(
    readings: Readings, nodes: tuple[Node, ...], gpus: tuple[NvmlReading, ...]
) -> Iterator[NvmlReading]:
    """Drop NVML affinities that may only reflect the launcher's own cpuset.

    NVML answers from inside the cpuset: if that holds a single node, a GPU of unknown place would look local to it.
    """
    online = readings.online
    with_cpus = CpuSet(node.id for node in nodes if node.kind is NodeKind.CPU)
    for gpu in gpus:
        yield replace(
            gpu,
            cpus=_beyond_cpuset(gpu.cpus, readings.allowed_cpus, online),
            memory_nodes=_beyond_cpuset(gpu.memory_nodes, readings.allowed_nodes, with_cpus),
        )


def _beyond_cpuset(affinity: CpuSet | None, allowed: CpuSet | None, existing: CpuSet) -> CpuSet | None:
    """Return an affinity, or None if the allowed set is restricted and the affinity covers all of it."""
    inside = within(allowed, existing)
    return None if affinity and inside != existing and affinity >= inside else affinity


def _gpu(nvml: NvmlReading, pci: PciReading, readings: Readings, homes: Homes) -> Gpu:
    node, source = _locate(
        _Evidence(
            homes=homes,
            pci=pci,
            nvml_nodes=nvml.memory_nodes,
            nvml_cpus=nvml.cpus,
            nccl_node=readings.nccl_nodes.get(nvml.pci),
        )
    )
    cpus = homes.cpus_of(node)
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
        vendor=pci.vendor or GpuVendor.NVIDIA,
        partition=pci.partition,
        memory_node=homes.gpu_memory(nvml.own_node),
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


def find_nics(readings: Readings, homes: Homes) -> tuple[Nic, ...]:
    """Return the network interfaces, sorted by name."""
    found = []
    for reading in readings.pci:
        nccl_node = readings.nccl_nodes.get(reading.address)
        node, _ = _locate(_Evidence(homes=homes, pci=reading, nccl_node=nccl_node))
        found += [Nic(name=name, pci=reading.address, node=node, kind=kind) for name, kind in reading.interfaces]
    found += [Nic(name=nic.name, node=homes.only([nic.node]), kind=nic.kind) for nic in readings.nics]
    return tuple(sorted(found, key=lambda nic: (nic.name, nic.pci or "")))


def within(allowed: CpuSet | None, existing: CpuSet) -> CpuSet:
    """Return the allowed part of a set; None: all of it."""
    return existing if allowed is None else allowed & existing


def only_member(members: Collection[int | None]) -> int | None:
    """Return the only member of a set, or None if there are several or none."""
    return next(iter(members)) if len(members) == 1 else None
