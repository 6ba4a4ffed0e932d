"""A benchmark over a range of sizes as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.formats import size_label
from numapin.view.bench_table import foot, head, notes, sweeps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from numapin.bench.model import BenchReport, CaseResult, Spread
    from numapin.view.bench_table import Column, Layout


def sweep_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine, the legend, each sweep without the figures that none of its peers has, and the verdict."""
    parts: list[RenderableType] = [*head(report, layout)]
    for name, cases in sweeps(report.cases).items():
        parts += [Text(), Text(name, style="bold")]
        for column in layout.columns:
            all_peers = (peer for case in cases for peer in case.peers)
            peers = list(dict.fromkeys(peer.name for peer in all_peers if column.figure in peer.figures))
            if peers:
                parts.append(_table(cases, column, peers))
        for case in cases:
            parts += notes(case)
    return Group(*parts, *foot(report))


def _table(cases: Sequence[CaseResult], column: Column, peers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (column.heading, *peers):
        table.add_column(title, justify="right", no_wrap=True)
    for case in cases:
        spreads = {peer.name: peer.figures.get(column.figure) for peer in case.peers}
        table.add_row(size_label(case.num_bytes or 0), *(_cell(column, spreads.get(peer)) for peer in peers))
    return table


def _cell(column: Column, spread: Spread | None) -> str:
    """Return the median with three digits, because the columns are many, and the largest deviation of a repeat."""
    if spread is None:
        return "-"
    median = f"{float(f'{spread.median:.3g}'):,.9g}"
    if not column.spread or len(spread.values) < 2 or not spread.median:
        return median
    deviation = max(spread.high - spread.median, spread.median - spread.low) / spread.median
    return f"{median}±{deviation:.0%}"
