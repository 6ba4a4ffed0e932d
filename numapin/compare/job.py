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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.base.printable import printable
from numapin.base.records import read_record
from numapin.bench.harness import remove_leftovers
from numapin.compare.figures import RunReadings, figures_of
from numapin.compare.record import SCHEMA, Phase, RankSteps
from numapin.compare.usage import JobReadings, between, peak_bytes, remote_share
from numapin.errors import MachineFileError
from numapin.launcher.preload import steps_environment
from numapin.system.process import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.settings import StepSettings
    from numapin.compare.variants import Variant
    from numapin.topology.readings import GpuLoad

_POLL_S: Final = 0.1
_READ_EVERY_S: Final = 0.5
_REST_WAIT_S: Final = 30.0  # for other ranks, once one has measured its last step
_SHOWN_LINES: Final = 12
_TAIL_BYTES: Final = 8000


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
    """One run: its figures, or why it has none. `steps_s` are the steps of the slowest rank."""

    figures: Mapping[str, float] = field(default_factory=dict)
    steps_s: tuple[float, ...] = ()
    num_ranks: int = 0
    unit: str | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()


def run_job(variant: Variant, options: JobOptions, *, log_name: str, report: Callable[[str], None]) -> JobResult:
    """Run a variant until its ranks have measured enough steps; `report` is called with what it is doing."""
    with TemporaryDirectory(prefix="numapin-compare-") as folder:
        log = Path(options.logs or folder, f"{log_name}.log")
        settings = replace(options.settings, folder=folder)
        environ = {**os.environ, **steps_environment(settings.to_text(), os.environ), **variant.variables}
        started_s = time.monotonic()
        try:
            process = _start(variant, environ, log)
        except OSError as error:
            return JobResult(failure=f"{variant.command[0]} cannot be started: {error.strerror}")
        job = _Job(process=process, usage=JobReadings(process.pid, options.loads), folder=folder, started_s=started_s)
        try:
            problem = job.watch(options, report)
            report("stopping")
            return job.result(options, problem or "", log)
        finally:
            job.stop(options.grace_s)


def _start(variant: Variant, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
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
    usage: JobReadings
    folder: str
    started_s: float
    files: dict[str, tuple[int, RankSteps]] = field(default_factory=dict)
    """The ranks' files as they were read last, with the times of their last change."""
    done_s: float | None = None  # when the first rank had measured its last step
    read_s: float = 0.0

    def watch(self, options: JobOptions, report: Callable[[str], None]) -> str | None:
        """Return when all ranks have measured their steps, or with the reason why they will not."""
        deadline_s = self.started_s + options.timeout_s
        while True:
            has_ended = self.process.poll() is not None  # before the ranks' files are read for the last time
            self._look()
            report(self._doing())
            if self._is_done():
                return None
            if has_ended:
                return self._end(options.settings.skip)
            if time.monotonic() > deadline_s:
                return f"no result within {options.timeout_s:g} s: {self._progress()}; allow more time with --timeout"
            time.sleep(_POLL_S)

    def _look(self) -> None:
        has_changed = self._read_files()
        if has_changed or time.monotonic() - self.read_s >= _READ_EVERY_S:
            self.usage.read()
            self.read_s = time.monotonic()

    def _read_files(self) -> bool:
        """Read the ranks' files that changed, and return whether any did."""
        before = dict(self.files)
        for path in sorted(Path(self.folder).glob("rank-*.json")):
            with suppress(OSError, MachineFileError):  # a file that is still empty
                changed_ns = path.stat().st_mtime_ns
                if self.files.get(path.name, (None,))[0] != changed_ns:
                    text = path.read_text("utf-8")
                    rank = read_record(RankSteps, text, source=path.name, hint="", schema=SCHEMA)
                    self.files[path.name] = changed_ns, rank
        return self.files != before

    @property
    def ranks(self) -> dict[int, RankSteps]:
        """Return the measurements of each rank; for a restarted one, since its last start."""
        return {rank.rank: rank for _, rank in sorted(self.files.values(), key=lambda file: file[1].restart)}

    def _is_done(self) -> bool:
        """Return whether all ranks are done, or the others seem not to step as often as the first that is."""
        done = [rank for rank in self.ranks.values() if rank.phase is Phase.DONE]
        if not done:
            return False
        self.done_s = self.done_s or time.monotonic()
        return len(done) >= done[0].num_ranks or time.monotonic() - self.done_s > _REST_WAIT_S

    def _doing(self) -> str:
        if any(rank.phase is Phase.MEASURING for rank in self.ranks.values()):
            return "measuring"
        return "first steps" if self.ranks else "starting"

    def _end(self, skip: int) -> str | None:
        """Return why a job that has ended has no figures; None if it ended well and has some."""
        status = self.process.returncode
        if status:
            when = f"after {self._progress()}" if self.files else "before its first step"
            return f"it {_status(status)} {when}"
        if any(rank.has_steps for rank in self.ranks.values()):
            return None
        skipped = f"; the first {skip} are not measured (--skip)" if self.files else ""
        return f"it ended after {self._progress()}{skipped}"

    def _progress(self) -> str:
        if not self.ranks:
            return "no step: no rank took a batch from a torch DataLoader or stepped a torch optimizer"
        rank = min(self.ranks.values(), key=lambda rank: rank.num_seen)
        return f"{counted(rank.num_seen, rank.unit)} of rank {rank.rank}"

    def result(self, options: JobOptions, problem: str, log: Path) -> JobResult:
        """Return the figures. The job still runs, unless it ended by itself."""
        ranks = [rank for rank in self.ranks.values() if rank.has_steps]
        if problem or not ranks:
            return JobResult(failure=f"{problem}{_tail(log)}")
        readings = RunReadings(
            started_s=self.started_s,
            cpu_at=partial(between, self.usage.cpu_s),
            busy=self.usage.busy,
            memory_bytes=self.usage.memory_bytes(),
            peak_bytes=peak_bytes(ranks),
            remote_share=remote_share(ranks, options.nodes),
        )
        slowest = max(ranks, key=lambda rank: rank.window_s / len(rank.step_ns))
        return JobResult(
            figures=figures_of(ranks, readings),
            steps_s=tuple(step / 1e9 for step in slowest.step_ns),
            num_ranks=len(ranks),
            unit=slowest.unit.value,
            notes=tuple(_notes(ranks)),
        )

    def stop(self, grace_s: float) -> None:
        """End all processes of the job."""
        with suppress(ProcessLookupError, PermissionError):
            self.usage.read()
            os.killpg(self.process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        try:
            while time.monotonic() < deadline_s and (self.process.poll() is None or self.usage.left()):
                time.sleep(_POLL_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.usage.left():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        remove_leftovers(self.usage.seen)


def _notes(ranks: Sequence[RankSteps]) -> list[str]:
    """Return what is odd about the measured steps."""
    notes, first = [], ranks[0]
    if len(ranks) < first.num_ranks:
        notes.append(f"{len(ranks)} of {counted(first.num_ranks, 'rank')} measured steps")
    short = [rank for rank in ranks if rank.phase is Phase.ENDED]
    if short:
        notes.append(f"the script ended after {counted(short[0].num_seen, short[0].unit)}")
    return notes


def _status(returncode: int) -> str:
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with status {returncode}"


def _tail(log: Path) -> str:
    """Return the last lines of a run's output, each on an indented line of its own."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {printable(line)}" for line in lines[-_SHOWN_LINES:])
    return ""
