"""Which rank of its host this process is, where something else started it. Pure.

Comes in: an environment, and what the user said. Goes out: a `Task`, or a UsageError that names the variables and their
values.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_RANKS
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHERS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),  # torchrun, accelerate; LOCAL_SIZE is DeepSpeed's
    ("OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),  # MVAPICH2
    ("MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),  # MPICH and Intel MPI
    ("PMI_LOCAL_RANK", ("PMI_LOCAL_SIZE",)),
    ("PALS_LOCAL_RANKID", ("PALS_LOCAL_SIZE",)),  # HPE Cray
    ("FLUX_TASK_LOCAL_ID", ()),
    ("JSM_NAMESPACE_LOCAL_RANK", ("JSM_NAMESPACE_LOCAL_SIZE",)),  # jsrun
)
"""Variables of a launcher's local rank and local size, in the order to ask.

Slurm's come after them, and count in a step only: a batch script has SLURM_LOCALID=0, as has all that it starts.
"""

_SLURM: Final = "SLURM_LOCALID"
_SLURM_SIZE: Final = "SLURM_STEP_TASKS_PER_NODE"  # SLURM_NTASKS_PER_NODE is the job's, and a step may have other tasks
_SLURM_STEP: Final = "SLURM_STEP_ID"
_MAX_DIGITS: Final = 6  # of any number of tasks or CPUs
_GROUP: Final = r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?"  # compiled only where Slurm needs it: `exec` must be quick
_SAY: Final = "numapin exec --local-rank N --local-size N -- command"


class Task(NamedTuple):
    """One process of a host. `size` None is unknown; `told_by` are the variables or options, with their values.

    The first of them told the rank, the others, if any, the size. `variable` is the name of the first, None where the
    user told the rank. `notes` are what was set and does not count.
    """

    rank: int
    size: int | None
    told_by: tuple[str, ...]
    variable: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Say the rank, of how many, and who told."""
        size = "an unknown number" if self.size is None else str(self.size)
        return f"rank {self.rank} of {size} on this host ({', '.join(self.told_by)})"


def find_task(environ: Mapping[str, str], *, rank: int | None = None, size: int | None = None) -> Task:
    """Return this process's task: `rank` and `size` as the user said them, else as the environment tells.

    Where several launchers' variables are set, the first of LAUNCHERS counts. The others must agree, or be those of a
    launcher that started one task here, which then started the ranks: mpirun -> torchrun. Raises UsageError where no
    variable is set, where one is no number, and where they contradict each other.
    """
    task = _given(environ, rank, size) if rank is not None else _told(environ)
    if size is not None and rank is None:
        task = task._replace(size=size, told_by=(task.told_by[0], f"--local-size={size}"))
    if max(task.rank + 1, task.size or 1) > MAX_RANKS:
        raise UsageError(f"{_and(task.told_by)}: at most {MAX_RANKS} ranks of one host are accepted", _SAY)
    if task.size is not None and task.rank >= task.size:
        raise UsageError(f"local rank {task.rank} is not below the local size {task.size}: {_and(task.told_by)}", _SAY)
    return task


def is_of_task(environ: Mapping[str, str], task: Task) -> bool:
    """Say whether a process above a task, with that environment, is a wrapper of it, and not what started the task.

    A wrapper has a rank itself, if not always by the variable that counts below it. One of a rank that is alone on this
    host, where the task is not, is a launcher that another one started: srun -> torchrun.
    """
    if not (_in_step(environ) or any(variable in environ for variable, _ in LAUNCHERS)):
        return False
    try:
        size = find_task(environ).size
    except UsageError:
        return True  # of variables that contradict each other one is its rank
    return size != 1 or task.size == 1


def cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many CPUs of this host Slurm gave to the job; its own daemon may have more."""
    return number(environ.get("SLURM_CPUS_ON_NODE", ""))


def number(text: str) -> int | None:
    """Return the number that a text is, None where it is none, or more than there are tasks or CPUs anywhere."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _given(environ: Mapping[str, str], rank: int, size: int | None) -> Task:
    """Return the task of a rank that the user gave; only its size may be asked for."""
    if size is not None:
        return Task(rank=rank, size=size, told_by=(f"--local-rank={rank}", f"--local-size={size}"))
    task = Task(rank=rank, size=None, told_by=(f"--local-rank={rank}",))
    try:
        told = _told(environ)
    except UsageError:
        return task  # what the user overrules need not make sense
    return task._replace(size=told.size, told_by=(*task.told_by, *told.told_by[1:]))


