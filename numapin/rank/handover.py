"""What a run leaves for its ranks and for other programs: the plan, the command, one record per rank. Edge.

Comes in: the folder of a run (NUMAPIN_RUN_DIR). Goes out: plan.json, command.json and, per rank and restart,
observed-RANK-RESTART.json; and the plan once more, in NUMAPIN_PLAN of the environment that the ranks inherit.

Each rank imports this before its program starts; making and finding the folders is `launcher/run_folder.py`'s work.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.files import replace_at, unwritten
from numapin.base.folders import open_file, opened, require_own, require_stable
from numapin.base.stderr import say
from numapin.base.strict_json import encode
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

PLAN: Final = "plan.json"
COMMAND: Final = "command.json"
PLAN_VARIABLE: Final = "NUMAPIN_PLAN"
MAX_FILE_BYTES: Final = 16 << 20
_REMEDY: Final = "name another with NUMAPIN_RUN_DIR=DIR"
_MAX_VARIABLE_BYTES: Final = 100_000


def records(folder: str) -> list[str]:
    """Return the paths of what the ranks of a run wrote. Raises OSError."""
    with opened(folder) as descriptor:
        names = os.listdir(descriptor)
    return [os.path.join(folder, name) for name in names if name.startswith("observed-") and name.endswith(".json")]


def write_json(folder: str, name: str, content: object) -> None:
    """Write a JSON file into the folder, whole or not at all. Raises NumapinError that names it."""
    text = encode(content) + "\n"
    try:
        with _opened_to_write(folder) as descriptor:
            replace_at(descriptor, name, text, mode=0o600)
    except (OSError, ValueError) as error:
        raise unwritten(os.path.join(folder, name), error, _REMEDY) from None


def hand_over(plan: dict[str, object], run_dir: str, environ: MutableMapping[str, str]) -> None:
    """Put the plan where the ranks and other programs find it: into their environment, and into the run directory.

    Raises NumapinError where ranks would find none; a record that cannot be written besides is a warning.
    """
    from numapin.base.redact import without_secrets

    environ["NUMAPIN_RUN_DIR"] = run_dir
    in_environment = _hand_over_plan(plan, environ)
    try:
        write_json(run_dir, PLAN, plan)
        write_json(run_dir, COMMAND, {"argv": without_secrets(sys.argv), "pid": os.getpid()})
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
    folder, name = os.path.split(os.path.abspath(path))
    try:
        with opened(folder) as descriptor, os.fdopen(open_file(descriptor, name), "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        error.filename = path
        raise
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, "larger than 16 MiB", path)
    return content.decode(errors="replace")


@contextmanager
def _opened_to_write(folder: str) -> Iterator[int]:
    """Open a run's folder, made anew where somebody cleaned the temporary directory up: the job goes on.

    Raises OSError, PermissionError where the folder is another user's.
    """
    try:
        os.stat(folder)
    except FileNotFoundError:
        _make_again(folder)
    with opened(folder) as descriptor:
        require_own(descriptor)
        yield descriptor


def _make_again(folder: str) -> None:
    base, name = os.path.split(os.path.abspath(folder))
    os.makedirs(base, mode=0o700, exist_ok=True)
    with opened(base) as parent, suppress(FileExistsError):  # another rank is as quick
        require_stable(parent)
        os.mkdir(name, 0o700, dir_fd=parent)
