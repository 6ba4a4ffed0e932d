"""What started this task, and which CPUs that has. Edge.

Comes in: a task, and /proc. Goes out: CPUs, to tell those that a task was given from those it shares.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.system.proc import environment_of, parent_of
from numapin.tasks.identify import is_of_task

if TYPE_CHECKING:
    from numapin.tasks.identify import Task


def launcher_cpus(task: Task) -> CpuSet | None:
    """Return the CPUs of the process that started this task: torchrun, Open MPI's daemon, slurmstepd; None if unknown.

    It is the first above this one that was not started with a rank in its environment: what lies between are wrappers
    of the task, such as shell scripts.
    """
    pid = os.getppid()
    while pid > 0 and is_of_task(environment_of(pid) or {}, task):
        pid = parent_of(pid)
    try:
        return CpuSet(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None
