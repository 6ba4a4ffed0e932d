"""Where the loop's thread was while nothing else explains the time, from stack samples. Pure.

Comes in: an `Analysis` with samples. Goes out: the functions of the script, with their shares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from numapin.trace.intervals import common

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.intervals import Intervals
    from numapin.trace.noted import StackSample

_FEWEST: Final = 3  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePlace:
    """The function of the script where most samples are, and their share; `inside` is what it called, "" if nothing.

    `slept` is the share of these samples in which the thread did not run.
    """

    own: str
    inside: str
    share: float
    slept: float

    def __str__(self) -> str:
        """Return "load (train.py:12), in sleep (x.py:3) (80 % of the samples)"."""
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.own}{inside} ({self.share:.0%} of the samples)"


def place_within(analysis: Analysis, window: Intervals) -> CodePlace | None:
    """Return where the thread was in the window while it did what no part explains; None without samples."""
    samples = [
        sample
        for start, end in common(analysis.other, window)
        for sample in _between(analysis.trace.noted.samples, start, end)
    ]
    if len(samples) < _FEWEST:
        return None
    ((function, count),) = Counter(map(_function, samples)).most_common(1)
    there = [sample for sample in samples if _function(sample) == function]
    ((own, innermost), _) = Counter((one.own, one.innermost) for one in there).most_common(1)[0]
    return CodePlace(
        own=own,
        inside="" if own == innermost else innermost,
        share=count / len(samples),
        slept=sum(one.is_running is False for one in there) / len(there),
    )


def _between(samples: Sequence[StackSample], start: float, end: float) -> Sequence[StackSample]:
    at = attrgetter("at")
    return samples[bisect_left(samples, start, key=at) : bisect_left(samples, end, key=at)]


def _function(sample: StackSample) -> str:
    """Return the function without the line."""
    return sample.own.rpartition(":")[0]
