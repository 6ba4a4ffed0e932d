"""Search for a running job: its ranks, the GPU of each, and its plan, whatever started it.

A job that numapin started has its plan in its run directory. For any other job, the plan is made as `numapin plan`
makes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping  # noqa: TC003 - the type of a field that is read
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import formats
from numapin.base.bounds import MAX_RANKS
from numapin.base.files import opened
from numapin.base.records import read_record
from numapin.base.text import listed, printable
from numapin.errors import MachineError, UsageError
from numapin.launcher import run_folder
from numapin.launcher.run_folder import find_folder
from numapin.plan.make import make_plan
from numapin.plan.model import Plan
from numapin.plan.request import Request
from numapin.rank import handover
from numapin.system import proc
from numapin.tasks.identify import parse_count
from numapin.topology.discover import discover
from numapin.topology.sources.nvml import read_processes
from numapin.topology.vendors import first_visible, hiding_variables, seen_by_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Gpu, Topology

LIST_PROCESSES: Final = "list processes with: nvidia-smi, or pgrep -af COMMAND"
_FIRST_NAMESPACE: Final = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
_MOST_CHARS: Final = 64 << 20  # of all records; that of a rank has some hundred
_NAME_PROCESSES: Final = "name the processes of a job instead of a run: --pid PID,..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job and its plan. Mappings are by local rank.

    Other processes may have the ids of ranks that are `gone`. Several of the `bound` processes may use a rank's GPU.
    """

    name: str  # of the run, or the process ids that were given
    plan: Plan
    pids: Mapping[int, int]
    applied: Mapping[int, Mapping[str, object]]  # what the ranks recorded; empty if numapin did not start them
    gone: frozenset[int] = frozenset()  # ranks whose recorded process has ended
    folder: Path | None = None  # of a numapin run
    owner: int | None = None  # the user of that folder
    starts: Mapping[int, int | None] = field(default_factory=dict)  # in clock ticks since boot, if recorded
    bound: frozenset[int] = frozenset()  # all processes that have bound themselves and still run


def find_job(named: str | None, pids: Sequence[int] | None, environ: Mapping[str, str], *, again: str) -> RunningJob:
    """Find the run of this name (see `find_run`), or the job of these ranks or launchers. It has at least one rank.

    `again` is the command to type again, for a hint. Raises UsageError if there is no such job, it is ambiguous, or
    none of its ranks has started; MachineError if its files or processes cannot be read.
    """
    if named is not None and pids is not None:
        raise UsageError("RUN and --pid both name a job", "give one of them")
    job = find_run(named, environ) if pids is None else job_of_processes(pids)
    if not job.pids:
        raise UsageError(f"{job.name}: no rank has started yet", f"try again: {again}")
    return job


def find_run(named: str | None, environ: Mapping[str, str]) -> RunningJob:
    """Return the run with this folder or name, see `find_folder`, or the only active run of this user.

    Raises UsageError if there is none, or several.
    """
    if named is not None and os.path.isdir(named):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return read_run(Path(named).absolute())
    if named is not None:
        folder = find_folder(named, environ)
        if folder is not None:
            return read_run(Path(folder))
        active = [Path(live).name for live in run_folder.live_runs(environ)]
        hint = f"active runs: {', '.join(active)}" if active else _NAME_PROCESSES
        if named.isdecimal():
            hint = f"for the job of a process: --pid {named}"
        raise UsageError(f"no active run is named {formats.quote(named)}", hint)

    live = [Path(folder) for folder in run_folder.live_runs(environ)]
    if not live:
        raise UsageError("no numapin run of this user is active on this host", _NAME_PROCESSES)
    if len(live) == 1:
        return read_run(live[0])
    names = "".join(f"\n    {path.name}" for path in live)
    raise UsageError(f"{len(live)} runs are active:{names}", "add the name of one of them, or @last for the newest")


