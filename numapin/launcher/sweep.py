"""Remove the folders of runs that have ended. Edge.

Comes in: an opened folder with the folders of this user's runs. Goes out: the same without those whose launcher has
ended. A launcher holds the lock in its run's folder, and the folder itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from typing import Final

from numapin.base.folders import FOLDER, is_own, open_file, status_at

LOCK: Final = "lock"
NEW: Final = ".new-"
"""The prefix of a run folder's name until its launcher has locked it."""
_NAME: Final = re.compile(r"(?:run|\.new)-[0-9]{8}-[0-9]{6}-(?P<host>.*)-[^-]*", re.DOTALL)
_UNFINISHED_S: Final = 3600  # a launcher locks and renames a new folder within milliseconds


def sweep(base: int) -> None:
    """Remove the folders of this host's runs that have ended: the ones whose lock no launcher holds.

    Other hosts' folders stay. If locks are local to a host, as on Lustre with localflock, theirs look free here.
    """
    for name in os.listdir(base):
        if _is_of_this_host(name):
            with suppress(OSError):  # removed at this moment, or its lock is held
                _sweep_one(base, name)


def remove(base: int, name: str) -> None:
    """Remove a run's folder in an opened one, without following links; its lock goes last.

    So what is left by a process that dies here can still be swept.
    """
    with suppress(OSError):
        folder = os.open(name, FOLDER, dir_fd=base)
        try:
            for entry in os.listdir(folder):
                if entry != LOCK:
                    _remove_entry(folder, entry)
            if os.listdir(folder) == [LOCK]:
                os.unlink(LOCK, dir_fd=folder)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=base)


def _remove_entry(folder: int, name: str) -> None:
    """Remove a file, or a folder and what is in it. What cannot be removed stays."""
    with suppress(OSError):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def host_name() -> str:
    """Return this host's name as it stands in the names of runs."""
    return os.uname().nodename.replace("/", "_")


def _is_of_this_host(name: str) -> bool:
    """Return whether this is the name of a run of this host, or of a run that its launcher has not renamed yet."""
    match = _NAME.fullmatch(name)
    return match is not None and match["host"] == host_name()


def _sweep_one(base: int, name: str) -> None:
    """Remove a folder of ours if no launcher holds its lock. Raises OSError if it stays."""
    folder = os.open(name, FOLDER, dir_fd=base)
    try:
        has_lock = status_at(folder, LOCK) is not None
        may_begin = name.startswith(NEW) or not has_lock
        if not is_own(folder) or (may_begin and _is_young(folder)):
            return
        if not has_lock:
            # Its launcher died before it made the lock, or an older version after it had removed it. A cleaner may also
            # have removed the lock of a run that is active: its launcher holds the folder itself.
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(base, name)
            return
        lock = open_file(folder, LOCK, os.O_RDWR)  # NFS needs write access for an exclusive lock
    finally:
        os.close(folder)
    _remove_unless_locked(base, name, lock)


def _remove_unless_locked(base: int, name: str, lock: int) -> None:
    """Remove a folder if its lock is ours and free, and close the lock. Raises OSError if it is held."""
    try:
        if is_own(lock):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(base, name)
    finally:
        os.close(lock)


def _is_young(folder: int) -> bool:
    """Return whether a launcher may still be about to lock and rename a folder, or to remove it."""
    return time.time() - os.fstat(folder).st_mtime < _UNFINISHED_S
