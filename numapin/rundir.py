"""The run directory: where a run says what it planned and its ranks say what they got. Edge.

Comes in: the environment (NUMAPIN_RUN_DIR, XDG_RUNTIME_DIR, TMPDIR). Goes out: one folder a run, with plan.json,
command.json and, per rank and restart, observed-RANK-RESTART.json. Every file is written under another name and then
renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
_LOCK: Final = "lock"
_NEW: Final = ".new-"
_RUN: Final = "run-"
_REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
_PLAN_VARIABLE: Final = "NUMAPIN_PLAN"
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


def write_json(folder: str, name: str, content: object) -> None:
    """Write a JSON file into the folder, whole or not at all. Raises NumapinError that names it."""
    temporary = os.path.join(folder, f".{name}.{os.getpid()}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # $XDG_RUNTIME_DIR goes when the user logs out; the job goes on
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(temporary, os.path.join(folder, name))
    except OSError as error:
        raise NumapinError(f"{os.path.join(folder, name)} cannot be written: {error.strerror}", _REMEDY) from None


def hand_over_plan(plan: dict[str, object], environ: MutableMapping[str, str]) -> bool:
    """Put the plan where ranks find it, those too that are restarted days after somebody cleaned /tmp up.

    That is their environment, while it fits in the 128 KiB that Linux allows a variable. Returns whether it did; else
    the ranks read plan.json.
    """
    environ.pop(_PLAN_VARIABLE, None)
    text = json.dumps(plan, separators=(",", ":"))
    fits = len(text) < _MAX_VARIABLE_BYTES
    if fits:
        environ[_PLAN_VARIABLE] = text
    return fits


def take_plan(environ: MutableMapping[str, str]) -> tuple[str, str]:
    """Return the plan's JSON and where it came from, and take it out of the environment."""
    text = environ.pop(_PLAN_VARIABLE, None)
    if text is not None:
        return text, _PLAN_VARIABLE
    path = os.path.join(environ["NUMAPIN_RUN_DIR"], PLAN)
    with open(path, encoding="utf-8") as file:
        return file.read(), path


def _make(base: str) -> str:
    import tempfile
    import time

    os.makedirs(base, mode=0o700, exist_ok=True)
    return tempfile.mkdtemp(prefix=f"{_NEW}{time.strftime('%Y%m%d-%H%M%S')}-{os.uname().nodename}-", dir=base)


def _default_base(environ: Mapping[str, str]) -> str:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return os.path.join(os.path.abspath(runtime), "numapin")
    return _private(os.path.join(environ.get("TMPDIR") or "/tmp", f"numapin-{os.getuid()}"))  # noqa: S108 - made 0700


def _private(path: str) -> str:
    """Make a folder in a directory that others can write to, and refuse one that another user put there first."""
    path = os.path.abspath(path)
    if not os.path.lexists(path):
        os.mkdir(path, mode=0o700)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or os.path.islink(path):
        raise NumapinError(f"{path} is not a private folder of this user", f"remove it, or {_REMEDY}")
    return path


def _sweep(base: str) -> None:
    """Remove folders of runs that are over: those whose lock nobody holds, which is so however a launcher died."""
    for name in os.listdir(base) if os.path.isdir(base) else ():
        folder = os.path.join(base, name)
        if name.startswith(_RUN) and not _lives(folder):
            _remove(folder)


def _lives(folder: str) -> bool:
    import fcntl

    try:
        with open(os.path.join(folder, _LOCK), encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _remove(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
