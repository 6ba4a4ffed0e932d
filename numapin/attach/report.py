"""What `numapin attach` and `--restore` did, as data and as JSON (numapin.attach/1, numapin.restore/1). Pure."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the type of a field that is read
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json

if TYPE_CHECKING:
    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import RankPlan

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
    "unseen": "hidden from move_pages: Linux 6.1 to 6.4 hides what automatic NUMA balancing watches, and moves it "
    "itself when the process touches it",
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
    """All that `attach` did; `records` are the files with the CPUs before the change."""

    dry_run: bool
    migrate: bool
    interrupted: bool
    records: tuple[str, ...]
    warnings: tuple[str, ...]
    ranks: tuple[AttachedRank, ...]

    @property
    def exact(self) -> bool:
        """Whether everything was done as requested."""
        return not self.interrupted and all(rank.exact for rank in self.ranks)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.attach/1)."""
        return {"schema": "numapin.attach/1", "exact": self.exact, "future_memory": FUTURE_MEMORY, **to_json(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredProcess:
    """A process whose threads were set back; its descendants are counted with it."""

    pid: int
    name: str
    threads: int  # that have their former CPUs
    started_since: int  # of these; they got the CPUs of their process
    ended: int
    left: int  # the program has moved them since
    shortfalls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """All that `attach --restore` did; `warnings` name processes that have ended, and malformed records."""

    dry_run: bool
    warnings: tuple[str, ...]
    processes: tuple[RestoredProcess, ...]

    @property
    def exact(self) -> bool:
        """Whether every thread that still runs was set back."""
        return not any(process.shortfalls or process.left for process in self.processes)

    def to_json(self) -> dict[str, object]:
        """Return the JSON form (schema numapin.restore/1)."""
        return {"schema": "numapin.restore/1", "exact": self.exact, **to_json(self)}
