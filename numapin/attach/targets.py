"""The processes to bind, each with its plan. Edge.

Comes in: process ids or a run, and binding options. Goes out: `Target`s. A process that uses a GPU, or that has a
LOCAL_RANK, is a target, and its descendants follow it, unless the driver sees one compute on another GPU. Any other
process, such as a launcher, stands for the nearest targets below it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.attach.cpuset import in_whole_cpuset, shortfalls_of
from numapin.attach.gpus import KnownGpu, gpu_of, gpus_of_ranks, local_rank, local_size, visible_gpus
from numapin.attach.processes import Family, Subject, examine, of_another_user, read_family, why_untouchable
from numapin.base.plural import counted
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher import run_folder
from numapin.observe.find_job import find_run
from numapin.plan.make import plan_and_rank_warnings
from numapin.plan.request import Bind
from numapin.system.proc import environment_of, has_open, is_running, pid_namespace
from numapin.topology.discover import discover
from numapin.topology.sources.nvml import read_processes
from numapin.topology.vendors import hiding_variables

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numapin.observe.find_job import RunningJob
    from numapin.plan.model import GpuRef, RankPlan
    from numapin.plan.request import Request
    from numapin.topology.model import Gpu, Topology

_FIRST_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
_GPU_FILES: Final = "/dev/nvidia"
_START: Final = "start each rank with LOCAL_RANK set, or with: numapin exec -- COMMAND"
_SHARED_MODES: Final = (Bind.NODE, Bind.SOCKET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process to bind.

    Attributes:
        subject: The process.
        plan: The CPUs and nodes that it gets.
        gpu_source: How its GPU is known.
        shortfalls: What the plan lacks.
    """

    subject: Subject
    plan: RankPlan
    gpu_source: str
    shortfalls: tuple[str, ...] = ()


