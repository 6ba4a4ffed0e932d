"""The parts of a machine that views show together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import LinkKind, NodeKind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numapin.topology.model import Core, Gpu, Nic, Node, Topology

GPU_LINKS: Final = {"NV": "NVLinks", "XGMI": "xGMI links", "XELINK": "Xe Links"}
"""The words of links between GPUs, most with their number after them."""
UNKNOWN_LINK: Final = "?"
LINK_MEANINGS: Final[Mapping[str, str]] = {
    **{f"{family}#": f"bonded set of # {links}" for family, links in GPU_LINKS.items()},
    **{family: f"{links}, their number unknown" for family, links in GPU_LINKS.items()},
    LinkKind.SAME_BOARD: "on one board",
    LinkKind.ONE_SWITCH: "at most one PCIe switch",
    LinkKind.SWITCHES: "several PCIe switches, but no host bridge",
    LinkKind.HOST_BRIDGE: "a PCIe host bridge",
    LinkKind.SAME_NODE: "between PCIe host bridges of one NUMA node",
    LinkKind.SYSTEM: "between NUMA nodes",
    UNKNOWN_LINK: "unknown on this machine",
}
"""The words of all links, the nearest first; "#" is a number."""


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


def link_words(topology: Topology, devices: Sequence[Collection[str]]) -> dict[frozenset[int], str]:
    """Return the known links between devices, by the places of both; a link may use any of a device's names."""
    place_of = {name: place for place, names in enumerate(devices) for name in names}
    links = (link for link in topology.links if place_of.keys() >= {link.a, link.b})
    words = {frozenset((place_of[link.a], place_of[link.b])): link.kind for link in links}
    return {pair: word for pair, word in words.items() if len(pair) == 2}  # the names of one device have a link, too


def link_meanings(words: Collection[str]) -> list[tuple[str, str]]:
    """Return the words of a legend for these links, each with its meaning."""
    used = set(map(numbered, words))
    return [(word, meaning) for word, meaning in LINK_MEANINGS.items() if word in used]


def empty_nodes(topology: Topology) -> CpuSet:
    """Return the nodes without memory, cores and devices, such as a Grace host keeps for MIG instances.

    Views show them together. One alone is shown as any other node, and is not returned.
    """
    parts: tuple[Core | Gpu | Nic, ...] = (*topology.cores, *topology.gpus, *topology.nics)
    used = {part.node for part in parts}
    without_memory = (node.id for node in topology.nodes if node.memory_bytes == 0 and not node.cpus)
    empty = CpuSet(without_memory) - used
    return empty if len(empty) > 1 else CpuSet()


def spanning_l3s(topology: Topology) -> dict[int, SpanningL3]:
    """Return the L3 caches that are drawn around their nodes, by node.

    A cache counts if its nodes are in one package and all of their cores share it. What contradicts that is wrong
    firmware, and stays a group of cores in each node.
    """
    l3s_of: dict[int | None, set[int | None]] = {}
    for core in topology.cores:
        l3s_of.setdefault(core.node, set()).add(core.l3)
    package_of = {node.id: node.package for node in topology.nodes}
    found = (_spanning(cores, l3s_of, package_of) for cores in _by_l3(topology))
    return {node: l3 for l3 in found if l3 is not None for node in l3.nodes}


def _by_l3(topology: Topology) -> list[list[Core]]:
    """Return the cores of each known L3 cache."""
    groups: dict[int, list[Core]] = {}
    for core in topology.cores:
        if core.l3 is not None:
            groups.setdefault(core.l3, []).append(core)
    return [cores for _, cores in sorted(groups.items())]


def _spanning(
    cores: list[Core], l3s_of: dict[int | None, set[int | None]], package_of: dict[int, int | None]
) -> SpanningL3 | None:
    nodes = {core.node for core in cores}
    numbers = CpuSet(node for node in nodes if node is not None)
    if len(numbers) < 2 or len(numbers) < len(nodes):
        return None
    have_others = any(len(l3s_of[node]) > 1 for node in nodes)
    packages = {package_of[node] for node in numbers}
    return None if have_others or len(packages) > 1 else SpanningL3(nodes=numbers, cores=tuple(cores))


def gpu_of_memory(topology: Topology, node: Node) -> Gpu | None:
    """Return the GPU whose memory a node is. None: unknown, or the node is not GPU memory."""
    if node.kind is not NodeKind.GPU:
        return None
    owners = [gpu for gpu in topology.gpus if gpu.memory_node == node.id]
    return owners[0] if len(owners) == 1 else None
