"""Run folders: make and find them; `sweep.py` removes those of ended runs.

A run folder is numapin-UID/run-DATE-TIME-HOST-RANDOM in a temporary directory (`run_places.py`), or run-… in the folder
that the user named. Other users may have put anything there first. So a folder is trusted by its owner and mode, read
from its descriptor, and everything below it is opened relative to that descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.files import FILE, FOLDER, is_own, make_folders, open_file, opened, require_stable, status_at
from numapin.base.stderr import say
from numapin.errors import NumapinError
from numapin.launcher.run_places import open_own_base, own_bases, temporary_directories
from numapin.launcher.sweep import LOCK, NEW, host_name, remove, sweep
from numapin.system.proc import is_running, start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
_RUN: Final = "run-"
_HELD: Final = (errno.EWOULDBLOCK, errno.EACCES)  # other errors: the file system has no locks


@contextmanager
def run_directory(environ: Mapping[str, str], report: Callable[[str], None] = lambda _: None) -> Iterator[str]:
    """Make this run's folder (mode 0700) and yield its path.

    In the default place, the folder is removed when the run succeeds. Otherwise the next run removes it, unless it is
    one of the last ten with a report of failed ranks. In a folder that the user named with NUMAPIN_RUN_DIR, everything
    stays. `report` is called with the directories that were skipped, and why.

    Raises NumapinError if the folder cannot be made or another user controls it.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    run = begin_in(os.path.abspath(named)) if named else begin_by_default(environ, report)
    path, base, name, lock = run
    try:
        with _kept_from_cleaners(base, name):
            yield os.path.join(path, name)
        if not named:
            remove_run(path, base, name)
    finally:
        os.close(lock)
        os.close(base)


@contextmanager
def _kept_from_cleaners(base: int, name: str) -> Iterator[None]:
    """Lock a run's folder itself: systemd-tmpfiles skips folders that have a lock, see tmpfiles.d(5)."""
    folder = os.open(name, FOLDER, dir_fd=base)
    try:
        with suppress(OSError):  # NFS locks only what is opened for writing, which a folder cannot be
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(folder)


