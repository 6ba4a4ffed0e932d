"""`numapin top`: show a running job live. Edge.

Comes in: a run, or the processes of a job. Goes out: a screen that is redrawn every second, one sample as a table or
JSON (schema numapin.top/1), or metrics. Status 0, even if the job ends meanwhile; 2: no such job; 3: it cannot be read.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from numapin.base.stderr import say
from numapin.cli.full_screen import ended_by_signals
from numapin.cli.options import JOB, with_values
from numapin.cli.output import emit, json_text, show
from numapin.cli.top_live import ONCE, terminal, watch
from numapin.cli.top_metrics import OPTION, STDOUT, Address, export, target_of
from numapin.errors import UsageError
from numapin.launcher.named_run import LAST
from numapin.observe.find_job import find_job
from numapin.observe.sample import Sampler
from numapin.observe.top import top as compare
from numapin.topology.sources.nvml import open_loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numapin.observe.find_job import RunningJob
    from numapin.observe.top import Top
    from numapin.topology.readings import GpuLoad

    Follow = Callable[[Callable[[], object]], Iterator[Top]]

_SEARCH_EVERY_S: Final = 2.0  # with --pid, finding the job again queries NVML


@dataclass(frozen=True, slots=True, kw_only=True)
class _TopOptions:
    """The options of `numapin top`."""

    run: str | None
    pids: tuple[int, ...] | None
    interval_s: float
    once: bool
    as_json: bool
    metrics: str | None


@click.command(params=[*JOB])
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between samples.",
)
@click.option("--once", is_flag=True, help="Show one sample and exit; with --openmetrics, write one.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON (schema numapin.top/1).")
@click.option(
    OPTION,
    "metrics",
    metavar="[FILE|HOST:PORT]",
    is_flag=False,
    flag_value=STDOUT,
    help="Write metrics in OpenMetrics format: one sample to stdout (also with -); to a file that is replaced every "
    "interval, for node_exporter's textfile collector; or over HTTP at a loopback address, e.g. localhost:9836.",
)
@with_values(_TopOptions)
def top(options: _TopOptions) -> None:
    """Show the steps, CPUs, memory and GPU of each rank live.

    Keys: q or Ctrl-C quits, s sorts, p pauses, up and down select a rank, d shows its details. A bar divides the time
    of a step into computation, the part of it beside a copy to the GPU, and waiting for a batch; it needs
    numapin.DataLoader or run --dataloader=numapin. Red is off plan.

    RUN is a run's folder, its name, an end of the name, or @last, the newest run; by default it is this user's only
    active run. Threads and GPUs are read every interval. New processes are found and pages counted every 10 seconds,
    less often for large jobs.

    \b
    Examples:
      numapin top                      the active run
      numapin top @last                the newest run, if several are active
      numapin top --pid 4711           a job that torchrun, srun or python started
      numapin top --once --json        one sample for scripts
      numapin top --openmetrics        one sample for a monitoring system
      numapin top --openmetrics localhost:9836
                                       serve http://localhost:9836/metrics until the job ends
    """
    output = _output(options)
    find = partial(find_job, pids=options.pids, environ=os.environ, again="numapin top")
    job = find(options.run)
    is_fixed = options.run not in (None, LAST) or options.pids is not None  # the last run may soon be another one
    run_name = options.run if is_fixed else job.name
    with open_loads(_gpu_uuids(job)) as loads, suppress(KeyboardInterrupt):  # the usual end
        output(job, partial(_follow, job, lambda: find(run_name), loads))


def _output(options: _TopOptions) -> Callable[[RunningJob, Follow], None]:
    """Return the function that shows the job as requested. Raises UsageError if that cannot be done."""
    interval_s = options.interval_s
    pause = partial(time.sleep, interval_s)
    if options.metrics is not None:
        target = _target(options, options.metrics)
        return lambda job, follow: _export(follow(pause), job.name, target, once=options.once)
    if options.as_json and not options.once:
        raise UsageError("--json prints one sample", f"type: {ONCE} --json")
    if options.once:
        return lambda _job, follow: _print(next(follow(pause)), as_json=options.as_json)
    console = terminal()
    return lambda _job, follow: watch(console, follow, interval_s)


def _target(options: _TopOptions, named: str) -> Path | Address | None:
    """Return where the metrics go. Raises UsageError for options that ask for another output."""
    target = target_of(named)
    if options.as_json:
        raise UsageError(f"--json and {OPTION} are two outputs", "give one of them")
    if options.once and isinstance(target, Address):
        raise UsageError(f"--once and {OPTION} {target}: a server answers more than once", "leave --once out")
    return target


def _export(seen: Iterator[Top], run: str, target: Path | Address | None, *, once: bool) -> None:
    with ended_by_signals():
        export(seen, run, target, once=once)


def _gpu_uuids(job: RunningJob) -> list[str]:
    gpus = [rank.gpu for rank in job.plan.ranks if rank.gpu is not None]
    return [gpu.uuid for gpu in gpus if gpu.uuid is not None]


def _follow(
    job: RunningJob,
    again: Callable[[], RunningJob],
    loads: Callable[[], Mapping[str, GpuLoad]],
    wait: Callable[[], object],
) -> Iterator[Top]:
    """Yield the job's activity in each interval until it has ended; look for restarted ranks when ranks are gone."""
    sampler = Sampler(job, loads)
    before, next_search_s = sampler.sample(), 0.0
    while True:
        wait()
        now = sampler.sample()
        seen = compare(job.name, job.plan, before=before, now=now)
        yield seen
        before = now
        if not any(rank.is_gone for rank in seen.ranks) or time.monotonic() < next_search_s:
            continue
        next_search_s = time.monotonic() + _SEARCH_EVERY_S
        found = _found(again)
        if found is None and seen.has_ended:
            return
        if found is not None and found.pids != job.pids:
            job, sampler = found, Sampler(found, loads)
            before = sampler.sample()


def _found(find: Callable[[], RunningJob]) -> RunningJob | None:
    """Find the job. None: it has ended, or its launcher was killed while ranks are still running."""
    try:
        return find()
    except UsageError:
        return None


def _print(seen: Top, *, as_json: bool) -> None:
    if as_json:
        emit(json_text(seen.to_json()))
    else:
        from numapin.view.top_table import top_table

        show(top_table(seen))
    if seen.has_ended:
        say(f"{seen.run}: the job ended")
