"""Set threads back to the CPUs that they had before `attach`. Edge.

Comes in: this user's records, and the processes to restore; by default all. Goes out: `Restored`. Pages stay where they
are. Threads that have ended are left out. Those that started since inherited the change, and get the former CPUs of
their process's main thread; if they have chosen CPUs themselves, they are left alone.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from numapin.attach import record
from numapin.attach.changes import Restored, RestoredProcess
from numapin.attach.processes import examine, is_ours, read_family
from numapin.base.plural import counted
from numapin.errors import UsageError
from numapin.system import affinity, proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numapin.attach.record import Attachment
    from numapin.base.cpu_set import CpuSet
    from numapin.system.affinity import ThreadId

    _Record = tuple[str, Attachment]

_MOST_LOOKS: Final = 100
_RECORDED: Final = "numapin attach --pid PID records what it changes"


def restore(pids: Collection[int] | None, environ: Mapping[str, str], *, other_users: bool, dry_run: bool) -> Restored:
    """Restore processes; None: all that were bound. Processes below those that are given count, too.

    Raises UsageError if nothing was recorded, or if all recorded processes have ended.
    """
    with nullcontext() if dry_run else record.open_records(environ, tidy=False):
        return _restore(pids, environ, other_users=other_users, dry_run=dry_run)


def _restore(pids: Collection[int] | None, environ: Mapping[str, str], *, other_users: bool, dry_run: bool) -> Restored:
    alive, ended = _parted(_chosen(record.read_records(environ), pids))
    if not dry_run:
        _remove(ended)
    names = tuple(f"process {each.pid} ({each.name}) has ended" for _, each in ended)
    if not alive:
        what = "" if pids is None else f" for process {', '.join(map(str, pids))}"
        raise UsageError("; ".join((f"nothing to restore{what}", *names)), _RECORDED)
    for _, each in alive:
        examine(each.pid, other_users=other_users)
    processes = tuple(_restored(each, other_users=other_users, dry_run=dry_run) for each in alive)
    return Restored(dry_run=dry_run, warnings=names, processes=processes)


def _restored(found: _Record, *, other_users: bool, dry_run: bool) -> RestoredProcess:
    """Restore a process, and remove its record if everything was set back."""
    path, attachment = found
    done = _Restorer(attachment, other_users=other_users, dry_run=dry_run).run()
    if not (dry_run or done.shortfalls):
        record.remove(path)
    return done


def _parted(records: list[_Record]) -> tuple[list[_Record], list[_Record]]:
    """Return the records of processes that run, and of those that have ended."""
    alive: list[_Record] = []
    ended: list[_Record] = []
    for each in records:
        found = alive if proc.is_running(each[1].pid, each[1].start) else ended
        found.append(each)
    return alive, ended


def _remove(records: list[_Record]) -> None:
    for path, _ in records:
        record.remove(path)


def _chosen(records: list[_Record], pids: Collection[int] | None) -> list[_Record]:
    if pids is None:
        return records
    family = read_family()
    wanted = {*pids, *(below for pid in pids for below in family.below(pid))}
    return [each for each in records if each[1].pid in wanted]


@dataclass(slots=True)
class _Restorer:
    """Restores one process and its descendants."""

    attachment: Attachment
    other_users: bool = field(kw_only=True)
    dry_run: bool = field(kw_only=True)
    _threads: int = 0
    _since: int = 0
    _left: int = 0
    _refusals: Counter[str] = field(default_factory=Counter)

    def run(self) -> RestoredProcess:
        """Restore; return what was done."""
        former = self.attachment.former
        now = {thread: cpus for thread in former if thread.is_main and (cpus := _cpus_now(thread)) is not None}
        inherited = self.attachment.inherited(now)
        ended = sum(not affinity.is_same(thread) for thread in former)
        for thread, cpus in former.items():
            self._set(thread, cpus)
        self._restore_new(former, inherited)
        return RestoredProcess(
            pid=self.attachment.pid,
            name=self.attachment.name,
            threads=self._threads,
            started_since=self._since,
            ended=ended,
            left=self._left,
            shortfalls=tuple(f"{counted(number, 'thread')} {text}" for text, number in self._refusals.items()),
        )

    def _restore_new(self, former: Mapping[ThreadId, CpuSet], inherited: Collection[CpuSet]) -> None:
        """Restore threads that started after the change, until a look finds none that is to be set."""
        seen = set(former)
        for _ in range(_MOST_LOOKS):
            new = [thread for thread in self._now() if thread not in seen]
            seen.update(new)
            has_changed = [self._restore_one_new(thread, inherited) for thread in new]
            if self.dry_run or not any(has_changed):
                return

    def _restore_one_new(self, thread: ThreadId, inherited: Collection[CpuSet]) -> bool:
        """Set a thread back that inherited the change; return whether that was done."""
        cpus, now = self.attachment.former_of(thread), _cpus_now(thread)
        if now is None or now == cpus:
            return False
        if cpus is None or now not in inherited:
            self._left += 1
            return False
        was_set = self._set(thread, cpus)
        self._since += was_set
        return was_set

    def _set(self, thread: ThreadId, cpus: CpuSet) -> bool:
        """Set a thread back; return whether that was done."""
        try:
            if not is_ours(thread.pid, _start_of(thread), other_users=self.other_users):
                self._refusals["belong to another user"] += 1
                return False
            self._set_own(thread, cpus)
        except proc.Gone:
            return False
        except OSError as error:
            self._refusals[f"did not get CPUs {cpus} back ({error.strerror})"] += 1
            return False
        self._threads += 1
        return True

    def _set_own(self, thread: ThreadId, cpus: CpuSet) -> None:
        """Set a thread of this user back; in a dry run, only look at it. Raises Gone and OSError."""
        if self.dry_run:
            affinity.cpus_of(thread)
            return
        found = affinity.set_cpus(thread, cpus)
        if found != cpus:
            self._refusals[f"did not get CPUs {cpus - found} back, which the cpuset excludes now"] += 1

    def _now(self) -> Iterator[ThreadId]:
        """Yield the threads of the process and of its descendants."""
        family = read_family()
        if family.starts.get(self.attachment.pid) != self.attachment.start:
            return
        for pid in (self.attachment.pid, *family.below(self.attachment.pid)):
            try:
                yield from affinity.threads_of(pid)
            except (proc.Gone, PermissionError):
                continue


def _cpus_now(thread: ThreadId) -> CpuSet | None:
    try:
        return affinity.cpus_of(thread)
    except (proc.Gone, OSError):
        return None


def _start_of(thread: ThreadId) -> int:
    """Return the start time of a thread's process. Raises Gone."""
    return proc.stat(proc.folder_of(thread.pid)).start
