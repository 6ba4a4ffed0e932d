"""A plan that is made for one task, where something else started the tasks. Pure.

Comes in: a `Task`, a `Request`, and the machine as this task may use it. Goes out: the task's `Slice`, and whether its
CPUs are its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.plan.gpus import in_turn
from numapin.plan.make import inexact_warnings, make_plan
from numapin.plan.request import Bind
from numapin.tasks.slice import Slice

if TYPE_CHECKING:
    from numapin.base.cpu_set import CpuSet
    from numapin.plan.request import Request
    from numapin.tasks.identify import Task
    from numapin.topology.model import Gpu, Topology


def has_own_cpus(own: CpuSet, *, launcher: CpuSet | None, limit: int | None, size: int | None) -> bool:
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

    With `own_cpus` the plan is for this task alone. A task that sees one GPU uses that one, whatever its rank. The GPUs
    that --gpus names are those of `settle_gpus`: in `rank_gpus`. Raises what `make_plan` raises, and UsageError where
    the number of tasks matters and is unknown.
    """
    allowed = str(topology.allowed.cpus)
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
    if request.rank_gpus:
        return replace(alone, rank_gpus=(request.rank_gpus[task.rank % len(request.rank_gpus)],))
    if not topology.visible_gpus:
        return alone
    gpu = topology.visible_gpus[task.rank % len(topology.visible_gpus)]
    return replace(alone, rank_gpus=(None if gpu.cuda_index is None else gpu.index,))


def _among(topology: Topology, request: Request, task: Task, size: int) -> Request:
    visible = topology.visible_gpus
    among = replace(request, num_ranks=size)
    if request.rank_gpus:
        return replace(among, rank_gpus=in_turn(request.rank_gpus, size))
    if len(visible) != 1:
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
    seen = len(request.rank_gpus) if request.rank_gpus else len(topology.visible_gpus)
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
