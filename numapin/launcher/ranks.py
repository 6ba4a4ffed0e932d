"""The processes of this host's ranks: start them, watch them, and end them with all that they started.

`numapin run` and `numapin.spawn` start and end their ranks here.

Each rank leads a session. What it starts stays in that session, in any process group, unless it calls setsid(2); then
the environment that it inherited identifies it. Out of reach: processes that have left the session and either got
another environment or overwrote theirs (setproctitle does so), that run as another user, or in another container.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from numapin.base.text import listed
from numapin.errors import NumapinError, Stopped
from numapin.launcher import guardian
from numapin.launcher.guardian import DEATH_S, LOOK_S
from numapin.launcher.run_folder import lock_of
from numapin.rank import shim, signals
from numapin.system import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import IO, Self


START_HINT: Final = "see the limits of this process with: ulimit -a"
_ONE_PRESS_S: Final = 0.5  # kill, `timeout` and `numapin trace` may send both the group and the launcher one SIGINT


# --- one rank --------------------------------------------------------------------------------------------------------


class StartedRank:
    """A rank's process, which leads a session of its own. Times are seconds since the epoch."""

    def __init__(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        self.local_rank = local_rank
        self.process = process
        self.status: int | None = None  # the exit status, the negated signal number; None while it is running
        self.ended_s: float | None = None  # when the end was seen
        self.asked_s: float | None = None  # when it got the first signal to end

    def look(self) -> None:
        """Update the status. The process is not reaped, so its number, and its group's, go to no other process."""
        if self.status is not None:
            return
        try:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # other code of this process has reaped it
            self.status = self.process.wait()
        else:
            if ended is None:
                return
            self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.ended_s = time.time()

    @property
    def is_running(self) -> bool:
        """Whether it is running, and the kernel is not ending it: that may take a GPU's driver seconds."""
        return self.status is None and not proc.is_dying(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Signal the rank's process group to end. A rank that has ended before the first signal was not asked to."""
        self.look()
        if self.status is None and self.asked_s is None:
            self.asked_s = time.time()
        if self.process.returncode is None:  # once reaped, its number may belong to another process
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Reap the process if it has ended."""
        if self.status is not None:
            self.process.wait()


def start(
    local_rank: int,
    python: str,
    program: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    stdin: int | None = None,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a rank: `python` runs the shim, which becomes `program`, a Python; "" if the first argument is the program.

    The rank leads a session, so that the launcher handles Ctrl-C and can signal all that the rank starts.
    """
    ids = [f"--local-rank={local_rank}", f"--launcher={os.getpid()}"]
    command = [python, "-I", "-S", "-c", shim.CODE, *ids, f"--exec={program}", *arguments]
    with signals.kept_from_children():
        return subprocess.Popen(
            command, env=variables, pass_fds=pass_fds, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )


# --- signals to the launcher -----------------------------------------------------------------------------------------


class StopSignal(BaseException):
    """A signal that stops the launcher. All ranks get the same signal. Not an Exception: it says nothing failed."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Alarm:
    """Wakes the launcher when a rank ends or a signal arrives, and notes the signals that are to end all ranks.

    Handlers only take notes, so that no signal can interrupt the start of a rank and leave one that nobody knows.
    For the main thread only.
    """

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._received: list[signal.Signals] = []  # those that neither `ring` nor `take_signal` has taken
        self._interrupted_s = -_ONE_PRESS_S  # the time of the last SIGINT that counts, so the first one does
        self.stopped_by: signal.Signals | None = None

    def __enter__(self) -> Self:
        """Install the handlers."""
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._poll = select.poll()  # select() takes no descriptor above 1023
        self._poll.register(self._ours, select.POLLIN)
        self._former_fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._note) for number in self._numbers}
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # the default wakes nothing
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Restore the former handlers. Raises Stopped, with the ranks that did not end, for a StopSignal."""
        for number, handler in self._former.items():  # Python cannot restore one of a preloaded C library: None
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._former_fd)
        self._ours.close()
        self._theirs.close()
        if isinstance(error, StopSignal):
            raise Stopped(error.number, notes_of(error)) from None

    def _note(self, number: int, _: object) -> None:
        if number == signal.SIGINT:
            now_s = time.monotonic()
            if now_s - self._interrupted_s < _ONE_PRESS_S:
                return
            self._interrupted_s = now_s
        self._received.append(signal.Signals(number))

    def wait(self, seconds: float) -> None:
        """Wait until a signal arrives, SIGCHLD included, at most this long."""
        if self._poll.poll(seconds * 1000):
            self._ours.recv(4096)

    def ring(self) -> None:
        """Raise StopSignal if a signal to end has arrived."""
        number = self.take_signal()
        if number is not None:
            raise StopSignal(number)

    def take_signal(self) -> signal.Signals | None:
        """Take the signal that stops the job; None if none has come, or if it was taken before."""
        if not self._received or self.stopped_by is not None:
            return None
        self.stopped_by = self._received[0]
        self._received.clear()
        return self.stopped_by

    def stop(self, number: signal.Signals) -> None:
        """Note a signal that stopped the job on another host. This host's own copy of it is the same press."""
        self.stopped_by, self._interrupted_s = number, time.monotonic()
        self._received.clear()

    def is_urgent(self) -> bool:
        """Return whether not to wait for the ranks: a failed job is stopped, or Ctrl-C was pressed again.

        A second SIGTERM is no hurry: some schedulers send two.
        """
        return bool(self._received) if self.stopped_by is None else signal.SIGINT in self._received


# --- the end of ranks ------------------------------------------------------------------------------------------------


@contextmanager
def ended_on_error(
    ranks: Sequence[StartedRank],
    folder: str,
    grace_s: float,
    is_urgent: Callable[[], bool] = lambda: False,
    take_signal: Callable[[], signal.Signals | None] = lambda: None,
) -> Iterator[None]:
    """On any exception of the body, end all ranks in this list, and what they started; `folder` is that of their run.

    SIGTERM comes first, or the signal of a StopSignal; then, after at most `grace_s` seconds, SIGKILL, or earlier if
    `is_urgent` says so. But if `take_signal` returns another signal then, they get that one, and the time once more.
    """

    def started() -> list[int]:
        pids = {rank.process.pid for rank in ranks if rank.process.returncode is None}  # others' ids may be reused
        return [pid for pid in guardian.of_ranks(pids, folder) if pid not in pids]

    try:
        yield
    except BaseException as error:
        number: signal.Signals | None = error.number if isinstance(error, StopSignal) else signal.SIGTERM
        try:
            while number is not None:
                groups = {rank.process.pid for rank in ranks}
                for rank in ranks:
                    rank.signal(number)
                guardian.ask([pid for pid in started() if _group_of(pid) not in groups], number)
                deadline_s = time.monotonic() + grace_s
                running_after(ranks, grace_s, is_urgent)
                # Below a shell, the training program is what the rank started: it has the grace period, too.
                while time.monotonic() < deadline_s and not is_urgent() and started():
                    time.sleep(LOOK_S)
                number = take_signal()
        finally:  # a second Ctrl-C continues here at once
            for rank in ranks:
                rank.signal(signal.SIGKILL)
            left = running_after(ranks, DEATH_S)
            guardian.kill_after(time.monotonic(), started)
            if left:
                # For example because the kernel waits for a device.
                where = "see: cat /proc/PID/stack"
                error.add_note(f"{names_of(left)}: still there {DEATH_S} s after SIGKILL; {where}")
        raise
    finally:
        for rank in ranks:
            rank.close()


@contextmanager
def guarded(folder: str) -> Iterator[None]:
    """Keep a guardian during the block: if this process is killed, it ends what ranks of this run started.

    Its environment is empty, so that nothing takes it for a process of a rank in which this launcher runs. Raises
    NumapinError if it cannot be started.
    """
    environ = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}  # Python may need it
    # Only the launcher has the other end of the guardian's stdin, so the kernel closes it when the launcher ends. Until
    # then the guardian is a shell, which starts in 1 ms, or a Python (10 ms) in containers without one.
    code = f"import os; os.read(0, 1); {shim.FIND_NUMAPIN}; from numapin.launcher.guardian import main; main()"
    command = [sys.executable, "-I", "-S", "-c", code, str(os.getpid()), folder, *map(str, lock_of(folder))]
    if os.path.exists("/bin/sh"):
        command = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh", *command]
    process = None
    try:
        with signals.kept_from_children(signal.valid_signals()):
            try:
                process = subprocess.Popen(
                    command,
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=lock_of(folder),
                    cwd="/",  # it keeps no file system busy
                    start_new_session=True,
                )
            except OSError as error:
                raise NumapinError(f"the guardian of the ranks cannot be started: {error}", START_HINT) from None
        yield
    finally:
        if process is not None:
            with process:  # the end of this block closes the pipe
                process.kill()


def _group_of(pid: int) -> int | None:
    """Return a process's group, None if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def running_after(
    ranks: Sequence[StartedRank], seconds: float, is_urgent: Callable[[], bool] = lambda: False
) -> list[StartedRank]:
    """Wait at most this long for the ranks to end; return those that are still running."""
    deadline_s = time.monotonic() + seconds
    while True:
        for rank in ranks:
            rank.look()
        running = [rank for rank in ranks if rank.status is None]
        if not running or time.monotonic() > deadline_s or is_urgent():
            return running
        time.sleep(LOOK_S / 5)


def notes_of(error: BaseException) -> str:
    """Return which ranks did not end, "" if all did."""
    return "; ".join(getattr(error, "__notes__", ()))


def names_of(ranks: Sequence[StartedRank]) -> str:
    """Return text such as "ranks 0-1 (pid 100 101)"."""
    pids = " ".join(str(rank.process.pid) for rank in ranks)
    return f"{listed('rank', [rank.local_rank for rank in ranks])} (pid {pids})"
