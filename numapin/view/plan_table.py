"""A plan as a table. Pure.

Comes in: a `Plan`. Goes out: one compact row a rank, with or without the reasons; or shell lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table

from numapin.base.quoting import quote
from numapin.view.words import policy, shortened

_MOST: Final = 512  # rows: more are a second's work, and nobody reads them

if TYPE_CHECKING:
    from numapin.plan.model import GpuRef, Plan, RankPlan


def plan_table(plan: Plan, *, reasons: bool = False) -> Table:
    """Return a table of rank, GPU, node, CPUs, memory and threads; a star marks a rank that got less than asked."""
    cut = f"the first {_MOST} of {len(plan.ranks)} ranks; all of them: numapin plan --json"
    table = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        caption=cut if len(plan.ranks) > _MOST else None,
        caption_justify="left",
    )
    for heading, right in (("rank", True), ("GPU", False), ("node", True)):
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    table.add_column("CPUs", overflow="fold", ratio=2 if reasons else None)
    table.add_column("memory", no_wrap=True)
    table.add_column("threads", justify="right", no_wrap=True)
    if reasons:
        table.add_column("reason", overflow="fold", ratio=5)
    for rank in plan.ranks[:_MOST]:
        table.add_row(*_cells(rank), *([shortened(rank.reason)] if reasons else []))
    return table


def environment_lines(plan: Plan) -> list[str]:
    """Return one line a rank that a shell can evaluate, for wrappers that bind by other means."""
    return [
        " ".join(
            f"{name}={quote(value)}"
            for name, value in (
                ("LOCAL_RANK", str(rank.local_rank)),
                ("NUMAPIN_GPU", (rank.gpu.uuid or str(rank.gpu.index)) if rank.gpu else ""),
                ("NUMAPIN_CPUS", str(rank.cpus)),
                ("NUMAPIN_MEMORY", rank.memory.value),
                ("NUMAPIN_NODES", str(rank.nodes)),
                ("OMP_NUM_THREADS", str(rank.num_threads)),
            )
        )
        for rank in plan.ranks
    ]


def gpu_cell(gpu: GpuRef | None) -> str:
    """Return a GPU's index and the part of its PCI address that tells it apart."""
    if gpu is None:
        return "-"
    return f"{gpu.index} {gpu.pci.removeprefix('0000:')}" if gpu.pci else str(gpu.index)


def _cells(rank: RankPlan) -> tuple[str, ...]:
    return (
        f"{rank.local_rank}{'' if rank.exact else '*'}",
        gpu_cell(rank.gpu),
        "-" if rank.node is None else str(rank.node),
        str(rank.cpus),
        policy(rank),
        str(rank.num_threads),
    )
