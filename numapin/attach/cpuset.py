"""The CPUs that `attach` may plan with: its own cpuset, not the CPUs that it was started on. Edge.

Comes in: a process. Goes out: a block in which this thread has all CPUs of its cpuset, and the CPUs that the other
process may use although this one may not.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_CPUS
from numapin.base.cpu_set import CpuSet
from numapin.system.cgroup import cpuset_directories
from numapin.system.proc import thread_cpus
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterator

_FILES: Final = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # cgroup version 2, version 1


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


def cpus_of_cpuset(pid: int, tree: Tree | None = None) -> CpuSet:
    """Return the CPUs of a process's cpuset, as far as they can be seen: those of its threads are among them."""
    tree = tree or Tree("")
    files = (f"{directory}/{name}" for directory in cpuset_directories(tree, pid) for name in _FILES)
    listed = next(filter(None, map(tree.numbers, files)), CpuSet())
    return CpuSet(listed).union(*thread_cpus(pid))


def shortfalls_of(pid: int, known: CpuSet) -> tuple[str, ...]:
    """Return what a plan from the known CPUs lacks for a process: the other CPUs of its cpuset."""
    missing = cpus_of_cpuset(pid) - known
    if not missing:
        return ()
    return (
        f"the plan leaves out CPUs {missing}: the process may use them, but numapin attach was started in a cpuset "
        f"without them; start it outside that cpuset; see: cat /proc/self/cgroup /proc/{pid}/cgroup",
    )
