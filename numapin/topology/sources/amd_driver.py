"""AMD's GPUs in the files of the KFD, the compute side of their driver (/sys/class/kfd). Edge.

Comes in: a `Tree` and PCI devices. Goes out: a reading for each device that HIP shows, with its xGMI links.

The KFD numbers CPUs and GPUs in one row of nodes. HIP counts the GPUs in that order. A partitioned GPU (DPX, TPX, QPX,
CPX) is several KFD nodes at one PCI address. The number of the partition is in bits 31 to 28 of `location_id`; older
kernels have it in the bits of the PCI function instead.

The KFD's link from a GPU to CPUs is not used: it repeats the PCI device's node, and is node 0 if that is unknown.

No AMD machine was at hand: files and source code only.
Source: the kernel's amdkfd/kfd_topology.c and its history ("node id = location_id[31:28]").
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_GPUS, MAX_NODES
from numapin.base.gpu_uuid import GPU_PREFIX
from numapin.topology.address import pci_order
from numapin.topology.model import GpuVendor
from numapin.topology.readings import DriverReading, FabricLink, PciReading
from numapin.topology.sources.render_nodes import may_compute

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numapin.system.tree import Tree

_NODES: Final = "sys/class/kfd/kfd/topology/nodes"
_MAX_KFD_LINKS: Final = 1 << 14  # 64 partitions and 8 CPU nodes have 4544
_XGMI: Final = 11  # HSA_IOLINKTYPE_XGMI
_ONE_HOP: Final = 15  # the kernel's weight of an xGMI link; twice that is a path through another GPU
_PROPERTY: Final = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)
_U32: Final = 0xFFFF_FFFF


class _KfdNode(NamedTuple):
    """A node of the KFD topology: a CPU or a GPU."""

    number: int
    is_gpu: bool
    properties: Mapping[str, int]
    links: tuple[Mapping[str, int], ...]

    @property
    def location(self) -> int:
        """The PCI bus, device and function, and the number of the partition in one of two places."""
        return self.properties.get("location_id", 0) & _U32

    def address(self, function: int) -> str:
        """Return the PCI address with this function."""
        domain = self.properties.get("domain", 0) & _U32
        return f"{domain:04x}:{self.location >> 8 & 0xFF:02x}:{self.location >> 3 & 0x1F:02x}.{function}"

    @property
    def uuid(self) -> str | None:
        """The UUID in ROCr's spelling; older GPUs have none."""
        number = self.properties.get("unique_id", 0)
        return f"{GPU_PREFIX}{number:016x}" if number else None


class _KfdGpu(NamedTuple):
    """A GPU of the KFD with its PCI address, and the number of its partition if the GPU has several."""

    node: _KfdNode
    address: str
    partition: int | None


def read(tree: Tree, gpus: Sequence[PciReading], *, is_live: bool) -> DriverReading:
    """Return the GPUs of the KFD in its order, then those that it does not list. A board's VGA chip does not count."""
    by_address = {gpu.address: gpu for gpu in gpus}
    devices = _devices(_gpu_nodes(tree), by_address)
    listed, others = _readings(tree, devices, by_address), _not_in_kfd(tree, devices, by_address)
    is_driven = not is_live or "kfd" in tree.names("dev")  # a container may show the files without the device
    others_driven = False if devices or is_live else None  # HIP needs the KFD, whose files a capture may just lack
    return DriverReading(
        gpus=(*_with_driver(listed, is_driven=is_driven), *_with_driver(others, is_driven=others_driven)),
        fabric=tuple(_fabric(devices)),
    )


def _gpu_nodes(tree: Tree) -> list[_KfdNode]:
    return [node for node in _kfd_nodes(tree) if node.is_gpu]


def _with_driver(gpus: Iterable[PciReading], *, is_driven: bool | None) -> Iterator[PciReading]:
    return (replace(gpu, is_driven=is_driven) for gpu in gpus)


def _not_in_kfd(tree: Tree, devices: Sequence[_KfdGpu], gpus: Mapping[str, PciReading]) -> Iterator[PciReading]:
    """Yield the GPUs that the KFD does not list, in order of address."""
    missing = gpus.keys() - {device.address for device in devices}
    return (gpus[address] for address in sorted(missing, key=pci_order) if may_compute(tree, gpus[address]))


