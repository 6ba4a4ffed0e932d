"""A report of `numapin trace` as tables. Pure.

Comes in: a `TraceReport`. Goes out: each rank's time by activity, its copies, and what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.trace.report import name_of, shown_parts
from numapin.view.words import joined, known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from numapin.trace.analysis import Analysis
    from numapin.trace.analysis import Group as Copies
    from numapin.trace.report import Shared, TraceReport

_MOST_COPIES: Final = 12  # rows; the JSON report has all
_COPY_HEADINGS: Final = ("rank", "copies", "MB", "GB/s", "ms", "overlapped", "blocking")


def trace_table(report: TraceReport) -> RenderableType:
    """Return time, copies, findings and notes."""
    parts: list[RenderableType] = [_times(report)]
    if any(analysis.groups for analysis in report.analyses):
        parts += [Text(), _copies(report)]
    if report.nothing_found:
        parts += [Text(), Text(report.nothing_found)]
    for shared in report.findings:
        parts += _finding(shared, ranks=_rank_names(report, shared.ranks))
    return Group(*parts, *_ranking(report), *_notes(report))


def _ranking(report: TraceReport) -> list[Text]:
    """Return what to change first, with the time that it saves at most."""
    gains = [shared for shared in report.findings if shared.saves_s > 0]
    if not gains:
        return []
    lines = [
        Text(),
        Text("most to gain first, in seconds a step (estimated, at most; gains may overlap):", style="bold"),
    ]
    for number, shared in enumerate(gains, 1):
        ranks = _rank_names(report, shared.ranks)
        where = f" ({ranks})" if ranks else ""
        share = f"{shared.finding.costs:.0%}"
        lines.append(Text(f"  {number}. {shared.saves_s:.3g} s  {share:>4}  {shared.finding.what}{where}"))
    return lines


def _notes(report: TraceReport) -> list[Text]:
    lines = [Text(f"note: {note}") for note in report.notes]
    return [Text(), *lines] if lines else []


def _finding(shared: Shared, *, ranks: str) -> Iterator[Text]:
    """Yield an empty line, what was found on which ranks, what it costs, and what to change."""
    finding = shared.finding
    yield Text()
    title = Text(finding.what, style="bold yellow" if finding.costs else "bold green")
    yield title.append(f"  {ranks}", style="not bold default")
    if finding.costs:
        yield Text(f"  cost: up to {finding.costs:.0%} of the time")
    yield Text(f"  seen: {finding.evidence}")
    yield Text(f"  fix: {finding.remedy}")


def _rank_names(report: TraceReport, ranks: tuple[str, ...]) -> str:
    num_ranks = len(report.analyses)
    if num_ranks == 1:
        return ""
    if len(ranks) == num_ranks:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _times(report: TraceReport) -> Table:
    """Return one row per rank: ms per step, and the share of each part that some rank has."""
    parts = shown_parts(report.analyses)
    table = _table("rank", "steps", "ms/step", *parts)
    table.add_column("a step is", no_wrap=True)
    for analysis in report.analyses:
        trace = analysis.trace
        shares = (f"{analysis.share(part):.1%}" for part in parts)
        step_ms = f"{analysis.step_us / 1000:.2f}"
        table.add_row(name_of(analysis), str(len(trace.steps)), step_ms, *shares, trace.step_unit)
    return table


def _copies(report: TraceReport) -> Table:
    table = _table(*_COPY_HEADINGS)
    table.add_column("memory", no_wrap=True)
    table.add_column("issued by", overflow="ellipsis", no_wrap=True)
    pairs = [(analysis, copies) for analysis in report.analyses for copies in analysis.groups]
    for analysis, copies in _longest(pairs):
        table.add_row(name_of(analysis), *_copy_cells(copies))
    if len(pairs) > _MOST_COPIES:
        table.add_row("", f"+{len(pairs) - _MOST_COPIES}", *[""] * 5, "others: --json", "")
    return table


def _longest(pairs: list[tuple[Analysis, Copies]]) -> Iterator[tuple[Analysis, Copies]]:
    """Yield the copies that took longest, in their original order."""
    by_time = sorted(range(len(pairs)), key=lambda i: -_longest_us(pairs[i][1]))
    yield from (pairs[i] for i in sorted(by_time[:_MOST_COPIES]))


def _longest_us(copies: Copies) -> float:
    return max(copies.busy_us, copies.blocked_us)


def _table(*headings: str) -> Table:
    """Return a table of numbers, of which only the first column may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right", no_wrap=i > 0)
    return table


def _copy_cells(copies: Copies) -> tuple[str, ...]:
    return (
        str(copies.count),
        known(_megabytes(copies), ".2f", unknown="-"),
        known(_gbps(copies), ".2f", unknown="-"),
        f"{copies.busy_us / 1000:.2f}",
        known(_overlapped_share(copies), ".0%", unknown="-"),
        known(copies.num_blocking, unknown="-"),
        f"{copies.source or '?'} -> {copies.target or '?'}",
        joined(copies.operator or "", copies.shapes or "", separator=" ") or "-",
    )


def _megabytes(copies: Copies) -> float | None:
    return None if copies.num_bytes is None else copies.num_bytes / 1e6


def _gbps(copies: Copies) -> float | None:
    return copies.num_bytes / copies.busy_us / 1e3 if copies.num_bytes is not None and copies.busy_us else None


def _overlapped_share(copies: Copies) -> float | None:
    return copies.overlapped_us / copies.busy_us if copies.busy_us else None
