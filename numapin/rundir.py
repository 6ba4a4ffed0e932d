"""The run directory: where a run says what it planned and its ranks say what they got. Edge.

Comes in: the environment (NUMAPIN_RUN_DIR, XDG_RUNTIME_DIR, TMPDIR). Goes out: one folder a run, with plan.json,
command.json and, per rank and restart, observed-RANK-RESTART.json. Every file is written under another name and then
renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from numapin.errors import NumapinError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
_PLAN_VARIABLE: Final = "NUMAPIN_PLAN"
_MAX_VARIABLE_BYTES: Final = 100_000


def create(environ: Mapping[str, str]) -> str:
    """Make this run's folder (mode 0700) and return its path; folders of runs whose launcher died are removed."""
    import time  # here and below, because each rank imports this module before its own program starts

    base = _base(environ)
    _sweep(base)
    path = os.path.join(base, f"{_prefix()}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        os.makedirs(path, mode=0o700)
    except OSError as error:
        raise NumapinError(
            f"the run directory {path} cannot be made: {error.strerror}", "name another with NUMAPIN_RUN_DIR=DIR"
        ) from None
    return path


def remove(path: str) -> None:
    """Remove a run's folder."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)


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
        raise NumapinError(
            f"{os.path.join(folder, name)} cannot be written: {error.strerror}", "name another with NUMAPIN_RUN_DIR=DIR"
        ) from None


def hand_over_plan(plan: dict[str, object], environ: MutableMapping[str, str]) -> None:
    """Put the plan where ranks find it, those too that are restarted days after somebody cleaned /tmp up.

    That is their environment, while it fits in the 128 KiB that Linux allows a variable; else plan.json.
    """
    environ.pop(_PLAN_VARIABLE, None)
    text = json.dumps(plan, separators=(",", ":"))
    if len(text) < _MAX_VARIABLE_BYTES:
        environ[_PLAN_VARIABLE] = text


def take_plan(environ: MutableMapping[str, str]) -> tuple[str, str]:
    """Return the plan's JSON and where it came from, and take it out of the environment."""
    text = environ.pop(_PLAN_VARIABLE, None)
    if text is not None:
        return text, _PLAN_VARIABLE
    path = os.path.join(environ["NUMAPIN_RUN_DIR"], PLAN)
    with open(path, encoding="utf-8") as file:
        return file.read(), path


def _base(environ: Mapping[str, str]) -> str:
    named = environ.get("NUMAPIN_RUN_DIR")
    if named:
        return os.path.abspath(named)
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return os.path.join(runtime, "numapin")
    return _private(os.path.join(environ.get("TMPDIR") or "/tmp", f"numapin-{os.getuid()}"))  # noqa: S108 - made 0700


def _private(path: str) -> str:
    """Make a folder in a directory that others can write to, and refuse one that another user put there first."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or os.path.islink(path):
        raise UsageError(
            f"{path} is not a private folder of this user", "remove it, or name another with NUMAPIN_RUN_DIR=DIR"
        )
    return path


def _sweep(base: str) -> None:
    """Remove folders left by launchers of this host that were killed; names end with the launcher's process number."""
    try:
        names = os.listdir(base)
    except OSError:
        return  # nothing there yet
    for name in names:
        pid = name.rpartition("-")[2]
        if name.startswith(_prefix()) and pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            remove(os.path.join(base, name))


def _prefix() -> str:
    return f"run-{os.uname().nodename}-"
