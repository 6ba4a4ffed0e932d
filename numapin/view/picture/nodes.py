"""Packages and NUMA nodes as boxes."""

from __future__ import annotations

from dataclasses import replace
from itertools import filterfalse
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.topology.model import NodeKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, columns, frame, paragraph
from numapin.view.picture.cores import core_groups
from numapin.view.picture.devices import chip, device_rows
from numapin.view.picture.text import title_text
from numapin.view.words import joined, kind_of, memory, nodes_of, on_node, rank_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.topology.model import Core, Node
    from numapin.view.marks import Ranks
    from numapin.view.picture.drawing import Drawing

WIDE: Final = 1400
NARROW: Final = 358  # with its margins, a phone's screen
_LEAST_NODE: Final = 236
WIDE_GAP: Final = 12  # between boxes on the page itself
_MOST_CHIPS: Final = 128  # of a node; more ranks are named in one line
_BAR: Final = 10


def package_boxes(drawing: Drawing) -> list[Box]:
    """Return a frame per package, with its nodes, and with its cores of unknown node."""
    return [_package(drawing, package.id) for package in drawing.topology.packages]


def boxes_without_package(drawing: Drawing, *, width: float) -> list[list[Box]]:
    """Return the boxes outside all packages in two rows: those with cores or devices, then memory without cores.

    The rows are as wide as `width`. Cores and devices of unknown node have frames of their own; empty nodes share one.
    """
    topology = drawing.topology
    packages = {package.id for package in topology.packages}
    nodes = [node for node in drawing.drawn(topology.nodes) if node.package not in packages]
    cores = [core for core in on_node(topology.cores, None) if core.package not in packages]
    wide = replace(drawing, width=drawing.width + 2 * PAD)  # as wide as a package with one node
    large = [*_nodes(wide, filter(_has_cpus, nodes)), *_cores_without_node(wide, cores), *_devices_without_node(wide)]
    return [large, _memory_boxes(drawing, list(filterfalse(_has_cpus, nodes)), width=width)]


def _has_cpus(node: Node) -> bool:
    return bool(node.cpus)


def _memory_boxes(drawing: Drawing, nodes: Sequence[Node], *, width: float) -> list[Box]:
    """Return the nodes without CPUs, and the empty nodes as one box, in columns that fill the width."""
    count = len(nodes) + bool(drawing.empty_nodes)
    most = max(drawing.width, min(NARROW, width))
    one = columns(max(1, count), min(_LEAST_NODE, width), width=width, gap=WIDE_GAP, most=most)
    narrow = replace(drawing, width=one - 2 * PAD)
    return [*_nodes(narrow, nodes), *_empty_nodes(narrow)]


def _devices_without_node(drawing: Drawing) -> list[Box]:
    devices = device_rows(drawing, None)
    heading = Heading(name="node unknown", facts="GPUs and network devices", size=13)
    return [frame(BoxKind.MEMORY_NODE, devices, headings=[heading], width=drawing.width)] if any(devices) else []


def _empty_nodes(drawing: Drawing) -> list[Box]:
    nodes = drawing.empty_nodes
    if not nodes:
        return []
    name = counted(len(nodes), "empty node")
    headings = [Heading(name=name, facts="no memory", size=13), Heading(facts=str(nodes))]
    least, title = drawing.width + 2 * PAD, title_text("nodes without memory and devices", str(nodes))
    return [frame(BoxKind.MEMORY_NODE, [], headings=headings, width=0, least=least, title=title, key="empty")]


def _package(drawing: Drawing, package: int) -> Box:
    topology = drawing.topology
    nodes = nodes_of(topology, package)
    lost_cores = [core for core in on_node(topology.cores, None) if core.package == package]
    num_cores = sum(len(on_node(topology.cores, node.id)) for node in nodes) + len(lost_cores)
    return frame(
        BoxKind.PACKAGE,
        [[*_nodes(drawing, drawing.drawn(nodes)), *_cores_without_node(drawing, lost_cores)]],
        headings=[Heading(name=f"package {package}", facts=counted(num_cores, "core"), size=14)],
        width=drawing.page_width - 2 * PAD,
        least=180,
        key=f"package {package}",
    )


