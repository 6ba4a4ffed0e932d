"""`numapin top`: show a running job live.

Status 0, even if the job ends meanwhile; 2: no such job; 3: it cannot be read.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from numapin.base.stderr import say
from numapin.cli.options import JOB, Seconds
from numapin.cli.output import emit, json_text, require_writable, show, visible, width_of_stdout, write
from numapin.errors import NumapinError, Stopped, UsageError
from numapin.launcher.run_folder import LAST, find_folder
from numapin.observe.find import find_job
from numapin.observe.node import JobFollower, NodeFollower, origin_of
from numapin.observe.top import LoopPaces
from numapin.topology.sources.nvml import open_loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from rich.console import Console

    from numapin.observe.find import RunningJob
    from numapin.observe.top import Top
    from numapin.topology.readings import GpuLoad

_OPENMETRICS: Final = "--openmetrics"
_ONCE: Final = "numapin top --once"
_SEARCH_EVERY_S: Final = 2.0  # each search reads the files of the run
_FIRST_S: Final = 0.3  # until the first frame
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@click.command(params=[*JOB])
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(min=0.1, max=86_400),
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    help="Seconds between samples.",
)
@click.option("--once", is_flag=True, help="Show one sample and exit; with --openmetrics, write one.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON (schema numapin.top/1).")
@click.option(
    _OPENMETRICS,
    "metrics",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write metrics in OpenMetrics format: one sample to stdout (also with -), or to a file that is replaced every "
    "interval, for node_exporter's textfile collector.",
)
@click.option(
    "--all",
    "of_all",
    is_flag=True,
    help=f"With {_OPENMETRICS} FILE: write the metrics of all runs of this user on this host, or for root those of "
    "all users, until top is stopped.",
)
def top(
    run: str | None,
    pids: tuple[int, ...] | None,
    interval_s: float,
    *,
    once: bool,
    as_json: bool,
    metrics: str | None,
    of_all: bool,
) -> None:
    """Show the steps, CPUs, memory and GPU of each rank live; Ctrl-C quits.

    Steps and waiting are those of loops over a DataLoader: any one in jobs that numapin started, else numapin's.
    Red marks values that are off plan.

    RUN is a run's folder, its name, the end of its name, or @last (the newest run); by default it is this user's only
    active run. Threads and GPUs are read every interval. New processes are found and pages counted every 10 seconds,
    less often for large jobs.

    \b
    Examples:
      numapin top                      the active run
      numapin top @last                the newest run, if several are active
      numapin top --pid 4711           a job that torchrun, srun or python started
      numapin top --once --json        one sample for scripts
      numapin top --openmetrics /var/lib/node_exporter/numapin.prom
                                       metrics of a run, until it ends
      numapin top --openmetrics /var/lib/node_exporter/numapin.prom --all
                                       of all runs on this host, as a service
    """
    path = None if metrics is None or metrics == "-" else Path(metrics)
    if metrics is not None and as_json:
        raise UsageError(f"--json and {_OPENMETRICS} cannot be combined", "give one of them")
    if as_json and not once:
        raise UsageError("--json prints one sample", f"type: {_ONCE} --json")
    if of_all:
        if run is not None or pids is not None:
            raise UsageError("--all and a job cannot be combined", "give one of them")
        if metrics is None or (path is None and not once):
            problem = f"--all needs {_OPENMETRICS} FILE, or {_OPENMETRICS} --once"
            raise UsageError(problem, f"type: {_ONCE} {_OPENMETRICS} --all")
        _export_all(path, interval_s, once=once)
        return
    if path is not None and run is None and pids is None and find_folder(str(path), os.environ):
        problem = f"{path} is a run, and the word after {_OPENMETRICS} is a file"
        raise UsageError(problem, f"type: numapin top {path} {_OPENMETRICS}")
    console = None if once or metrics is not None else _terminal()

    def find() -> RunningJob:
        return find_job(name, pids, os.environ, again="numapin top")

    name = run
    job = find()
    if pids is None and run in (None, LAST):
        name = job.name  # the last run may soon be another one
    gpus = [rank.gpu for rank in job.plan.ranks if rank.gpu is not None]
    with (
        open_loads([gpu.uuid for gpu in gpus if gpu.uuid is not None]) as loads,
        suppress(KeyboardInterrupt),  # the usual end
        _ended_by_signals(),
    ):
        pauses = chain([min(interval_s, _FIRST_S if console else interval_s)], repeat(interval_s))
        seen = _follow(job, find, loads, lambda: time.sleep(next(pauses)))
        if console is not None:
            _watch(console, seen)
        elif metrics is not None:
            _export(seen, job, path, once=once)
        else:
            now = next(seen)
            if as_json:
                emit(json_text(now.to_json()))
            else:
                from numapin.view.top_table import top_table

                show(top_table(now, LoopPaces().add(now), width=width_of_stdout()))
            if now.has_ended:
                say(f"{now.run}: the job ended")


def _follow(
    job: RunningJob,
    again: Callable[[], RunningJob],
    loads: Callable[[], Mapping[str, GpuLoad]],
    wait: Callable[[], object],
) -> Iterator[Top]:
    """Yield the job's activity in each interval until it has ended.

    Ranks that a run has restarted are looked for when ranks are gone, and those that start later until it has all.
    """
    follower, next_search_s = JobFollower(job, again, loads), 0.0
    while True:
        wait()
        seen = follower.look()
        yield seen
        if not follower.is_incomplete(seen) or time.monotonic() < next_search_s:
            continue
        next_search_s = time.monotonic() + _SEARCH_EVERY_S
        if follower.search(seen):
            return


def _terminal() -> Console:
    """Return stdout as a terminal whose lines can be redrawn. Raises UsageError if it is not."""
    from rich.console import Console

    if sys.stdout is None or not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal", f"type: {_ONCE}")
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_dumb_terminal:
        raise UsageError(f"TERM={os.environ['TERM']}: this terminal cannot redraw lines", f"type: {_ONCE}")
    return console


def _watch(console: Console, seen: Iterator[Top]) -> None:
    """Redraw the table in place until the job ends; the last figures of living ranks stay. Raises NumapinError."""
    from rich.live import Live

    from numapin.view.top_table import top_table

    paces = LoopPaces()
    try:
        with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            console.show_cursor()  # Live hides it, and after Ctrl-Z or SIGKILL nothing would show it again
            for now in seen:
                found = paces.add(now)
                if now.has_ended:
                    continue
                columns, rows = os.get_terminal_size(sys.stdout.fileno())  # rich prefers COLUMNS, which does not follow
                console.size = console.size._replace(width=columns or 80, height=rows or 24)
                live.update(visible(top_table(now, found, width=console.width)), refresh=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise NumapinError("the terminal is gone", f"without a terminal, type: {_ONCE}") from None
    say("the job ended")


def _export(seen: Iterator[Top], job: RunningJob, path: Path | None, *, once: bool) -> None:
    """Write the metrics of a job; at its end, or the export's, the file only says so. Raises NumapinError."""
    from numapin.view.openmetrics import ended, openmetrics

    origin = origin_of(job, os.environ)
    _write_all((openmetrics([(now, origin)]) for now in seen), path, last=ended(job.name, origin), once=once)
    if path is not None and not once:
        say("the job ended")


