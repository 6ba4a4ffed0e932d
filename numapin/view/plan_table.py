"""A plan as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.plan.request import Memory
from numapin.view.machine import known, rank_names, short_pci, shortened

_MOST: Final = 512  # rows: more take a second to draw

_HEADINGS: Final = ("rank", "GPU", "node", "CPUs", "memory", "threads", "NIC")
_LEFT: Final = ("GPU", "CPUs", "memory", "NIC")

if TYPE_CHECKING:
    from numapin.plan.model import GpuRef, Plan, RankPlan


def plan_table(plan: Plan) -> Table:
    """Return a table of rank, GPU, node, CPUs, memory and threads; a star marks ranks that are not exact.

    If the nearest NIC of any rank is known, there is a column of these.
    """
    num_ranks, legend = len(plan.ranks), []
    if not all(rank.exact for rank in plan.ranks[:_MOST]):
        legend.append("* not exact")
    if num_ranks > _MOST:
        legend.append(f"the first {_MOST} of {num_ranks} ranks; all of them: numapin plan --json")
    caption = "\n".join(legend) or None
    table = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    headings = _HEADINGS if any(rank.nics for rank in plan.ranks) else _HEADINGS[:-1]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", overflow="fold")
    for rank in plan.ranks[:_MOST]:
        cells = (
            str(rank.local_rank) + ("" if rank.exact else "*"),
            gpu_cell(rank.gpu),
            known(rank.node, unknown="-"),
            str(rank.cpus).replace(",", ", "),  # so that a long list is broken after commas
            rank.memory.value if rank.memory in (Memory.NONE, Memory.LOCAL) else f"{rank.memory.value} {rank.nodes}",
            str(rank.num_threads),
            shortened(rank.nics[0]) if rank.nics else "",
        )
        table.add_row(*cells[: len(headings)])
    return table


def explained_plan(plan: Plan) -> Group:
    """Return the table, and below it the reasons; ranks with the same reason share a line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    ranks_with: dict[tuple[str, ...], list[int]] = {}  # by the parts of their reasons
    for rank in plan.ranks[:_MOST]:
        ranks_with.setdefault(_parts(rank), []).append(rank.local_rank)
    if not ranks_with:
        return Group(plan_table(plan))
    # What holds for all ranks comes last, if each has more.
    common = [part for part in next(iter(ranks_with)) if all(part in own for own in ranks_with)]
    if len(ranks_with) == 1 or not all(set(own) - set(common) for own in ranks_with):
        common = []
    for own, ranks in ranks_with.items():
        reason = "; ".join(part for part in own if part not in common)
        table.add_row(Text(rank_names(ranks)), Text(shortened(reason)))
    if common:
        table.add_row(Text("all ranks"), Text(shortened("; ".join(common))))
    return Group(plan_table(plan), Text(""), table)


def _parts(rank: RankPlan) -> tuple[str, ...]:
    """Return the parts of a reason without the GPU's name, which the table has, so that ranks of a node share them."""
    reason, nic = rank.reason, f"NIC: {rank.nics_reason}" if rank.nics_reason else ""
    if rank.gpu is not None:
        pci = f" ({rank.gpu.pci})" if rank.gpu.pci else ""
        name = f"GPU {rank.gpu.index}{pci} "
        reason = f"its GPU {reason.removeprefix(name)}" if reason.startswith(name) else reason
    return (*filter(None, reason.split("; ")), *([nic] if nic else []))


def other_warnings(plan: Plan) -> list[str]:
    """Return the warnings that the reasons below the table do not have."""
    known = {part for rank in plan.ranks for part in rank.reason.split("; ")}
    return [
        text
        for text in plan.warnings
        if not (text.startswith("rank") and known.issuperset(text.partition(": ")[2].split("; ")))
    ]


def gpu_cell(gpu: GpuRef | None) -> str:
    """Return a GPU's index and its PCI address without the usual domain."""
    if gpu is None:
        return "-"
    return f"{gpu.index} {short_pci(gpu.pci)}" if gpu.pci else str(gpu.index)