def live_runs(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's active runs, oldest first.

    They are in NUMAPIN_RUN_DIR if that is set, which in a rank is its own run's folder; else in all default places.
    Root also gets other users' runs from a folder that NUMAPIN_RUN_DIR names.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    if named:
        live = _live_at(os.path.abspath(named))
    else:
        live = [folder for base in own_bases(environ) for folder in live_in(base, os.geteuid())]
    return sorted(dict.fromkeys(live), key=os.path.basename)  # names begin with the time


def all_runs(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's runs, active or not, where `live_runs` looks for active ones; oldest first."""
    named = environ.get("NUMAPIN_RUN_DIR")
    bases = [os.path.abspath(named)] if named else own_bases(environ)
    found = [folder for base in bases for folder in _runs_in(base, os.geteuid())]
    return sorted(dict.fromkeys(found), key=os.path.basename)


def _runs_in(base: str, owner: int) -> list[str]:
    """Return the folders of a user's runs in a folder."""
    try:
        with opened(base) as descriptor:
            names = [name for name in os.listdir(descriptor) if name.startswith(_RUN)]
            return [os.path.join(base, name) for name in names if _is_folder_of(descriptor, name, owner)]
    except OSError:
        return []


def _is_folder_of(base: int, name: str, owner: int) -> bool:
    found = status_at(base, name)
    return found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == owner


def _live_at(named: str) -> list[str]:
    """Return the active run whose folder this is, or the active runs in this folder."""
    if is_live(named):
        return [named]
    return live_in(named, None if os.geteuid() == 0 else os.geteuid())


def is_live(folder: str) -> bool:
    """Return whether a run's launcher holds the lock of its folder. Relative paths are refused.

    The process that set a relative path may have had another current directory.
    """
    if not os.path.isabs(folder):
        return False
    try:
        with opened(folder) as descriptor:
            return os.geteuid() in (0, os.fstat(descriptor).st_uid) and is_locked(descriptor)
    except OSError:
        return False


def begin_by_default(environ: Mapping[str, str], report: Callable[[str], None]) -> tuple[str, int, str, int]:
    """Make a run's folder in the first usable temporary directory.

    As in Python's tempfile, unusable directories are skipped: a TMPDIR that does not exist, a full disk. So is one in
    which other users could replace our folder, and one without file locks, unless there is no other: a run starts
    wherever torchrun, which looks for neither, would start it. Then a warning says so.

    Returns the path and the descriptor of the folder around it, its name there, and the descriptor of its lock. Raises
    NumapinError if no directory is usable. `report` is called with what was skipped, and why.
    """
    problems: list[str] = []
    for is_stable, needs_lock in ((True, True), (True, False), (False, True), (False, False)):
        for place in temporary_directories(environ):
            try:
                run = _begin_at(place, is_stable=is_stable, needs_lock=needs_lock)
            except OSError as error:
                problems.append(f"{place}: {error.strerror}")
                continue
            skipped = "; ".join(dict.fromkeys(problems))
            if skipped:
                report(f"skipped for the run's folder: {skipped}")
            if not (is_stable and needs_lock):
                why = f"because there is no better place (skipped: {skipped})"
                say(f"warning: the run's folder is in {place} {why}; {REMEDY}")
            return run
    raise NumapinError(f"no run directory can be made: {'; '.join(dict.fromkeys(problems))}", REMEDY)


def _begin_at(place: str, *, is_stable: bool, needs_lock: bool) -> tuple[str, int, str, int]:
    """Make a run's folder in a temporary directory; return what `begin_by_default` does. Raises OSError."""
    path, base = open_own_base(place, is_stable=is_stable)
    try:
        sweep(base)
        return (path, base, *_begin(base, needs_lock=needs_lock))
    except BaseException:
        os.close(base)
        raise


def begin_in(path: str) -> tuple[str, int, str, int]:
    """Make a run's folder in the folder that the user named, and that folder, too, if it does not exist.

    Returns the same as `begin_by_default`. Raises NumapinError, also if other users may replace what is in the folder.
    """
    try:
        make_folders(path, mode=0o700)
        with opened(path) as base:
            _require_unshared(path, base)
            name, lock = _begin(base, needs_lock=False)
            return path, os.dup(base), name, lock
    except OSError as error:
        raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", REMEDY) from None


def live_in(base: str, owner: int | None) -> list[str]:
    """Return the active runs of a user in a folder; None: of all users."""
    try:
        with opened(base) as descriptor:
            names = os.listdir(descriptor)
            return [os.path.join(base, name) for name in names if _is_live_run(descriptor, name, owner)]
    except OSError:
        return []


def is_locked(folder: int) -> bool:
    """Return whether a launcher holds the lock in an opened folder. A lock that cannot be read counts as held."""
    try:
        lock = open_file(folder, LOCK)
    except OSError as error:
        return bool(error.errno == errno.EACCES)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent readers must not look like a launcher
    except OSError as error:
        return error.errno in _HELD or _is_held_by_process(lock)
    finally:
        os.close(lock)
    return False


def _is_held_by_process(lock: int) -> bool:
    """Return whether the process that a lock names is running; without a name, on file systems without locks, it is."""
    try:
        pid, start = map(int, os.read(lock, 100).split())
    except ValueError:
        return True
    return is_running(pid, start)


def remove_run(path: str, base: int, name: str) -> None:
    """Remove a run's folder. If its base was removed meanwhile, remove the folder that torch or a rank made instead."""
    remove(base, name)
    if os.fstat(base).st_nlink == 0:
        with suppress(OSError), opened(path) as again:
            if is_own(again):
                remove(again, name)


def _begin(base: int, *, needs_lock: bool = True) -> tuple[str, int]:
    """Make a run's folder in an opened folder; return its name and the descriptor of its lock.

    A failure leaves nothing behind. Raises OSError, also if the file system has no locks and `needs_lock` is set:
    without a lock, another run's sweep would take this run for one that has ended.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host_name()}-{os.urandom(4).hex()}"
    os.mkdir(NEW + name, 0o700, dir_fd=base)
    try:
        lock = _locked(base, NEW + name, needs_lock=needs_lock)
        try:
            os.rename(NEW + name, _RUN + name, src_dir_fd=base, dst_dir_fd=base)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        remove(base, NEW + name)
        raise
    return _RUN + name, lock


def _locked(base: int, name: str, *, needs_lock: bool) -> int:
    """Make and hold the lock of a new run, which keeps other runs from sweeping its folder."""
    folder = os.open(name, FOLDER, dir_fd=base)
    try:
        lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if needs_lock:
            os.close(lock)
            raise
        with suppress(OSError):
            os.write(lock, f"{os.getpid()} {start_time()}".encode())
    return lock


def _require_unshared(path: str, base: int) -> None:
    """Raise NumapinError if other users may replace what is in a folder that the user named."""
    try:
        require_stable(base)
    except PermissionError as error:
        hint = f"chmod go-w {shlex.quote(path)}, or {REMEDY}" if is_own(base) else REMEDY
        raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", hint) from None


def _is_live_run(base: int, name: str, owner: int | None) -> bool:
    """Return whether a name in an opened folder is an active run of this user; None: of any user."""
    if not name.startswith(_RUN):
        return False
    try:
        folder = os.open(name, FOLDER, dir_fd=base)
    except OSError:
        return False
    try:
        return owner in (None, os.fstat(folder).st_uid) and is_locked(folder)
    finally:
        os.close(folder)
