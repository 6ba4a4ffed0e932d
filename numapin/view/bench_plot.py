"""A benchmark's report as a figure to plot. Pure.

Comes in: a `BenchReport` and the columns to plot. Goes out: a `Figure`: for sweeps over sizes, a panel of lines per
column and sweep; for other cases, a panel of bars per column.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.view.bench_table import machine_line, sweeps
from numapin.view.chart import Figure, Panel, Point, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numapin.bench.model import BenchReport, CaseResult
    from numapin.view.bench_table import Column, Layout

_NOTE: Final = "Markers and bars: median over the repeats. Vertical lines: lowest to highest repeat."


def bench_figure(report: BenchReport, layout: Layout) -> Figure:
    """Return the figure. It leaves out what was skipped; if nothing was measured, it has no panel."""
    panels = [panel for column in layout.plotted for panel in _panels(report, column)]
    peers_are = report.settings.get("peers_are")
    abouts = layout.peers or (peers_are if isinstance(peers_are, dict) else {})
    return Figure(
        title=f"numapin bench {report.benchmark}{'' if report.is_complete else ' (partial)'}",
        subtitle=machine_line(report),
        panels=tuple(_described(panel, abouts) for panel in panels if panel.series),
        note=_NOTE,
    )


def _described(panel: Panel, abouts: Mapping[str, object]) -> Panel:
    """Return a panel whose series have the descriptions of their peers."""
    series = (replace(own, about=str(abouts.get(own.name, ""))) for own in panel.series)
    return replace(panel, series=tuple(series))


def _panels(report: BenchReport, column: Column) -> list[Panel]:
    found = sweeps(report.cases)
    return [_sweep(name, cases, column) for name, cases in found.items()] or [_bars(report.cases, column)]


def _sweep(name: str, cases: Sequence[CaseResult], column: Column) -> Panel:
    return Panel(
        title=f"{name}: {_axis(column)}",
        y_label=_axis(column),
        x_label="size of the memory, logarithmic",
        series=_series(cases, column, lambda case: float(case.num_bytes or 0)),
        y_log=True,
    )


def _bars(cases: Sequence[CaseResult], column: Column) -> Panel:
    series = _series(cases, column, lambda case: case.name)
    return Panel(title=_axis(column), y_label=_axis(column), series=series)


def _axis(column: Column) -> str:
    return column.axis or column.heading


def _series(
    cases: Sequence[CaseResult], column: Column, to_x: Callable[[CaseResult], float | str]
) -> tuple[Series, ...]:
    points: dict[str, list[Point]] = {}
    for case in cases:
        for peer, point in _points(case, column, to_x(case)):
            points.setdefault(peer, []).append(point)
    return tuple(Series(name=peer, points=tuple(own)) for peer, own in points.items())


def _points(case: CaseResult, column: Column, x: float | str) -> Iterator[tuple[str, Point]]:
    """Yield the name and the point of each peer that has the figure."""
    for peer in case.peers:
        spread = peer.figures.get(column.figure)
        if spread is not None:
            yield peer.name, Point(x=x, y=spread.median, low=spread.low, high=spread.high)
