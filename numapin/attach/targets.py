"""Choose the processes that `numapin attach` changes, and plan the CPUs of each. Nothing is changed here."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher import run_folder
from numapin.observe.find import (
    LIST_PROCESSES,
    Candidate,
    find_run,
    gpus_of_ranks,
    local_rank,
    numbered,
    require_program,
    targets_below,
    visible_gpus,
)
from numapin.plan.make import plan_and_rank_warnings
from numapin.plan.request import Bind, Memory, Request
from numapin.system import proc
from numapin.system.cgroup import cpuset_of
from numapin.system.threads import whole_cpuset
from numapin.system.tree import Tree
from numapin.topology.discover import discover
from numapin.topology.vendors import hiding_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.plan.model import RankPlan
    from numapin.topology.model import Topology

_START: Final = "start each rank with LOCAL_RANK set, or with: numapin exec -- COMMAND"


class Subject(NamedTuple):
    """A process that may be changed, known for good by its start time in clock ticks since boot."""

    pid: int
    start: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process to bind, its plan, how its GPU is known, and what the plan lacks."""

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
class AttachOptions:
    """The options of `numapin attach`, by click's names. None: the option was not given."""

    bind: str | None = None
    cpus_per_rank: int | None = None
    smt: bool = True
    reserve_cpus: CpuSet | None = None
    gpus: tuple[str, ...] | None = None
    gpu_nodes: tuple[tuple[str, int], ...] | None = None
    widen: bool = False  # whether threads on fewer CPUs than planned get all of these
    migrate: bool = False
    dry_run: bool = False

    @property
    def decides(self) -> bool:
        """Whether any option that decides the CPUs was given."""
        given = (self.bind, self.cpus_per_rank, self.reserve_cpus, self.gpu_nodes)
        return not self.smt or any(value is not None for value in given)


def aim_at_processes(pids: Sequence[int], options: AttachOptions, environ: Mapping[str, str]) -> Aim:
    """Return the targets at and below these processes. Raises UsageError, MachineError and PlanError."""
    for pid in pids:
        examine(pid)
    # All GPUs and all CPUs of this cpuset: other processes may not be limited as this one.
    hiding = hiding_variables()
    with whole_cpuset():
        topology = discover(
            environ={name: value for name, value in environ.items() if name not in hiding},
            gpu_nodes=options.gpu_nodes or (),
        )
    processes = other_processes()
    if options.gpus is None:
        found = targets_below(pids, topology, proc.children_of(processes))
    else:
        given = list(dict.fromkeys(pids))
        gpus = [topology.find_gpu(key, option="--gpu") for key in options.gpus]
        if len(gpus) not in (1, len(given)):
            problem = f"--gpu names {len(gpus)} GPUs for {counted(len(given), 'process')}"
            raise UsageError(problem, "name one GPU, or one for each process")
        found = [
            Candidate(pid, proc.environment_of(pid), gpu, "--gpu")
            for pid, gpu in zip(given, gpus if len(gpus) > 1 else gpus * len(given), strict=True)
        ]
    subjects = [examine(each.pid) for each in found]
    for subject in subjects:
        seen = processes.get(subject.pid)
        if seen is None or seen.start != subject.start:  # it ended while its GPU was looked up; its id is another's
            raise UsageError(f"there is no process {subject.pid}", LIST_PROCESSES)
    request = Request(
        bind=Bind(options.bind or Bind.NODE),
        memory=Memory.PREFERRED,
        cpus_per_rank=options.cpus_per_rank,
        smt=options.smt,
        reserve_cpus=options.reserve_cpus or CpuSet(),
    )
    targets, warnings = _planned(topology, found, subjects, request)
    notes: list[str] = []
    if not options.decides:
        folders = {(each.environ or {}).get("NUMAPIN_RUN_DIR", "") for each in found} - {""}
        runs = sorted(Path(folder).name for folder in folders if run_folder.is_live(folder))
        notes = [f"{run} is a run of numapin; to apply its own plan: numapin attach --job {run}" for run in runs]
    return Aim(targets, (*topology.warnings, *warnings, *notes))


def aim_at_run(named: str, environ: Mapping[str, str]) -> Aim:
    """Return the ranks of a run, with its plan. Raises as `find_run`, and MachineError for another user's folder.

    The files in the folder say which processes are changed, so its user could choose any process of yours.
    """
    job = find_run(named, environ)
    problem = why_untouchable(job.owner)
    if problem:
        raise _of_another_user(f"the folder of {job.name}", problem)
    plans = {rank.local_rank: rank for rank in job.plan.ranks}
    targets: list[Target] = []
    ended: list[str] = []
    for rank, pid in sorted(job.pids.items()):
        subject, start = None, job.starts.get(rank)
        try:
            subject = examine(pid)
        except NumapinError:
            if rank not in job.gone and proc.is_running(pid, start):
                raise
        if subject is None or rank in job.gone or start not in (None, subject.start):
            ended.append(f"rank {rank} of {job.name} has ended")
            continue
        targets.append(Target(subject=subject, plan=plans[rank], gpu_source=f"the plan of {job.name}"))
    if not targets:
        problem = "all of its ranks have ended" if job.pids else "no rank has started yet"
        raise UsageError(f"{job.name}: {problem}", "see: numapin top")
    return Aim(tuple(targets), tuple(ended), job.bound)


