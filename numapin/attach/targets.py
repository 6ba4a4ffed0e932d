"""Choose the processes that `numapin attach` changes, find each one's GPU, and plan its CPUs.

Nothing is changed in this module.

A process that computes on a GPU, has a LOCAL_RANK, or sees one GPU only, is a target. Its descendants follow it, unless
the driver sees one compute on another GPU. Any other process, such as a launcher, stands for the nearest targets below.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_CPUS, MAX_RANKS
from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted, listed
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher import run_folder
from numapin.observe.find_job import LIST_PROCESSES, find_run, require_program
from numapin.plan.make import plan_and_rank_warnings
from numapin.plan.request import Bind
from numapin.system import proc
from numapin.system.cgroup import cpuset_of
from numapin.system.tree import Tree
from numapin.tasks.identify import parse_count
from numapin.topology.discover import discover
from numapin.topology.sources.nvml import read_processes
from numapin.topology.vendors import hiding_variables, seen_by_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numapin.plan.model import RankPlan
    from numapin.plan.request import Request
    from numapin.topology.model import Gpu, Topology

_FIRST_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
_START: Final = "start each rank with LOCAL_RANK set, or with: numapin exec -- COMMAND"


class Subject(NamedTuple):
    """A process that may be changed, known for good by its start time in clock ticks since boot.

    `uid` is its user; None if its real and its effective user are different, as those of a set-user-ID program.
    """

    pid: int
    start: int
    name: str
    uid: int | None


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
class Wish:
    """The options: what to plan, for which GPUs. `is_default`: no option was given that decides the CPUs."""

    request: Request
    is_default: bool
    gpus: tuple[str, ...] | None
    gpu_nodes: tuple[tuple[str, int], ...]
    other_users: bool


class KnownGpu(NamedTuple):
    """A process's GPU and how it is known. `gpu` None: unknown, and `source` has the reason."""

    gpu: Gpu | None
    source: str


class _Owner(NamedTuple):
    """A target before it has a plan, with the environment that it was started with."""

    subject: Subject
    environ: Mapping[str, str]
    known: KnownGpu


def aim_at_processes(pids: Sequence[int], wish: Wish, environ: Mapping[str, str]) -> Aim:
    """Return the targets at and below these processes. Raises UsageError, MachineError and PlanError."""
    for pid in pids:
        examine(pid, other_users=wish.other_users)
    topology = _machine(wish, environ)
    if wish.gpus is None:
        owners = _owners_at_and_below(pids, topology, wish)
    else:
        owners = _owners_of_given_gpus(list(dict.fromkeys(pids)), wish.gpus, topology, wish)
    targets, warnings = _planned(topology, owners, wish.request)
    notes: list[str] = []
    if wish.is_default:
        folders = {owner.environ.get("NUMAPIN_RUN_DIR", "") for owner in owners} - {""}
        runs = sorted(Path(folder).name for folder in folders if run_folder.is_live(folder))
        notes = [f"{run} is a run of numapin; to apply its own plan: numapin attach --job {run}" for run in runs]
    return Aim(targets, (*topology.warnings, *warnings, *notes))


def aim_at_run(named: str, environ: Mapping[str, str], *, other_users: bool) -> Aim:
    """Return the ranks of a run, with its plan. Raises as `find_run`, and MachineError for another user's folder.

    The files in the folder say which processes are changed, so its user could choose any process of yours: another
    user's folder can name processes of that user only.
    """
    job = find_run(named, environ)
    problem = why_untouchable(job.owner, other_users=other_users)
    if problem:
        raise _of_another_user(f"the folder of {job.name}", problem)
    plans = {rank.local_rank: rank for rank in job.plan.ranks}
    targets: list[Target] = []
    ended: list[str] = []
    for rank, pid in sorted(job.pids.items()):
        subject, start = None, job.starts.get(rank)
        try:
            subject = examine(pid, other_users=other_users)
        except NumapinError:
            if rank not in job.gone and proc.is_running(pid, start):
                raise
        if subject is None or rank in job.gone or start not in (None, subject.start):
            ended.append(f"rank {rank} of {job.name} has ended")
            continue
        if job.owner not in (os.geteuid(), subject.uid):
            raise MachineError(
                f"{job.name}, which belongs to uid {job.owner}, names process {pid}, which does not",
                f"if you mean that process: numapin attach --pid {pid}",
            )
        targets.append(Target(subject=subject, plan=plans[rank], gpu_source=f"the plan of {job.name}"))
    if not targets:
        problem = "all of its ranks have ended" if job.pids else "no rank has started yet"
        raise UsageError(f"{job.name}: {problem}", "see: numapin top")
    return Aim(tuple(targets), tuple(ended), job.bound)


