"""One run: start a variant, watch its ranks, stop it after enough steps. Edge.

Comes in: a `Variant`, and what to measure. Goes out: the figures of the run, or why there are none.

The job runs in a session of its own, so that Ctrl-C reaches this process only. It is stopped as a user would do it:
SIGTERM to the launcher's process group, some time to end, then SIGKILL to all that is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from numapin.compare.figures import RunReadings, figures_of, slowest_of
from numapin.compare.output import RunOutput
from numapin.compare.rank_files import RankFiles, oddities
from numapin.compare.stopping import stop
from numapin.compare.usage import JobReadings, between, peak_bytes, remote_share
from numapin.launcher.preload import STEPS_VARIABLE, steps_environment
from numapin.system.process import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.settings import StepSettings
    from numapin.compare.variants import Variant
    from numapin.topology.readings import GpuLoad

_POLL_S: Final = 0.1
_READ_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The measurement of each run, and its time limit.

    `nodes` are the planned nodes of each local rank; `loads` reads the load of the GPUs; `logs` is the folder that
    keeps the output of the runs, None to drop it.
    """

    settings: StepSettings
    timeout_s: float
    grace_s: float
    nodes: Mapping[int, CpuSet]
    loads: Callable[[], Mapping[str, GpuLoad]]
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


def run_job(variant: Variant, options: JobOptions, *, log_name: str, report: Callable[[str], None]) -> JobResult:
    """Run a variant until its ranks have measured enough steps; `report` is called with what it is doing."""
    with TemporaryDirectory(prefix="numapin-compare-") as folder:
        output = RunOutput(Path(options.logs or folder, f"{log_name}.log"))
        settings = replace(options.settings, folder=folder)
        environ = {**os.environ, **variant.variables}  # which may set PYTHONPATH, too
        environ |= steps_environment(settings.to_text(), environ)
        started_s = time.monotonic()
        try:
            process = _start(variant, environ, output)
        except OSError as error:
            return JobResult(failure=f"{variant.command[0]} cannot be started: {error.strerror}")
        usage = JobReadings(process.pid, options.loads, mark=environ[STEPS_VARIABLE])
        files = RankFiles(Path(folder))
        job = _Job(process=process, output=output, usage=usage, files=files, started_s=started_s)
        try:
            return job.watched(options, report)
        finally:
            stop(process, usage.left, grace_s=options.grace_s)


def _start(variant: Variant, environ: Mapping[str, str], output: RunOutput) -> subprocess.Popen[bytes]:
    with output.open() as file:
        return subprocess.Popen(
            variant.command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509 - this process has one thread
        )


@dataclass(slots=True, kw_only=True)
class _Job:
    """A job that was started."""

    process: subprocess.Popen[bytes]
    output: RunOutput
    usage: JobReadings
    files: RankFiles
    started_s: float
    read_s: float = 0.0

    def watched(self, options: JobOptions, report: Callable[[str], None]) -> JobResult:
        """Watch the job until it has measured its steps, and return its figures while it still runs."""
        problem = self._watch(options, report)
        report("stopping")
        if problem is not None:
            return JobResult(failure=f"{problem}{self.output.tail()}")
        return self._result(options)

    def _watch(self, options: JobOptions, report: Callable[[str], None]) -> str | None:
        """Return when all ranks have measured their steps, or with the reason why they will not."""
        deadline_s = self.started_s + options.timeout_s
        while True:
            has_ended = self.process.poll() is not None  # before the ranks' files are read for the last time
            self._look()
            report(self.files.doing())
            if self.files.is_done(time.monotonic()):
                return None
            if has_ended:
                return self._end(options.settings.skip)
            if problem := self.files.failure():
                return problem
            if time.monotonic() > deadline_s:
                progress = self.files.progress()
                return f"no result within {options.timeout_s:g} s: {progress}; allow more time with --timeout"
            time.sleep(_POLL_S)

    def _look(self) -> None:
        now_s = time.monotonic()
        if self.files.read(now_s) or now_s - self.read_s >= _READ_EVERY_S:
            self.usage.read()
            self.output.bound()
            self.read_s = time.monotonic()

    def _end(self, skip: int) -> str | None:
        """Return why a job that has ended has no figures; None if it ended well and has some."""
        status, progress = self.process.returncode, self.files.progress()
        if status:
            when = f"after {progress}" if self.files.found else "before its first step"
            return f"it {_status(status)} {when}"
        if self.files.measured:
            return None
        skipped = f"; the first {skip} are not measured (--skip)" if self.files.found else ""
        return self.files.failure() or f"it ended after {progress}{skipped}"

    def _result(self, options: JobOptions) -> JobResult:
        """Return the figures. The job still runs, unless it ended by itself."""
        ranks = self.files.measured
        slowest = slowest_of(ranks)
        readings = RunReadings(
            started_s=self.started_s,
            cpu_at=partial(between, self.usage.cpu_s),
            host_cpu_at=partial(between, self.usage.host_cpu_s),
            busy=self.usage.busy,
            memory_bytes=self.usage.memory_bytes(),
            peak_bytes=peak_bytes(ranks),
            remote_share=remote_share(ranks, options.nodes),
        )
        return JobResult(
            figures=figures_of(ranks, readings),
            steps_s=tuple(step / 1e9 for step in slowest.step_ns),
            num_skipped=slowest.num_skipped,
            num_ahead=max(rank.num_ahead for rank in ranks),
            num_ranks=len(ranks),
            unit=slowest.unit.value,
            notes=tuple(oddities(ranks, options.settings.steps)),
        )


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"
