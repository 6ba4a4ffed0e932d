"""Read process information from /proc/PID.

`Gone` means that the process ended; PermissionError, that it is another user's.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import os

from numapin.base.cpu_set import CpuSet
from numapin.base.text import printable
from numapin.errors import MachineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping
    from os import PathLike
    from typing import Final

    StrPath = str | PathLike[str]

LIVE: Final = "/"
_DYING_FLAGS: Final = 0x4 | 0x200 | 0x400  # PF_EXITING, PF_DUMPCORE, PF_SIGNALED of the kernel's linux/sched.h
_KERNEL_FLAG: Final = 0x200000  # PF_KTHREAD
_FUTEX_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}  # of the system call
_FUTEX_PRIVATE, _FUTEX_COMMANDS = 0x80, 0x7F  # include/uapi/linux/futex.h
_FUTEX_WAITS: Final = (0, 6, 9, 11, 13)  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_GONE_ERRORS: Final = (FileNotFoundError, ProcessLookupError)


class Gone(Exception):  # noqa: N818 - not an error: processes end
    """A process ended before or while it was read."""


class Stat:
    """A process's or thread's `stat` file; field numbers are those of proc_pid_stat(5)."""

    __slots__ = (
        *("cpu_ticks", "has_ended", "is_dying", "is_kernel_thread", "last_cpu", "name", "num_threads"),
        *("own_ticks", "parent", "session", "start", "state"),
    )

    def __init__(self, text: str) -> None:
        """Parse the file's text; the name may hold blanks and brackets. Raises ValueError."""
        before, _, after = text.rpartition(")")
        fields = after.split()
        if len(fields) < 37:
            raise ValueError(repr((before + after)[:60]))
        self.name = printable(before.partition("(")[2])
        self.state = fields[0]
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.cpu_ticks = sum(map(int, fields[11:15]))
        """Clock ticks of CPU time that it used, and the children that ended and that it waited for."""
        self.own_ticks = sum(map(int, fields[11:13]))  # clock ticks of CPU time that it used itself
        self.num_threads = int(fields[17])
        self.start = int(fields[19])  # clock ticks since boot; the process id and this time identify a process uniquely
        self.last_cpu = int(fields[36])

        flags = int(fields[6])
        self.has_ended = self.state in ("Z", "X")  # a zombie, or dead
        """Whether it has ended, even if its parent has not waited for it yet."""
        self.is_dying = self.has_ended or bool(flags & _DYING_FLAGS)
        """Whether it has ended or is about to: the kernel or a signal is ending it, perhaps after a core dump."""
        self.is_kernel_thread = bool(flags & _KERNEL_FLAG)  # whether it is a thread of the kernel, not a program


def folder_of(pid: int | str, root: StrPath = LIVE) -> str:
    """Return the folder of a process, or of "self"."""
    return f"{os.fspath(root).rstrip('/')}/proc/{pid}"


def read(path: str) -> str:
    """Return a file's text. Raises Gone, and PermissionError for another user's process."""
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")  # in text mode a \r in a name would end a line
    except _GONE_ERRORS:
        raise Gone from None


def stat(folder: str) -> Stat:
    """Read the `stat` file of a process or thread. Raises Gone, PermissionError, or MachineError if it is malformed."""
    path = f"{folder}/stat"
    try:
        return Stat(read(path))
    except ValueError as error:
        raise garbled(path, str(error)) from None


def look(pid: int | str) -> Stat | None:
    """Return the `stat` of a process; None if it ended or cannot be read."""
    try:
        return stat(folder_of(pid))
    except (Gone, OSError, MachineError):  # another user's process, or no descriptor is left
        return None


def status_field(folder: str, name: str) -> str:
    """Return a field of a `status` file, such as "Uid". Raises Gone, PermissionError, or MachineError if it lacks."""
    path = f"{folder}/status"
    for line in read(path).split("\n"):
        field, colon, value = line.partition(":")
        if colon and field == name:
            return value.strip()
    raise garbled(path, f"no {name}")


def pid_namespace() -> int:
    """Return the number of the PID namespace of this process; containers have their own. Raises OSError."""
    return os.stat(f"{folder_of('self')}/ns/pid").st_ino


def open_files(pid: int | str, prefix: str) -> list[int]:
    """Return the descriptors of a process whose files have paths that begin so; none if that cannot be read."""
    folder, found = f"{folder_of(pid)}/fd", []
    try:
        names = os.listdir(folder)
    except OSError:  # /proc is hidden, or the process is gone
        return []
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}").startswith(prefix):
                found.append(int(name))
        except OSError:  # closed meanwhile
            pass
    return found


def all_pids(root: StrPath = LIVE) -> list[int]:
    """Return the ids of all processes, in order."""
    return sorted(map(int, filter(str.isdecimal, os.listdir(os.path.dirname(folder_of(0, root))))))


def children_of(found: Mapping[int, Stat] | None = None) -> dict[int, list[int]]:
    """Return each parent's children among these processes, by default all: not every kernel lists children itself."""
    children: dict[int, list[int]] = {}
    for pid, each in (dict(processes()) if found is None else found).items():
        children.setdefault(each.parent, []).append(pid)
    return children


