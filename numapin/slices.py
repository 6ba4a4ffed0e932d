"""One task's part of a plan that was made once, where something else started the tasks. Pure.

Comes in: a `Task` and a `Plan`. Goes out: the `RankPlan` of this task, and what the user should know. Reads no machine:
it must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numapin import cpulist
from numapin.errors import UsageError

if TYPE_CHECKING:
    from numapin.plan import Plan, RankPlan
    from numapin.tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one task gets; `warnings` are about the whole host, for one of its tasks to say, `notes` for the curious."""

    rank: RankPlan
    source: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def slice_of(plan: Plan, task: Task, *, source: str, only_gpu: str | None = None) -> Slice:
    """Return the task's rank of a plan: that of `only_gpu`, the UUID of the one GPU that it sees, else by local rank.

    Raises UsageError where the plan has no such rank or GPU.
    """
    again = "make it again for this job: numapin plan --nproc-per-node N --json"
    ranks = plan.ranks if only_gpu is None else tuple(rank for rank in plan.ranks if _uuid(rank).startswith(only_gpu))
    if only_gpu is not None and not ranks:
        raise UsageError(f"{source} has no rank on GPU {only_gpu}, which is the only one that this task sees", again)
    rank = next((rank for rank in ranks if rank.local_rank == task.rank), None)
    if rank is None and only_gpu is not None:
        rank = ranks[task.rank % len(ranks)]
    if rank is None:
        numbers = cpulist.render(rank.local_rank for rank in ranks) or "none"
        raise UsageError(f"{source} is for ranks {numbers}; this is {task}", again)
    differs = task.size is not None and task.size != len(plan.ranks)
    warnings = (f"{source} is for {len(plan.ranks)} ranks, and {task.size} run here",) if differs else ()
    return Slice(rank=replace(rank, local_rank=task.rank), source=source, warnings=warnings)


def _uuid(rank: RankPlan) -> str:
    return (rank.gpu.uuid if rank.gpu else None) or ""


def inside(rank: RankPlan, allowed: frozenset[int]) -> RankPlan:
    """Return the rank with the CPUs that this task may use; where it may use none of the planned, it keeps its own.

    A resource manager that gave fewer CPUs meant it.
    """
    if rank.cpus <= allowed and rank.cpus:
        return rank
    cpus = rank.cpus & allowed or allowed
    lost = cpulist.render(rank.cpus - allowed) or "none"
    why = f"planned CPUs {lost} are not among those that this task was given ({cpulist.render(allowed)})"
    return replace(
        rank, cpus=cpus, num_threads=min(rank.num_threads, len(cpus)), exact=False, reason=f"{rank.reason}; {why}"
    )
