"""Node distances and device links as small matrices. Pure.

Comes in: a `Topology`. Goes out: a panel for each if there are at least two things to compare; the nearer, the darker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.model import LinkKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, CellSize, Heading, Ink, cell, frame
from numapin.view.picture.text import title_text, width_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numapin.topology.model import Node, Topology

    Entry = Callable[[int, int], tuple[str, float]]  # row, column -> text, shade

_MOST: Final = 48  # rows: more are too small to read, and the time grows with the square
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
    """Return the kernel's distances between nodes; no panel for a single node."""
    known = sorted({distance for node in nodes for distance in node.distances.values()}, reverse=True)
    shades = {distance: _shade(rank, len(known)) for rank, distance in enumerate(known)}

    def entry(row: int, column: int) -> tuple[str, float]:
        distance = nodes[row].distances.get(nodes[column].id)
        return ("?", 0) if distance is None else (str(distance), shades[distance])

    return _panel("Node distances", ["10 is local"], [str(node.id) for node in nodes], entry)


def link_panel(topology: Topology) -> list[Box]:
    """Return the links between devices, in the words of nvidia-smi; no panel without links."""
    kinds = {frozenset((link.a, link.b)): link.kind for link in topology.links}
    names = _linked_names(topology)

    def entry(row: int, column: int) -> tuple[str, float]:
        if row == column:
            return "", 0
        kind = kinds.get(frozenset((names[row], names[column])), "?")
        return kind, _link_shade(kind)

    return _panel("Links", _link_legend(set(kinds.values())), names, entry)


def _linked_names(topology: Topology) -> list[str]:
    linked = {link.a for link in topology.links} | {link.b for link in topology.links}
    names = (*(gpu.label for gpu in topology.gpus), *(nic.name for nic in topology.nics))
    return list(filter(linked.__contains__, names))


def _link_legend(kinds: set[str]) -> list[str]:
    nvlink = ["NV# NVLinks"] if any(map(_is_nvlink, kinds)) else []
    return [*nvlink, *(f"{kind} {way}" for kind, way in _WAYS.items() if kind in kinds)]


def _is_nvlink(kind: str) -> bool:
    return kind.startswith("NV")


def _link_shade(kind: str) -> float:
    """Return the shade of a link; NVLink is the nearest."""
    farthest_first = [*reversed(LinkKind)]
    num_kinds = len(farthest_first) + 1
    if _is_nvlink(kind):
        return _shade(num_kinds - 1, num_kinds)
    return _shade(farthest_first.index(LinkKind(kind)), num_kinds) if kind in farthest_first else 0


def _shade(place: int, count: int) -> float:
    """Return the strength of the color for the `place`-th of `count` values; the last is the darkest."""
    return _DARKEST * place / max(1, count - 1)


def _panel(name: str, legend: Sequence[str], names: Sequence[str], entry: Entry) -> list[Box]:
    """Return the matrix of `names` below its name and legend; a note if it is too large; nothing for fewer than two."""
    if len(names) < 2:
        return []
    if len(names) > _MOST:
        return [_too_large(name, len(names))]
    widest_name = max(width_of(text, 9, bold=True) for text in names)
    size = CellSize(width=min(_WIDEST, max(_NARROWEST, widest_name + 4)), height=_HEIGHT, font=9)
    return [
        frame(
            BoxKind.PANEL,
            _rows(names, entry, size),
            headings=[Heading(name=name, size=12), *(Heading(facts=text, size=9.5) for text in legend)],
            width=(len(names) + 1) * (size.width + 2),
            gap=2,
            least=_width_of_headings(name, legend) + 2 * PAD,
        )
    ]


def _rows(names: Sequence[str], entry: Entry, size: CellSize) -> Iterator[list[Box]]:
    yield [_name(text, size) for text in ("", *names)]
    for row, name in enumerate(names):
        yield [_name(name, size), *_entries(names, row, entry, size)]


def _too_large(name: str, count: int) -> Box:
    facts = f"{count} x {count} are too many for a picture; see: numapin topo --format matrix"
    return frame(BoxKind.PANEL, [], headings=[Heading(name=name, facts=facts, size=12)], width=0, least=560)


def _width_of_headings(name: str, legend: Sequence[str]) -> float:
    return max([width_of(name, 12, bold=True), *(width_of(text, 9.5) for text in legend)])


def _name(text: str, size: CellSize) -> Box:
    return cell(BoxKind.PLAIN, size, text, ink=Ink.STRONG)


def _entries(names: Sequence[str], row: int, entry: Entry, size: CellSize) -> Iterator[Box]:
    for column, name in enumerate(names):
        text, heat = entry(row, column)
        title = title_text(f"{names[row]} to {name}: {text}") if text else ""
        yield replace(cell(BoxKind.HEAT, size, text), heat=heat, title=title)
