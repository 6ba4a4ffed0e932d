"""A report whose cases are sweeps over sizes, as tables. Pure.

Comes in: a `BenchReport` and its `Layout`. Goes out: for each sweep and figure a table with a row a size and a column a
peer; and what was skipped, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.view.bench_table import machine_line, notes
from numapin.view.chart import size_label

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from numapin.bench.model import BenchReport, CaseResult, Spread
    from numapin.view.bench_table import Column, Layout


def sweep_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine and the legend, then each sweep; a figure that no peer has is left out."""
    parts: list[RenderableType] = [Text(machine_line(report)), Text(layout.legend)]
    for group in dict.fromkeys(case.group for case in report.cases if case.group is not None):
        cases = [case for case in report.cases if case.group == group]
        parts += [Text(), Text(group, style="bold"), *_tables(cases, layout.columns)]
        parts += [line for case in cases for line in notes(case)]
    for case in report.cases:
        if case.skipped:
            parts += [Text(), Text(f"{case.name}  ", style="bold") + Text(case.about, style="not bold")]
            parts += [Text(f"  skipped: {case.skipped}")]
    return Group(*parts)


def _tables(cases: Sequence[CaseResult], columns: Sequence[Column]) -> Iterator[Table]:
    for column in columns:
        cells = {
            (case.name, peer.name): peer.figures[column.figure]
            for case in cases
            for peer in case.peers
            if column.figure in peer.figures
        }
        peers = list(dict.fromkeys(peer for _, peer in cells))
        if not cells:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (column.heading, *peers):
            table.add_column(heading, justify="right", no_wrap=True)
        for case in cases:
            table.add_row(
                size_label(case.num_bytes or 0), *(_cell(column, cells.get((case.name, peer))) for peer in peers)
            )
        yield table


def _cell(column: Column, spread: Spread | None) -> str:
    """Write the median with three digits, as the columns are many, and how far the farthest repeat is from it."""
    if spread is None:
        return "-"
    median = f"{float(f'{spread.median:.3g}'):,.9g}"
    if not column.spread or len(spread.values) < 2 or not spread.median:
        return median
    farthest = max(spread.high - spread.median, spread.median - spread.low) / spread.median
    return f"{median}±{farthest:.0%}"
