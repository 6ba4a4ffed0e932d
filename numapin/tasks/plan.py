"""A plan for one task, where another launcher started the tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from numapin.base.plural import counted
from numapin.errors import UsageError
from numapin.plan.gpus import in_turn
from numapin.plan.make import plan_and_rank_warnings
from numapin.plan.request import Bind
from numapin.tasks.slice import Slice

if TYPE_CHECKING:
    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import RankPlan
    from numapin.plan.request import Request
    from numapin.tasks.identify import Task
    from numapin.topology.model import Gpu, Topology


def has_own_cpus(own: CpuSet, *, launcher: CpuSet | None, limit: int | None, size: int | None) -> bool:
    """Return whether this task's CPUs are its own, and not shared with its neighbors.

    They are if the launcher has more CPUs than the task, and enough to give every task as many.

    Args:
        own: The CPUs that this task may use.
        launcher: The launcher's CPUs. None: unknown.
        limit: The number of CPUs that the resource manager gave to all tasks. None: unknown.
        size: The number of tasks. None: unknown.

    Returns:
        Whether the CPUs are this task's own.
    """
    if launcher is None or not own < launcher:
        return False
    total = len(launcher) if limit is None else min(limit, len(launcher))
    return size is None or len(own) * size <= total


def plan_task(topology: Topology, request: Request, task: Task, *, own_cpus: bool) -> Slice:
    """Plan for this host's tasks inside the allowed CPUs, and return this task's part.

    A task that sees one GPU uses that one, whatever its rank.

    Args:
        topology: The machine as this task may use it.
        request: The user's options. Its GPUs are settled: `settle_gpus` has put those of --gpus into `rank_gpus`.
        task: This task.
        own_cpus: Whether to plan for this task alone, because its CPUs are its own.

    Returns:
        The task's part.

    Raises:
        UsageError: The number of tasks matters and is unknown, or `make_plan` refuses the request.
    """
    allowed = str(topology.allowed.cpus)
    notes: tuple[str, ...] = ()
    if own_cpus:
        source = f"made here, for this task alone: CPUs {allowed} are its own"
        asked, index = _for_one_task(topology, request, task), 0
    else:
        size, notes = _size(topology, request, task)
        source = f"made here, for {counted(size, 'task')} on CPUs {allowed}"
        asked, index = _for_all_tasks(topology, request, task, size), task.rank
    made, of_ranks = plan_and_rank_warnings(topology, asked)
    rank = _with_nic_doubt(replace(made.ranks[index], local_rank=task.rank), topology, task)
    warnings = tuple(text for text in made.warnings if text not in of_ranks)  # each task reports its own
    return Slice(rank=rank, source=source, warnings=warnings, notes=notes)


def _with_nic_doubt(rank: RankPlan, topology: Topology, task: Task) -> RankPlan:
    """Mark a rank as not exact if its NIC was chosen among equally near ones without the GPUs of other tasks."""
    num_gpus = len(topology.gpus)
    if not _may_share_nic(rank, task, num_gpus):
        return rank
    why = (
        f"--nic-env: this task sees {counted(num_gpus, 'GPU')} of {task.size} tasks, so others may use its NIC; make "
        "one plan for all: numapin plan --nic-env … --json, then numapin exec --plan FILE"
    )
    return replace(rank, exact=False, reason=f"{rank.reason}; {why}")


def _may_share_nic(rank: RankPlan, task: Task, num_gpus: int) -> bool:
    has_choice = bool(rank.nic_env) and len(rank.nics or ()) > 1
    return has_choice and task.size is not None and num_gpus < task.size


def _for_one_task(topology: Topology, request: Request, task: Task) -> Request:
    gpus = request.rank_gpus or tuple(map(_index_if_order_known, topology.visible_gpus))
    rank_gpus = (gpus[task.rank % len(gpus)],) if gpus else request.rank_gpus
    return replace(request, num_ranks=1, rank_gpus=rank_gpus)


def _index_if_order_known(gpu: Gpu) -> int | None:
    """Return a GPU's index; None if the runtime's order is unknown, because the rank's GPU is then unknown too."""
    return None if gpu.cuda_index is None else gpu.index


def _for_all_tasks(topology: Topology, request: Request, task: Task, size: int) -> Request:
    rank_gpus = request.rank_gpus
    visible = topology.visible_gpus
    if rank_gpus:
        rank_gpus = in_turn(rank_gpus, size)
    elif len(visible) == 1:
        rank_gpus = tuple(gpu.index for gpu in _gpus_of_all(topology, visible[0], task, size))
    return replace(request, num_ranks=size, rank_gpus=rank_gpus)


def _gpus_of_all(topology: Topology, own: Gpu, task: Task, size: int) -> tuple[Gpu, ...]:
    """Return the GPUs of all tasks, of which this task sees only its own.

    They are taken to be in order, one per task, if that fits this task's GPU. Otherwise all tasks are counted on this
    GPU, so that shared CPUs are split into enough parts.
    """
    in_order = topology.vendor_gpus[:size]
    fits = len(in_order) == size and in_order[task.rank] == own
    return in_order if fits else (own,) * size


def _size(topology: Topology, request: Request, task: Task) -> tuple[int, tuple[str, ...]]:
    """Return the number of tasks, by default one per GPU, and notes. Raises UsageError if it cannot be that many."""
    if task.size is not None:
        return task.size, ()
    assumed = _assumed_size(topology, request)
    if task.rank < assumed:
        known = "no variable gives the number, see --local-size"
        return assumed, (f"assumed: {counted(assumed, 'task')} on this host, one per GPU; {known}",)
    if request.bind is Bind.NONE:
        return task.rank + 1, ()
    raise _unknown_size(task, assumed)


def _unknown_size(task: Task, assumed: int) -> UsageError:
    settings = " and ".join(task.settings)
    gpus = f"this host has {counted(assumed, 'GPU')}" if assumed else "there is no GPU to count by"
    rank = f" --local-rank {task.rank}" if task.variable is None else ""
    return UsageError(
        f"the number of tasks on this host is unknown: {settings}, and {gpus}",
        f"give it: numapin exec{rank} --local-size N -- command",
    )


def _assumed_size(topology: Topology, request: Request) -> int:
    """Return one task per GPU: of the GPUs that this task sees, or of all if it sees only its own."""
    num_gpus = len(request.rank_gpus or topology.visible_gpus)
    return num_gpus if num_gpus > 1 else len(topology.vendor_gpus)
