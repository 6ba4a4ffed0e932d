"""Record the CPUs of threads before `attach` changes them, and set the threads back to these. Edge.

A record is a file attached-PID-START.json in this user's private folder (mode 0700, `launcher/run_places.py`), written
before each change. It names the boot, the host and the PID namespace, so that it never applies to another process with
the same id. Restoring sets only threads that were changed and still have the CPUs that they were given. Threads that
started since inherited the change, and get the former CPUs of their process. Pages stay where they are.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from numapin.attach.report import Restored, RestoredProcess
from numapin.attach.targets import examine, is_ours, read_family
from numapin.base.cpu_set import CpuSet
from numapin.base.files import replace_at
from numapin.base.folders import open_file, opened
from numapin.base.plural import counted
from numapin.base.records import AtMost, read_record, to_json
from numapin.base.strict_json import encode
from numapin.errors import MachineError, NumapinError, UsageError
from numapin.launcher.run_places import DEFAULT_PLACES, open_own_base, own_bases, temporary_directories
from numapin.system import affinity, proc
from numapin.system.affinity import ThreadId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numapin.attach.targets import Target

_NAME: Final = re.compile(r"attached-(\d{1,18})-\d+\.json", re.ASCII)
_SCHEMA: Final = "numapin.attached/1"
_MAX_BYTES: Final = 64 << 20
_MOST_LOOKS: Final = 100
_REMEDY: Final = "name a folder of yours with TMPDIR=DIR"
_RECORDED: Final = (
    "numapin attach --pid PID records what it changes; if TMPDIR was DIR then: TMPDIR=DIR numapin attach --restore"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerThread:
    """A thread and its CPUs before the change. `changed`: whether it got other CPUs, or inherited them."""

    pid: int
    tid: int
    start: int
    cpus: CpuSet
    changed: bool

    @property
    def thread(self) -> ThreadId:
        """The thread."""
        return ThreadId(self.pid, self.tid, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A bound process: the sets of CPUs that its threads were given, and all threads before that, descendants' too."""

    host: str
    boot: str
    namespace: int
    pid: int
    start: int
    name: str
    given: Annotated[tuple[CpuSet, ...], AtMost(1 << 12)]
    threads: Annotated[tuple[FormerThread, ...], AtMost(1 << 18)]

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"attached-{self.pid}-{self.start}.json"

    def former_of(self, thread: ThreadId) -> CpuSet | None:
        """Return the former CPUs of a thread that started since: those of its process, or else of the bound one.

        Which thread started it is unknown. It counts as started by the main thread if that was changed, or else by
        another one that was changed. None: no thread of that process was changed.
        """
        own = [each for each in self.threads if each.pid == thread.pid]
        of_process = own or [each for each in self.threads if each.pid == self.pid]
        changed = [each for each in of_process if each.changed]
        chosen = [each for each in changed if each.thread.is_main] or changed
        return CpuSet().union(*(each.cpus for each in chosen)) or None

    def grown(self, before: Mapping[ThreadId, CpuSet], new: Mapping[ThreadId, CpuSet]) -> Attachment:
        """Return it with more threads, and the CPUs that some of them get.

        A thread that was changed before keeps what was recorded first. One that has started since the first change may
        have inherited that.
        """
        threads = {each.thread: each for each in self.threads}
        for thread, cpus in before.items():
            earlier = threads.get(thread)
            if earlier is not None and earlier.changed:
                continue
            has_inherited = earlier is None and cpus in self.given
            former = self.former_of(thread) if has_inherited else None
            is_changed = thread in new or former is not None
            pid, tid, start = thread
            threads[thread] = FormerThread(pid=pid, tid=tid, start=start, cpus=former or cpus, changed=is_changed)
        given = dict.fromkeys((*self.given, *new.values()))
        return replace(self, given=tuple(given), threads=tuple(threads.values()))


# --- files -----------------------------------------------------------------------------------------------------------


class Records:
    """This user's folder of records, locked, for one `attach`."""

    def __init__(self, path: str, folder: int) -> None:
        self._path, self._folder = path, folder
        self._known: dict[int, Attachment] = {}

    def path_of(self, pid: int) -> str | None:
        """Return the file of a process; None: nothing was recorded."""
        known = self._known.get(pid)
        return None if known is None else os.path.join(self._path, known.file_name)

    def add(self, target: Target, before: Mapping[ThreadId, CpuSet], new: Mapping[ThreadId, CpuSet]) -> None:
        """Record threads and the CPUs that some of them get, before that. Raises NumapinError."""
        pid, start, name, _ = target.subject
        known = self._known.get(pid)
        if known is None:
            host, boot, namespace = _here()
            known = Attachment(
                host=host, boot=boot, namespace=namespace, pid=pid, start=start, name=name, given=(), threads=()
            )
            known = _read(os.path.join(self._path, known.file_name), self._folder) or known
        self._known[pid] = known = known.grown(before, new)
        try:
            text = encode({"schema": _SCHEMA, **to_json(known)}, indent=None) + "\n"
            replace_at(self._folder, known.file_name, text, mode=0o600)
        except OSError as error:
            problem = f"{self.path_of(pid)} cannot be written, and without it nothing could be restored"
            raise NumapinError(f"{problem}: {error.strerror}", _REMEDY) from None


