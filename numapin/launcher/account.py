"""Stage 3: what is known about ranks that failed. Edge.

Comes in: how the ranks' processes ended. Goes out: `RanksFailed` with the account, for which this reads the ranks'
error files, the count of out-of-memory kills and the size of /dev/shm. The direct way and torch's agent use it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from numapin.base.strict_json import decode
from numapin.launcher.failure import EndedRank, JobFailure, RanksFailed, by_failure
from numapin.rank import handover
from numapin.system import oom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.plan.model import Plan


def ended_rank(  # noqa: PLR0913 - one argument per fact
    local_rank: int,
    *,
    rank: int,
    pid: int,
    exitcode: int,
    ended_s: float | None,
    was_ended: bool,
    error_file: str,
    logs: tuple[str, ...] = (),
) -> EndedRank:
    """Return the end of a rank, with what it recorded. The arguments are the attributes of `EndedRank`."""
    return EndedRank(
        local_rank=local_rank,
        rank=rank,
        pid=pid,
        exitcode=exitcode,
        ended_s=ended_s or time.time(),
        was_ended=was_ended,
        error_file=error_file,
        error=_recorded(error_file),
        logs=logs,
    )


def ranks_failed(program: str, ended: Sequence[EndedRank], plan: Plan, kills_before: oom.Kills | None) -> RanksFailed:
    """Return the error about ranks of this host that have ended, of which at least one failed by itself.

    Args:
        program: The script, as the user typed it.
        ended: The ranks.
        plan: Their bindings.
        kills_before: The count of out-of-memory kills when they started.
    """
    ranks = sorted((rank.placed(plan.ranks) for rank in ended), key=by_failure)
    return RanksFailed(
        JobFailure(
            program=program,
            host=os.uname().nodename,
            ranks=tuple(ranks),
            out_of_memory=oom.explain(kills_before),
            out_of_memory_advice=oom.REMEDY,
            shm_bytes=_size_of_shm(),
        )
    )


def _recorded(path: str) -> object:
    """Return the JSON that a rank wrote about its error, None if there is none."""
    try:
        return decode(handover.read_text(path))
    except (OSError, ValueError):
        return None


def _size_of_shm() -> int | None:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return None
    return found.f_blocks * found.f_frsize
