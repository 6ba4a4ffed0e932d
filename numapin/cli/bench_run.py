"""What all benchmarks of `numapin bench` share: options, progress, files, the report. Edge.

Comes in: a `Benchmark` and parsed options. Goes out: its `BenchReport`, on stdout as a table or as JSON (schema
numapin.bench/1), and in the files that were named: JSON, a plot as SVG.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from numapin.base import sizes
from numapin.base.printable import printable
from numapin.base.redact import without_secrets
from numapin.bench.model import BenchReport, summarise
from numapin.cli.options import FilePath, Parsed
from numapin.cli.output import emit, json_text, require_writable, show, write
from numapin.errors import NumapinError, UsageError
from numapin.view.bench_plot import bench_figure
from numapin.view.bench_table import bench_table
from numapin.view.chart import svg
from numapin.view.sweep_table import sweep_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numapin.bench.machine import BenchMachine
    from numapin.bench.model import Benchmark, Case, Peer, Run
    from numapin.view.bench_table import Layout

F = TypeVar("F", bound="Callable[..., Any]")

_WRITE_EVERY_S: Final = 5.0
_MAX_SIZE: Final = 1 << 40


def names_of(kind: str, known: Collection[str]) -> Parsed:
    """Return the type of names out of a known list, separated by commas."""
    words = tuple(known)  # before Python 3.12, `in` an enum raises for other words

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in words:
                raise ValueError(f"{kind} {name!r} is not one of {', '.join(words)}")
        return names

    return Parsed("LIST", parse)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes, separated by commas: 4K,64M,1G. Return the bytes, rising. Raises ValueError."""
    found = {sizes.parse(word): word for word in text.split(",")}
    if (largest := max(found)) > _MAX_SIZE:
        raise ValueError(f"{found[largest]!r} is more than {sizes.render(_MAX_SIZE)}")
    return tuple(sorted(found))


SIZES: Final = Parsed("LIST", parse_sizes)


def shared_options(*, repeats: int, timeout_s: int) -> Callable[[F], F]:
    """Return what gives a command the options that every benchmark has."""
    path = FilePath()
    options = (
        click.option(
            "--repeats",
            type=click.IntRange(1),
            default=repeats,
            help="Number of repeats, alternating between the peers.",
        ),
        click.option(
            "--timeout", type=click.FloatRange(1), default=timeout_s, help="Time limit of one measurement in seconds."
        ),
        click.option("--quick", is_flag=True, help="Smoke test: one short repeat."),
        click.option("--json", "as_json", is_flag=True, help="Print the report as JSON."),
        click.option("--output", type=path, metavar="FILE", help="Also write the report to a file."),
        click.option("--plot", type=path, metavar="FILE", help="Draw the figures as SVG."),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def with_quick(given: Mapping[str, Any], **quick: object) -> dict[str, Any]:
    """Return the options; with --quick, one repeat and what else makes it quick stand for those that were not given."""
    source = click.get_current_context().get_parameter_source
    instead = {"repeats": 1, **quick} if given["quick"] else {}
    return {**given, **{name: value for name, value in instead.items() if source(name) is ParameterSource.DEFAULT}}


def run(
    benchmark: Benchmark,
    machine: BenchMachine,
    settings: Mapping[str, object],
    *,
    given: Mapping[str, Any],
    layout: Layout,
) -> BenchReport:
    """Measure, write the files, show. Raises NumapinError where nothing could be measured, or a file not be written."""
    settings = {**settings, "repeats": given["repeats"], "timeout_s": given["timeout"]}
    _check_files(given)
    report = _measure(benchmark, machine, settings, given)
    if given["as_json"]:
        emit(json_text(report.to_json()))
    else:
        is_sweep = any(case.group is not None for case in report.cases)
        show(sweep_table(report, layout) if is_sweep else bench_table(report, layout))
    if given["output"] is not None:  # after it was shown: what is written may fail
        write(json_text(report.to_json()), given["output"], option="--output")
    if given["plot"] is not None:
        write(svg(bench_figure(report, layout.plotted)), given["plot"], option="--plot")
    _require_figures(report)
    return report


def _check_files(given: Mapping[str, Any]) -> None:
    """Raise where a file cannot be written, or two are one, before the time is spent."""
    files = {name: given[name] for name in ("output", "plot", "save") if given.get(name) is not None}
    for name, path in files.items():
        require_writable(path, option=f"--{name}")
    if len({os.path.realpath(path) for path in files.values()}) < len(files):
        names = " and ".join(f"--{name}" for name in files)
        raise UsageError(f"{names} name one file twice", "give each a name of its own")


def _measure(
    benchmark: Benchmark, machine: BenchMachine, settings: Mapping[str, object], given: Mapping[str, Any]
) -> BenchReport:
    """Run the benchmark. The file is written now and then, so that one that is cut short leaves what it has."""
    from numapin.bench import harness

    def report() -> BenchReport:
        return BenchReport(
            benchmark=benchmark.name,
            command=("numapin", *without_secrets(sys.argv[1:])),
            machine=machine.to_json(),
            settings=settings,
            cases=summarise(benchmark, runs),
        )

    runs: list[Run] = []
    written = time.monotonic()
    starts = _progress(benchmark, given["repeats"])
    for made in harness.measure(benchmark, repeats=given["repeats"], timeout_s=given["timeout"], starts=starts):
        runs.append(made)
        if given["output"] is not None and time.monotonic() - written > _WRITE_EVERY_S:
            with suppress(NumapinError):  # the last one says so
                write(json_text(report().to_json()), given["output"], option="--output")
            written = time.monotonic()
    _clear()
    return report()


def _progress(benchmark: Benchmark, repeats: int) -> Callable[[Case, Peer, int], None]:
    """Return what shows, on a terminal, which run is on; a line that the next one overwrites."""
    total = repeats * sum(len(case.peers) for case in benchmark.cases)
    done = 0

    def starts(case: Case, peer: Peer, repeat: int) -> None:
        nonlocal done
        done += 1
        _clear()
        if sys.stderr.isatty():
            run = f"{done}/{total}  {case.name}  {peer.name}  repeat {repeat + 1}"
            click.echo(printable(run), err=True, nl=False)

    return starts


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)


def _require_figures(report: BenchReport) -> None:
    """Raise NumapinError where nothing at all could be measured."""
    if any(peer.num_runs for case in report.cases for peer in case.peers):
        return
    cases = [case.skipped for case in report.cases]
    peers = [peer.skipped for case in report.cases for peer in case.peers]
    why = next((reason for reason in (*peers, *cases) if reason), "none of these peers fits these cases")
    raise NumapinError(
        f"nothing was measured: {why}",
        "what runs without a GPU: numapin bench alloc, bench launch, bench loader --cases transport",
    )
