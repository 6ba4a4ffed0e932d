"""Sets of moments, as sorted intervals that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Intervals: TypeAlias = tuple[tuple[float, float], ...]


def union(pairs: Iterable[tuple[float, float]], *, gap: float = 0.0) -> Intervals:
    """Return the moments in any of the pairs; merge intervals at most `gap` apart. Empty pairs are skipped."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if merged and start <= merged[-1][1] + gap:
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
