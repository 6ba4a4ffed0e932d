"""Identify which rank of its host this process is, where another launcher started it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FLUX: Final = "FLUX_TASK_LOCAL_ID"
LAUNCHERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),  # torchrun, accelerate; LOCAL_SIZE is DeepSpeed's
    ("OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),  # MVAPICH2
    ("MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),  # MPICH and Intel MPI
    ("PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    ("PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),  # HPE Cray
    (_FLUX, ()),  # see `_task`
    ("JSM_NAMESPACE_LOCAL_RANK", ("JSM_NAMESPACE_LOCAL_SIZE",)),  # jsrun
)
"""Each launcher's variable for the local rank and its variables for the local size, in the order of precedence.

Slurm's come last, and only inside a job step: a batch script, and everything it starts, has SLURM_LOCALID=0.
"""
RANK_VARIABLES: Final = tuple(variable for variable, _ in LAUNCHERS)
_FLUX_TOTALS: Final = ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES")
_SLURM: Final = "SLURM_LOCALID"
_SLURM_SIZE: Final = "SLURM_STEP_TASKS_PER_NODE"  # SLURM_NTASKS_PER_NODE is the job's; a step may have other counts
_SLURM_STEP: Final = "SLURM_STEP_ID"
_SLURM_HOST: Final = "SLURM_NODEID"
_MAX_DIGITS: Final = 6  # of any number of tasks or CPUs
_MAX_SHOWN: Final = 60  # characters of a variable's value in a message
_GROUP: Final = r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?"  # compiled only where Slurm needs it: `exec` must be quick
_COMMANDS: Final = {
    "OMPI_COMM_WORLD_LOCAL_RANK": ("mpirun --map-by ppr:1:node", "mpirun"),
    "MV2_COMM_WORLD_LOCAL_RANK": ("mpirun -ppn 1", "mpirun"),
    "MPI_LOCALRANKID": ("mpirun -ppn 1", "mpirun"),
    "PMI_LOCAL_RANK": ("mpiexec -ppn 1", "mpiexec"),
    "PALS_LOCAL_RANKID": ("mpiexec --ppn 1", "mpiexec"),
    _FLUX: ("flux run --tasks-per-node=1", "flux run"),
    "JSM_NAMESPACE_LOCAL_RANK": ("jsrun --tasks_per_rs 1 --rs_per_host 1", "jsrun"),
    _SLURM: ("srun --ntasks-per-node=1", "srun"),
}
"""By the variable of the local rank: the start of the command for one task per host, and of the one for all ranks."""
_OF_RANKS: Final = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "NUMAPIN_BINDING")
_GIVE_RANK: Final = "numapin exec --local-rank N --local-size N -- command"


class Task(NamedTuple):
    """One process of a host."""

    rank: int
    size: int | None  # the number of tasks on the host, None if unknown
    settings: tuple[str, ...]  # what gave the rank, with its value, then what gave the size, if anything
    variable: str | None = None  # the variable that gave the rank; None: the user did
    notes: tuple[str, ...] = ()  # variables that are set but ignored

    def __str__(self) -> str:
        """Return the rank, the size, and the settings they come from."""
        size = "an unknown number" if self.size is None else str(self.size)
        return f"rank {self.rank} of {size} on this host ({', '.join(self.settings)})"


def find_task(environ: Mapping[str, str], *, rank: int | None = None, size: int | None = None) -> Task:
    """Return this process's task from the user's options, else from the environment. Raises UsageError.

    If several launchers' variables are set, the first of LAUNCHERS counts. The others must agree with it, or belong to
    a launcher that started one task here, which then started the ranks (mpirun -> torchrun).
    """
    if rank is None:
        task = _from_environment(environ)
    else:
        task = Task(rank=rank, size=None, settings=(f"--local-rank={rank}",))
        with suppress(UsageError):  # the user overrules the variables, so they need not make sense
            found = _from_environment(environ)
            task = task._replace(size=found.size, settings=(*task.settings, *found.settings[1:]))
    if size is not None:
        task = task._replace(size=size, settings=(task.settings[0], f"--local-size={size}"))

    settings = " and ".join(task.settings)
    if max(task.rank + 1, task.size or 1) > MAX_RANKS:
        raise UsageError(f"{settings}: at most {MAX_RANKS} ranks per host are accepted", _GIVE_RANK)
    if task.size is not None and task.rank >= task.size:
        raise UsageError(f"local rank {task.rank} is not below the local size {task.size}: {settings}", _GIVE_RANK)
    return task


def is_wrapper_of(environ: Mapping[str, str], task: Task) -> bool:
    """Return whether an ancestor process with this environment is a wrapper of the task, and not its launcher.

    A wrapper has a rank itself, if not always from the variable that counts below it. If that rank is the only one on
    this host and the task is not, the process is a launcher that another launcher started: srun -> torchrun.
    """
    if not is_in_step(environ) and environ.keys().isdisjoint(RANK_VARIABLES):
        return False
    try:
        size = find_task(environ).size
    except UsageError:
        return True  # if variables contradict each other, one of them is the wrapper's rank
    return size != 1 or task.size == 1


def repeated_task(environ: Mapping[str, str]) -> Task | None:
    """Return which of several tasks on this host a launcher is; None if it is the only one or if that is unknown.

    Under `srun -n 2 numapin run train.py`, each launcher would start a job of its own. A launcher inside a rank, e.g.
    for an evaluation, is there on purpose.
    """
    if is_inside_rank(environ):
        return None
    try:
        task = find_task(environ)
    except UsageError:
        return None
    return task if task.size is not None and task.size > 1 else None


def is_inside_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a rank that numapin, torchrun or another launcher of ranks has started."""
    return not environ.keys().isdisjoint(_OF_RANKS)


