"""A benchmark's report as tables. Pure.

Comes in: a `BenchReport` and its `Layout`. Goes out: a table for each case with one row per peer: medians, with lowest
and highest in brackets; and the reason for each peer and case that was skipped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.base.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from numapin.bench.model import BenchReport, CaseResult, PeerResult, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure, the heading above it, its number format, and whether its spread is shown."""

    figure: str
    heading: str
    form: str = ".3g"
    spread: bool = False

    def cell(self, spread: Spread | None) -> str:
        """Return the text of a cell; "-" if the figure was not measured."""
        if spread is None:
            return "-"
        median, low, high = (format(value, self.form) for value in (spread.median, spread.low, spread.high))
        return f"{median} [{low}, {high}]" if self.spread and len(spread.values) > 1 else median


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The columns of a benchmark's tables, a legend for them, and the columns that are plotted."""

    columns: tuple[Column, ...]
    legend: str
    plotted: tuple[Column, ...]


def bench_table(report: BenchReport, layout: Layout) -> RenderableType:
    """Return the machine, the legend, and each case without the columns that none of its peers has."""
    parts: list[RenderableType] = [Text(machine_line(report)), Text(layout.legend)]
    for case in report.cases:
        parts += heading(case)
        if not case.skipped:
            parts += [_table(case, layout.columns), *notes(case)]
    return Group(*parts)


def machine_line(report: BenchReport) -> str:
    """Return the machine that was measured, in one line."""
    return machine_in_words(report.machine)


def machine_in_words(machine: Mapping[str, object]) -> str:
    """Return a machine, as `BenchMachine` has it in JSON, in one line."""
    versions = machine.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    return f"{machine.get('num_cpus')} CPUs, {_models_in_words(machine.get('gpus'))}; torch {torch}"


def _models_in_words(gpus: object) -> str:
    models = Counter(map(str, gpus if isinstance(gpus, list | tuple) else ()))
    return ", ".join(f"{count} {model}" for model, count in models.items()) or "no GPU"


def heading(case: CaseResult) -> Iterator[Text]:
    """Yield an empty line, the name of a case, and why it was skipped if it was."""
    yield Text()
    yield Text(f"{case.name}  ", style="bold") + Text(case.about, style="not bold")
    if case.skipped:
        yield Text(f"  skipped: {case.skipped}")


def sweeps(cases: Iterable[CaseResult]) -> dict[str, list[CaseResult]]:
    """Return the cases of each sweep over sizes, by its name."""
    groups: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.group is not None:
            groups.setdefault(case.group, []).append(case)
    return groups


def notes(case: CaseResult) -> Iterator[Text]:
    """Yield a line for each peer that did not run in every repeat."""
    for peer in case.peers:
        if peer.skipped is not None:
            yield Text(f"  {peer.name}: {_progress(peer)}: {peer.skipped}")


def _table(case: CaseResult, columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("peer", no_wrap=True)
    shown = _measured(case, columns)
    for column in shown:
        table.add_column(column.heading, justify="right")
    for peer in filter(attrgetter("num_runs"), case.peers):
        table.add_row(peer.name, *(column.cell(peer.figures.get(column.figure)) for column in shown))
    return table


def _measured(case: CaseResult, columns: Sequence[Column]) -> list[Column]:
    """Return the columns that at least one peer has."""
    figures = set().union(*(peer.figures for peer in case.peers))
    return [column for column in columns if column.figure in figures]


def _progress(peer: PeerResult) -> str:
    return f"stopped after {counted(peer.num_runs, 'run')}" if peer.num_runs else "skipped"
