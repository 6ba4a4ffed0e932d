"""The parts of a machine that views show together. Pure.

Comes in: a `Topology`. Goes out: nodes without anything on them; L3 caches that span nodes; the GPU of each node that
is GPU memory; and the links that GPUs have of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from numapin.topology.model import Core, Gpu, Nic, Node, Topology

GPU_LINKS: Final = {"NV": "NVLinks", "XGMI": "xGMI links", "XELINK": "Xe Links"}
"""The words of links between GPUs, most with their number after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanningL3:
    """An L3 cache that the cores of several nodes share, as with sub-NUMA clustering."""

    nodes: CpuSet
    cores: tuple[Core, ...]


def gpu_link(word: str) -> str:
    """Return the family of a link that GPUs have of their own: "NV" of "NV12"; "" for a path over PCIe."""
    return next((family for family in GPU_LINKS if re.fullmatch(f"{family}[0-9]*", word)), "")


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
