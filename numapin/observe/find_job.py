"""Search for a running job: its ranks and its plan.

A job that numapin started has its plan in its run directory. For any other job, the plan is made as `numapin plan`
makes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping  # noqa: TC003 - the type of a field that is read
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base import formats
from numapin.base.bounds import MAX_RANKS
from numapin.base.files import opened
from numapin.base.records import Texts, read_record
from numapin.base.text import not_none, printable
from numapin.errors import MachineError, UsageError
from numapin.launcher import run_folder
from numapin.launcher.run_folder import find_folder
from numapin.plan.make import make_plan
from numapin.plan.model import Plan
from numapin.plan.request import Request
from numapin.rank import handover
from numapin.system import proc
from numapin.tasks import identify
from numapin.topology.discover import discover
from numapin.topology.vendors import first_visible, hiding_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.model import RankPlan
    from numapin.system.proc import Stat
    from numapin.topology.model import Topology


_NAME_PROCESSES: Final = "name the processes of a job instead of a run: --pid PID,..."
LIST_PROCESSES: Final = "list processes with: nvidia-smi, or pgrep -af COMMAND"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job and its plan.

    Attributes:
        name: The name of the run, or the process ids that were given.
        plan: The plan of its ranks.
        pids: The process id of each rank, by local rank.
        applied: The bindings that the ranks recorded, by local rank; empty if numapin did not start them.
        gone: Ranks whose recorded process has ended or is on another host. Other processes may have their ids now.
        owner: The user of the run's folder. None: there is no folder.
        starts: The start time of each rank's process, as far as it was recorded; in clock ticks since boot.
        bound: All processes that have bound themselves and still run; several may use the GPU of a rank.
    """

    name: str
    plan: Plan
    pids: Mapping[int, int]
    applied: Mapping[int, Mapping[str, object]]
    gone: frozenset[int] = frozenset()
    owner: int | None = None
    starts: Mapping[int, int | None] = field(default_factory=dict)
    bound: frozenset[int] = frozenset()


def find_job(named: str | None, pids: Sequence[int] | None, environ: Mapping[str, str], *, again: str) -> RunningJob:
    """Find the job that the user named.

    Args:
        named: The folder or the name of a run, see `find_folder`. None: the only run of this user, if there are no
            `pids` either.
        pids: Process ids of ranks or launchers.
        environ: Where NUMAPIN_RUN_DIR and TMPDIR are looked up.
        again: The command to type again, for a hint.

    Returns:
        The job, with at least one rank.

    Raises:
        UsageError: There is no such job, it is ambiguous, or none of its ranks has started.
        MachineError: Its files or processes cannot be read.
    """
    if named is not None and pids is not None:
        raise UsageError("RUN and --pid both name a job", "give one of them")
    job = find_run(named, environ) if pids is None else job_of_processes(pids)
    if not job.pids:
        raise UsageError(f"{job.name}: no rank has started yet", f"try again: {again}")
    return job


def find_run(named: str | None, environ: Mapping[str, str]) -> RunningJob:
    """Return the run with this folder or name, or the only active run of this user.

    Raises UsageError if there is none, or several.
    """
    return read_run(_only_folder(environ) if named is None else _folder(named, environ))


