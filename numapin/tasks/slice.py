"""One task's part of a plan that was made once, where something else started the tasks. Pure.

Comes in: a `Task` and a `Plan`. Goes out: the `RankPlan` of this task, and what the user should know. Reads no machine:
it must be quick.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import GpuRef, Plan, RankPlan
    from numapin.tasks.identify import Task

_PREFIX: Final = "GPU-"
_UUID_DIGITS: Final = 32  # as in topology/visible.py, which costs more to import than all of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one task gets; `warnings` are about the whole host, for one of its tasks to say, `notes` for the curious."""

    rank: RankPlan
    source: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def slice_of(
    plan: Plan, task: Task, *, source: str, visible: str | None = None, ask: Callable[[], GpuRef | None] = lambda: None
) -> Slice:
    """Return the task's rank of a plan: one on the only GPU that it sees, else by local rank.

    `visible` is what CUDA_VISIBLE_DEVICES calls that GPU, None where it sees several; `ask` returns what NVML calls it,
    and is called where the plan has no such UUID. Where the plan has not that GPU, the number counts and the rank is
    not exact. Raises UsageError where the plan has no such rank.
    """
    on_gpu, gpu = ((), None) if visible is None else _ranks_on(plan, visible, ask)
    rank = next((rank for rank in on_gpu or plan.ranks if rank.local_rank == task.rank), None)
    if rank is None and on_gpu:
        rank = on_gpu[task.rank % len(on_gpu)]
    if rank is None:
        raise UsageError(
            f"{source} is for ranks {cpu_set.render(rank.local_rank for rank in plan.ranks) or 'none'}; this is {task}",
            "make it again for this job: numapin plan --nproc-per-node N --json",
        )
    if visible is not None and not on_gpu:
        rank = _by_number(rank, source=source, name=(gpu and (gpu.uuid or gpu.pci)) or visible)
    differs = task.size is not None and task.size != len(plan.ranks)
    warnings = (f"{source} is for {len(plan.ranks)} ranks, and {task.size} run here",) if differs else ()
    return Slice(rank=replace(rank, local_rank=task.rank, gpu=gpu or rank.gpu), source=source, warnings=warnings)


def _ranks_on(plan: Plan, visible: str, ask: Callable[[], GpuRef | None]) -> tuple[tuple[RankPlan, ...], GpuRef | None]:
    """Return the ranks on the one visible GPU, and what NVML calls it, where that was asked.

    By its UUID, which one host has; else by its PCI address, which all hosts of a kind share.
    """
    if ranks := _ranks_called(plan, visible):
        return ranks, None
    gpu = ask()
    ranks = _ranks_called(plan, gpu.uuid) if gpu and gpu.uuid else ()
    pci = gpu and gpu.pci
    return ranks or tuple(rank for rank in plan.ranks if pci and rank.gpu and rank.gpu.pci == pci), gpu


def _ranks_called(plan: Plan, uuid: str) -> tuple[RankPlan, ...]:
    """Return the ranks on the GPU of that UUID; none for a beginning that several have, which CUDA does not take."""
    ranks = tuple(rank for rank in plan.ranks if rank.gpu and _is_called(rank.gpu, uuid))
    return ranks if len({rank.gpu for rank in ranks}) == 1 else ()


def _by_number(rank: RankPlan, *, source: str, name: str) -> RankPlan:
    """Return the rank that its number chose, because the plan has no rank on the task's GPU: not exact."""
    why = f"{source} has no rank on GPU {name}, the only one that this task sees, so that its number counts"
    remedy = "make the plan on this kind of host: numapin plan --nproc-per-node N --json"
    return replace(rank, exact=False, reason=f"{rank.reason}; {why}; {remedy}")


def _is_called(gpu: GpuRef, uuid: str) -> bool:
    """Say whether that is the GPU's UUID, or a beginning of it, as CUDA reads them: in any case, dashes left out."""
    digits = _digits(uuid)
    return uuid.startswith(_PREFIX) and digits != "" and _digits(gpu.uuid or "").startswith(digits)


def _digits(uuid: str) -> str:
    return uuid.removeprefix(_PREFIX).replace("-", "").lower()[:_UUID_DIGITS]


def inside(rank: RankPlan, allowed: CpuSet) -> RankPlan:
    """Return the rank with the CPUs that this task may use; where it may use none of the planned, it keeps its own.

    A resource manager that gave fewer CPUs meant it.
    """
    if rank.cpus <= allowed and rank.cpus:
        return rank
    cpus = rank.cpus & allowed or allowed
    lost = str(rank.cpus - allowed) or "none"
    why = f"planned CPUs {lost} are not among those that this task was given ({allowed})"
    return replace(
        rank, cpus=cpus, num_threads=min(rank.num_threads, len(cpus)), exact=False, reason=f"{rank.reason}; {why}"
    )
