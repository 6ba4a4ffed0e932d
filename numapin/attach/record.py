"""The CPUs of threads before `attach` changed them, in a file of this user. Edge.

Comes in: the process that is bound, and its threads' CPUs. Goes out: a file attached-PID-START.json in this user's
private folder (mode 0700, `launcher/run_places.py`), written before each change; and the records that are there.

A record names the boot, the host and the PID namespace, so that it never applies to another process with the same id.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.files import replace_at
from numapin.base.folders import open_file, opened
from numapin.base.not_none import not_none
from numapin.base.records import AtMost, read_record, to_json
from numapin.base.strict_json import encode
from numapin.errors import MachineError, NumapinError
from numapin.launcher.run_places import DEFAULT_PLACES, open_own_base, own_bases, temporary_directories
from numapin.system.affinity import ThreadId
from numapin.system.proc import is_running, pid_namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numapin.attach.targets import Target

    _Record = tuple[str, "Attachment"]

SCHEMA: Final = "numapin.attached/1"
_PREFIX: Final = "attached-"
_NAME: Final = re.compile(rf"{_PREFIX}\d{{1,18}}-\d+\.json", re.ASCII)
_MOST_THREADS: Final = 1 << 18
_MOST_SETS: Final = 1 << 12
_MAX_BYTES: Final = 64 << 20
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_REMEDY: Final = "name a folder of yours with TMPDIR=DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerThread:
    """A thread and its CPUs before the change. `start` is its start time in clock ticks since boot.

    `changed`: whether it got other CPUs, or inherited them.
    """

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
    """A bound process and its threads' CPUs before that, those of its descendants included.

    Attributes:
        host: The host.
        boot: The boot of its kernel.
        namespace: The PID namespace in which the numbers hold.
        pid: The process.
        start: Its start time in clock ticks since boot.
        name: Its name.
        given: The sets of CPUs that its threads got.
        threads: The threads before the change.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    start: int
    name: str
    given: Annotated[tuple[CpuSet, ...], AtMost(_MOST_SETS)]
    threads: Annotated[tuple[FormerThread, ...], AtMost(_MOST_THREADS)]

    @property
    def is_of_here(self) -> bool:
        """Whether its numbers hold for this process: the same host, boot and PID namespace."""
        return (self.host, self.boot, self.namespace) == _here()

    @property
    def known(self) -> dict[ThreadId, FormerThread]:
        """The recorded threads."""
        return {each.thread: each for each in self.threads}

    def former_of(self, thread: ThreadId) -> CpuSet | None:
        """Return the former CPUs of a thread that started since: those of its process, or else of the bound one.

        Which thread started it is unknown. It counts as started by the main thread if that was changed, or else by
        another one that was changed. None: no thread of that process was changed.
        """
        changed = [each for each in self._threads_of(thread.pid) or self._threads_of(self.pid) if each.changed]
        chosen = [each for each in changed if each.thread.is_main] or changed
        return CpuSet().union(*(each.cpus for each in chosen)) or None

    def _threads_of(self, pid: int) -> list[FormerThread]:
        return [each for each in self.threads if each.pid == pid]

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{_PREFIX}{self.pid}-{self.start}.json"


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
        """Record threads and the CPUs that some of them get, before that. Raises NumapinError.

        A thread that was changed before keeps what was recorded first.
        """
        subject = target.subject
        known = self._known.get(subject.pid) or self._of_earlier(target)
        threads = known.known | {each.thread: each for each in _grown(known, before, new)}
        given = dict.fromkeys((*known.given, *new.values()))
        self._known[subject.pid] = grown = replace(known, given=tuple(given), threads=tuple(threads.values()))
        try:
            replace_at(self._folder, grown.file_name, _text(grown), mode=0o600)
        except OSError as error:
            path = os.path.join(self._path, grown.file_name)
            problem = f"{path} cannot be written, and without it nothing could be restored: {error.strerror}"
            raise NumapinError(problem, _REMEDY) from None

    def _of_earlier(self, target: Target) -> Attachment:
        """Return what an earlier `attach` recorded of this process, or an empty record."""
        host, boot, namespace = _here()
        subject = target.subject
        empty = Attachment(
            host=host,
            boot=boot,
            namespace=namespace,
            pid=subject.pid,
            start=subject.start,
            name=subject.name,
            given=(),
            threads=(),
        )
        found = _read(self._folder, empty.file_name, self._path)
        return found if found is not None and found.is_of_here else empty


@contextmanager
def open_records(environ: Mapping[str, str], *, tidy: bool) -> Iterator[Records]:
    """Open this user's folder of records, and keep other `attach` commands out meanwhile. Raises NumapinError.

    With `tidy`, the records of processes that have ended are removed.
    """
    path, folder = _open_base(environ)
    try:
        _lock(folder)
        if tidy:
            _remove_ended(path)
        yield Records(path, folder)
    finally:
        os.close(folder)


