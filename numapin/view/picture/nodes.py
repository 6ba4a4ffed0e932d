"""Packages and NUMA nodes as boxes. Pure.

Comes in: a `Topology` and where the ranks are. Goes out: one frame a package with its nodes, and frames for what has no
known package or node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.topology.model import NodeKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, Label, columns, frame
from numapin.view.picture.cores import Scale, core_groups, scale_of
from numapin.view.picture.devices import Links, chip, device_rows, links_of
from numapin.view.picture.text import title_text
from numapin.view.words import NODE_KINDS, memory, rank_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Core, Node, Topology
    from numapin.view.marks import Marks, Ranks

WIDTH: Final = 1400
_ONE_NODE, _TWO_NODES, _MORE_NODES = 616, 460, 320  # of which four share a row
_LEAST_NODE: Final = 236
WIDE_GAP: Final = 12  # between what stands on the page itself
_MOST_CHIPS: Final = 128  # of a node; more are named in one line
_BAR: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What every part of the picture needs; `width` is that of a node's inside."""

    topology: Topology
    marks: Marks
    links: Links
    scale: Scale
    width: float
    empty_nodes: CpuSet

    @classmethod
    def of(cls, topology: Topology, marks: Marks) -> Drawing:
        """Choose the width of nodes by their number."""
        count = len(topology.cpu_nodes)
        width = _ONE_NODE if count < 2 else _TWO_NODES if count == 2 else _MORE_NODES
        return cls(
            topology=topology,
            marks=marks,
            links=links_of(topology),
            scale=scale_of(len(topology.cpus)),
            width=width,
            empty_nodes=_empty(topology),
        )


def _empty(topology: Topology) -> CpuSet:
    """Return the nodes of no memory, cores and devices, such as a GB200 keeps for MIG: they are shown as one."""
    used = {part.node for part in topology.gpus} | {part.node for part in topology.nics}
    used |= {core.node for core in topology.cores}
    return CpuSet(n.id for n in topology.nodes if not n.cpus and n.memory_bytes == 0 and n.id not in used)


def package_boxes(drawing: Drawing) -> list[Box]:
    """Return a frame a package, with its nodes, and those of its cores of which the node is not known."""
    topology = drawing.topology
    return [
        _package(
            drawing,
            f"package {package.id}",
            [node for node in topology.nodes if node.package == package.id],
            [core for core in topology.cores if core.node is None and core.package == package.id],
        )
        for package in topology.packages
    ]


def elsewhere(drawing: Drawing, *, width: float) -> list[list[Box]]:
    """Return what is in no package, in rows of that width: what has cores or devices, and below it what has memory.

    Cores and devices of no known node are frames of their own; empty nodes are one.
    """
    topology = drawing.topology
    known = {package.id for package in topology.packages}
    nodes = [node for node in topology.nodes if node.package not in known and node.id not in drawing.empty_nodes]
    cores = [core for core in topology.cores if core.node is None and core.package not in known]
    wide = replace(drawing, width=drawing.width + 2 * PAD)  # as wide as a package with one node
    large = [_node(wide, node) for node in nodes if node.cpus] + _cores_without_node(wide, cores) + _lost_devices(wide)
    without = [node for node in nodes if not node.cpus]
    count = len(without) + bool(drawing.empty_nodes)
    one = columns(max(1, count), _LEAST_NODE, width=width, gap=WIDE_GAP, most=drawing.width)
    narrow = replace(drawing, width=one - 2 * PAD)
    return [large, [_node(narrow, node) for node in without] + _empty_nodes(narrow)]


def _lost_devices(drawing: Drawing) -> list[Box]:
    devices = device_rows(drawing.topology, drawing.marks, drawing.links, None, width=drawing.width)
    heading = Heading(name="node unknown", facts="GPUs and network devices", size=13)
    return [frame(BoxKind.MEMORY_NODE, devices, headings=[heading], width=drawing.width)] if any(devices) else []


