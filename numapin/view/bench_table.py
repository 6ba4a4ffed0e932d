"""A benchmark's report as tables; a benchmark over a range of sizes has a table for each figure."""

from __future__ import annotations

from collections import Counter
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

    from numapin.bench.model import BenchReport, CaseResult, Column, Spread

_WIDTH: Final = 100


def bench_table(report: BenchReport, columns: Sequence[Column], legend: str) -> RenderableType:
    """Return the machine, the legend, a table for each case or several for a sweep, what is missing, and the verdict.

    Columns that nothing was measured for are left out, also of the legend.
    """
    figures = {figure for case in report.cases for peer in case.peers for figure in peer.figures}
    meanings = [f"{c.heading}: {c.meaning}" for c in columns if c.meaning and c.figure in figures]
    parts: list[RenderableType] = [Text(machine_in_words(report.machine)), Text("; ".join((legend, *meanings)))]
    if not report.is_complete:
        parts.append(Text("partial: the benchmark was stopped early; the figures cover the runs so far", style="bold"))
    sweeps: dict[str, list[CaseResult]] = {}
    for case in report.cases:
        if case.group is not None:
            sweeps.setdefault(case.group, []).append(case)
        elif any(peer.num_runs for peer in case.peers):
            title = Text(f"{case.name}  ", style="bold") + Text(case.about, style="not bold")
            parts += [Text(), title, _case_table(case, columns), *_stopped_peers(case)]
    for name, cases in sweeps.items():
        if any(peer.num_runs for case in cases for peer in case.peers):
            parts += [Text(), Text(name, style="bold"), *_sweep_tables(cases, columns)]
            for case in cases:
                parts += _stopped_peers(case)
    left_out = list(_left_out(report.cases))
    if left_out:
        parts += [Text(), *(Constrain(Text(line), _WIDTH) for line in left_out)]
    return Group(*parts, Text(), Text(report.verdict.text, style="bold"))


def _case_table(case: CaseResult, columns: Sequence[Column]) -> Table:
    """Return a row for each peer, with the median and the range of the repeats."""
    figures = {figure for peer in case.peers for figure in peer.figures}
    shown = [column for column in columns if column.figure in figures]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("peer", no_wrap=True)
    for column in shown:
        table.add_column(column.heading, justify="right")
    for peer in case.peers:
        if peer.num_runs:
            table.add_row(peer.name, *(_range_cell(column, peer.figures.get(column.figure)) for column in shown))
    return table


def _range_cell(column: Column, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (format(value, column.form) for value in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]" if column.spread and len(spread.values) > 1 else median


def _sweep_tables(cases: Sequence[CaseResult], columns: Sequence[Column]) -> Iterator[Table]:
    """Yield a table for each figure, with a row for each size and a column for each peer."""
    for column in columns:
        all_peers = (peer for case in cases for peer in case.peers)
        peers = list(dict.fromkeys(peer.name for peer in all_peers if column.figure in peer.figures))
        if not peers:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in (column.heading, *peers):
            table.add_column(title, justify="right", no_wrap=True)
        for case in cases:
            spreads = {peer.name: peer.figures.get(column.figure) for peer in case.peers}
            cells = (_deviation_cell(column, spreads.get(peer)) for peer in peers)
            table.add_row(size_label(case.num_bytes or 0), *cells)
        yield table


def _deviation_cell(column: Column, spread: Spread | None) -> str:
    """Return the median with three digits, because the columns are many, and the largest deviation of a repeat."""
    if spread is None:
        return "-"
    median = f"{float(f'{spread.median:.3g}'):,.9g}"
    if not column.spread or len(spread.values) < 2 or not spread.median:
        return median
    deviation = max(spread.high - spread.median, spread.median - spread.low) / spread.median
    return f"{median}±{deviation:.0%}"


def _stopped_peers(case: CaseResult) -> Iterator[Text]:
    """Yield a line for each peer that stopped before the last repeat."""
    for peer in case.peers:
        if peer.skipped is not None and peer.num_runs:
            yield Text(f"  {peer.name}: stopped after {counted(peer.num_runs, 'run')}: {peer.skipped}")


def _left_out(cases: Sequence[CaseResult]) -> Iterator[str]:
    """Yield a line for each reason for which cases, or peers in some cases, have no figures."""
    skipped: dict[str, list[str]] = {}
    for case in cases:
        if case.skipped:
            skipped.setdefault(case.skipped, []).append(f"{case.name} ({case.about})")
        for peer in case.peers:
            if peer.skipped is not None and not peer.num_runs:
                skipped.setdefault(peer.skipped, []).append(f"{peer.name} in {case.name}")
    for reason, names in skipped.items():
        yield f"skipped: {', '.join(names)}: {reason}"


def machine_in_words(machine: Mapping[str, object]) -> str:
    """Return a machine, as `BenchMachine` has it in JSON, in one line."""
    versions, gpus = machine.get("versions"), machine.get("gpus")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    models = Counter(map(str, gpus if isinstance(gpus, list | tuple) else ()))
    names = ", ".join(f"{count} {model}" for model, count in models.items()) or "no GPU"
    return f"{machine.get('num_cpus')} CPUs, {names}; torch {torch}"
