"""Sets of moments, as sorted intervals that do not touch. Pure.

Comes in: pairs (start, end) in any order; they may overlap. Goes out: unions, intersections and differences.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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


def between(intervals: Intervals, start: float, end: float) -> Intervals:
    """Return the moments from `start` to `end`, by binary search."""
    first = bisect_right(intervals, start, key=lambda pair: pair[1])
    last = bisect_left(intervals, end, key=lambda pair: pair[0])
    return common(intervals[first:last], ((start, end),))


def without(one: Intervals, other: Intervals) -> Intervals:
    """Return the moments in the first that are not in the second."""
    gaps = zip(((float("-inf"),) * 2, *other), (*other, (float("inf"),) * 2), strict=True)
    return common(one, tuple((before[1], after[0]) for before, after in gaps))


def length(intervals: Intervals) -> float:
    """Return the total length."""
    return sum(end - start for start, end in intervals)
