"""The run directory: where a run says what it planned and its ranks say what they got. Edge.

Comes in: the environment (NUMAPIN_RUN_DIR, XDG_RUNTIME_DIR, TMPDIR). Goes out: one folder a run, with plan.json,
command.json and, per rank and restart, observed-RANK-RESTART.json; and the plan once more, in NUMAPIN_PLAN of the
environment that the ranks inherit.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.errors import NumapinError
from numapin.stderr import say
from numapin.strictjson import encode
from numapin.writing import unwritten, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
PLAN_VARIABLE: Final = "NUMAPIN_PLAN"
_LOCK: Final = "lock"
_NEW: Final = ".new-"
_RUN: Final = "run-"
_REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
MAX_FILE_BYTES: Final = 16 << 20
_MAX_VARIABLE_BYTES: Final = 100_000


@contextmanager
def run_directory(environ: Mapping[str, str]) -> Iterator[str]:
    """Make this run's folder (mode 0700) and yield its path.

    The default one goes with a run that ended well; after one that failed it stays for what the error report names,
    until the next run. In a folder that the user named with NUMAPIN_RUN_DIR everything stays. Raises NumapinError where
    it cannot be made or where somebody else controls it.
    """
    import fcntl  # here and below, because each rank imports this module before its own program starts

    named = environ.get("NUMAPIN_RUN_DIR")
    try:
        base = os.path.abspath(named) if named else _default_base(environ)
        if not named:
            _sweep(base)
        new = _make(base)
    except OSError as error:
        raise NumapinError(f"no run directory can be made: {error}", _REMEDY) from None
    path = os.path.join(base, _RUN + os.path.basename(new).removeprefix(_NEW))
    with open(os.path.join(new, _LOCK), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # says to the sweep of other runs that this one lives
        os.rename(new, path)
        yield path
    if not named:
        _remove(path)


def live_runs(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of the runs of this user that go on, oldest first.

    Those in NUMAPIN_RUN_DIR, which inside a rank is its own run's folder; else in both default places, because a run
    may have been started without XDG_RUNTIME_DIR, as from cron.
    """
    named = environ.get("NUMAPIN_RUN_DIR")
    named = os.path.abspath(named) if named else None
    if named and is_live(named):
        return [named]
    bases = [named] if named else [base for base in (_runtime_base(environ), _temporary_base(environ)) if base]
    folders = [os.path.join(base, name) for base in bases if os.path.isdir(base) for name in os.listdir(base)]
    live = (folder for folder in folders if os.path.basename(folder).startswith(_RUN) and is_live(folder))
    return sorted(live, key=os.path.basename)  # names begin with the time