def _told(environ: Mapping[str, str]) -> Task:
    tasks = [_task(environ, variable, sizes) for variable, sizes in LAUNCHERS if variable in environ]
    if not tasks:
        return _slurm_task(environ)
    first, *others = tasks
    for other in others:
        if not _agree(first, other) and other.size != 1:
            raise UsageError(
                f"{_and(first.told_by)} contradict {_and(other.told_by)}",
                f"say which counts, as in: numapin exec --local-rank ${other.variable} --local-size N -- command",
            )
    outer = [f"{_and(other.told_by)} is of the launcher's launcher" for other in others if not _agree(first, other)]
    slurm = environ.get(_SLURM, str(first.rank))
    if slurm != str(first.rank):
        outer.append(f"{_SLURM}={slurm} does not count beside {first.variable}")
    elif _in_step(environ):
        others.append(_slurm_task(environ))
    return _sized(first, others)._replace(notes=tuple(outer))


def _sized(first: Task, others: list[Task]) -> Task:
    """Take the size from another launcher's variables where a wrapper has set the rank alone.

    A size of 1 is not taken: one task here may have started the ranks, of which 0 has its number by chance.
    """
    known = next((other for other in others if other.rank == first.rank and other.size not in (None, 1)), None)
    if first.size is not None or known is None:
        return first
    return first._replace(size=known.size, told_by=(*first.told_by, *known.told_by[1:]))


def _agree(first: Task, other: Task) -> bool:
    return first.rank == other.rank and (first.size == other.size or None in (first.size, other.size))


def _task(environ: Mapping[str, str], variable: str, sizes: tuple[str, ...]) -> Task:
    rank, told_by = _number(environ, variable), [f"{variable}={environ[variable]}"]
    size_from = next((name for name in sizes if name in environ), None)
    if size_from is not None:
        told_by.append(f"{size_from}={environ[size_from]}")
        size: int | None = _number(environ, size_from)
    else:
        size, names = _flux_size(environ) if variable == "FLUX_TASK_LOCAL_ID" else (None, ())
        told_by += [f"{name}={environ[name]}" for name in names]
    return Task(rank=rank, size=size, told_by=tuple(told_by), variable=variable)


def _flux_size(environ: Mapping[str, str]) -> tuple[int | None, tuple[str, ...]]:
    """Return the tasks a host has where every host has as many, which is all that Flux tells."""
    names = ("FLUX_JOB_SIZE", "FLUX_JOB_NNODES")
    if not all(name in environ for name in names):
        return None, ()
    tasks, hosts = (_number(environ, name) for name in names)
    return (tasks // hosts, names) if hosts and tasks % hosts == 0 else (None, ())


def _in_step(environ: Mapping[str, str]) -> bool:
    """Say whether srun started this as a task, or something below one.

    The batch script has no step's variables. The shell that salloc gives has the number 4294967290, and what a job that
    was submitted there inherits of it is no task either.
    """
    return _SLURM in environ and _SLURM_SIZE in environ and number(environ.get(_SLURM_STEP, "0")) is not None


def _slurm_task(environ: Mapping[str, str]) -> Task:
    if not _in_step(environ):
        looked_at = ", ".join((*(variable for variable, _ in LAUNCHERS), _SLURM))
        outside = f"; {_SLURM}={environ[_SLURM][:60]} does not count outside of a step" if _SLURM in environ else ""
        raise UsageError(
            f"no local rank: none of {looked_at} is set{outside}",
            f"start it with srun, mpirun or torchrun --no-python, or say: {_SAY}",
        )
    task = _task(environ, _SLURM, ())
    names = (_SLURM_SIZE, "SLURM_NODEID") if "SLURM_NODEID" in environ else (_SLURM_SIZE,)
    told_by = (*task.told_by, *(f"{name}={environ[name]}" for name in names))
    return task._replace(size=_slurm_size(environ), told_by=told_by)


def _slurm_size(environ: Mapping[str, str]) -> int | None:
    """Return the tasks of this host out of a list such as "4(x2),3", None where only SLURM_NODEID could tell."""
    counts: list[tuple[int, int]] = []  # so many tasks on so many hosts
    for group in environ[_SLURM_SIZE].split(","):
        match = re.fullmatch(_GROUP, group)
        if match is None:
            raise _malformed(environ, _SLURM_SIZE, "is no list of tasks per node, such as 4(x2),3")
        counts.append((int(match[1]), int(match[2] or 1)))
    if len({tasks for tasks, _ in counts}) == 1:
        return counts[0][0]
    if "SLURM_NODEID" not in environ:
        return None
    node = left = _number(environ, "SLURM_NODEID")
    for tasks, hosts in counts:
        if left < hosts:
            return tasks
        left -= hosts
    raise _malformed(environ, _SLURM_SIZE, f"has no host {node}, which is SLURM_NODEID")


def _number(environ: Mapping[str, str], variable: str) -> int:
    value = number(environ[variable])
    if value is None:
        raise _malformed(environ, variable, "is no number of a task")
    return value


def _malformed(environ: Mapping[str, str], variable: str, problem: str) -> UsageError:
    return UsageError(f"{variable}={environ[variable][:60]!r} {problem}", _SAY)


def _and(told_by: tuple[str, ...]) -> str:
    return " and ".join(told_by)
