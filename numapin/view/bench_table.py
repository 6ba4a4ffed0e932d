"""A benchmark's report as tables; a benchmark over a range of sizes has a table for each figure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from numapin.base.formats import size_label
from numapin.base.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from numapin.bench.model import BenchReport, CaseResult, Spread

_WIDTH: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure, the heading above it, its number format, and whether its spread is shown.

    `meaning` explains the heading in the legend; "" if the heading says it all.
    """

    figure: str
    heading: str
    form: str = ".3g"
    spread: bool = False
    meaning: str = ""

    def cell(self, spread: Spread | None) -> str:
        """Return the text of a cell; "-" if the figure was not measured."""
        if spread is None:
            return "-"
        median, low, high = (format(value, self.form) for value in (spread.median, spread.low, spread.high))
        return f"{median} [{low}, {high}]" if self.spread and len(spread.values) > 1 else median


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The columns of a benchmark's tables, and a legend for all of them."""

    columns: tuple[Column, ...]
    legend: str


def bench_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine, the legend, each case without the columns that none of its peers has, and the verdict."""
    parts: list[RenderableType] = [*head(report, layout)]
    for case in report.cases:
        if not any(peer.num_runs for peer in case.peers):
            continue
        parts += [Text(), Text(f"{case.name}  ", style="bold") + Text(case.about, style="not bold")]
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("peer", no_wrap=True)
        shown = _measured(case, layout.columns)
        for column in shown:
            table.add_column(column.heading, justify="right")
        for peer in filter(attrgetter("num_runs"), case.peers):
            table.add_row(peer.name, *(column.cell(peer.figures.get(column.figure)) for column in shown))
        parts += [table, *_notes(case)]
    return Group(*parts, *_foot(report))


def sweep_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine, the legend, each sweep without the figures that none of its peers has, and the verdict."""
    sweeps: dict[str, list[CaseResult]] = {}
    for case in report.cases:
        if case.group is not None:
            sweeps.setdefault(case.group, []).append(case)
    parts: list[RenderableType] = [*head(report, layout)]
    for name, cases in sweeps.items():
        parts += [Text(), Text(name, style="bold")]
        for column in layout.columns:
            all_peers = (peer for case in cases for peer in case.peers)
            peers = list(dict.fromkeys(peer.name for peer in all_peers if column.figure in peer.figures))
            if not peers:
                continue
            table = Table(box=None, pad_edge=False, header_style="bold")
            for title in (column.heading, *peers):
                table.add_column(title, justify="right", no_wrap=True)
            for case in cases:
                spreads = {peer.name: peer.figures.get(column.figure) for peer in case.peers}
                cells = (_sweep_cell(column, spreads.get(peer)) for peer in peers)
                table.add_row(size_label(case.num_bytes or 0), *cells)
            parts.append(table)
        for case in cases:
            parts += _notes(case)
    return Group(*parts, *_foot(report))


def _sweep_cell(column: Column, spread: Spread | None) -> str:
    """Return the median with three digits, because the columns are many, and the largest deviation of a repeat."""
    if spread is None:
        return "-"
    median = f"{float(f'{spread.median:.3g}'):,.9g}"
    if not column.spread or len(spread.values) < 2 or not spread.median:
        return median
    deviation = max(spread.high - spread.median, spread.median - spread.low) / spread.median
    return f"{median}±{deviation:.0%}"


def head(report: BenchReport, layout: Layout) -> Iterator[Text]:
    """Yield the machine, the legend with the meanings of the columns, and whether the figures are partial."""
    yield Text(machine_in_words(report.machine))
    shown = {column for case in report.cases for column in _measured(case, layout.columns)}
    in_order = (column for column in layout.columns if column in shown and column.meaning)
    yield Text("; ".join((layout.legend, *(f"{column.heading}: {column.meaning}" for column in in_order))))
    if not report.is_complete:
        yield Text("partial: the benchmark was stopped early; the figures cover the runs so far", style="bold")


def _foot(report: BenchReport) -> Iterator[RenderableType]:
    """Yield reasons for leaving something out, at most 100 columns wide, and the verdict in one line."""
    reasons = list(_left_out(report.cases))
    if reasons:
        yield Text()
        yield from (Constrain(Text(line), _WIDTH) for line in reasons)
    if report.verdict is not None:
        yield Text()
        yield Text(report.verdict.text, style="bold")


def _left_out(cases: Sequence[CaseResult]) -> Iterator[str]:
    """Yield a line for each reason for which cases, or peers in some or all cases, have no figures."""
    cases_of = Counter(name for case in cases for name in {peer.name for peer in case.peers})
    skipped_in: dict[str, dict[str, list[str]]] = {}  # the cases in which a peer never ran, by reason and peer
    for case in cases:
        for peer in case.peers:
            if peer.skipped is not None and not peer.num_runs:
                skipped_in.setdefault(peer.skipped, {}).setdefault(peer.name, []).append(case.name)
    for reason, peers in skipped_in.items():
        shown = (
            name if len(names) == cases_of[name] else f"{name} (in {', '.join(names)})" for name, names in peers.items()
        )
        yield f"skipped: {', '.join(shown)}: {reason}"
    skipped: dict[str, list[CaseResult]] = {}
    for case in cases:
        skipped.setdefault(case.skipped or "", []).append(case)
    for reason, same in skipped.items():
        about = f" ({same[0].about})" if len(same) == 1 else ""
        if reason:
            yield f"skipped: {', '.join(case.name for case in same)}{about}: {reason}"


def machine_in_words(machine: Mapping[str, object]) -> str:
    """Return a machine, as `BenchMachine` has it in JSON, in one line."""
    versions, gpus = machine.get("versions"), machine.get("gpus")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    models = Counter(map(str, gpus if isinstance(gpus, list | tuple) else ()))
    names = ", ".join(f"{count} {model}" for model, count in models.items()) or "no GPU"
    return f"{machine.get('num_cpus')} CPUs, {names}; torch {torch}"


def _notes(case: CaseResult) -> Iterator[Text]:
    """Yield a line for each peer that stopped before the last repeat."""
    for peer in case.peers:
        if peer.skipped is not None and peer.num_runs:
            yield Text(f"  {peer.name}: stopped after {counted(peer.num_runs, 'run')}: {peer.skipped}")


def _measured(case: CaseResult, columns: Sequence[Column]) -> list[Column]:
    """Return the columns that at least one peer has."""
    figures = set().union(*(peer.figures for peer in case.peers))
    return [column for column in columns if column.figure in figures]
