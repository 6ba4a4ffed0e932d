"""What `attach` did, as data. Pure.

Comes in: counts from `bind`, `pages` and `restore`. Goes out: `Attached` and `Restored`, and their JSON
(numapin.attach/1, numapin.restore/1).
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the type of a field that is read
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.records import to_json

if TYPE_CHECKING:
    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import RankPlan

SCHEMA: Final = "numapin.attach/1"
RESTORE_SCHEMA: Final = "numapin.restore/1"
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
    """The memory of a process in bytes, files not counted.

    Attributes:
        policy: The memory policy of its main thread. None: unknown.
        before: The bytes on each node at first.
        after: The bytes on each node in the end. None: nothing was to be moved.
        far_bytes: The bytes on other nodes than the planned ones, at first.
        moved_bytes: The bytes that were moved.
        stays: The bytes that were not, by reason; the words are those of `STAYS`.
    """

    policy: str | None
    before: Mapping[int, int]
    after: Mapping[int, int] | None
    far_bytes: int
    moved_bytes: int
    stays: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProcess:
    """One process and its threads.

    Attributes:
        pid: The process id.
        name: The name of the process.
        threads: How many threads were seen.
        changed: How many of them got other CPUs; in a dry run, how many would.
        narrower: How many were left on fewer CPUs than planned.
        ended: How many ended meanwhile.
        cpus_before: The CPUs that its threads could use before.
        cpus: The CPUs that they can use now; in a dry run, the ones that they would get.
        pages: Its memory. None: the kernel does not report it.
        shortfalls: What could not be done, with remedies.
    """

    pid: int
    name: str
    threads: int
    changed: int
    narrower: int
    ended: int
    cpus_before: CpuSet
    cpus: CpuSet
    pages: ProcessPages | None
    shortfalls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedRank:
    """A process that was to be bound.

    Attributes:
        pid: The process id.
        gpu_source: How its GPU is known.
        requested: Its plan.
        processes: It and its descendants, as far as they were reached.
        problem: Why it was not reached. None: it was.
    """

    pid: int
    gpu_source: str
    requested: RankPlan
    processes: tuple[BoundProcess, ...]
    problem: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the plan is exact and everything was done."""
        return self.problem is None and self.requested.exact and not any(each.shortfalls for each in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """All that `attach` did.

    Attributes:
        dry_run: Whether nothing was changed.
        migrate: Whether pages were to be moved.
        interrupted: Whether Ctrl-C ended it early.
        records: The files with the CPUs before the change.
        warnings: Messages about the machine and the processes.
        ranks: The processes that were to be bound.
    """

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
        return {"schema": SCHEMA, "exact": self.exact, "future_memory": FUTURE_MEMORY, **to_json(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredProcess:
    """A process whose threads were set back.

    Attributes:
        pid: The process id of the bound process; its descendants are counted with it.
        name: Its name.
        threads: How many threads have their former CPUs.
        started_since: How many of these started after the change; they got the CPUs of their process.
        ended: How many threads have ended since.
        left: How many the program has moved to other CPUs since; they were left alone.
        shortfalls: What could not be done.
    """

    pid: int
    name: str
    threads: int
    started_since: int
    ended: int
    left: int
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
        return {"schema": RESTORE_SCHEMA, "exact": self.exact, **to_json(self)}
