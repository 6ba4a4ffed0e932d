"""The GPUs as their drivers serve them: NVIDIA's /proc/driver/nvidia, AMD's KFD, Intel's i915 and xe.

NVML is read on the live host only, by nvml.py.

AMD: the KFD (/sys/class/kfd), the compute side of the driver, numbers CPUs and GPUs in one row of nodes. HIP counts the
GPUs in that order. A partitioned GPU (DPX, TPX, QPX, CPX) is several KFD nodes at one PCI address. The number of the
partition is in bits 31 to 28 of `location_id`; older kernels have it in the bits of the PCI function instead. The KFD's
link from a GPU to CPUs is not used: it repeats the PCI device's node, and is node 0 if that is unknown.

No AMD or Intel machine was at hand: files, documentation and source code only.
Source: the README of NVIDIA's driver, chapter on /proc; the kernel's amdkfd/kfd_topology.c and its history ("node id =
location_id[31:28]"); Documentation/ABI/testing/sysfs-driver-intel-xe-*.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_GPUS, MAX_NODES
from numapin.base.cpu_set import CpuSet
from numapin.base.text import GPU_PREFIX, not_none
from numapin.topology.address import pci_address, pci_order
from numapin.topology.readings import FabricLink, PciReading
from numapin.topology.vendors import GpuVendor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numapin.system.tree import Tree


def read_drivers(tree: Tree, devices: Sequence[PciReading]) -> tuple[tuple[PciReading, ...], tuple[FabricLink, ...]]:
    """Return the GPUs as their drivers serve them, then the other devices; and the links of GPUs that are not PCI."""
    gpus, is_live = [device for device in devices if device.is_gpu], not tree.root
    nvidia, amd, intel = ([gpu for gpu in gpus if gpu.vendor is vendor] for vendor in GpuVendor)
    of_amd, fabric = read_amd(tree, amd, is_live=is_live) if amd else ([], ())
    served = (*read_nvidia(tree, nvidia), *of_amd, *read_intel(tree, intel, is_live=is_live))
    return (*served, *(device for device in devices if not device.is_gpu)), fabric


def _render_nodes(tree: Tree, address: str) -> set[str]:
    """Return a GPU's render nodes, such as renderD128, by which the drivers let processes use it."""
    return {name for name in tree.names(f"sys/bus/pci/devices/{address}/drm") if name.startswith("renderD")}


def _may_compute(tree: Tree, gpu: PciReading) -> bool:
    """Return whether a GPU may be for computing: servers have VGA chips that no driver serves for that."""
    return not gpu.may_be_board_vga or bool(_render_nodes(tree, gpu.address))


# --- NVIDIA ----------------------------------------------------------------------------------------------------------

_NVIDIA: Final = "proc/driver/nvidia/gpus"
_MAX_CHARS: Final = 4096  # the driver writes some 500
_NODE: Final = re.compile(r"^Node:\s*([0-9]{1,6})\s*$", re.MULTILINE)


def nvidia_names(tree: Tree) -> Mapping[str | None, str]:
    """Return the driver's name of each GPU, by PCI address."""
    return {pci_address(name): name for name in tree.names(_NVIDIA)}


def gpu_memory_nodes(tree: Tree) -> CpuSet:
    """Return the nodes that are the memory of a GPU, whether or not the GPU is on the PCI bus here."""
    return CpuSet(not_none(_memory_node(tree, name) for name in tree.names(_NVIDIA)))


def read_nvidia(tree: Tree, gpus: Iterable[PciReading]) -> list[PciReading]:
    """Return the GPUs; a capture without the driver's files leaves open whether there was a driver."""
    found, names = [], nvidia_names(tree)
    for gpu in gpus:
        if gpu.address not in names:
            found.append(gpu)
            continue
        name = names[gpu.address]
        text = (tree.text(f"{_NVIDIA}/{name}/information") or "")[:_MAX_CHARS]
        values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
        uuid = values.get("GPU UUID") or "?"  # question marks until the GPU is initialized
        found.append(
            replace(
                gpu,
                name=values.get("Model") or None,
                uuid=None if "?" in uuid else uuid,
                is_driven=True,
                memory_node=_memory_node(tree, name),
            )
        )
    return found


def _memory_node(tree: Tree, name: str) -> int | None:
    """Return the node that is a GPU's memory; the driver reports -1 if its memory is not a node."""
    match = _NODE.search(tree.text(f"{_NVIDIA}/{name}/numa_status") or "")
    return int(match[1]) if match else None


# --- AMD -------------------------------------------------------------------------------------------------------------

_KFD: Final = "sys/class/kfd/kfd/topology/nodes"
_MAX_KFD_LINKS: Final = 1 << 14  # 64 partitions and 8 CPU nodes have 4544
_XGMI: Final = 11  # HSA_IOLINKTYPE_XGMI
_ONE_HOP: Final = 15  # the kernel's weight of an xGMI link; twice that is a path through another GPU
_PROPERTY: Final = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)
_U32: Final = 0xFFFF_FFFF


class _KfdGpu(NamedTuple):
    """A GPU of the KFD: its node's number, files and links, its PCI address, and the number of its partition."""

    number: int
    properties: Mapping[str, int]
    links: tuple[Mapping[str, int], ...]
    address: str
    partition: int | None

    @property
    def uuid(self) -> str | None:
        """The UUID in ROCr's spelling; older GPUs have none."""
        number = self.properties.get("unique_id", 0)
        return f"{GPU_PREFIX}{number:016x}" if number else None


