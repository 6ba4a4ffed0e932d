"""The order of the runs, and the time that is left. Pure.

Comes in: variants, the number of rounds, and the durations of the runs so far. Goes out: the next run, and seconds.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SEED: Final = 17  # a comparison can be repeated in the same order


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and variant.

    Each pair of rounds has an order of its own, drawn at random, and its second round runs backwards: ABBA, BAAB. So a
    machine that slows down, and neighbors in the order, favor none.
    """
    chance = random.Random(_SEED)  # noqa: S311 - an order, no secret
    order = list(names)
    for number in range(num_rounds):
        if number % 2 == 0:
            chance.shuffle(order)
        for name in order if number % 2 == 0 else reversed(order):
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
        any_s = statistics.median(chain.from_iterable(self.durations_s.values()))
        return sum(statistics.median(self.durations_s.get(name) or [any_s]) for name in names)


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
