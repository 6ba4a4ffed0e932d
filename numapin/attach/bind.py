"""`numapin attach`: bind all threads of the targets, then move their pages if requested.

All threads are bound before any page moves, so that pages that are touched meanwhile are local.

A thread inherits its CPUs from the one that starts it. So processes and threads are listed again until all that are new
have inherited the planned CPUs: then everything that starts later is started by a bound thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from numapin.attach.pages import memory_of, move, planned_nodes, policy_shortfalls
from numapin.attach.report import STAYS, Attached, AttachedRank, BoundProcess, ProcessPages, undo_commands
from numapin.attach.targets import is_ours, other_processes
from numapin.base.cpu_set import CpuSet
from numapin.base.formats import render_size
from numapin.base.text import counted
from numapin.errors import MachineError, UsageError
from numapin.observe.find import LIST_PROCESSES
from numapin.system import proc, threads
from numapin.system.threads import ThreadId

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.attach.targets import Aim, AttachOptions, Target
    from numapin.plan.model import RankPlan

_MOST_LOOKS: Final = 100
_RESTLESS: Final = "it starts processes or threads faster than they can be bound; some may have started unbound"
_UNREADABLE: Final = "its memory cannot be read, so no page was moved; run this as the job's user, or as root"


def attach(aim: Aim, options: AttachOptions, *, progress: Callable[[int, int, int], None]) -> Attached:
    """Bind all targets, and move their pages if requested.

    `progress` is called with a process id, the bytes of its memory that were done, and their total. Raises UsageError
    if every target ended first.
    """
    all_pids = {target.subject.pid for target in aim.targets}
    ranks: list[AttachedRank] = []
    former: dict[ThreadId, CpuSet] = {}
    changed: list[ThreadId] = []
    interrupted = False
    for target in aim.targets:
        pid = target.subject.pid
        problem = "interrupted"
        processes: tuple[BoundProcess, ...] = ()
        if not interrupted:
            binder = Binder(target, options, without=(aim.apart | all_pids) - {pid})
            processes = binder.run()
            interrupted, problem = binder.interrupted, "it ended before"
            former |= binder.former
            changed += binder.changed
        ranks.append(
            AttachedRank(
                pid=pid,
                gpu_source=target.gpu_source,
                requested=target.plan,
                processes=processes,
                problem=None if processes else problem,
            )
        )
    if not any(rank.processes for rank in ranks):
        if interrupted:
            raise KeyboardInterrupt
        pids = ", ".join(str(rank.pid) for rank in ranks)
        ended = f"process {pids} ended before it was" if len(ranks) == 1 else f"processes {pids} ended before they were"
        raise UsageError(f"{ended} bound; nothing was changed", LIST_PROCESSES)

    for number, rank in enumerate(ranks):
        looked_at = []
        for process in rank.processes:
            if interrupted:
                looked_at.append(process)
                continue
            with_pages, interrupted = _with_pages(process, rank.requested, options, progress)
            looked_at.append(with_pages)
        ranks[number] = replace(rank, processes=tuple(looked_at))
    return Attached(
        dry_run=options.dry_run,
        migrate=options.migrate,
        interrupted=interrupted,
        undo=() if options.dry_run else undo_commands(former, changed),
        warnings=aim.warnings,
        ranks=tuple(ranks),
    )


def _with_pages(
    process: BoundProcess, plan: RankPlan, options: AttachOptions, progress: Callable[[int, int, int], None]
) -> tuple[BoundProcess, bool]:
    """Return a process with its memory, which is moved if requested, and whether Ctrl-C ended that.

    What was bound is reported in any case.
    """
    pid, interrupted = process.pid, False
    shortfalls: list[str] = []
    pages = None
    try:
        main = ThreadId(pid, pid, proc.stat(proc.folder_of(pid)).start)
        memory = memory_of(pid, planned_nodes(plan))
        if memory is None:
            shortfalls += [_UNREADABLE] if options.migrate else []
        elif options.dry_run or not options.migrate:
            shortfalls = [*policy_shortfalls(memory, plan)]
            pages = ProcessPages(
                policy=memory.policy_name,
                before=memory.by_node,
                after=None,
                far_bytes=memory.far_bytes,
                moved_bytes=0,
                stays={},
            )
        else:
            pages, interrupted = move(main, plan, memory, partial(progress, pid))
            stays = [f"{render_size(size)} stay on other nodes: {STAYS[word]}" for word, size in pages.stays.items()]
            shortfalls = [*policy_shortfalls(memory, plan), *stays]
    except proc.Gone:
        return process, False
    except KeyboardInterrupt:
        return process, True
    except (MachineError, OSError) as error:
        words = error.message if isinstance(error, MachineError) else str(error)
        shortfalls = [f"its memory cannot be read: {words}"]
    return replace(process, pages=pages, shortfalls=(*process.shortfalls, *shortfalls)), interrupted


@dataclass(slots=True, kw_only=True)
class _Tally:
    """The results for the threads of one process so far."""

    name: str
    threads: int = 0
    changed: int = 0
    narrower: int = 0
    ended: int = 0
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)


class Binder:
    """Binds one target. `interrupted` is set if Ctrl-C ended it early; what was done by then is in the results.

    The processes in `without` and those below them are left out. `former` has the CPUs of all threads before, except
    for those that started meanwhile and had inherited the planned ones. `changed` are the threads that got other CPUs.
    """

    def __init__(self, target: Target, options: AttachOptions, *, without: frozenset[int] = frozenset()) -> None:
        self._target, self._options, self._without = target, options, without
        self.former: dict[ThreadId, CpuSet] = {}
        self.changed: list[ThreadId] = []
        self._seen: set[ThreadId] = set()
        self._tallies: dict[int, _Tally] = {}
        self._notes = list(target.shortfalls)
        self.interrupted = False

    def run(self) -> tuple[BoundProcess, ...]:
        """Bind; return the processes, the target first. Empty if it ended before."""
        try:
            for _ in range(_MOST_LOOKS):
                if not self._bind_new_threads() or self._options.dry_run:
                    break
            else:
                self._notes.append(_RESTLESS)
        except KeyboardInterrupt:
            self.interrupted = True
        processes = []
        for pid, tally in self._tallies.items():
            refused = [f"{counted(number, 'thread')} {text}" for text, number in tally.refusals.items()]
            processes.append(
                BoundProcess(
                    pid=pid,
                    name=tally.name,
                    threads=tally.threads,
                    changed=tally.changed,
                    narrower=tally.narrower,
                    ended=tally.ended,
                    cpus_before=CpuSet(tally.before),
                    cpus=CpuSet(tally.after),
                    pages=None,
                    shortfalls=(*refused, *(self._notes if pid == self._target.subject.pid else [])),
                )
            )
        return tuple(processes)

    def _new_threads(self) -> list[ThreadId]:
        """Return the threads that exist now and were not seen before; none once the target has ended."""
        subject, processes = self._target.subject, other_processes()
        if subject.pid not in processes or processes[subject.pid].start != subject.start:
            return []
        below: list[int] = []
        if self._options.children:
            below = proc.descendants(subject.pid, proc.children_of(processes), without=self._without)
        found: list[ThreadId] = []
        for pid in (subject.pid, *below):
            try:
                if not is_ours(pid, processes[pid].start, other_users=self._options.other_users):
                    note = f"child process {pid} belongs to another user and was left as it is"
                    self._notes += [] if note in self._notes else [note]
                    continue
                name, listed = proc.stat(proc.folder_of(pid)).name, threads.threads_of(pid)
            except proc.Gone:
                continue
            self._tallies.setdefault(pid, _Tally(name=name))
            found += [thread for thread in listed if thread not in self._seen]
        return found

    def _bind_new_threads(self) -> bool:
        """Bind new threads, and note their CPUs before; return whether there was anything to bind."""
        plan, unseen, is_first_look = self._target.plan, self._new_threads(), not self._seen
        before: dict[ThreadId, CpuSet] = {}
        for thread in unseen:
            tally = self._tallies[thread.pid]
            tally.threads += 1
            try:
                before[thread] = threads.cpus_of(thread)
            except proc.Gone:
                tally.ended += 1
            except OSError as error:
                tally.refusals[f"cannot be examined ({error.strerror})"] += 1

        new: dict[ThreadId, CpuSet] = {}
        for thread, cpus in before.items():
            is_narrower = cpus < plan.cpus and not self._options.widen
            if is_first_look or cpus != plan.cpus:
                self.former[thread] = cpus
            if cpus != plan.cpus and not is_narrower:
                new[thread] = plan.cpus
                continue
            tally = self._tallies[thread.pid]
            tally.narrower += is_narrower
            tally.after |= cpus
        self._seen.update(unseen)

        for thread, cpus in before.items():
            self._tallies[thread.pid].before |= cpus
            if thread in new:
                self._bind_one(thread, cpus, new[thread])
        return bool(new)

    def _bind_one(self, thread: ThreadId, before: CpuSet, planned: CpuSet) -> None:
        """Bind a thread and count the result."""
        tally, see = self._tallies[thread.pid], f"see: cat /proc/{thread.pid}/cgroup"
        try:
            found = planned if self._options.dry_run else threads.set_cpus(thread, planned)
        except proc.Gone:
            tally.ended += 1
            return
        except OSError as error:
            refusal = f"did not get CPUs {planned} ({error.strerror}) and stay where they were; {see}"
            tally.refusals[refusal] += 1
            tally.after |= before
            return
        if found != before:
            tally.changed += 1
            self.changed.append(thread)
        tally.after |= found
        if found != planned:
            tally.refusals[f"did not get CPUs {planned - found}, which the cpuset excludes; {see}"] += 1
