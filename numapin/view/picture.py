"""The picture of a machine as SVG: sockets, nodes, cores, PCIe switches with their devices, NVLink, and ranks.

Boxes are measured from the leaves up and placed from the top down. GPUs are the outermost parts of their node, so that
a line leads from each to the bar of their NVLink: below a single row of sockets, or between two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from html import escape
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted, printable
from numapin.errors import UsageError
from numapin.topology.model import Gpu, NodeKind
from numapin.topology.nics import Adapter
from numapin.view.machine import (
    PcieGroup,
    address,
    buses,
    devices_on,
    distances,
    gpu_of_memory,
    joined,
    kind_of,
    machine_view,
    memory,
    model_name,
    nic_state,
    own_nic,
    pcie_link,
    pcie_rate,
    pcie_tree,
    rank_names,
    short_pci,
    torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Core, Node, Topology
    from numapin.view.machine import Bus, Device, MachineView, Ranks

PAD: Final = 8
GAP: Final = 8
WIDE: Final = 1400  # a row of sockets; wider ones get a row each
_TEXT: Final = 300  # a heading or a device's name, and characters of a title; longer ones are cut
_BAR: Final = 22
_SMALL: Final = 9  # the size of most texts, which need not say it
_MOST: Final = 256  # nodes and ranks: more take seconds, and are too small to see
_MOST_CHIPS: Final = 128  # of a node; more ranks are named in one line


class BoxKind(StrEnum):
    """The meaning of a box; in SVG, its class."""

    MACHINE = "machine"
    SOCKET = "socket"
    NODE = "node"
    MEMORY_NODE = "memnode"
    L3 = "l3"  # cores that share an L3 cache; also cores of unknown cache, or of one that spans nodes
    CORE = "core"
    CPU = "cpu"
    SWITCH = "switch"
    GPU = "gpu"
    NIC = "nic"
    BUS = "bus"
    MEMORY = "memory"
    USED = "used"
    CHIP = "chip"
    SHARE = "share"  # one rank's part of a band over cores that several ranks share
    PLAIN = "plain"


_ENDS_WITH_DEVICES: Final = (BoxKind.NODE, BoxKind.MEMORY_NODE, BoxKind.SWITCH)


class Ink(StrEnum):
    """The look of a label; in SVG, its class."""

    STRONG = "strong"
    PLAIN = ""
    DIM = "dim"
    ON_RANK = "on"


# --- text of a known width -------------------------------------------------------------------------------------------

# Widths in em, for the widest of the common sans-serif fonts, DejaVu Sans and Verdana.
_NARROW: Final = frozenset(" !'(),-./:;I[]`fijlrt|·")
_BROAD: Final = frozenset("#%&+<=>@GMNOQWmw~…")
_BOLD: Final = 1.13


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return an upper bound on the width of a text, in the unit of the font size."""
    narrow = sum(char in _NARROW for char in text)
    broad = sum(char in _BROAD for char in text)
    other = sum(not char.isascii() and char not in _BROAD and char not in _NARROW for char in text)
    upper = sum("A" <= char <= "Z" and char not in _BROAD and char != "I" for char in text)
    rest = len(text) - narrow - broad - other - upper
    return (0.42 * narrow + broad + 1.3 * other + 0.78 * upper + 0.65 * rest) * size * (_BOLD if bold else 1)


