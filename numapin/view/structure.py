"""The parts of a machine that views show together. Pure.

Comes in: a `Topology`. Goes out: network adapters, which have several names each; nodes without anything on them; L3
caches that span nodes; and the GPU of each node that is GPU memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import NicKind, NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.model import Core, Gpu, Nic, Node, Topology

Natural: TypeAlias = "tuple[str | tuple[int, str], ...]"
"""A key that sorts mlx5_9 before mlx5_17."""

GPU_LINKS: Final = {"NV": "NVLinks", "XGMI": "xGMI links", "XELINK": "Xe Links"}
"""The words of links between GPUs, most with their number after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A network device with all of its names, such as mlx5_0 (verbs) and ib0 (network); the verbs name is first."""

    names: tuple[str, ...]
    pci: str | None
    node: int | None
    kind: NicKind

    @property
    def name(self) -> str:
        """All names in one, such as mlx5_0/ib0."""
        return "/".join(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanningL3:
    """An L3 cache that the cores of several nodes share, as with sub-NUMA clustering."""

    nodes: CpuSet
    cores: tuple[Core, ...]


def gpu_link(word: str) -> str:
    """Return the family of a link that GPUs have of their own: "NV" of "NV12"; "" for a path over PCIe."""
    return next((family for family in GPU_LINKS if re.fullmatch(f"{family}[0-9]*", word)), "")


def numbered(word: str) -> str:
    """Return a link's word with "#" in place of the number of its links: "NV#" of "NV12", "XGMI" of "XGMI"."""
    family = gpu_link(word)
    return f"{family}#" if family and word != family else word


def natural(text: str) -> Natural:
    """Return a sort key by which numbers in a text count as numbers."""
    parts = re.split(r"([0-9]+)", text)
    return tuple(_number(part) if at % 2 else part for at, part in enumerate(parts))


def _number(digits: str) -> tuple[int, str]:
    """Return a key for digits; int() refuses thousands of them."""
    significant = digits.lstrip("0")
    return len(significant), significant


def adapters(nics: Iterable[Nic]) -> tuple[Adapter, ...]:
    """Return the devices in natural order; names with the same PCI address are one device."""
    devices: dict[object, list[Nic]] = {}
    for place, nic in enumerate(nics):
        devices.setdefault(place if nic.pci is None else nic.pci, []).append(nic)
    return tuple(sorted(map(_adapter, devices.values()), key=lambda adapter: tuple(map(natural, adapter.names))))


def _adapter(nics: list[Nic]) -> Adapter:
    in_order = sorted(nics, key=_verbs_first)
    first = in_order[0]
    names = dict.fromkeys(nic.name for nic in in_order)
    return Adapter(names=tuple(names), pci=first.pci, node=first.node, kind=first.kind)


def _verbs_first(nic: Nic) -> tuple[bool, bool, Natural]:
    """Return a sort key: the verbs name is an InfiniBand one that does not look like IP over InfiniBand (ib0)."""
    return nic.kind is not NicKind.INFINIBAND, nic.name.startswith("ib"), natural(nic.name)


def empty_nodes(topology: Topology) -> CpuSet:
    """Return the nodes without memory, cores and devices, such as a Grace host keeps for MIG instances."""
    parts: tuple[Core | Gpu | Nic, ...] = (*topology.cores, *topology.gpus, *topology.nics)
    used = {part.node for part in parts}
    without_memory = (node.id for node in topology.nodes if node.memory_bytes == 0 and not node.cpus)
    return CpuSet(without_memory) - used


def spanning_l3s(topology: Topology) -> tuple[SpanningL3, ...]:
    """Return the L3 caches that are drawn around their nodes.

    A cache counts if its nodes are in one package and all of their cores share it. What contradicts that is wrong
    firmware, and stays a group of cores in each node.
    """
    groups: dict[int, list[Core]] = {}
    l3s_of: dict[int | None, set[int | None]] = {}
    for core in topology.cores:
        l3s_of.setdefault(core.node, set()).add(core.l3)
        if core.l3 is not None:
            groups.setdefault(core.l3, []).append(core)
    package_of = {node.id: node.package for node in topology.nodes}
    found = (_spanning(cores, l3s_of, package_of) for _, cores in sorted(groups.items()))
    return tuple(l3 for l3 in found if l3 is not None)


def _spanning(
    cores: list[Core], l3s_of: dict[int | None, set[int | None]], package_of: dict[int, int | None]
) -> SpanningL3 | None:
    nodes = {core.node for core in cores}
    numbers = CpuSet(node for node in nodes if node is not None)
    alone = len(numbers) == len(nodes) and all(len(l3s_of[node]) == 1 for node in nodes)
    packages = {package_of[node] for node in numbers}
    if len(numbers) < 2 or not alone or len(packages) > 1:
        return None
    return SpanningL3(nodes=numbers, cores=tuple(cores))


def gpu_of_memory(topology: Topology, node: Node) -> Gpu | None:
    """Return the GPU whose memory a node is. None: unknown, or the node is not GPU memory."""
    if node.kind is not NodeKind.GPU:
        return None
    owners = [gpu for gpu in topology.gpus if gpu.memory_node == node.id]
    return owners[0] if len(owners) == 1 else None
