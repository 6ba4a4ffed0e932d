"""Node distances and device links as small matrices. Pure.

Comes in: a `Topology`. Goes out: a panel each, where there is more than one thing to compare; nearer is darker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.model import LinkKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, cell, frame
from numapin.view.picture.text import title_text, width_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numapin.topology.model import Node, Topology

    Entry = Callable[[int, int], tuple[str, float]]  # row, column -> text, share of colour

_MOST: Final = 48  # rows: more are too small to read, and grow with the square
_HEIGHT: Final = 16
_NARROWEST: Final = 34
_WIDEST: Final = 72
_DARKEST: Final = 0.6
_WAYS: Final = {
    LinkKind.SAME_BOARD: "on one board",
    LinkKind.ONE_SWITCH: "one PCIe switch",
    LinkKind.SWITCHES: "several PCIe switches",
    LinkKind.HOST_BRIDGE: "a host bridge",
    LinkKind.SAME_NODE: "between host bridges of one node",
    LinkKind.SYSTEM: "between nodes",
}


def distance_panel(nodes: Sequence[Node]) -> list[Box]:
    """Return the kernel's distances between nodes; none for one node."""
    names = [str(node.id) for node in nodes]
    known = sorted({distance for node in nodes for distance in node.distances.values()}, reverse=True)

    def entry(row: int, column: int) -> tuple[str, float]:
        distance = nodes[row].distances.get(nodes[column].id)
        return ("?", 0) if distance is None else (str(distance), _shade(known.index(distance), len(known)))

    return _panel("Node distances", ["10 is local"], names, entry)


def link_panel(topology: Topology) -> list[Box]:
    """Return how devices that have links reach each other, in the words of nvidia-smi; none without links."""
    kinds = {frozenset((link.a, link.b)): link.kind for link in topology.links}
    linked = {name for pair in kinds for name in pair}
    names = [name for name in (*(g.label for g in topology.gpus), *(n.name for n in topology.nics)) if name in linked]
    order = list(reversed(LinkKind))

    def entry(row: int, column: int) -> tuple[str, float]:
        if row == column:
            return "", 0
        kind = kinds.get(frozenset((names[row], names[column])), "?")
        place = order.index(LinkKind(kind)) if kind in order else len(order) if kind.startswith("NV") else -1
        return kind, _shade(place, len(order) + 1)

    used = [f"{kind} {way}" for kind, way in _WAYS.items() if kind in kinds.values()]
    nvlink = ["NV# NVLinks"] if any(kind.startswith("NV") for kind in kinds.values()) else []
    return _panel("Links", [*nvlink, *used], names, entry)


def _shade(place: int, count: int) -> float:
    """Return the share of colour of the `place`-th of `count` values, the last the darkest."""
    return _DARKEST * max(0, place) / max(1, count - 1)


def _panel(name: str, legend: Sequence[str], names: Sequence[str], entry: Entry) -> list[Box]:
    count = len(names)
    if count < 2:
        return []
    if count > _MOST:
        facts = f"{count} x {count} are too many for a picture; see: numapin topo --format matrix"
        return [frame(BoxKind.PANEL, [], headings=[Heading(name=name, facts=facts, size=12)], width=0, least=560)]
    width = min(_WIDEST, max(_NARROWEST, *(width_of(text, 9, bold=True) + 4 for text in names)))
    rows = [
        [_name("", width), *(_name(text, width) for text in names)],
        *([_name(names[row], width), *_entries(names, row, entry, width)] for row in range(count)),
    ]
    least = max([width_of(name, 12, bold=True), *(width_of(text, 9.5) for text in legend)]) + 2 * PAD
    headings = [Heading(name=name, size=12), *(Heading(facts=text, size=9.5) for text in legend)]
    return [frame(BoxKind.PANEL, rows, headings=headings, width=(count + 1) * (width + 2), gap=2, least=least)]


def _name(text: str, width: float) -> Box:
    return cell(BoxKind.PLAIN, width, _HEIGHT, text, size=9, ink=Ink.STRONG)


def _entries(names: Sequence[str], row: int, entry: Entry, width: float) -> Iterator[Box]:
    for column, name in enumerate(names):
        text, heat = entry(row, column)
        title = title_text(f"{names[row]} to {name}: {text}") if text else ""
        yield replace(cell(BoxKind.HEAT, width, _HEIGHT, text, size=9), heat=heat, title=title)
