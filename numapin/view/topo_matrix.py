"""A topology as a matrix; what is wider than the width continues in a block below, with the names of the rows."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.text import counted
from numapin.view.machine import UNKNOWN_LINK, empty_nodes, known, link_meanings, link_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import JustifyMethod

    from numapin.topology.model import Topology

_MOST: Final = 64  # rows: more do not fit on a screen, and the time grows with the square
_GAP: Final = 2  # columns between columns


def topo_matrix(topology: Topology, *, width: int) -> Group:
    """Return the device matrix, a legend of the words in it, and the node distances."""
    # A row for each GPU and network device: its names, the first of which heads its column, its CPUs and its node.
    rows = [
        *(((gpu.label,), str(gpu.cpus or ""), known(gpu.node, unknown="?")) for gpu in topology.gpus),
        *((adapter.names, "", known(adapter.node, unknown="?")) for adapter in topology.nic_devices),
    ]
    parts: list[Table | Text] = [] if rows else [Text("no GPU and no NIC")]
    if rows:
        names, cpus, nodes = zip(*rows[:_MOST], strict=True)
        places = range(len(names))
        known_words = link_words(topology, names) | {frozenset((place,)): "X" for place in places}
        words = [[known_words.get(frozenset((row, column)), UNKNOWN_LINK) for row in places] for column in places]
        columns = [(of_device[0], *cells) for of_device, cells in zip(names, words, strict=True)]
        columns += [("CPUs", *cpus), ("node", *nodes)]
        parts += [*_blocks(("", *map("/".join, names)), columns, width), Text("")]
        meanings = link_meanings(set(chain.from_iterable(words)))
        parts += (Text(f"  {word:8}{meaning}", style="dim") for word, meaning in meanings)

    empty = empty_nodes(topology)  # a Grace host has 28 or more
    all_nodes = [node for node in topology.nodes if node.id not in empty]
    shown = all_nodes[:_MOST]
    distances = [
        (str(other.id), *(known(node.distances.get(other.id), unknown="?") for node in shown)) for other in shown
    ]
    heads = ("node distances", *(str(node.id) for node in shown))
    notes = [
        f"the first {_MOST} of {number} {what}; all of them: numapin topo --json"
        for number, what in ((len(rows), "devices"), (len(all_nodes), "nodes"))
        if number > _MOST
    ]
    if empty:
        notes.append(f"without {counted(len(empty), 'empty node')} {empty}; their distances: numapin topo --json")
    blocks = _blocks(heads, distances, width, justify="right")
    return Group(*parts, Text(""), *blocks, *(Text(note, style="dim") for note in notes))


def _blocks(
    names: Sequence[str], columns: Sequence[Sequence[str]], width: int, *, justify: JustifyMethod = "left"
) -> Iterator[Table | Text]:
    """Yield tables of as many columns as fit, each with the names; a name or cell alone too wide is folded.

    The first of the names, and of each column, is the heading.
    """
    names_width = min(max(map(len, names)), max(width // 2, 1))
    left = max(width - names_width - _GAP, 1)
    blocks: list[list[Sequence[str]]] = []
    used = 0
    for column in columns:
        column_width = max(map(len, column))
        used += column_width + _GAP
        if not blocks or used - _GAP > left:
            blocks.append([])
            used = column_width + _GAP
        blocks[-1].append(column)
    for number, block in enumerate(blocks):
        if number:
            yield Text("")
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(names[0], width=names_width, overflow="fold")
        for column in block:
            column_width = min(max(map(len, column)), left)
            table.add_column(Text(column[0], overflow="fold"), width=column_width, overflow="fold", justify=justify)
        for name, *cells in zip(names[1:], *(column[1:] for column in block), strict=True):
            table.add_row(Text(name, style="bold"), *cells)
        yield table