def processes(root: StrPath = LIVE, *, without: Container[int] = ()) -> Iterator[tuple[int, Stat]]:
    """Yield the processes that have not ended and that may be read, but not these, in the order of their ids."""
    for pid in all_pids(root):
        if pid in without:
            continue
        try:
            found = stat(folder_of(pid, root))
        except (Gone, PermissionError):  # with hidepid=1, other users' folders are listed, but their files are refused
            continue
        if not found.has_ended:
            yield pid, found


def children_in(pid: int) -> list[int]:
    """Return a process's children as the kernel lists them; empty if it has ended, or the kernel does not list them."""
    folder, found = f"{folder_of(pid)}/task", list[int]()
    try:
        for name in os.listdir(folder):
            try:
                found += map(int, read(f"{folder}/{name}/children").split())
            except Gone:  # that thread has ended, or the kernel does not list children
                continue
    except OSError:
        pass
    return found


def descendants(pid: int, children: Mapping[int, list[int]], *, without: Collection[int] = ()) -> list[int]:
    """Return all descendants of a process, nearest first, without these and theirs; `children` as of `children_of`."""
    found, seen = [pid], {pid, *without}  # the processes were not read at once, so their parents can form a circle
    for parent in found:
        new = [child for child in children.get(parent, ()) if child not in seen]
        seen.update(new)
        found += new
    return found[1:]


def descendants_of(pid: int, *, is_apart: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Yield the descendants of a process and their start times, nearest first, as the kernel lists them.

    A process that `is_apart` is left out, and so is what is below it.
    """
    parents = [pid]
    for parent in parents:
        children = [child for child in children_in(parent) if not is_apart(child)]
        parents += children
        for child in children:
            try:
                yield child, stat(folder_of(child)).start
            except (Gone, PermissionError):
                continue


def thread_cpus(pid: int) -> tuple[CpuSet, ...]:
    """Return the CPUs that each thread of a process may use; empty if it ended.

    Takes microseconds per thread, because it uses system calls instead of text.
    """
    return tuple(activity(pid)[1].values())


def activity(pid: int) -> tuple[Stat | None, dict[int, CpuSet]]:
    """Return the `stat` of a process and the CPUs that each of its threads may use; None and nothing if it ended."""
    folder = folder_of(pid)
    try:
        found = stat(folder)
        if found.has_ended:
            return None, {}
        tids = [int(name) for name in os.listdir(f"{folder}/task")]
    except (Gone, *_GONE_ERRORS):
        return None, {}
    cpus: dict[int, CpuSet] = {}
    for tid in tids:
        try:
            cpus[tid] = CpuSet(os.sched_getaffinity(tid))
        except ProcessLookupError:  # threads end
            continue
    return found, cpus


def is_running(pid: int, start: int | None = None) -> bool:
    """Return whether a process exists and has not ended; an unreadable process counts as running.

    With `start`, the recorded start time, a process that reuses the id of an ended one does not count.
    """
    try:
        found = stat(folder_of(pid))
    except Gone:
        return False
    except PermissionError:
        return True
    return not found.has_ended and start in (None, found.start)


def state_of(pid: int) -> str | None:
    """Return a process's state ("S" sleeps, "T" is stopped); None if it cannot be read."""
    found = look(pid)
    return None if found is None else found.state


def parent_of(pid: int) -> int:
    """Return the parent's process id; 0 if it is outside this container or unknown."""
    found = look(pid)
    return 0 if found is None else found.parent


def start_time() -> int | None:
    """Return the start time of this process in clock ticks since boot; None without /proc."""
    found = look("self")
    return None if found is None else found.start


def is_dying(pid: int) -> bool:
    """Return whether a process has ended, or is being ended by the kernel or by a signal."""
    found = look(pid)
    return found is None or found.is_dying


def waits_forever(pid: int, machine: str, root: StrPath = LIVE) -> bool | None:
    """Return whether a process's only thread waits without a time-out for a lock that no other process can release.

    `machine` is the kernel's name of the architecture. None: it cannot be known, because the kernel does not show the
    system call of another process, or on other architectures. Source: proc_pid_syscall(5), futex(2).
    """
    number = _FUTEX_NUMBERS.get(machine)
    try:
        text, num_threads = read(f"{folder_of(pid, root)}/syscall"), stat(folder_of(pid, root)).num_threads
    except (Gone, OSError, MachineError):
        return None
    call = text.split()
    if number is None or not call:
        return None
    if call[0] != str(number) or len(call) < 5 or num_threads != 1:
        return False
    operation, time_out = int(call[2], 16), int(call[4], 16)
    is_own_lock = bool(operation & _FUTEX_PRIVATE)
    return is_own_lock and (operation & _FUTEX_COMMANDS) in _FUTEX_WAITS and time_out == 0


def environment_of(pid: int, *, root: StrPath = LIVE) -> dict[str, str] | None:
    """Return the environment that a process started with; None if it ended or is another user's."""
    try:
        text = read(f"{folder_of(pid, root)}/environ")
    except (Gone, PermissionError):
        return None
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def garbled(path: str, problem: str) -> MachineError:
    """Return the error for a file that is not in the kernel's format."""
    return MachineError(f"{path} is not what the kernel writes: {problem}", f"see it with: cat {path}")
