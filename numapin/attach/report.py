"""The report of `numapin attach` as data and as JSON (numapin.attach/1), with the commands that undo its changes."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the type of a field that is read
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json

if TYPE_CHECKING:
    from collections.abc import Collection

    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import RankPlan
    from numapin.system.threads import ThreadId

FUTURE_MEMORY: Final = (
    "the memory policy of a running process cannot be changed: new pages go to the node of the CPU that first "
    "touches them"
)
STAYS: Final = {
    "shared": "shared with other processes",
    "locked": "page-locked, or held by a driver",
    "full": "no free memory on the node",
    "forbidden": "the cpuset of the process does not allow the node",
    "refused": "the kernel refuses to move pages (seccomp, or you may not trace the process)",
    "fixed": "device memory",
    "policy": "the program placed them there itself",
    "unseen": "not seen by move_pages: touched meanwhile, or hidden by Linux 6.1 to 6.4, which then moves them itself",
    "interrupted": "interrupted",
}
"""The words for why pages stay where they are, and what they mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPages:
    """The memory of a process in bytes, files not counted; far is on other nodes than the planned ones."""

    policy: str | None  # of its main thread; None: unknown
    before: Mapping[int, int]  # by node
    after: Mapping[int, int] | None  # None: nothing was to be moved
    far_bytes: int  # before
    moved_bytes: int
    stays: Mapping[str, int]  # what was not moved, by a word of `STAYS`


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProcess:
    """One process and its threads; in a dry run, what would be done."""

    pid: int
    name: str
    threads: int
    changed: int  # threads that got other CPUs
    narrower: int  # threads that were left on fewer CPUs than planned
    ended: int  # threads that ended meanwhile
    cpus_before: CpuSet
    cpus: CpuSet
    pages: ProcessPages | None  # None: the kernel does not report them
    shortfalls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRank:
    """A process that was to be bound, with its descendants as far as they were reached."""

    pid: int
    gpu_source: str
    requested: RankPlan
    processes: tuple[BoundProcess, ...]
    problem: str | None = None  # why it was not reached

    @property
    def exact(self) -> bool:
        """Whether the plan is exact and everything was done."""
        return self.problem is None and self.requested.exact and not any(each.shortfalls for each in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """All that `attach` did; `undo` are shell commands that give threads their former CPUs."""

    dry_run: bool
    migrate: bool
    interrupted: bool
    undo: tuple[str, ...]
    warnings: tuple[str, ...]
    ranks: tuple[AttachedRank, ...]

    @property
    def exact(self) -> bool:
        """Whether everything was done as requested."""
        return not self.interrupted and all(rank.exact for rank in self.ranks)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.attach/1)."""
        fixed = {"schema": "numapin.attach/1", "future_memory": FUTURE_MEMORY, "records": []}  # none are written now
        return {**fixed, "exact": self.exact, **to_json(self)}


def undo_commands(former: Mapping[ThreadId, CpuSet], changed: Collection[ThreadId]) -> tuple[str, ...]:
    """Return the commands that give the threads of changed processes their former CPUs.

    First all threads of each process get those of its main thread, or of another one that was changed if the main
    thread was not: threads that start later inherit the change, and their numbers are unknown. Then threads with other
    CPUs get theirs.
    """
    base: dict[int, ThreadId] = {}
    for thread in changed:
        if thread.pid not in base or thread.tid == thread.pid:
            base[thread.pid] = thread
    processes: dict[CpuSet, list[int]] = {}
    for thread in base.values():
        processes.setdefault(former[thread], []).append(thread.pid)
    others: dict[CpuSet, list[int]] = {}
    for thread, cpus in former.items():
        if thread.pid in base and cpus != former[base[thread.pid]]:
            others.setdefault(cpus, []).append(thread.tid)
    lines = [("taskset -acp", "pid", cpus, pids) for cpus, pids in processes.items()]
    lines += [("taskset -cp", "tid", cpus, tids) for cpus, tids in others.items()]
    return tuple(
        f"{command} {cpus} {ids[0]}"
        if len(ids) == 1
        else f"for {name} in {' '.join(map(str, ids))}; do {command} {cpus} ${name}; done"
        for command, name, cpus, ids in lines
    )