def explain_repeated(task: Task) -> tuple[str, str]:
    """Return what is wrong with a launcher that is one of several tasks, and the commands that start one job here."""
    once, all_ranks = _COMMANDS[task.variable or ""]
    return (
        f"{task.size} launchers are started on this host ({', '.join(task.settings)}), and each would start a job of "
        "its own",
        f"for one job: {once} numapin run …; to bind these tasks: {all_ranks} … numapin exec -- python train.py; for a "
        "job in each task: numapin run --standalone …",
    )


def cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """Return the number of CPUs of this host that Slurm gave to the job; its own daemon may have more."""
    return parse_count(environ.get("SLURM_CPUS_ON_NODE", ""))


def parse_count(text: str) -> int | None:
    """Return the number in a text; None if it is not one, or larger than any number of tasks or CPUs."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


# --- the launchers' variables ----------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> Task:
    """Return the task that the variables describe; see `find_task` for several launchers. Raises UsageError."""
    tasks = [_task(environ, variable, sizes) for variable, sizes in LAUNCHERS if variable in environ]
    if not tasks:
        return _slurm_task(environ)
    first, *others = tasks
    notes = []
    for other in others:
        if first.rank == other.rank and (first.size == other.size or None in (first.size, other.size)):
            continue
        if other.size != 1:
            verb = "contradict" if len(first.settings) > 1 else "contradicts"
            raise UsageError(
                f"{' and '.join(first.settings)} {verb} {' and '.join(other.settings)}",
                f"choose one, e.g.: numapin exec --local-rank ${other.variable} --local-size N -- command",
            )
        settings = f"{' and '.join(other.settings)} {'are' if len(other.settings) > 1 else 'is'}"
        notes.append(f"{settings} ignored: set by another launcher, above this rank's own")

    slurm_rank = environ.get(_SLURM, str(first.rank))
    if slurm_rank != str(first.rank):
        notes.append(f"{_SLURM}={slurm_rank} is ignored because {first.variable} is set")
    elif is_in_step(environ):
        others.append(_slurm_task(environ))

    # If a wrapper has set the rank alone, the size is another launcher's. A size of 1 is not taken: one task here may
    # have started the ranks, and rank 0 then has its number by chance.
    sized = [other for other in others if other.rank == first.rank and other.size not in (None, 1)]
    if first.size is None and sized:
        first = first._replace(size=sized[0].size, settings=(*first.settings, *sized[0].settings[1:]))
    return first._replace(notes=tuple(notes))


def _task(environ: Mapping[str, str], variable: str, sizes: tuple[str, ...]) -> Task:
    rank = required_count(environ, variable)
    size: int | None = None
    used = tuple(name for name in sizes if name in environ)[:1]
    if used:
        size = required_count(environ, used[0])
    elif variable == _FLUX and environ.keys() >= {*_FLUX_TOTALS}:
        # Flux reports only the job's totals; they give the size if all hosts have the same number of tasks
        tasks, hosts = (required_count(environ, name) for name in _FLUX_TOTALS)
        if hosts and tasks % hosts == 0:
            size, used = tasks // hosts, _FLUX_TOTALS
    settings = tuple(f"{name}={environ[name]}" for name in (variable, *used))
    return Task(rank=rank, size=size, settings=settings, variable=variable)


# --- Slurm -----------------------------------------------------------------------------------------------------------


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task, or an ancestor of it.

    The batch script does not have a step's variables. The shell that salloc starts has step number 4294967290; a job
    that was submitted from there inherits it, but is not a task either.
    """
    return _SLURM in environ and _SLURM_SIZE in environ and parse_count(environ.get(_SLURM_STEP, "0")) is not None