@contextmanager
def open_records(environ: Mapping[str, str], *, tidy: bool) -> Iterator[Records]:
    """Open this user's folder of records, and keep other `attach` commands out meanwhile. Raises NumapinError.

    It is in the first directory that has room for it, that can be locked, and that other users cannot replace: two
    commands that change the same record would lose what one of them undoes. With `tidy`, the records of
    processes that have ended are removed.
    """
    problems = []
    for place in temporary_directories(environ):
        try:
            path, folder = open_own_base(place, is_stable=True)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            os.close(folder)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                busy = "another numapin attach of this user is running"
                raise NumapinError(busy, "try again when it has finished") from None
            problems.append(f"{place} cannot be locked: {error.strerror}")
    else:
        raise NumapinError(f"no place for a record, so nothing was changed: {'; '.join(problems)}", _REMEDY)
    try:
        for record in _paths_in(path) if tidy else ():
            with suppress(MachineError):
                found = _read(record)
                if found is not None and not proc.is_running(found.pid, found.start):
                    _remove(record)
        yield Records(path, folder)
    finally:
        os.close(folder)


def place_to_name(records: Sequence[str]) -> str | None:
    """Return the temporary directory of these records; None if a command without TMPDIR looks there, too."""
    place = os.path.dirname(os.path.dirname(records[0])) if records else None
    return None if place in DEFAULT_PLACES else place


def _paths_in(base: str) -> list[str]:
    """Return the records in a folder."""
    names: list[str] = []
    with suppress(FileNotFoundError, PermissionError), opened(base) as folder:
        names = os.listdir(folder)
    return [os.path.join(base, name) for name in sorted(names) if _NAME.fullmatch(name)]


def _read(path: str, folder: int | None = None) -> Attachment | None:
    """Read a record, in a folder that is open or is opened for it. Raises MachineError that names it.

    None: it is gone, or does not hold here, for this host, boot and PID namespace.
    """
    base, name = os.path.split(path)
    if folder is None:
        with suppress(FileNotFoundError, PermissionError), opened(base) as opened_folder:
            return _read(path, opened_folder)
        return None
    try:
        with os.fdopen(open_file(folder, name), "rb") as file:
            text = file.read(_MAX_BYTES + 1).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}", f"remove it: rm {path}") from None
    found = read_record(Attachment, text, source=path, hint=f"remove it: rm {path}", schema=_SCHEMA)
    return found if (found.host, found.boot, found.namespace) == _here() else None


def _remove(path: str) -> None:
    folder, name = os.path.split(path)
    with suppress(OSError), opened(folder) as descriptor:
        os.unlink(name, dir_fd=descriptor)


def _here() -> tuple[str, str, int]:
    """Return the host, the boot and the PID namespace of this process."""
    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return os.uname().nodename, boot, proc.pid_namespace()


# --- restoring -------------------------------------------------------------------------------------------------------


def restore(pids: Collection[int] | None, environ: Mapping[str, str], *, other_users: bool, dry_run: bool) -> Restored:
    """Restore these processes and those below them; None: all that were bound.

    Raises UsageError if nothing was recorded, or if all recorded processes have ended, and as `examine`.
    """
    with nullcontext() if dry_run else open_records(environ, tidy=False):
        records, warnings = _records_of(pids, environ)
        alive = [each for each in records if _may_be_restored(each[1], other_users=other_users)]
        ended = [each for each in records if each not in alive]
        warnings += [f"process {found.pid} ({found.name}) has ended" for _, found in ended]
        for path, _ in ended if not dry_run else ():
            _remove(path)
        if not alive:
            noun = "process" if pids is not None and len(pids) == 1 else "processes"
            what = "" if pids is None else f" for {noun} {', '.join(map(str, pids))}"
            if not ended:
                warnings.append(f"searched numapin-{os.geteuid()} in {', '.join(temporary_directories(environ))}")
            raise UsageError("; ".join([f"nothing to restore{what}", *warnings]), _RECORDED)
        processes = []
        for path, attachment in alive:
            done = _Restorer(attachment, other_users=other_users, dry_run=dry_run).run()
            processes.append(done)
            if not dry_run and not done.shortfalls:
                _remove(path)
    return Restored(dry_run=dry_run, warnings=tuple(warnings), processes=tuple(processes))


