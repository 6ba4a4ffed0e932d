"""Where run folders are made, found again, and swept. Edge.

Comes in: the environment, or the folder that the user named. Goes out: a new run's folder, locked; those of active
runs.

A run folder is numapin-UID/run-DATE-TIME-HOST-RANDOM in a temporary directory, or run-… in the folder that the user
named. Other users may have put anything there first: a folder counts by its owner and mode, read from the descriptor,
and what is in it is opened relative to that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import stat
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.folders import FILE, FOLDER, OTHERS_WRITE, PLACE, is_own, open_file, opened, require_stable
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
_LOCK: Final = "lock"
_NEW: Final = ".new-"
_RUN: Final = "run-"
_OLD_BASE: Final = "numapin"  # in $XDG_RUNTIME_DIR
_UNFINISHED_S: Final = 3600  # a launcher takes milliseconds from making a folder to locking and renaming it
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def run_directory(environ: Mapping[str, str]) -> Iterator[str]:
    """Make this run's folder (mode 0700) and yield its path.

    The default one goes with a run that ended well; after one that failed it stays for what the error report names,
    until the next run. In a folder that the user named with NUMAPIN_RUN_DIR everything stays. Raises NumapinError where
    it cannot be made or where somebody else controls it.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    run = begin_in(os.path.abspath(named)) if named else begin_by_default(environ)
    path, base, name, lock = run
    try:
        yield os.path.join(path, name)
        if not named:
            remove_run(path, base, name)
    finally:
        os.close(lock)
        os.close(base)