# --- which processes may be changed ----------------------------------------------------------------------------------


def examine(pid: int, *, other_users: bool) -> Subject:
    """Return the process with this id. `other_users`: root may take another user's.

    Raises UsageError for a process that does not exist or must not be touched, and MachineError for another user's.
    """
    if pid == os.getpid():
        raise UsageError(f"process {pid} is numapin itself", LIST_PROCESSES)
    found = require_program(pid)
    try:
        uid = _uid(proc.folder_of(pid))
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES) from None
    except PermissionError:
        raise _of_another_user(f"process {pid}", "another user") from None
    problem = why_untouchable(uid, other_users=other_users)
    if problem:
        raise _of_another_user(f"process {pid}", problem)
    return Subject(pid, found.start, found.name, uid)


def is_ours(pid: int, start: int, *, other_users: bool) -> bool:
    """Return whether a descendant is still that process and may be changed; Gone if it has ended."""
    folder = proc.folder_of(pid)
    try:
        uid = _uid(folder)
    except PermissionError:
        return False
    found = proc.stat(folder)
    if found.has_ended or found.start != start:
        raise proc.Gone
    return not found.is_kernel_thread and why_untouchable(uid, other_users=other_users) is None


def why_untouchable(uid: int | None, *, other_users: bool) -> str | None:
    """Return whose the process is if it may not be changed. `uid` None: of several users."""
    own = os.geteuid()
    if uid == own or (own == 0 and other_users):
        return None
    return "several users" if uid is None else f"another user (uid {uid})"


def _uid(folder: str) -> int | None:
    """Return the user of a process; None if its real and its effective user are different."""
    real, effective, *_ = map(int, proc.status_field(folder, "Uid").split())
    return real if real == effective else None


def _of_another_user(what: str, whose: str) -> MachineError:
    hint = "to change it anyway, add --other-users" if os.geteuid() == 0 else "run this as that user"
    return MachineError(f"{what} belongs to {whose}", hint)


class Family(NamedTuple):
    """All processes at one moment: the start time of each, and the children of each."""

    starts: Mapping[int, int]
    children: Mapping[int, list[int]]

    def below(self, pid: int, *, without: Collection[int] = ()) -> list[int]:
        """Return the descendants of a process, nearest first, without these and theirs."""
        return proc.descendants(pid, self.children, without=without)


def read_family() -> Family:
    """Look at all processes. This one is left out: it may have been started by a process that is to be bound."""
    starts: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for pid, found in proc.processes():
        if pid != os.getpid():
            starts[pid] = found.start
            children.setdefault(found.parent, []).append(pid)
    return Family(starts, children)


# --- which of them are bound, and their GPUs -------------------------------------------------------------------------


def _owners_of_given_gpus(pids: Sequence[int], keys: Sequence[str], topology: Topology, wish: Wish) -> list[_Owner]:
    """Return the processes themselves with the GPUs that the user named: one for all, or one for each."""
    gpus = [topology.find_gpu(key, option="--gpu") for key in keys]
    if len(gpus) not in (1, len(pids)):
        problem = f"--gpu names {len(gpus)} GPUs for {counted(len(pids), 'process')}"
        raise UsageError(problem, "name one GPU, or one for each process")
    if len(gpus) == 1:
        gpus *= len(pids)
    subjects = [examine(pid, other_users=wish.other_users) for pid in pids]
    return [
        _Owner(subject, proc.environment_of(subject.pid) or {}, KnownGpu(gpu, "--gpu"))
        for subject, gpu in zip(subjects, gpus, strict=True)
    ]


