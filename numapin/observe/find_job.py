"""Find a running job: its ranks and what was planned for them. Edge.

Comes in: a run directory, or process ids. Goes out: `RunningJob`. A job of numapin's has its plan in its run directory;
for one that others started the plan is made as `numapin plan` makes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base import quoting
from numapin.base.bounds import MAX_RANKS
from numapin.base.fields import Fields
from numapin.errors import MachineError, UsageError
from numapin.launcher import run_folder
from numapin.plan.make import make_plan
from numapin.plan.model import Plan
from numapin.plan.request import Request
from numapin.rank import handover
from numapin.system.proc import children_of, environment_of, is_running
from numapin.tasks import identify
from numapin.topology.discover import discover
from numapin.topology.visible import first_visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_LIST: Final = "name the processes of one with: numapin verify --pid PID,… (or numapin top)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job, its plan, its ranks' processes and, where numapin started them, their records, all by local rank."""

    name: str
    plan: Plan
    pids: Mapping[int, int]
    applied: Mapping[int, Mapping[str, object]]
    gone: frozenset[int] = frozenset()
    """Ranks whose recorded process ended, or is on another host; another may have its process id by now."""


def find_job(named: str | None, pids: Sequence[int] | None, environ: Mapping[str, str], *, again: str) -> RunningJob:
    """Return the run that was named, or the job of processes. Raises UsageError, also before a rank has started."""
    if named is not None and pids is not None:
        raise UsageError("RUN and --pid both name a job", "give one of them")
    job = find_run(named, environ) if pids is None else job_of_processes(pids)
    if not job.pids:
        raise UsageError(f"{job.name}: no rank has started yet", f"try again: {again}")
    return job


def find_run(named: str | None, environ: Mapping[str, str]) -> RunningJob:
    """Return the run that was named by its folder or the folder's name, or the only one of this user.

    Raises UsageError where there is none, or several.
    """
    if named is not None:
        return read_run(_folder(named, environ))
    live = [Path(folder) for folder in run_folder.live_runs(environ)]
    if not live:
        raise UsageError("no run of numapin goes on here for this user", _LIST)
    if len(live) > 1:
        names = "\n".join(f"    {_title(folder)}" for folder in live)
        raise UsageError(f"{len(live)} runs go on:\n{names}", "name one: numapin verify NAME (or numapin top)")
    return read_run(live[0])


def read_run(folder: Path) -> RunningJob:
    """Read what a run wrote down. Raises UsageError where it is over, MachineError for a file that is not as written.

    Of ranks that were restarted the latest record counts.
    """
    try:
        plan = Plan.from_json(_text(folder / handover.PLAN), source=str(folder / handover.PLAN))
        records = [_Record.read(path, handover.read_text(path)) for path in handover.records(str(folder))]
    except FileNotFoundError as error:
        raise UsageError(f"{folder} is no run that goes on: {error.filename} does not exist", _LIST) from None
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be read: {error.strerror}", "run this as the job's user") from None
    if not run_folder.is_live(str(folder)):
        raise UsageError(f"run {folder.name} is over", "see those that go on with: numapin verify")
    for record in records:
        if record.local_rank not in {rank.local_rank for rank in plan.ranks}:
            raise MachineError(f"{record.path}: the plan has no rank {record.local_rank}", "start the job again")
    latest = {record.local_rank: record for record in sorted(records, key=lambda record: record.restart)}
    return RunningJob(
        name=folder.name,
        plan=plan,
        pids={rank: record.pid for rank, record in latest.items()},
        applied={rank: record.applied for rank, record in latest.items()},
        gone=frozenset(rank for rank, record in latest.items() if not record.is_running()),
    )