def live_runs(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of this user's active runs, oldest first.

    Those in NUMAPIN_RUN_DIR, which inside a rank is its own run's folder; else those in all default places. Root also
    gets other users' from a folder that NUMAPIN_RUN_DIR names.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    if not named:
        live = [folder for base in own_bases(environ) for folder in live_in(base, os.geteuid())]
    elif is_live(named := os.path.abspath(named)):
        live = [named]
    else:
        live = live_in(named, None if os.geteuid() == 0 else os.geteuid())
    return sorted(dict.fromkeys(live), key=os.path.basename)  # names begin with the time


def is_live(folder: str) -> bool:
    """Return whether a run's launcher holds the lock of its folder.

    A relative path is no run's: it would be sought where this process is, and not where the one is that gave it.
    """
    if not os.path.isabs(folder):
        return False
    try:
        with opened(folder) as descriptor:
            return os.geteuid() in (0, os.fstat(descriptor).st_uid) and is_locked(descriptor)
    except OSError:
        return False


def begin_by_default(environ: Mapping[str, str]) -> tuple[str, int, str, int]:
    """Make a run's folder in the first temporary directory that serves; return what `_begin` does.

    What does not serve is passed over, as Python's tempfile does: a TMPDIR that does not exist, a full disk, a folder
    in which others could replace ours. Raises NumapinError where none serves.
    """
    problems: list[str] = []
    for place in _temporary_directories(environ):
        try:
            path, base = _own_base(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        try:
            _sweep(base)
            return (path, base, *_begin(base))
        except OSError as error:
            os.close(base)
            problems.append(f"{path}: {error.strerror}")
    raise NumapinError(f"no run directory can be made: {'; '.join(problems)}", REMEDY)


def begin_in(path: str) -> tuple[str, int, str, int]:
    """Make a run's folder in the one that the user named, which is made where there is none.

    Returns what `_begin` does. Raises NumapinError, also where others may replace what is in it.
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        with opened(path) as base:
            _require_unshared(path, base)
            name, lock = _begin(base, needs_lock=False)
            return path, os.dup(base), name, lock
    except OSError as error:
        raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", REMEDY) from None


def own_bases(environ: Mapping[str, str]) -> Iterator[str]:
    """Give this user's private folders where runs have them by default, and where older versions had theirs."""
    for place in _temporary_directories(environ):
        with suppress(OSError), _opened_place(place) as parent:
            yield from _private_bases(place, parent, _base_names(parent))
            if os.access(".", os.W_OK, dir_fd=parent):
                break  # a run takes none that comes later
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        with suppress(OSError), _opened_place(os.path.abspath(runtime)) as parent:
            yield from _private_bases(os.path.abspath(runtime), parent, [_OLD_BASE])


def _private_bases(place: str, parent: int, names: Iterable[str]) -> Iterator[str]:
    """Give the paths of those folders that are this user's and in which nobody else has rights."""
    for name in names:
        base = _open_base(parent, name)
        if base is None:
            continue
        is_private = not os.fstat(base).st_mode & _OTHERS
        os.close(base)
        if is_private:
            yield os.path.join(place, name)


def live_in(base: str, owner: int | None) -> list[str]:
    """Return the active runs in a folder, those of one user or of all."""
    try:
        with opened(base) as descriptor:
            names = os.listdir(descriptor)
            return [os.path.join(base, name) for name in names if _is_live_run(descriptor, name, owner)]
    except OSError:
        return []


def is_locked(folder: int) -> bool:
    """Return whether a launcher holds the lock in an opened folder. A lock that cannot be tried counts as held."""
    try:
        lock = open_file(folder, _LOCK)
    except OSError as error:
        return bool(error.errno == errno.EACCES)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: another reader must not look like a launcher
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep(base: int) -> None:
    """Remove folders of this host's runs that are over: those with a lock that no launcher holds, however it died.

    Not those of other hosts: where locks are local to a host, as on Lustre with localflock, theirs look free here.
    """
    for name in os.listdir(base):
        if _is_of_this_host(name):
            with suppress(OSError):  # one that goes at this moment, or whose lock is held
                _sweep_one(base, name)


def remove_run(path: str, base: int, name: str) -> None:
    """Remove a run's folder; where its base was removed meanwhile, the one that torch or a rank made in its place."""
    _remove(base, name)
    if os.fstat(base).st_nlink == 0:
        with suppress(OSError), opened(path) as again:
            if is_own(again):
                _remove(again, name)


def _remove(base: int, name: str) -> None:
    """Remove a folder in an opened one, without following links."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=base)


def _begin(base: int, *, needs_lock: bool = True) -> tuple[str, int]:
    """Make a run's folder in an opened one; return its name and the descriptor of its lock.

    Nothing is left of one that fails. Raises OSError, also where the file system has no locks and one is needed: the
    sweep of another run could take the folder for one that is over.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{_host()}-{os.urandom(4).hex()}"
    os.mkdir(_NEW + name, 0o700, dir_fd=base)
    try:
        lock = _locked(base, _NEW + name, needs_lock=needs_lock)
        try:
            os.rename(_NEW + name, _RUN + name, src_dir_fd=base, dst_dir_fd=base)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        _remove(base, _NEW + name)
        raise
    return _RUN + name, lock


def _locked(base: int, name: str, *, needs_lock: bool) -> int:
    """Make and hold the lock of a new run, which says to the sweep of other runs that this one lives."""
    folder = os.open(name, FOLDER, dir_fd=base)
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if needs_lock:
            os.close(lock)
            raise
    return lock


def _host() -> str:
    return os.uname().nodename.replace("/", "_")


def _temporary_directories(environ: Mapping[str, str]) -> list[str]:
    """Return where Python's tempfile looks, in its order."""
    named = (environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    places = [place for place in named if place] + ["/tmp", "/var/tmp", "/usr/tmp"]  # noqa: S108 - ours is 0700 there
    with suppress(FileNotFoundError):  # the current directory may be gone
        return list(dict.fromkeys([*map(os.path.abspath, places), os.getcwd()]))
    return [place for place in places if os.path.isabs(place)]


def _own_base(place: str) -> tuple[str, int]:
    """Open this user's folder in a temporary directory, made where there is none; return its path and descriptor.

    One that another user made first is passed over, and another name taken. Raises OSError, and NumapinError where the
    folder is ours and others have rights in it.
    """
    with _opened_place(place) as parent:
        with suppress(FileExistsError):  # another launcher of this user may be making it
            os.mkdir(_base_name(), 0o700, dir_fd=parent)
        for name in _base_names(parent):
            base = _open_base(parent, name)
            if base is not None:
                _require_private(os.path.join(place, name), base)
                return os.path.join(place, name), base
        name = f"{_base_name()}-{os.urandom(4).hex()}"
        os.mkdir(name, 0o700, dir_fd=parent)
        return os.path.join(place, name), os.open(name, FOLDER, dir_fd=parent)


def _base_name() -> str:
    return f"numapin-{os.geteuid()}"


def _base_names(parent: int) -> Iterator[str]:
    """Give the names that our folder can have in a temporary directory, the usual one first."""
    yield _base_name()
    try:
        listed = os.open(".", FOLDER, dir_fd=parent)
    except PermissionError:  # a directory in which one may make files and not list them
        return
    try:
        names = os.listdir(listed)
    finally:
        os.close(listed)
    yield from sorted(name for name in names if name.startswith(f"{_base_name()}-"))


def _open_base(parent: int, name: str) -> int | None:
    """Open a folder of this user; None for what is not there, not a folder, or another user's."""
    try:
        base = os.open(name, FOLDER, dir_fd=parent)
    except OSError:
        return None
    if is_own(base):
        return base
    os.close(base)
    return None


@contextmanager
def _opened_place(place: str) -> Iterator[int]:
    """Open a temporary directory. Raises OSError, also where others could replace this user's folder in it."""
    with opened(place, PLACE) as parent:
        require_stable(parent)
        yield parent


def _require_unshared(path: str, base: int) -> None:
    """Raise NumapinError where others may replace what is in a folder that the user named."""
    try:
        require_stable(base)
    except PermissionError as error:
        mends = f"chmod go-w {shlex.quote(path)}, or {REMEDY}" if is_own(base) else REMEDY
        raise NumapinError(f"no run directory can be made: {path}: {error.strerror}", mends) from None


def _require_private(path: str, base: int) -> None:
    """Take others' rights to read our own folder away, as torch gives them where it makes a folder again that is gone.

    Raises NumapinError, and closes the folder, where others may write to it: what is in it may be theirs.
    """
    mode = stat.S_IMODE(os.fstat(base).st_mode)
    if mode & OTHERS_WRITE:
        os.close(base)
        problem = f"{path} is not a private folder of this user: others have rights in it (mode {mode:04o})"
        raise NumapinError(problem, f"chmod 700 {shlex.quote(path)}, or {REMEDY}")
    if mode & _OTHERS:
        os.fchmod(base, 0o700)


def _is_live_run(base: int, name: str, owner: int | None) -> bool:
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


def _is_of_this_host(name: str) -> bool:
    """Return whether a name is run-DATE-TIME-HOST-RANDOM, or one that `_begin` has not renamed yet, with our HOST."""
    prefix = next((prefix for prefix in (_RUN, _NEW) if name.startswith(prefix)), None)
    if prefix is None:
        return False
    date, _, rest = name.removeprefix(prefix).partition("-")
    time_of_day, _, rest = rest.partition("-")
    is_dated = (len(date), len(time_of_day)) == (8, 6) and (date + time_of_day).isdigit()
    return is_dated and rest.rpartition("-")[0] == _host()


def _sweep_one(base: int, name: str) -> None:
    """Remove a folder of ours if no launcher holds its lock. Raises OSError where it stays."""
    folder = os.open(name, FOLDER, dir_fd=base)
    try:
        if not is_own(folder) or (name.startswith(_NEW) and _is_young(folder)):
            return
        if name.startswith(_NEW) and not os.listdir(folder):
            os.rmdir(name, dir_fd=base)  # its launcher died before it made the lock
            return
        lock = open_file(folder, _LOCK, os.O_RDWR)  # NFS locks exclusively only what is open for writing
    finally:
        os.close(folder)
    try:
        if not is_own(lock):
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(base, name)
    finally:
        os.close(lock)


def _is_young(folder: int) -> bool:
    """Return whether a launcher may still be about to lock and rename a folder."""
    return time.time() - os.fstat(folder).st_mtime < _UNFINISHED_S