def read_run(folder: Path) -> RunningJob:
    """Read the files of a run, all from one opened folder; the latest record of each rank counts.

    Raises UsageError if the run has ended or is on another host, and MachineError for a file that no run writes.
    """
    named, texts, num_chars = str(folder / handover.PLAN), dict[str, str](), 0
    try:
        with opened(str(folder)) as descriptor:
            plan = Plan.from_json(handover.read_at(descriptor, handover.PLAN), source=named)
            owner = os.fstat(descriptor).st_uid
            for name in handover.record_names(descriptor):
                named = str(folder / name)
                with suppress(FileNotFoundError):  # its process has written another one, or the run is ending
                    texts[named] = handover.read_at(descriptor, name)
                    num_chars += len(texts[named])
                if num_chars > _MOST_CHARS:
                    break
    except FileNotFoundError:
        if not folder.exists():
            raise _ended(folder) from None
        if run_folder.is_live(str(folder)):
            raise UsageError(f"run {folder.name} is starting or ending: it has no plan", "try again") from None
        problem = f"{folder} is not an active run: {folder / handover.PLAN} does not exist"
        raise UsageError(problem, _NAME_PROCESSES) from None
    except OSError as error:
        raise MachineError(f"{named} cannot be read: {error.strerror}", "run this as the job's user") from None
    if num_chars > _MOST_CHARS:  # root reads the folders of users who may put anything there
        problem = f"{folder}: the records have more than {_MOST_CHARS >> 20} MiB together"
        raise MachineError(problem, "numapin run does not write that many; start the job again")
    records = {path: _Record.read(path, text) for path, text in texts.items()}
    if not run_folder.is_live(str(folder)):
        raise _ended(folder)

    hosts = {record.host or os.uname().nodename for record in records.values()}
    if hosts and os.uname().nodename not in hosts:
        raise UsageError(
            f"run {folder.name} is on {', '.join(sorted(hosts))}, not on this host", "type the command there"
        )

    planned = {rank.local_rank for rank in plan.ranks}
    for path, record in records.items():
        if record.local_rank not in planned:
            raise MachineError(f"{path}: the plan has no rank {record.local_rank}", "start the job again")
    running = {path for path, record in records.items() if record.is_running()}
    # Below `exec --children` several processes may use the GPU of a rank: the newest one that is running counts.
    in_order = sorted(records.items(), key=lambda each: (each[0] in running, each[1].restart, each[1].start or 0))
    latest = {record.local_rank: (path, record) for path, record in in_order}
    return RunningJob(
        name=folder.name,
        plan=plan,
        pids={number: record.pid for number, (_, record) in latest.items()},
        applied={number: record.applied for number, (_, record) in latest.items()},
        gone=frozenset(number for number, (path, _) in latest.items() if path not in running),
        folder=folder,
        owner=owner,
        starts={number: record.start for number, (_, record) in latest.items()},
        bound=frozenset(records[path].pid for path in running),
    )


def _ended(folder: Path) -> UsageError:
    """Return the error for a run that has ended; the folder of a run that succeeded is removed."""
    where = f"its files are in {folder}; check" if folder.exists() else "its folder was removed; check"
    return UsageError(f"run {folder.name} has ended", f"{where} the active run with: numapin verify")