def _slurm_task(environ: Mapping[str, str]) -> Task:
    if not is_in_step(environ):
        missing, outside = (*RANK_VARIABLES, _SLURM), ""
        if _SLURM in environ:
            missing = RANK_VARIABLES
            outside = f", and {_SLURM}={environ[_SLURM][:_MAX_SHOWN]} is ignored outside a job step"
        raise UsageError(
            f"no local rank: none of {', '.join(missing)} is set{outside}",
            f"start it with srun, mpirun or torchrun --no-python, or give the rank: {_GIVE_RANK}",
        )
    names = [name for name in (_SLURM, _SLURM_SIZE, _SLURM_HOST) if name in environ]
    return Task(
        rank=required_count(environ, _SLURM),
        size=_slurm_size(environ),
        settings=tuple(f"{name}={environ[name]}" for name in names),
        variable=_SLURM,
    )


def _slurm_size(environ: Mapping[str, str]) -> int | None:
    """Return this host's number of tasks from a list such as "4(x2),3"; None if it takes SLURM_NODEID to know."""
    sizes: list[int] = []
    ends = [0]  # of each group, counted in hosts
    for text in environ[_SLURM_SIZE].split(","):
        match = re.fullmatch(_GROUP, text)
        if match is None:
            raise _malformed(environ, _SLURM_SIZE, "is not a list of tasks per node such as 4(x2),3")
        sizes.append(int(match[1]))
        ends.append(ends[-1] + int(match[2] or 1))
    if len(set(sizes)) == 1:
        return sizes[0]
    if _SLURM_HOST not in environ:
        return None
    host = required_count(environ, _SLURM_HOST)
    for size, end in zip(sizes, ends[1:], strict=True):
        if host < end:
            return size
    raise _malformed(environ, _SLURM_SIZE, f"has no host {host}, which is {_SLURM_HOST}")


def required_count(environ: Mapping[str, str], variable: str, *, hint: str = _GIVE_RANK) -> int:
    """Return the number that a variable has. Raises UsageError."""
    value = parse_count(environ[variable])
    if value is None:
        raise _malformed(environ, variable, "is not a number from 0 to 999999", hint=hint)
    return value


def _malformed(environ: Mapping[str, str], variable: str, problem: str, *, hint: str = _GIVE_RANK) -> UsageError:
    return UsageError(f"{variable}={environ[variable][:_MAX_SHOWN]!r} {problem}", hint)