def _records_of(
    pids: Collection[int] | None, environ: Mapping[str, str]
) -> tuple[list[tuple[str, Attachment]], list[str]]:
    """Return this user's records of these processes and those below them that hold here, or all, and warnings.

    A malformed record is a MachineError if it names one of these processes, and a warning if all are read.
    """
    family = read_family()
    wanted = {*(pids or ()), *(below for pid in pids or () for below in family.below(pid))}
    records: list[tuple[str, Attachment]] = []
    warnings: list[str] = []
    for path in (path for base in own_bases(environ) for path in _paths_in(base)):
        named = int(path.rpartition("/")[2].split("-")[1])
        if pids is not None and named not in wanted:
            continue
        try:
            found = _read(path)
        except MachineError as error:
            if pids is not None:
                raise
            warnings.append(f"{error.message}; {error.hint}")
            continue
        if found is not None and (pids is None or found.pid in wanted):
            records.append((path, found))
    return records, warnings


def _may_be_restored(attachment: Attachment, *, other_users: bool) -> bool:
    """Return whether a process still runs. Raises as `examine` for one that runs and must not be touched."""
    try:
        examine(attachment.pid, other_users=other_users)
    except NumapinError:
        if proc.is_running(attachment.pid, attachment.start):
            raise
    return proc.is_running(attachment.pid, attachment.start)


class _Restorer:
    """Restores one process and its descendants."""

    def __init__(self, attachment: Attachment, *, other_users: bool, dry_run: bool) -> None:
        self._attachment, self._other_users, self._dry_run = attachment, other_users, dry_run
        self._threads = self._left = 0
        self._refusals: Counter[str] = Counter()

    def run(self) -> RestoredProcess:
        """Set back the threads that were changed, then those that started since and inherited the change."""
        attachment, started_since = self._attachment, 0
        seen = {each.thread for each in attachment.threads}
        changed = {each.thread: each.cpus for each in attachment.threads if each.changed}
        ended = sum(not affinity.is_same(thread) for thread in changed)
        for thread, cpus in changed.items():
            self._restore_one(thread, cpus)
        for _ in range(_MOST_LOOKS):
            num_set = 0
            for thread in self._threads_now():
                if thread in seen:
                    continue
                seen.add(thread)
                former, now = attachment.former_of(thread), _cpus_now(thread)
                if former is not None and now not in (None, former):
                    num_set += self._restore_one(thread, former)
            started_since += num_set
            if self._dry_run or not num_set:
                break
        return RestoredProcess(
            pid=attachment.pid,
            name=attachment.name,
            threads=self._threads,
            started_since=started_since,
            ended=ended,
            left=self._left,
            shortfalls=tuple(f"{counted(number, 'thread')} {text}" for text, number in self._refusals.items()),
        )

    def _threads_now(self) -> list[ThreadId]:
        """Return the threads of the process and of its descendants."""
        pid, family = self._attachment.pid, read_family()
        if family.starts.get(pid) != self._attachment.start:
            return []
        threads: list[ThreadId] = []
        for each in (pid, *family.below(pid)):
            with suppress(proc.Gone, PermissionError):
                threads += affinity.threads_of(each)
        return threads

    def _restore_one(self, thread: ThreadId, cpus: CpuSet) -> bool:
        """Set a thread back unless the program has moved it since; return whether that was done."""
        now = _cpus_now(thread)
        if now is not None and now != cpus and now not in self._attachment.given:
            self._left += 1
            return False
        try:
            start = proc.stat(proc.folder_of(thread.pid)).start
            if not is_ours(thread.pid, start, other_users=self._other_users):
                self._refusals["belong to another user"] += 1
                return False
            found = cpus
            if self._dry_run:
                affinity.cpus_of(thread)
            else:
                found = affinity.set_cpus(thread, cpus)
        except proc.Gone:
            return False
        except OSError as error:
            self._refusals[f"did not get CPUs {cpus} back ({error.strerror})"] += 1
            return False
        if found != cpus:
            self._refusals[f"did not get CPUs {cpus - found} back, which the cpuset excludes now"] += 1
        self._threads += 1
        return True


def _cpus_now(thread: ThreadId) -> CpuSet | None:
    try:
        return affinity.cpus_of(thread)
    except (proc.Gone, OSError):
        return None
