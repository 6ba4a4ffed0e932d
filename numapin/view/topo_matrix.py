"""A topology as a matrix. Pure.

Comes in: a `Topology`. Goes out: links between GPUs and NICs with CPU and NUMA affinity, in the format of
`nvidia-smi topo -m`, and the distances between nodes.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numapin.topology.model import Topology

_MOST: Final = 64  # rows: more do not fit on a screen, and the time grows with the square
_LEGEND: Final = (
    ("NV#", "bonded set of # NVLinks"),
    ("PSB", "on one board"),
    ("PIX", "at most one PCIe switch"),
    ("PXB", "several PCIe switches, but no host bridge"),
    ("PHB", "a PCIe host bridge"),
    ("NODE", "between PCIe host bridges of one NUMA node"),
    ("SYS", "between NUMA nodes"),
    ("?", "unknown on this machine"),
)


def topo_matrix(topology: Topology) -> Group:
    """Return the device matrix, a legend of the words in it, and the node distances."""
    num_devices = len(topology.gpus) + len(topology.nics)
    cuts = (*_cut(num_devices, "devices"), *_cut(len(topology.nodes), "nodes"))
    return Group(*_device_parts(topology), Text(""), _distances(topology), *cuts)


def _device_parts(topology: Topology) -> tuple[Table | Text | Group, ...]:
    """Return the matrix and its legend."""
    rows = list(_device_rows(topology))[:_MOST]
    if not rows:
        return (Text("no GPU and no NIC"),)
    names = [name for name, _, _ in rows]
    words = _link_words(topology, names)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", *names, "CPUs", "node"):
        table.add_column(heading, no_wrap=heading != "CPUs", overflow="fold")
    for (name, cpus, node), cells in zip(rows, words, strict=True):
        table.add_row(Text(name, style="bold"), *cells, cpus, node)
    return table, Text(""), _legend(set(chain.from_iterable(words)))


def _device_rows(topology: Topology) -> Iterator[tuple[str, str, str]]:
    """Yield name, local CPUs and node of each device."""
    for gpu in topology.gpus:
        yield gpu.label, str(gpu.cpus or ""), known(gpu.node, unknown="?")
    for nic in topology.nics:
        yield nic.name, "", known(nic.node, unknown="?")


def _link_words(topology: Topology, names: list[str]) -> list[list[str]]:
    """Return the word for the link between each device and every other one."""
    words = {frozenset((link.a, link.b)): link.kind for link in topology.links}
    words |= {frozenset((name,)): "X" for name in names}
    return [[words.get(frozenset((name, other)), "?") for other in names] for name in names]


def _legend(words: set[str]) -> Group:
    """Return the meaning of the words that the matrix has."""
    used = {"NV#" if word.startswith("NV") else word for word in words}
    return Group(*(Text(f"  {word:5}{meaning}", style="dim") for word, meaning in _LEGEND if word in used))


def _cut(number: int, what: str) -> list[Text]:
    """Return a note if only the first of several things are shown."""
    text = f"the first {_MOST} of {number} {what}; all of them: numapin topo --json"
    return [Text(text, style="dim")] if number > _MOST else []


def _distances(topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node distances")
    nodes = topology.nodes[:_MOST]
    for node in nodes:
        table.add_column(str(node.id), justify="right", no_wrap=True)
    for node in nodes:
        row = (str(node.distances.get(other.id, "?")) for other in nodes)
        table.add_row(Text(str(node.id), style="bold"), *row)
    return table
