"""Stage 3: the processes of ranks: start them, see how they ended, end them. Edge.

Comes in: a command and its environment for each rank. Goes out: processes, of which none is left after an error.
`numapin.spawn` and the direct way of `numapin run` start and end their ranks here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from numapin.base.plural import listed
from numapin.launcher import leftovers
from numapin.rank import shim, signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LOOK_S: Final = 0.05
"""Seconds between two looks at running ranks. pidfds would need Linux 5.3."""


class StartedRank:
    """A rank's process.

    Attributes:
        local_rank: The number of the rank.
        process: The process. It leads a session of its own.
        status: The exit status, the negated signal number, or None while the process is running.
        ended_s: The time (since the epoch) when the end was seen.
    """

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        self.local_rank = local_rank
        self.process = process
        self.status: int | None = None
        self.ended_s: float | None = None

    def look(self) -> None:
        """Update the status."""
        if self.status is None:
            self.status = _status(self.process)
            self.ended_s = None if self.status is None else time.time()

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank's session, which includes what the rank started."""
        if self.process.returncode is None:  # once reaped, its number may belong to another process
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Reap the process if it has ended."""
        if self.status is not None:
            self.process.wait()


class StopSignal(BaseException):
    """A signal that stops the launcher. All ranks get the same signal. Not an Exception: it says nothing failed."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def shim_command(local_rank: int, python: str, program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of the shim, which `python` runs and which becomes this program.

    `program` is a Python; if it is "", the first of the arguments is another program.
    """
    ids = [f"--local-rank={local_rank}", f"--launcher={os.getpid()}"]
    return [python, "-I", "-S", "-c", shim.CODE, *ids, f"--exec={program}", *arguments]


def start(
    command: Sequence[str], variables: Mapping[str, str], *, pass_fds: Sequence[int] = (), stdin: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a rank in a session of its own, so that the launcher handles Ctrl-C, and can signal all that it starts."""
    with signals.kept_from_children():
        return subprocess.Popen(command, env=variables, pass_fds=pass_fds, stdin=stdin, start_new_session=True)


@contextmanager
def ended_on_error(
    ranks: Sequence[StartedRank],
    grace_s: float,
    is_urgent: Callable[[], bool] = lambda: False,
    further: Callable[[], signal.Signals | None] = lambda: None,
) -> Iterator[None]:
    """On any exception of the body, end all ranks in this list, and what they started in their sessions.

    SIGTERM comes first, or the signal of a StopSignal; then, after at most `grace_s` seconds, SIGKILL, or earlier if
    `is_urgent` says so. But if `further` returns another signal then, they get that one, and the time once more.
    """
    try:
        yield
    except BaseException as error:
        started = partial(leftovers.in_sessions, {rank.process.pid for rank in ranks})
        number: signal.Signals | None = error.number if isinstance(error, StopSignal) else signal.SIGTERM
        try:
            while number is not None:
                _ask(ranks, started, number)
                _wait_for_end(ranks, started, grace_s, is_urgent)
                number = further()
        finally:  # a second Ctrl-C continues here at once
            signal_all(ranks, signal.SIGKILL)
            remaining = running_after(ranks, leftovers.DEATH_S)
            leftovers.kill_after(time.monotonic(), started)
            if remaining:
                error.add_note(leftovers.survival(names_of(remaining)))
        raise
    finally:
        for rank in ranks:
            rank.close()


def _ask(ranks: Sequence[StartedRank], started: Callable[[], list[int]], number: signal.Signals) -> None:
    """Signal the ranks, and what they started: in their process groups, and in others of their sessions."""
    groups = {rank.process.pid for rank in ranks}
    elsewhere = [pid for pid in started() if _group_of(pid) not in groups]
    signal_all(ranks, number)
    leftovers.ask(elsewhere, number)


def _group_of(pid: int) -> int | None:
    """Return a process's group, None if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _wait_for_end(
    ranks: Sequence[StartedRank], started: Callable[[], list[int]], grace_s: float, is_urgent: Callable[[], bool]
) -> None:
    """Wait, in the grace period, for the ranks and what they started: below a shell, that is the training program."""
    deadline_s = time.monotonic() + grace_s
    running_after(ranks, grace_s, is_urgent)
    while time.monotonic() < deadline_s and not is_urgent() and started():
        time.sleep(LOOK_S)


def signal_all(ranks: Sequence[StartedRank], number: signal.Signals) -> None:
    """Signal the sessions of all ranks."""
    for rank in ranks:
        rank.signal(number)


def look_at(ranks: Sequence[StartedRank]) -> None:
    """Update the status of each rank."""
    for rank in ranks:
        rank.look()


def running_after(
    ranks: Sequence[StartedRank], seconds: float, is_urgent: Callable[[], bool] = lambda: False
) -> list[StartedRank]:
    """Wait at most this long for the ranks to end; return those that are still running."""
    deadline = time.monotonic() + seconds
    while running := without_status(ranks):
        look_at(running)
        if time.monotonic() > deadline or is_urgent():
            return without_status(running)
        time.sleep(LOOK_S / 5)
    return []


def without_status(ranks: Sequence[StartedRank]) -> list[StartedRank]:
    """Return the ranks that had not ended when they were last looked at."""
    return [rank for rank in ranks if rank.status is None]


def names_of(ranks: Sequence[StartedRank]) -> str:
    """Return text such as "ranks 0-1 (pid 100 101)"."""
    pids = " ".join(str(rank.process.pid) for rank in ranks)
    return f"{listed('rank', [rank.local_rank for rank in ranks])} (pid {pids})"


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return how a child ended, None while it is running.

    The child is not reaped, so the kernel gives its number and its group's to no other process.
    """
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # other code of this process has reaped it
        return process.wait()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
