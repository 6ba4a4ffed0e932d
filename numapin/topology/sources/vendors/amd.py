"""AMD's GPUs. Pure.

Comes in: PCI devices and the files of the KFD topology (/sys/class/kfd), or GPUs and the variables of ROCr and HIP.
Goes out: a reading for each device that HIP shows, with its xGMI links; the GPUs that HIP shows a process.

The KFD numbers CPUs and GPUs in one row of nodes. HIP counts the GPUs in that order. A partitioned GPU (DPX, TPX, QPX,
CPX) is several KFD nodes at one PCI address; the upper bits of `location_id` have the number of the partition.

The KFD's link from a GPU to CPUs is not used: it repeats the PCI device's node, and is node 0 if that is unknown.

The variables work one after the other: ROCR_VISIBLE_DEVICES chooses from all GPUs; HIP_VISIBLE_DEVICES, or if it is not
set CUDA_VISIBLE_DEVICES, chooses from the remaining ones, by their new numbers.

No AMD machine was at hand: files and documentation only.
Source: the kernel's amdkfd/kfd_topology.c; ROCm's documentation, "GPU isolation techniques".
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_GPUS, MAX_NODES
from numapin.base.gpu_uuid import GPU_PREFIX
from numapin.topology.address import pci_order
from numapin.topology.model import GpuVendor
from numapin.topology.readings import ACCELERATOR, DISPLAY, FabricLink
from numapin.topology.sources.vendors.lists import Variable, chosen, first_set
from numapin.topology.sources.vendors.seam import Served, Vendor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.model import Gpu
    from numapin.topology.readings import PciReading
    from numapin.topology.sources.vendors.seam import Environ, Seen

_NODES: Final = "sys/class/kfd/kfd/topology/nodes"
_MAX_KFD_LINKS: Final = 1 << 14  # 64 partitions and 8 CPU nodes have 4544
_XGMI: Final = 11  # HSA_IOLINKTYPE_XGMI
_ONE_HOP: Final = 15  # the kernel's weight of an xGMI link; twice that is a path through another GPU
_ROCR: Final = "ROCR_VISIBLE_DEVICES"
_HIP: Final = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_SEE: Final = "rocminfo"
_PROPERTY: Final = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)


class _KfdNode(NamedTuple):
    """A node of the KFD: its number, whether it is a GPU, its properties, and its links to other nodes."""

    number: int
    is_gpu: bool
    properties: Mapping[str, int]
    links: tuple[Mapping[str, int], ...]

    @property
    def address(self) -> str:
        """The PCI address."""
        place, domain = self.properties.get("location_id", 0), self.properties.get("domain", 0)
        return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"

    @property
    def partition(self) -> int:
        """The number of the partition; 0 for a whole GPU."""
        return self.properties.get("location_id", 0) >> 28

    @property
    def uuid(self) -> str | None:
        """The UUID in ROCr's spelling; older GPUs have none."""
        number = self.properties.get("unique_id", 0)
        return f"{GPU_PREFIX}{number:016x}" if number else None


def _is_gpu(device_class: int, _address: str) -> bool:
    return device_class >> 8 == DISPLAY or device_class == ACCELERATOR


def _read(tree: Tree, gpus: Sequence[PciReading]) -> Served:
    nodes = list(_kfd_nodes(tree))
    if not any(node.is_gpu for node in nodes):
        return Served(tuple(replace(gpu, is_driven=_is_driven_without_kfd(tree)) for gpu in gpus))
    by_address = {gpu.address: gpu for gpu in gpus}
    in_kfd = [node for node in nodes if node.is_gpu and node.address in by_address]
    found = tuple(_partitions(tree, in_kfd, by_address))
    missing = by_address.keys() - {node.address for node in in_kfd}
    left = sorted((by_address[address] for address in missing), key=lambda gpu: pci_order(gpu.address))
    driven = _has_device(tree)
    return Served(
        gpus=(*(replace(gpu, is_driven=driven) for gpu in found), *(replace(gpu, is_driven=False) for gpu in left)),
        fabric=tuple(_fabric(in_kfd)),
    )


def _has_device(tree: Tree) -> bool:
    """Return whether processes can reach the driver; containers may lack the device. A capture does not have it."""
    return bool(tree.root) or "kfd" in tree.names("dev")


def _is_driven_without_kfd(tree: Tree) -> bool | None:
    """Return False on the live host, where HIP needs the KFD; a capture may just lack its files."""
    return None if tree.root else False


# --- the KFD's files -------------------------------------------------------------------------------------------------


def _kfd_nodes(tree: Tree) -> Iterator[_KfdNode]:
    """Yield the nodes of the KFD that this process may see, in order; a cgroup hides the files of other GPUs."""
    numbers = sorted(int(name) for name in tree.names(_NODES) if name.isascii() and name.isdecimal())
    num_links = 0
    for number in numbers[: MAX_GPUS + MAX_NODES]:
        at = f"{_NODES}/{number}"
        gpu_id, text = tree.number(f"{at}/gpu_id"), tree.text(f"{at}/properties")
        if gpu_id is not None and text:
            links = tuple(_links(tree, at)) if gpu_id else ()
            num_links += len(links)
            if num_links > _MAX_KFD_LINKS:
                problem = f"more than {_MAX_KFD_LINKS} links between nodes, the most that are accepted"
                raise tree.error(_NODES, problem)
            yield _KfdNode(number, gpu_id != 0, _properties(text), links)


