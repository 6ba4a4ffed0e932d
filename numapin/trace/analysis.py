"""The parts of a rank's step times, and the kinds of its copies.

Each moment of a step counts once, for the first of these that applies. With a GPU: a kernel ran ("compute", or
"communication" if only NCCL's ran); a copy ran or blocked the host ("copy"); the loop pinned a batch ("pin"); the loop
waited for its DataLoader, at the border of an epoch ("epoch", with the start and end of the workers) or within one
("wait"); anything else ("other": Python, kernel launches, an idle GPU). So what compute hides costs nothing. On the
CPU, waiting comes first, because operators inside the wait make the batch; "communication" are collective operations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.trace.records import Copy, Kernel, Span, Trace

COMMUNICATION: Final = "communication"
PARTS: Final = ("compute", COMMUNICATION, "copy", "pin", "epoch", "wait", "other")


# --- sets of moments, as sorted intervals that do not touch ----------------------------------------------------------

Intervals: TypeAlias = tuple[tuple[float, float], ...]


def union(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Return the moments in any of the pairs. Empty pairs are skipped."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments in both."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments in the first that are not in the second."""
    gaps = zip(((float("-inf"),) * 2, *other), (*other, (float("inf"),) * 2), strict=True)
    return common(one, tuple((before[1], after[0]) for before, after in gaps))


def length(intervals: Intervals) -> float:
    """Return the total length."""
    return sum(end - start for start, end in intervals)


class Lengths:
    """The total length of intervals within any range of time, by binary search and sums that are made once."""

    __slots__ = ("_ends", "_starts", "_sums")

    def __init__(self, intervals: Intervals) -> None:
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]
        self._sums = list(accumulate((end - start for start, end in intervals), initial=0.0))  # of the first 0, 1, …

    def between(self, start: float, end: float) -> float:
        """Return the length from `start` to `end`; above 0 exactly if an interval overlaps this range."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end) - 1
        if start >= end or first > last:
            return 0.0
        if first == last:
            return min(self._ends[last], end) - max(self._starts[first], start)
        head = self._ends[first] - max(self._starts[first], start)
        tail = min(self._ends[last], end) - self._starts[last]
        return head + (self._sums[last] - self._sums[first + 1]) + tail

    def within(self, ranges: Intervals) -> float:
        """Return the length within all of these ranges."""
        return sum(self.between(*pair) for pair in ranges)


# --- one rank --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Copies with the same direction, kinds of memory, operator and shape.

    `overlapped_us` is the time that kernels ran on the same device during the copies. `exposed_us` is the time that no
    kernel ran while a copy ran or blocked the host. `num_blocking` counts the copies that blocked the host, None if no
    call is known. `same_stream` is true if kernels ran on the stream of the copies.
    """

    direction: str | None
    source: str | None
    target: str | None
    operator: str | None
    shapes: str | None
    count: int
    num_bytes: int | None
    busy_us: float
    overlapped_us: float
    exposed_us: float
    blocked_us: float
    num_blocking: int | None
    same_stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStart:
    """The start of an epoch within the steps: the start of the workers and the first wait, but nothing between them.

    `loader` is the number of the script's loader.
    """

    loader: int | None
    moments: Intervals
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The use of one rank's step time. `waited_us` is all of the loop's waiting, including what compute hid.

    `waited_within_us` is the part of it that is not at the border of an epoch.
    `other` are the moments of the part of that name.
    """

    trace: Trace
    step_us: float
    parts_us: Mapping[str, float]
    steps_us: tuple[Mapping[str, float], ...]
    num_batches: int
    waited_us: float
    waited_within_us: float
    groups: tuple[Group, ...]
    other: Intervals
    epoch_starts: tuple[EpochStart, ...]

    @property
    def window_us(self) -> float:
        """The time of all steps together."""
        return self.step_us * len(self.trace.steps)

    def share(self, part: str) -> float:
        """Return the share of the step time that a part takes."""
        return self.parts_us[part] / self.window_us if self.window_us else 0.0


def analyze(trace: Trace) -> Analysis:
    """Attribute the time of the trace's steps to their parts."""
    window = _moments(trace.steps)
    in_window = Lengths(window)
    waits = _moments(trace.waits)

    # The starts of epochs within the steps; the first wait of one that began earlier is not in the trace. At its end,
    # workers are ended that would be started again.
    starts = []
    for epoch in trace.noted.epochs:
        first = bisect_left(trace.waits, epoch.end, key=attrgetter("start"))
        moments = union((epoch.pair, *(wait.pair for wait in trace.waits[first : first + 1])))
        time_us = in_window.within(moments) if epoch.end >= trace.steps[0].start else 0.0
        if time_us > 0:
            starts.append(EpochStart(loader=epoch.row, moments=moments, time_us=time_us))
    starting = chain.from_iterable(start.moments for start in starts)
    borders = union((*starting, *(end.pair for end in trace.noted.ends)))

    # The moments of each part, the first to count first. Copies within GPUs count as compute.
    if trace.on_gpu:
        computing = (kernel for kernel in trace.kernels if not kernel.communicates)
        within_gpus = (copy for copy in trace.copies if not copy.crosses)
        by_part = {
            "compute": _moments(chain(computing, within_gpus)),
            "communication": _moments(kernel for kernel in trace.kernels if kernel.communicates),
            "copy": union(chain.from_iterable(copy.occupied for copy in trace.copies if copy.crosses)),
            "pin": without(_moments(trace.loop_pins), waits),  # a loader without workers pins in next()
            "epoch": borders,
            "wait": waits,
        }
    else:
        by_part = {
            "epoch": borders,
            "wait": waits,
            "pin": _moments(trace.loop_pins),
            "compute": _moments(trace.operators),
            "communication": _moments(trace.exchanges),
        }
    exclusive: dict[str, Lengths] = {}
    taken: Intervals = ()
    for part, intervals in by_part.items():
        exclusive[part] = Lengths(without(intervals, taken))
        taken = union((*taken, *intervals))
    other = without(window, taken)

    inside = [wait for wait in trace.waits if in_window.between(*wait.pair)]
    waited = common(_moments(inside), window)
    return Analysis(
        trace=trace,
        step_us=length(window) / len(trace.steps),
        parts_us=_lengths(exclusive, window),
        steps_us=tuple(_lengths(exclusive, (step.pair,)) for step in trace.steps),
        num_batches=len(inside),
        waited_us=length(waited),
        waited_within_us=length(without(waited, borders)),
        groups=_groups(trace, in_window),
        other=other,
        epoch_starts=tuple(starts),
    )


