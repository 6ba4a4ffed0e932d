"""A benchmark's report as a figure to plot. Pure.

Comes in: a `BenchReport` and what is to be plotted of it. Goes out: a `Figure`: for each figure and sweep a panel of
lines, or, where the cases are no sweep, a panel of bars a figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.view.bench_table import machine_line
from numapin.view.chart import Figure, Panel, Point, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.bench.model import BenchReport, CaseResult
    from numapin.view.bench_table import Column


def bench_figure(report: BenchReport, columns: Sequence[Column]) -> Figure:
    """Return the figure. What was skipped is not in it; with nothing measured it has no panel."""
    sweeps = dict.fromkeys(case.group for case in report.cases if case.group is not None)
    panels = [_sweep(report, group, column) for column in columns for group in sweeps] if sweeps else []
    panels += [] if sweeps else [_bars(report.cases, column) for column in columns]
    return Figure(
        title=f"numapin bench {report.benchmark}",
        subtitle=machine_line(report),
        panels=tuple(panel for panel in panels if panel.series),
    )


def _sweep(report: BenchReport, group: str, column: Column) -> Panel:
    cases = [case for case in report.cases if case.group == group]
    return Panel(
        title=f"{group}: {column.heading}",
        y_label=column.heading,
        x_label="size",
        series=_series(cases, column, lambda case: float(case.num_bytes or 0)),
        y_log=True,
    )


def _bars(cases: Sequence[CaseResult], column: Column) -> Panel:
    return Panel(title=column.heading, y_label=column.heading, series=_series(cases, column, lambda case: case.name))


def _series(
    cases: Sequence[CaseResult], column: Column, to_x: Callable[[CaseResult], float | str]
) -> tuple[Series, ...]:
    found: dict[str, list[Point]] = {}
    for case in cases:
        for peer in case.peers:
            if (spread := peer.figures.get(column.figure)) is not None:
                point = Point(x=to_x(case), y=spread.median, low=spread.low, high=spread.high)
                found.setdefault(peer.name, []).append(point)
    return tuple(Series(name=name, points=tuple(points)) for name, points in found.items())
