"""All runs of a comparison, in turn: start a variant, watch its ranks, stop it after enough steps.

A job runs in a session of its own, so that Ctrl-C reaches this process only. A first run that is not counted fills the
page cache, and finds the number of steps that all others measure. A variant that fails is left out of the later rounds.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from numapin.base.formats import duration, left_in_words
from numapin.base.redact import without_secrets
from numapin.base.text import counted, not_none
from numapin.compare.report import figures_of, slowest_of
from numapin.launcher.failure import name_of_signal
from numapin.rank.hook_env import STEPS_VARIABLE, steps_environment
from numapin.steps.job import JobReadings, RankFiles, RunOutput, between, stop
from numapin.steps.record import FEWEST_STEPS, Phase
from numapin.system.calls import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numapin.compare.variants import Variant
    from numapin.steps.record import RankSteps, StepSettings

_POLL_S: Final = 0.1
_READ_EVERY_S: Final = 1.0
_PATIENCE: Final = 4  # times the wanted seconds: a variant may be so much slower than the first one
_SEED: Final = 17  # a comparison can be repeated in the same order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The measurement of each run, and its time limit; `logs` is the folder that keeps the output, None to drop it."""

    settings: StepSettings
    timeout_s: float
    grace_s: float
    logs: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One run: its figures, or why it has none. `steps_s` are the steps of the slowest rank.

    `num_skipped` steps came before them; `num_ahead` is the most batches that a loader fetches ahead.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    steps_s: tuple[float, ...] = ()
    num_skipped: int = 0
    num_ahead: int = 0
    num_ranks: int = 0
    unit: str | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a variant in one round. Round None is the first run, which does not count.

    `order` is its place among all runs; `left` is the time for the rest of them, in words.
    """

    variant: str
    round: int | None
    order: int
    took_s: float
    result: JobResult
    left: str = ""


def turns(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield round and variant.

    Each pair of rounds has an order of its own, drawn at random, and its second round runs backwards: ABBA, BAAB. So a
    machine that slows down, and neighbors in the order, favor none.
    """
    chance = random.Random(_SEED)  # noqa: S311 - an order, no secret
    order = list(names)
    for number in range(num_rounds):
        if number % 2 == 0:
            chance.shuffle(order)
        for name in order if number % 2 == 0 else reversed(order):
            yield number, name


def measure_all(
    variants: Sequence[Variant], options: JobOptions, *, num_rounds: int, progress: Callable[[str], None]
) -> Iterator[ComparedRun]:
    """Yield each run when it has ended; `progress` is called several times per second, with a line on the current run.

    The first run does not count. It finds out how many steps fit into the time; all others measure that number. If it
    fails, the next variant has the first run. It ends early if fewer than two variants are left.
    """
    by_name = {variant.name: variant for variant in variants}
    planned = list(turns(list(by_name), num_rounds))
    failed: set[str] = set()
    num_made, began_s = 0, time.monotonic()

    def left(later: Sequence[tuple[int, str]]) -> str:
        num_left = sum(name not in failed for _, name in later)
        words = left_in_words(num_made, num_made + num_left, time.monotonic() - began_s)
        return f"; {words}" if words else ""

    def run(name: str, number: int, options: JobOptions) -> ComparedRun:
        """Run a variant as number `number`, 0 for the first run."""
        nonlocal num_made
        run_began_s, left_then = time.monotonic(), left(planned[max(number - 1, 0) :])
        which = f"run {number}/{len(planned)}" if number else "first run, not counted"
        (shown,) = without_secrets([name])

        def report() -> None:
            progress(f"{which}: {shown}, {duration(time.monotonic() - run_began_s)}{left_then}")

        file_name = "".join(char if char.isalnum() or char in ".-_" else "_" for char in shown)[:80]
        result = run_job(by_name[name], options, log_name=f"{number:03d}-{file_name}", report=report)
        num_made += 1
        if result.failure is not None:
            failed.add(name)
        return ComparedRun(
            variant=name,
            round=planned[number - 1][0] if number else None,
            order=number,
            took_s=time.monotonic() - run_began_s,
            result=result,
            left=left(planned[number:]),
        )

    for name in by_name:
        first = run(name, 0, options)
        yield first
        if first.result.failure is None:
            break
    else:
        return
    equal = replace(options, settings=with_equal_steps(options.settings, first.result.steps_s))
    for number, (_, name) in enumerate(planned, 1):
        is_over = len(by_name) - len(failed) < 2 and number > len(by_name)  # each had its first turn
        if name not in failed and not is_over:
            yield run(name, number, equal)


