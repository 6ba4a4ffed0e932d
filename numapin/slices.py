"""One task's part of a plan, where something else started the tasks. Pure.

Comes in: a `Task`, with a plan that was made once or with the machine as this task may use it. Goes out: the `RankPlan`
of this task, and what the user should know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numapin import cpulist
from numapin.errors import UsageError
from numapin.request import Bind

if TYPE_CHECKING:
    from numapin.plan import Plan, RankPlan
    from numapin.request import Request
    from numapin.tasks import Task
    from numapin.topology.model import Gpu, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one task gets; `warnings` are about the whole host, for one of its tasks to say, `notes` for the curious."""

    rank: RankPlan
    source: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# --- of a plan that is there -----------------------------------------------------------------------------------------


def slice_of(plan: Plan, task: Task, *, source: str, only_gpu: str | None = None) -> Slice:
    """Return the task's rank of a plan: that of `only_gpu`, the UUID of the one GPU that it sees, else by local rank.

    Raises UsageError where the plan has no such rank or GPU.
    """
    again = "make it again for this job: numapin plan --nproc-per-node N --json"
    planned = {rank.local_rank: rank for rank in plan.ranks}
    if only_gpu is not None and any(rank.gpu for rank in plan.ranks):
        planned = {rank.local_rank: rank for rank in plan.ranks if _uuid(rank).startswith(only_gpu)}
        if not planned:
            raise UsageError(
                f"{source} has no rank on GPU {only_gpu}, which is the only one that this task sees", again
            )
    rank = planned.get(task.rank)
    if rank is None and only_gpu is not None and planned:
        rank = list(planned.values())[task.rank % len(planned)]
    if rank is None:
        raise UsageError(f"{source} is for ranks {cpulist.render(planned) or 'none'}; this is {task}", again)
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


# --- of a plan that is made for this task ----------------------------------------------------------------------------


def has_own_cpus(own: frozenset[int], *, launcher: frozenset[int] | None, limit: int | None, size: int | None) -> bool:
    """Say whether the CPUs of this task are not those of its neighbours, too.

    They are its own where the launcher has more, and enough to give each of `size` tasks as many. `limit` is what the
    resource manager says that it gave to all of them. `launcher` None is unknown.
    """
    if launcher is None or not own < launcher:
        return False
    total = len(launcher) if limit is None else min(limit, len(launcher))
    return size is None or len(own) * size <= total


def plan_task(topology: Topology, request: Request, task: Task, *, own_cpus: bool) -> Slice:
    """Plan for the tasks of this host inside what is allowed, and return this task's part.

    With `own_cpus` the plan is for this task alone. A task that sees one GPU uses that one, whatever its rank. Raises
    what `make_plan` raises, and UsageError where the number of tasks matters and is unknown.
    """
    from numapin.plan import inexact_warnings, make_plan

    allowed = cpulist.render(topology.allowed.cpus)
    notes: tuple[str, ...] = ()
    if own_cpus:
        source = f"made here, for this task alone: CPUs {allowed} are its own"
        made, index = make_plan(topology, _alone(topology, request, task)), 0
    else:
        size, notes = _size(topology, request, task)
        source = f"made here, for {size} tasks on CPUs {allowed}"
        made, index = make_plan(topology, _among(topology, request, task, size)), task.rank
    rank = replace(made.ranks[index], local_rank=task.rank)
    inexact = inexact_warnings(made.ranks)
    warnings = tuple(text for text in made.warnings if text not in inexact)
    return Slice(rank=rank, source=source, warnings=warnings, notes=notes)


def _alone(topology: Topology, request: Request, task: Task) -> Request:
    alone = replace(request, num_ranks=1)
    if request.gpus:
        return replace(alone, gpus=(request.gpus[task.rank % len(request.gpus)],))
    if not topology.visible_gpus:
        return alone
    gpu = topology.visible_gpus[task.rank % len(topology.visible_gpus)]
    return replace(alone, rank_gpus=(None if gpu.cuda_index is None else gpu.index,))


def _among(topology: Topology, request: Request, task: Task, size: int) -> Request:
    visible = topology.visible_gpus
    among = replace(request, num_ranks=size)
    if request.gpus or len(visible) != 1:
        return among
    return replace(among, rank_gpus=tuple(gpu.index for gpu in _gpus_of_all(topology, visible[0], task, size)))


def _gpus_of_all(topology: Topology, own: Gpu, task: Task, size: int) -> tuple[Gpu, ...]:
    """Return the GPUs of all tasks, of which this one sees its own only.

    That they are in order, one a task, is believed where it fits this task's; else all are counted as on this GPU, so
    that whatever is split is split into enough parts.
    """
    in_order = topology.gpus[:size]
    fits = len(in_order) == size and in_order[task.rank] == own
    return in_order if fits else (own,) * size


def _size(topology: Topology, request: Request, task: Task) -> tuple[int, tuple[str, ...]]:
    """Return the number of tasks; where nobody told, one per GPU. Raises UsageError where that cannot be."""
    if task.size is not None:
        return task.size, ()
    seen = len(request.gpus) if request.gpus else len(topology.visible_gpus)
    assumed = seen if seen > 1 else len(topology.gpus)
    if task.rank < assumed:
        return assumed, (f"assumed: {assumed} tasks on this host, one per GPU; nobody told, see --local-size",)
    if request.bind is Bind.NONE:
        return task.rank + 1, ()
    told = " and ".join(task.told_by)
    raise UsageError(
        f"how many tasks share this host is unknown: {told}, and there are {assumed} GPUs",
        "say it: numapin exec --local-size N -- command",
    )
