"""Find the folder of a run by a name that people type: @last, or a part of the folder's name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.launcher import run_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LAST: Final = "@last"


def find_folder(named: str, environ: Mapping[str, str]) -> str | None:
    """Return the folder of the run with this name; None if there is none.

    `@last` is the newest active run, or else the newest one whose folder is left. Other names are that of a folder
    (run-20261122-101112-host-0a1b2c3d), or an end of it that begins after a dash, such as 0a1b2c3d.

    Raises UsageError if several runs have this name, if no run is the last, and for other names that begin with @.
    """
    if named == LAST:
        return _last(run_folder.live_runs(environ) or run_folder.all_runs(environ))
    if named.startswith("@"):
        raise UsageError(f"{named} is not a run", f"the newest run of this user is {LAST}")
    return _only(run_folder.live_runs(environ), named) or _only(run_folder.all_runs(environ), named)


def _last(runs: Sequence[str]) -> str:
    if not runs:
        raise UsageError("no run of this user is active, and none has left its folder", "numapin run train.py")
    return runs[-1]


def _only(runs: Iterable[str], named: str) -> str | None:
    """Return the run that goes by a name. Raises UsageError if several do."""
    found = [run for run in runs if _goes_by(run, named)]
    if len(found) > 1:
        names = ", ".join(map(os.path.basename, found))
        raise UsageError(f"{named} is the end of several runs' names: {names}", "give more of the name")
    return found[0] if found else None


def find_file(named: str, name: str, environ: Mapping[str, str]) -> str:
    """Return the path of the file `name` in the folder, or of the run, that the user named; else `named`, a file.

    An existing file or folder comes before a run, unless its name begins with @. Raises UsageError as `find_folder`.
    """
    is_path = os.path.exists(named) and not named.startswith("@")
    folder = named if is_path else find_folder(named, environ)
    return os.path.join(folder, name) if folder is not None and os.path.isdir(folder) else named


def _goes_by(folder: str, named: str) -> bool:
    return named != "" and f"-{os.path.basename(folder)}".endswith(f"-{named}")
