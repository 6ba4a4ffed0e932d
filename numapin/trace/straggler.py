"""A rank that is slower than the others. Pure.

Comes in: the ranks' analyses. Goes out: a finding that names the rank, its CPUs and node, and the part of a step in
which it falls behind; and a note if ranks have too few steps to tell.

Ranks that wait for each other have equal steps; so what counts is a rank's own time, without communication. It has to
be late in most steps: a single slow step says nothing about the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, mode
from typing import TYPE_CHECKING, Final

from numapin.trace.analysis import COMMUNICATION, PARTS
from numapin.trace.finding import TraceFinding, ms
from numapin.trace.places import place_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.trace.analysis import Analysis

_FEWEST: Final = 5  # steps
_SLOWER: Final = 1.15  # times the median of the other ranks
_FLOOR: Final = 0.05  # of the step time
_REMEDIES: Final = {
    "compute": "compare its device and its CPUs with the others': numapin doctor; numapin top shows clocks and load",
    "wait": "compare its data with the others': larger samples, slower storage, fewer CPUs for its workers",
    "epoch": "compare its data with the others': its workers start more slowly",
    "copy": "see whether its memory is on its GPU's node: numapin verify @last",
    "pin": "see whether its memory is on its own node: numapin verify @last",
    "other": "see what else runs on its CPUs, and whether only this rank logs or saves: numapin verify @last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slow rank, and what the finding about it says."""

    analysis: Analysis
    finding: TraceFinding


def find_straggler(analyses: Sequence[Analysis]) -> Straggler | None:
    """Return the rank that is slower than all others, None if there is none."""
    long_enough = _with_enough_steps(analyses)
    if len(long_enough) < 2:
        return None
    slowest = max(long_enough, key=_own_us)
    others = [analysis for analysis in long_enough if analysis is not slowest]
    costs = _late_us(slowest, others) / slowest.step_us if slowest.step_us else 0.0
    if costs < _FLOOR or not _is_mostly_late(slowest, others):
        return None
    return Straggler(analysis=slowest, finding=_finding(slowest, others, costs))


def too_few_steps(analyses: Sequence[Analysis]) -> str:
    """Return a note on the ranks that have too few steps to be called slow; "" if there are none to compare."""
    latest = _latest(analyses)
    short = [rank for rank, analysis in latest.items() if len(analysis.steps_us) < _FEWEST]
    if len(latest) < 2 or not short:
        return ""
    if len(short) == len(latest):
        ranks = "all ranks have"
    else:
        ranks = f"rank {short[0]} has" if len(short) == 1 else f"{len(short)} of {len(latest)} ranks have"
    return f"{ranks} fewer than {_FEWEST} steps, too few to look for a slow rank: trace more (--steps {_FEWEST})"


def _latest(analyses: Sequence[Analysis]) -> dict[int, Analysis]:
    """Return the last analysis of each rank."""
    return {analysis.trace.rank: analysis for analysis in analyses if analysis.trace.rank is not None}


def _with_enough_steps(analyses: Sequence[Analysis]) -> list[Analysis]:
    """Return the last analysis of each rank that has at least `_FEWEST` steps in it."""
    return [analysis for analysis in _latest(analyses).values() if len(analysis.steps_us) >= _FEWEST]


def _own_us_of(step: Mapping[str, float]) -> float:
    """Return the time of a step without communication."""
    return sum(step.values()) - step[COMMUNICATION]


def _own_us(analysis: Analysis) -> float:
    return median(map(_own_us_of, analysis.steps_us))


def _late_us(slowest: Analysis, others: Sequence[Analysis]) -> float:
    return _own_us(slowest) - median(map(_own_us, others))


def _is_mostly_late(slowest: Analysis, others: Sequence[Analysis]) -> bool:
    """Return whether the rank takes much longer than the others in more than half of its steps."""
    return len(_late_steps(slowest, others)) > len(slowest.steps_us) / 2


def _late_steps(slowest: Analysis, others: Sequence[Analysis]) -> list[Mapping[str, float]]:
    late_from_us = _SLOWER * median(map(_own_us, others))
    return [step for step in slowest.steps_us if _own_us_of(step) >= late_from_us]


def _part_us(analysis: Analysis, part: str) -> float:
    return median(step[part] for step in analysis.steps_us)


def _finding(slowest: Analysis, others: Sequence[Analysis], costs: float) -> TraceFinding:
    part = _late_part(slowest, others)
    usual = ms(median(map(_own_us, others)))
    return TraceFinding(
        what="one slow rank",
        costs=costs,
        evidence=f"rank {slowest.trace.rank}{_where(slowest)} spends {ms(_own_us(slowest))} per step outside "
        f"communication, the others {usual} (medians); most of the difference is {part}{_doing(slowest, part)}; "
        f"{_effect(slowest, others)}",
        remedy=_REMEDIES[part],
    )


def _late_part(slowest: Analysis, others: Sequence[Analysis]) -> str:
    """Return the part that takes most of the difference in most of the late steps.

    A single long step decides nothing; nor do medians, which miss parts that take turns.
    """
    usual_us = {part: median(_part_us(other, part) for other in others) for part in PARTS if part in _REMEDIES}
    return mode(max(usual_us, key=lambda part: step[part] - usual_us[part]) for step in _late_steps(slowest, others))


def _effect(slowest: Analysis, others: Sequence[Analysis]) -> str:
    """Return whether the other ranks wait: then their steps are as long."""
    if median(other.step_us for other in others) * _SLOWER < slowest.step_us:
        return "the others do not wait for it in these steps, but finish earlier"
    return "the others wait for it"


def _doing(analysis: Analysis, part: str) -> str:
    """Return where the rank's loop is, if the part has no other name."""
    place = place_within(analysis, analysis.other) if part == "other" else None
    return f", where its loop is mostly in {place}" if place else ""


def _where(analysis: Analysis) -> str:
    host, place = analysis.trace.noted.origin.host, analysis.trace.noted.place
    known = ", ".join(word for word in (f"host {host}" if host else "", place) if word)
    return f" ({known})" if known else ""
