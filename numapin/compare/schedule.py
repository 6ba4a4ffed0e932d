"""The order of the runs, and the time that is left. Pure.

Comes in: variants, the number of rounds, and the durations of the runs so far. Goes out: the next run, and seconds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and variant. Every other round runs backwards, so that a machine that slows down favors none."""
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


@dataclass(slots=True)
class Estimate:
    """The durations of the runs so far, by variant."""

    durations_s: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, duration_s: float) -> None:
        """Note that a run has ended."""
        self.durations_s.setdefault(name, []).append(duration_s)

    def left_s(self, names: Sequence[str]) -> float | None:
        """Return the time that runs of these variants will take; None before the first run has ended."""
        if not self.durations_s:
            return None
        any_s = statistics.median([one for own in self.durations_s.values() for one in own])
        return sum(statistics.median(self.durations_s.get(name) or [any_s]) for name in names)


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
