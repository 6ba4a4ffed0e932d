"""A report of `numapin trace` as tables. Pure.

Comes in: a `TraceReport`. Goes out: where each rank's time went, its copies, and what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.trace.report import name_of, shown_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from numapin.trace.analysis import Group as Copies
    from numapin.trace.report import TraceReport

_MOST_COPIES = 12  # rows; the report in JSON has all


def trace_table(report: TraceReport) -> RenderableType:
    """Return time, copies, findings and notes."""
    parts: list[RenderableType] = [_times(report)]
    if any(analysis.groups for analysis in report.analyses):
        parts += [Text(), _copies(report)]
    for shared in report.findings:
        title = Text(f"{shared.finding.what}", style="bold yellow" if shared.finding.costs else "bold green")
        title.append(f"  {_where(report, shared.ranks)}", style="not bold default")
        cost = f"up to {shared.finding.costs:.0%} of the time: " if shared.finding.costs else ""
        parts += [Text(), title, Text(f"  {cost}{shared.finding.evidence}"), Text(f"  change: {shared.finding.remedy}")]
    parts += [Text(), *(Text(f"note: {note}") for note in report.notes)] if report.notes else []
    return Group(*parts)


def _times(report: TraceReport) -> Table:
    """Return a row a rank: ms a step, and the share of each part that any rank has."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = shown_parts(report.analyses)
    for heading in ("rank", "steps", "ms/step", *shown):
        table.add_column(heading, justify="right", no_wrap=heading != "rank")
    table.add_column("a step is", no_wrap=True)
    for analysis in report.analyses:
        shares = (f"{analysis.share(part):.1%}" for part in shown)
        steps = analysis.trace.steps
        table.add_row(
            name_of(analysis), str(len(steps)), f"{analysis.step_us / 1000:.2f}", *shares, analysis.trace.step_unit
        )
    return table


def _copies(report: TraceReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("rank", "copies", "MB", "GB/s", "ms", "overlapped", "blocking"):
        table.add_column(heading, justify="right", no_wrap=heading != "rank")
    table.add_column("memory", no_wrap=True)
    table.add_column("asked for by", overflow="ellipsis", no_wrap=True)
    for row in _rows(report):
        table.add_row(*row)
    return table


def _rows(report: TraceReport) -> Iterator[tuple[str, ...]]:
    """Give the copies that took longest, of all ranks, in the order of the ranks."""
    every = [(analysis, copies) for analysis in report.analyses for copies in analysis.groups]
    longest = sorted(every, key=lambda pair: -max(pair[1].busy_us, pair[1].blocked_us))[:_MOST_COPIES]
    kept = {id(copies) for _, copies in longest}
    for analysis, copies in every:
        if id(copies) in kept:
            yield name_of(analysis), *_row(copies)
    if len(every) > _MOST_COPIES:
        yield "", f"+{len(every) - _MOST_COPIES}", *[""] * 5, "others: --json", ""


def _row(copies: Copies) -> tuple[str, ...]:
    size, busy_us = copies.num_bytes, copies.busy_us
    return (
        str(copies.count),
        "-" if size is None else f"{size / 1e6:.2f}",
        "-" if size is None or not busy_us else f"{size / busy_us / 1e3:.2f}",
        f"{busy_us / 1000:.2f}",
        "-" if not busy_us else f"{copies.overlapped_us / busy_us:.0%}",
        "-" if copies.num_blocking is None else str(copies.num_blocking),
        f"{copies.source or '?'} -> {copies.target or '?'}",
        " ".join(part for part in (copies.operator, copies.shapes) if part) or "-",
    )


def _where(report: TraceReport, ranks: tuple[str, ...]) -> str:
    if len(report.analyses) == 1:
        return ""
    if len(ranks) == len(report.analyses):
        return "all ranks"
    return f"rank {', '.join(ranks)}"
