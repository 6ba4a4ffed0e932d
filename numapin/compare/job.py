"""One run: start a variant, watch its ranks, stop it after enough steps.

The job runs in a session of its own, so that Ctrl-C reaches this process only.
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

from numapin.base.text import counted, not_none
from numapin.compare.figures import RunReadings, figures_of, slowest_of
from numapin.launcher.failure import name_of_signal
from numapin.observe.model import MemoryKind
from numapin.observe.read import observe
from numapin.rank.hook_env import STEPS_VARIABLE, steps_environment
from numapin.steps.job import JobReadings, RankFiles, RunOutput, between, stop
from numapin.steps.record import Phase
from numapin.system import proc
from numapin.system.calls import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.compare.variants import Variant
    from numapin.steps.record import RankSteps, StepSettings
    from numapin.topology.readings import GpuLoad

_POLL_S: Final = 0.1
_READ_EVERY_S: Final = 1.0
_KINDS: Final = frozenset(MemoryKind) - {MemoryKind.FILE}  # the page cache is where the first reader's CPU was


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
        peak_bytes=max(not_none(proc.size_bytes(rank.pid, "status", "VmHWM:") for rank in ranks), default=None),
        remote_share=_remote_share(ranks, options.nodes),
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


def _remote_share(ranks: Iterable[RankSteps], nodes: Mapping[int, CpuSet]) -> float | None:
    """Return the share of the ranks' memory on other nodes than planned; `nodes` are those of each local rank.

    None if the machine has one node, where no memory is remote, or if a process's pages cannot be read.
    """
    observed = observe({rank.local_rank: rank.pid for rank in ranks if rank.local_rank in nodes})
    is_known = all(process.pages is not None for rank in observed.ranks for process in rank.processes)
    if len(observed.nodes) < 2 or not is_known:
        return None
    total = near = 0
    for rank in observed.ranks:
        counts = rank.bytes_by_node(_KINDS)
        total += counts.total()
        near += sum(size for node, size in counts.items() if node in nodes[rank.local_rank])
    return 1 - near / total if total else None
