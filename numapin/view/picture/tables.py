"""What the picture shows, as HTML tables. Pure.

Comes in: a `Topology`, where the ranks are, and a `Plan` or none. Goes out: tables for those who see no picture,
or want the exact facts; those of each node are folded and open by keyboard.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.printable import printable
from numapin.base.sizes import gib
from numapin.view.words import NODE_KINDS, pcie_link, policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.model import Plan
    from numapin.topology.model import Gpu, Node, Topology
    from numapin.view.marks import Marks

_LONGEST: Final = 500  # characters of a cell


def nodes_table(topology: Topology, marks: Marks) -> str:
    """Return the nodes with their CPUs, memory, devices and ranks; the last row is what has no known node."""
    heads = (
        "node",
        "kind",
        "package",
        "CPUs",
        "memory",
        "free",
        "GPUs",
        "NICs",
        "ranks on CPUs",
        "ranks in memory",
    )
    rows = [_node_row(topology, marks, node) for node in topology.nodes]
    lost = (
        [gpu.label for gpu in topology.gpus if gpu.node is None],
        [nic.name for nic in topology.nics if nic.node is None],
    )
    if any(lost):
        rows.append(("unknown", "", "", "", "", "", ", ".join(lost[0]), ", ".join(lost[1]), "", ""))
    return f"<h2>Nodes</h2>\n{_table('The picture as a table: what belongs to each NUMA node', heads, rows)}"


def _node_row(topology: Topology, marks: Marks, node: Node) -> tuple[str, ...]:
    return (
        str(node.id),
        NODE_KINDS[node.kind] or "CPUs",
        "" if node.package is None else str(node.package),
        str(node.cpus),
        "" if node.memory_bytes is None else gib(node.memory_bytes),
        "" if node.free_bytes is None else gib(node.free_bytes),
        ", ".join(gpu.label for gpu in topology.gpus if gpu.node == node.id),
        ", ".join(nic.name for nic in topology.nics if nic.node == node.id),
        cpu_set.render(marks.on(node.cpus)),
        cpu_set.render(marks.memory.get(node.id, ())),
    )


def plan_table(plan: Plan | None) -> str:
    """Return what each rank gets, and why; "" without a plan."""
    if plan is None:
        return ""
    rows = [
        (
            str(rank.local_rank),
            "" if rank.gpu is None else f"gpu{rank.gpu.index}",
            "" if rank.node is None else str(rank.node),
            str(rank.cpus),
            policy(rank),
            str(rank.num_threads),
            "yes" if rank.exact else "no",
            rank.reason,
        )
        for rank in plan.ranks
    ]
    heads = ("rank", "GPU", "node", "CPUs", "memory", "threads", "as asked", "reason")
    return f"<h2>Ranks</h2>\n{_table('What each rank gets, and why', heads, rows)}\n"


def node_details(topology: Topology, marks: Marks) -> str:
    """Return each node's GPUs, cores and distances."""
    return "<h2>Details</h2>\n" + "\n".join(_details(topology, marks, node) for node in topology.nodes)


def _details(topology: Topology, marks: Marks, node: Node) -> str:
    """Return a node's cores, devices and distances, folded; a keyboard opens it."""
    cores = [
        (
            str(core.id),
            str(core.cpus),
            "" if core.l3 is None else str(core.l3),
            cpu_set.render(marks.on(core.cpus)),
        )
        for core in topology.cores
        if core.node == node.id
    ]
    gpus = [_gpu_row(gpu, marks) for gpu in topology.gpus if gpu.node == node.id]
    distances = [(str(other), str(distance)) for other, distance in sorted(node.distances.items())]
    tables = (
        _table("GPUs", ("GPU", "CUDA", "model", "PCI address", "UUID", "link", "node from", "rank"), gpus),
        _table("Cores", ("core", "CPUs", "L3 group", "ranks"), cores),
        _table("Distances", ("to node", "distance"), distances),
    )
    return f"<details><summary>node {node.id}</summary>\n{''.join(tables)}</details>"


def _gpu_row(gpu: Gpu, marks: Marks) -> tuple[str, ...]:
    return (
        gpu.label,
        "" if gpu.cuda_index is None else str(gpu.cuda_index),
        gpu.name or "",
        gpu.pci or "",
        gpu.uuid or "",
        pcie_link(gpu.pcie),
        gpu.node_source.value if gpu.node_source else "",
        cpu_set.render(marks.gpus.get(gpu.index, ())),
    )


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
    """Return a text as HTML, whatever is in it; a very long one is cut."""
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"))
