"""One run: start a variant, watch its ranks, stop it after enough steps.

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
from typing import IO, TYPE_CHECKING, Final

from numapin.base.records import read_record
from numapin.base.redact import without_secrets
from numapin.base.text import counted, not_none, printable
from numapin.bench.harness import remove_leftovers
from numapin.compare.figures import RunReadings, figures_of, slowest_of
from numapin.compare.record import SCHEMA, Phase, RankSteps, StepUnit
from numapin.compare.usage import JobReadings, between, peak_bytes, remote_share
from numapin.errors import MachineFileError
from numapin.launcher.failure import name_of_signal
from numapin.rank.hook_env import STEPS_VARIABLE, steps_environment
from numapin.system.calls import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.record import StepSettings
    from numapin.compare.variants import Variant
    from numapin.topology.readings import GpuLoad

_POLL_S: Final = 0.1
_READ_EVERY_S: Final = 1.0
_KILL_S: Final = 10.0  # a process in an uninterruptible wait cannot be killed
_REST_WAIT_S: Final = 30.0  # for ranks that seem not to step, once another one has measured its last step
_SHOWN_CHARS: Final = 300
_SHOWN_LINES: Final = 12
_TAIL_BYTES: Final = 8000
MOST_BYTES: Final = 32 << 20
NO_STEP: Final = (
    "no step: no process took a batch from a torch DataLoader or stepped a torch optimizer, or the command's Python "
    "lacks numapin or our PYTHONPATH"
)


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
        usage = JobReadings(process.pid, options.loads, mark=environ[STEPS_VARIABLE])
        try:
            problem, read_s = None, 0.0
            while True:
                has_ended = process.poll() is not None  # before the ranks' files are read for the last time
                now_s = time.monotonic()
                if files.read(now_s) or now_s - read_s >= _READ_EVERY_S:
                    usage.read()
                    output.bound()
                    read_s = time.monotonic()
                report(files.doing())
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
            report("stopping")
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
    return files.failure() or f"it ended after {files.progress()}{skipped}"


def _result(ranks: Sequence[RankSteps], usage: JobReadings, options: JobOptions, started_s: float) -> JobResult:
    slowest, num_ranks = slowest_of(ranks), ranks[0].num_ranks
    readings = RunReadings(
        started_s=started_s,
        cpu_at=partial(between, usage.cpu_s),
        host_cpu_at=partial(between, usage.host_cpu_s),
        busy=usage.busy,
        memory_bytes=usage.memory_bytes(),
        peak_bytes=peak_bytes(ranks),
        remote_share=remote_share(ranks, options.nodes),
    )
    ended = next((rank for rank in ranks if rank.phase is Phase.ENDED), None)
    short = None
    if ended is not None:
        short = f"the script ended after {counted(ended.num_seen, ended.unit)}"
    elif min(len(rank.step_ns) for rank in ranks) < options.settings.steps:
        short = "cut short, because its steps took four times --seconds"
    missing = f"{len(ranks)} of {counted(num_ranks, 'rank')} measured steps" if len(ranks) < num_ranks else None
    return JobResult(
        figures=figures_of(ranks, readings),
        steps_s=tuple(step / 1e9 for step in slowest.step_ns),
        num_skipped=slowest.num_skipped,
        num_ahead=max(rank.num_ahead for rank in ranks),
        num_ranks=len(ranks),
        unit=slowest.unit.value,
        notes=tuple(not_none([missing, short])),
    )


def stop(process: subprocess.Popen[bytes], left: Callable[[], Collection[int]], *, grace_s: float) -> None:
    """Send SIGTERM to the launcher's group, and SIGKILL to every process that is left after `grace_s` seconds."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    seen: set[int] = set()
    try:
        seen.update(left())
        while time.monotonic() < deadline_s and (process.poll() is None or left()):
            time.sleep(_POLL_S)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _KILL_S
        while (pids := left()) and time.monotonic() < deadline_s:  # again: a dying one may start others
            seen.update(pids)
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S / 5)
        process.wait()
        remove_leftovers(seen)


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The output of a run in the file `path`, which stays small.

    A script that prints without end would fill the temporary directory, which may be memory. Cutting the file does not
    disturb its writers, because they append.
    """

    path: Path

    def open(self) -> IO[bytes]:
        """Make the file, and open it for the run's processes."""
        self.path.unlink(missing_ok=True)
        return self.path.open("ab")

    def bound(self) -> None:
        """Keep only the last lines of a file that has become too large."""
        with suppress(OSError):
            if self.path.stat().st_size > MOST_BYTES:
                kept = self._last()
                os.truncate(self.path, 0)
                with self.path.open("ab") as file:
                    file.write(b"[numapin: earlier output was dropped]\n" + kept)

    def tail(self) -> str:
        """Return the last lines without secrets, each indented and on a line of its own."""
        lines: list[str] = []
        with suppress(OSError):
            lines = [line for line in self._last().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {printable(without_secrets([line])[0])}" for line in lines[-_SHOWN_LINES:])

    def _last(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
            return file.read()


@dataclass(slots=True)
class RankFiles:
    """The ranks' files in a folder as they were read last, by name.

    `done_s` is the time at which the first rank had measured its last step.
    """

    folder: Path
    found: dict[str, RankSteps] = field(default_factory=dict)
    done_s: float | None = None

    def read(self, now_s: float) -> bool:
        """Read the files, and return whether one has changed."""
        before = dict(self.found)
        for path in sorted(self.folder.glob("rank-*.json")):
            with suppress(OSError, MachineFileError):  # a file that is still empty
                text = path.read_text("utf-8")
                self.found[path.name] = read_record(RankSteps, text, source=path.name, hint="", schema=SCHEMA)
        if self.done_s is None and any(rank.phase is Phase.DONE for rank in self.found.values()):
            self.done_s = now_s
        return self.found != before

    @property
    def ranks(self) -> list[RankSteps]:
        """The measurements of each rank; for a restarted one, since its last start."""
        by_restart = sorted(self.found.values(), key=lambda rank: rank.restart)
        return list({rank.rank: rank for rank in by_restart}.values())

    @property
    def measured(self) -> list[RankSteps]:
        """The ranks that have measured steps, and measure no more."""
        return [rank for rank in self.ranks if rank.has_steps]

    def is_done(self, now_s: float) -> bool:
        """Return whether all ranks are done, or all that step. One that is measuring is waited for."""
        if self.done_s is None:
            return False
        phases = [rank.phase for rank in self.ranks]
        is_all = phases.count(Phase.DONE) >= max(rank.num_ranks for rank in self.ranks)
        return is_all or (Phase.MEASURING not in phases and now_s - self.done_s > _REST_WAIT_S)

    def failure(self) -> str | None:
        """Return why a process could not be measured; None if none has failed."""
        for path in self.folder.glob("failed-*"):
            with suppress(OSError):
                text = printable(path.read_text("utf-8", errors="replace")[:_SHOWN_CHARS])
                return f"its steps cannot be measured: process {path.name.removeprefix('failed-')}: {text}"
        return None

    def doing(self) -> str:
        """Return what the job is doing, for the progress."""
        if any(rank.phase is Phase.MEASURING for rank in self.found.values()):
            return "measuring"
        return "first steps" if self.found else "starting"

    def progress(self) -> str:
        """Return how far the rank is that has stepped least."""
        rank = min(self.ranks, key=lambda one: one.num_seen, default=None)
        if rank is None:
            return NO_STEP
        if rank.unit is StepUnit.OPTIMIZER_STEP and not rank.num_seen:
            return f"no optimizer step of rank {rank.rank}, though the script has made an optimizer and taken a batch"
        return f"{counted(rank.num_seen, rank.unit)} of rank {rank.rank}"
