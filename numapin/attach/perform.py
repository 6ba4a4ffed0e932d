"""Attach: bind the targets, then move their pages if requested, and report what was done. Edge.

Comes in: an `Aim` and options. Goes out: `Attached`. All threads are bound before any page moves, so that
pages that are touched meanwhile are local.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from numapin.attach.bind import Binder
from numapin.attach.changes import STAYS, Attached, AttachedRank
from numapin.attach.pages import Move, described, planned_nodes, policy_shortfalls, read_memory
from numapin.attach.processes import LIST
from numapin.attach.record import open_records
from numapin.base.sizes import render
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.system import proc
from numapin.system.affinity import ThreadId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.attach.bind import How
    from numapin.attach.changes import BoundProcess, ProcessPages
    from numapin.attach.targets import Aim, Target
    from numapin.base.cpu_set import CpuSet
    from numapin.plan.model import RankPlan

    _Recorder = Callable[[Mapping[ThreadId, CpuSet], Mapping[ThreadId, CpuSet]], None]

_ENDED: Final = "it ended before"
_INTERRUPTED: Final = "interrupted"
_UNREADABLE: Final = "its memory cannot be read, so no page was moved; run this as the job's user, or as root"


@dataclass(slots=True, kw_only=True)
class Attach:
    """One `attach`.

    Attributes:
        aim: The targets.
        how: The options of binding.
        migrate: Whether to move pages.
        environ: Where TMPDIR is looked up.
        progress: Called with the process id, the bytes of its memory that were done, and their total.
    """

    aim: Aim
    how: How
    migrate: bool
    environ: Mapping[str, str]
    progress: Callable[[int, int, int], None]
    _interrupted: bool = False

    def run(self) -> Attached:
        """Do it.

        Raises UsageError if every target ended first, or if roles forbid to widen, and NumapinError if nothing can be
        recorded.
        """
        self._require_no_roles_to_widen()
        bound, paths = self._bind_all()
        if not any(rank.processes for rank in bound):
            if self._interrupted:
                raise KeyboardInterrupt
            raise _all_ended(bound)
        ranks = tuple(map(self._with_memory, bound))
        return Attached(
            dry_run=self.how.dry_run,
            migrate=self.migrate,
            interrupted=self._interrupted,
            records=paths,
            warnings=self.aim.warnings,
            ranks=ranks,
        )

    def _require_no_roles_to_widen(self) -> None:
        """Raise UsageError if threads with CPUs for their role would get all of the rank's."""
        if self.how.widen and any(target.plan.roles for target in self.aim.targets):
            raise UsageError("--widen undoes the run's --cores-for: roles have CPUs of their own", "leave out --widen")

    def _bind_all(self) -> tuple[list[AttachedRank], tuple[str, ...]]:
        """Bind all targets; return them and the records' files."""
        if self.how.dry_run:
            return self._bind_each(lambda _: _nothing), ()
        with open_records(self.environ, tidy=True) as records:
            ranks = self._bind_each(lambda target: partial(records.add, target))
            paths = (records.path_of(target.subject.pid) for target in self.aim.targets)
            return ranks, tuple(path for path in paths if path is not None)

    def _bind_each(self, recorder: Callable[[Target], _Recorder]) -> list[AttachedRank]:
        """Bind all targets, each with its recorder. An error ends this only if nothing was bound before."""
        ranks: list[AttachedRank] = []
        for target in self.aim.targets:
            try:
                ranks.append(self._bound(target, recorder(target)))
            except NumapinError as error:
                if not any(rank.processes for rank in ranks):
                    raise
                ranks.append(_unreached(target, error.message))
        return ranks

    def _bound(self, target: Target, record: _Recorder) -> AttachedRank:
        if self._interrupted:
            return _unreached(target, _INTERRUPTED)
        targets = {each.subject.pid for each in self.aim.targets}
        others = (self.aim.apart | targets) - {target.subject.pid}
        binder = Binder(target, replace(self.how, without=others), record)
        processes = binder.run()
        self._interrupted |= binder.interrupted
        return replace(_unreached(target, _ENDED), processes=processes, problem=None if processes else _ENDED)

    def _with_memory(self, rank: AttachedRank) -> AttachedRank:
        return replace(rank, processes=tuple(self._looked_at(each, rank.requested) for each in rank.processes))

    def _looked_at(self, process: BoundProcess, plan: RankPlan) -> BoundProcess:
        """Return a process with its memory, which is moved if requested. What was bound is reported in any case."""
        if self._interrupted:
            return process
        try:
            pages, shortfalls = self._memory(process.pid, plan)
        except proc.Gone:
            return process
        except KeyboardInterrupt:
            self._interrupted = True
            return process
        except (MachineError, OSError) as error:
            return replace(process, shortfalls=(*process.shortfalls, f"its memory cannot be read: {_words(error)}"))
        return replace(process, pages=pages, shortfalls=(*process.shortfalls, *shortfalls))

    def _memory(self, pid: int, plan: RankPlan) -> tuple[ProcessPages | None, tuple[str, ...]]:
        main = ThreadId(pid, pid, proc.stat(proc.folder_of(pid)).start)
        memory = read_memory(pid, planned_nodes(plan))
        if memory is None:
            return None, (_UNREADABLE,) if self.migrate else ()
        shortfalls = policy_shortfalls(memory, plan)
        if not self.migrate or self.how.dry_run or self._interrupted:
            return described(memory), shortfalls
        move = Move(main=main, plan=plan, progress=lambda done, total: self.progress(pid, done, total))
        pages = move.run(memory)
        self._interrupted |= move.interrupted
        return pages, (*shortfalls, *_stays(pages))


def _unreached(target: Target, problem: str) -> AttachedRank:
    return AttachedRank(
        pid=target.subject.pid,
        gpu_source=target.gpu_source,
        requested=target.plan,
        processes=(),
        problem=problem,
    )


def _all_ended(ranks: Sequence[AttachedRank]) -> UsageError:
    """Return the error if no target lived long enough to be bound."""
    pids = ", ".join(str(rank.pid) for rank in ranks)
    ended = f"process {pids} ended before it was bound"
    if len(ranks) > 1:
        ended = f"processes {pids} ended before they were bound"
    return UsageError(f"{ended}; nothing was changed", LIST)


def _words(error: MachineError | OSError) -> str:
    return error.message if isinstance(error, MachineError) else str(error)


def _nothing(before: Mapping[ThreadId, CpuSet], new: Mapping[ThreadId, CpuSet]) -> None:
    """Record nothing, because nothing is changed."""


def _stays(pages: ProcessPages) -> tuple[str, ...]:
    return tuple(f"{render(size)} stay on other nodes: {STAYS[word]}" for word, size in pages.stays.items())
