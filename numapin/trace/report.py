"""What `numapin trace` found on all ranks. Pure.

Comes in: the ranks' analyses, and why others have none. Goes out: a `TraceReport`, and its JSON (schema
numapin.trace/1).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from numapin.trace.analysis import PARTS
from numapin.trace.findings import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.trace.analysis import Analysis, Group
    from numapin.trace.findings import TraceFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One finding on the ranks that have it, by name; the evidence is that of the rank where it costs most."""

    finding: TraceFinding
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Analyses, findings, and notes on what is not in them."""

    analyses: tuple[Analysis, ...]
    findings: tuple[Shared, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON: times in ms a step, shares of the steps' time; what is unknown is null."""
        return {
            "schema": "numapin.trace/1",
            "ranks": [_rank_json(analysis) for analysis in self.analyses],
            "findings": [asdict(shared.finding) | {"ranks": shared.ranks} for shared in self.findings],
            "notes": self.notes,
        }


def make_report(analyses: Sequence[Analysis], notes: Sequence[str] = ()) -> TraceReport:
    """Put the ranks' findings together, the dearest first; a note that several traces share is said once."""
    found: dict[str, list[tuple[str, TraceFinding]]] = {}
    for analysis in analyses:
        for finding in find(analysis):
            found.setdefault(finding.what, []).append((name_of(analysis), finding))
    shared = (
        Shared(finding=max((one for _, one in rows), key=lambda one: one.costs), ranks=tuple(name for name, _ in rows))
        for rows in found.values()
    )
    ordered = sorted(
        analyses, key=lambda analysis: (analysis.trace.rank or 0, analysis.trace.restart, analysis.trace.source)
    )
    own = (note for analysis in ordered for note in analysis.trace.notes)
    return TraceReport(
        analyses=tuple(ordered),
        findings=tuple(sorted(shared, key=lambda one: -one.finding.costs)),
        notes=tuple(dict.fromkeys((*notes, *own))),
    )


def name_of(analysis: Analysis) -> str:
    """Return the rank's number and, of a later life, that; or the file where the trace does not tell it."""
    trace = analysis.trace
    if trace.rank is None:
        return trace.source
    return f"{trace.rank} (restart {trace.restart})" if trace.restart else str(trace.rank)


def shown_parts(analyses: Sequence[Analysis]) -> list[str]:
    """Return the parts that take at least a thousandth of some rank's time."""
    return [part for part in PARTS if any(analysis.share(part) >= 0.001 for analysis in analyses)]


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
