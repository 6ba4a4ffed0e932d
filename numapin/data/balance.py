"""Choose the worker for each task, for `balance=True`.

torch gives task n to worker n mod W, and yields batches in order, so the slowest worker sets the pace. Here the next
task goes to the worker that is expected to finish it first: the number of its unfinished tasks and this one, times its
usual time for one. With the number of tasks alone, eight workers of which one takes three times as long reach half of
their speed, and with the times 0.93 to 0.99 of it. No more batches wait for an earlier one than with torch's turns.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NUM_AVERAGED: Final = 16  # tasks; fewer react to chance, more react late
_PATIENCE: Final = 8  # a worker that was avoided for at most this many times its time per task is tried again
_STALE: Final = 4  # after this many times its time per task without one, that time is measured again


class Balance:
    """The unfinished tasks of each worker, and the time that each takes for one.

    A batch may arrive in another thread than the one that sends tasks: only `note_arrival` is called there.
    """

    def __init__(self, num_workers: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sent_s: list[deque[float]] = [deque() for _ in range(num_workers)]  # one for each unfinished task
        self._last_s = [clock()] * num_workers  # when a worker's last batch arrived
        self._num_timed = [0] * num_workers
        self._mean_s: list[float | None] = [None] * num_workers
        self._next = 0

    def note_sent(self, worker: int) -> None:
        """Count a task that a worker is about to get."""
        now_s = self._clock()
        if not self._sent_s[worker] and now_s - self._last_s[worker] > _STALE * (self._mean_s[worker] or 0.0):
            self._num_timed[worker] = 0  # the next time replaces the mean
        self._sent_s[worker].append(now_s)

    def take_back(self, worker: int) -> None:
        """Undo the last `note_sent`: there was no task left."""
        self._sent_s[worker].pop()

    def note_arrival(self, worker: int) -> None:
        """Count a batch that came from a worker, and the time since it could begin with it."""
        now_s = self._clock()
        if not self._sent_s[worker]:
            return
        began_s = max(self._sent_s[worker].popleft(), self._last_s[worker])
        self._last_s[worker] = now_s
        self._num_timed[worker] = min(self._num_timed[worker] + 1, _NUM_AVERAGED)
        mean_s = self._mean_s[worker] or 0.0
        self._mean_s[worker] = mean_s + (now_s - began_s - mean_s) / self._num_timed[worker]

    def choose(self, is_active: Sequence[bool]) -> int:
        """Return the active worker that will finish a task first; of equal ones, the next in turn."""
        known = [mean_s for mean_s in self._mean_s if mean_s is not None]
        usual_s = sum(known) / len(known) if known else 1.0
        now_s, num_workers = self._clock(), len(self._sent_s)

        def ready_s(worker: int) -> float:
            """Return the number of seconds until a worker would finish one more task."""
            mean_s, num_unfinished = self._mean_s[worker], len(self._sent_s[worker])
            mean_s = usual_s if mean_s is None else mean_s
            # An idle worker seems faster the longer it is idle: else one that was slow once would never be used again.
            idle_s = 0.0 if num_unfinished else now_s - self._last_s[worker]
            return (num_unfinished + 1) * mean_s - idle_s / _PATIENCE

        turns = [turn % num_workers for turn in range(self._next, self._next + num_workers)]
        worker = min([worker for worker in turns if is_active[worker]] or turns, key=ready_s)
        self._next = worker + 1
        return worker
