"""Options, progress, files and reports of all benchmarks of `numapin bench`. Edge.

Comes in: a `Benchmark` and parsed options. Goes out: its `BenchReport`, on stdout as a table or JSON (schema
numapin.bench/1), and in the files that options name: JSON, and a plot as SVG.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from numapin.base import sizes
from numapin.base.printable import printable
from numapin.base.redact import without_secrets
from numapin.bench.model import BenchReport, summarize
from numapin.cli.options import FilePath, Parsed
from numapin.cli.output import emit, is_terminal, json_text, require_writable, show, write
from numapin.errors import NumapinError, UsageError
from numapin.view.bench_plot import bench_figure
from numapin.view.bench_table import bench_table
from numapin.view.chart import svg
from numapin.view.sweep_table import sweep_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from numapin.bench.machine import BenchMachine
    from numapin.bench.model import Benchmark, Case, Peer, Run
    from numapin.view.bench_table import Layout

F = TypeVar("F", bound="Callable[..., None]")

_WRITE_EVERY_S: Final = 5.0
_MAX_SIZE: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The parsed values of the options that every benchmark has, by click's names."""

    repeats: int
    timeout: float
    quick: bool
    as_json: bool
    output: Path | None
    plot: Path | None
    save: Path | None = None


B = TypeVar("B", bound=BenchOptions)


def names_option(option: str, known: Collection[str], *, about: str, default: str = "") -> Callable[[F], F]:
    """Return the decorator of an option that takes known names, separated by commas. Its default is all of them."""
    parse = partial(_parse_names, known=known, kind=option.strip("-").removesuffix("s"))
    default = default or ",".join(known)
    return click.option(
        option, type=Parsed("LIST", parse, words=known, many=True), default=default, show_default=False, help=about
    )


def _parse_names(text: str, *, known: Collection[str], kind: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes, separated by commas: 4K,64M,1G. Return their bytes in rising order. Raises ValueError."""
    words = {sizes.parse(word): word for word in text.split(",")}
    largest = max(words)
    if largest > _MAX_SIZE:
        raise ValueError(f"{words[largest]!r} is more than {sizes.render(_MAX_SIZE)}")
    return tuple(sorted(words))


SIZES: Final = Parsed("LIST", parse_sizes)


def shared_options(*, repeats: int, timeout_s: int) -> Callable[[F], F]:
    """Return the decorator that adds the options of `BenchOptions` to a command."""
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


def with_quick(options: B, **quick: object) -> B:
    """Return the options; --quick replaces those that were not given by one repeat and the values in `quick`."""
    if not options.quick:
        return options
    source = click.get_current_context().get_parameter_source
    values: dict[str, Any] = {"repeats": 1, **quick}
    return replace(
        options, **{name: value for name, value in values.items() if source(name) is ParameterSource.DEFAULT}
    )


def run(
    benchmark: Benchmark,
    machine: BenchMachine,
    settings: Mapping[str, object],
    *,
    options: BenchOptions,
    layout: Layout,
) -> BenchReport:
    """Measure, show the report and write the files. Raises NumapinError for no figures, or an unwritable file."""
    settings = {**settings, "repeats": options.repeats, "timeout_s": options.timeout}
    _check_files(options)
    report = _measure(benchmark, machine, settings, options)
    _show(report, layout, as_json=options.as_json)
    if options.output is not None:  # shown first, because writing may fail
        write(json_text(report.to_json()), options.output, option="--output")
    if options.plot is not None:
        write(svg(bench_figure(report, layout.plotted)), options.plot, option="--plot")
    _require_figures(report)
    return report


def _show(report: BenchReport, layout: Layout, *, as_json: bool) -> None:
    if as_json:
        emit(json_text(report.to_json()))
        return
    is_sweep = any(case.group is not None for case in report.cases)
    show(sweep_table(report, layout) if is_sweep else bench_table(report, layout))


def _check_files(options: BenchOptions) -> None:
    """Raise UsageError before measuring if a file cannot be written, or if two options name the same file."""
    given = {"--output": options.output, "--plot": options.plot, "--save": options.save}
    files = {option: path for option, path in given.items() if path is not None}
    for option, path in files.items():
        require_writable(path, option=option)
    if len(set(map(os.path.realpath, files.values()))) < len(files):
        raise UsageError(f"{' and '.join(files)} name the same file", "give each its own name")


def _measure(
    benchmark: Benchmark, machine: BenchMachine, settings: Mapping[str, object], options: BenchOptions
) -> BenchReport:
    """Run the benchmark. Write the file every few seconds, so that an interrupted run leaves what it measured."""
    from numapin.bench import harness

    def report() -> BenchReport:
        return BenchReport(
            benchmark=benchmark.name,
            command=("numapin", *without_secrets(sys.argv[1:])),
            machine=machine.to_json(),
            settings=settings,
            cases=summarize(benchmark, runs),
        )

    runs: list[Run] = []
    written_s = time.monotonic()
    starts = _progress(benchmark, options.repeats)
    for made in harness.measure(benchmark, repeats=options.repeats, timeout_s=options.timeout, starts=starts):
        runs.append(made)
        if options.output is not None and time.monotonic() - written_s > _WRITE_EVERY_S:
            with suppress(NumapinError):  # the last write reports it
                write(json_text(report().to_json()), options.output, option="--output")
            written_s = time.monotonic()
    _clear_line()
    return report()


def _progress(benchmark: Benchmark, repeats: int) -> Callable[[Case, Peer, int], None]:
    """Return a function that shows the current run on a terminal, in a line that the next one overwrites."""
    total = repeats * sum(len(case.peers) for case in benchmark.cases)
    num_started = 0

    def starts(case: Case, peer: Peer, repeat: int) -> None:
        nonlocal num_started
        num_started += 1
        _clear_line()
        if is_terminal(sys.stderr):
            run = f"{num_started}/{total}  {case.name}  {peer.name}  repeat {repeat + 1}"
            click.echo(printable(run), err=True, nl=False)

    return starts


def _clear_line() -> None:
    if is_terminal(sys.stderr):
        click.echo("\r\033[K", err=True, nl=False)


def _require_figures(report: BenchReport) -> None:
    """Raise NumapinError if nothing at all was measured."""
    peers = [peer for case in report.cases for peer in case.peers]
    if any(peer.num_runs for peer in peers):
        return
    reasons = filter(None, [*(peer.skipped for peer in peers), *(case.skipped for case in report.cases)])
    raise NumapinError(
        f"nothing was measured: {next(reasons, 'none of these peers fits these cases')}",
        "these run without a GPU: numapin bench alloc, bench launch, bench loader --cases transport",
    )