def fit(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Return a text in visible characters, cut to a width with "…" at the end; "" if not even two of them fit."""
    shown = printable(text[: max(0, int(width)) + 1])  # every character is at least one unit wide
    if len(shown) == len(text) and width_of(shown, size, bold=bold) <= width:
        return shown
    while shown and width_of(f"{shown}…", size, bold=bold) > width:
        shown = shown[:-1]
    return f"{shown.rstrip(' ,-')}…" if len(shown) > 1 else ""


# --- boxes -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Label:
    """One line of text. `x` is its left end, or its middle if `centered`; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    ink: Ink = Ink.PLAIN
    centered: bool = False

    @property
    def width(self) -> float:
        """The width that the text needs at most."""
        return width_of(self.text, self.size, bold=self.ink is Ink.STRONG)


@dataclass(slots=True, kw_only=True)
class Box:
    """A rectangle in its parent. One rank colors it; `off`: it may not be used; `idle`: no rank has it."""

    kind: BoxKind
    width: float = 0
    height: float = 0
    x: float = 0
    y: float = 0
    key: str = ""
    labels: list[Label] = field(default_factory=list)
    children: list[Box] = field(default_factory=list)
    ranks: Ranks = ()
    off: bool = False
    idle: bool = False

    def walk(self, x: float = 0, y: float = 0) -> Iterator[tuple[Box, float, float]]:
        """Yield the box and all boxes inside, each with its place on the page."""
        x, y = x + self.x, y + self.y
        yield self, x, y
        for child in self.children:
            yield from child.walk(x, y)

    def stretch(self, height: float) -> None:
        """Make the box this high, if it is lower, so that devices stay at its lower end: a GPU moves there."""
        extra = height - self.height
        if extra <= 0:
            return
        if self.kind is BoxKind.GPU:
            self.y += extra
            return
        self.height = height
        tops = [child.y for child in self.children]
        for child in self.children:
            if self.kind is BoxKind.SOCKET and child.y == max(tops):
                child.stretch(child.height + extra)
            elif self.kind in _ENDS_WITH_DEVICES and child.y > min(tops):
                child.y += extra

    def mirror(self) -> None:
        """Turn the parts of a socket, node or switch upside down: devices are at the upper end."""
        if self.kind in (BoxKind.SOCKET, *_ENDS_WITH_DEVICES):
            for child in self.children:
                child.y = self.height - child.y - child.height
                child.mirror()


def frame(
    kind: BoxKind,
    rows: Iterable[Sequence[Box]],
    *,
    pad: float = PAD,
    gap: float = GAP,
    least: float = 0,
    key: str = "",
    off: bool = False,
) -> Box:
    """Return a box around rows of boxes; those of a row become equally high."""
    box = Box(kind=kind, key=key, off=off)
    right, y = 0.0, pad
    for row in filter(None, rows):
        height = max(child.height for child in row)
        x = pad
        for child in row:
            child.x, child.y = x, y
            child.stretch(height)
            x += child.width + gap
        box.children += row
        right, y = max(right, x - gap), y + height + gap
    box.width = max(least, right + pad)
    box.height = y - (gap if box.children else 0) + pad
    return box


def rows_within(boxes: Iterable[Box], width: float, *, gap: float = GAP) -> list[list[Box]]:
    """Return boxes in rows of this width; a wider box has a row of its own."""
    rows: list[list[Box]] = []
    right = math.inf
    for box in boxes:
        right += gap + box.width
        if right > width:
            rows.append([])
            right = box.width
        rows[-1].append(box)
    return rows


def best_rows(boxes: Sequence[Box], *, goal: float, most: float, gap: float = GAP) -> list[list[Box]]:
    """Return boxes in rows whose ratio of width to height is near the goal, with few empty places in the last row."""
    if not boxes:
        return []
    width, height = max(box.width for box in boxes) + gap, max(box.height for box in boxes) + gap

    def cost(columns: int) -> float:
        num_rows = -(-len(boxes) // columns)
        empty = 1 - len(boxes) / (num_rows * columns)
        return abs(math.log(columns * width / (num_rows * height * goal))) + 4 * empty

    columns = min(range(1, max(1, min(len(boxes), int((most + gap) // width))) + 1), key=cost)
    return [list(boxes[start : start + columns]) for start in range(0, len(boxes), columns)]


def _width(row: Sequence[Box], gap: float = GAP) -> float:
    return sum(box.width + gap for box in row) - gap


def words(*lines: tuple[str, str, float], most: float = _TEXT) -> Box:
    """Return lines of text, each a name in bold, then facts, and a size; what is wider than `most` is cut."""
    box = Box(kind=BoxKind.PLAIN)
    for name, facts, size in lines:
        x = 0.0
        for text, text_size, ink in ((name, size, Ink.STRONG), (facts, min(size, 11), Ink.DIM)):
            if shown := fit(text, most - x, text_size, bold=ink is Ink.STRONG):
                label = Label(x=x, y=box.height + size, text=shown, size=text_size, ink=ink)
                box.labels.append(label)
                box.width = max(box.width, math.ceil(x + label.width))
                x += label.width + size * 0.6
        box.height += math.ceil(size * 1.45)  # whole numbers take less space in the file
    return box


class CellSize(NamedTuple):
    """The size of a cell, and of the text in it; a font of 0 means no text."""

    width: float
    height: float
    font: float


def cell(kind: BoxKind, text: str, size: CellSize, *, ink: Ink = Ink.PLAIN, ranks: Ranks = (), key: str = "") -> Box:
    """Return a box with a short text in its middle; a text that does not fit is left out."""
    box = Box(kind=kind, width=size.width, height=size.height, ranks=ranks, key=key)
    font = size.font
    if font and (shown := fit(text, size.width - 2, font, bold=ink is Ink.STRONG)):
        x, y = size.width / 2, round(size.height / 2 + font * 0.36)
        box.labels.append(Label(x=x, y=y, text=shown, size=font, ink=ink, centered=True))
    return box


def _chip(rank: int, *, exact: bool = True) -> Box:
    """Return a rank's name in its color, with a star if it did not get all that was requested."""
    text = f"rank {rank}" if exact else f"rank {rank} *"
    size = CellSize(math.ceil(width_of(text, 10)) + 10, 16, 10)
    return cell(BoxKind.CHIP, text, size, ink=Ink.ON_RANK, ranks=(rank,), key=f"rank{rank}")


def _band(ranks: Ranks, width: float) -> list[Box]:
    """Return a band with the color of each rank that shares the cores below; nothing for fewer than two."""
    if len(ranks) < 2:
        return []
    one = width / len(ranks)
    parts = [Box(kind=BoxKind.SHARE, width=one, height=5, x=one * at, ranks=(rank,)) for at, rank in enumerate(ranks)]
    return [Box(kind=BoxKind.PLAIN, width=width, height=5, children=parts)]


# --- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """The context of all parts of a picture: machine, ranks, sizes of devices and CPU cells."""

    machine: MachineView
    inexact: Collection[int]
    cpu: CellSize
    device_width: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The outermost box, the lines from GPUs to the bars (x, top, bottom), and the machine in words."""

    box: Box
    lines: tuple[tuple[float, float, float], ...]
    title: str
    description: str


def lay_out(topology: Topology, plan: Plan | None = None) -> Picture:
    """Return the picture. Raises UsageError for a plan of another machine, or too many nodes or ranks."""
    ranks = plan.ranks if plan else ()
    for number, what, hint in (
        (len(topology.nodes), "a machine of {} nodes", "show it with: numapin topo --format tree"),
        (len(ranks), "a plan of {} ranks", "show it as a tree: numapin topo --plan FILE"),
    ):
        if number > _MOST:
            subject = what.format(number)
            raise UsageError(f"{subject} does not fit into a picture, which shows {_MOST} at most", hint)
    machine, num_cpus, num_allowed = machine_view(topology, plan), len(topology.cpus), len(topology.allowed.cpus)
    # The more CPUs, the smaller their cells; beyond 640 there is no space for text.
    few_cpus = CellSize(46, 18, 11) if num_cpus <= 64 else CellSize(32, 14, _SMALL)
    drawing = _Drawing(
        machine=machine,
        inexact={rank.local_rank for rank in ranks if not rank.exact},
        cpu=few_cpus if num_cpus <= 640 else CellSize(14, 6, 0),
    )
    devices: list[Device] = [*topology.gpus, *topology.nic_devices]
    drawing = replace(drawing, device_width=max((_device(drawing, device).width for device in devices), default=0))

    name, planned = topology.host or topology.source, f"Plan: {plan}".partition("\n")[0] if plan else ""
    size = joined(
        counted(len(topology.packages), "socket") if topology.packages else "",
        counted(len(topology.nodes), "NUMA node"),
        counted(len(topology.gpus), "GPU"),
        counted(len(topology.cores), "core"),
        counted(num_cpus, "CPU"),
        "" if num_cpus == num_allowed else f"{num_allowed} allowed ({topology.allowed.cpus})",
    )
    model = f"{len(topology.gpus)} x {machine.model}" if machine.model else ""
    facts = (size, joined(model, planned, separator=" · "))

    rows = rows_within(_blocks(drawing), WIDE)
    inner = max([560, *map(_width, rows)])
    above, below = rows, list[list[Box]]()
    sockets = frame(BoxKind.MACHINE, rows)
    drawn = {box.key for box, _, _ in sockets.walk()}  # a machine file may have a GPU on a node of memory alone
    bars = [bus for bus in buses(topology) if drawn.issuperset(gpu.label for gpu in bus.gpus)]
    if len(rows) == 2 and bars:  # the bars are between the rows, and the GPUs of both are next to them
        above, below = rows[:1], rows[1:]
        for box in rows[1]:
            box.mirror()
    rows = [
        [words((name, "", 16), *(("", fact, 11) for fact in facts if fact), most=inner)],
        *above,
        *_bars(bars, sockets, inner),
        *below,
        *rows_within(_memory_boxes(drawing), inner),
        [words(*(("", text, 10) for text in distances(topology)), most=inner)],
        *rows_within(_legend(sockets, plan), inner, gap=20),
    ]
    box = frame(BoxKind.MACHINE, rows, gap=12, least=inner + 2 * PAD)
    return Picture(
        box=box,
        lines=tuple(_lines(bars, box)),
        title=f"Topology of {printable(name[:_TEXT])}",
        description=printable(f"{size}. {planned}".strip()[:_TEXT]),
    )


def _blocks(drawing: _Drawing) -> list[Box]:
    """Return the sockets, and frames for nodes and parts without one."""
    topology, sockets = drawing.machine.topology, {package.id for package in drawing.machine.topology.packages}

    def parts(nodes: Iterable[Node], lost_cores: Sequence[Core]) -> list[Box]:
        """Return a frame per node, and one for cores of unknown node."""
        found = [_node(drawing, node) for node in nodes]
        if lost_cores:
            head = [words(("cores of unknown node", "", 13))]
            rows = [head, *_core_rows(drawing, lost_cores, wanted=_TEXT)]
            found.append(frame(BoxKind.NODE, rows))
        return found

    blocks = []
    for package in topology.packages:
        nodes = [node for node in topology.nodes if node.package == package.id and node.id not in drawing.machine.empty]
        cores = [core for core in topology.cores if core.package == package.id]
        boxes = parts(nodes, [core for core in cores if core.node is None])
        head = words((f"socket {package.id}", counted(len(cores), "core"), 14))
        rows = [[head], *rows_within(boxes, WIDE - 2 * PAD)]
        blocks.append(frame(BoxKind.SOCKET, rows, key=f"socket {package.id}"))
    lost_nodes = [node for node in topology.cpu_nodes if node.package not in sockets]
    blocks += parts(lost_nodes, [core for core in topology.cores if core.node is None and core.package not in sockets])
    if devices := devices_on(topology, None):
        head = words(("node unknown", "GPUs and network devices", 13))
        blocks.append(frame(BoxKind.MEMORY_NODE, [[head], *_device_rows(drawing, pcie_tree(topology, devices))]))
    return blocks


def _node(drawing: _Drawing, node: Node) -> Box:
    """Return a node: its name, memory, ranks and cores, and below them its devices."""
    topology, places = drawing.machine.topology, drawing.machine.places
    allowed = node.id in topology.allowed.nodes
    on_cores, in_memory = places.on(node.cpus), places.memory.get(node.id, ())
    devices = _device_rows(drawing, pcie_tree(topology, devices_on(topology, node.id)))
    width = max([_TEXT, *map(_width, devices)])
    own_cores = [core for core in topology.cores if core.node == node.id]
    others_l3s = {core.l3 for core in topology.cores if core.node != node.id}
    cores = _core_rows(drawing, own_cores, wanted=width, others_l3s=others_l3s)
    width = max([width, *map(_width, cores)])
    cpus = f"CPUs {node.cpus}" if node.cpus else ""
    fast, banned = drawing.machine.fast.get(node.id, ""), "" if allowed else "not allowed"
    facts, size = joined(kind_of(topology, node), cpus, fast, banned), memory(node) or "size unknown"
    rows = [[words((f"node {node.id}", facts, 13), ("memory", size, 10), most=width)]]
    if node.memory_bytes and node.free_bytes is not None:
        share = min(1.0, max(0.0, 1 - node.free_bytes / node.memory_bytes))
        used = Box(kind=BoxKind.USED, width=share * width, height=8)
        rows.append([Box(kind=BoxKind.MEMORY, width=width, height=8, children=[used])])
    held = [("cores of", on_cores), ("memory of", in_memory)]
    for what, ranks in [("cores and memory of", on_cores)] if on_cores == in_memory else held:
        if len(ranks) > _MOST_CHIPS:
            rows.append([words(("", f"{what} {rank_names(ranks)}", 10), most=width)])
        elif ranks:
            rows += rows_within([words(("", what, 10)), *map(_chip, ranks)], width)
    return frame(
        BoxKind.NODE if node.kind is NodeKind.CPU else BoxKind.MEMORY_NODE,
        [[frame(BoxKind.PLAIN, [*rows, *cores], pad=0)], *devices],
        key=f"node{node.id}",
        off=not allowed,
    )


def _core_rows(
    drawing: _Drawing, cores: Sequence[Core], *, wanted: float, others_l3s: Collection[int | None] = ()
) -> list[list[Box]]:
    """Return the L3 groups in rows, the cores of unknown L3 last; a single one is about as wide as `wanted`.

    Cores that share an L3 cache with those of other nodes, as with sub-NUMA clustering, are a group without a cache.
    Ranks are named where they differ: on groups of different ranks, and on cores if the cores of a group differ.
    """
    by_l3: dict[int | None, list[Core]] = {}
    for core in cores:
        by_l3.setdefault(None if core.l3 in others_l3s else core.l3, []).append(core)
    groups = sorted(by_l3.items(), key=lambda item: math.inf if item[0] is None else item[0])
    cpus_of = {l3: CpuSet(chain.from_iterable(core.cpus for core in group)) for l3, group in groups}
    on = drawing.machine.places.on
    differ = len(set(map(on, cpus_of.values()))) > 1
    boxes = []
    for l3, group in groups:
        ranks, cpus = on(cpus_of[l3]), str(cpus_of[l3])
        is_mixed = any(on(core.cpus) != ranks for core in group)
        cells = [_core(drawing, core, named=is_mixed) for core in group]
        most = wanted - 2 * PAD if len(groups) == 1 and wanted > _TEXT else WIDE - 6 * PAD
        area = sum(cell.width * cell.height for cell in cells)
        inner = best_rows(cells, goal=3.0 if most > wanted else most * most / area, most=most, gap=4)
        width = _width(inner[0], 4)
        name = "cores" if l3 is None else "L3"
        lines = [(name, cpus, 10.0)]
        if ranks and differ and not is_mixed:
            lines.append(("", rank_names(ranks), 10.0))
        rows = [[words(*lines, most=max(width, 130))], [] if is_mixed else _band(ranks, width), *inner]
        boxes.append(frame(BoxKind.L3, rows, gap=4))
    return best_rows(boxes, goal=1.6, most=WIDE - 4 * PAD)


def _core(drawing: _Drawing, core: Core, *, named: bool) -> Box:
    """Return the core, with one row per CPU; if `named`, the first row has the names of its ranks."""
    places, size = drawing.machine.places, drawing.cpu
    ranks = places.on(core.cpus)
    banned = core.cpus - drawing.machine.topology.allowed.cpus
    rows = []
    if named:
        rows = [[cell(BoxKind.PLAIN, f"r{cpu_set.render(ranks)}" if ranks else "", size, ink=Ink.STRONG)]]
    for cpu in sorted(core.cpus):
        own = places.cpus.get(cpu, ())
        is_idle = bool(places.cpus) and not own and cpu not in banned
        ink = Ink.DIM if is_idle else Ink.PLAIN
        if len(own) == 1:
            ink = Ink.ON_RANK
        box = cell(BoxKind.CPU, str(cpu), size, ink=ink, ranks=own, key=f"cpu{cpu}")
        box.off, box.idle = cpu in banned, is_idle
        rows.append([box])
    if named:
        rows.append(_band(ranks, size.width))
    return frame(BoxKind.CORE, rows, pad=0, gap=0, key=f"core{core.id}")


def _device_rows(drawing: _Drawing, parts: Sequence[PcieGroup | Device]) -> list[list[Box]]:
    """Return the devices of a node in their PCIe tree: NICs first, then GPUs, so that nothing is below a GPU."""
    with_gpus: list[Box] = []
    others: list[Box] = []
    for part in parts:
        if isinstance(part, PcieGroup):
            rows = [[words((part.name, "", 10))], *_device_rows(drawing, part.parts)]
            box = frame(BoxKind.SWITCH, rows)
            (with_gpus if any(isinstance(device, Gpu) for device in part.devices) else others).append(box)
        else:
            (with_gpus if isinstance(part, Gpu) else others).append(_device(drawing, part))
    below = rows_within(with_gpus, WIDE - 4 * PAD)
    return [*rows_within(others, max(map(_width, below), default=3 * _TEXT)), *below]


def _device(drawing: _Drawing, device: Device) -> Box:
    """Return the box of a NIC; or of a GPU, with its ranks and its memory node below its facts."""
    topology, width = drawing.machine.topology, drawing.device_width
    if isinstance(device, Adapter):
        facts = joined(short_pci(device.pci or ""), nic_state(device))
        text = words((device.name, "", 11), ("", device.kind.value, 9.5), ("", facts, 9.5))
        return frame(BoxKind.NIC, [[text]], pad=6, least=width, key=f"nic:{device.name}")
    gpu, nearest = device, drawing.machine.nearest_nics.get(device.index)
    rate = pcie_rate(gpu.pcie)
    pcie = joined(pcie_link(gpu), f"{rate:.0f} GB/s" if rate else "")
    mig = counted(len(gpu.mig), "MIG instance") if gpu.mig else ""
    model = "" if drawing.machine.model else model_name(gpu)
    lines = (model, address(gpu), pcie, own_nic(nearest), mig)
    text = words((gpu.label, torch_name(gpu), 11), *(("", line, 9.5) for line in lines if line))
    chips = [_chip(rank, exact=rank not in drawing.inexact) for rank in drawing.machine.places.gpus.get(gpu.index, ())]
    rows = [[text], *rows_within(chips, 150, gap=4)]
    for node in topology.nodes:
        if gpu_of_memory(topology, node) is gpu:
            off, inner = node.id not in topology.allowed.nodes, [[words((f"node {node.id}", memory(node), 10))]]
            rows.append([frame(BoxKind.MEMORY_NODE, inner, pad=4, key=f"node{node.id}", off=off)])
    return frame(BoxKind.GPU, rows, pad=6, gap=4, least=width, key=gpu.label, off=not gpu.visible)


def _memory_boxes(drawing: _Drawing) -> list[Box]:
    """Return the nodes without CPUs outside of all sockets and GPUs, and one box for all empty nodes."""
    topology, empty = drawing.machine.topology, drawing.machine.empty
    packages = {package.id for package in topology.packages}
    boxes = [
        _node(drawing, node)
        for node in topology.nodes
        if not (node.cpus or node.id in empty or node.package in packages or gpu_of_memory(topology, node))
    ]
    if empty:
        text = words((counted(len(empty), "empty node"), f"no memory: {empty}", 13), most=WIDE)
        boxes.append(frame(BoxKind.MEMORY_NODE, [[text]], key="empty"))
    return boxes


def _legend(sockets: Box, plan: Plan | None) -> list[Box]:
    """Return each sign that these boxes have, with its meaning."""
    boxes = [box for box, _, _ in sockets.walk()]
    cpus, cores = ([box for box in boxes if box.kind is kind] for kind in (BoxKind.CPU, BoxKind.CORE))
    size, num_idle = CellSize(32, 14, 9), sum(box.idle for box in cpus)
    sharers = next((box.ranks for box in cpus if len(box.ranks) > 1), ())
    used = Box(kind=BoxKind.MEMORY, width=32, height=8, children=[Box(kind=BoxKind.USED, width=12, height=8)])
    plain, idle = cell(BoxKind.CPU, "0", size), cell(BoxKind.CPU, "0", size, ink=Ink.DIM)
    has_names = any(child.kind is BoxKind.PLAIN and child.labels for core in cores for child in core.children)
    signs: tuple[tuple[object, Box, str], ...] = (
        (True, plain, "hardware thread (CPU number) in its core"),
        (any(box.kind is BoxKind.MEMORY for box in boxes), used, "memory: used and free"),
        (any(box.off for box in cpus), replace(plain, off=True), "not allowed to this process"),
        (has_names, cell(BoxKind.PLAIN, "r0", size, ink=Ink.STRONG), "rank 0 has this core"),
        (plan and not plan.exact, words(("*", "", 12)), "not exact: see numapin plan"),
        (sharers, _band(sharers or (0, 1), 32)[0], "shared by the ranks whose colors are in the band"),
        (num_idle, replace(idle, idle=True), f"idle: no rank may use it ({counted(num_idle, 'CPU')})"),
    )
    return [frame(BoxKind.PLAIN, [[sign, words(("", text, 10))]], pad=0) for is_used, sign, text in signs if is_used]


def _bars(found: Sequence[Bus], rows: Box, most: float) -> list[list[Box]]:
    """Return the bars of the GPUs' links, each as long as its GPUs are apart; bars share a row if there is space."""
    middles = {box.key: x + box.width / 2 for box, x, _ in rows.walk() if box.kind is BoxKind.GPU}
    lanes: list[Box] = []
    for bus in found:
        ends = [middles[gpu.label] - PAD for gpu in bus.gpus]
        shown = fit(str(bus), most - 2 * PAD, 11, bold=True)
        label = Label(x=PAD, y=15, text=shown, size=11, ink=Ink.STRONG)
        width = min(most, max(max(ends) - min(ends) + 30, label.width + 2 * PAD))
        left = max(0, min(min(ends) - 15, most - width))
        bar = Box(kind=BoxKind.BUS, width=width, height=_BAR, x=left, labels=[label])
        bar.key = f"bus{bus.gpus[0].index}"
        for lane in lanes:
            if all(other.x + other.width + GAP < left or left + width + GAP < other.x for other in lane.children):
                lane.children.append(bar)
                break
        else:
            lanes.append(Box(kind=BoxKind.PLAIN, width=most, height=_BAR, children=[bar]))
    return [[lane] for lane in lanes]


def _lines(found: Sequence[Bus], picture: Box) -> Iterator[tuple[float, float, float]]:
    """Yield the lines from GPUs to their bars; a GPU behind another box has none."""
    areas = [(box, x, y) for box, x, y in picture.walk() if box.kind not in (BoxKind.CPU, BoxKind.CORE, BoxKind.PLAIN)]
    gpus = {box.key: (box, x, y) for box, x, y in areas if box.kind is BoxKind.GPU}
    bars = {box.key: (box, y) for box, _, y in areas if box.kind is BoxKind.BUS}
    for bus in found:
        bar, bar_y = bars[f"bus{bus.gpus[0].index}"]
        for gpu in bus.gpus:
            box, x, y = gpus[gpu.label]
            middle, is_above = x + box.width / 2, y < bar_y
            top, bottom = (y + box.height, bar_y) if is_above else (bar_y + bar.height, y)
            is_hidden = any(
                other_x < middle < other_x + other.width
                and other_y < bottom
                and top < other_y + other.height
                and not (other_y <= y and y + box.height <= other_y + other.height)
                for other, other_x, other_y in areas
                if other.kind is not BoxKind.BUS
            )
            if not is_hidden:
                yield middle, top, bottom


# --- SVG -------------------------------------------------------------------------------------------------------------

# Paul Tol's "light" scheme (https://personal.sron.nl/~pault/) without its gray: for black text on color, and for any
# color vision. Of all orders, this one makes neighbors, which mostly share a node, differ most.
RANK_COLORS: Final = ("#77aadd", "#ee8866", "#ffaabb", "#bbcc33", "#eedd88", "#99ddff", "#44bb99", "#aaaa00")

# name -> light, dark
COLORS: Final = {
    "page": ("#ffffff", "#12161c"),
    "ink": ("#1a212b", "#e9edf2"),
    "dim": ("#4d5866", "#aab5c2"),
    "on": ("#10151b", "#10151b"),
    "socket": ("#f3f5f8", "#1a2028"),
    "node": ("#ffffff", "#222a34"),
    "l3": ("#edf1f5", "#2c3541"),
    "cpu": ("#dbe4ee", "#3d4958"),
    "gpu": ("#e9f4ec", "#1f3529"),
    "nic": ("#f3edf8", "#31273d"),
    "switch": ("#fdf6e3", "#332d1c"),
    "bus": ("#cfe8d5", "#28482f"),
    "line": ("#bfc8d2", "#404c5a"),
    "edge": ("#8593a3", "#6b7b8d"),
    "gpuline": ("#4f9563", "#5aa070"),
    "nicline": ("#9272ad", "#9a7fb3"),
    "switchline": ("#b59a4a", "#8f7c42"),
    "used": ("#7d8fa3", "#8799ad"),
}
_LOOKS: Final = {  # class -> fill, stroke
    "machine": ("page", None),
    "socket": ("socket", "line"),
    "node": ("node", "edge"),
    "memnode": ("node", "edge"),
    "l3": ("l3", None),
    "core": ("cpu", "edge"),
    "cpu": ("cpu", "edge"),
    "switch": ("switch", "switchline"),
    "gpu": ("gpu", "gpuline"),
    "nic": ("nic", "nicline"),
    "bus": ("bus", "gpuline"),
    "memory": ("node", "edge"),
    "used": ("used", None),
    "chip": ("cpu", "edge"),
    "share": ("cpu", None),
    "idle": ("l3", "edge"),
    "off": ("l3", "edge"),
    "again": (None, "ink"),
    "hatched": ("l3", None),
    "hatch": (None, "used"),
    "link": (None, "gpuline"),
    "dim": ("dim", None),
    "on": ("on", None),
}


def style() -> str:
    """Return the rules: light, which printers and programs without media queries use, and dark on dark screens."""

    def looks(dark: int) -> str:
        parts = [f".np text{{fill:{COLORS['ink'][dark]}}}"]
        for name, (fill, stroke) in _LOOKS.items():
            filled = f"fill:{COLORS[fill][dark]};" if fill else ""
            stroked = f"stroke:{COLORS[stroke][dark]}" if stroke else ""
            parts.append(f".np .{name}{{{filled}{stroked}}}")
        return "\n".join(parts)

    ranks = (f".np .c{number}{{fill:{color}}}" for number, color in enumerate(RANK_COLORS))
    shapes = (
        f'.np{{font:{_SMALL}px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}',
        ".np .strong{font-weight:600}.np .mid{text-anchor:middle}.np .memnode,.np .idle{stroke-dasharray:5 3}",
        ".np .cpu{stroke-width:.7}.np .cpu.idle{stroke-dasharray:2 2}.np .link{stroke-width:3}",
        ".np .again{stroke-width:2}",
    )
    after = "\n".join([*ranks, ".np .cpu.off{fill:url(#np-off)}"])
    dark = f"@media screen and (prefers-color-scheme:dark){{\n{looks(1)}\n{after}\n}}"
    return "\n".join([*shapes, looks(0), after, dark])


def svg(topology: Topology, plan: Plan | None = None) -> str:
    """Return an SVG file. Raises UsageError for a plan of another machine, or too many nodes or ranks."""
    drawn = element(lay_out(topology, plan), inside=f"<style>{style()}</style>\n")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn}\n'


def element(picture: Picture, *, inside: str = "") -> str:
    """Return the SVG element; a page that has the style needs none `inside`."""
    width, height = _number(picture.box.width), _number(picture.box.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="np" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(picture.title)}</title><desc>{escape(picture.description)}</desc>",
        f'{inside}<defs><pattern id="np-off" width="4" height="4" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatched" width="4" height="4"/><path class="hatch" d="M0 0V4"/>'
        "</pattern></defs>",
    ]
    bars = [(box, x - box.x, y - box.y) for box, x, y in picture.box.walk() if box.kind is BoxKind.BUS]
    _draw(picture.box, 0, 0, lines)
    lines += [f'<path class="link" d="M{_number(x)} {_number(top)}V{_number(end)}"/>' for x, top, end in picture.lines]
    for bar in bars:  # over the lines to bars behind them
        _draw(*bar, lines)
    return "\n".join([*lines, "</svg>"])


def _draw(box: Box, left: float, top: float, lines: list[str]) -> None:
    """Append the lines of a box in this place and of all boxes inside."""
    left, top = left + box.x, top + box.y
    is_covered = box.kind is BoxKind.CORE and all(child.kind is BoxKind.CPU for child in box.children)
    if box.kind is not BoxKind.PLAIN and not is_covered:
        states = ["off"] * box.off + ["idle"] * box.idle
        if len(box.ranks) == 1:
            turn, color = divmod(box.ranks[0], len(RANK_COLORS))
            states += [f"c{color}"] + ["again"] * (turn % 2)
        classes = " ".join([box.kind.value, *states])
        x, y, width, height = map(_number, (left, top, box.width, box.height))
        if box.kind in _SHARP:  # of which there are hundreds, and a path is shorter
            lines.append(f'<path class="{classes}" d="M{x} {y}h{width}v{height}h-{width}z"/>')
        else:
            lines.append(f'<rect class="{classes}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
    for label in box.labels:
        classes = f"{label.ink.value} mid".strip() if label.centered else label.ink.value
        size = "" if label.size == _SMALL else f' font-size="{label.size:g}"'
        place = f'x="{_number(left + label.x)}" y="{_number(top + label.y)}"{size}'
        lines.append(f'<text class="{classes}" {place}>{escape(label.text)}</text>')
    for child in box.children:
        if child.kind is not BoxKind.BUS:
            _draw(child, left, top, lines)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_SHARP: Final = (BoxKind.CORE, BoxKind.CPU, BoxKind.MEMORY, BoxKind.USED, BoxKind.SHARE)
