"""The CPUs of the threads of other processes: list the threads, set their CPUs, and read them back.

Linux has no call that sets the CPUs of a process, and none that takes a thread by anything but its number. So a thread
is known by its number and its start time, which are compared before and after each change.
"""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.system.proc import Gone, folder_of, stat


class ThreadId(NamedTuple):
    """One thread of a process. `start` is its start time in clock ticks since boot."""

    pid: int
    tid: int
    start: int

    @property
    def is_main(self) -> bool:
        """Whether it is the main thread of its process."""
        return self.tid == self.pid


def threads_of(pid: int) -> list[ThreadId]:
    """Return the threads of a process that have not ended. Raises Gone if the process has, and PermissionError."""
    folder = folder_of(pid)
    if stat(folder).has_ended:
        raise Gone
    try:
        tids = sorted(map(int, os.listdir(f"{folder}/task")))
    except (FileNotFoundError, ProcessLookupError):
        raise Gone from None
    return not_none(_thread(pid, tid) for tid in tids)


def cpus_of(thread: ThreadId) -> CpuSet:
    """Return the CPUs that a thread may use. Raises Gone, and OSError: EPERM (seccomp)."""
    try:
        cpus = CpuSet(os.sched_getaffinity(thread.tid))
    except ProcessLookupError:
        raise Gone from None
    _require_same(thread)
    return cpus


def set_cpus(thread: ThreadId, cpus: CpuSet) -> CpuSet:
    """Set the CPUs that a thread may use, and return those that the kernel reports afterwards.

    The kernel drops CPUs outside the cpuset silently. Raises Gone if the thread has ended, and OSError: EPERM (another
    user's, seccomp), EINVAL (the cpuset has none of the CPUs, or a thread whose CPUs the kernel has fixed).
    """
    if not cpus:
        raise OSError(errno.EINVAL, "no CPU is given")
    _require_same(thread)
    try:
        os.sched_setaffinity(thread.tid, cpus)
        found = CpuSet(os.sched_getaffinity(thread.tid))
    except ProcessLookupError:
        raise Gone from None
    _require_same(thread)
    return found


def is_same(thread: ThreadId) -> bool:
    """Return whether this very thread still exists."""
    return _thread(thread.pid, thread.tid) == thread


def _require_same(thread: ThreadId) -> None:
    """Raise Gone if the thread has ended. Another one can have its number by then."""
    if not is_same(thread):
        raise Gone


def _thread(pid: int, tid: int) -> ThreadId | None:
    try:
        found = stat(f"{folder_of(pid)}/task/{tid}")
    except Gone:
        return None
    return None if found.has_ended else ThreadId(pid, tid, found.start)
