"""Options, progress, files and reports of all benchmarks of `numapin bench`."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from numapin.base import formats
from numapin.base.plural import counted
from numapin.base.redact import without_secrets
from numapin.bench.model import BenchReport, summarize
from numapin.bench.verdict import verdict_of
from numapin.cli.early_end import EarlyEnd
from numapin.cli.options import FilePath, Parsed
from numapin.cli.output import clear_status, emit, json_text, require_writable, say_error, show, show_status, write
from numapin.compare.measure import duration
from numapin.errors import NumapinError
from numapin.view.bench_table import bench_table
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


B = TypeVar("B", bound=BenchOptions)


def names_option(option: str, known: Collection[str], *, about: str, default: str = "") -> Callable[[F], F]:
    """Return the decorator of an option that takes known names, separated by commas. Its default is all of them."""
    parse = partial(_parse_names, known=known, kind=option.strip("-").removesuffix("s"))
    return click.option(
        option,
        type=Parsed("LIST", parse, words=known, many=True),
        default=default or ",".join(known),
        show_default=False,
        help=f"{about}: {', '.join(known)}  [default: {default or 'all'}]",
    )


def _parse_names(text: str, *, known: Collection[str], kind: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes, separated by commas: 4K,64M,1G. Return their bytes in rising order. Raises ValueError."""
    words = {formats.parse_size(word): word for word in text.split(",")}
    largest = max(words)
    if largest > _MAX_SIZE:
        raise ValueError(f"{words[largest]!r} is more than {formats.render_size(_MAX_SIZE)}")
    return tuple(sorted(words))


SIZES: Final = Parsed("LIST", parse_sizes)


def shared_options(*, repeats: int, timeout_s: int) -> Callable[[F], F]:
    """Return the decorator that adds the options of `BenchOptions` to a command."""
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
        click.option("--output", type=FilePath(), metavar="FILE", help="Also write the report to a file."),
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
) -> None:
    """Measure, show the report and write the file.

    Raises:
        NumapinError: Nothing was measured, or the file cannot be written.
        Stopped: A signal ended the measurement. What was measured is shown and written, marked as partial.
    """
    from numapin.bench import harness

    settings = {**settings, "repeats": options.repeats, "timeout_s": options.timeout}
    require_writable(options.output, option="--output")
    runs: list[Run] = []
    num_started, num_planned = 0, options.repeats * sum(len(case.peers) for case in benchmark.cases)
    began_s = written_s = time.monotonic()

    def report_now(*, is_complete: bool) -> BenchReport:
        cases = summarize(benchmark, runs)
        return BenchReport(
            benchmark=benchmark.name,
            command=("numapin", *without_secrets(sys.argv[1:])),
            machine=machine.to_json(),
            settings=settings,
            cases=cases,
            is_complete=is_complete,
            verdict=verdict_of(benchmark.questions, cases),
        )

    def show_start(case: Case, peer: Peer, repeat: int) -> None:
        nonlocal num_started
        left = f"  {left_in_words(num_started, num_planned, time.monotonic() - began_s)}"
        num_started += 1
        show_status(f"{num_started}/{num_planned}  {case.name}  {peer.name}  repeat {repeat + 1}" + left.rstrip())

    with EarlyEnd() as end:
        made = harness.measure(benchmark, repeats=options.repeats, timeout_s=options.timeout, starts=show_start)
        with closing(made):  # at once, also if a signal ends this: it ends the measuring processes
            for one in made:
                runs.append(one)
                if one.skipped is not None:  # then the peer has no later repeats in this case
                    num_planned -= options.repeats - one.repeat - 1
                # The file is written every few seconds, so that even a killed run leaves what it measured.
                if options.output is not None and time.monotonic() - written_s >= _WRITE_EVERY_S:
                    with suppress(NumapinError):  # the last write reports it
                        _write(report_now(is_complete=False), options)
                    written_s = time.monotonic()
    clear_status()

    report = report_now(is_complete=not end.came)
    has_figures = any(peer.num_runs for case in report.cases for peer in case.peers)
    if end.came:
        if has_figures:  # the terminal may be gone, so the file comes first; the signal decides the status
            try:
                _write(report, options)
            except NumapinError as error:
                say_error(error.message, error.hint)
            with suppress(OSError):
                _show(report, layout, as_json=options.as_json)
        num_measured = sum(run.skipped is None for run in runs)
        covered = f"the report covers the first {counted(num_measured, 'measurement')}, and the workers have ended"
        end.leave(covered if num_measured else "nothing was measured")
    _show(report, layout, as_json=options.as_json)
    _write(report, options)  # shown first, because writing may fail
    if not has_figures:
        of_peers = (peer.skipped for case in report.cases for peer in case.peers)
        reasons = filter(None, chain(of_peers, (case.skipped for case in report.cases)))
        reason = next(reasons, "none of these peers fits these cases")
        raise NumapinError(f"nothing was measured: {reason}", _remedy(reason, report.benchmark))


def _write(report: BenchReport, options: BenchOptions) -> None:
    if options.output is not None:
        write(json_text(report.to_json()), options.output, option="--output")


def _show(report: BenchReport, layout: Layout, *, as_json: bool) -> None:
    if as_json:
        emit(json_text(report.to_json()))
        return
    is_sweep = any(case.group is not None for case in report.cases)
    show(sweep_table(report, layout) if is_sweep else bench_table(report, layout))


def left_in_words(num_done: int, num_planned: int, elapsed_s: float) -> str:
    """Return the time that is left if the other runs take as long on average; "" before the first has ended."""
    if not num_done:
        return ""
    return f"about {duration(elapsed_s / num_done * (num_planned - num_done))} left"


def _remedy(reason: str, benchmark: str) -> str:
    """Return what to do if nothing was measured for this reason."""
    is_about_gpus = not reason.startswith("failed") and any(word in reason for word in ("GPU", "CUDA"))
    if is_about_gpus:
        return "these run without a GPU: numapin bench alloc, bench loader --cases transport"
    return f"measure something else with --cases and --peers: numapin bench {benchmark} --help lists them"