def _owners_at_and_below(pids: Sequence[int], topology: Topology, wish: Wish) -> list[_Owner]:
    """Return the processes at and below these that are to be bound for themselves, each once."""
    family, computing = read_family(), read_processes()
    if computing and proc.pid_namespace() != _FIRST_NAMESPACE:
        # In a container, the driver may report the host's process ids: only a process with a GPU open counts there.
        computing = {pid: uuids for pid, uuids in computing.items() if proc.has_open(pid, "/dev/nvidia")}

    def owner(pid: int) -> _Owner:
        environ = proc.environment_of(pid) or {}
        known = gpu_of(topology, environ, computing.get(pid, ()))
        return _Owner(examine(pid, other_users=wish.other_users), environ, known)

    def is_owner(pid: int) -> bool:
        environ = proc.environment_of(pid) or {}
        if pid in computing or local_rank(environ) is not None:
            return True
        is_limited = any(name in environ for name in hiding_variables())
        return is_limited and len(visible_gpus(topology, environ)) == 1

    first: dict[int, None] = {}  # the owners nearest to each process that was given, in order
    for given in pids:
        nearest: list[int] = []
        covered: set[int] = set()
        for pid in (given, *family.below(given)):
            if pid not in covered and is_owner(pid):
                nearest.append(pid)
                covered.update(family.below(pid))
        first |= dict.fromkeys(nearest or [given])

    found: dict[int, _Owner] = {}
    for pid in first:
        if any(pid in family.below(other) for other in first if other != pid):
            continue  # the other one was given, too
        found[pid] = owner(pid)
        for below in family.below(pid):
            if below in computing:
                other_owner = owner(below)
                if other_owner.known.gpu not in (None, found[pid].known.gpu):
                    found[below] = other_owner
    return list(found.values())


def gpu_of(  # noqa: PLR0911 - one return per way to know
    topology: Topology, environ: Mapping[str, str], uuids: Sequence[str]
) -> KnownGpu:
    """Return the GPU of a process; `uuids` are those of the GPUs on which the driver sees it compute.

    1. The GPU on which the driver sees it compute. Of several, the one that its LOCAL_RANK names.
    2. The GPU that LOCAL_RANK names among those that CUDA_VISIBLE_DEVICES (AMD, Intel: their variables) shows.
    3. The only GPU that these variables show.
    """
    computing = [gpu for gpu in topology.gpus if gpu.uuid in uuids]
    visible, rank = visible_gpus(topology, environ), local_rank(environ)
    named = visible[rank % len(visible)] if visible and rank is not None else None
    given = [f"{name}={environ[name][:60]}" for name in hiding_variables() if name in environ]
    shown = f" ({', '.join(given)})" if given else ""
    if computing:
        if named not in computing and len(computing) > 1:
            names = listed("GPU", [gpu.index for gpu in computing])
            return KnownGpu(None, f"it computes on {names}, and no LOCAL_RANK says which is its own")
        return KnownGpu(named if named in computing else computing[0], "the driver sees it compute there")
    if named is not None:
        return KnownGpu(named, f"LOCAL_RANK={environ['LOCAL_RANK']}{shown}")
    if not topology.has_usable_gpu:
        return KnownGpu(None, "this host has no GPU")
    if len(visible) == 1:
        return KnownGpu(visible[0], f"the only GPU that it sees{shown}")
    if not visible:
        return KnownGpu(None, f"it sees no GPU{shown}, or CUDA's order is unknown")
    names = listed("GPU", [gpu.index for gpu in visible])
    return KnownGpu(None, f"it computes on none yet, has no LOCAL_RANK, and sees {names}{shown}")


def visible_gpus(topology: Topology, environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a process's runtime sees, in its order; none if the order is unknown."""
    seen, _ = seen_by_ranks(topology.vendor_gpus, environ)
    ordered = sorted((gpu.cuda_index, gpu.index) for gpu in seen if gpu.visible and gpu.cuda_index is not None)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    return [by_index[index] for _, index in ordered]


def local_rank(environ: Mapping[str, str], name: str = "LOCAL_RANK") -> int | None:
    """Return the rank that a launcher gave to a process; None if there is none, or text that no launcher writes."""
    number = parse_count(environ.get(name, ""))
    return number if number is not None and number < MAX_RANKS else None


# --- their plans -----------------------------------------------------------------------------------------------------


def _machine(wish: Wish, environ: Mapping[str, str]) -> Topology:
    """Read the machine with all of its GPUs and all CPUs of this cpuset: other processes may not be limited as this."""
    hiding = hiding_variables()
    shown = {name: value for name, value in environ.items() if name not in hiding}
    with in_whole_cpuset():
        return discover(environ=shown, gpu_nodes=wish.gpu_nodes)


@contextmanager
def in_whole_cpuset() -> Iterator[None]:
    """Give this thread all CPUs of its cpuset, and its former ones at the end. The kernel cuts a wish for all CPUs.

    taskset, a binding shell, a rank or a Slurm step may have started this command on some of them. If the kernel
    refuses, these stay.
    """
    inherited = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(MAX_CPUS))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, inherited)