def job_of_processes(pids: Sequence[int]) -> RunningJob:
    """Return the job of ranks, or of their launchers, that anybody started.

    1. A process with LOCAL_RANK in its environment is a rank; of one without, its nearest descendants with it are. One
       that has neither is a rank, too.
    2. Ranks of a run of numapin's have their plan in its run directory; what a rank started stands for it.
    3. LOCAL_RANK numbers the others, or else their order. Their plan is what `numapin plan` gives for as many ranks and
       for the GPUs that CUDA_VISIBLE_DEVICES shows them.

    Raises UsageError for a process that does not exist or is in no rank of its run, MachineError for another user's.
    """
    children = children_of()
    ranks = list(dict.fromkeys(rank for pid in pids for rank in _ranks_below(pid, children)))
    environs = [_environment(pid) for pid in ranks]
    folders = {environ.get("NUMAPIN_RUN_DIR", "") for environ in environs}
    if len(folders) == 1 and run_folder.is_live(folder := folders.pop()):
        job = read_run(Path(folder))
        chosen = {
            rank: pid for rank, pid in job.pids.items() if any(_is_within(named, pid, children) for named in ranks)
        }
        if not chosen:
            raise UsageError(f"pid {','.join(map(str, pids))} belongs to no rank of run {job.name}", _LIST)
        return replace(job, pids=chosen)
    numbers = _numbers(environs)
    return RunningJob(
        name=f"pid {','.join(map(str, pids))}",
        plan=_default_plan(numbers, environs),
        pids=dict(zip(numbers, ranks, strict=True)),
        applied={},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What `rank.py` wrote about one rank and restart."""

    path: str
    local_rank: int
    restart: int
    pid: int
    start: int | None  # None where there was no /proc
    host: str | None
    applied: Mapping[str, object]

    @classmethod
    def read(cls, path: str, text: str) -> _Record:
        """Read the JSON form. Raises MachineFileError that names the file."""
        top = Fields.top(path, text, hint="numapin run writes it; start the job again")
        top.expect_schema("numapin.observed/1")
        return cls(
            path=path,
            local_rank=top.number("local_rank"),
            restart=top.number("restart"),
            pid=top.number("pid"),
            start=top.optional_number("start"),
            host=top.optional_text("host"),
            applied=top.mapping("applied").values,
        )

    def is_running(self) -> bool:
        """Return whether this very process lives, here: a run directory can be on a file system of several hosts."""
        return self.host in (None, os.uname().nodename) and is_running(self.pid, self.start)


def _folder(named: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of a run that was named by its path, or by the path's last part."""
    if os.path.isdir(named):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return Path(named).absolute()
    live = {Path(folder).name: Path(folder) for folder in run_folder.live_runs(environ)}
    if named not in live:
        raise UsageError(f"no run {named} goes on", f"there are: {', '.join(live)}" if live else _LIST)
    return live[named]


def _title(folder: Path) -> str:
    """Name a run and its command; what cannot be read of the command is left out."""
    try:
        argv = Fields.top(str(folder), _text(folder / handover.COMMAND), hint="").texts("argv")
    except (OSError, MachineError):
        return folder.name
    return f"{folder.name}  {quoting.join(argv)[:80]}"


def _text(path: Path) -> str:
    return handover.read_text(str(path))


def _is_within(pid: int, ancestor: int, children: Mapping[int, list[int]]) -> bool:
    """Return whether a process is another, or was started by it or what it started."""
    return pid == ancestor or any(_is_within(pid, child, children) for child in children.get(ancestor, []))


def _ranks_below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    return _numbered_below(pid, children) or [pid]


def _numbered_below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return the nearest processes at or below `pid` that have a LOCAL_RANK."""
    if "LOCAL_RANK" in (environment_of(pid) or {}):
        return [pid]
    return [rank for child in children.get(pid, []) for rank in _numbered_below(child, children)]


def _environment(pid: int) -> dict[str, str]:
    environ = environment_of(pid)
    if environ is not None:
        return environ
    if Path(f"/proc/{pid}").exists():
        raise MachineError(f"process {pid} is another user's", "run this as that user, or as root")
    raise UsageError(f"there is no process {pid}", "see those of a command with: pgrep -f COMMAND")


def _numbers(environs: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the local rank of each process; their order, where LOCAL_RANK does not tell them apart."""
    told = [environ.get("LOCAL_RANK", "") for environ in environs]
    numbers = [number for text in told if (number := _number(text)) is not None]
    tells = len(set(numbers)) == len(told)
    return numbers if tells else list(range(len(told)))


def _number(text: str) -> int | None:
    """Return a rank's number or how many there are; None for what no launcher says, of which no plan can be made."""
    told = identify.number(text)
    return told if told is not None and told < MAX_RANKS else None


def _default_plan(numbers: Sequence[int], environs: Sequence[Mapping[str, str]]) -> Plan:
    """Make the plan that `numapin plan` makes where CUDA shows what it shows to the ranks.

    Where it shows each of them other GPUs, as srun does with one GPU a task, a rank's is the first that it sees.
    """
    sizes = [_number(environ.get("LOCAL_WORLD_SIZE", "")) or 0 for environ in environs]
    num_ranks = max([*sizes, *(number + 1 for number in numbers)])
    environ = dict(environs[0])
    if len({environ.get("CUDA_VISIBLE_DEVICES") for environ in environs}) == 1:
        return make_plan(discover(environ=environ), Request(num_ranks=num_ranks))
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    topology = discover(environ=environ)
    first = {
        number: first_visible(
            topology.gpus,
            visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
            device_order=environ.get("CUDA_DEVICE_ORDER"),
        )
        for number, environ in zip(numbers, environs, strict=True)
    }
    gpus = tuple(first.get(number) for number in range(num_ranks))
    return make_plan(topology, Request(num_ranks=num_ranks, rank_gpus=gpus))
