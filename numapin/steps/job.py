"""A job whose ranks record their steps: its start below this process, their files, its output, and its end.

A job is stopped as a user would do it: SIGTERM to the launcher's process group, some time to end, then SIGKILL to all
that is left. One reading of its CPU time takes a look at all processes of the host: some 20 us each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from numapin.base.records import read_record
from numapin.base.redact import without_secrets
from numapin.base.text import counted, printable
from numapin.errors import MachineFileError
from numapin.rank.hook_env import STEPS_VARIABLE
from numapin.steps.record import SCHEMA, TRACE, Phase, RankSteps, StepUnit
from numapin.system import proc
from numapin.system.calls import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_POLL_S: Final = 0.1
_LOOK_S: Final = 0.3
_WAITED: Final = (
    *(signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
)
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


def start_below(
    command: Sequence[str], environ: Mapping[str, str], *, stdout: int | None, unblocked: Iterable[int]
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, in its group: the terminal's signals reach both. Raises OSError.

    The signals that `wait_for` passes on are blocked in this process from now on. The command has them as they were,
    but for those that are to be `unblocked`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)

    def prepare() -> None:
        end_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before.difference(unblocked))

    return subprocess.Popen(command, env=environ, stdout=stdout, preexec_fn=prepare)  # noqa: PLW1509 - one thread


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Return the status of a process of `start_below`, and pass signals on meanwhile.

    The terminal sends its own signals to both, and a second Ctrl-C would hurry the command; so they are not passed on.
    """
    while process.poll() is None:
        received = signal.sigtimedwait(_WAITED, _LOOK_S)
        if received is None or received.si_signo == signal.SIGCHLD:
            continue
        if received.si_code <= 0:  # sent by a process: sigaction(2)
            process.send_signal(received.si_signo)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(_WAITED) - {signal.SIGUSR1, signal.SIGUSR2})  # these were for ranks
    return process.returncode


def stop(process: subprocess.Popen[bytes], left: Callable[[], Collection[int]], *, grace_s: float) -> None:
    """Send SIGTERM to the launcher's group, and SIGKILL to every process that is left after `grace_s` seconds."""
    seen: set[int] = set()
    try:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
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


def remove_leftovers(pids: Iterable[int]) -> None:
    """Remove the batch files that torch's workers did not unlink before they ended."""
    for pid in pids:
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):  # noqa: S108 - where torch puts them
            path.unlink(missing_ok=True)


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
    _seen: set[int] = field(default_factory=set)  # processes that measured and ran; a container's have other ids here

    def read(self, now_s: float) -> bool:
        """Read the files, and return whether one has changed."""
        before = dict(self.found)
        for path in sorted(self.folder.glob("rank-*.json")):
            if path.name.endswith(TRACE):
                continue
            with suppress(OSError, MachineFileError):  # a file that is still empty
                text = path.read_text("utf-8")
                self.found[path.name] = read_record(RankSteps, text, source=path.name, hint="", schema=SCHEMA)
        self._seen |= {rank.pid for rank in self.ranks if rank.phase is Phase.MEASURING and proc.is_running(rank.pid)}
        if not any(rank.phase is Phase.DONE for rank in self.ranks):  # none yet, or none since a restart
            self.done_s = None
        elif self.done_s is None:
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
        """Return whether all ranks are done, or all that step. One that is measuring is waited for while it lives."""
        if self.done_s is None:
            return False
        ranks = self.ranks
        num_done = sum(rank.phase is Phase.DONE for rank in ranks)
        if num_done >= max(rank.num_local_ranks or rank.num_ranks for rank in ranks):
            return True
        measuring = {rank.pid for rank in ranks if rank.phase is Phase.MEASURING}
        is_measuring = any(pid not in self._seen or proc.is_running(pid) for pid in measuring)
        return now_s - self.done_s > _REST_WAIT_S and not is_measuring

    def failure(self) -> str | None:
        """Return why a process could not be measured; None if none has failed."""
        for path in self.folder.glob("failed-*"):
            with suppress(OSError):
                text = printable(path.read_text("utf-8", errors="replace")[:_SHOWN_CHARS])
                return f"its steps cannot be measured: process {path.name.removeprefix('failed-')}: {text}"
        return None

    def progress(self) -> str:
        """Return how far the rank is that has stepped least."""
        rank = min(self.ranks, key=lambda one: one.num_seen, default=None)
        if rank is None:
            return NO_STEP
        if rank.unit is StepUnit.OPTIMIZER_STEP and not rank.num_seen:
            return f"no optimizer step of rank {rank.rank}, though the script has made an optimizer and taken a batch"
        return f"{counted(rank.num_seen, rank.unit)} of rank {rank.rank}"


@dataclass(slots=True)
class JobReadings:
    """Readings of one job. The lists are of pairs of a time (CLOCK_MONOTONIC) and a value.

    `mark` is the value of NUMAPIN_STEPS that only this job's processes have.
    """

    leader: int
    mark: str
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    host_cpu_s: list[tuple[float, float]] = field(default_factory=list)
    """CPU time of all programs on the host."""
    seen: dict[int, int] = field(default_factory=dict)
    """Every process of the job so far: process id -> start time."""

    def read(self) -> None:
        """Take a reading of the CPU time."""
        processes = dict(proc.processes())
        tree = processes.keys() & {self.leader, *proc.descendants(self.leader, proc.children_of(processes))}
        self.seen.update((pid, processes[pid].start) for pid in tree)
        ticks = sum(processes[pid].cpu_ticks for pid in tree)
        now_s, per_second = time.monotonic(), os.sysconf("SC_CLK_TCK")
        self.cpu_s.append((now_s, ticks / per_second))
        # user, nice, system, idle, iowait, irq, softirq since boot (proc_stat(5))
        host_ticks = [*map(int, proc.read("/proc/stat").split(maxsplit=8)[1:8])]
        self.host_cpu_s.append((now_s, (sum(host_ticks) - sum(host_ticks[3:5])) / per_second))

    def left(self) -> list[int]:
        """Return the processes of the job that are still running, also those whose parent has ended."""
        left = {pid for pid, start in self.seen.items() if proc.is_running(pid, start)}
        return sorted(left.union(marked(STEPS_VARIABLE, self.mark)))


def marked(variable: str, mark: str) -> list[int]:
    """Return the processes that have this value of an environment variable, also those whose parent has ended."""
    return [pid for pid, _ in proc.processes() if (proc.environment_of(pid) or {}).get(variable) == mark]


def between(readings: Sequence[tuple[float, float]], at_s: float) -> float | None:
    """Return the value at a time, between the two readings around it; None outside of them."""
    for (before_s, before), (after_s, after) in pairwise(readings):
        if before_s <= at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / max(after_s - before_s, 1e-9)
    return None