def _empty_nodes(drawing: Drawing) -> list[Box]:
    nodes = drawing.empty_nodes
    facts = str(nodes)
    headings = [Heading(name=f"{len(nodes)} empty nodes", facts="no memory", size=13), Heading(facts=facts)]
    least, title = drawing.width + 2 * PAD, title_text("nodes without memory and devices", facts)
    return (
        [frame(BoxKind.MEMORY_NODE, [], headings=headings, width=0, least=least, title=title, key="empty")]
        if nodes
        else []
    )


def _package(drawing: Drawing, name: str, nodes: Sequence[Node], cores: Sequence[Core]) -> Box:
    boxes = [_node(drawing, node) for node in nodes if node.id not in drawing.empty_nodes]
    boxes += _cores_without_node(drawing, cores)
    ids = {node.id for node in nodes}
    num_cores = sum(core.node in ids for core in drawing.topology.cores) + len(cores)
    facts = f"{num_cores} cores"
    return frame(
        BoxKind.PACKAGE,
        [boxes],
        headings=[Heading(name=name, facts=facts, size=14)],
        width=WIDTH - 2 * PAD,
        least=180,
        key=name,
    )


def _node(drawing: Drawing, node: Node) -> Box:
    topology, marks = drawing.topology, drawing.marks
    cores = [core for core in topology.cores if core.node == node.id]
    allowed = node.id in topology.allowed.nodes
    kind, cpus = NODE_KINDS[node.kind], f"CPUs {node.cpus}" if node.cpus else ""
    facts = ", ".join(fact for fact in (kind, cpus, "" if allowed else "not allowed") if fact)
    rows = [
        [_memory(drawing, node)],
        *_rank_rows(marks.on(node.cpus), marks.memory.get(node.id, ())),
        core_groups(cores, topology, marks, drawing.scale, width=drawing.width),
        *device_rows(topology, marks, drawing.links, node.id, width=drawing.width),
    ]
    return frame(
        BoxKind.NODE if node.kind is NodeKind.CPU else BoxKind.MEMORY_NODE,
        rows,
        headings=[Heading(name=f"node {node.id}", facts=facts, size=13)],
        width=drawing.width,
        title=title_text(f"node {node.id}", facts, memory(node), rank_names(marks.on(node.cpus))),
        key=f"node{node.id}",
        off=not allowed,
    )


def _memory(drawing: Drawing, node: Node) -> Box:
    """Return the size, and a bar with the used part where that is known."""
    bars = []
    if node.memory_bytes and node.free_bytes is not None:
        used = min(1.0, max(0.0, 1 - node.free_bytes / node.memory_bytes))
        part = Box(kind=BoxKind.USED, width=used * drawing.width, height=_BAR)
        bars = [Box(kind=BoxKind.MEMORY, width=drawing.width, height=_BAR, children=(part,))]
    facts = memory(node) or "size unknown"
    title = title_text(f"memory of node {node.id}: {facts}")
    return frame(
        BoxKind.PLAIN,
        [bars],
        headings=[Heading(name="memory", facts=facts)],
        width=drawing.width,
        least=drawing.width,
        pad=0,
        title=title,
    )


def _rank_rows(on_cores: Ranks, in_memory: Ranks) -> list[list[Box]]:
    """Return whose cores and whose memory the node's are, in one row where they are the same ranks'."""
    if on_cores == in_memory:
        return [_rank_row("cores and memory of", on_cores)]
    return [_rank_row("cores of", on_cores), _rank_row("memory of", in_memory)]


def _rank_row(what: str, ranks: Ranks) -> list[Box]:
    if len(ranks) > _MOST_CHIPS:
        what = f"{what} {rank_names(ranks)}"
    words = Label(x=0, y=12, text=what, size=10, ink=Ink.DIM)
    chips = ranks if len(ranks) <= _MOST_CHIPS else ()
    return [Box(kind=BoxKind.PLAIN, width=words.width, height=16, labels=(words,)), *map(chip, chips)] if ranks else []


def _cores_without_node(drawing: Drawing, cores: Sequence[Core]) -> list[Box]:
    if not cores:
        return []
    groups = core_groups(cores, drawing.topology, drawing.marks, drawing.scale, width=drawing.width)
    return [
        frame(BoxKind.NODE, [groups], headings=[Heading(name="cores of no known node", size=13)], width=drawing.width)
    ]
