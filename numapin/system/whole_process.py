"""Bind all threads of a process, and count its memory by node.

Linux binds threads, not processes. A memory policy belongs to a thread, too, and only the thread itself can set it; the
other threads of a bound process allocate on the node of the CPU that they run on, unless they have another policy.
"""

from __future__ import annotations

import os

from numapin.base import cpu_set
from numapin.system import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator
    from typing import Final

_MOST_PASSES: Final = 100
"""Threads may start threads while they are bound; those of a bound thread are bound."""


class BoundThreads:
    """The result for a process: the number of threads that have its CPUs now, of `kept` ones, and what was refused.

    `kept` threads were narrower than their process before: the program has placed them itself, on CPUs of the new ones.
    """

    __slots__ = ("kept", "num_threads", "refusals")

    def __init__(self, *, num_threads: int, kept: int, refusals: tuple[str, ...]) -> None:
        self.num_threads, self.kept, self.refusals = num_threads, kept, refusals


def bind_threads(
    pid: int, cpus: frozenset[int], *, before: Collection[frozenset[int]] | None = None, start: int | None = None
) -> BoundThreads:
    """Bind every thread of a process, until no thread is found that is not bound.

    Args:
        pid: The process.
        cpus: The CPUs. The kernel leaves out those that the process's cpuset does not allow.
        before: The sets of CPUs that the process had so far. Threads with others, all among the new ones, keep them.
            None: every thread gets the new CPUs.
        start: The start time of the process, if another one may have its id by now, which is then left alone.

    Returns:
        How many threads were bound. A process that has ended has none.
    """
    refusals: dict[str, None] = {}
    for _ in range(_MOST_PASSES):
        is_other = start is not None and not proc.is_running(pid, start)
        states = [] if is_other else [_bind(tid, cpus, before, refusals) for tid in _threads(pid)]
        if "changed" not in states:
            return BoundThreads(num_threads=states.count("bound"), kept=states.count("kept"), refusals=tuple(refusals))
    refusals[f"process {pid} starts threads faster than they can be bound; some may be on other CPUs"] = None
    return BoundThreads(num_threads=0, kept=0, refusals=tuple(refusals))


def _bind(tid: int, cpus: frozenset[int], before: Collection[frozenset[int]] | None, refusals: dict[str, None]) -> str:
    """Bind one thread; return its state: "changed" now, "bound" or "kept" as it is, "refused", or "gone"."""
    try:
        current = os.sched_getaffinity(tid)
        if before is not None and current < cpus and current not in before:
            return "kept"
        if current == cpus:
            return "bound"
        os.sched_setaffinity(tid, cpus)
        return "bound" if os.sched_getaffinity(tid) == current else "changed"  # a cpuset allows no more
    except ProcessLookupError:
        return "gone"
    except OSError as error:
        refusals[f"CPUs {cpu_set.render(cpus)} were refused ({error.strerror}) for a thread, which keeps its own"] = (
            None
        )
        return "refused"


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"{proc.folder_of(pid)}/task")]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants_of(pid: int, *, without: Container[int] = ()) -> Iterator[tuple[int, int]]:
    """Yield the descendants of a process and their start times, nearest first, as the kernel lists them.

    Those in `without` are left out, and so is what is below them.
    """
    for child in _ids_below(pid, without):
        try:
            yield child, proc.stat(proc.folder_of(child)).start
        except (proc.Gone, PermissionError):
            continue


def _ids_below(pid: int, without: Container[int]) -> Iterator[int]:
    parents = [pid]
    for parent in parents:
        children = [child for child in proc.children_in(parent) if child not in without]
        yield from children
        parents += children


def main_policy(pid: int) -> tuple[str, frozenset[int]] | None:
    """Return the memory policy of a process's main thread, in the kernel's words, and its nodes; None: unknown.

    The kernel shows it at the stack. Other threads can ask the kernel for their own policy only.
    """
    from numapin.system.numa_maps import parse

    try:
        mappings = list(parse(proc.read(f"{proc.folder_of(pid)}/numa_maps")))
    except (proc.Gone, OSError, ValueError):  # as below
        return None
    stack = next((mapping for mapping in mappings if " stack" in mapping.words), None)
    return None if stack is None else (stack.mode, cpu_set.CpuSet.parse(stack.nodes))


def private_bytes(pid: int) -> dict[int, int] | None:
    """Return the bytes of a process's heap, stacks and anonymous mappings on each node; None if they are unknown.

    Memory of files and of shared objects is not counted: other processes may have placed it. The kernel walks the page
    tables once, which takes about 1 ms per 100 MB of small pages. Source: proc_pid_numa_maps(5).
    """
    from collections import Counter

    from numapin.system.numa_maps import parse

    sizes: Counter[int] = Counter()
    try:
        for mapping in parse(proc.read(f"{proc.folder_of(pid)}/numa_maps")):
            if " file=" not in mapping.words:
                sizes.update(mapping.bytes_by_node)
    except (proc.Gone, OSError, ValueError):  # another user's process, or a kernel without numa_maps
        return None
    return dict(sorted(sizes.items()))
