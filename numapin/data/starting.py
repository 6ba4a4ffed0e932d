"""Starts an iterator's workers, and starts those again whose fork hung. Edge.

Comes in: what torch's iterator asks of a multiprocessing context, and its processes. Goes out: our queues, processes.

A forked child has the locks that other threads held, and nobody in it lets go of them: it can hang before its first
line of Python (`forks`). Nobody but the child's parent can notice, and nothing is lost: what such a worker was given to
do still lies in its queue.
"""

from __future__ import annotations

import mmap
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from numapin.data import forks
from numapin.data.wire.queues import TaskQueue
from numapin.data.worker import setup
from numapin.system.proc import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from numapin.data.wire.queues import ResultQueue

PATIENCE_S: Final = 5.0  # as often as torch looks after its workers
_MAX_HANGS: Final = 4
_ASLEEP, _STOPPED = "S", "T"
_STOPS_IN_S: Final = 1.0  # it takes microseconds


def _run_worker(page: mmap.mmap | None, number: int, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run a worker, in its process; a forked one first writes to its byte of the shared page."""
    if page is not None:
        page[number] = 1
    setup.begin(target, arguments)


class Context:
    """A multiprocessing context whose queues are ours, and whose workers can be started again.

    torch's iterator makes the queue for results first.
    """

    def __init__(self, base: Any, results: ResultQueue, *, num_workers: int) -> None:  # noqa: ANN401 - a context
        self._base, self._queues = base, iter([results])
        self._page = mmap.mmap(-1, num_workers) if base.get_start_method() == "fork" else None
        self._arguments: list[tuple[Any, ...]] = []
        self._num_hangs = [0] * num_workers
        self._started_s = [0.0] * num_workers

    def Queue(self) -> Any:  # noqa: N802, ANN401 - multiprocessing's name
        """Return the next queue."""
        return next(self._queues, None) or TaskQueue()

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:  # noqa: N802
        """Return the next worker's process, not yet started."""
        arguments = (self._page, len(self._arguments), target, args)
        self._started_s[len(self._arguments)] = time.monotonic()
        self._arguments.append(arguments)
        return self._base.Process(target=_run_worker, args=arguments)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - Event
        """Return what is not ours."""
        return getattr(self._base, name)

    def unbegun(self, processes: Sequence[BaseProcess]) -> list[int]:
        """Return the numbers of workers that have not run a line of ours."""
        return [number for number in range(len(processes)) if not self._has_begun(number)]

    def hung(self, processes: Sequence[BaseProcess]) -> list[int]:
        """Return the numbers of those that sleep, too. One that is well can look like that just after its start."""
        return [number for number in self.unbegun(processes) if state_of(processes[number].pid or 0) == _ASLEEP]

    def is_due(self, number: int) -> bool:
        """Return whether a hung worker has had its time, twice as long after each start: a handler may take some."""
        return time.monotonic() - self._started_s[number] >= PATIENCE_S * (1 << self._num_hangs[number])

    def start_again(self, processes: list[Any], number: int) -> bool:
        """End a hung worker; return whether one that was started anew took its place.

        One that has begun after all goes on. Raises RuntimeError for a worker that has hung too often.
        """
        if not self.end(processes[number], number):
            return False
        self._num_hangs[number] += 1
        if self._num_hangs[number] == _MAX_HANGS:
            raise RuntimeError(
                f"DataLoader worker {number} hung in its fork {_MAX_HANGS} times: a lock is held there that nobody "
                'gives back; start workers otherwise: multiprocessing_context="forkserver"'
            )
        again = self._base.Process(target=_run_worker, args=self._arguments[number], daemon=True)
        self._started_s[number] = time.monotonic()
        again.start()
        processes[number] = again
        return True

    def end(self, process: BaseProcess, number: int) -> bool:
        """Kill a worker, unless it has begun; return whether it was killed. It holds nothing that others wait for."""
        pid = process.pid
        if pid is None or not _runs_below_us(pid):
            return False
        try:
            os.kill(pid, signal.SIGSTOP)  # it must not begin between the look at its byte and the kill
            if not _has_stopped(pid) or self._has_begun(number):
                return False
            process.kill()
        finally:
            with suppress(ProcessLookupError):  # a handler of SIGCHLD reaped it just now
                os.kill(pid, signal.SIGCONT)  # also where a handler raised: nobody ends what is stopped
        process.join()
        return True

    def _has_begun(self, number: int) -> bool:
        return self._page is None or self._page[number] == 1


def _runs_below_us(pid: int) -> bool:
    """Return whether it is a child of ours that has not ended: the number of one that was reaped may be another's."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _has_stopped(pid: int) -> bool:
    """Return whether a process that got SIGSTOP stops, which a SIGCONT from elsewhere may prevent."""
    deadline_s = time.monotonic() + _STOPS_IN_S
    while (state := state_of(pid)) not in {_STOPPED, None} and time.monotonic() < deadline_s:
        time.sleep(0.0002)
    return state == _STOPPED


def explain(number: int) -> str:
    """Return what to tell of a worker that was started again."""
    text = f"worker {number} hung in its fork, before it ran anything, and was started again"
    if forks.may_hang(sys.version_info[:3]):
        return (
            f"{text}: Python {platform.python_version()} forgets a lock there ({forks.ISSUE}); update it to "
            f'{forks.MENDED} or later, or say multiprocessing_context="forkserver"'
        )
    return f'{text}: a library holds a lock there; it cannot happen with multiprocessing_context="forkserver"'