def _nodes(drawing: Drawing, nodes: Iterable[Node]) -> list[Box]:
    """Return a frame per node; nodes that share an L3 cache are in the cache's frame."""
    around: dict[CpuSet, list[Box]] = {}
    for node in nodes:
        l3 = drawing.l3_of.get(node.id)
        around.setdefault(CpuSet({node.id}) if l3 is None else l3.nodes, []).append(_node(drawing, node))
    return [_cached(drawing, numbers, boxes) for numbers, boxes in around.items()]


def _cached(drawing: Drawing, numbers: CpuSet, boxes: list[Box]) -> Box:
    """Return the frame of the cache that spans these nodes, or the node itself."""
    l3 = drawing.l3_of.get(min(numbers))
    if l3 is None:
        return boxes[0]
    num_cores = counted(len(l3.cores), "core")
    return frame(
        BoxKind.CACHE,
        [boxes],
        headings=[Heading(name=f"L3 of nodes {numbers}", facts=num_cores, size=12)],
        width=drawing.page_width - 4 * PAD,
        title=title_text(f"one L3 cache of nodes {numbers}: {num_cores}"),
        key=f"l3 of nodes {numbers}",
    )


def _node(drawing: Drawing, node: Node) -> Box:
    topology, marks = drawing.topology, drawing.marks
    ranks = marks.on(node.cpus)
    allowed = node.id in topology.allowed.nodes
    cpus = f"CPUs {node.cpus}" if node.cpus else ""
    fast = f"fast CPUs {drawing.fast[node.id].cpus}" if node.id in drawing.fast else ""
    facts = joined(kind_of(topology, node), cpus, fast, "" if allowed else "not allowed")
    rows = [
        [_memory(drawing, node)],
        *_rank_rows(ranks, marks.memory.get(node.id, ()), drawing.width),
        _cores_of(drawing, node),
        *device_rows(drawing, node.id),
    ]
    return frame(
        BoxKind.NODE if node.kind is NodeKind.CPU else BoxKind.MEMORY_NODE,
        rows,
        headings=[Heading(name=f"node {node.id}", facts=facts, size=13)],
        width=drawing.width,
        title=title_text(f"node {node.id}", facts, memory(node), rank_names(ranks)),
        key=f"node{node.id}",
        off=not allowed,
    )


def _cores_of(drawing: Drawing, node: Node) -> list[Box]:
    return core_groups(drawing, on_node(drawing.topology.cores, node.id), spanned=node.id in drawing.l3_of)


def _memory(drawing: Drawing, node: Node) -> Box:
    """Return the size, with a bar if the used part is known."""
    facts = memory(node) or "size unknown"
    return frame(
        BoxKind.PLAIN,
        [_memory_bar(node, drawing.width)],
        headings=[Heading(name="memory", facts=facts)],
        width=drawing.width,
        least=drawing.width,
        pad=0,
        title=title_text(f"memory of node {node.id}: {facts}"),
    )


def _memory_bar(node: Node, width: float) -> list[Box]:
    if not node.memory_bytes or node.free_bytes is None:
        return []
    used_share = min(1.0, max(0.0, 1 - node.free_bytes / node.memory_bytes))
    used = Box(kind=BoxKind.USED, width=used_share * width, height=_BAR)
    return [Box(kind=BoxKind.MEMORY, width=width, height=_BAR, children=(used,))]


def _rank_rows(on_cores: Ranks, in_memory: Ranks, width: float) -> list[list[Box]]:
    """Return the ranks on the node's cores and in its memory, in one row if they are the same."""
    if on_cores == in_memory:
        return [_rank_row("cores and memory of", on_cores, width)]
    return [_rank_row("cores of", on_cores, width), _rank_row("memory of", in_memory, width)]


def _rank_row(what: str, ranks: Ranks, width: float) -> list[Box]:
    if not ranks:
        return []
    if len(ranks) > _MOST_CHIPS:
        return [paragraph(f"{what} {rank_names(ranks)}", width=width, size=10, ink=Ink.DIM)]
    return [paragraph(what, width=width, size=10, ink=Ink.DIM), *map(chip, ranks)]


def _cores_without_node(drawing: Drawing, cores: Sequence[Core]) -> list[Box]:
    if not cores:
        return []
    groups = core_groups(drawing, cores)
    heading = Heading(name="cores of unknown node", size=13)
    return [frame(BoxKind.NODE, [groups], headings=[heading], width=drawing.width)]
