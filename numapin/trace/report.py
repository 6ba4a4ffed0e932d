"""The report of `numapin trace` on all ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from numapin.trace.analysis import COMMUNICATION, PARTS
from numapin.trace.findings import find, find_straggler, other_programs, too_few_steps, without_waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.trace.analysis import Analysis
    from numapin.trace.findings import TraceFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Analyses, findings, and notes on what they lack."""

    analyses: tuple[Analysis, ...]
    findings: tuple[TraceFinding, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON: times in ms per step, shares of the step time; what is unknown is null."""
        names, findings = ("what", "costs", "evidence", "remedy"), []
        for finding in self.findings:
            own = {name: getattr(finding, name) for name in names}
            findings.append({**own, "saves_s": round(finding.saves_s, 6), "ranks": finding.ranks})
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
        findings=tuple(sorted(map(_merged, found.values()), key=attrgetter("saves_s"), reverse=True)),
        notes=tuple(dict.fromkeys(filter(None, (*notes, *of_traces, too_few_steps(ordered), other_programs(ordered))))),
    )


def _merged(found: Sequence[tuple[Analysis, TraceFinding]]) -> TraceFinding:
    """Merge the findings of several ranks; with more than one, the evidence names its rank.

    A rank that loses the time in communication only waited for one that lost it otherwise, so the latter comes first.
    """
    by_seconds = [(one.part != COMMUNICATION, one.costs * analysis.step_us / 1e6) for analysis, one in found]
    worst = max(range(len(found)), key=by_seconds.__getitem__)
    analysis, finding = found[worst]
    where = f"on rank {name_of(analysis)}, " if len(found) > 1 else ""
    ranks = tuple(name_of(one) for one, _ in found)
    return replace(finding, evidence=where + finding.evidence, ranks=ranks, saves_s=by_seconds[worst][1])


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
