"""A report of `numapin trace` as tables: each rank's time by activity, its copies, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.trace.report import name_of, shown_parts
from numapin.view.machine import joined, known

if TYPE_CHECKING:
    from rich.console import RenderableType

    from numapin.trace.report import TraceReport

_MOST_COPIES: Final = 12  # rows; the JSON report has all


def trace_table(report: TraceReport) -> RenderableType:
    """Return time, copies, findings with the most to gain first, and notes."""
    shown = shown_parts(report.analyses)
    times = _table("rank", "steps", "ms/step", *shown)
    times.add_column("a step is", no_wrap=True)
    for analysis in report.analyses:
        shares = [f"{analysis.share(part):.1%}" for part in shown]
        numbers = (str(len(analysis.trace.steps)), f"{analysis.step_us / 1000:.2f}", *shares)
        times.add_row(name_of(analysis), *numbers, analysis.trace.step_unit)
    parts: list[RenderableType] = [times]
    if any(analysis.groups for analysis in report.analyses):
        parts += [Text(), _copies(report)]
    if not report.findings:
        parts += [Text(), Text("no finding: nothing costs enough time to advise a change")]
    for finding in report.findings:
        title = Text(finding.what, style="bold yellow" if finding.costs else "bold green")
        parts += [Text(), title.append(f"  {_rank_names(report, finding.ranks)}", style="not bold default")]
        if finding.costs:
            parts.append(Text(f"  cost: up to {finding.costs:.0%} of the time, {finding.saves_s:.3g} s a step"))
        parts += [Text(f"  seen: {finding.evidence}"), Text(f"  fix: {finding.remedy}")]
    if report.notes:
        parts += [Text(), *(Text(f"note: {note}") for note in report.notes)]
    return Group(*parts)


def _rank_names(report: TraceReport, ranks: tuple[str, ...]) -> str:
    num_ranks = len(report.analyses)
    if num_ranks == 1:
        return ""
    if len(ranks) == num_ranks:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


def _table(*headings: str) -> Table:
    """Return a table of numbers, of which only the first column may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right", no_wrap=i > 0)
    return table


def _copies(report: TraceReport) -> Table:
    """Return the copies that took longest, in their original order."""
    table = _table("rank", "copies", "MB", "GB/s", "ms", "overlapped", "blocking")
    table.add_column("memory", no_wrap=True)
    table.add_column("issued by", overflow="ellipsis", no_wrap=True)
    pairs = [(analysis, group) for analysis in report.analyses for group in analysis.groups]
    by_time = sorted(range(len(pairs)), key=lambda i: -max(pairs[i][1].busy_us, pairs[i][1].blocked_us))
    for analysis, group in (pairs[i] for i in sorted(by_time[:_MOST_COPIES])):
        size, busy_us = group.num_bytes, group.busy_us
        table.add_row(
            name_of(analysis),
            str(group.count),
            known(None if size is None else size / 1e6, ".2f", unknown="-"),
            known(None if size is None or not busy_us else size / busy_us / 1e3, ".2f", unknown="-"),
            f"{busy_us / 1000:.2f}",
            known(group.overlapped_us / busy_us if busy_us else None, ".0%", unknown="-"),
            known(group.num_blocking, unknown="-"),
            f"{group.source or '?'} -> {group.target or '?'}",
            joined(group.operator or "", group.shapes or "", separator=" ") or "-",
        )
    if len(pairs) > _MOST_COPIES:
        table.add_row("", f"+{len(pairs) - _MOST_COPIES}", *[""] * 5, "others: --json", "")
    return table
