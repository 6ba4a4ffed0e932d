"""The facts of the picture as HTML tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.printable import printable
from numapin.topology.nics import adapters
from numapin.view.structure import empty_nodes
from numapin.view.words import (
    address,
    joined,
    kind_of,
    known,
    model_name,
    on_node,
    own_nic_name,
    pcie_link,
    policy,
    size_of,
    torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Core, Gpu, Node, Topology
    from numapin.topology.nics import NearestNics
    from numapin.view.marks import Marks

_LONGEST: Final = 500  # characters of a cell
_NODE_HEADINGS: Final = (
    *("node", "kind", "package", "CPUs", "memory", "free", "GPUs", "NICs"),
    *("ranks on CPUs", "ranks in memory"),
)
_RANK_HEADINGS: Final = ("rank", "GPU", "NIC", "node", "CPUs", "memory", "threads", "as requested", "reason")
_GPU_HEADINGS: Final = ("GPU", "in torch", "model", "PCI address", "UUID", "link", "nearest NICs", "node from", "rank")


def nodes_table(topology: Topology, marks: Marks) -> str:
    """Return the nodes with their CPUs, memory, devices and ranks.

    Empty nodes share a row, and the last row has the devices of unknown node.
    """
    empty = empty_nodes(topology)
    rows = [_node_row(topology, marks, node) for node in topology.nodes if node.id not in empty]
    if empty:
        rows.append(_sparse_row(node=str(empty), kind="empty", memory="0.0 GiB"))
    gpus, nics = _device_cells(topology, None)
    if gpus or nics:
        rows.append(_sparse_row(node="unknown", GPUs=gpus, NICs=nics))
    return f"<h2>Nodes</h2>\n{_table('The picture as a table: the parts of each NUMA node', _NODE_HEADINGS, rows)}"


def _node_row(topology: Topology, marks: Marks, node: Node) -> tuple[str, ...]:
    return (
        str(node.id),
        kind_of(topology, node) or "CPUs",
        known(node.package),
        str(node.cpus),
        size_of(node.memory_bytes),
        size_of(node.free_bytes),
        *_device_cells(topology, node.id),
        cpu_set.render(marks.on(node.cpus)),
        cpu_set.render(marks.memory.get(node.id, ())),
    )


def _sparse_row(**cells: str) -> tuple[str, ...]:
    """Return a row of these cells, by their headings; the others are blank."""
    return tuple(cells.get(heading, "") for heading in _NODE_HEADINGS)


def _device_cells(topology: Topology, node: int | None) -> tuple[str, str]:
    """Return the GPUs and the network devices of a node; None: of unknown node."""
    gpus, nics = on_node(topology.gpus, node), on_node(adapters(topology.nics), node)
    return ", ".join(gpu.label for gpu in gpus), ", ".join(nic.name for nic in nics)


def plan_table(plan: Plan | None) -> str:
    """Return each rank's binding and the reason for it; "" without a plan."""
    return f"<h2>Ranks</h2>\n{ranks_table(plan)}\n" if plan else ""


def ranks_table(plan: Plan) -> str:
    """Return each rank's binding and the reason for it, without a heading."""
    return _table("The binding of each rank, and why", _RANK_HEADINGS, map(_rank_row, plan.ranks))


def _rank_row(rank: RankPlan) -> tuple[str, ...]:
    return (
        str(rank.local_rank),
        f"gpu{rank.gpu.index}" if rank.gpu else "",
        joined(own_nic_name(rank), rank.nics_reason or "", separator=": "),
        known(rank.node),
        str(rank.cpus),
        policy(rank),
        str(rank.num_threads),
        "yes" if rank.exact else "no",
        rank.reason,
    )


def node_details(topology: Topology, marks: Marks) -> str:
    """Return each node's GPUs, cores and distances; empty nodes have a note."""
    empty = empty_nodes(topology)
    nodes = (node for node in topology.nodes if node.id not in empty)
    nearest = topology.nearest_nics
    parts = [_details(topology, marks, node, nearest) for node in nodes]
    if empty:
        parts.append(f"<p>Empty nodes: {empty}. Their distances: <code>numapin topo --json</code></p>")
    return "\n".join(("<h2>Details</h2>", *parts))


def _details(topology: Topology, marks: Marks, node: Node, nearest: Mapping[int, NearestNics]) -> str:
    """Return a node's GPUs, cores and distances, folded."""
    gpus = [_gpu_row(gpu, marks, nearest.get(gpu.index)) for gpu in on_node(topology.gpus, node.id)]
    cores = [_core_row(core, marks) for core in on_node(topology.cores, node.id)]
    distances = [(str(other), str(distance)) for other, distance in sorted(node.distances.items())]
    tables = (
        _table("GPUs", _GPU_HEADINGS, gpus),
        _table("Cores", ("core", "CPUs", "L3 group", "ranks"), cores),
        _table("Distances", ("to node", "distance"), distances),
    )
    return f"<details><summary>node {node.id}</summary>\n{''.join(tables)}</details>"


def _gpu_row(gpu: Gpu, marks: Marks, nearest: NearestNics | None) -> tuple[str, ...]:
    return (
        gpu.label,
        torch_name(gpu),
        model_name(gpu),
        address(gpu),
        known(gpu.uuid),
        pcie_link(gpu.pcie),
        f"{', '.join(nearest.names)}: {nearest.reason}" if nearest else "",
        known(gpu.node_source),
        cpu_set.render(marks.gpus.get(gpu.index, ())),
    )


def _core_row(core: Core, marks: Marks) -> tuple[str, ...]:
    return str(core.id), str(core.cpus), known(core.l3), cpu_set.render(marks.on(core.cpus))


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(_row(row) for row in rows)
    if not body:
        return ""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    name = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def _row(texts: Sequence[str]) -> str:
    rest = "".join(f"<td>{text_of(text)}</td>" for text in texts[1:])
    return f'<tr><th scope="row">{text_of(texts[0])}</th>{rest}</tr>'


def text_of(text: str) -> str:
    """Return any text as HTML; a very long one is cut."""
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"))