def _links(tree: Tree, at: str) -> Iterator[Mapping[str, int]]:
    for name in tree.names(f"{at}/io_links")[: MAX_GPUS + MAX_NODES]:
        yield _properties(tree.text(f"{at}/io_links/{name}/properties") or "")


@lru_cache(maxsize=256)
def _properties(text: str) -> Mapping[str, int]:
    """Return the numbers in a file of properties. Links to a GPU's neighbors have the same text many times."""
    return {match[1]: int(match[2]) for match in _PROPERTY.finditer(text)}


def _partitions(tree: Tree, nodes: Sequence[_KfdNode], gpus: Mapping[str, PciReading]) -> Iterator[PciReading]:
    """Yield a reading for each device of the KFD, numbered as HIP does."""
    num_at = Counter(node.address for node in nodes)
    num_of_uuid = Counter(node.uuid for node in nodes)
    for index, node in enumerate(nodes):
        address = node.address
        yield replace(
            gpus[address],
            index=index,
            name=tree.text(f"sys/bus/pci/devices/{address}/product_name") or None,
            uuid=node.uuid if num_of_uuid[node.uuid] == 1 else None,  # partitions may share their GPU's
            partition=node.partition if num_at[address] > 1 else None,
            reports_fabric=True,
        )


def _fabric(nodes: Sequence[_KfdNode]) -> Iterator[FabricLink]:
    """Yield the xGMI links between GPUs, each once."""
    parts = _parts(nodes)
    for node in nodes:
        for link in node.links:
            other = link.get("node_to", -1)
            if link.get("type") == _XGMI and other in parts and node.number < other:
                yield FabricLink(parts[node.number], parts[other], _word(link))


def _parts(nodes: Sequence[_KfdNode]) -> dict[int, tuple[str, int | None]]:
    num_at = Counter(node.address for node in nodes)
    return {node.number: (node.address, node.partition if num_at[node.address] > 1 else None) for node in nodes}


def _word(link: Mapping[str, int]) -> str:
    """Return "XGMI" and the number of links if the path is direct: the driver adds up their bandwidths."""
    one, all_of_them = link.get("min_bandwidth", 0), link.get("max_bandwidth", 0)
    is_direct = link.get("weight") == _ONE_HOP and one and all_of_them % one == 0
    return f"XGMI{all_of_them // one}" if is_direct and all_of_them else "XGMI"


def _why_order_unknown(gpus: Sequence[PciReading], _environ: Environ) -> str:
    """Return a text if the KFD's nodes are not in the description, as in hwloc's and RCCL's files."""
    is_known = all(gpu.is_driven is not None for gpu in gpus)
    text = "HIP's order of the GPUs is not in this description (no KFD topology), so the GPU of each rank is assumed"
    return "" if is_known else text


# --- the variables ---------------------------------------------------------------------------------------------------


def _see(gpus: tuple[Gpu, ...], environ: Environ) -> Seen:
    remaining: list[Gpu] = sorted(gpus, key=lambda gpu: gpu.index)
    notes: tuple[str, ...] = ()
    for variable in _set_variables(environ):
        remaining, lost = chosen(variable, remaining, see=_SEE)
        notes += lost
    numbers = {gpu.index: number for number, gpu in enumerate(remaining)}
    seen = (replace(gpu, visible=gpu.index in numbers, cuda_index=numbers.get(gpu.index)) for gpu in gpus)
    return tuple(seen), notes


def _set_variables(environ: Environ) -> list[Variable]:
    """Return the variables that take effect, in the order in which they do."""
    return [variable for names in ((_ROCR,), _HIP) if (variable := first_set(names, environ)) is not None]


def _show(gpus: Sequence[Gpu], environ: Environ) -> dict[str, str]:
    """Set CUDA_VISIBLE_DEVICES, and HIP_VISIBLE_DEVICES where it is set and would win. ROCr's stays in effect.

    torchrun's --virtual-local-rank sets the former only, so that the latter must not appear without need.
    """
    given = first_set(_HIP, environ)
    entries = given.entries if given else None
    numbers = [gpu.cuda_index for gpu in gpus if gpu.cuda_index is not None]
    text = ",".join(entries[number] if entries else str(number) for number in numbers)
    own, cuda = _HIP
    return {cuda: text} | ({own: text} if own in environ else {})


AMD: Final = Vendor(
    kind=GpuVendor.AMD,
    is_gpu=_is_gpu,
    read=_read,
    hwloc_name=re.compile(r"rsmi([0-9]{1,4})"),
    hwloc_uuid="AMDUUID",
    why_order_unknown=_why_order_unknown,
    see=_see,
    show=_show,
    variables=(*_HIP, _ROCR),
)
