"""Bind all threads of a process and of its descendants to CPUs. Edge.

Comes in: a `Target`, and a function that records the CPUs of threads, and those that some get, before they are changed.
Goes out: `BoundProcess`es.

A thread inherits its CPUs from the one that starts it. So processes and threads are listed again until all that are new
have inherited the planned CPUs: then everything that starts later is started by a bound thread.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from numapin.attach.changes import BoundProcess
from numapin.attach.processes import is_ours, read_family
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.errors import NumapinError
from numapin.system import affinity, proc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from numapin.attach.targets import Target
    from numapin.system.affinity import ThreadId

    _Recorder = Callable[[Mapping[ThreadId, CpuSet], Mapping[ThreadId, CpuSet]], None]

_MOST_LOOKS: Final = 100
_RESTLESS: Final = "it starts processes or threads faster than they can be bound; some may have started unbound"


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """The options of binding.

    Attributes:
        children: Whether descendants follow.
        widen: Whether threads on fewer CPUs than planned get all of these.
        other_users: Whether root may change other users' processes.
        dry_run: Whether to change nothing.
        without: Process ids that are left out, with their descendants.
    """

    children: bool
    widen: bool
    other_users: bool
    dry_run: bool
    without: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class _Tally:
    """What happened to the threads of one process so far."""

    name: str
    threads: int = 0
    changed: int = 0
    narrower: int = 0
    ended: int = 0
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)


class Binder:
    """Binds one target. `interrupted` is set if Ctrl-C ended it early; what was done by then is in the results."""

    def __init__(self, target: Target, how: How, record: _Recorder) -> None:
        self._target, self._how, self._record = target, how, record
        self._seen: set[ThreadId] = set()
        self._tallies: dict[int, _Tally] = {}
        self._notes = list(target.shortfalls)
        self.interrupted = False

    def run(self) -> tuple[BoundProcess, ...]:
        """Bind; return the processes, the target first. Empty if it ended before.

        Raises NumapinError if nothing can be recorded and nothing was changed.
        """
        try:
            self._bind_all()
        except KeyboardInterrupt:
            self.interrupted = True
        except NumapinError as error:
            if not any(tally.changed for tally in self._tallies.values()):
                raise
            self._notes.append(f"threads that started meanwhile were not bound: {error.message}")
        return tuple(self._result(pid, tally) for pid, tally in self._tallies.items())

    def _bind_all(self) -> None:
        for _ in range(_MOST_LOOKS):
            has_changed = self._bind_some(self._new())
            if self._how.dry_run or not has_changed:
                return
        self._notes.append(_RESTLESS)

    def _new(self) -> list[ThreadId]:
        """Return the threads that exist now and were not seen before."""
        return [thread for pid in self._pids() for thread in self._threads(pid) if thread not in self._seen]

    def _pids(self) -> Iterator[int]:
        """Yield the processes that exist now, the target first; nothing once the target has ended."""
        pid, start = self._target.subject.pid, self._target.subject.start
        family = read_family()
        if family.starts.get(pid) != start:
            return
        below = family.below(pid, without=self._how.without) if self._how.children else ()
        for each in (pid, *below):
            with suppress(proc.Gone):
                if self._may_touch(each, family.starts[each]):
                    yield each

    def _may_touch(self, pid: int, start: int) -> bool:
        """Return whether a process may be changed; note once that it may not. Raises Gone."""
        if is_ours(pid, start, other_users=self._how.other_users):
            return True
        note = f"child process {pid} belongs to another user and was left as it is"
        if note not in self._notes:
            self._notes.append(note)
        return False

    def _threads(self, pid: int) -> list[ThreadId]:
        try:
            name, threads = proc.stat(proc.folder_of(pid)).name, affinity.threads_of(pid)
        except proc.Gone:
            return []
        self._tallies.setdefault(pid, _Tally(name=name))
        return threads

    def _bind_some(self, threads: Collection[ThreadId]) -> bool:
        """Record the CPUs of new threads, then bind them; return whether there was anything to bind."""
        before = dict(self._read(threads))
        new = {thread: self._planned(thread) for thread, cpus in before.items() if self._is_to_change(thread, cpus)}
        if new and not self._how.dry_run:
            self._record(before, new)
        self._seen.update(threads)
        cut = {thread: found for thread, cpus in before.items() if (found := self._bind_one(thread, cpus)) is not None}
        if cut:
            self._record({}, cut)
        return bool(new)

    def _planned(self, thread: ThreadId) -> CpuSet:
        """Return the CPUs that a thread gets. The roles of descendants are unknown, so these get all of the rank's."""
        plan = self._target.plan
        return plan.main_cpus if thread.pid == self._target.subject.pid else plan.cpus

    def _is_narrower(self, before: CpuSet) -> bool:
        return before < self._target.plan.cpus and not self._how.widen

    def _has_role(self, cpus: CpuSet) -> bool:
        """Return whether a thread on these CPUs is on those of a role."""
        roles = self._target.plan.roles
        return roles is not None and any(cpus <= each for each in roles.by_name.values())

    def _is_to_change(self, thread: ThreadId, before: CpuSet) -> bool:
        return before != self._planned(thread) and not self._is_narrower(before)

    def _read(self, threads: Collection[ThreadId]) -> Iterator[tuple[ThreadId, CpuSet]]:
        for thread in threads:
            tally = self._tallies[thread.pid]
            tally.threads += 1
            try:
                yield thread, affinity.cpus_of(thread)
            except proc.Gone:
                tally.ended += 1
            except OSError as error:
                tally.refusals[f"cannot be examined ({error.strerror})"] += 1

    def _bind_one(self, thread: ThreadId, before: CpuSet) -> CpuSet | None:
        """Bind a thread if it is to be changed; return its CPUs if the kernel gave it fewer than planned."""
        tally, planned = self._tallies[thread.pid], self._planned(thread)
        tally.before |= before
        if not self._is_to_change(thread, before):
            tally.narrower += self._is_narrower(before) and not self._has_role(before)
            tally.after |= before
            return None
        try:
            found = planned if self._how.dry_run else affinity.set_cpus(thread, planned)
        except proc.Gone:
            tally.ended += 1
        except OSError as error:
            tally.refusals[_refusal(error, planned, thread.pid)] += 1
            tally.after |= before
        else:
            tally.changed += found != before
            tally.after |= found
            if found != planned:
                tally.refusals[_exclusion(planned - found, thread.pid)] += 1
                return found
        return None

    def _result(self, pid: int, tally: _Tally) -> BoundProcess:
        refused = [f"{counted(number, 'thread')} {text}" for text, number in tally.refusals.items()]
        notes = self._notes if pid == self._target.subject.pid else []
        return BoundProcess(
            pid=pid,
            name=tally.name,
            threads=tally.threads,
            changed=tally.changed,
            narrower=tally.narrower,
            ended=tally.ended,
            cpus_before=CpuSet(tally.before),
            cpus=CpuSet(tally.after),
            pages=None,
            shortfalls=(*refused, *notes),
        )


def _refusal(error: OSError, planned: CpuSet, pid: int) -> str:
    return f"did not get CPUs {planned} ({error.strerror}) and stay where they were; {_see(pid)}"


def _exclusion(missing: CpuSet, pid: int) -> str:
    return f"did not get CPUs {missing}, which the cpuset excludes; {_see(pid)}"


def _see(pid: int) -> str:
    return f"see: cat /proc/{pid}/cgroup"