def _moments(spans: Iterable[Span]) -> Intervals:
    return union(span.pair for span in spans)


def _lengths(parts: Mapping[str, Lengths], window: Intervals) -> dict[str, float]:
    """Return the time of each part within the window; the rest is "other"."""
    lengths = dict.fromkeys(PARTS, 0.0) | {name: part.within(window) for name, part in parts.items()}
    return lengths | {"other": max(length(window) - sum(lengths.values()), 0.0)}


def _groups(trace: Trace, in_window: Lengths) -> tuple[Group, ...]:
    """Group equal copies within the window; the groups that took longest come first."""
    alike: dict[tuple[str | None, ...], list[Copy]] = defaultdict(list)
    for copy in trace.copies:
        if in_window.between(*copy.pair):
            alike[copy.direction, copy.source, copy.target, copy.operator, copy.shapes].append(copy)
    by_device: dict[int | None, list[Kernel]] = defaultdict(list)
    for kernel in trace.kernels:
        by_device[kernel.device].append(kernel)
    busy = {device: Lengths(_moments(own)) for device, own in by_device.items()}
    streams = {(kernel.device, kernel.row) for kernel in trace.kernels}
    never = Lengths(())
    groups = []
    for (direction, source, target, operator, shapes), copies in alike.items():
        overlapped_us = exposed_us = 0.0
        for copy in copies:
            kernels, occupied = busy.get(copy.device, never), union(copy.occupied)
            overlapped_us += kernels.between(*copy.pair)
            exposed_us += length(occupied) - kernels.within(occupied)
        sizes = [copy.num_bytes for copy in copies if copy.num_bytes is not None]
        blocking = [copy.blocking for copy in copies if copy.blocking is not None]
        group = Group(
            direction=direction,
            source=source,
            target=target,
            operator=operator,
            shapes=shapes,
            count=len(copies),
            num_bytes=sum(sizes) if len(sizes) == len(copies) else None,
            busy_us=sum(copy.duration_us for copy in copies),
            overlapped_us=overlapped_us,
            exposed_us=exposed_us,
            blocked_us=sum(length(union(copy.blocked)) for copy in copies),
            num_blocking=sum(blocking) if blocking else None,
            same_stream=any((copy.device, copy.row) in streams for copy in copies),
        )
        groups.append(group)
    return tuple(sorted(groups, key=lambda group: -max(group.busy_us, group.blocked_us)))