def read_amd(
    tree: Tree, gpus: Sequence[PciReading], *, is_live: bool
) -> tuple[list[PciReading], tuple[FabricLink, ...]]:
    """Return the GPUs of the KFD in its order, then those that it does not list, and the xGMI links between GPUs."""
    on_pci = {gpu.address: gpu for gpu in gpus}
    devices = _kfd_gpus(tree, on_pci)
    num_of_uuid = Counter(device.uuid for device in devices)
    is_driven = not is_live or "kfd" in tree.names("dev")  # a container may show the files without the device
    found = [
        replace(
            on_pci.get(device.address) or PciReading(address=device.address, vendor=GpuVendor.AMD, is_on_pci=False),
            index=index,
            name=tree.text(f"sys/bus/pci/devices/{device.address}/product_name") or None,
            uuid=device.uuid if num_of_uuid[device.uuid] == 1 else None,  # partitions may share their GPU's
            partition=device.partition,
            reports_fabric=True,
            is_driven=is_driven,
        )
        for index, device in enumerate(devices)
    ]
    others_driven = False if devices or is_live else None  # HIP needs the KFD, whose files a capture may just lack
    others = sorted(on_pci.keys() - {device.address for device in devices}, key=pci_order)
    found += [
        replace(on_pci[address], is_driven=others_driven) for address in others if _may_compute(tree, on_pci[address])
    ]
    return found, tuple(_xgmi_links(devices))


def _kfd_gpus(tree: Tree, on_pci: Collection[str]) -> list[_KfdGpu]:
    """Return the GPUs of the KFD that this process may see, in order; a cgroup hides the files of others."""
    gpus: list[_KfdGpu] = []
    num_links = 0
    numbers = sorted(int(name) for name in tree.names(_KFD) if name.isascii() and name.isdecimal())
    for number in numbers[: MAX_GPUS + MAX_NODES]:
        at = f"{_KFD}/{number}"
        text = tree.text(f"{at}/properties")
        if not tree.number(f"{at}/gpu_id") or not text:  # a CPU, or its files cannot be read
            continue
        names = tree.names(f"{at}/io_links")[: MAX_GPUS + MAX_NODES]
        links = tuple(_properties(tree.text(f"{at}/io_links/{name}/properties") or "") for name in names)
        num_links += len(links)
        if num_links > _MAX_KFD_LINKS:
            raise tree.error(_KFD, f"more than {_MAX_KFD_LINKS} links between nodes, the most that are accepted")
        properties = _properties(text)
        gpus.append(_KfdGpu(number, properties, links, *_place(properties, on_pci)))

    partitions_at: defaultdict[str, list[int | None]] = defaultdict(list)
    for gpu in gpus:
        partitions_at[gpu.address].append(gpu.partition)
    num_seen: Counter[str] = Counter()
    for position, gpu in enumerate(gpus):
        there = partitions_at[gpu.address]
        if len(there) == 1:
            gpus[position] = gpu._replace(partition=None)
        elif len(set(there)) < len(there):  # several have one number
            gpus[position] = gpu._replace(partition=num_seen[gpu.address])
            num_seen[gpu.address] += 1
    return gpus


def _place(properties: Mapping[str, int], on_pci: Collection[str]) -> tuple[str, int]:
    """Return the address of a GPU, which PCI should know, and the number of its partition."""
    location = properties.get("location_id", 0) & _U32
    slot = f"{properties.get('domain', 0) & _U32:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function = location & 7
    if f"{slot}.{function}" not in on_pci and f"{slot}.0" in on_pci:
        return f"{slot}.0", function
    return f"{slot}.{function}", location >> 28


@lru_cache(maxsize=256)
def _properties(text: str) -> Mapping[str, int]:
    """Return the numbers in a file of properties. Links to a GPU's neighbors have the same text many times."""
    return {match[1]: int(match[2]) for match in _PROPERTY.finditer(text)}


def _xgmi_links(devices: Sequence[_KfdGpu]) -> Iterator[FabricLink]:
    """Yield the xGMI links between GPUs, each once, with the number of links where the path is direct."""
    parts = {device.number: (device.address, device.partition) for device in devices}
    for device in devices:
        for link in device.links:
            other = link.get("node_to", -1)
            if link.get("type") != _XGMI or other not in parts or device.number >= other:
                continue
            # The driver adds up the bandwidths of the links of a direct path.
            one, all_of_them = link.get("min_bandwidth", 0), link.get("max_bandwidth", 0)
            is_counted = link.get("weight") == _ONE_HOP and one > 0 and all_of_them > 0 and all_of_them % one == 0
            word = f"XGMI{all_of_them // one}" if is_counted else "XGMI"
            yield FabricLink(parts[device.number], parts[other], word)


# --- Intel -----------------------------------------------------------------------------------------------------------

_TILE: Final = re.compile(r"tile([0-9])")


def read_intel(tree: Tree, gpus: Iterable[PciReading], *, is_live: bool) -> list[PciReading]:
    """Return the GPUs, a tile each if there are several. A board's VGA chip does not count."""
    found: list[PciReading] = []
    for gpu in gpus:
        if not _may_compute(tree, gpu):
            continue
        is_driven = None
        if is_live:  # containers show all GPUs in sysfs, but not their device files
            is_driven = not _render_nodes(tree, gpu.address).isdisjoint(tree.names("dev/dri"))
        here = replace(gpu, is_driven=is_driven)
        names = tree.names(f"sys/bus/pci/devices/{gpu.address}")
        tiles = [int(match[1]) for match in map(_TILE.fullmatch, names) if match]
        if not tiles:
            found.append(here.with_tiles_unread())
        elif len(tiles) == 1:
            found.append(here)
        else:
            found += [replace(here, partition=tile) for tile in tiles]
    return found
