"""A plan as a table. Pure.

Comes in: a `Plan`. Goes out: one row per rank, with or without the reasons; or lines for a shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from numapin.base.quoting import quote
from numapin.view.words import known, policy, shortened

_MOST: Final = 512  # rows: more take a second to draw
_NARROW: Final = ("rank", "GPU", "node")

if TYPE_CHECKING:
    from numapin.plan.model import GpuRef, Plan, RankPlan


def plan_table(plan: Plan, *, reasons: bool = False) -> Table:
    """Return a table of rank, GPU, node, CPUs, memory and threads; a star marks ranks that get less than requested."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption=_legend(plan), caption_justify="left")
    for heading in _NARROW:
        table.add_column(heading, justify="left" if heading == "GPU" else "right", no_wrap=True)
    table.add_column("CPUs", overflow="fold", ratio=2 if reasons else None)
    table.add_column("memory", no_wrap=True)
    table.add_column("threads", justify="right", no_wrap=True)
    if reasons:
        table.add_column("reason", overflow="fold", ratio=5)
    for rank in plan.ranks[:_MOST]:
        table.add_row(*_cells(rank), *([shortened(rank.reason)] if reasons else []))
    return table


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
        lines.append("* less than requested")
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