def _planned(
    topology: Topology, owners: Sequence[_Owner], request: Request
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Plan for the processes; where ranks split CPUs, for the other ranks of their jobs too.

    Raises UsageError for a process without a GPU; ranks on a host without GPUs need none.
    """
    for owner in owners:
        is_cpu_rank = not topology.has_usable_gpu and local_rank(owner.environ) is not None
        if owner.known.gpu is None and not is_cpu_rank:
            pid, hint = owner.subject.pid, f"without a GPU only ranks are bound: {_START}"
            if topology.has_usable_gpu:
                hint = f"name it: numapin attach --pid {pid} --gpu N (numapin topo lists them), or {_START}"
            raise UsageError(f"the GPU of process {pid} ({owner.subject.name}) is unknown: {owner.known.source}", hint)

    ranks = [rank for owner in owners if (rank := local_rank(owner.environ)) is not None]
    numbers = ranks if len(set(ranks)) == len(owners) else list(range(len(owners)))
    has_gpus = any(owner.known.gpu is not None for owner in owners)
    shares_cpus = request.bind in (Bind.NODE, Bind.SOCKET) and request.cpus_per_rank is None
    if shares_cpus and has_gpus:
        places, num_ranks = list(range(len(owners))), len(owners)
    else:
        sizes = (local_rank(owner.environ, "LOCAL_WORLD_SIZE") or 0 for owner in owners)
        places, num_ranks = numbers, max(max(numbers) + 1, *sizes)
    gpus = None
    if has_gpus:
        visible = [gpu.index for gpu in visible_gpus(topology, owners[0].environ)]
        known = {place: owner.known.gpu.index for place, owner in zip(places, owners, strict=True) if owner.known.gpu}
        gpus = gpus_of_ranks(visible, known, num_ranks)
    plan, warnings = plan_and_rank_warnings(topology, replace(request, num_ranks=num_ranks, rank_gpus=gpus))
    targets = tuple(
        Target(
            subject=owner.subject,
            plan=replace(plan.ranks[place], local_rank=number),
            gpu_source=owner.known.source if owner.known.gpu else "the rank has no GPU",
            shortfalls=shortfalls_of(owner.subject.pid, topology.allowed.cpus),
        )
        for owner, place, number in zip(owners, places, numbers, strict=True)
    )
    return targets, warnings


def gpus_of_ranks(visible: Sequence[int], given: Mapping[int, int], num_ranks: int) -> tuple[int | None, ...]:
    """Return the GPU of each rank: the one that it was given, or that of its turn among several visible ones.

    A rank that was given another GPU than that of its turn trades with the rank whose turn it is: otherwise that one
    would be taken to use the same GPU. None: unknown.
    """
    turns = [visible[rank % len(visible)] if len(visible) > 1 else None for rank in range(num_ranks)]
    for rank, gpu in given.items():
        others = (other for other, turn in enumerate(turns) if turn == gpu and other not in given)
        turns[next(others, rank)] = turns[rank]
        turns[rank] = gpu
    return tuple(turns)


def cpus_of_cpuset(pid: int, tree: Tree | None = None) -> CpuSet:
    """Return the CPUs of a process's cpuset, as far as they can be seen: those of its threads are among them."""
    return (cpuset_of(tree or Tree(""), pid) or CpuSet()).union(*proc.thread_cpus(pid))


def shortfalls_of(pid: int, known: CpuSet) -> tuple[str, ...]:
    """Return what a plan from the known CPUs lacks for a process: the other CPUs of its cpuset."""
    missing = cpus_of_cpuset(pid) - known
    if not missing:
        return ()
    return (
        f"the plan leaves out CPUs {missing}: the process may use them, but numapin attach was started in a cpuset "
        f"without them; start it outside that cpuset; see: cat /proc/self/cgroup /proc/{pid}/cgroup",
    )
