"""The summary and the exit status at the end of `numapin exec --children`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.base.stderr import say
from numapin.children import records
from numapin.children.reporting import REFUSED_STATUS
from numapin.rank import handover
from numapin.rank.become import CHILDREN, NESTED, tell_outer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numapin.children.table import ChildTable

_KEYS: Final = ("gpus", "surprises")


class _Records:
    """The records of a run."""

    def __init__(self, folder: str) -> None:
        self.is_gone = not os.path.isdir(folder)
        self.bound: list[dict[str, Any]] = records.read_all(folder, handover.OBSERVED, with_keys=_KEYS)
        self.has_nested = bool(records.read_all(folder, NESTED))
        self.has_unknown = bool(records.read_all(folder, records.UNBOUND, with_keys=("why",)))

    @property
    def are_as_planned(self) -> bool:
        """Whether every process that uses a GPU was bound as planned."""
        return not self.has_unknown and not any(record["surprises"] for record in self.bound)

    @property
    def has_bound(self) -> bool:
        """Whether a process was bound, by this numapin or by one below it."""
        return bool(self.bound) or self.has_nested


def conclude(table: ChildTable, status: int, environ: Mapping[str, str], *, verbose: bool) -> int:
    """Say what was bound; return the status, or 5 if the command succeeded and `--strict` was not kept.

    If this command runs below another `exec --children`, that one hears of what was bound. `environ` is the command's.
    """
    found = _Records(table.run)
    if found.has_bound and CHILDREN in environ:
        tell_outer(environ[CHILDREN])
    problem = _problem(table, found, status)
    is_error = table.strict and status == 0
    if problem:
        say(f"error: --strict: {problem}" if is_error else f"warning: {problem}")
    elif verbose:
        _say_what_was_bound(found)
    is_kept = problem is None and found.are_as_planned
    return status if is_kept or not is_error else REFUSED_STATUS


def _say_what_was_bound(found: _Records) -> None:
    num_gpus = len({gpu for record in found.bound for gpu in record["gpus"]})
    if found.bound:
        were = "was" if len(found.bound) == 1 else "were"
        say(f"{counted(len(found.bound), 'process')} used {counted(num_gpus, 'GPU')} and {were} bound")


def _problem(table: ChildTable, found: _Records, status: int) -> str | None:
    """Return why nothing was bound, if that is sure and has not been said yet."""
    if found.is_gone:
        gone = f"the run's folder {table.run} is gone, so it is unknown which processes were bound"
        return gone if table.strict and status == 0 else None
    if found.has_bound or found.has_unknown:
        return None
    if status != 0:
        return None  # it had perhaps not come so far
    return (
        "no Python process below the command was seen to use a GPU, so none was bound; numapin cannot "
        "see Python with -I, -E or -S, or without PYTHONPATH, or of another user: see docs/guides/frameworks.md"
    )
