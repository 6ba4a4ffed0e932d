"""A plan as a table. Pure.

Comes in: a `Plan`. Goes out: one row per rank, with or without the reasons below; or lines for a shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.quoting import quote
from numapin.view.words import known, policy, rank_names, shortened

_MOST: Final = 512  # rows: more take a second to draw

_LEFT: Final = ("GPU", "CPUs", "memory")

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.plan.model import GpuRef, Plan, RankPlan


def plan_table(plan: Plan) -> Table:
    """Return a table of rank, GPU, node, CPUs, memory and threads; a star marks ranks that are not exact."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption=_legend(plan), caption_justify="left")
    for heading in ("rank", "GPU", "node", "CPUs", "memory", "threads"):
        table.add_column(heading, justify="left" if heading in _LEFT else "right", overflow="fold")
    for rank in plan.ranks[:_MOST]:
        table.add_row(*_cells(rank))
    return table


def explained_plan(plan: Plan) -> Group:
    """Return the table, and below it the reasons; ranks with the same reason share a line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for ranks, reason in _reasons(plan.ranks[:_MOST]):
        table.add_row(Text(ranks), Text(reason))
    return Group(plan_table(plan), Text(""), table) if plan.ranks else Group(plan_table(plan))


def _reasons(ranks: Sequence[RankPlan]) -> Iterator[tuple[str, str]]:
    """Yield the ranks that share each reason, and the reason."""
    sharers: dict[str, list[int]] = {}
    for rank in ranks:
        sharers.setdefault(_without_gpu_name(rank), []).append(rank.local_rank)
    for reason, numbers in sharers.items():
        yield rank_names(numbers), shortened(reason)


def _without_gpu_name(rank: RankPlan) -> str:
    """Return the reason without the GPU's name, which the table has, so that ranks of a node have the same reason."""
    if rank.gpu is None:
        return rank.reason
    pci = f" ({rank.gpu.pci})" if rank.gpu.pci else ""
    name = f"GPU {rank.gpu.index}{pci} "
    return f"its GPU {rank.reason.removeprefix(name)}" if rank.reason.startswith(name) else rank.reason


def environment_lines(plan: Plan) -> list[str]:
    """Return one line per rank that a shell can evaluate, for wrappers that bind by other means."""
    return [" ".join(f"{name}={quote(value)}" for name, value in _variables(rank).items()) for rank in plan.ranks]


def _variables(rank: RankPlan) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(rank.local_rank),
        "NUMAPIN_GPU": _gpu_name(rank.gpu),
        "NUMAPIN_CPUS": str(rank.cpus),
        "NUMAPIN_MEMORY": rank.memory.value,
        "NUMAPIN_NODES": str(rank.nodes),
        "OMP_NUM_THREADS": str(rank.num_threads),
    }


def _gpu_name(gpu: GpuRef | None) -> str:
    if gpu is None:
        return ""
    return gpu.uuid or str(gpu.index)


def _legend(plan: Plan) -> str | None:
    """Explain the star if a rank has one, and note if only the first ranks are shown."""
    num_ranks, lines = len(plan.ranks), []
    if not all(rank.exact for rank in plan.ranks[:_MOST]):
        lines.append("* not exact")
    if num_ranks > _MOST:
        lines.append(f"the first {_MOST} of {num_ranks} ranks; all of them: numapin plan --json")
    return "\n".join(lines) or None


def gpu_cell(gpu: GpuRef | None) -> str:
    """Return a GPU's index and its PCI address without the usual domain."""
    if gpu is None:
        return "-"
    return f"{gpu.index} {gpu.pci.removeprefix('0000:')}" if gpu.pci else str(gpu.index)


def _cells(rank: RankPlan) -> tuple[str, ...]:
    return (
        str(rank.local_rank) + ("" if rank.exact else "*"),
        gpu_cell(rank.gpu),
        known(rank.node, unknown="-"),
        str(rank.cpus),
        policy(rank),
        str(rank.num_threads),
    )