def job_of_processes(pids: Sequence[int]) -> RunningJob:
    """Return the job of the ranks at and below these processes (see `targets_below`), whatever started them.

    Ranks of an active numapin run get the plan in its run directory. A process that a rank started stands for it. Other
    ranks get the plan that `numapin plan` makes for this number of ranks and for the GPUs that they use or see.

    Raises UsageError for a process that is no program or is in no rank of its run, and for ranks of several jobs;
    MachineError for a process whose environment cannot be read.
    """
    for pid in pids:
        require_program(pid)
    children = proc.children_of(dict(proc.processes(without={os.getpid()})))
    name = f"pid {','.join(map(str, pids))}"
    tree = [pid for given in pids for pid in (given, *proc.descendants(given, children))]
    environments = {pid: found for pid in tree if (found := proc.environment_of(pid)) is not None}

    # Ranks of an active run have its plan. What is below one of them belongs to it, whatever that has started.
    run_of = {pid: environ.get("NUMAPIN_RUN_DIR", "") for pid, environ in environments.items()}
    live = {folder for folder in set(run_of.values()) if run_folder.is_live(folder)}
    members = [pid for pid, environ in environments.items() if run_of[pid] in live or local_rank(environ) is not None]
    below = {pid: set(proc.descendants(pid, children)) for pid in members}
    wanted = {pid for pid in members if not any(pid in below[other] and other not in below[pid] for other in members)}
    folder, *others = {run_of[pid] for pid in wanted} or {""}
    if folder in live and not others:
        job = read_run(Path(folder))
        chosen = {
            rank: pid for rank, pid in job.pids.items() if wanted.intersection((pid, *proc.descendants(pid, children)))
        }
        if not chosen:
            raise UsageError(f"{name} belongs to no rank of run {job.name}", f"name the run instead: {job.name}")
        return replace(job, pids=chosen)

    # Not the environment of a launcher: `mpirun -x NCCL_TOPO_FILE=...` gives its ranks alone what names nodes of GPUs.
    hiding, readable = hiding_variables(), environments.values()
    shown = next((each for each in readable if local_rank(each) is not None), next(iter(readable), {}))
    topology = discover(environ={name: value for name, value in shown.items() if name not in hiding})

    targets = targets_below(pids, topology, children)
    # A child that inherited its rank's LOCAL_RANK is no rank, even if it computes on another GPU by mistake.
    under = {each.pid: set(proc.descendants(each.pid, children)) for each in targets}
    numbers_of = {each.pid: local_rank(each.environ or {}) for each in targets}
    for pid, number in numbers_of.items():
        above = {other for other in under if pid in under[other] and other not in under[pid]}
        if number is not None and any(numbers_of[other] == number for other in above):
            targets = [each for each in targets if each.pid != pid]
    ranks, environs = [each.pid for each in targets], [_environment(each) for each in targets]

    # All must be of one job: an active run, or one address at which its ranks meet.
    jobs: dict[str, list[int]] = {}
    for pid, environ in zip(ranks, environs, strict=True):
        folder, port = environ.get("NUMAPIN_RUN_DIR", ""), environ.get("MASTER_PORT")
        if run_folder.is_live(folder):
            jobs.setdefault(f"run {Path(folder).name}", []).append(pid)
        elif port:
            jobs.setdefault(f"MASTER_ADDR={environ.get('MASTER_ADDR', '')} MASTER_PORT={port}", []).append(pid)
    if len(jobs) > 1:
        lines = "\n".join(f"    {printable(job)}: --pid {','.join(map(str, own))}" for job, own in jobs.items())
        raise UsageError(f"{name} includes ranks of {len(jobs)} jobs:\n{lines}", "name the processes of one of them")

    # Ranks of no run have the plan that numapin would make for the GPUs that they use, or else see.
    numbers, num_ranks = numbered(environs)
    known = {number: each.gpu.index for number, each in zip(numbers, targets, strict=True) if each.gpu}
    if len({tuple(map(environ.get, hiding)) for environ in environs}) > 1:  # as srun with one GPU a task sets them
        for number, environ in zip(numbers, environs, strict=True):
            first = first_visible(topology.gpus, environ)
            if first is not None:
                known.setdefault(number, first)
    if known:
        visible = [gpu.index for gpu in visible_gpus(topology, environs[0])]
        request = Request(num_ranks=num_ranks, rank_gpus=gpus_of_ranks(visible, known, num_ranks))
    else:
        topology, request = discover(environ=environs[0]), Request(num_ranks=num_ranks)
    pids_of = dict(zip(numbers, ranks, strict=True))
    starts = {number: stat.start for number, pid in pids_of.items() if (stat := proc.look(pid)) is not None}
    return RunningJob(name=name, plan=make_plan(topology, request), pids=pids_of, applied={}, starts=starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record that a rank wrote after it was bound, one per restart."""

    local_rank: int
    restart: int
    pid: int
    start: int | None  # None: there was no /proc
    host: str | None
    applied: Mapping[str, object]

    @classmethod
    def read(cls, path: str, text: str) -> _Record:
        """Read the JSON form. Raises MachineFileError that names the file."""
        hint = "numapin run writes it; start the job again"
        return read_record(cls, text, source=path, hint=hint, schema="numapin.observed/1")

    def is_running(self) -> bool:
        """Return whether this very process is running on this host: several hosts may share a run directory."""
        return self.host in (None, os.uname().nodename) and proc.is_running(self.pid, self.start)


def _environment(each: Candidate) -> Mapping[str, str]:
    """Return the environment of a process. Raises UsageError if it has ended, and MachineError with the reason."""
    pid = each.pid
    if each.environ is not None:
        return each.environ
    try:
        real = int(proc.status_field(proc.folder_of(pid), "Uid").split()[0])
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES) from None
    if os.geteuid() not in (0, real):
        raise MachineError(f"process {pid} belongs to another user (uid {real})", "run this as that user, or as root")
    raise MachineError(
        f"the environment of process {pid} cannot be read: the kernel does not permit tracing it",
        "run this as root; in a container, also give it the capability SYS_PTRACE",
    )


# --- the processes that stand for ranks, and the GPU of each ----------------------------------------------------------


class Candidate(NamedTuple):
    """A process that stands for a rank, and its GPU."""

    pid: int
    environ: Mapping[str, str] | None  # that it started with; None: unreadable
    gpu: Gpu | None  # None: unknown
    gpu_source: str  # how its GPU is known, or why it is not


def targets_below(pids: Sequence[int], topology: Topology, children: Mapping[int, list[int]]) -> list[Candidate]:
    """Return the processes at and below these that stand for ranks, each once.

    A process with a LOCAL_RANK is one. So is one that computes on a GPU or sees a single GPU, unless it started a
    process with a LOCAL_RANK. Its descendants belong to it, unless the driver sees one compute on another GPU. Any
    other process, such as a launcher, stands for the nearest ones below it, or for itself if there are none.
    `children` are as of `proc.children_of`.
    """
    computing = {pid: uuids for pid, uuids in read_processes().items() if is_drivers_pid(pid)}
    environ_of = cache(proc.environment_of)

    def rank_of(pid: int) -> int | None:
        return local_rank(environ_of(pid) or {})

    def candidate(pid: int) -> Candidate:
        environ = environ_of(pid)
        return Candidate(pid, environ, *gpu_of(topology, environ or {}, computing.get(pid, ())))

    def is_target(pid: int) -> bool:
        if rank_of(pid) is not None:
            return True
        if any(rank_of(below) is not None for below in proc.descendants(pid, children)):
            return False  # a launcher, even if it computes: a notebook, or a search for parameters
        environ = environ_of(pid) or {}
        is_limited = any(name in environ for name in hiding_variables())
        return pid in computing or (is_limited and len(visible_gpus(topology, environ)) == 1)

    nearest: dict[int, list[int]] = {}  # to each process that was given, in order -> the processes below it
    for given in pids:
        found_here: list[int] = []
        covered: set[int] = set()
        for pid in (given, *proc.descendants(given, children)):
            if pid not in covered and is_target(pid):
                found_here.append(pid)
                covered.update(proc.descendants(pid, children))
        nearest |= {pid: proc.descendants(pid, children) for pid in found_here or [given]}

    found: dict[int, Candidate] = {}
    for pid, below in nearest.items():
        # The processes were not read at one moment, so two may each appear below the other.
        above = [other for other, others in nearest.items() if pid in others and other not in below]
        if any(rank_of(pid) in (None, rank_of(other)) for other in above):
            continue  # it belongs to another one that was given, too
        found[pid] = candidate(pid)
        for other in map(candidate, filter(computing.__contains__, below)):
            if other.gpu not in (None, found[pid].gpu):
                found[other.pid] = other
    return list(found.values())


def is_drivers_pid(pid: int) -> bool:
    """Return whether a process id that the driver reports is that of the process which has it here.

    In a container it may be the host's: only a process with a GPU open counts there.
    """
    return proc.pid_namespace() == _FIRST_NAMESPACE or bool(proc.open_files(pid, "/dev/nvidia"))


def gpu_of(  # noqa: PLR0911 - one return per way to know
    topology: Topology, environ: Mapping[str, str], uuids: Sequence[str]
) -> tuple[Gpu | None, str]:
    """Return a process's GPU and how it is known, or None and why not; the driver sees it compute on `uuids`.

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
            return None, f"it computes on {names}, and no LOCAL_RANK says which is its own"
        return named if named in computing else computing[0], "the driver sees it compute there"
    if named is not None:
        return named, f"LOCAL_RANK={environ['LOCAL_RANK']}{shown}"
    if not topology.has_usable_gpu:
        return None, "this host has no GPU"
    if len(visible) == 1:
        return visible[0], f"the only GPU that it sees{shown}"
    if not visible:
        return None, f"it sees no GPU{shown}, or CUDA's order is unknown"
    names = listed("GPU", [gpu.index for gpu in visible])
    return None, f"it computes on none yet, has no LOCAL_RANK, and sees {names}{shown}"


def visible_gpus(topology: Topology, environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a process's runtime sees, in its order; none if the order is unknown."""
    seen, _ = seen_by_ranks(topology.vendor_gpus, environ)
    ordered = sorted((gpu.cuda_index, gpu.index) for gpu in seen if gpu.visible and gpu.cuda_index is not None)
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    return [by_index[index] for _, index in ordered]


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


def local_rank(environ: Mapping[str, str], name: str = "LOCAL_RANK") -> int | None:
    """Return a process's LOCAL_RANK; None if it is unset, or not a number that a launcher would write."""
    number = parse_count(environ.get(name, ""))
    return number if number is not None and number < MAX_RANKS else None


def numbered(environs: Sequence[Mapping[str, str]]) -> tuple[list[int], int]:
    """Return the local rank of each process, and the number of ranks of their job, those that were not given included.

    They are numbered in their order if LOCAL_RANK does not distinguish them.
    """
    ranks = [rank for environ in environs if (rank := local_rank(environ)) is not None]
    numbers = ranks if len(set(ranks)) == len(environs) else list(range(len(environs)))
    sizes = (local_rank(environ, "LOCAL_WORLD_SIZE") or 0 for environ in environs)
    return numbers, max(max(numbers) + 1, *sizes)


def require_program(pid: int) -> proc.Stat:
    """Return the `stat` of a process that a user may name.

    Raises UsageError for one that does not exist, is a thread or of the kernel, or is the first process, which is an
    ancestor of every job; MachineError if it is hidden.
    """
    folder = proc.folder_of(pid)
    try:
        leader, found = int(proc.status_field(folder, "Tgid")), proc.stat(folder)
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES) from None
    except PermissionError:
        raise MachineError(f"process {pid} belongs to another user", "run this as that user, or as root") from None
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}", f"name its process: --pid {leader}")
    if found.has_ended:
        raise UsageError(f"there is no process {pid}", LIST_PROCESSES)
    if found.is_kernel_thread:
        raise UsageError(f"process {pid} is a kernel thread", LIST_PROCESSES)
    if pid == 1:
        raise UsageError(
            "process 1 is the first process of this host or container, above all jobs",
            f"name a rank or its launcher; {LIST_PROCESSES}",
        )
    return found
