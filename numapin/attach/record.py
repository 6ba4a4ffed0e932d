"""The CPUs of threads before `attach` changed them, in a file of this user. Edge.

Comes in: the process that is bound, and its threads' CPUs. Goes out: a file attached-PID-START.json in this user's
private folder (mode 0700, `launcher/run_places.py`), written before each change; and the records that are there.

A record names the boot, the host and the PID namespace, so that it never applies to another process with the same id.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

from numapin.base.cpu_set import CpuSet  # noqa: TC001 - the type of a field that is read
from numapin.base.files import replace_at
from numapin.base.folders import open_file, opened
from numapin.base.records import AtMost, read_record, to_json
from numapin.base.strict_json import encode
from numapin.errors import MachineError, NumapinError
from numapin.launcher.run_places import open_own_base, own_bases, temporary_directories
from numapin.system.affinity import ThreadId
from numapin.system.proc import is_running, pid_namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numapin.attach.targets import Target

SCHEMA: Final = "numapin.attached/1"
_PREFIX: Final = "attached-"
_MOST_THREADS: Final = 1 << 18
_MAX_BYTES: Final = 64 << 20
_BOOT: Final = "/proc/sys/kernel/random/boot_id"
_REMEDY: Final = "name a folder of yours with TMPDIR=DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerThread:
    """A thread and its CPUs before the change. `start` is its start time in clock ticks since boot."""

    pid: int
    tid: int
    start: int
    cpus: CpuSet

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
        cpus: The CPUs that its threads got.
        threads: The threads before the change.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    start: int
    name: str
    cpus: CpuSet
    threads: Annotated[tuple[FormerThread, ...], AtMost(_MOST_THREADS)]

    @property
    def is_of_here(self) -> bool:
        """Whether its numbers hold for this process: the same host, boot and PID namespace."""
        return (self.host, self.boot, self.namespace) == _here()

    @property
    def former(self) -> dict[ThreadId, CpuSet]:
        """The CPUs of each thread before the change."""
        return {each.thread: each.cpus for each in self.threads}

    def former_of(self, thread: ThreadId) -> CpuSet | None:
        """Return the former CPUs of a thread that started since: those of its process, or else of the bound one."""
        mains = {each.pid: cpus for each, cpus in self.former.items() if each.is_main}
        return mains.get(thread.pid, mains.get(self.pid))

    def inherited(self, now: Mapping[ThreadId, CpuSet]) -> set[CpuSet]:
        """Return the CPUs that new threads inherit from bound ones, given the CPUs of threads now."""
        return {self.cpus, *(cpus for each, cpus in now.items() if each.is_main and each in self.former)}

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

    def add(self, target: Target, before: Mapping[ThreadId, CpuSet]) -> None:
        """Record threads before they are changed. What was recorded first stays. Raises NumapinError."""
        subject = target.subject
        known = self._known.get(subject.pid) or self._of_earlier(target)
        first = known.former
        former = first | dict(_original(known, before)) | first
        threads = (
            FormerThread(pid=each.pid, tid=each.tid, start=each.start, cpus=cpus) for each, cpus in former.items()
        )
        self._known[subject.pid] = grown = replace(known, cpus=target.plan.cpus, threads=tuple(threads))
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
            cpus=target.plan.cpus,
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


def read_records(environ: Mapping[str, str]) -> list[tuple[str, Attachment]]:
    """Return this user's records that hold here, each with its path. Raises MachineError for a malformed one."""
    return [found for base in own_bases(environ) for found in _records_in(base)]


def remove(path: str) -> None:
    """Remove a record."""
    folder, name = os.path.split(path)
    with suppress(OSError), opened(folder) as descriptor:
        os.unlink(name, dir_fd=descriptor)


def _records_in(base: str) -> Iterator[tuple[str, Attachment]]:
    with suppress(FileNotFoundError, PermissionError), opened(base) as folder:
        for name in sorted(filter(_is_record, os.listdir(folder))):
            found = _read(folder, name, base)
            if found is not None and found.is_of_here:
                yield os.path.join(base, name), found


def _is_record(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(".json")


def _original(known: Attachment, now: Mapping[ThreadId, CpuSet]) -> Iterator[tuple[ThreadId, CpuSet]]:
    """Yield the CPUs of threads before any change: a thread may have started since, and inherited the change."""
    inherited = known.inherited(now) if known.threads else set()
    for thread, cpus in now.items():
        before = known.former_of(thread) if cpus in inherited else None
        yield thread, cpus if before is None else before


def _remove_ended(base: str) -> None:
    """Remove the records of processes that have ended."""
    with suppress(MachineError):
        for path, found in list(_records_in(base)):
            if not is_running(found.pid, found.start):
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
