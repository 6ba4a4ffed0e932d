"""A topology as a matrix. Pure.

Comes in: a `Topology`. Goes out: GPU x GPU/NIC links with CPU and NUMA affinity, in the manner of `nvidia-smi topo -m`,
and the distances between nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from numapin.topology.model import Topology

_MOST: Final = 64  # rows: more do not fit on a screen, and take time that grows with the square
_LEGEND: Final = (
    ("NV#", "bonded set of # NVLinks"),
    ("PSB", "on one board"),
    ("PIX", "through at most one PCIe switch"),
    ("PXB", "through several PCIe switches, not a host bridge"),
    ("PHB", "through a PCIe host bridge"),
    ("NODE", "between PCIe host bridges of one NUMA node"),
    ("SYS", "between NUMA nodes"),
    ("?", "not told by this machine"),
)


def topo_matrix(topology: Topology) -> Group:
    """Return the device matrix, the legend of the words in it, and the node distances."""
    devices = Table(box=None, pad_edge=False, header_style="bold")
    names = [*(gpu.label for gpu in topology.gpus), *(nic.name for nic in topology.nics)]
    rows = _rows(topology)
    shown = names[:_MOST]
    for heading in ("", *shown, "CPUs", "node"):
        devices.add_column(heading, no_wrap=heading != "CPUs", overflow="fold")
    words = {frozenset((link.a, link.b)): link.kind for link in topology.links}
    used = set()
    for name, cpus, node in rows[:_MOST]:
        cells = ["X" if other == name else words.get(frozenset((name, other)), "?") for other in shown]
        used |= {"NV#" if word.startswith("NV") else word for word in cells}
        devices.add_row(Text(name, style="bold"), *cells, cpus, node)
    legend = Group(*(Text(f"  {word:5}{meaning}", style="dim") for word, meaning in _LEGEND if word in used))
    parts = (devices, Text(""), legend, Text("")) if names else (Text("no GPU and no NIC"), Text(""))
    cut = (_cut(len(names), "devices"), _cut(len(topology.nodes), "nodes"))
    return Group(*parts, _distances(topology), *(Text(text, style="dim") for text in cut if text))


def _cut(number: int, what: str) -> str:
    """Return what says that not all are shown."""
    return f"the first {_MOST} of {number} {what}; all of them: numapin topo --json" if number > _MOST else ""


def _rows(topology: Topology) -> list[tuple[str, str, str]]:
    gpus = [(gpu.label, "" if gpu.cpus is None else str(gpu.cpus), gpu.node) for gpu in topology.gpus]
    nics = [(nic.name, "", nic.node) for nic in topology.nics]
    return [(name, cpus, "?" if node is None else str(node)) for name, cpus, node in (*gpus, *nics)]


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