def _export_all(path: Path | None, interval_s: float, *, once: bool) -> None:
    """Write the metrics of all runs until a signal; at the end the file has none. Raises NumapinError."""
    from numapin.view.openmetrics import openmetrics

    def samples() -> Iterator[str]:
        node = NodeFollower(loads, os.environ)
        node.look()  # finds the runs
        while True:
            time.sleep(interval_s)
            yield openmetrics(node.look(), num_unread=len(node.unread))

    with open_loads(None) as loads, suppress(KeyboardInterrupt), _ended_by_signals():
        _write_all(samples(), path, last=openmetrics([]), once=once)


def _write_all(samples: Iterator[str], path: Path | None, *, last: str, once: bool) -> None:
    """Write one sample to stdout or a file; or all to a file, and `last` at the end: old figures would stay there."""
    require_writable(path, option=_OPENMETRICS)
    if path is None:
        emit(next(samples))
    elif once:
        write(next(samples), path, option=_OPENMETRICS)
    else:
        try:
            for text in samples:
                write(text, path, option=_OPENMETRICS)
        finally:
            write(last, path, option=_OPENMETRICS)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the block with `Stopped` on SIGTERM, SIGHUP or SIGQUIT, unless the parent process ignores the signal."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number), "the job goes on")

    watched = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    former = {number: signal.signal(number, end) for number in watched}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
