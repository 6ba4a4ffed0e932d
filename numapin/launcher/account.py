"""Stage 3: what is known about ranks that failed. Edge.

Comes in: how the ranks' processes ended. Goes out: `RanksFailed` with the account, for which this reads the ranks'
error files, the count of out-of-memory kills and the size of /dev/shm. The direct way and torch's agent use it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from numapin.base.strict_json import decode
from numapin.errors import Stopped
from numapin.launcher.failure import EndedRank, JobFailure, RanksFailed
from numapin.launcher.first_failure import in_order
from numapin.rank import handover
from numapin.system import oom

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

    from numapin.plan.model import Plan


def ended_rank(
    local_rank: int,
    *,
    rank: int,
    pid: int,
    exitcode: int,
    ended_s: float | None,
    was_ended: bool,
    is_left: bool,
    error_file: str,
    logs: tuple[str, ...] = (),
) -> EndedRank:
    """Return the end of a rank, with what it recorded. The arguments are the attributes of `EndedRank`."""
    error, recorded_s = _recorded(error_file)
    return EndedRank(
        local_rank=local_rank,
        rank=rank,
        pid=pid,
        exitcode=exitcode,
        ended_s=ended_s or time.time(),
        was_ended=was_ended,
        is_left=is_left,
        error_file=error_file,
        error=error,
        recorded_s=recorded_s,
        logs=logs,
    )


def ranks_failed(
    program: str, ended: Sequence[EndedRank], plan: Plan, kills_before: oom.Kills | None, *, is_only_host: bool = True
) -> RanksFailed:
    """Return the error about ranks of this host that have ended, of which at least one failed by itself.

    Args:
        program: The script, as the user typed it.
        ended: The ranks.
        plan: Their bindings.
        kills_before: The count of out-of-memory kills when they started.
        is_only_host: Whether the job has no ranks on other hosts.
    """
    ranks, why_first = in_order((rank.placed(plan.ranks) for rank in ended), is_only_host=is_only_host)
    return RanksFailed(
        JobFailure(
            program=program,
            host=os.uname().nodename,
            ranks=ranks,
            why_first=why_first,
            is_only_host=is_only_host,
            out_of_memory=oom.explain(kills_before),
            out_of_memory_advice=oom.REMEDY,
            shm_bytes=_size_of_shm(),
        )
    )


def stopped_after(error: RanksFailed, number: signal.Signals, left: str = "") -> tuple[Stopped, RanksFailed | None]:
    """Return the error about a signal that came while a failed job ended, and its cause.

    There is no cause if the first rank was ended by the same signal: schedulers signal all processes at once.
    """
    is_same = error.failure.first.signal_number == number
    return Stopped(number, left), None if is_same else error


def _recorded(path: str) -> tuple[object, float | None]:
    """Return the JSON that a rank wrote about its error, and when it was written; None where unknown."""
    try:
        return decode(handover.read_text(path)), Path(path).stat().st_mtime
    except (OSError, ValueError):
        return None, None


def _size_of_shm() -> int | None:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