def with_equal_steps(settings: StepSettings, first_s: Sequence[float]) -> StepSettings:
    """Return the settings of the runs that count: each measures as many steps as fit into the time.

    `first_s` are the steps of the first run, the earlier of which may have waited for a cold disk, so the second half
    counts; their mean, because a few may take most of the time. A run that needs several times as long is cut short.
    """
    settled_s = statistics.fmean(first_s[len(first_s) // 2 :])
    fitting = int(settings.seconds / max(settled_s, 1e-9))
    steps = min(settings.steps, max(fitting, FEWEST_STEPS))
    return replace(settings, steps=steps, seconds=settings.seconds * _PATIENCE)


def run_job(variant: Variant, options: JobOptions, *, log_name: str, report: Callable[[], None]) -> JobResult:
    """Run a variant until its ranks have measured enough steps; `report` is called several times per second."""
    with TemporaryDirectory(prefix="numapin-compare-") as folder:
        output, files = RunOutput(Path(options.logs or folder, f"{log_name}.log")), RankFiles(Path(folder))
        environ = {**os.environ, **variant.variables}  # which may set PYTHONPATH, too
        environ |= steps_environment(replace(options.settings, folder=folder).to_text(), environ)
        started_s = time.monotonic()
        try:
            with output.open() as file:
                process = subprocess.Popen(
                    variant.command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 - this process has one thread
                )
        except OSError as error:  # of the command, or of the log
            return JobResult(failure=f"it cannot be started: {error.filename or variant.command[0]}: {error.strerror}")
        usage = JobReadings(process.pid, mark=environ[STEPS_VARIABLE])
        try:
            problem, read_s = None, 0.0
            while True:
                has_ended = process.poll() is not None  # before the ranks' files are read for the last time
                now_s = time.monotonic()
                if files.read(now_s) or now_s - read_s >= _READ_EVERY_S:
                    usage.read()
                    output.bound()
                    read_s = time.monotonic()
                report()
                if files.is_done(time.monotonic()):
                    break
                if has_ended:
                    problem = _early_end(process.returncode, files, options.settings.skip)
                    break
                problem = files.failure()
                if problem is None and time.monotonic() > started_s + options.timeout_s:
                    problem = (
                        f"no result within {options.timeout_s:g} s: {files.progress()}; allow more time with --timeout"
                    )
                if problem is not None:
                    break
                time.sleep(_POLL_S)
            if problem is not None:
                return JobResult(failure=f"{problem}{output.tail()}")
            return _result(files.measured, usage, options, started_s)  # while the job still runs
        finally:
            stop(process, usage.left, grace_s=options.grace_s)


def _early_end(status: int, files: RankFiles, skip: int) -> str | None:
    """Return why a job that has ended has no figures; None if it ended well and has some."""
    if status:
        how = f"was ended by {name_of_signal(-status)}" if status < 0 else f"ended with status {status}"
        return f"it {how} {f'after {files.progress()}' if files.found else 'before its first step'}"
    if files.measured:
        return None
    skipped = f"; the first {skip} are not measured (--skip)" if files.found else ""
    resumed = "if it resumes from a checkpoint, earlier runs have left it little to do: let each run start anew"
    return files.failure() or f"it ended after {files.progress()}{skipped}; {resumed}"


def _result(ranks: Sequence[RankSteps], usage: JobReadings, options: JobOptions, started_s: float) -> JobResult:
    slowest, num_ranks = slowest_of(ranks), ranks[0].num_ranks
    ended = next((rank for rank in ranks if rank.phase is Phase.ENDED), None)
    short = None
    if ended is not None:
        short = f"the script ended after {counted(ended.num_seen, ended.unit)}"
    elif min(len(rank.step_ns) for rank in ranks) < options.settings.steps:
        short = "cut short, because its steps took four times --seconds"
    missing = f"{len(ranks)} of {counted(num_ranks, 'rank')} measured steps" if len(ranks) < num_ranks else None
    return JobResult(
        figures=figures_of(
            ranks,
            started_s=started_s,
            cpu_at=partial(between, usage.cpu_s),
            host_cpu_at=partial(between, usage.host_cpu_s),
        ),
        steps_s=tuple(step / 1e9 for step in slowest.step_ns),
        num_skipped=slowest.num_skipped,
        num_ahead=max(rank.num_ahead for rank in ranks),
        num_ranks=len(ranks),
        unit=slowest.unit.value,
        notes=tuple(not_none([missing, short])),
    )
