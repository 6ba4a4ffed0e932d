"""A benchmark's report as a table. Pure.

Comes in: a `BenchReport` and its `Layout`. Goes out: a heading and a row a peer for each case:
medians, with lowest and highest in brackets; and what was skipped, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from numapin.bench.model import BenchReport, CaseResult, PeerResult, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure, what stands above it, how it is written, and whether its spread is shown."""

    figure: str
    heading: str
    form: str = ".3g"
    spread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is shown of a benchmark: the columns of its tables with a line on what they mean, and what is plotted."""

    columns: tuple[Column, ...]
    legend: str
    plotted: tuple[Column, ...]


def bench_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine and the legend in a line each, then each case, without columns that none of its peers has."""
    parts: list[RenderableType] = [Text(machine_line(report)), Text(layout.legend)]
    for case in report.cases:
        parts += [Text(), Text(f"{case.name}  ", style="bold") + Text(case.about, style="not bold")]
        parts += [Text(f"  skipped: {case.skipped}")] if case.skipped else [_table(case, layout.columns), *notes(case)]
    return Group(*parts)


def machine_line(report: BenchReport) -> str:
    """Say in a line on what was measured."""
    machine, gpus = report.machine, report.machine.get("gpus")
    names = [str(gpu) for gpu in gpus] if isinstance(gpus, list | tuple) else []
    seen = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no GPU"
    versions = machine.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    return f"{machine.get('num_cpus')} CPUs, {seen}; torch {torch}"


def _table(case: CaseResult, columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("peer", no_wrap=True)
    shown = [column for column in columns if any(column.figure in peer.figures for peer in case.peers)]
    for column in shown:
        table.add_column(column.heading, justify="right")
    for peer in case.peers:
        if peer.num_runs:
            table.add_row(peer.name, *(_cell(column, peer.figures.get(column.figure)) for column in shown))
    return table


def _cell(column: Column, spread: Spread | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (format(value, column.form) for value in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]" if column.spread and len(spread.values) > 1 else median


def notes(case: CaseResult) -> Iterator[Text]:
    """Give a line for each peer that did not run, or not in every repeat."""
    for peer in case.peers:
        if peer.skipped is not None:
            yield Text(f"  {peer.name}: {_how_far(peer)}: {peer.skipped}")


def _how_far(peer: PeerResult) -> str:
    return f"stopped after {peer.num_runs} runs" if peer.num_runs else "skipped"
