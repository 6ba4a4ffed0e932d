"""Identify which rank of its host this process is, where another launcher started it."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FLUX: Final = "FLUX_TASK_LOCAL_ID"
LAUNCHERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),  # torchrun, accelerate; LOCAL_SIZE is DeepSpeed's
    ("OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),  # MVAPICH2
    ("MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),  # MPICH and Intel MPI
    ("PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    ("PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),  # HPE Cray
    (_FLUX, ()),  # see `_flux_size`
    ("JSM_NAMESPACE_LOCAL_RANK", ("JSM_NAMESPACE_LOCAL_SIZE",)),  # jsrun
)
"""Each launcher's variable for the local rank and its variables for the local size, in the order of precedence.

Slurm's come last, and only inside a job step: a batch script, and everything it starts, has SLURM_LOCALID=0.
"""

RANK_VARIABLES: Final = tuple(variable for variable, _ in LAUNCHERS)
"""Each launcher's variable for the local rank, in the order of precedence, without Slurm's."""

_SLURM: Final = "SLURM_LOCALID"
_SLURM_SIZE: Final = "SLURM_STEP_TASKS_PER_NODE"  # SLURM_NTASKS_PER_NODE is the job's; a step may have other counts
_SLURM_STEP: Final = "SLURM_STEP_ID"
_SLURM_HOST: Final = "SLURM_NODEID"
_MAX_DIGITS: Final = 6  # of any number of tasks or CPUs
_MAX_SHOWN: Final = 60  # characters of a variable's value in a message
_GROUP: Final = r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?"  # compiled only where Slurm needs it: `exec` must be quick
_GIVE_RANK: Final = "numapin exec --local-rank N --local-size N -- command"


class Task(NamedTuple):
    """One process of a host.

    `size` is the number of tasks on the host, None if unknown. `settings` are the variables or options that were used,
    with their values: the first gave the rank, the others, if any, the size. `variable` is the name of the first, None
    if the user gave the rank. `notes` list variables that are set but ignored.
    """

    rank: int
    size: int | None
    settings: tuple[str, ...]
    variable: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the rank, the size, and the settings they come from."""
        size = "an unknown number" if self.size is None else str(self.size)
        return f"rank {self.rank} of {size} on this host ({', '.join(self.settings)})"


def find_task(environ: Mapping[str, str], *, rank: int | None = None, size: int | None = None) -> Task:
    """Return this process's task from the user's options, else from the environment.

    If several launchers' variables are set, the first of LAUNCHERS counts. The others must agree with it, or belong to
    a launcher that started one task here, which then started the ranks (mpirun -> torchrun).

    Args:
        environ: The environment of this process.
        rank: The local rank that the user gave.
        size: The number of tasks on this host that the user gave.

    Returns:
        The task.

    Raises:
        UsageError: No variable is set, one is not a number, or they contradict each other.
    """
    task = _with_given_rank(environ, rank) if rank is not None else _from_environment(environ)
    if size is not None:
        task = task._replace(size=size, settings=(task.settings[0], f"--local-size={size}"))
    _require_possible(task)
    return task


def is_wrapper_of(environ: Mapping[str, str], task: Task) -> bool:
    """Return whether an ancestor process with this environment is a wrapper of the task, and not its launcher.

    A wrapper has a rank itself, if not always from the variable that counts below it. If that rank is the only one on
    this host and the task is not, the process is a launcher that another launcher started: srun -> torchrun.
    """
    if not _has_rank(environ):
        return False
    try:
        size = find_task(environ).size
    except UsageError:
        return True  # if variables contradict each other, one of them is the wrapper's rank
    return size != 1 or task.size == 1


def _has_rank(environ: Mapping[str, str]) -> bool:
    return _in_step(environ) or not environ.keys().isdisjoint(RANK_VARIABLES)


def cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """Return the number of CPUs of this host that Slurm gave to the job; its own daemon may have more."""
    return parse_count(environ.get("SLURM_CPUS_ON_NODE", ""))


def parse_count(text: str) -> int | None:
    """Return the number in a text; None if it is not one, or larger than any number of tasks or CPUs."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _require_possible(task: Task) -> None:
    settings = " and ".join(task.settings)
    if max(task.rank + 1, task.size or 1) > MAX_RANKS:
        raise UsageError(f"{settings}: at most {MAX_RANKS} ranks per host are accepted", _GIVE_RANK)
    if task.size is not None and task.rank >= task.size:
        raise UsageError(f"local rank {task.rank} is not below the local size {task.size}: {settings}", _GIVE_RANK)


def _with_given_rank(environ: Mapping[str, str], rank: int) -> Task:
    """Return the task of a rank that the user gave; only its size may come from the environment."""
    task = Task(rank=rank, size=None, settings=(f"--local-rank={rank}",))
    try:
        found = _from_environment(environ)
    except UsageError:
        return task  # the user overrules the variables, so they need not make sense
    return task._replace(size=found.size, settings=(*task.settings, *found.settings[1:]))


# --- the launchers' variables ----------------------------------------------------------------------------------------


def _from_environment(environ: Mapping[str, str]) -> Task:
    tasks = [_task(environ, variable, sizes) for variable, sizes in LAUNCHERS if variable in environ]
    if not tasks:
        return _slurm_task(environ)
    first, *others = tasks
    notes = [_note_of_outer(first, other) for other in others if not _agree(first, other)]
    slurm, slurm_notes = _slurm_beside(environ, first)
    return _with_size_of_others(first, (*others, *slurm))._replace(notes=(*notes, *slurm_notes))


def _note_of_outer(first: Task, other: Task) -> str:
    """Return the note that another launcher's variables are ignored.

    Raises UsageError unless that launcher started one task here, which can be the launcher of `first`.
    """
    if other.size != 1:
        raise UsageError(
            f"{_joined(first.settings)} contradict {_joined(other.settings)}",
            f"choose one, e.g.: numapin exec --local-rank ${other.variable} --local-size N -- command",
        )
    return f"{_joined(other.settings)} is ignored: set by another launcher, above this rank's own"


def _slurm_beside(environ: Mapping[str, str], first: Task) -> tuple[tuple[Task, ...], tuple[str, ...]]:
    """Return Slurm's task if there is one of the same rank, and a note if Slurm's rank is another one."""
    rank = environ.get(_SLURM)
    if rank not in (None, str(first.rank)):
        return (), (f"{_SLURM}={rank} is ignored because {first.variable} is set",)
    return ((_slurm_task(environ),) if _in_step(environ) else ()), ()


def _with_size_of_others(first: Task, others: Sequence[Task]) -> Task:
    """Take the size from another launcher's variables if a wrapper has set the rank alone.

    A size of 1 is not taken: one task here may have started the ranks, and rank 0 then has its number by chance.
    """
    known = next((other for other in others if _gives_size(other, first.rank)), None)
    if first.size is not None or known is None:
        return first
    return first._replace(size=known.size, settings=(*first.settings, *known.settings[1:]))


def _gives_size(task: Task, rank: int) -> bool:
    return task.rank == rank and task.size not in (None, 1)


def _agree(first: Task, other: Task) -> bool:
    return first.rank == other.rank and (first.size == other.size or None in (first.size, other.size))


def _task(environ: Mapping[str, str], variable: str, sizes: tuple[str, ...]) -> Task:
    """Return the task of one launcher, by its variable for the rank and the first of `sizes` that is set."""
    rank = _required_count(environ, variable)
    size, names = _flux_size(environ) if variable == _FLUX else _first_size(environ, sizes)
    return Task(rank=rank, size=size, settings=_settings(environ, variable, *names), variable=variable)


def _settings(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={environ[name]}" for name in names)


def _first_size(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[int | None, tuple[str, ...]]:
    name = next((name for name in names if name in environ), None)
    return (None, ()) if name is None else (_required_count(environ, name), (name,))


def _flux_size(environ: Mapping[str, str]) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of tasks per host if all hosts have the same number: Flux reports only the job's totals."""
    names = ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES")
    if not environ.keys() >= set(names):
        return None, ()
    tasks, hosts = _required_count(environ, names[0]), _required_count(environ, names[1])
    return (tasks // hosts, names) if hosts and tasks % hosts == 0 else (None, ())


# --- Slurm -----------------------------------------------------------------------------------------------------------


def _in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task, or an ancestor of it.

    The batch script does not have a step's variables. The shell that salloc starts has step number 4294967290; a job
    that was submitted from there inherits it, but is not a task either.
    """
    return _SLURM in environ and _SLURM_SIZE in environ and parse_count(environ.get(_SLURM_STEP, "0")) is not None


def _slurm_task(environ: Mapping[str, str]) -> Task:
    if not _in_step(environ):
        raise _no_rank(environ)
    task = _task(environ, _SLURM, ())
    names = [name for name in (_SLURM_SIZE, _SLURM_HOST) if name in environ]
    return task._replace(size=_slurm_size(environ), settings=(*task.settings, *_settings(environ, *names)))


def _no_rank(environ: Mapping[str, str]) -> UsageError:
    missing, outside = (*RANK_VARIABLES, _SLURM), ""
    if _SLURM in environ:
        missing = RANK_VARIABLES
        outside = f", and {_SLURM}={environ[_SLURM][:_MAX_SHOWN]} is ignored outside a job step"
    return UsageError(
        f"no local rank: none of {', '.join(missing)} is set{outside}",
        f"start it with srun, mpirun or torchrun --no-python, or give the rank: {_GIVE_RANK}",
    )


def _slurm_size(environ: Mapping[str, str]) -> int | None:
    """Return this host's number of tasks from a list such as "4(x2),3"; None if it takes SLURM_NODEID to know."""
    groups = [_slurm_group(environ, text) for text in environ[_SLURM_SIZE].split(",")]
    sizes = {num_tasks for num_tasks, _ in groups}
    if len(sizes) == 1:
        return sizes.pop()
    return _size_on_this_host(environ, groups) if _SLURM_HOST in environ else None


def _size_on_this_host(environ: Mapping[str, str], groups: Sequence[tuple[int, int]]) -> int:
    """Return the number of tasks on host number SLURM_NODEID. Raises UsageError if the groups have fewer hosts."""
    host = _required_count(environ, _SLURM_HOST)
    ends = accumulate(num_hosts for _, num_hosts in groups)
    for (num_tasks, _), end in zip(groups, ends, strict=True):
        if host < end:
            return num_tasks
    raise _malformed(environ, _SLURM_SIZE, f"has no host {host}, which is {_SLURM_HOST}")


def _slurm_group(environ: Mapping[str, str], text: str) -> tuple[int, int]:
    """Return the number of tasks on each of a number of hosts: (4, 2) for "4(x2)"."""
    match = re.fullmatch(_GROUP, text)
    if match is None:
        raise _malformed(environ, _SLURM_SIZE, "is not a list of tasks per node such as 4(x2),3")
    return int(match[1]), int(match[2] or 1)


# --- values and messages ---------------------------------------------------------------------------------------------


def _required_count(environ: Mapping[str, str], variable: str) -> int:
    value = parse_count(environ[variable])
    if value is None:
        raise _malformed(environ, variable, "is not a number from 0 to 999999")
    return value


def _malformed(environ: Mapping[str, str], variable: str, problem: str) -> UsageError:
    return UsageError(f"{variable}={environ[variable][:_MAX_SHOWN]!r} {problem}", _GIVE_RANK)


def _joined(settings: tuple[str, ...]) -> str:
    return " and ".join(settings)
