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
from numapin.base.redact import without_secrets
from numapin.base.text import counted
from numapin.bench.model import BenchReport, summarize
from numapin.bench.verdict import verdict_of
from numapin.cli.early_end import EarlyEnd
from numapin.cli.options import FilePath, Parsed
from numapin.cli.output import clear_status, emit, json_text, require_writable, say_error, show, show_status, write
from numapin.compare.measure import duration
from numapin.errors import NumapinError
from numapin.view.bench_table import bench_table, sweep_table

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
    settings = {**settings, "repeats": options.repeats, "timeout_s": options.timeout}
    require_writable(options.output, option="--output")
    campaign = _Measuring(benchmark, machine, settings, options)
    with EarlyEnd() as end:
        campaign.measure()
    clear_status()
    report = campaign.report(is_complete=not end.came)
    if end.came:
        _keep_partial(report, layout, options)
        end.leave(campaign.progress_in_words())
    _show(report, layout, as_json=options.as_json)
    _write(report, options)  # shown first, because writing may fail
    _require_figures(report)


def _keep_partial(report: BenchReport, layout: Layout, options: BenchOptions) -> None:
    """Write and show what was measured, if anything was. The terminal may be gone, so the file comes first.

    An error is reported only: the signal decides the status.
    """
    if not _has_figures(report):
        return
    try:
        _write(report, options)
    except NumapinError as error:
        say_error(error.message, error.hint)
    with suppress(OSError):
        _show(report, layout, as_json=options.as_json)


def _write(report: BenchReport, options: BenchOptions) -> None:
    if options.output is not None:
        write(json_text(report.to_json()), options.output, option="--output")


def _show(report: BenchReport, layout: Layout, *, as_json: bool) -> None:
    if as_json:
        emit(json_text(report.to_json()))
        return
    is_sweep = any(case.group is not None for case in report.cases)
    show(sweep_table(report, layout) if is_sweep else bench_table(report, layout))


class _Measuring:
    """The runs of a benchmark until now, and where their report goes."""

    def __init__(
        self, benchmark: Benchmark, machine: BenchMachine, settings: Mapping[str, object], options: BenchOptions
    ) -> None:
        self._benchmark, self._machine, self._settings, self._options = benchmark, machine, settings, options
        self._runs: list[Run] = []
        self._num_started = 0
        self._num_planned = options.repeats * sum(len(case.peers) for case in benchmark.cases)
        self._began_s = self._written_s = time.monotonic()

    def measure(self) -> None:
        """Make all runs. Write the file every few seconds, so that even a killed run leaves what it measured."""
        from numapin.bench import harness

        repeats, timeout_s = self._options.repeats, self._options.timeout
        made = harness.measure(self._benchmark, repeats=repeats, timeout_s=timeout_s, starts=self._start)
        with closing(made) as runs:  # at once, also if a signal ends this: it ends the measuring processes
            for run in runs:
                self._note(run)
                self._write_now_and_then()

    def _note(self, run: Run) -> None:
        """Keep a run; a peer that is skipped has no later repeats in this case."""
        self._runs.append(run)
        if run.skipped is not None:
            self._num_planned -= self._options.repeats - run.repeat - 1

    def report(self, *, is_complete: bool) -> BenchReport:
        """Return the report on the runs until now."""
        cases = summarize(self._benchmark, self._runs)
        return BenchReport(
            benchmark=self._benchmark.name,
            command=("numapin", *without_secrets(sys.argv[1:])),
            machine=self._machine.to_json(),
            settings=self._settings,
            cases=cases,
            is_complete=is_complete,
            verdict=verdict_of(self._benchmark.questions, cases),
        )

    def progress_in_words(self) -> str:
        """Return how much was measured, and that it is kept."""
        num_measured = sum(run.skipped is None for run in self._runs)
        if not num_measured:
            return "nothing was measured"
        return f"the report covers the first {counted(num_measured, 'measurement')}, and the workers have ended"

    def _write_now_and_then(self) -> None:
        path = self._options.output
        if path is None or time.monotonic() - self._written_s < _WRITE_EVERY_S:
            return
        with suppress(NumapinError):  # the last write reports it
            write(json_text(self.report(is_complete=False).to_json()), path, option="--output")
        self._written_s = time.monotonic()

    def _start(self, case: Case, peer: Peer, repeat: int) -> None:
        """Show the current run, and the time that is left, in a line of the terminal that the next one overwrites."""
        self._num_started += 1
        left = f"  {left_in_words(self._num_started - 1, self._num_planned, time.monotonic() - self._began_s)}"
        run = f"{self._num_started}/{self._num_planned}  {case.name}  {peer.name}  repeat {repeat + 1}"
        show_status(run + left.rstrip())


def left_in_words(num_done: int, num_planned: int, elapsed_s: float) -> str:
    """Return the time that is left if the other runs take as long on average; "" before the first has ended."""
    if not num_done:
        return ""
    return f"about {duration(elapsed_s / num_done * (num_planned - num_done))} left"


def _has_figures(report: BenchReport) -> bool:
    return any(peer.num_runs for case in report.cases for peer in case.peers)


def _require_figures(report: BenchReport) -> None:
    """Raise NumapinError if nothing at all was measured."""
    if _has_figures(report):
        return
    of_peers = (peer.skipped for case in report.cases for peer in case.peers)
    reasons = filter(None, chain(of_peers, (case.skipped for case in report.cases)))
    reason = next(reasons, "none of these peers fits these cases")
    raise NumapinError(f"nothing was measured: {reason}", remedy_of(reason, report.benchmark))


def remedy_of(reason: str, benchmark: str) -> str:
    """Return what to do if nothing was measured for this reason."""
    is_about_gpus = not reason.startswith("failed") and any(word in reason for word in ("GPU", "CUDA"))
    if is_about_gpus:
        return "these run without a GPU: numapin bench alloc, bench loader --cases transport"
    return f"measure something else with --cases and --peers: numapin bench {benchmark} --help lists them"
