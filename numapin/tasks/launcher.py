"""The CPUs of the process that started this task."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.system.proc import environment_of, parent_of
from numapin.tasks.identify import is_wrapper_of

if TYPE_CHECKING:
    from numapin.tasks.identify import Task


def launcher_cpus(task: Task) -> CpuSet | None:
    """Return the CPUs of the process that started this task (torchrun, Open MPI's daemon, slurmstepd), or None.

    It is the nearest ancestor that was not started with a rank in its environment. Those below it are wrappers of the
    task, such as shell scripts.
    """
    pid = _launcher(task)
    try:
        return CpuSet(os.sched_getaffinity(pid)) if pid > 0 else None
    except OSError:
        return None


def _launcher(task: Task) -> int:
    """Return the process that started this task; 0 if it cannot be seen, e.g. from a container."""
    pid = os.getppid()
    while pid > 0 and is_wrapper_of(environment_of(pid) or {}, task):
        pid = parent_of(pid)
    return pid
