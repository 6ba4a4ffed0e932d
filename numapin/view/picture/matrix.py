"""Node distances and device links as small matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from numapin.topology.model import LinkKind
from numapin.topology.nics import adapters
from numapin.view.picture.boxes import PAD, Box, BoxKind, CellSize, Heading, Ink, Label, cell, frame
from numapin.view.picture.text import title_text, width_of, wrapped
from numapin.view.structure import UNKNOWN_LINK, gpu_link, link_meanings, link_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numapin.topology.model import Node, Topology

    Entry = Callable[[int, int], tuple[str, float]]  # row, column -> text, shade

_MOST: Final = 48  # rows: more are too small to read, and the time grows with the square
_HEIGHT: Final = 16
_NARROWEST: Final = 34
_WIDEST: Final = 72
_WIDEST_ROW: Final = 120
_GAP: Final = 2
_DARKEST: Final = 0.6


def distance_panel(nodes: Sequence[Node], *, width: float) -> list[Box]:
    """Return the kernel's distances between nodes, at most `width` wide; no panel for a single node."""
    known = sorted({distance for node in nodes for distance in node.distances.values()}, reverse=True)
    shades = {distance: _shade(rank, len(known)) for rank, distance in enumerate(known)}

    def entry(row: int, column: int) -> tuple[str, float]:
        distance = nodes[row].distances.get(nodes[column].id)
        return ("?", 0) if distance is None else (str(distance), shades[distance])

    return _panel("Node distances", ["10 is local"], [(str(node.id),) for node in nodes], entry, width)


def link_panel(topology: Topology, *, width: float) -> list[Box]:
    """Return the links between devices, in the words of nvidia-smi, at most `width` wide; no panel without links."""
    devices = _linked_devices(topology)
    words = link_words(topology, devices)

    def entry(row: int, column: int) -> tuple[str, float]:
        if row == column:
            return "", 0
        word = words.get(frozenset((row, column)), UNKNOWN_LINK)
        return word, _link_shade(word)

    num_pairs = len(devices) * (len(devices) - 1) // 2
    unknown = {UNKNOWN_LINK} if len(words) < num_pairs else set()
    legend = [f"{word} {meaning}" for word, meaning in link_meanings({*words.values(), *unknown})]
    return _panel("Links", legend, devices, entry, width)


def _linked_devices(topology: Topology) -> list[tuple[str, ...]]:
    """Return the names of all GPUs and of each network device that has a link; nothing if there are no links."""
    linked = {link.a for link in topology.links} | {link.b for link in topology.links}
    gpus = [(gpu.label,) for gpu in topology.gpus] if linked else []
    return [*gpus, *(adapter.names for adapter in adapters(topology.nics) if linked.intersection(adapter.names))]


def _link_shade(word: str) -> float:
    """Return the shade of a link; the GPUs' own links are the nearest."""
    farthest_first = [*reversed(LinkKind)]
    num_kinds = len(farthest_first) + 1
    if gpu_link(word):
        return _shade(num_kinds - 1, num_kinds)
    return _shade(farthest_first.index(LinkKind(word)), num_kinds) if word in farthest_first else 0


def _shade(place: int, count: int) -> float:
    """Return the strength of the color for the `place`-th of `count` values; the last is the darkest."""
    return _DARKEST * place / max(1, count - 1)


def _panel(name: str, legend: Sequence[str], names: Sequence[tuple[str, ...]], entry: Entry, width: float) -> list[Box]:
    """Return the matrix below its name and legend, in blocks of columns that fit; nothing for fewer than two names.

    All names of a device are at its row, and the first one is at its column. Too large a matrix is a note.
    """
    if len(names) < 2:
        return []
    if len(names) > _MOST:
        return [_too_large(name, len(names), width)]
    entries = {entry(row, column)[0] for row, column in product(range(len(names)), repeat=2)}
    texts = _Names(rows=["/".join(own) for own in names], columns=[own[0] for own in names], entries=entries)
    inner = width - 2 * PAD
    headings = [Heading(name=name, size=12), *(Heading(facts=text, size=9.5) for text in legend)]
    wanted = _width_of_headings(name, legend) + 2 * PAD
    rows = list(_rows(texts, entry, inner))
    return [frame(BoxKind.PANEL, rows, headings=headings, width=inner, gap=_GAP, least=min(wanted, width))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names of rows and columns and the texts of entries, and how large they are."""

    rows: Sequence[str]
    columns: Sequence[str]
    entries: Collection[str]

    @property
    def row_size(self) -> CellSize:
        return _size(self.rows, most=_WIDEST_ROW)

    @property
    def column_size(self) -> CellSize:
        return _size(self.columns, most=_WIDEST, entries=self.entries)


def _size(names: Iterable[str], *, most: float, entries: Iterable[str] = ()) -> CellSize:
    widest = max([*(width_of(text, 9, bold=True) for text in names), *(width_of(text, 9) for text in entries)])
    return CellSize(width=min(most, max(_NARROWEST, widest + 4)), height=_HEIGHT, font=9)


def _rows(names: _Names, entry: Entry, width: float) -> Iterator[list[Box]]:
    """Yield the rows of each block: its columns' names, then each row's name and entries."""
    head, one = names.row_size, names.column_size
    per_block = max(1, int((width - head.width) // (one.width + _GAP)))
    for start in range(0, len(names.columns), per_block):
        block = range(start, min(start + per_block, len(names.columns)))
        if start:
            yield [Box(kind=BoxKind.PLAIN, width=one.width, height=_HEIGHT / 2)]
        yield [_name("", head), *(_name(names.columns[column], one) for column in block)]
        for row, name in enumerate(names.rows):
            yield [_name(name, head), *(_entry(names, row, column, entry, one) for column in block)]


def _too_large(name: str, count: int, width: float) -> Box:
    facts = f"{count} x {count} are too many for a picture; see: numapin topo --format matrix"
    return frame(BoxKind.PANEL, [], headings=[Heading(name=name, facts=facts, size=12)], width=0, least=min(560, width))


def _width_of_headings(name: str, legend: Sequence[str]) -> float:
    return max([width_of(name, 12, bold=True), *(width_of(text, 9.5) for text in legend)])


def _name(text: str, size: CellSize) -> Box:
    """Return a name in bold, in several lines if it is long."""
    lines = wrapped(text, size.width - 2, size.font, bold=True)
    step = size.font * 1.2
    labels = tuple(
        Label(
            x=size.width / 2, y=size.height * 0.7 + step * at, text=line, size=size.font, ink=Ink.STRONG, centered=True
        )
        for at, line in enumerate(lines)
        if line
    )
    height = size.height + step * max(0, len(lines) - 1)
    return Box(kind=BoxKind.PLAIN, width=size.width, height=height, labels=labels)


def _entry(names: _Names, row: int, column: int, entry: Entry, size: CellSize) -> Box:
    text, heat = entry(row, column)
    title = title_text(f"{names.rows[row]} to {names.rows[column]}: {text}") if text else ""
    return replace(cell(BoxKind.HEAT, size, text), heat=heat, title=title)
