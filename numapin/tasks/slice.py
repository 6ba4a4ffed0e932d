"""One task's part of a plan, where another launcher started the tasks: an existing plan, or one that is made here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.text import GPU_PREFIX, counted, uuid_digits
from numapin.errors import UsageError
from numapin.plan.request import Bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import GpuRef, Plan, RankPlan
    from numapin.plan.request import Request
    from numapin.tasks.identify import Task
    from numapin.topology.model import Topology

_PLAN_AGAIN: Final = "numapin plan --nproc-per-node N --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One task's part of a plan."""

    rank: RankPlan
    source: str  # the name of the plan for messages
    warnings: tuple[str, ...] = ()  # about the whole host, so only one of its tasks prints them
    notes: tuple[str, ...] = ()  # for --verbose


# --- of an existing plan: this must be quick, so the machine is not read ---------------------------------------------


def slice_of(
    plan: Plan, task: Task, *, source: str, visible: str | None = None, ask: Callable[[], GpuRef | None] = lambda: None
) -> Slice:
    """Return the task's rank of a plan, under the task's own number. Raises UsageError if the plan has no such rank.

    A task that sees one GPU, `visible`, gets a rank on that GPU; any other task gets the rank of its number. If no rank
    is on that GPU, the number decides too, and the rank is not exact. `ask` returns NVML's description of the GPU; it
    is called only if the plan does not have its UUID.
    """
    # The UUID identifies the GPU on one host; the PCI address is the same on all hosts of a kind. An index says
    # nothing: in a container or cgroup of its own, every task has index 0.
    on_gpu: tuple[RankPlan, ...] = ()
    gpu: GpuRef | None = None
    if visible is not None:
        on_gpu = _ranks_called(plan, visible)
        gpu = None if on_gpu else ask()
        if gpu is not None:
            on_gpu = _ranks_called(plan, gpu.uuid or "")
            if not on_gpu and gpu.pci is not None:
                on_gpu = tuple(rank for rank in plan.ranks if rank.gpu and rank.gpu.pci == gpu.pci)

    rank = next((rank for rank in on_gpu or plan.ranks if rank.local_rank == task.rank), None)
    if rank is None and on_gpu:
        rank = on_gpu[task.rank % len(on_gpu)]  # the ranks of one GPU take turns
    if rank is None:
        planned = cpu_set.render(rank.local_rank for rank in plan.ranks) or "none"
        raise UsageError(f"{source} is for ranks {planned}; this is {task}", f"plan again for this job: {_PLAN_AGAIN}")
    if visible is not None and not on_gpu:
        name = (gpu and (gpu.uuid or gpu.pci)) or visible
        why = f"{source} has no rank on GPU {name}, the only one that this task sees, so the rank was chosen by its"
        reason = f"{rank.reason}; {why} number; make the plan on this kind of host: {_PLAN_AGAIN}"
        rank = replace(rank, exact=False, reason=reason, nics=None, nics_reason=None, nic_env=())

    num_ranks = len(plan.ranks)
    warnings: tuple[str, ...] = ()
    if task.size not in (None, num_ranks):
        warnings = (f"{source} is for {counted(num_ranks, 'rank')}, but {task.size} run here",)
    rank = replace(rank, local_rank=task.rank, gpu=gpu or rank.gpu)
    return Slice(rank=rank, source=source, warnings=warnings)


def _ranks_called(plan: Plan, uuid: str) -> tuple[RankPlan, ...]:
    """Return the ranks on the GPU of this UUID; none if several GPUs' UUIDs start so, because CUDA refuses that."""
    digits = uuid_digits(uuid)
    if not uuid.startswith(GPU_PREFIX) or not digits:
        return ()
    ranks = tuple(rank for rank in plan.ranks if rank.gpu and uuid_digits(rank.gpu.uuid or "").startswith(digits))
    return ranks if len({rank.gpu for rank in ranks}) == 1 else ()


def inside(rank: RankPlan, allowed: CpuSet) -> RankPlan:
    """Return the rank with the planned CPUs that this task may use; with all that it may use if none was planned.

    A resource manager that gave fewer CPUs did so on purpose.
    """
    if rank.cpus <= allowed and rank.cpus:
        return rank
    cpus = rank.cpus & allowed or allowed
    missing = str(rank.cpus - allowed) or "none"
    reason = f"{rank.reason}; planned CPUs {missing} are not among those that this task was given ({allowed})"
    num_threads = min(rank.num_threads, len(cpus))
    return replace(rank, cpus=cpus, num_threads=num_threads, exact=False, reason=reason)


