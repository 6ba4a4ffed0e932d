"""One task's part of an existing plan, where another launcher started the tasks.

This does not read the machine, because it must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.gpu_uuid import GPU_PREFIX, uuid_digits
from numapin.base.plural import counted
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import GpuRef, Plan, RankPlan
    from numapin.tasks.identify import Task

_PLAN_AGAIN: Final = "numapin plan --nproc-per-node N --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One task's part of a plan.

    `warnings` are about the whole host, so only one of its tasks prints them; `notes` are printed with --verbose.
    """

    rank: RankPlan
    source: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def slice_of(
    plan: Plan, task: Task, *, source: str, visible: str | None = None, ask: Callable[[], GpuRef | None] = lambda: None
) -> Slice:
    """Return the task's rank of a plan.

    A task that sees one GPU gets a rank on that GPU; any other task gets the rank of its number. If no rank is on that
    GPU, the number decides too, and the rank is not exact.

    Args:
        plan: The plan of all ranks of a host.
        task: This task.
        source: The name of the plan for messages.
        visible: The only entry of CUDA_VISIBLE_DEVICES. None: the task sees several GPUs or none.
        ask: Returns NVML's description of that GPU; called only if the plan does not have its UUID.

    Returns:
        The task's part, under the task's own number.

    Raises:
        UsageError: The plan has no such rank.
    """
    on_gpu, gpu = ((), None) if visible is None else _ranks_on(plan, visible, ask)
    unplanned_gpu = _name(gpu) or visible
    rank = _in_turn(on_gpu, task) if on_gpu else _by_number(plan, task, source=source, unplanned_gpu=unplanned_gpu)
    rank = replace(rank, local_rank=task.rank, gpu=gpu or rank.gpu)
    return Slice(rank=rank, source=source, warnings=_size_warnings(plan, task, source))


def _in_turn(on_gpu: tuple[RankPlan, ...], task: Task) -> RankPlan:
    """Return the task's rank of those on its GPU: the one of its number, else they take turns."""
    return _of_number(on_gpu, task) or on_gpu[task.rank % len(on_gpu)]


def _by_number(plan: Plan, task: Task, *, source: str, unplanned_gpu: str | None) -> RankPlan:
    """Return the rank of the task's number; it is not exact if the task sees one GPU, which the plan does not have."""
    rank = _required_of_number(plan, task, source=source)
    return rank if unplanned_gpu is None else _without_its_gpu(rank, source=source, gpu=unplanned_gpu)


def _of_number(ranks: tuple[RankPlan, ...], task: Task) -> RankPlan | None:
    return next((rank for rank in ranks if rank.local_rank == task.rank), None)


def _required_of_number(plan: Plan, task: Task, *, source: str) -> RankPlan:
    rank = _of_number(plan.ranks, task)
    if rank is None:
        planned = cpu_set.render(rank.local_rank for rank in plan.ranks) or "none"
        raise UsageError(f"{source} is for ranks {planned}; this is {task}", f"plan again for this job: {_PLAN_AGAIN}")
    return rank


def _without_its_gpu(rank: RankPlan, *, source: str, gpu: str) -> RankPlan:
    """Return a rank that was chosen by its number because the plan has no rank on the task's GPU: it is not exact."""
    why = f"{source} has no rank on GPU {gpu}, the only one that this task sees, so the rank was chosen by its number"
    remedy = f"make the plan on this kind of host: {_PLAN_AGAIN}"
    reason = f"{rank.reason}; {why}; {remedy}"
    return replace(rank, exact=False, reason=reason, nics=None, nics_reason=None, nic_env=())


def _size_warnings(plan: Plan, task: Task, source: str) -> tuple[str, ...]:
    num_ranks = len(plan.ranks)
    if task.size in (None, num_ranks):
        return ()
    return (f"{source} is for {counted(num_ranks, 'rank')}, but {task.size} run here",)


# --- the ranks on one GPU --------------------------------------------------------------------------------------------


def _ranks_on(plan: Plan, visible: str, ask: Callable[[], GpuRef | None]) -> tuple[tuple[RankPlan, ...], GpuRef | None]:
    """Return the ranks on the one visible GPU, and NVML's description of that GPU if it was needed.

    The UUID identifies it on one host; the PCI address is the same on all hosts of a kind.
    """
    ranks = _ranks_called(plan, visible)
    gpu = None if ranks else ask()
    if gpu is None:
        return ranks, None
    return _ranks_called(plan, gpu.uuid or "") or _ranks_at(plan, gpu.pci), gpu


def _ranks_called(plan: Plan, uuid: str) -> tuple[RankPlan, ...]:
    """Return the ranks on the GPU of this UUID; none if several GPUs' UUIDs start so, because CUDA refuses that."""
    digits = uuid_digits(uuid)
    if not uuid.startswith(GPU_PREFIX) or not digits:
        return ()
    ranks = tuple(rank for rank in plan.ranks if _digits_of(rank).startswith(digits))
    return ranks if _are_on_one_gpu(ranks) else ()


def _are_on_one_gpu(ranks: tuple[RankPlan, ...]) -> bool:
    return len({rank.gpu for rank in ranks}) == 1


def _digits_of(rank: RankPlan) -> str:
    return "" if rank.gpu is None else uuid_digits(rank.gpu.uuid or "")


def _ranks_at(plan: Plan, pci: str | None) -> tuple[RankPlan, ...]:
    if pci is None:
        return ()
    return tuple(rank for rank in plan.ranks if rank.gpu and rank.gpu.pci == pci)


def _name(gpu: GpuRef | None) -> str | None:
    return None if gpu is None else gpu.uuid or gpu.pci


# --- the CPUs that a task may use ------------------------------------------------------------------------------------


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
