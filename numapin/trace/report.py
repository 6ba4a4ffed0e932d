"""The report of `numapin trace` on all ranks, and the difference between two reports. Pure.

Comes in: the ranks' analyses, and notes on ranks without one. Goes out: a `TraceReport` (schema numapin.trace/1) and a
`TraceDifference` (numapin.tracediff/1).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from math import sqrt
from operator import attrgetter
from statistics import fmean, variance
from typing import TYPE_CHECKING, Any

from numapin.base.plural import counted
from numapin.base.stats import student_t
from numapin.trace.analysis import COMMUNICATION, PARTS
from numapin.trace.findings import find, find_straggler, too_few_steps, without_waiting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.findings import TraceFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A finding and the names of the ranks that have it. Costs and evidence are from one rank, usually the costliest.

    `saves_s` is the time of a step there that the remedy can save at most.
    """

    finding: TraceFinding
    ranks: tuple[str, ...]
    saves_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Analyses, findings, and notes on what they lack."""

    analyses: tuple[Analysis, ...]
    findings: tuple[Shared, ...]
    notes: tuple[str, ...]

    @property
    def nothing_found(self) -> str:
        """One line in place of findings, if there are none; else ""."""
        if self.findings:
            return ""
        parts = [(analysis.share(part), part) for analysis in self.analyses for part in PARTS if part != "compute"]
        share, part = max(parts, default=(0.0, ""))
        besides = f"; the largest part besides compute is {part}, with {share:.0%}" if share else ""
        return f"no finding: nothing costs enough time to advise a change{besides}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON: times in ms per step, shares of the step time; what is unknown is null."""
        findings = [
            {
                "what": shared.finding.what,
                "costs": shared.finding.costs,
                "evidence": shared.finding.evidence,
                "remedy": shared.finding.remedy,
                "saves_s": round(shared.saves_s, 6),
                "ranks": shared.ranks,
            }
            for shared in self.findings
        ]
        ranks = [_rank_json(analysis) for analysis in self.analyses]
        return {"schema": "numapin.trace/1", "ranks": ranks, "findings": findings, "notes": self.notes}


def make_report(analyses: Sequence[Analysis], notes: Sequence[str] = ()) -> TraceReport:
    """Merge the ranks' findings, the most costly first; a note that several traces share appears once."""
    ordered = sorted(analyses, key=lambda one: (one.trace.rank or 0, one.trace.restart, one.trace.source))
    straggler = find_straggler(ordered)
    found: dict[str, list[tuple[Analysis, TraceFinding]]] = defaultdict(list)
    for analysis in analyses:
        of_rank: Sequence[TraceFinding] = find(analysis)
        if straggler is not None:  # its finding explains the waiting of the other ranks
            of_rank = without_waiting(of_rank, is_slowest=analysis is straggler[0])
        for finding in of_rank:
            found[finding.what].append((analysis, finding))
    if straggler is not None:
        found[straggler[1].what].append(straggler)
    of_traces = chain.from_iterable(analysis.trace.notes for analysis in ordered)
    return TraceReport(
        analyses=tuple(ordered),
        findings=tuple(sorted(map(_shared, found.values()), key=attrgetter("saves_s"), reverse=True)),
        notes=tuple(dict.fromkeys(filter(None, (*notes, *of_traces, too_few_steps(ordered))))),
    )


def _shared(found: Sequence[tuple[Analysis, TraceFinding]]) -> Shared:
    """Merge the findings of several ranks; with more than one, the evidence names its rank.

    A rank that loses the time in communication only waited for one that lost it otherwise, so the latter comes first.
    """
    by_seconds = [(one.part != COMMUNICATION, one.costs * analysis.step_us / 1e6) for analysis, one in found]
    worst = max(range(len(found)), key=by_seconds.__getitem__)
    analysis, finding = found[worst]
    if len(found) > 1:
        finding = replace(finding, evidence=f"on rank {name_of(analysis)}, {finding.evidence}")
    return Shared(finding=finding, ranks=tuple(name_of(one) for one, _ in found), saves_s=by_seconds[worst][1])


def name_of(analysis: Analysis) -> str:
    """Return the rank's number and restart; or the file, if the trace does not name its rank."""
    trace = analysis.trace
    if trace.rank is None:
        return trace.source
    return f"{trace.rank} (restart {trace.restart})" if trace.restart else str(trace.rank)


def shown_parts(analyses: Sequence[Analysis]) -> list[str]:
    """Return the parts that take at least a thousandth of any rank's time."""
    return [part for part in PARTS if any(analysis.share(part) >= 0.001 for analysis in analyses)]