# --- of a plan that is made here -------------------------------------------------------------------------------------


def has_own_cpus(own: CpuSet, *, launcher: CpuSet | None, limit: int | None, size: int | None) -> bool:
    """Return whether this task's CPUs are its own, and not shared with its neighbors.

    They are if the launcher has more CPUs than the task, and enough to give every task as many; those of an unknown
    launcher are not. `limit` is the number of CPUs that the resource manager gave to all tasks. None: unknown.
    """
    if launcher is None or not own < launcher:
        return False
    total = len(launcher) if limit is None else min(limit, len(launcher))
    return size is None or len(own) * size <= total


def plan_task(topology: Topology, request: Request, task: Task, *, own_cpus: bool) -> Slice:
    """Plan for this host's tasks inside the allowed CPUs, and return this task's part. Raises UsageError.

    A task that sees one GPU uses that one, whatever its rank; `settle_gpus` has put the GPUs of --gpus into
    `request.rank_gpus`. With `own_cpus`, the plan is for this task alone.
    """
    from numapin.plan.gpus import in_turn  # here: with a plan at hand, `exec` is quicker without the planner
    from numapin.plan.make import plan_and_rank_warnings

    allowed = topology.allowed.cpus
    visible = topology.visible_gpus
    rank_gpus = request.rank_gpus
    notes: tuple[str, ...] = ()
    if own_cpus:
        source = f"made here, for this task alone: CPUs {allowed} are its own"
        size, index = 1, 0
        # A GPU whose number at the runtime is unknown is not known to be this rank's
        gpus = rank_gpus or tuple(None if gpu.cuda_index is None else gpu.index for gpu in visible)
        rank_gpus = (gpus[task.rank % len(gpus)],) if gpus else rank_gpus
    else:
        size, notes = _size(topology, request, task)
        source = f"made here, for {counted(size, 'task')} on CPUs {allowed}"
        index = task.rank
        if rank_gpus:
            rank_gpus = in_turn(rank_gpus, size)
        elif len(visible) == 1:
            # Each task sees only its own GPU: they are taken to be in order, one per task, if that fits this one's.
            # Otherwise all tasks are counted on this GPU, so that shared CPUs are split into enough parts.
            in_order = topology.vendor_gpus[:size]
            fits = len(in_order) == size and in_order[task.rank] == visible[0]
            rank_gpus = tuple(gpu.index for gpu in (in_order if fits else visible * size))
    made, of_ranks = plan_and_rank_warnings(topology, replace(request, num_ranks=size, rank_gpus=rank_gpus))
    rank = replace(made.ranks[index], local_rank=task.rank)

    # A NIC that was chosen among equally near ones, without the GPUs of other tasks, may be theirs, too.
    num_gpus = len(topology.gpus)
    has_choice = bool(rank.nic_env) and len(rank.nics or ()) > 1
    if has_choice and task.size is not None and num_gpus < task.size:
        why = (
            f"--nic-env: this task sees {counted(num_gpus, 'GPU')} of {task.size} tasks, so others may use its NIC; "
            "make one plan for all: numapin plan --nic-env … --json, then numapin exec --plan FILE"
        )
        rank = replace(rank, exact=False, reason=f"{rank.reason}; {why}")
    warnings = tuple(text for text in made.warnings if text not in of_ranks)  # each task reports its own
    return Slice(rank=rank, source=source, warnings=warnings, notes=notes)


def _size(topology: Topology, request: Request, task: Task) -> tuple[int, tuple[str, ...]]:
    """Return the number of tasks, and a note if it is assumed. Raises UsageError if it cannot be the assumed one.

    One task per GPU is assumed: of the GPUs that this task sees, or of all if it sees only its own.
    """
    if task.size is not None:
        return task.size, ()
    num_gpus = len(request.rank_gpus or topology.visible_gpus)
    assumed = num_gpus if num_gpus > 1 else len(topology.vendor_gpus)
    if task.rank < assumed:
        known = "no variable gives the number, see --local-size"
        return assumed, (f"assumed: {counted(assumed, 'task')} on this host, one per GPU; {known}",)
    if request.bind is Bind.NONE:
        return task.rank + 1, ()
    settings = " and ".join(task.settings)
    gpus = f"this host has {counted(assumed, 'GPU')}" if assumed else "there is no GPU to count by"
    rank = f" --local-rank {task.rank}" if task.variable is None else ""
    raise UsageError(
        f"the number of tasks on this host is unknown: {settings}, and {gpus}",
        f"give it: numapin exec{rank} --local-size N -- command",
    )
