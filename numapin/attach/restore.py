"""Set threads back to the CPUs that they had before `attach`. Edge.

Comes in: this user's records, and the processes to restore; by default all. Goes out: `Restored`. Pages stay where they
are. Only threads that `attach` changed, and that have still the CPUs it gave them, are set. Threads that started since
inherited the change, and get the former CPUs of their process's main thread, or if that was not changed, those of its
changed threads.
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
from numapin.errors import NumapinError, UsageError
from numapin.system import affinity, proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from numapin.attach.record import Attachment
    from numapin.base.cpu_set import CpuSet
    from numapin.system.affinity import ThreadId

    _Record = tuple[str, Attachment]

_MOST_LOOKS: Final = 100
_RECORDED: Final = (
    "numapin attach --pid PID records what it changes; if TMPDIR was DIR then: TMPDIR=DIR numapin attach --restore"
)


def restore(pids: Collection[int] | None, environ: Mapping[str, str], *, other_users: bool, dry_run: bool) -> Restored:
    """Restore processes; None: all that were bound. Processes below those that are given count, too.

    Raises UsageError if nothing was recorded, or if all recorded processes have ended.
    """
    with nullcontext() if dry_run else record.open_records(environ, tidy=False):
        return _restore(pids, environ, other_users=other_users, dry_run=dry_run)


def _restore(pids: Collection[int] | None, environ: Mapping[str, str], *, other_users: bool, dry_run: bool) -> Restored:
    records, warnings = _chosen(pids, environ)
    alive, ended = _parted(records, other_users=other_users)
    if not dry_run:
        _remove(ended)
    warnings += tuple(f"process {each.pid} ({each.name}) has ended" for _, each in ended)
    if not alive:
        what = (
            "" if pids is None else f" for {'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"
        )
        searched = () if ended else (f"searched {record.searched_places(environ)}",)
        raise UsageError("; ".join((f"nothing to restore{what}", *warnings, *searched)), _RECORDED)
    processes = tuple(_restored(each, other_users=other_users, dry_run=dry_run) for each in alive)
    return Restored(dry_run=dry_run, warnings=warnings, processes=processes)


def _restored(found: _Record, *, other_users: bool, dry_run: bool) -> RestoredProcess:
    """Restore a process, and remove its record if everything was set back."""
    path, attachment = found
    done = _Restorer(attachment, other_users=other_users, dry_run=dry_run).run()
    if not (dry_run or done.shortfalls):
        record.remove(path)
    return done


def _parted(records: list[_Record], *, other_users: bool) -> tuple[list[_Record], list[_Record]]:
    """Return the records of processes that run, and of those that have ended. Raises as `examine`."""
    alive: list[_Record] = []
    ended: list[_Record] = []
    for each in records:
        found = alive if _may_be_restored(each[1], other_users=other_users) else ended
        found.append(each)
    return alive, ended


def _may_be_restored(attachment: Attachment, *, other_users: bool) -> bool:
    """Return whether a process still runs. Raises as `examine` for one that runs and must not be touched."""
    try:
        examine(attachment.pid, other_users=other_users)
    except NumapinError:
        if proc.is_running(attachment.pid, attachment.start):
            raise
    return proc.is_running(attachment.pid, attachment.start)


def _remove(records: list[_Record]) -> None:
    for path, _ in records:
        record.remove(path)


def _chosen(pids: Collection[int] | None, environ: Mapping[str, str]) -> tuple[list[_Record], tuple[str, ...]]:
    """Return the records of these processes and those below them, or all, and warnings about malformed ones."""
    if pids is None:
        return record.read_all_records(environ)
    family = read_family()
    wanted = {*pids, *(below for pid in pids for below in family.below(pid))}
    return [each for each in record.read_records(environ, wanted) if each[1].pid in wanted], ()


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
        known = self.attachment.known
        changed = {thread: each.cpus for thread, each in known.items() if each.changed}
        ended = sum(not affinity.is_same(thread) for thread in changed)
        for thread, cpus in changed.items():
            self._restore_one(thread, cpus)
        self._restore_new(known)
        return RestoredProcess(
            pid=self.attachment.pid,
            name=self.attachment.name,
            threads=self._threads,
            started_since=self._since,
            ended=ended,
            left=self._left,
            shortfalls=tuple(f"{counted(number, 'thread')} {text}" for text, number in self._refusals.items()),
        )

    def _restore_one(self, thread: ThreadId, cpus: CpuSet) -> bool:
        """Set a thread back unless the program has moved it since; return whether that was done."""
        now = _cpus_now(thread)
        if now is not None and now != cpus and now not in self.attachment.given:
            self._left += 1
            return False
        return self._set(thread, cpus)

    def _restore_new(self, known: Collection[ThreadId]) -> None:
        """Restore threads that started after the change, until a look finds none that is to be set."""
        seen = set(known)
        for _ in range(_MOST_LOOKS):
            new = [thread for thread in self._now() if thread not in seen]
            seen.update(new)
            has_changed = [self._restore_one_new(thread) for thread in new]
            if self.dry_run or not any(has_changed):
                return

    def _restore_one_new(self, thread: ThreadId) -> bool:
        """Set a thread back that inherited the change; return whether that was done."""
        cpus, now = self.attachment.former_of(thread), _cpus_now(thread)
        if cpus is None or now is None or now == cpus:
            return False
        was_set = self._restore_one(thread, cpus)
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