class Aim(NamedTuple):
    """All processes to bind, and warnings about them and the machine. `apart` are processes that follow no target."""

    targets: tuple[Target, ...]
    warnings: tuple[str, ...]
    apart: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The options: what to plan, for which GPUs. `is_default`: no option was given that decides the CPUs."""

    request: Request
    is_default: bool
    gpus: tuple[str, ...] | None
    gpu_nodes: tuple[tuple[str, int], ...]
    other_users: bool


class _Owner(NamedTuple):
    """A process that is to be bound, before it has a plan."""

    subject: Subject
    environ: Mapping[str, str]
    gpu: KnownGpu


def aim_at_processes(pids: Sequence[int], wish: Wish, environ: Mapping[str, str]) -> Aim:
    """Return the targets at and below these processes. Raises UsageError, MachineError and PlanError."""
    for pid in pids:
        examine(pid, other_users=wish.other_users)
    topology = _machine(wish, environ)
    if wish.gpus is not None:
        owners = _with_given_gpus(list(dict.fromkeys(pids)), wish.gpus, topology, wish)
    else:
        owners = _owners(pids, topology, wish)
    _require_gpus(owners, topology)
    targets, warnings = _planned(topology, owners, wish.request)
    return Aim(targets, (*topology.warnings, *warnings, *_run_notes(owners, wish)))


def aim_at_run(named: str, wish: Wish, environ: Mapping[str, str]) -> Aim:
    """Return the ranks of a run, with its plan, or with another one if options were given. Raises as the other."""
    job = find_run_to_change(named, environ, other_users=wish.other_users)
    subjects = _subjects(job, wish)
    gone = tuple(f"rank {rank} of {job.name} has ended" for rank in sorted(job.pids.keys() - subjects.keys()))
    if wish.is_default:
        return Aim(_with_own_plans(job, subjects), gone, job.bound)
    _require_one_gpu_each(job, subjects)
    topology = _machine(wish, environ)
    owners = _ranks_of(job, subjects, topology)
    _require_gpus(owners, topology)
    targets, warnings = _planned(topology, owners, wish.request)
    return Aim(targets, (*topology.warnings, *warnings, *gone), job.bound)


def find_run_to_change(named: str, environ: Mapping[str, str], *, other_users: bool) -> RunningJob:
    """Return the run with this folder or name. Raises as `find_run`, and MachineError for another user's folder.

    The files in the folder say which processes are changed, so its user could choose any process of yours.
    """
    job = find_run(named, environ)
    problem = why_untouchable(job.owner, other_users=other_users)
    if problem:
        raise of_another_user(f"the folder of {job.name}", problem)
    return job


def _machine(wish: Wish, environ: Mapping[str, str]) -> Topology:
    """Read the machine with all of its GPUs and all CPUs of this cpuset: other processes may not be limited as this."""
    hiding = hiding_variables()
    shown = {name: value for name, value in environ.items() if name not in hiding}
    with in_whole_cpuset():
        return discover(environ=shown, gpu_nodes=wish.gpu_nodes)


# --- which processes -------------------------------------------------------------------------------------------------


def _subjects(job: RunningJob, wish: Wish) -> dict[int, Subject]:
    """Return the process of each rank that has not ended, in order. Raises UsageError if all have, and as `examine`."""
    found: dict[int, Subject] = {}
    for rank, pid in sorted(job.pids.items()):
        try:
            if rank not in job.gone:
                found[rank] = _subject(job, rank, pid, wish)
        except NumapinError:
            if is_running(pid, job.starts.get(rank)):
                raise
    if not found:
        problem = "all of its ranks have ended" if job.pids else "no rank has started yet"
        raise UsageError(f"{job.name}: {problem}", "see: numapin top")
    return found


def _subject(job: RunningJob, rank: int, pid: int, wish: Wish) -> Subject:
    """Return the process of a rank. Another user's folder can name processes of that user only.

    Raises as `examine`, also for another process that has the id by now.
    """
    subject = examine(pid, other_users=wish.other_users)
    if job.starts.get(rank) not in (None, subject.start):
        raise UsageError(f"rank {rank} of {job.name} has ended", "see: numapin top")
    if job.owner not in (os.geteuid(), subject.uid):
        raise MachineError(
            f"{job.name}, which belongs to uid {job.owner}, names process {pid}, which does not",
            f"if you mean that process: numapin attach --pid {pid}",
        )
    return subject


def _with_own_plans(job: RunningJob, subjects: Mapping[int, Subject]) -> tuple[Target, ...]:
    """Return the ranks of a run with the plan that it was started with."""
    source = _source(job)
    return tuple(Target(subject=each, plan=_own_plan(job, rank), gpu_source=source) for rank, each in subjects.items())


def _own_plan(job: RunningJob, rank: int) -> RankPlan:
    """Return the plan of a rank; that of a process with several GPUs has the CPUs and the nodes of all."""
    own, names = _plans(job)[rank], job.gpus.get(rank, ())
    if len(names) < 2:
        return own
    used = [plan for plan in job.plan.ranks if plan.gpu is not None and f"GPU {plan.gpu.index}" in names]
    cpus = own.cpus.union(*(plan.cpus for plan in used))
    nodes = own.nodes.union(*(plan.nodes for plan in used))
    return replace(own, cpus=cpus, nodes=nodes)


def _require_one_gpu_each(job: RunningJob, subjects: Mapping[int, Subject]) -> None:
    """Raise UsageError for a process with several GPUs: a new plan has one for each."""
    for rank, subject in subjects.items():
        names = job.gpus.get(rank, ())
        if len(names) > 1:
            raise UsageError(
                f"process {subject.pid} of {job.name} uses {', '.join(names)}, and a new plan has one GPU each",
                f"apply the run's own plan: numapin attach --job {job.name}",
            )


def _ranks_of(job: RunningJob, subjects: Mapping[int, Subject], topology: Topology) -> list[_Owner]:
    """Return the ranks of a run, each with the GPU that its plan names."""
    plans = _plans(job)
    gpus = {_identity(gpu): gpu for gpu in topology.gpus}
    return [
        _Owner(
            subject,
            {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(len(plans))},
            KnownGpu(_gpu_of_plan(plans[rank], gpus), _source(job)),
        )
        for rank, subject in subjects.items()
    ]


def _gpu_of_plan(plan: RankPlan, gpus: Mapping[str | None, Gpu]) -> Gpu | None:
    return None if plan.gpu is None else gpus.get(_identity(plan.gpu))


def _plans(job: RunningJob) -> dict[int, RankPlan]:
    return {rank.local_rank: rank for rank in job.plan.ranks}


def _source(job: RunningJob) -> str:
    return f"the plan of {job.name}"


def _identity(gpu: Gpu | GpuRef) -> str | None:
    return gpu.uuid or gpu.pci


def _with_given_gpus(pids: Sequence[int], keys: Sequence[str], topology: Topology, wish: Wish) -> list[_Owner]:
    """Return the processes themselves with the GPUs that the user named: one for all, or one for each."""
    gpus = _one_for_each([topology.find_gpu(key, option="--gpu") for key in keys], len(pids))
    subjects = [examine(pid, other_users=wish.other_users) for pid in pids]
    return [
        _Owner(subject, _environ(subject.pid), KnownGpu(gpu, "--gpu"))
        for subject, gpu in zip(subjects, gpus, strict=True)
    ]


def _one_for_each(gpus: list[Gpu], num_processes: int) -> list[Gpu]:
    if len(gpus) not in (1, num_processes):
        problem = f"--gpu names {len(gpus)} GPUs for {counted(num_processes, 'process')}"
        raise UsageError(problem, "name one GPU, or one for each process")
    return gpus * num_processes if len(gpus) == 1 else gpus


def _owners(pids: Sequence[int], topology: Topology, wish: Wish) -> list[_Owner]:
    """Return the processes at and below these that are to be bound for themselves, each once."""
    family, computing = read_family(), _computing()
    first = [owner for pid in pids for owner in _nearest(pid, family, computing, topology) or [pid]]
    found: dict[int, _Owner] = {}
    for pid in _uppermost(first, family):
        owner = found[pid] = _owner(pid, topology, computing, wish)
        found |= _of_other_gpus(owner, family, topology, computing, wish)
    return list(found.values())


def _uppermost(pids: Iterable[int], family: Family) -> list[int]:
    """Return the processes that are not below another of them, each once."""
    once = dict.fromkeys(pids)
    return [pid for pid in once if not _is_below(pid, once.keys() - {pid}, family)]


def _is_below(pid: int, others: Iterable[int], family: Family) -> bool:
    return any(pid in family.below(other) for other in others)


def _nearest(pid: int, family: Family, computing: Mapping[int, tuple[str, ...]], topology: Topology) -> list[int]:
    """Return the nearest processes at or below one that use a GPU, have a rank, or see one GPU only."""
    found: list[int] = []
    for each in (pid, *family.below(pid)):
        if not _is_below(each, found, family) and _is_owner(each, computing, topology):
            found.append(each)
    return found


def _is_owner(pid: int, computing: Mapping[int, tuple[str, ...]], topology: Topology) -> bool:
    environ = _environ(pid)
    return pid in computing or local_rank(environ) is not None or _is_on_one_gpu(topology, environ)


def _is_on_one_gpu(topology: Topology, environ: Mapping[str, str]) -> bool:
    is_limited = any(name in environ for name in hiding_variables())
    return is_limited and len(visible_gpus(topology, environ)) == 1


def _owner(pid: int, topology: Topology, computing: Mapping[int, tuple[str, ...]], wish: Wish) -> _Owner:
    subject = examine(pid, other_users=wish.other_users)
    environ = _environ(pid)
    return _Owner(subject, environ, gpu_of(topology, environ, computing.get(pid, ())))


def _environ(pid: int) -> Mapping[str, str]:
    """Return the environment with which a process started; empty if it cannot be read."""
    return environment_of(pid) or {}


def _of_other_gpus(
    owner: _Owner, family: Family, topology: Topology, computing: Mapping[int, tuple[str, ...]], wish: Wish
) -> dict[int, _Owner]:
    """Return the descendants that compute on other GPUs than the process itself."""
    below = (pid for pid in family.below(owner.subject.pid) if pid in computing)
    found = {pid: _owner(pid, topology, computing, wish) for pid in below}
    same = (None, owner.gpu.gpu)
    return {pid: each for pid, each in found.items() if each.gpu.gpu not in same}


def _computing() -> dict[int, tuple[str, ...]]:
    """Return the processes that compute on GPUs, as the driver sees them.

    In a container, the driver may report the host's process ids. There, only processes count that have a GPU open.
    """
    found = read_processes()
    if found and pid_namespace() != _FIRST_NAMESPACE:
        return {pid: uuids for pid, uuids in found.items() if has_open(pid, _GPU_FILES)}
    return found


def _require_gpus(owners: Sequence[_Owner], topology: Topology) -> None:
    """Raise UsageError for a process without a GPU; ranks on a host without GPUs need none."""
    for owner in owners:
        is_cpu_rank = not topology.has_usable_gpu and local_rank(owner.environ) is not None
        if owner.gpu.gpu is None and not is_cpu_rank:
            pid = owner.subject.pid
            problem = f"the GPU of process {pid} ({owner.subject.name}) is unknown: {owner.gpu.source}"
            raise UsageError(problem, _how_to_choose(pid, topology))


def _how_to_choose(pid: int, topology: Topology) -> str:
    """Return what the user can do if a process's GPU is unknown; --gpu names one that the host has."""
    if topology.has_usable_gpu:
        return f"name it: numapin attach --pid {pid} --gpu N (numapin topo lists them), or {_START}"
    return f"without a GPU only ranks are bound: {_START}"