def _kfd_nodes(tree: Tree) -> Iterator[_KfdNode]:
    """Yield the nodes of the KFD that this process may see, in order; a cgroup hides the files of other GPUs."""
    numbers = sorted(int(name) for name in tree.names(_NODES) if name.isascii() and name.isdecimal())
    num_links = 0
    for node in filter(None, map(partial(_kfd_node, tree), numbers[: MAX_GPUS + MAX_NODES])):
        num_links += len(node.links)
        if num_links > _MAX_KFD_LINKS:
            raise tree.error(_NODES, f"more than {_MAX_KFD_LINKS} links between nodes, the most that are accepted")
        yield node


def _kfd_node(tree: Tree, number: int) -> _KfdNode | None:
    """Return a node; None if its files cannot be read. Only the links of GPUs are read."""
    at = f"{_NODES}/{number}"
    gpu_id, text = tree.number(f"{at}/gpu_id"), tree.text(f"{at}/properties")
    if gpu_id is None or not text:
        return None
    links = tuple(_links(tree, at)) if gpu_id else ()
    return _KfdNode(number, gpu_id != 0, _properties(text), links)


def _links(tree: Tree, at: str) -> Iterator[Mapping[str, int]]:
    for name in tree.names(f"{at}/io_links")[: MAX_GPUS + MAX_NODES]:
        yield _properties(tree.text(f"{at}/io_links/{name}/properties") or "")


@lru_cache(maxsize=256)
def _properties(text: str) -> Mapping[str, int]:
    """Return the numbers in a file of properties. Links to a GPU's neighbors have the same text many times."""
    return {match[1]: int(match[2]) for match in _PROPERTY.finditer(text)}


def _devices(nodes: Sequence[_KfdNode], known: Collection[str]) -> list[_KfdGpu]:
    """Return the GPUs with their addresses and partitions."""
    places = [_place(node, known) for node in nodes]
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for address, number in places:
        numbers[address].append(number)
    in_turn: defaultdict[str, Iterator[int]] = defaultdict(count)
    return [
        _KfdGpu(node, address, _partition(number, numbers[address], next(in_turn[address])))
        for node, (address, number) in zip(nodes, places, strict=True)
    ]


def _place(node: _KfdNode, known: Collection[str]) -> tuple[str, int]:
    """Return the address of a GPU, which PCI should know, and the number of its partition."""
    function = node.location & 7
    address, whole = node.address(function), node.address(0)
    if address not in known and whole in known:
        return whole, function
    return address, node.location >> 28


def _partition(number: int, numbers_there: Sequence[int], position: int) -> int | None:
    """Return the number of a partition, or its position if several at the address have one number."""
    if len(numbers_there) == 1:
        return None
    return number if len(set(numbers_there)) == len(numbers_there) else position


def _readings(tree: Tree, devices: Sequence[_KfdGpu], gpus: Mapping[str, PciReading]) -> Iterator[PciReading]:
    """Yield a reading for each device, numbered as HIP does; the node of a GPU that is not on PCI stays unknown."""
    num_of_uuid = Counter(device.node.uuid for device in devices)
    for index, (node, address, partition) in enumerate(devices):
        yield replace(
            gpus.get(address) or PciReading(address=address, vendor=GpuVendor.AMD, is_on_pci=False),
            index=index,
            name=tree.text(f"sys/bus/pci/devices/{address}/product_name") or None,
            uuid=node.uuid if num_of_uuid[node.uuid] == 1 else None,  # partitions may share their GPU's
            partition=partition,
            reports_fabric=True,
        )


def _fabric(devices: Sequence[_KfdGpu]) -> Iterator[FabricLink]:
    """Yield the xGMI links between GPUs, each once."""
    parts = {device.node.number: (device.address, device.partition) for device in devices}
    for node, _, _ in devices:
        for link in filter(_is_xgmi, node.links):
            other = link.get("node_to", -1)
            if other in parts and node.number < other:
                yield FabricLink(parts[node.number], parts[other], _word(link))


def _is_xgmi(link: Mapping[str, int]) -> bool:
    return link.get("type") == _XGMI


def _word(link: Mapping[str, int]) -> str:
    """Return "XGMI" and the number of links if the path is direct: the driver adds up their bandwidths."""
    one, all_of_them = link.get("min_bandwidth", 0), link.get("max_bandwidth", 0)
    is_direct = link.get("weight") == _ONE_HOP
    is_multiple = one > 0 and all_of_them > 0 and all_of_them % one == 0
    return f"XGMI{all_of_them // one}" if is_direct and is_multiple else "XGMI"
