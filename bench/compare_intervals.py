"""How often the intervals of `numapin compare` miss the truth: python -m bench.compare_intervals.

Comes in: nothing. Goes out: for numbers of rounds and kinds of noise, how many of 500 simulated comparisons of
identical variants have an interval without 1, and how many claim a difference, on stdout. Takes a minute.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

from numapin.compare.ratio import Verdict, step_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NUM_COMPARISONS: Final = 500
CHANCE: Final = random.Random(11)  # noqa: S311 - noise, no secret


def heavy_tailed() -> float:
    """Return Student's t with three degrees of freedom, times 3 %."""
    return 0.03 * CHANCE.gauss(0, 1) / math.sqrt(sum(CHANCE.gauss(0, 1) ** 2 for _ in range(3)) / 3)


NOISES: Final[Mapping[str, Callable[[], float]]] = {
    "normal": lambda: CHANCE.gauss(0, 0.05),
    "heavy": heavy_tailed,
    "skewed": lambda: CHANCE.expovariate(1 / 0.05),
    "two speeds": lambda: CHANCE.choice((0, 0.4)) + CHANCE.gauss(0, 0.001),
}


def main() -> None:
    """Print a line for each number of rounds and kind of noise."""
    print(f"of {NUM_COMPARISONS} comparisons    without 1  claim a difference")
    for number in (5, 8):
        for name, noise in NOISES.items():
            ratios = [
                step_ratio(*({i: math.exp(noise()) for i in range(number)} for _ in range(2)), against="", margin=0.05)
                for _ in range(NUM_COMPARISONS)
            ]
            missed = sum(not (r.low or 0) <= 1 <= (r.high or 0) for r in ratios if r is not None)
            claims = sum(r.verdict in (Verdict.FASTER, Verdict.SLOWER) for r in ratios if r is not None)
            print(f"{number} rounds, {name:11} {missed:9} {claims:19}", flush=True)


if __name__ == "__main__":
    main()