def _run_notes(owners: Sequence[_Owner], wish: Wish) -> tuple[str, ...]:
    """Note that a process belongs to a run of numapin, which has a plan."""
    if not wish.is_default:
        return ()
    folders = {owner.environ.get("NUMAPIN_RUN_DIR", "") for owner in owners} - {""}
    names = sorted(Path(folder).name for folder in folders if run_folder.is_live(folder))
    return tuple(f"{name} is a run of numapin; to apply its own plan: numapin attach --job {name}" for name in names)


# --- their plans -----------------------------------------------------------------------------------------------------


def _planned(
    topology: Topology, owners: Sequence[_Owner], request: Request
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Plan for the processes; where ranks split CPUs, for the other ranks of their jobs too."""
    numbers = _numbers(owners)
    has_gpus = any(owner.gpu.gpu is not None for owner in owners)
    if _is_split(request) or not has_gpus:
        places, num_ranks = numbers, _num_ranks(numbers, owners)
    else:
        places, num_ranks = list(range(len(owners))), len(owners)
    gpus = _rank_gpus(topology, owners, places, num_ranks) if has_gpus else None
    plan, warnings = plan_and_rank_warnings(topology, replace(request, num_ranks=num_ranks, rank_gpus=gpus))
    targets = tuple(
        _target(owner, replace(plan.ranks[place], local_rank=number), topology)
        for owner, place, number in zip(owners, places, numbers, strict=True)
    )
    return targets, warnings


def _is_split(request: Request) -> bool:
    """Return whether ranks on the same node get CPUs of their own."""
    return request.bind not in _SHARED_MODES or request.cpus_per_rank is not None


def _target(owner: _Owner, plan: RankPlan, topology: Topology) -> Target:
    source = owner.gpu.source if owner.gpu.gpu else "the rank has no GPU"
    shortfalls = shortfalls_of(owner.subject.pid, topology.allowed.cpus)
    return Target(subject=owner.subject, plan=plan, gpu_source=source, shortfalls=shortfalls)


def _rank_gpus(
    topology: Topology, owners: Sequence[_Owner], places: Sequence[int], num_ranks: int
) -> tuple[int | None, ...]:
    """Return the GPU of each rank. Ranks that are not to be bound are taken to use the GPUs that these see, in turn."""
    visible = [gpu.index for gpu in visible_gpus(topology, owners[0].environ)]
    given = {place: owner.gpu.gpu.index for place, owner in zip(places, owners, strict=True) if owner.gpu.gpu}
    return gpus_of_ranks(visible, given, num_ranks)


def _numbers(owners: Sequence[_Owner]) -> list[int]:
    """Return the local rank of each process, or their order if LOCAL_RANK does not distinguish them."""
    found = [number for owner in owners if (number := local_rank(owner.environ)) is not None]
    are_distinct = len(set(found)) == len(owners)
    return found if are_distinct else list(range(len(owners)))


def _num_ranks(places: Collection[int], owners: Sequence[_Owner]) -> int:
    return max(max(places) + 1, *(local_size(owner.environ) or 0 for owner in owners))