def _only_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the only active run of this user. Raises UsageError if there is none, or several."""
    live = [Path(folder) for folder in run_folder.live_runs(environ)]
    if not live:
        raise UsageError("no numapin run of this user is active on this host", _NAME_PROCESSES)
    if len(live) > 1:
        names = "\n".join(f"    {_title(folder)}" for folder in live)
        raise UsageError(
            f"{len(live)} runs are active:\n{names}", "add the name of one of them, or @last for the newest"
        )
    return live[0]


def read_run(folder: Path) -> RunningJob:
    """Read the files of a run; the latest record of each rank counts.

    Raises UsageError if the run has ended, and MachineError for a file that no run writes.
    """
    plan, records, owner = _read_files(folder)
    if not run_folder.is_live(str(folder)):
        raise _ended(folder)
    _require_planned(records, plan)
    latest = _latest(records.values())
    return RunningJob(
        name=folder.name,
        plan=replace(plan, ranks=tuple(_own_plan(rank, latest.get(rank.local_rank), plan) for rank in plan.ranks)),
        pids={rank: record.pid for rank, record in latest.items()},
        applied={rank: record.applied for rank, record in latest.items()},
        gone=frozenset(rank for rank, record in latest.items() if not record.is_running()),
        owner=owner,
        starts={rank: record.start for rank, record in latest.items()},
        bound=frozenset(record.pid for record in records.values() if record.is_running()),
    )


def _latest(records: Iterable[_Record]) -> dict[int, _Record]:
    """Return the last record of each rank."""
    return {record.local_rank: record for record in sorted(records, key=_age)}


def _own_plan(rank: RankPlan, record: _Record | None, plan: Plan) -> RankPlan:
    """Return the plan of a rank; that of a process with several GPUs has the CPUs and the nodes of all."""
    if record is None or len(record.gpus) < 2:
        return rank
    used = [each for each in plan.ranks if each.gpu is not None and f"GPU {each.gpu.index}" in record.gpus]
    cpus, nodes = rank.cpus.union(*(each.cpus for each in used)), rank.nodes.union(*(each.nodes for each in used))
    return replace(rank, cpus=cpus, nodes=nodes)


def _age(record: _Record) -> tuple[bool, int, int]:
    """Order the records of a rank, the last one last. Below `exec --children` several processes may use one GPU."""
    return record.is_running(), record.restart, record.start or 0


def _read_files(folder: Path) -> tuple[Plan, dict[str, _Record], int]:
    """Read the plan of a run, the ranks' records by their paths, and whose folder it is; all from one opened folder.

    A record that is removed meanwhile is left out: its process has written another one, or the run is ending.
    """
    named, records = str(folder / handover.PLAN), dict[str, str]()
    try:
        with opened(str(folder)) as descriptor:
            plan = Plan.from_json(handover.read_at(descriptor, handover.PLAN), source=named)
            owner = os.fstat(descriptor).st_uid
            for name in handover.record_names(descriptor):
                named = str(folder / name)
                with suppress(FileNotFoundError):
                    records[named] = handover.read_at(descriptor, name)
    except FileNotFoundError:
        raise _without_plan(folder) from None
    except OSError as error:
        raise MachineError(f"{named} cannot be read: {error.strerror}", "run this as the job's user") from None
    return plan, {path: _Record.read(path, text) for path, text in records.items()}, owner


def _without_plan(folder: Path) -> UsageError:
    """Return the error for a folder that has no plan, or that is gone."""
    if not folder.exists():
        return _ended(folder)
    if run_folder.is_live(str(folder)):
        return UsageError(f"run {folder.name} is starting or ending: it has no plan", "see: numapin top")
    return UsageError(f"{folder} is not an active run: {folder / handover.PLAN} does not exist", _NAME_PROCESSES)


def _ended(folder: Path) -> UsageError:
    """Return the error for a run that has ended; the folder of a run that succeeded is removed."""
    where = f"its files are in {folder}; check" if folder.exists() else "its folder was removed; check"
    return UsageError(f"run {folder.name} has ended", f"{where} the active run with: numapin verify")


def _require_planned(records: Mapping[str, _Record], plan: Plan) -> None:
    """Raise MachineError for a record of a rank that the plan does not have."""
    planned = {rank.local_rank for rank in plan.ranks}
    for path, record in records.items():
        if record.local_rank not in planned:
            raise MachineError(f"{path}: the plan has no rank {record.local_rank}", "start the job again")


def job_of_processes(pids: Sequence[int]) -> RunningJob:
    """Return the job of these ranks or launchers, whatever started them.

    1. A process with LOCAL_RANK in its environment is a rank. A process without it stands for its nearest descendants
       that have it, and is itself a rank if there are none.
    2. Ranks of an active numapin run get the plan in its run directory. A process that a rank started stands for it.
    3. Other ranks are numbered by LOCAL_RANK, or else by their order. They get the plan that `numapin plan` makes for
       this number of ranks and for the GPUs that their environment shows them.

    Raises UsageError for a process that is no program or is in no rank of its run, and for ranks of several jobs;
    MachineError for a process whose environment cannot be read.
    """
    for pid in pids:
        require_program(pid)
    children = proc.children_of()
    name = f"pid {','.join(map(str, pids))}"
    ranks = list(dict.fromkeys(chain.from_iterable(_ranks_below(pid, children) for pid in pids)))
    environs = [_environment(pid) for pid in ranks]
    _require_one_job(name, ranks, environs)
    run = _common_run(environs)
    if run is not None:
        return _part_of_run(read_run(run), ranks, children, name=name)
    numbers = _numbers(environs)
    plan = _default_plan(numbers, environs)
    return RunningJob(name=name, plan=plan, pids=dict(zip(numbers, ranks, strict=True)), applied={})


def require_program(pid: int) -> Stat:
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


def _require_one_job(name: str, ranks: Sequence[int], environs: Sequence[Mapping[str, str]]) -> None:
    """Raise UsageError for ranks of different active runs, or that meet at different addresses."""
    jobs: dict[str, list[int]] = {}
    for pid, environ in zip(ranks, environs, strict=True):
        folder, port = environ.get("NUMAPIN_RUN_DIR", ""), environ.get("MASTER_PORT")
        if run_folder.is_live(folder):
            jobs.setdefault(f"run {Path(folder).name}", []).append(pid)
        elif port:
            jobs.setdefault(f"MASTER_ADDR={environ.get('MASTER_ADDR', '')} MASTER_PORT={port}", []).append(pid)
    if len(jobs) > 1:
        listed = "\n".join(f"    {printable(job)}: --pid {','.join(map(str, pids))}" for job, pids in jobs.items())
        raise UsageError(f"{name} includes ranks of {len(jobs)} jobs:\n{listed}", "name the processes of one of them")


def _common_run(environs: Sequence[Mapping[str, str]]) -> Path | None:
    """Return the folder of the active run that all of these processes belong to."""
    folder, *others = {environ.get("NUMAPIN_RUN_DIR", "") for environ in environs}
    return Path(folder) if not others and run_folder.is_live(folder) else None


def _part_of_run(
    job: RunningJob, processes: Sequence[int], children: Mapping[int, list[int]], *, name: str
) -> RunningJob:
    """Return the job with only those ranks that started these processes. Raises UsageError if there are none."""
    wanted = set(processes)
    chosen = {
        rank: pid for rank, pid in job.pids.items() if wanted.intersection((pid, *proc.descendants(pid, children)))
    }
    if not chosen:
        raise UsageError(f"{name} belongs to no rank of run {job.name}", f"name the run instead: {job.name}")
    return replace(job, pids=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record that a rank wrote after it was bound, one per restart."""

    local_rank: int
    restart: int
    pid: int
    start: int | None  # None: there was no /proc
    host: str | None
    applied: Mapping[str, object]
    gpus: Texts

    @classmethod
    def read(cls, path: str, text: str) -> _Record:
        """Read the JSON form. Raises MachineFileError that names the file."""
        hint = "numapin run writes it; start the job again"
        return read_record(cls, text, source=path, hint=hint, schema="numapin.observed/1", gpus=[])

    def is_running(self) -> bool:
        """Return whether this very process is running on this host: several hosts may share a run directory."""
        return self.host in (None, os.uname().nodename) and proc.is_running(self.pid, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """The command line of a run."""

    argv: Texts


def _folder(named: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a run, given its path or a name as in `find_folder`. Raises UsageError."""
    if os.path.isdir(named):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return Path(named).absolute()
    folder = find_folder(named, environ)
    if folder is None:
        live = [Path(active).name for active in run_folder.live_runs(environ)]
        hint = f"active runs: {', '.join(live)}" if live else _NAME_PROCESSES
        if named.isdecimal():
            hint = f"for the job of a process: --pid {named}"
        raise UsageError(f"no active run is named {formats.quote(named)}", hint)
    return Path(folder)


def _title(folder: Path) -> str:
    """Return the name of a run and its command, or only its name if the command cannot be read."""
    try:
        argv = read_record(_Command, _text(folder / handover.COMMAND), source=str(folder), hint="").argv
    except (OSError, MachineError):
        return folder.name
    return f"{folder.name}  {formats.quote_all(argv)[:80]}"


def _text(path: Path) -> str:
    return handover.read_text(str(path))


def _ranks_below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return the nearest processes at or below `pid` that have a LOCAL_RANK, or else itself."""
    ranks, todo, seen = [], [pid], {pid}  # parents that were not read at once can form a circle
    while todo:
        at = todo.pop()
        if "LOCAL_RANK" in (proc.environment_of(at) or {}):
            ranks.append(at)
        else:
            below = [child for child in children.get(at, ()) if child not in seen]
            seen.update(below)
            todo += reversed(below)
    return ranks or [pid]


def _environment(pid: int) -> dict[str, str]:
    """Return the environment of a rank. Raises UsageError if it has ended, and MachineError with the reason."""
    environ = proc.environment_of(pid)
    if environ is not None:
        return environ
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


def _numbers(environs: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the local rank of each process, or their order if LOCAL_RANK does not distinguish them."""
    found = [_number(environ.get("LOCAL_RANK", "")) for environ in environs]
    numbers = not_none(found)
    are_distinct = len(set(numbers)) == len(environs)
    return numbers if are_distinct else list(range(len(environs)))


def _number(text: str) -> int | None:
    """Return a local rank or size; None for text that no launcher writes, or a number beyond any plan."""
    number = identify.parse_count(text)
    return number if number is not None and number < MAX_RANKS else None


def _num_ranks(numbers: Sequence[int], environs: Sequence[Mapping[str, str]]) -> int:
    """Return the number of ranks of the job, the ones that were not given included."""
    sizes = (_number(environ.get("LOCAL_WORLD_SIZE", "")) or 0 for environ in environs)
    return max(*sizes, max(numbers) + 1)


def _default_plan(numbers: Sequence[int], environs: Sequence[Mapping[str, str]]) -> Plan:
    """Make the plan that `numapin plan` makes if CUDA shows it the same GPUs as the ranks.

    If CUDA shows each rank other GPUs, as srun with one GPU per task does, a rank's GPU is the first that it sees.
    """
    num_ranks = _num_ranks(numbers, environs)
    environ = environs[0]
    hiding = hiding_variables()
    if len({tuple(map(environ.get, hiding)) for environ in environs}) == 1:
        return make_plan(discover(environ=environ), Request(num_ranks=num_ranks))
    topology = discover(environ={name: value for name, value in environ.items() if name not in hiding})
    first = {number: _first_gpu(topology, environ) for number, environ in zip(numbers, environs, strict=True)}
    gpus = tuple(map(first.get, range(num_ranks)))
    return make_plan(topology, Request(num_ranks=num_ranks, rank_gpus=gpus))


def _first_gpu(topology: Topology, environ: Mapping[str, str]) -> int | None:
    """Return the index of the first GPU that CUDA shows to a process."""
    return first_visible(topology.gpus, environ)
