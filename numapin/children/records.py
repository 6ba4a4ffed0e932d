"""The records of processes below `numapin exec --children`, in the run's folder."""

from __future__ import annotations

import json
import os
import stat
import zlib
from contextlib import suppress

from numapin.base.stderr import say
from numapin.errors import NumapinError
from numapin.rank import handover
from numapin.system import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any, Final

UNBOUND: Final = "unbound-"
_SAID: Final = "said-"
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_unwritable: Final[set[str]] = set()
"""Folders that this process could not write and has said so; nothing can be noted there for other processes."""


def write(folder: str, name: str, content: Mapping[str, object]) -> None:
    """Write a record; a folder that cannot be written is reported, once for all processes that share it.

    If the folder is gone, the command has ended, and the process that outlives it needs no record.
    """
    if _is_gone(folder):
        return
    try:
        handover.write_json(folder, name, content)
    except NumapinError as error:
        if folder not in _unwritable:
            _unwritable.add(folder)
            say_once(folder, f"warning: no record of the binding: {error.message}")


def _is_gone(folder: str) -> bool:
    """Return whether there is no such folder; another user's, which may not be looked at, is there."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except OSError as error:
        return not isinstance(error, PermissionError)


def remove(folder: str, name: str) -> None:
    """Remove a record that does not hold any more."""
    with suppress(OSError), handover.opened_to_write(folder) as descriptor:
        os.unlink(name, dir_fd=descriptor)


def say_once(folder: str, text: str, *, once_for: str | None = None) -> None:
    """Write a line to stderr, unless a process of this run has written the same, or a text `once_for` the same."""
    name = f"{_SAID}{zlib.crc32((once_for or text).encode(errors='replace')):08x}"
    try:
        with handover.opened_to_write(folder) as descriptor:
            os.close(os.open(name, _NEW_FILE, 0o600, dir_fd=descriptor))
    except FileExistsError:
        return
    except OSError:  # say it twice rather than never
        pass
    say(text)


def bound_pids(folder: str) -> dict[int, str]:
    """Return the running processes that have bound themselves, and the path of their record."""
    return {_pid(path): path for path in _paths(folder, handover.OBSERVED) if _is_of_running(path)}


def pids_apart(folder: str) -> set[int]:
    """Return the running processes with a record of their own: bound, or with a GPU and not bound."""
    unbound = {_pid(path) for path in _paths(folder, UNBOUND) if _is_of_running(path)}
    return unbound | bound_pids(folder).keys()


def _is_of_running(path: str) -> bool:
    """Return whether the process of a record still runs, and no other one has its id now."""
    try:
        start = json.loads(handover.read_text(path))["start"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return proc.is_running(_pid(path), start)


def cpus_of(path: str) -> str | None:
    """Return the CPUs, as a list, that a process was bound to; None if its record cannot be read."""
    try:
        content = json.loads(handover.read_text(path))
        return str(content["applied"]["cpus"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_all(folder: str, kind: str, *, with_keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the records of one kind, ordered by process. Those that cannot be read, or lack a key, are left out.

    A process that outlives the command may remove or replace its record meanwhile.
    """
    found = (_content(path) for path in sorted(_paths(folder, kind), key=_pid))
    return [content for content in found if content is not None and content.keys() >= {*with_keys}]


def _content(path: str) -> dict[str, Any] | None:
    """Return the fields of a record; None if it cannot be read."""
    try:
        content = json.loads(handover.read_text(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _paths(folder: str, kind: str) -> Iterable[str]:
    try:
        return handover.records(folder, kind)
    except OSError:
        return []


def _pid(path: str) -> int:
    number = os.path.basename(path).removesuffix(".json").rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
