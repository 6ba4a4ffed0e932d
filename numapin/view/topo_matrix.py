"""A topology as a matrix.

What is wider than the width continues in a block below, with the names of the rows again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.text import counted
from numapin.topology.nics import adapters
from numapin.view.machine import UNKNOWN_LINK, empty_nodes, known, link_meanings, link_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.topology.model import Node, Topology

_MOST: Final = 64  # rows: more do not fit on a screen, and the time grows with the square
_GAP: Final = 2  # columns between columns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A row: all names of a GPU or a network device, the first of which heads its column."""

    names: tuple[str, ...]
    cpus: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A heading and the cells below it."""

    heading: str
    cells: Sequence[str]
    right: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells)))


def topo_matrix(topology: Topology, *, width: int) -> Group:
    """Return the device matrix, a legend of the words in it, and the node distances."""
    devices = list(_devices(topology))
    empty = empty_nodes(topology)  # a Grace host has 28 or more
    nodes = [node for node in topology.nodes if node.id not in empty]
    notes = (*_cut(len(devices), "devices"), *_cut(len(nodes), "nodes"), *_note(empty))
    return Group(*_device_parts(topology, devices[:_MOST], width), Text(""), *_distances(nodes[:_MOST], width), *notes)


def _device_parts(topology: Topology, devices: Sequence[_Device], width: int) -> tuple[Table | Text | Group, ...]:
    """Return the matrix and its legend."""
    if not devices:
        return (Text("no GPU and no NIC"),)
    words = _words(topology, devices)
    columns = [
        *(_Column(heading=device.names[0], cells=cells) for device, cells in zip(devices, words, strict=True)),
        _Column(heading="CPUs", cells=[device.cpus for device in devices]),
        _Column(heading="node", cells=[device.node for device in devices]),
    ]
    names = _Column(heading="", cells=["/".join(device.names) for device in devices])
    return *_blocks(names, columns, width), Text(""), _legend(set(chain.from_iterable(words)))


def _devices(topology: Topology) -> Iterator[_Device]:
    for gpu in topology.gpus:
        yield _Device(names=(gpu.label,), cpus=str(gpu.cpus or ""), node=known(gpu.node, unknown="?"))
    for adapter in adapters(topology.nics):
        yield _Device(names=adapter.names, cpus="", node=known(adapter.node, unknown="?"))


def _words(topology: Topology, devices: Sequence[_Device]) -> list[list[str]]:
    """Return the word for the link between each device and every other one."""
    places = range(len(devices))
    words = link_words(topology, [device.names for device in devices])
    words |= {frozenset((place,)): "X" for place in places}
    return [[words.get(frozenset((row, column)), UNKNOWN_LINK) for row in places] for column in places]


def _blocks(names: _Column, columns: Sequence[_Column], width: int) -> Iterator[Table | Text]:
    """Yield tables of as many columns as fit, each with the names; a name or cell alone too wide is folded."""
    names_width = min(names.width, max(width // 2, 1))
    left = max(width - names_width - _GAP, 1)
    for number, block in enumerate(_split(columns, left)):
        if number:
            yield Text("")
        yield _table(names, names_width, block, left)


def _split(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Divide columns into blocks that fit, in order."""
    blocks: list[list[_Column]] = []
    used = 0
    for column in columns:
        used += column.width + _GAP
        if not blocks or used - _GAP > width:
            blocks.append([])
            used = column.width + _GAP
        blocks[-1].append(column)
    return blocks


def _table(names: _Column, names_width: int, columns: Sequence[_Column], left: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(names.heading, width=names_width, overflow="fold")
    for column in columns:
        table.add_column(
            Text(column.heading, overflow="fold"),
            width=min(column.width, left),
            overflow="fold",
            justify="right" if column.right else "left",
        )
    for name, *cells in zip(names.cells, *(column.cells for column in columns), strict=True):
        table.add_row(Text(name, style="bold"), *cells)
    return table


def _legend(words: set[str]) -> Group:
    """Return the meaning of the words that the matrix has."""
    return Group(*(Text(f"  {word:8}{meaning}", style="dim") for word, meaning in link_meanings(words)))


def _cut(number: int, what: str) -> list[Text]:
    """Return a note if only the first of several things are shown."""
    text = f"the first {_MOST} of {number} {what}; all of them: numapin topo --json"
    return [Text(text, style="dim")] if number > _MOST else []


def _distances(nodes: Sequence[Node], width: int) -> Iterator[Table | Text]:
    columns = [
        _Column(
            heading=str(other.id),
            cells=[known(node.distances.get(other.id), unknown="?") for node in nodes],
            right=True,
        )
        for other in nodes
    ]
    return _blocks(_Column(heading="node distances", cells=[str(node.id) for node in nodes]), columns, width)


def _note(empty: CpuSet) -> list[Text]:
    """Return a note on the nodes that the distances leave out."""
    text = f"without {counted(len(empty), 'empty node')} {empty}; their distances: numapin topo --json"
    return [Text(text, style="dim")] if empty else []