def write_json(folder: str, name: str, content: object) -> None:
    """Write a JSON file into the folder, whole or not at all. Raises NumapinError that names it."""
    path = os.path.join(folder, name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # $XDG_RUNTIME_DIR goes when the user logs out; the job goes on
    except OSError as error:
        raise unwritten(path, error, _REMEDY) from None
    write_whole(path, encode(content) + "\n", remedy=_REMEDY)


def hand_over(plan: dict[str, object], run_dir: str, environ: MutableMapping[str, str]) -> None:
    """Put the plan where the ranks and other programs find it: into their environment, and into the run directory.

    Raises NumapinError where ranks would find none; a record that cannot be written besides is a warning.
    """
    environ["NUMAPIN_RUN_DIR"] = run_dir
    in_environment = _hand_over_plan(plan, environ)
    try:
        write_json(run_dir, PLAN, plan)
        write_json(run_dir, COMMAND, {"argv": sys.argv, "pid": os.getpid()})
    except NumapinError as error:
        if not in_environment:
            raise
        say(f"warning: no record of this run: {error.message}")


def _hand_over_plan(plan: dict[str, object], environ: MutableMapping[str, str]) -> bool:
    """Put the plan where ranks find it, those too that are restarted days after somebody cleaned /tmp up.

    That is their environment, while it fits in the 128 KiB that Linux allows a variable. Returns whether it did; else
    the ranks read plan.json.
    """
    environ.pop(PLAN_VARIABLE, None)
    text = encode(plan, indent=None)
    fits = len(text) < _MAX_VARIABLE_BYTES
    if fits:
        environ[PLAN_VARIABLE] = text
    return fits


def planned(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the JSON of the run directory's plan, and its path; None if it has none.

    Raises OSError for a file that no run can have written.
    """
    if not environ.get("NUMAPIN_RUN_DIR"):
        return None
    path = os.path.join(environ["NUMAPIN_RUN_DIR"], PLAN)
    try:
        return read_text(path), path
    except (FileNotFoundError, NotADirectoryError):
        return None


def take_plan(environ: MutableMapping[str, str]) -> tuple[str, str]:
    """Take the plan of a rank out of its environment, or read that of the run directory; return it and where it was.

    Raises NumapinError where there is none.
    """
    text = environ.pop(PLAN_VARIABLE, None)
    found = planned(environ) if text is None else (text, PLAN_VARIABLE)
    if found is None:
        raise NumapinError(f"{PLAN_VARIABLE} is unset, and NUMAPIN_RUN_DIR has no {PLAN}", "start the run again")
    return found


def read_text(path: str) -> str:
    """Return the text of a file in a run directory. Raises OSError, also for one that no run can have written."""
    with os.fdopen(_open(path), "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, "larger than 16 MiB", path)
    return content.decode(errors="replace")


def _open(path: str) -> int:
    """Open a regular file of this user, or of root, for reading; root, who may read all, is asked for no owner.

    Whoever controls the folder may have put a pipe there, which would hold a reader that waits.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = OSError(errno.EINVAL, "not a regular file", path)
    elif os.geteuid() not in (0, found.st_uid) and found.st_uid != 0:
        problem = OSError(errno.EACCES, "another user's file", path)
    else:
        return descriptor
    os.close(descriptor)
    raise problem


def _make(base: str) -> str:
    import tempfile
    import time

    os.makedirs(base, mode=0o700, exist_ok=True)
    return tempfile.mkdtemp(prefix=f"{_NEW}{time.strftime('%Y%m%d-%H%M%S')}-{os.uname().nodename}-", dir=base)


def _default_base(environ: Mapping[str, str]) -> str:
    return _runtime_base(environ) or _private(_temporary_base(environ))


def _runtime_base(environ: Mapping[str, str]) -> str | None:
    runtime = environ.get("XDG_RUNTIME_DIR")
    return os.path.join(os.path.abspath(runtime), "numapin") if runtime and os.access(runtime, os.W_OK) else None


def _temporary_base(environ: Mapping[str, str]) -> str:
    return os.path.join(environ.get("TMPDIR") or "/tmp", f"numapin-{os.getuid()}")  # noqa: S108 - made 0700


def _private(path: str) -> str:
    """Make a folder in a directory that others can write to, and refuse one that another user put there first."""
    path = os.path.abspath(path)
    with suppress(FileExistsError):  # another launcher of this user may be making it
        os.mkdir(path, mode=0o700)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or os.path.islink(path):
        raise NumapinError(f"{path} is not a private folder of this user", f"remove it, or {_REMEDY}")
    return path


def _sweep(base: str) -> None:
    """Remove folders of runs that are over: those whose lock nobody holds, which is so however a launcher died."""
    for name in os.listdir(base) if os.path.isdir(base) else ():
        folder = os.path.join(base, name)
        if name.startswith(_RUN) and not is_live(folder):
            _remove(folder)


def is_live(folder: str) -> bool:
    """Return whether a run's launcher is there: it holds the lock.

    A relative path is no run's: it would be sought where this process is, and not where the one is that gave it.
    """
    import fcntl

    if not os.path.isabs(folder):
        return False
    try:
        with os.fdopen(_open(os.path.join(folder, _LOCK)), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: whoever else asks must not look like a launcher
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        return error.errno != errno.EINVAL  # a lock that is no file is nobody's; one that may not be read is somebody's
    return False


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
