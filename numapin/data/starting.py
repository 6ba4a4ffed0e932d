"""Starts an iterator's workers, and starts those again whose fork hung. Edge.

Comes in: what torch's iterator asks of a multiprocessing context, and its processes. Goes out: our queues, processes.

A forked child has the locks that other threads held, and nobody in it lets go of them: it can hang before its first
line of Python (`forks`). Nobody but the child's parent can notice, and nothing is lost: what such a worker was given to
do still lies in its queue.
"""

from __future__ import annotations

import mmap
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from numapin import forks
from numapin.data import worker
from numapin.data.queues import TaskQueue
from numapin.observe import is_asleep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

    from numapin.data.queues import ResultQueue

MAX_STARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """How a worker is started; `page` is shared with a forked one, which writes to its byte as its first act."""

    page: mmap.mmap | None
    number: int
    target: Callable[..., None]
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        """Run the worker, in its process."""
        if self.page is not None:
            self.page[self.number] = 1
        worker.begin(self.target, self.arguments)


class Context:
    """A multiprocessing context whose queues are ours: torch's iterator makes the one for results first."""

    def __init__(self, base: Any, results: ResultQueue, *, num_workers: int) -> None:  # noqa: ANN401 - a context
        self._base, self._queues = base, iter([results])
        self._page = mmap.mmap(-1, num_workers) if base.get_start_method() == "fork" else None
        self._starts: list[_Start] = []
        self._num_starts = [1] * num_workers

    def Queue(self) -> Any:  # noqa: N802, ANN401 - multiprocessing's name
        """Return the next queue."""
        return next(self._queues, None) or TaskQueue()

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:  # noqa: N802
        """Return the next worker's process, not yet started."""
        start = _Start(page=self._page, number=len(self._starts), target=target, arguments=args)
        self._starts.append(start)
        return self._base.Process(target=start)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - Event
        """Return what is not ours."""
        return getattr(self._base, name)

    def hung(self, processes: Sequence[BaseProcess]) -> list[int]:
        """Return the numbers of workers that sleep and have not run a line of ours. It takes time to get that far."""
        return [
            number
            for number, process in enumerate(processes)
            if not self._has_begun(number) and is_asleep(process.pid or 0)
        ]

    def start_again(self, processes: list[Any], number: int) -> None:
        """Kill a hung worker and put one that was started anew in its place.

        One that has begun after all stays dead, since a task may be gone with it. Raises RuntimeError for a worker that
        has hung too often.
        """
        processes[number].kill()
        processes[number].join()
        if self._has_begun(number):
            return
        if self._num_starts[number] == MAX_STARTS:
            raise RuntimeError(
                f"DataLoader worker {number} hung in its fork {MAX_STARTS} times: a lock is held there that nobody "
                'gives back; start workers otherwise: multiprocessing_context="forkserver"'
            )
        self._num_starts[number] += 1
        processes[number] = self._base.Process(target=self._starts[number])
        processes[number].daemon = True
        processes[number].start()

    def _has_begun(self, number: int) -> bool:
        return self._page is None or self._page[number] == 1


def explain(number: int) -> str:
    """Return what to tell of a worker that was started again."""
    text = f"worker {number} hung in its fork, before it ran anything, and was started again"
    if forks.may_hang():
        return (
            f"{text}: Python {platform.python_version()} forgets a lock there ({forks.THREAD}); update it to "
            f'{forks.MENDED} or later, or say multiprocessing_context="forkserver"'
        )
    return f'{text}: a library holds a lock there; it cannot happen with multiprocessing_context="forkserver"'