def read_records(environ: Mapping[str, str], pids: Collection[int]) -> list[_Record]:
    """Return this user's records of these processes that hold here. Raises MachineError for a malformed one."""
    wanted = (path for path in _paths(environ) if _pid_of(path) in pids)
    return [found for path in wanted if (found := _read_path(path)) is not None]


def read_all_records(environ: Mapping[str, str]) -> tuple[list[_Record], tuple[str, ...]]:
    """Return this user's records that hold here, and warnings about malformed ones."""
    found, warnings = [], []
    for path in _paths(environ):
        try:
            found.append(_read_path(path))
        except MachineError as error:
            warnings.append(f"{error.message}; {error.hint}")
    return not_none(found), tuple(warnings)


def searched_places(environ: Mapping[str, str]) -> str:
    """Return the folders in which records are looked for, as text."""
    return f"numapin-{os.geteuid()} in {', '.join(temporary_directories(environ))}"


def place_to_name(records: Sequence[str]) -> str | None:
    """Return the temporary directory of these records; None if a command without TMPDIR looks there, too."""
    place = os.path.dirname(os.path.dirname(records[0])) if records else None
    return None if place in DEFAULT_PLACES else place


def remove(path: str) -> None:
    """Remove a record."""
    folder, name = os.path.split(path)
    with suppress(OSError), opened(folder) as descriptor:
        os.unlink(name, dir_fd=descriptor)


def _paths(environ: Mapping[str, str]) -> Iterator[str]:
    return (path for base in own_bases(environ) for path in _paths_in(base))


def _paths_in(base: str) -> list[str]:
    """Return the records in a folder."""
    names: list[str] = []
    with suppress(FileNotFoundError, PermissionError), opened(base) as folder:
        names = os.listdir(folder)
    return [os.path.join(base, name) for name in sorted(names) if _NAME.fullmatch(name)]


def _pid_of(path: str) -> int:
    """Return the process that the name of a record says."""
    return int(os.path.basename(path).split("-")[1])


def _read_path(path: str) -> _Record | None:
    """Read a record; None: it is gone, or does not hold here. Raises MachineError that names it."""
    base, name = os.path.split(path)
    with suppress(FileNotFoundError, PermissionError), opened(base) as folder:
        found = _read(folder, name, base)
        if found is not None and found.is_of_here:
            return path, found
    return None


def _grown(
    known: Attachment, before: Mapping[ThreadId, CpuSet], new: Mapping[ThreadId, CpuSet]
) -> Iterator[FormerThread]:
    """Yield what is to be recorded of threads. One that has started since the first change may have inherited it."""
    recorded = known.known
    for thread, cpus in before.items():
        earlier = recorded.get(thread)
        if earlier is not None and earlier.changed:
            continue
        has_inherited = earlier is None and cpus in known.given
        former = known.former_of(thread) if has_inherited else None
        is_changed = thread in new or former is not None
        yield FormerThread(pid=thread.pid, tid=thread.tid, start=thread.start, cpus=former or cpus, changed=is_changed)


def _remove_ended(base: str) -> None:
    """Remove the records of processes that have ended."""
    for path in _paths_in(base):
        with suppress(MachineError):
            found = _read_path(path)
            if found is not None and not is_running(found[1].pid, found[1].start):
                remove(path)


def _read(folder: int, name: str, base: str) -> Attachment | None:
    """Read a record; None: there is none. Raises MachineError that names it."""
    path = os.path.join(base, name)
    try:
        with os.fdopen(open_file(folder, name), "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}", f"remove it: rm {path}") from None
    text = content.decode(errors="replace")
    return read_record(Attachment, text, source=path, hint=f"remove it: rm {path}", schema=SCHEMA)


def _open_base(environ: Mapping[str, str]) -> tuple[str, int]:
    """Open this user's folder in the first directory that has room for it and that other users cannot replace."""
    problems = []
    for place in temporary_directories(environ):
        try:
            return open_own_base(place, is_stable=True)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
    raise NumapinError(f"no place for a record, so nothing was changed: {'; '.join(problems)}", _REMEDY)


def _lock(folder: int) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise NumapinError(
                "another numapin attach of this user is running", "try again when it has finished"
            ) from None


def _text(attachment: Attachment) -> str:
    return encode({"schema": SCHEMA, **to_json(attachment)}, indent=None) + "\n"


def _here() -> tuple[str, str, int]:
    """Return the host, the boot and the PID namespace of this process."""
    try:
        with open(_BOOT, encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return os.uname().nodename, boot, pid_namespace()
