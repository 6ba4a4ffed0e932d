"""Run folders: make and find them, and remove those of ended runs.

A run's folder is numapin-UID-DATE-TIME-HOST-RANDOM in a temporary directory, or run-DATE-TIME-HOST-RANDOM in the folder
that the user named. Its launcher locks the file `lock` in it, and the folder itself. Other users cannot make a folder
of a random name in advance, but they may have put anything beside it. So a folder is trusted by its owner and mode,
read from its descriptor, and everything below it is opened relative to that descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import stat
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.files import FOLDER, PLACE, make_folders, open_file, opened, require_own, require_stable, status_at
from numapin.base.stderr import say
from numapin.errors import NumapinError, UsageError
from numapin.rank.handover import LOGS, REMEDY, REPORT
from numapin.system.proc import is_running, start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LAST: Final = "@last"
_LOCK: Final = "lock"
_HELD: Final = (errno.EWOULDBLOCK, errno.EACCES)  # other errors: the file system has no locks
_NUM_KEPT: Final = 10
_UNLOCKED_S: Final = 3600  # a launcher locks a new folder within milliseconds

_locks: Final[dict[str, int]] = {}  # by path: the descriptors of the locks that this process holds


@contextmanager
def run_directory(environ: Mapping[str, str], report: Callable[[str], None] | None = None) -> Iterator[str]:
    """Make this run's folder (mode 0700) and yield its path.

    In the default place, the folder is removed when the run succeeds, unless it has logs. Otherwise a later run removes
    it, unless it is one of the last ten with logs or a report of failed ranks. In a folder that the user named with
    NUMAPIN_RUN_DIR, everything stays. `report` is told which directories were skipped. Raises NumapinError if no folder
    can be made.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    with ExitStack() as held:
        if named:
            yield _begin_in(os.path.abspath(named), held)
        else:
            path, base, folder = _begin_by_default(environ, report, held)
            yield path
            if status_at(folder, LOGS) is None:
                _remove(base, os.path.basename(path), folder)


def lock_of(folder: str) -> list[int]:
    """Return the descriptor of this process's lock on a run's folder, if it has one; who inherits it holds the lock."""
    return [_locks[folder]] if folder in _locks else []


def temporary_directories(environ: Mapping[str, str]) -> list[str]:
    """Return the directories that Python's tempfile tries, in its order, then one that is in memory."""
    named = filter(None, map(environ.get, ("TMPDIR", "TEMP", "TMP")))
    places = [*map(os.path.abspath, named), "/tmp", "/var/tmp", "/usr/tmp"]  # noqa: S108 - our folder has mode 0700
    with suppress(FileNotFoundError):  # the current directory may have been removed
        places.append(os.getcwd())
    places.append("/dev/shm")  # noqa: S108 - writable in containers whose other file systems are not
    return list(dict.fromkeys(filter(os.path.isabs, places)))


# --- make one --------------------------------------------------------------------------------------------------------


def _begin_in(path: str, held: ExitStack) -> str:
    """Make a run's folder in the folder that the user named, and that folder, too; return its path."""
    try:
        make_folders(path)
        with opened(path) as base:
            try:
                require_stable(base)
            except PermissionError as error:
                is_own = os.fstat(base).st_uid == os.geteuid()
                hint = f"chmod go-w {shlex.quote(path)}, or {REMEDY}" if is_own else REMEDY
                raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", hint) from None
            return _make(path, base, "run-", held, needs_lock=False)[0]
    except OSError as error:
        raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", REMEDY) from None


def _begin_by_default(
    environ: Mapping[str, str], report: Callable[[str], None] | None, held: ExitStack
) -> tuple[str, int, int]:
    """Make a run's folder in the first usable temporary directory, and remove the folders of ended runs there.

    As in Python's tempfile, unusable directories are skipped: a TMPDIR that does not exist, a full disk. So is one in
    which other users could replace our folder, and one without file locks, unless there is no other: a run starts
    wherever torchrun, which looks for neither, would start it. Then a warning says so.

    Returns the path of the folder, and the descriptors of the directory and the folder.
    """
    problems: list[str] = []
    for is_stable, needs_lock in ((True, True), (True, False), (False, True), (False, False)):
        for place in temporary_directories(environ):
            try:
                with ExitStack() as undone:
                    base = undone.enter_context(opened(place, PLACE))
                    if is_stable:
                        require_stable(base)
                        _sweep(base)
                    path, folder = _make(place, base, _own_prefix(), held, needs_lock=needs_lock)
                    held.push(undone.pop_all())
            except OSError as error:
                problems.append(f"{place}: {error.strerror}")
                continue
            skipped = "; ".join(dict.fromkeys(problems))
            if skipped and report:
                report(f"skipped for the run's folder: {skipped}")
            if not (is_stable and needs_lock):
                why = f"because there is no better place (skipped: {skipped})"
                say(f"warning: the run's folder is in {place} {why}; {REMEDY}")
            return path, base, folder
    raise NumapinError(f"no run directory can be made: {'; '.join(dict.fromkeys(problems))}", REMEDY)


