"""Steps that take much longer than the others. Pure.

Comes in: an `Analysis`. Goes out: an `Uneven`: which steps are slow, and which part of their time makes them so.

The start of an epoch, waiting for data and an optimizer on the CPU have findings of their own, so they do not make a
step slow here. The extra time of slow steps belongs to this finding only: `without_excess`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from numapin.trace.analysis import PARTS
from numapin.trace.finding import TraceFinding, in_words, ms
from numapin.trace.intervals import Lengths
from numapin.trace.places import place_within

if TYPE_CHECKING:
    from numapin.trace.analysis import Analysis

_FEWEST: Final = 5  # steps
_SLOW: Final = 1.5  # times the median
_NOTICED: Final = 0.01  # of the time of all steps
_FLOOR: Final = 0.05  # of the time of all steps
_OTHERS: Final = ("epoch", "wait")
_REMEDIES: Final = {
    "compute": "inputs of similar size in each batch: sort or bucket by length, or pack; a compiler or cuDNN that "
    "tunes itself for each new shape needs fixed shapes",
    "communication": "see whether another rank is slow in these steps, or checkpoints",
    "copy": "copy less in these steps: evaluate, log or save from the GPU less often, or with pinned memory",
    "pin": "use batches of the same size, so that pinned memory is used again",
    "other": "do that less often, or in another thread or process: logging, checkpoints, evaluation, garbage",
}

_UNSEEN: Final = (
    "look at these steps in the Chrome trace: logging, checkpoints, evaluation and garbage collection are usual "
    "causes, and so are other processes on the rank's CPUs (numapin verify @last)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """The slow steps, the part that takes most of their extra time, and that time, in all of them together."""

    slow: tuple[int, ...]
    part: str
    excess_us: float


def uneven_steps(analysis: Analysis) -> Uneven | None:
    """Return the slow steps, None if they cost little."""
    steps = _steps(analysis)
    if len(steps) < _FEWEST:
        return None
    totals = [sum(step.values()) for step in steps]
    usual = median(totals)
    least = max(_SLOW * usual, usual + _NOTICED * analysis.window_us)
    slow = tuple(i for i, total in enumerate(totals) if total > least)
    excess = {part: _excess(steps, slow, part) for part in _REMEDIES}
    part = max(excess, key=lambda name: excess[name])
    return Uneven(slow=slow, part=part, excess_us=excess[part]) if _costs(analysis, excess[part]) >= _FLOOR else None


def without_excess(analysis: Analysis, uneven: Uneven | None) -> Analysis:
    """Return the analysis without the extra time of slow steps, which is not the other findings' as well."""
    if uneven is None:
        return analysis
    left_us = analysis.parts_us[uneven.part] - uneven.excess_us
    return replace(analysis, parts_us={**analysis.parts_us, uneven.part: max(left_us, 0.0)})


def _steps(analysis: Analysis) -> list[dict[str, float]]:
    """Return the parts of each step that have no finding of their own."""
    updating = Lengths(analysis.updating)
    parts = [part for part in PARTS if part not in _OTHERS]
    return [
        {part: step[part] for part in parts} | {"other": step["other"] - updating.between(*span.pair)}
        for step, span in zip(analysis.steps_us, analysis.trace.steps, strict=True)
    ]


def _excess(steps: list[dict[str, float]], slow: tuple[int, ...], part: str) -> float:
    usual = median(step[part] for step in steps)
    return sum(max(steps[i][part] - usual, 0.0) for i in slow)


def _costs(analysis: Analysis, time_us: float) -> float:
    return time_us / analysis.window_us if analysis.window_us else 0.0


def uneven_finding(analysis: Analysis, uneven: Uneven) -> TraceFinding:
    """Return what is uneven, with the slowest step."""
    totals = [sum(step.values()) for step in _steps(analysis)]
    slowest = max(uneven.slow, key=lambda i: totals[i])
    place = place_within(analysis, (analysis.trace.steps[slowest].pair,)) if uneven.part == "other" else None
    most = in_words(uneven.part)
    seen = f"; there, the loop was mostly in {place}" if place else ""
    return TraceFinding(
        what="uneven steps",
        costs=_costs(analysis, uneven.excess_us),
        evidence=f"slow steps: {len(uneven.slow)} of {len(totals)}; step {slowest} took {ms(totals[slowest])}, the "
        f"median step {ms(median(totals))}, without waiting for data; most of the difference is in {most}{seen}",
        remedy=_UNSEEN if uneven.part == "other" and place is None else _REMEDIES[uneven.part],
        part=uneven.part,
    )
