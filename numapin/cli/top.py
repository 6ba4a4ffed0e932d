"""`numapin top`: what does a running job do now? Edge.

Comes in: a run, or the processes of a job. Goes out: a table that is drawn again every second, or one sample as a table
or JSON (schema numapin.top/1); status 0 also where the job ends meanwhile, 2: no such job, 3: it cannot be seen.
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
_LOOK_EVERY_S: Final = 2.0  # with --pid, finding the job again asks NVML


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

    RUN is a run directory or its name; without it, the only run of this user that goes on. Threads and GPUs are read
    every interval; new processes are found, and pages counted, every 10 seconds or, for large jobs, less often.

    \b
    Examples:
      numapin top                      the run that goes on
      numapin top --pid 4711           what torchrun, srun or python started
      numapin top --once --json        one sample for scripts
    """  # noqa: D301 - \b is click's mark for a paragraph that is kept as it is
    if as_json and not once:
        raise UsageError("--json prints one sample", f"type: {_ONCE} --json")
    console = None if once else _terminal()
    find = partial(find_job, pids=pids, environ=os.environ, again="numapin top")
    job = find(run)
    uuids = [rank.gpu.uuid for rank in job.plan.ranks if rank.gpu is not None and rank.gpu.uuid is not None]
    with open_loads(uuids) as loads, suppress(KeyboardInterrupt):  # the usual end
        follow = partial(_follow, job, lambda: find(run or (job.name if pids is None else None)), loads)
        if console is None:
            _print(next(follow(lambda: time.sleep(interval_s))), as_json=as_json)
        else:
            _watch(console, follow, interval_s)


def _follow(
    job: RunningJob,
    again: Callable[[], RunningJob],
    loads: Callable[[], Mapping[str, GpuLoad]],
    wait: Callable[[], object],
) -> Iterator[Top]:
    """Yield what the job did in each interval, until it ended; ranks that are gone may have been restarted."""
    sampler = Sampler(job, loads)
    before, look_s = sampler.sample(), 0.0
    while True:
        wait()
        now = sampler.sample()
        seen = compare(job.name, job.plan, before=before, now=now)
        yield seen
        before = now
        if not any(rank.is_gone for rank in seen.ranks) or time.monotonic() < look_s:
            continue
        look_s = time.monotonic() + _LOOK_EVERY_S
        try:
            found = again()
        except UsageError:
            if seen.has_ended:
                return
            continue  # its launcher was killed, and some ranks go on
        if found.pids != job.pids:
            job, sampler = found, Sampler(found, loads)
            before = sampler.sample()


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
        raise NumapinError("the terminal is gone", f"without one: {_ONCE}") from None
    say("the job ended")


def _terminal() -> Console:
    """Return stdout as a terminal on which lines can be drawn again. Raises UsageError where it is none."""
    from rich.console import Console

    if sys.stdout is None or not sys.stdout.isatty():
        raise UsageError("stdout is not a terminal", f"type: {_ONCE}")
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_dumb_terminal:
        raise UsageError(f"TERM={os.environ['TERM']}: this terminal cannot draw over lines", f"type: {_ONCE}")
    return console


@contextmanager
def _keyboard() -> Iterator[Callable[[float], None]]:
    """Yield what waits some seconds; while it does, q is Ctrl-C. Without a keyboard it only waits."""
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
        with suppress(termios.error):  # it is gone, and its settings with it
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b""):
            raise KeyboardInterrupt