def _own_prefix() -> str:
    """Return the start of the names of this user's runs in temporary directories."""
    return f"numapin-{os.geteuid()}-"


def _host_name() -> str:
    """Return this host's name as it stands in the names of runs."""
    return os.uname().nodename.replace("/", "_")


def _make(place: str, base: int, prefix: str, held: ExitStack, *, needs_lock: bool) -> tuple[str, int]:
    """Make a run's folder in a folder, opened as `base`, and lock it while `held` lasts; return path and descriptor.

    A failure leaves nothing behind. Raises OSError, also if the file system has no locks and `needs_lock` is set:
    without a lock, another run's sweep would take this run for one that has ended.
    """
    name = f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{_host_name()}-{os.urandom(4).hex()}"
    os.mkdir(name, 0o700, dir_fd=base)
    with ExitStack() as undone:
        undone.callback(_remove_empty, base, name)
        folder = os.open(name, FOLDER, dir_fd=base)
        undone.callback(os.close, folder)
        # In a place that is not stable, another user may have put another folder here, also one of ours.
        require_own(folder)
        if os.listdir(folder):
            raise OSError(errno.EEXIST, "another folder took the place of the one that was made")
        undone.callback(_remove, base, name, folder)
        with suppress(OSError):  # NFS locks only what is opened for writing, which a folder cannot be
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # systemd-tmpfiles skips it then, see tmpfiles.d(5)
        # The lock gets its name only when it is held: a sweep spares a new folder without a lock.
        lock = os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        undone.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if needs_lock:
                raise
            with suppress(OSError):
                os.write(lock, f"{os.getpid()} {start_time()}".encode())
        os.rename(".lock", _LOCK, src_dir_fd=folder, dst_dir_fd=folder)
        undone.pop_all()
    held.callback(os.close, folder)
    held.callback(os.close, lock)
    path = os.path.join(place, name)
    _locks[path] = lock
    held.callback(_locks.pop, path)
    return path, folder


# --- remove those of ended runs --------------------------------------------------------------------------------------


def _sweep(place: int) -> None:
    """Remove the folders of this host's runs that have ended, except the last ten with logs or a report of a failure.

    If locks are local to a host, as on Lustre with localflock, those of other hosts' runs look free here.
    """
    own = re.compile(f"{_own_prefix()}[0-9]{{8}}-[0-9]{{6}}-{re.escape(_host_name())}-[0-9a-f]{{8}}")
    try:
        listed = os.open(".", FOLDER, dir_fd=place)
    except PermissionError:  # one may make files in the directory but not list them
        return
    try:
        num_kept = 0
        for name in sorted(filter(own.fullmatch, os.listdir(listed)), reverse=True):  # the newest first
            with suppress(OSError):  # removed at this moment, its lock is held, or it is another user's
                num_kept += _sweep_one(listed, name, may_keep=num_kept < _NUM_KEPT)
    finally:
        os.close(listed)


def _sweep_one(place: int, name: str, *, may_keep: bool) -> bool:
    """Remove a folder of ours if no launcher holds its lock, else raise OSError; return whether it was kept."""
    with ExitStack() as opened_here:
        folder = lock = os.open(name, FOLDER, dir_fd=place)
        opened_here.callback(os.close, folder)
        require_own(folder)
        if status_at(folder, _LOCK) is not None:
            lock = open_file(folder, _LOCK, os.O_RDWR)  # NFS needs write access for an exclusive lock
            opened_here.callback(os.close, lock)
            require_own(lock)
        elif time.time() - os.fstat(folder).st_mtime < _UNLOCKED_S:  # its launcher may be about to lock it
            return False
        # Without a lock, its launcher died before it made one. A cleaner may also have removed the lock of a run that
        # is active: its launcher holds the folder itself.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_kept = may_keep and any(status_at(folder, kept) is not None for kept in (LOGS, REPORT))
        if not is_kept:
            _remove(place, name, folder)
        return is_kept