# --- which processes may be changed ----------------------------------------------------------------------------------


def examine(pid: int) -> Subject:
    """Return the process with this id.

    Raises UsageError for a process that does not exist or must not be touched, and MachineError for another user's.
    """
    if pid == os.getpid():
        raise UsageError(f"process {pid} is numapin itself", LIST_PROCESSES)
    found = require_program(pid)
    try:
        real, effective, *_ = map(int, proc.status_field(proc.folder_of(pid), "Uid").split())
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES) from None
    except PermissionError:
        raise _of_another_user(f"process {pid}", "another user") from None
    problem = why_untouchable(real if real == effective else None)  # they differ in a set-user-ID program
    if problem:
        raise _of_another_user(f"process {pid}", problem)
    return Subject(pid, found.start, found.name)


def why_untouchable(uid: int | None) -> str | None:
    """Return whose the process is if it is not this user's. `uid` None: of several users."""
    if uid == os.geteuid():
        return None
    return "several users" if uid is None else f"another user (uid {uid})"


def _of_another_user(what: str, whose: str) -> MachineError:
    return MachineError(f"{what} belongs to {whose}", "run this as that user")


def other_processes() -> dict[int, proc.Stat]:
    """Look at all processes but this one, which may have been started by a process that is to be bound."""
    return dict(proc.processes(without={os.getpid()}))


# --- their plans -----------------------------------------------------------------------------------------------------


def _planned(
    topology: Topology, found: Sequence[Candidate], subjects: Sequence[Subject], request: Request
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Plan for the processes; where ranks split CPUs, for the other ranks of their jobs too.

    Raises UsageError for a process without a GPU; ranks on a host without GPUs need none.
    """
    environs = [each.environ or {} for each in found]
    for each, subject, environ in zip(found, subjects, environs, strict=True):
        is_cpu_rank = not topology.has_usable_gpu and local_rank(environ) is not None
        if each.gpu is None and not is_cpu_rank:
            hint = f"without a GPU only ranks are bound: {_START}"
            if topology.has_usable_gpu:
                hint = f"name it: numapin attach --pid {each.pid} --gpu N (numapin topo lists them), or {_START}"
            raise UsageError(f"the GPU of process {each.pid} ({subject.name}) is unknown: {each.gpu_source}", hint)

    numbers, num_ranks = numbered(environs)
    places, gpus = numbers, None
    if any(each.gpu is not None for each in found):
        if request.bind in (Bind.NODE, Bind.SOCKET) and request.cpus_per_rank is None:  # ranks share their CPUs
            places, num_ranks = list(range(len(found))), len(found)
        visible = [gpu.index for gpu in visible_gpus(topology, environs[0])]
        known = {place: each.gpu.index for place, each in zip(places, found, strict=True) if each.gpu}
        gpus = gpus_of_ranks(visible, known, num_ranks)
    plan, warnings = plan_and_rank_warnings(topology, replace(request, num_ranks=num_ranks, rank_gpus=gpus))
    targets = tuple(
        Target(
            subject=subject,
            plan=replace(plan.ranks[place], local_rank=number),
            gpu_source=each.gpu_source if each.gpu else "the rank has no GPU",
            shortfalls=shortfalls_of(each.pid, topology.allowed.cpus),
        )
        for each, subject, place, number in zip(found, subjects, places, numbers, strict=True)
    )
    return targets, warnings


def cpus_of_cpuset(pid: int, tree: Tree | None = None) -> CpuSet:
    """Return the CPUs of a process's cpuset, as far as they can be seen: those of its threads are among them."""
    return (cpuset_of(tree or Tree(""), pid) or CpuSet()).union(*proc.thread_cpus(pid))


def shortfalls_of(pid: int, known: CpuSet) -> tuple[str, ...]:
    """Return what a plan from the known CPUs lacks for a process: the other CPUs of its cpuset."""
    missing = cpus_of_cpuset(pid) - known
    why = "the process may use them, but numapin attach was started in a cpuset without them"
    remedy = f"start it outside that cpuset; see: cat /proc/self/cgroup /proc/{pid}/cgroup"
    return (f"the plan leaves out CPUs {missing}: {why}; {remedy}",) if missing else ()
