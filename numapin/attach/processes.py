"""Processes that `attach` may change, and their descendants. Edge.

Comes in: process ids. Goes out: `Subject`s, which are identified for good by their start times; or an error for a
process that does not exist, is another user's, or must not be touched. Nothing is changed here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.errors import MachineError, UsageError
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

LIST: Final = "list processes with: nvidia-smi, or pgrep -af COMMAND"
_OTHER_USERS: Final = "--other-users"


class Subject(NamedTuple):
    """A process that may be changed. `start` is its start time in clock ticks since boot.

    `uid` is its user; None if its real and its effective user are different, as those of a set-user-ID program.
    """

    pid: int
    start: int
    name: str
    uid: int | None


class Family(NamedTuple):
    """All processes at one moment: the start time of each, and the children of each."""

    starts: Mapping[int, int]
    children: Mapping[int, list[int]]

    def below(self, pid: int, *, without: Collection[int] = ()) -> Iterator[int]:
        """Yield the descendants of a process, nearest first, without these and theirs."""
        todo, seen = [pid], {pid, *without}  # the processes were not read at once, so their parents can make a circle
        for parent in todo:
            found = [child for child in self.children.get(parent, ()) if child not in seen]
            seen.update(found)
            yield from found
            todo += found


def read_family() -> Family:
    """Look at all processes. This one is left out: it may have been started by a process that is to be bound."""
    starts: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for pid, found in proc.processes():
        if pid != os.getpid():
            starts[pid] = found.start
            children.setdefault(found.parent, []).append(pid)
    return Family(starts, children)


def examine(pid: int, *, other_users: bool) -> Subject:
    """Return the process with this id. `other_users`: root may take another user's.

    Raises UsageError for a process that does not exist or must not be touched, and MachineError for another user's.
    """
    if pid == os.getpid():
        raise UsageError(f"process {pid} is numapin itself", LIST)
    try:
        subject = _read(pid)
    except proc.Gone:
        raise UsageError(f"there is no process {pid}", LIST) from None
    except PermissionError:
        raise of_another_user(f"process {pid}", "another user") from None
    problem = why_untouchable(subject.uid, other_users=other_users)
    if problem:
        raise of_another_user(f"process {pid}", problem)
    return subject


def is_ours(pid: int, start: int, *, other_users: bool) -> bool:
    """Return whether a descendant is still that process and may be changed; Gone if it has ended."""
    folder = proc.folder_of(pid)
    try:
        uid = _uid(folder)
    except PermissionError:
        return False
    found = proc.stat(folder)
    if found.has_ended or found.start != start:
        raise proc.Gone
    return not found.is_kernel_thread and why_untouchable(uid, other_users=other_users) is None


def why_untouchable(uid: int | None, *, other_users: bool) -> str | None:
    """Return whose the process is if it may not be changed. `uid` None: of several users."""
    own = os.geteuid()
    if uid == own or (own == 0 and other_users):
        return None
    return "several users" if uid is None else f"another user (uid {uid})"


def _read(pid: int) -> Subject:
    """Read a process. Raises Gone, PermissionError and UsageError."""
    folder = proc.folder_of(pid)
    leader = int(proc.status_field(folder, "Tgid"))
    if leader != pid:
        raise UsageError(f"{pid} is a thread of process {leader}", f"type: numapin attach --pid {leader}")
    uid, found = _uid(folder), proc.stat(folder)
    if found.has_ended:
        raise proc.Gone
    if found.is_kernel_thread:
        raise _never(pid, "is a thread of the kernel")
    if pid == 1:
        raise _never(pid, "is the first process of this host or container")
    return Subject(pid, found.start, found.name, uid)


def _never(pid: int, what: str) -> UsageError:
    return UsageError(f"process {pid} {what}: attach does not touch it", LIST)


def _uid(folder: str) -> int | None:
    """Return the user of a process; None if its real and its effective user are different."""
    real, effective, *_ = map(int, proc.status_field(folder, "Uid").split())
    return real if real == effective else None


def of_another_user(what: str, whose: str) -> MachineError:
    """Return the error for what belongs to another user."""
    if os.geteuid() == 0:
        return MachineError(f"{what} belongs to {whose}", f"to change it anyway, add {_OTHER_USERS}")
    return MachineError(f"{what} belongs to {whose}", "run this as that user")