def _remove(base: int, name: str, folder: int) -> None:
    """Remove what is in an opened folder of a run, without following links, then the folder.

    Another folder that has its name in `base` by now stays.
    """
    with suppress(OSError):
        for entry in os.listdir(folder):
            with suppress(OSError):
                try:
                    os.unlink(entry, dir_fd=folder)
                except IsADirectoryError:
                    shutil.rmtree(entry, ignore_errors=True, dir_fd=folder)
        if os.path.samestat(os.stat(name, dir_fd=base, follow_symlinks=False), os.fstat(folder)):
            os.rmdir(name, dir_fd=base)


def _remove_empty(base: int, name: str) -> None:
    with suppress(OSError):
        os.rmdir(name, dir_fd=base)


# --- find them -------------------------------------------------------------------------------------------------------


def live_runs(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's active runs, oldest first.

    They are in NUMAPIN_RUN_DIR, which in a rank is its own run's folder; else in all default places. Root also gets
    other users' runs from a folder that NUMAPIN_RUN_DIR names.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    if named and is_live(os.path.abspath(named)):
        return [os.path.abspath(named)]
    runs = all_runs(environ, of_all_users=bool(named) and os.geteuid() == 0)
    return [folder for folder in runs if is_live(folder)]


def all_runs(environ: Mapping[str, str], *, of_all_users: bool = False) -> list[str]:
    """Return the folders of this user's runs, active or not, where `live_runs` looks for active ones; oldest first."""
    named = environ.get("NUMAPIN_RUN_DIR")
    found: dict[tuple[int, int], str] = {}  # by device and inode, because two paths may lead to one directory
    for place in [os.path.abspath(named)] if named else temporary_directories(environ):
        with suppress(OSError), opened(place) as base:
            for name in filter(lambda name: name.startswith("run-" if named else _own_prefix()), os.listdir(base)):
                status = None
                with suppress(OSError):  # another user's, e.g. on a file system that only he may read
                    status = status_at(base, name)
                is_folder = status is not None and stat.S_ISDIR(status.st_mode)
                if status is not None and is_folder and (of_all_users or status.st_uid == os.geteuid()):
                    found.setdefault((status.st_dev, status.st_ino), os.path.join(place, name))
    return sorted(found.values(), key=os.path.basename)  # names begin with the time


def is_live(folder: str) -> bool:  # noqa: PLR0911 - one return per case
    """Return whether a run's launcher holds the lock of its folder. A lock that cannot be read counts as held.

    On a file system without locks, the process that the lock names must be running.
    """
    if not os.path.isabs(folder):  # the process that set it may have had another current directory
        return False
    try:
        with opened(folder) as descriptor:
            if os.geteuid() not in (0, os.fstat(descriptor).st_uid):
                return False
            try:
                lock = open_file(descriptor, _LOCK)
            except OSError as error:
                return error.errno == errno.EACCES
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent readers must not look like a launcher
    except OSError as error:
        if error.errno in _HELD:
            return True
        try:  # a file system without locks
            pid, start = map(int, os.read(lock, 100).split())
        except ValueError:  # not written yet
            return True
        return is_running(pid, start)
    finally:
        os.close(lock)
    return False


def find_folder(named: str, environ: Mapping[str, str]) -> str | None:
    """Return the folder of the run with this name; None if there is none. Raises UsageError if the name is ambiguous.

    `@last` is the newest active run, or else the newest one whose folder is left. Other names are that of a folder
    (numapin-1000-20261122-101112-host-0a1b2c3d), or an end of it that begins after a dash, such as 0a1b2c3d.
    """
    if named == LAST:
        runs = live_runs(environ) or all_runs(environ)
        if not runs:
            raise UsageError("no run of this user is active, and none has left its folder", "numapin run train.py")
        return runs[-1]
    if named.startswith("@"):
        raise UsageError(f"{named} is not a run", f"the newest run of this user is {LAST}")
    for runs in (live_runs(environ), all_runs(environ)):
        found = [run for run in runs if named and f"-{os.path.basename(run)}".endswith(f"-{named}")]
        if len(found) > 1:
            names = ", ".join(map(os.path.basename, found))
            raise UsageError(f"{named} is the end of several runs' names: {names}", "give more of the name")
        if found:
            return found[0]
    return None


def find_file(named: str, name: str, environ: Mapping[str, str]) -> str:
    """Return the path of the file `name` in the folder, or of the run, that the user named; else `named`, a file.

    An existing file or folder comes before a run, unless its name begins with @. Raises UsageError as `find_folder`.
    """
    is_path = os.path.exists(named) and not named.startswith("@")
    folder = named if is_path else find_folder(named, environ)
    return os.path.join(folder, name) if folder is not None and os.path.isdir(folder) else named
