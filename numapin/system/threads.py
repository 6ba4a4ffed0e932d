"""The CPUs of threads, of this process and of others: list the threads, set their CPUs, and read them back.

Linux has no call that sets the CPUs of a process, and none that takes a thread by anything but its number. So a thread
is known by its number and its start time, which are compared before and after each change.
`bind_threads` compares only the start time of the process, if it is given one.

A memory policy belongs to a thread, too, and only the thread itself can set it; the other threads of a bound process
allocate on the node of the CPU that they run on, unless they have another policy.

Programs of `numapin exec --children` import this before they start.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.bounds import MAX_CPUS
from numapin.base.cpu_set import CpuSet, render
from numapin.system.proc import Gone, folder_of, is_running, stat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class ThreadId(NamedTuple):
    """One thread of a process. `start` is its start time in clock ticks since boot."""

    pid: int
    tid: int
    start: int


def threads_of(pid: int) -> list[ThreadId]:
    """Return the threads of a process that have not ended. Raises Gone if the process has, and PermissionError."""
    folder = folder_of(pid)
    if stat(folder).has_ended:
        raise Gone
    try:
        tids = sorted(map(int, os.listdir(f"{folder}/task")))
    except (FileNotFoundError, ProcessLookupError):
        raise Gone from None
    return [thread for thread in (_thread(pid, tid) for tid in tids) if thread is not None]


def cpus_of(thread: ThreadId) -> CpuSet:
    """Return the CPUs that a thread may use. Raises Gone, and OSError: EPERM (seccomp)."""
    try:
        cpus = CpuSet(os.sched_getaffinity(thread.tid))
    except ProcessLookupError:
        raise Gone from None
    if not is_same(thread):
        raise Gone
    return cpus


def set_cpus(thread: ThreadId, cpus: CpuSet) -> CpuSet:
    """Set the CPUs that a thread may use, and return those that the kernel reports afterwards.

    The kernel drops CPUs outside the cpuset silently. Raises Gone if the thread has ended, and OSError: EPERM (another
    user's, seccomp), EINVAL (the cpuset has none of the CPUs, or a thread whose CPUs the kernel has fixed).
    """
    if not cpus:
        raise OSError(errno.EINVAL, "no CPU is given")
    if not is_same(thread):
        raise Gone
    try:
        os.sched_setaffinity(thread.tid, cpus)
    except ProcessLookupError:
        raise Gone from None
    return cpus_of(thread)


def is_same(thread: ThreadId) -> bool:
    """Return whether this very thread still exists. Once it has ended, another one may have its number."""
    return _thread(thread.pid, thread.tid) == thread


def _thread(pid: int, tid: int) -> ThreadId | None:
    try:
        found = stat(f"{folder_of(pid)}/task/{tid}")
    except Gone:
        return None
    return None if found.has_ended else ThreadId(pid, tid, found.start)


@contextmanager
def whole_cpuset() -> Iterator[CpuSet]:
    """Give this thread all CPUs of its cpuset, which are yielded, and its former ones at the end.

    taskset, a binding shell, a rank or a Slurm step may have started this process on some of them. The kernel cuts a
    wish for all CPUs; if it refuses, the former ones stay.
    """
    former = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(MAX_CPUS))
    try:
        yield CpuSet(os.sched_getaffinity(0))
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, former)


# --- all threads of a process at once --------------------------------------------------------------------------------

_MOST_PASSES: Final = 100  # threads may start threads while they are bound; those of a bound thread are bound


def bind_threads(
    pid: int, cpus: frozenset[int], *, before: Collection[frozenset[int]] | None = None, start: int | None = None
) -> tuple[str, ...]:
    """Bind every thread of a process, again until no thread changes; return what was refused.

    `before` are the sets of CPUs that the process had so far. Threads with others, all among the new ones, keep them:
    the program has placed them itself. None: every thread gets the new CPUs. With `start`, the start time of the
    process, another process that has its id by now is left alone.
    """
    refusals: dict[str, None] = {}
    for _ in range(_MOST_PASSES):
        if start is not None and not is_running(pid, start):
            break
        try:
            tids = [int(name) for name in os.listdir(f"{folder_of(pid)}/task")]
        except (FileNotFoundError, ProcessLookupError):
            break
        changed = [_bind(tid, cpus, before, refusals) for tid in tids]
        if not any(changed):
            break
    else:
        refusals[f"process {pid} starts threads faster than they can be bound; some may be on other CPUs"] = None
    return tuple(refusals)


def _bind(tid: int, cpus: frozenset[int], before: Collection[frozenset[int]] | None, refusals: dict[str, None]) -> bool:
    """Bind one thread, and return whether its CPUs changed."""
    try:
        current = os.sched_getaffinity(tid)
        if current == cpus or (before is not None and current < cpus and current not in before):
            return False
        os.sched_setaffinity(tid, cpus)
        return os.sched_getaffinity(tid) != current  # a cpuset may allow no more than it had
    except ProcessLookupError:
        return False
    except OSError as error:
        refusals[f"CPUs {render(cpus)} were refused ({error.strerror}) for a thread, which keeps its own"] = None
        return False
