"""The difference between two traced runs, by part of a step. Pure.

Comes in: two reports. Goes out: a `TraceDifference` with the mean over ranks of each part, in seconds a step, and its
JSON (schema numapin.tracediff/1).

Ranks wait for each other, so their steps are not independent: 8 ranks with 20 equal steps are 20 samples, not 160.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any, Final

from numapin.base.plural import counted
from numapin.trace.analysis import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.trace.report import TraceReport

# 97.5 % quantiles of Student's t distribution with 1, 2, … degrees of freedom, and of the normal distribution.
_STUDENT: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL: Final = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """One part of a step, or "step" for all of it, in seconds a step.

    `margin_s` is the half width of the difference's interval of about 95 %, from the spread of the steps; None if a
    run has one step only.
    """

    part: str
    a_s: float
    b_s: float
    margin_s: float | None

    @property
    def change_s(self) -> float:
        """The time that B takes more."""
        return self.b_s - self.a_s

    @property
    def differs(self) -> bool | None:
        """Whether the difference is beyond the spread of the steps; None if that is unknown."""
        return None if self.margin_s is None else abs(self.change_s) > self.margin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDifference:
    """Two runs: the whole step first, then its parts by the size of their change."""

    names: tuple[str, str]
    parts: tuple[PartDifference, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One line on the whole step."""
        step = self.parts[0]
        if step.differs is None:
            return "one step only: its spread is unknown"
        if not step.differs:
            return "no difference in the time of a step, beyond the spread of the steps"
        word = "slower" if step.change_s > 0 else "faster"
        share = f" ({step.change_s / step.a_s:+.0%})" if step.a_s else ""
        return f"B is {word}: {abs(step.change_s):.3g} s a step{share}"

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON."""
        return {
            "schema": "numapin.tracediff/1",
            "a": self.names[0],
            "b": self.names[1],
            "parts": [
                {
                    "part": part.part,
                    "a_s": round(part.a_s, 7),
                    "b_s": round(part.b_s, 7),
                    "change_s": round(part.change_s, 7),
                    "margin_s": None if part.margin_s is None else round(part.margin_s, 7),
                }
                for part in self.parts
            ],
            "verdict": self.verdict,
            "notes": self.notes,
        }


def difference(a: TraceReport, b: TraceReport, *, names: tuple[str, str]) -> TraceDifference:
    """Compare the steps of A with those of B, each step as the mean over ranks."""
    steps = [_steps(report) for report in (a, b)]
    parts = [_part(part, [[step[part] for step in own] for own in steps]) for part in ("step", *PARTS)]
    taking_time = [part for part in parts[1:] if max(part.a_s, part.b_s) > 0]
    by_change = sorted(taking_time, key=lambda part: abs(part.change_s), reverse=True)
    return TraceDifference(names=names, parts=(parts[0], *by_change), notes=tuple(_notes(a, b, names)))


def _steps(report: TraceReport) -> list[dict[str, float]]:
    """Return the parts of every step that all ranks have, and the whole step, in seconds, as means over ranks."""
    by_step = zip(*_steps_by_rank(report).values(), strict=False)  # up to the shortest trace's end
    in_s = [{part: fmean(rank[part] for rank in ranks) / 1e6 for part in PARTS} for ranks in by_step]
    return [{"step": sum(step.values()), **step} for step in in_s]


def _steps_by_rank(report: TraceReport) -> dict[str, Sequence[Mapping[str, float]]]:
    """Return the steps of each rank's last start, and of each trace that names no rank."""
    ranks = [analysis.trace.rank for analysis in report.analyses]
    names = [f"trace {number}" if rank is None else f"rank {rank}" for number, rank in enumerate(ranks)]
    return {name: analysis.steps_us for name, analysis in zip(names, report.analyses, strict=True)}


def _part(part: str, both: Sequence[Sequence[float]]) -> PartDifference:
    a, b = both
    margin = _margin(both) if min(len(a), len(b)) > 1 else None
    return PartDifference(part=part, a_s=fmean(a), b_s=fmean(b), margin_s=margin)


def _margin(both: Sequence[Sequence[float]]) -> float:
    """Return the half width of Welch's interval of 95 % for a difference of means."""
    squares = [variance(own) / len(own) for own in both]  # of the standard errors
    if not any(squares):
        return 0.0
    spread = sum((square**2) / (len(own) - 1) for square, own in zip(squares, both, strict=True))
    freedom = sum(squares) ** 2 / spread if spread else 1.0  # squares of tiny numbers may be 0
    return _student(freedom) * sqrt(sum(squares))


def _student(freedom: float) -> float:
    """Return how many standard errors an interval of 95 % reaches to each side."""
    whole = max(int(freedom + 1e-9), 1)
    if whole <= len(_STUDENT):
        return _STUDENT[whole - 1]
    return _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * whole)  # the first term of Cornish and Fisher's series


def _notes(a: TraceReport, b: TraceReport, names: tuple[str, str]) -> list[str]:
    """Return what makes the two hard to compare."""
    notes = []
    for what, values in {
        "ranks": (len(a.analyses), len(b.analyses)),
        "definition of a step": tuple(", ".join(sorted({one.trace.step_unit for one in r.analyses})) for r in (a, b)),
        "GPU used": tuple(any(one.trace.on_gpu for one in r.analyses) for r in (a, b)),
    }.items():
        if values[0] != values[1]:
            notes.append(f"the runs differ in more than time: {what}: {values[0]} and {values[1]}")
    for name, report in zip(names, (a, b), strict=True):
        nums = {which: len(steps) for which, steps in _steps_by_rank(report).items()}
        fewest = min(nums, key=lambda which: nums[which])
        if nums[fewest] < max(nums.values()):
            steps = counted(nums[fewest], "step")
            notes.append(f"{name}: only the first {steps} of each rank are compared: {fewest} has no more")
    return notes
