"""Remove the folders of runs that have ended.

A launcher holds the lock in its run's folder, and the folder itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import suppress
from typing import Final

from numapin.base.files import FOLDER, is_own, open_file, status_at
from numapin.rank.handover import REPORT

LOCK: Final = "lock"
NEW: Final = ".new-"
"""The prefix of a run folder's name until its launcher has locked it."""
_NAME: Final = re.compile(r"(?:run|\.new)-[0-9]{8}-[0-9]{6}-(?P<host>.*)-[^-]*", re.DOTALL)
_NUM_REPORTS: Final = 10
_UNFINISHED_S: Final = 3600  # a launcher locks and renames a new folder within milliseconds


def sweep(base: int) -> None:
    """Remove the folders of this host's runs that have ended: the ones whose lock no launcher holds.

    The last ten with a report of failed ranks stay. So do other hosts' folders: if locks are local to a host, as on
    Lustre with localflock, theirs look free here.
    """
    num_reports = 0
    for name in sorted(filter(_is_of_this_host, os.listdir(base)), reverse=True):  # the newest first
        with suppress(OSError):  # removed at this moment, or its lock is held
            num_reports += _sweep_one(base, name, keep_report=num_reports < _NUM_REPORTS)


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


def _sweep_one(base: int, name: str, *, keep_report: bool) -> bool:
    """Remove a folder of ours if no launcher holds its lock; return whether it has a report and was kept.

    Raises OSError if a launcher holds the lock.
    """
    folder = lock = os.open(name, FOLDER, dir_fd=base)
    try:
        has_lock = status_at(folder, LOCK) is not None
        may_begin = name.startswith(NEW) or not has_lock
        if not is_own(folder) or (may_begin and _is_young(folder)):
            return False
        if has_lock:
            lock = open_file(folder, LOCK, os.O_RDWR)  # NFS needs write access for an exclusive lock
            if not is_own(lock):
                return False
        # Without a lock, its launcher died before it made one, or an older version after it had removed it. A cleaner
        # may also have removed the lock of a run that is active: its launcher holds the folder itself.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_kept = keep_report and status_at(folder, REPORT) is not None
        if not is_kept:
            remove(base, name)
        return is_kept
    finally:
        os.close(folder)
        if lock != folder:
            os.close(lock)


def _is_young(folder: int) -> bool:
    """Return whether a launcher may still be about to lock and rename a folder, or to remove it."""
    return time.time() - os.fstat(folder).st_mtime < _UNFINISHED_S
