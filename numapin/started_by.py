"""What started this task, and which CPUs that has. Edge.

Comes in: /proc and the environment. Goes out: CPUs, to tell those that a task was given from those it shares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.observe import environment_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.tasks import Task

_MAX_DIGITS: Final = 6


def launcher_cpus(task: Task) -> frozenset[int] | None:
    """Return the CPUs of the process that started this task: torchrun, Open MPI's daemon, slurmstepd; None if unknown.

    It is the first above this one that was not started with the task's rank in its environment: what lies between are
    wrappers of the task, such as shell scripts.
    """
    if task.variable is None:
        return None
    pid = os.getppid()
    while pid > 0 and task.variable in (environment_of(pid) or {}):
        pid = _parent_of(pid)
    try:
        return frozenset(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None


def cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """Return how many CPUs of this host Slurm gave to the job; its own daemon may have more."""
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _parent_of(pid: int) -> int:
    """Return the parent's process id, 0 where it is outside of this container, or nobody tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])