def _rank_json(analysis: Analysis) -> dict[str, Any]:
    trace, num_steps = analysis.trace, len(analysis.trace.steps)
    return {
        "rank": trace.rank,
        "restart": trace.restart,
        "source": trace.source,
        "on_gpu": trace.on_gpu,
        "step_unit": trace.step_unit,
        "num_steps": num_steps,
        "num_batches": analysis.num_batches,
        "step_ms": _ms(analysis.step_us),
        "waited_ms": _ms(analysis.waited_us / num_steps),
        "parts": {
            part: {"ms": _ms(analysis.parts_us[part] / num_steps), "share": round(analysis.share(part), 4)}
            for part in PARTS
        },
        "copies": [
            {
                "direction": group.direction,
                "source": group.source,
                "target": group.target,
                "operator": group.operator,
                "shapes": group.shapes,
                "count": group.count,
                "bytes": group.num_bytes,
                "ms": _ms(group.busy_us),
                "overlapped_share": round(group.overlapped_us / group.busy_us, 4) if group.busy_us else None,
                "exposed_ms": _ms(group.exposed_us),
                "blocked_ms": _ms(group.blocked_us),
                "blocking": group.num_blocking,
            }
            for group in analysis.groups
        ],
    }


def _ms(time_us: float) -> float:
    return round(time_us / 1000, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """One part of a step, or "step" for all of it, in seconds a step, in the runs A and B.

    `margin_s` is the half width of the difference's interval of about 95 %, from the spread of the steps; None if a
    run has one step only. `differs` is whether the difference is beyond it.
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
        parts = [
            {
                "part": part.part,
                "a_s": round(part.a_s, 7),
                "b_s": round(part.b_s, 7),
                "change_s": round(part.change_s, 7),
                "margin_s": None if part.margin_s is None else round(part.margin_s, 7),
            }
            for part in self.parts
        ]
        (a, b), schema = self.names, "numapin.tracediff/1"
        return {"schema": schema, "a": a, "b": b, "parts": parts, "verdict": self.verdict, "notes": self.notes}


def difference(a: TraceReport, b: TraceReport, *, names: tuple[str, str]) -> TraceDifference:
    """Compare the steps of A with those of B, each step as the mean over ranks.

    Ranks wait for each other, so their steps are not independent: 8 ranks with 20 equal steps are 20 samples, not 160.
    """
    own, others = _steps(a), _steps(b)
    parts = []
    for part in ("step", *PARTS):
        in_a, in_b = [step[part] for step in own], [step[part] for step in others]
        margin = _margin(in_a, in_b) if min(len(in_a), len(in_b)) > 1 else None
        parts.append(PartDifference(part=part, a_s=fmean(in_a), b_s=fmean(in_b), margin_s=margin))
    by_change = sorted(parts[1:], key=lambda one: abs(one.change_s), reverse=True)
    taking_time = [one for one in by_change if max(one.a_s, one.b_s) > 0]
    notes = []
    for what, values in {
        "ranks": (len(a.analyses), len(b.analyses)),
        "definition of a step": tuple(", ".join(sorted({one.trace.step_unit for one in r.analyses})) for r in (a, b)),
        "GPU used": tuple(any(one.trace.on_gpu for one in r.analyses) for r in (a, b)),
    }.items():
        if values[0] != values[1]:
            notes.append(f"the runs differ in more than time: {what}: {values[0]} and {values[1]}")
    for name, report in zip(names, (a, b), strict=True):
        lengths = {which: len(steps) for which, steps in _steps_by_rank(report).items()}
        fewest = min(lengths, key=lambda which: lengths[which])
        if lengths[fewest] < max(lengths.values()):
            steps = counted(lengths[fewest], "step")
            notes.append(f"{name}: only the first {steps} of each rank are compared: {fewest} has no more")
    return TraceDifference(names=names, parts=(parts[0], *taking_time), notes=tuple(notes))


def _steps(report: TraceReport) -> list[dict[str, float]]:
    """Return the parts of every step that all ranks have, and the whole step, in seconds, as means over ranks."""
    by_step = zip(*_steps_by_rank(report).values(), strict=False)  # up to the shortest trace's end
    in_s = [{part: fmean(rank[part] for rank in ranks) / 1e6 for part in PARTS} for ranks in by_step]
    return [{"step": sum(step.values()), **step} for step in in_s]


def _steps_by_rank(report: TraceReport) -> dict[str, Sequence[Mapping[str, float]]]:
    """Return the steps of each rank's last start, and of each trace that names no rank."""
    by_rank: dict[str, Sequence[Mapping[str, float]]] = {}
    for number, analysis in enumerate(report.analyses):
        rank = analysis.trace.rank
        by_rank[f"trace {number}" if rank is None else f"rank {rank}"] = analysis.steps_us
    return by_rank


def _margin(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the half width of Welch's interval of 95 % for a difference of means."""
    squares = [variance(own) / len(own) for own in (a, b)]  # of the standard errors
    if not any(squares):
        return 0.0
    spread = sum(square**2 / (len(own) - 1) for square, own in zip(squares, (a, b), strict=True))
    freedom = sum(squares) ** 2 / spread if spread else 1.0  # squares of tiny numbers may be 0
    return student_t(0.95, freedom + 1e-9) * sqrt(sum(squares))
