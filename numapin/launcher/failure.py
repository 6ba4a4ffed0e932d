"""Stage 3: the report on ranks that failed. Pure.

Comes in: how each rank ended. Goes out: `RanksFailed`, whose message says which rank failed first and why, in the words
of torch's own report. A rank's error file has the format of torch's @record.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.base.plural import listed
from numapin.errors import RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOT_AVAILABLE: Final = "<N/A>"
_NO_TRACEBACK: Final = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_ITEM: Final = "\n    "


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRank:
    """The end of a rank.

    Attributes:
        local_rank: Its number on this host.
        rank: Its number in the job.
        pid: Its process.
        exitcode: The exit status, or the negated signal number.
        ended_s: The time (since the epoch) when the launcher saw it.
        was_ended: Whether the launcher ended it, because another rank had failed.
        error_file: The file in which the rank may have recorded its error.
        error: The JSON in that file, None if there is none.
    """

    local_rank: int
    rank: int
    pid: int
    exitcode: int
    ended_s: float
    was_ended: bool
    error_file: str
    error: object

    @property
    def failed_s(self) -> float:
        """Return when it failed. What it recorded is in whole seconds, and may be long before the process ended."""
        recorded = _recorded_s(self.error)
        return self.ended_s if recorded is None else min(self.ended_s, max(0, recorded) + 1)

    @property
    def reason(self) -> str:
        """Return the recorded traceback or message, or what is known without one."""
        text = _recorded_text(self.error)
        if text:
            return text
        if self.exitcode < 0:
            return f"Signal {-self.exitcode} ({_signal_name(-self.exitcode)}) received by PID {self.pid}"
        return _NO_TRACEBACK


class RanksFailed(RankError):  # noqa: N818 - the event, as in BindingRefused
    """Ranks of `numapin run` failed. `failures` has the end of each of them, by rank."""

    def __init__(self, message: str, hint: str, failures: Mapping[int, EndedRank]) -> None:
        super().__init__(message, hint)
        self.failures = failures

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all three arguments."""
        return type(self), (self.message, self.hint, self.failures)


def ranks_failed(program: str, host: str, ended: Sequence[EndedRank]) -> RanksFailed:
    """Return the error about ranks that ended, of which at least one failed by itself.

    Args:
        program: The script, as the user typed it.
        host: The name of this host.
        ended: The ranks that have ended.
    """
    failed = sorted((rank for rank in ended if rank.exitcode), key=lambda rank: (rank.was_ended, rank.failed_s))
    first, *others = failed
    lines = (
        f"{program} FAILED",
        "Root Cause (first observed failure):",
        f"time      : {time.strftime('%Y-%m-%d_%H:%M:%S', time.localtime(first.failed_s))}",
        f"host      : {host}",
        f"rank      : {first.rank} (local_rank: {first.local_rank})",
        f"exitcode  : {_exitcode(first)}",
        f"error_file: {first.error_file if first.error is not None else _NOT_AVAILABLE}",
        *_lines_of("traceback : ", first.reason),
        *_others(others),
    )
    return RanksFailed(_ITEM.join(lines), "see what it printed, above", {rank.rank: rank for rank in failed})


def _others(others: Sequence[EndedRank]) -> list[str]:
    """Return the lines about the ranks after the first one."""
    failed = [f"also failed: rank {rank.rank}, exitcode {_exitcode(rank)}" for rank in others if not rank.was_ended]
    ended = [rank.rank for rank in others if rank.was_ended]
    return [*failed, *([f"ended then : {listed('rank', ended)}"] if ended else [])]


def _exitcode(rank: EndedRank) -> str:
    name = f" ({_signal_name(-rank.exitcode)})" if rank.exitcode < 0 else ""
    return f"{rank.exitcode} (pid: {rank.pid}){name}"


def _lines_of(title: str, text: str) -> list[str]:
    first, *rest = text.splitlines()
    return [f"{title}{first}", *(f"  {line}" for line in rest)]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return _NOT_AVAILABLE


def _recorded_s(error: object) -> int | None:
    """Return the time that torch's @record wrote, None if there is none."""
    message = _message_of(error)
    source = _part(message, "extraInfo") if isinstance(message, Mapping) else error
    try:
        return int(str(_part(source, "timestamp")))
    except ValueError:
        return None


def _recorded_text(error: object) -> str:
    """Return the traceback that torch's @record wrote, or the message, which other writers may give alone."""
    message = _message_of(error)
    if isinstance(message, Mapping):
        message = _part(_part(message, "extraInfo"), "py_callstack") or _part(message, "message")
    return message.strip() if isinstance(message, str) else ""


def _message_of(error: object) -> object:
    return _part(error, "message")


def _part(found: object, name: str) -> object:
    return found.get(name) if isinstance(found, Mapping) else None
