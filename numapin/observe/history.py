"""The recent past of a running job, for rates and curves. Pure.

Comes in: one `Top` after another. Goes out: `History`, and a `RankPace` for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.data.loop_times import Waited
    from numapin.observe.top import Top, TopRank

_KEPT: Final = 64  # points per rank: the widest curve
_WINDOW: Final = 10  # intervals that a rate covers, so that steps may be longer than an interval
_BEHIND_SHARE: Final = 0.1  # of the loop's time spent waiting


class LoaderState(StrEnum):
    """The state of a rank's loader."""

    OK = "ok"
    BEHIND = "behind"  # the loop waits for batches
    IDLE = "idle"  # no batch was taken lately
    NONE = "-"  # the rank uses no numapin.DataLoader


class LoopPoint(NamedTuple):
    """The totals of a rank's loops at a time."""

    at_s: float
    pid: int
    loop: Waited


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """The steps of one rank lately; None is unknown.

    Attributes:
        steps_per_s: Steps per second.
        wait_share: The share of the loop's time that it waited for the next batch.
        copy_share: The share of the loop's time in which its batches were copied to the GPU, beside the computation.
        bytes_per_s: The bytes of the batches per second.
        curve: Steps per second in each interval, the latest last.
        state: The state of its loader.
    """

    steps_per_s: float | None = None
    wait_share: float | None = None
    copy_share: float | None = None
    bytes_per_s: float | None = None
    curve: tuple[float, ...] = ()
    state: LoaderState = LoaderState.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The totals of each rank's loops in the last intervals."""

    at_s: float = 0.0
    points: Mapping[int, tuple[LoopPoint, ...]] = field(default_factory=dict)

    def added(self, top: Top) -> History:
        """Return the history with one more interval. A rank that was restarted begins a new one."""
        at_s = self.at_s + top.interval_s
        return History(at_s=at_s, points={rank.plan.local_rank: self._added(rank, at_s) for rank in top.ranks})

    def _added(self, rank: TopRank, at_s: float) -> tuple[LoopPoint, ...]:
        if rank.loop is None:
            return ()
        known = self.points.get(rank.plan.local_rank, ())
        same = known if known and known[-1].pid == rank.pid else ()
        return (*same, LoopPoint(at_s, rank.pid, rank.loop))[-_KEPT:]

    def pace(self, local_rank: int) -> RankPace:
        """Return the pace of a rank over the last intervals; after one interval, over all of its loops."""
        points = self.points.get(local_rank, ())
        if not points:
            return RankPace()
        first, last = points[-_WINDOW - 1 :][0], points[-1]
        if len(points) == 1:
            nothing = replace(last.loop, waited_s=0.0, stepped_s=0.0, num_steps=0, num_bytes=0)
            first = LoopPoint(last.at_s - last.loop.stepped_s, last.pid, nothing)
        stepped_s = last.loop.stepped_s - first.loop.stepped_s
        if stepped_s <= 0:
            return RankPace(steps_per_s=_rate(first, last), curve=_curve(points), state=LoaderState.IDLE)
        num_bytes = last.loop.num_bytes - first.loop.num_bytes
        wait_share = _share(last.loop.waited_s - first.loop.waited_s, stepped_s)
        return RankPace(
            steps_per_s=_rate(first, last),
            wait_share=wait_share,
            copy_share=_share(num_bytes / last.loop.copy_gbps / 1e9, stepped_s) if last.loop.copy_gbps else None,
            bytes_per_s=num_bytes / (last.at_s - first.at_s),
            curve=_curve(points),
            state=LoaderState.BEHIND if wait_share >= _BEHIND_SHARE else LoaderState.OK,
        )


def _share(part_s: float, whole_s: float) -> float:
    return min(max(part_s / whole_s, 0.0), 1.0)


def _rate(first: LoopPoint, last: LoopPoint) -> float | None:
    """Return the steps per second between two points; None if steps are not counted, or there is one point only."""
    if not last.loop.num_steps or last.at_s <= first.at_s:
        return None
    return max(last.loop.num_steps - first.loop.num_steps, 0) / (last.at_s - first.at_s)


def _curve(points: tuple[LoopPoint, ...]) -> tuple[float, ...]:
    return tuple(rate for rate in (_rate(a, b) for a, b in pairwise(points)) if rate is not None)
