"""`numapin top`: show a running job live. Edge.

Comes in: a run, or the processes of a job. Goes out: a table that is redrawn every second, or one sample as a table or
JSON (schema numapin.top/1). Status 0, even if the job ends meanwhile; 2: no such job; 3: it cannot be read.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from numapin.base.stderr import say
from numapin.cli.options import JOB
from numapin.cli.output import emit, json_text, show
from numapin.errors import NumapinError, UsageError
from numapin.launcher.named_run import LAST
from numapin.observe.find_job import find_job
from numapin.observe.sample import Sampler
from numapin.observe.top import top as compare
from numapin.topology.sources.nvml import open_loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from numapin.observe.find_job import RunningJob
    from numapin.observe.top import Top
    from numapin.topology.readings import GpuLoad

_ONCE: Final = "numapin top --once"
_SEARCH_EVERY_S: Final = 2.0  # with --pid, finding the job again queries NVML


@click.command(params=[*JOB])
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between samples.",
)
@click.option("--once", is_flag=True, help="Show one sample and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print JSON (schema numapin.top/1).")
def top(run: str | None, pids: tuple[int, ...] | None, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show the threads, memory and GPU of each rank live; press q or Ctrl-C to quit.

    RUN is a run's folder, its name, an end of the name, or @last, the newest run; by default it is this user's only
    active run. Threads and GPUs are read every interval. New processes are found and pages counted every 10 seconds,
    less often for large jobs.

    \b
    Examples:
      numapin top                      the active run
      numapin top @last                the newest run, if several are active
      numapin top --pid 4711           a job that torchrun, srun or python started
      numapin top --once --json        one sample for scripts
    """
    if as_json and not once:
        raise UsageError("--json prints one sample", f"type: {_ONCE} --json")
    console = None if once else _terminal()
    find = partial(find_job, pids=pids, environ=os.environ, again="numapin top")
    job = find(run)
    is_fixed = run not in (None, LAST) or pids is not None  # the last run may soon be another one
    run_name = run if is_fixed else job.name
    with open_loads(_gpu_uuids(job)) as loads, suppress(KeyboardInterrupt):  # the usual end
        follow = partial(_follow, job, lambda: find(run_name), loads)
        if console is None:
            _print(next(follow(lambda: time.sleep(interval_s))), as_json=as_json)
        else:
            _watch(console, follow, interval_s)


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


def _watch(console: Console, follow: Callable[[Callable[[], object]], Iterator[Top]], interval_s: float) -> None:
    from rich.live import Live

    from numapin.view.top_table import top_table
    from numapin.view.visible import visible

    try:
        with _keyboard() as wait, Live(console=console, auto_refresh=False) as live:
            for seen in follow(lambda: wait(interval_s)):
                live.update(visible(top_table(seen)), refresh=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise NumapinError("the terminal is gone", f"without a terminal, type: {_ONCE}") from None
    say("the job ended")


def _terminal() -> Console:
    """Return stdout as a terminal whose lines can be redrawn. Raises UsageError if it is not."""
    from rich.console import Console

    if sys.stdout is None or not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal", f"type: {_ONCE}")
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_dumb_terminal:
        raise UsageError(f"TERM={os.environ['TERM']}: this terminal cannot redraw lines", f"type: {_ONCE}")
    return console


@contextmanager
def _keyboard() -> Iterator[Callable[[float], None]]:
    """Yield a function that waits some seconds and meanwhile takes q as Ctrl-C; without a keyboard it only waits."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield time.sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _wait
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        has_input = select.select([sys.stdin], [], [], left_s)[0]
        if has_input and os.read(sys.stdin.fileno(), 1) in (b"q", b""):
            raise KeyboardInterrupt
