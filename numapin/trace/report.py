"""The report of `numapin trace` on all ranks. Pure.

Comes in: the ranks' analyses, and notes on ranks without one. Goes out: a `TraceReport`, and its JSON (schema
numapin.trace/1).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from numapin.trace.analysis import COMMUNICATION, PARTS
from numapin.trace.findings import find, without_waiting
from numapin.trace.straggler import find_straggler, too_few_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.trace.analysis import Analysis, Group
    from numapin.trace.finding import TraceFinding


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
        largest = max((_largest_part(analysis) for analysis in self.analyses), default=(0.0, ""))
        besides = f"; the largest part besides compute is {largest[1]}, with {largest[0]:.0%}" if largest[0] else ""
        return f"no finding: nothing costs enough time to advise a change{besides}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON: times in ms per step, shares of the step time; what is unknown is null."""
        return {
            "schema": "numapin.trace/1",
            "ranks": [_rank_json(analysis) for analysis in self.analyses],
            "findings": [_shared_json(shared) for shared in self.findings],
            "notes": self.notes,
        }


def make_report(analyses: Sequence[Analysis], notes: Sequence[str] = ()) -> TraceReport:
    """Merge the ranks' findings, the most costly first; a note that several traces share appears once."""
    ordered = sorted(analyses, key=_order)
    found: dict[str, list[tuple[Analysis, TraceFinding]]] = defaultdict(list)
    straggler = find_straggler(ordered)
    for analysis in analyses:
        of_rank = find(analysis)
        if straggler is not None:  # its finding explains the waiting of the other ranks
            of_rank = without_waiting(of_rank, is_slowest=analysis is straggler.analysis)
        for finding in of_rank:
            found[finding.what].append((analysis, finding))
    if straggler is not None:
        found[straggler.finding.what].append((straggler.analysis, straggler.finding))
    shared = [_shared(own) for own in found.values()]
    of_traces = chain.from_iterable(analysis.trace.notes for analysis in ordered)
    return TraceReport(
        analyses=tuple(ordered),
        findings=tuple(sorted(shared, key=attrgetter("saves_s"), reverse=True)),
        notes=tuple(dict.fromkeys(filter(None, (*notes, *of_traces, too_few_steps(ordered))))),
    )


def _order(analysis: Analysis) -> tuple[int, int, str]:
    return analysis.trace.rank or 0, analysis.trace.restart, analysis.trace.source


def _shared(found: Sequence[tuple[Analysis, TraceFinding]]) -> Shared:
    """Merge the findings of several ranks; with more than one, the evidence names its rank.

    A rank that loses the time in communication only waited for one that lost it otherwise, so the latter comes first.
    """
    analysis, worst = max(found, key=lambda pair: (pair[1].part != COMMUNICATION, _saved_s(*pair)))
    saves_s = _saved_s(analysis, worst)
    if len(found) > 1:
        worst = replace(worst, evidence=f"on rank {name_of(analysis)}, {worst.evidence}")
    return Shared(finding=worst, ranks=tuple(name_of(one) for one, _ in found), saves_s=saves_s)


def _saved_s(analysis: Analysis, finding: TraceFinding) -> float:
    return finding.costs * analysis.step_us / 1e6


def name_of(analysis: Analysis) -> str:
    """Return the rank's number and restart; or the file, if the trace does not name its rank."""
    trace = analysis.trace
    if trace.rank is None:
        return trace.source
    return f"{trace.rank} (restart {trace.restart})" if trace.restart else str(trace.rank)


def shown_parts(analyses: Sequence[Analysis]) -> list[str]:
    """Return the parts that take at least a thousandth of any rank's time."""
    return [part for part in PARTS if any(analysis.share(part) >= 0.001 for analysis in analyses)]


def _largest_part(analysis: Analysis) -> tuple[float, str]:
    """Return the share and the name of the part that takes most time besides compute."""
    return max((analysis.share(part), part) for part in PARTS if part != "compute")


def _shared_json(shared: Shared) -> dict[str, Any]:
    finding = shared.finding
    return {
        "what": finding.what,
        "costs": finding.costs,
        "evidence": finding.evidence,
        "remedy": finding.remedy,
        "saves_s": round(shared.saves_s, 6),
        "ranks": shared.ranks,
    }


def _rank_json(analysis: Analysis) -> dict[str, Any]:
    trace = analysis.trace
    return {
        "rank": trace.rank,
        "restart": trace.restart,
        "source": trace.source,
        "on_gpu": trace.on_gpu,
        "step_unit": trace.step_unit,
        "num_steps": len(trace.steps),
        "num_batches": analysis.num_batches,
        "step_ms": _ms(analysis.step_us),
        "waited_ms": _ms(analysis.waited_us / len(trace.steps)),
        "parts": {
            part: {"ms": _ms(analysis.parts_us[part] / len(trace.steps)), "share": round(analysis.share(part), 4)}
            for part in PARTS
        },
        "copies": [_group_json(group) for group in analysis.groups],
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {
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


def _ms(time_us: float) -> float:
    return round(time_us / 1000, 4)
