"""The choice of the worker for each task, on a simulated clock: nothing here depends on the machine's speed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pytest

from tests.unit.data.seam import Balance

# Batches per second of eight processes that did the same work on one machine: cores are not equal.
UNEQUAL: Final = [1 / rate for rate in (197, 210, 225, 235, 240, 250, 260, 327)]


@dataclass
class Simulation:
    """Workers that take `task_s[w]` for a task, and a loop that takes batches in order as soon as they are there.

    As in torch's iterator, each batch that the loop takes lets one more task be sent.
    """

    task_s: Sequence[float]
    prefetch: int = 2
    spread: float = 0.0
    now_s: float = 0.0
    most_waiting: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(1)  # noqa: S311 - a simulation
        self._queues: list[list[int]] = [[] for _ in self.task_s]
        self._running: list[tuple[float, int, int]] = []  # end, worker, task

    def share_of_full_speed(
        self, choose: Callable[[], int], balance: Balance | None, *, num_tasks: int = 2000
    ) -> float:
        sent, taken, there = itertools.count(), 0, set[int]()

        def send() -> None:
            worker = choose()
            if balance is not None:
                balance.note_sent(worker)
            self._queues[worker].append(next(sent))
            self._begin(worker)

        for _ in range(self.prefetch * len(self.task_s)):
            send()
        while taken < num_tasks:
            self.now_s, worker, task = heapq.heappop(self._running)
            self._queues[worker].remove(task)
            there.add(task)
            self.most_waiting = max(self.most_waiting, len(there))
            if balance is not None:
                balance.note_arrival(worker)
            self._begin(worker)
            while taken in there:
                there.remove(taken)
                taken += 1
                send()
        return num_tasks / self.now_s / sum(1 / task_s for task_s in self.task_s)

    def _begin(self, worker: int) -> None:
        if self._queues[worker] and all(worker != other for _end, other, _task in self._running):
            task_s = self.task_s[worker] * self._chance.lognormvariate(-(self.spread**2) / 2, self.spread)
            heapq.heappush(self._running, (self.now_s + task_s, worker, self._queues[worker][0]))


def balanced(simulation: Simulation) -> float:
    balance = Balance(len(simulation.task_s), clock=lambda: simulation.now_s)
    return simulation.share_of_full_speed(lambda: balance.choose([True] * len(simulation.task_s)), balance)


@pytest.mark.parametrize(
    ("task_s", "spread", "at_least", "torchs_at_most"),
    [
        (UNEQUAL, 0.0, 0.98, 0.85),
        ([3.0] + [1.0] * 7, 0.3, 0.9, 0.4),
        ([40.0] + [1.0] * 7, 0.0, 0.75, 0.05),  # nearly as if that worker did not exist
        ([1.0] * 8, 0.0, 0.99, 1.01),
    ],
    ids=["cores", "one-slow-uneven-batches", "one-useless", "equal"],
)
def test_a_slow_worker_does_not_set_the_pace(
    task_s: list[float], spread: float, at_least: float, torchs_at_most: float
) -> None:
    """The loop is nearly as fast as the workers together, where torch's turns are as slow as the slowest."""
    in_turn = partial(next, itertools.cycle(range(len(task_s))))
    assert Simulation(task_s, spread=spread).share_of_full_speed(in_turn, None) <= torchs_at_most
    assert balanced(Simulation(task_s, spread=spread)) >= at_least


def test_a_worker_that_was_slow_once_is_used_again() -> None:
    """A pause of a hundred tasks' time costs a worker some tasks, not all later ones."""
    now_s = 0.0
    balance = Balance(2, clock=lambda: now_s)
    for worker, task_s in ((0, 1.0), (1, 100.0)):
        balance.note_sent(worker)
        now_s += task_s
        balance.note_arrival(worker)
    chosen = []
    for _ in range(2000):
        chosen.append(balance.choose([True, True]))
        balance.note_sent(chosen[-1])
        now_s += 1
        balance.note_arrival(chosen[-1])
    assert chosen.index(1) > 100
    assert chosen[1000:].count(1) > 100


def test_nothing_is_known_yet() -> None:
    """The first tasks are handed out in turn, as torch does, to active workers; if there is none, any is named."""
    balance = Balance(3)
    chosen = []
    for _ in range(6):
        chosen.append(balance.choose([True] * 3))
        balance.note_sent(chosen[-1])
    assert chosen == [0, 1, 2, 0, 1, 2]
    balance.note_sent(1)
    assert {balance.choose([False, True, False]) for _ in range(4)} == {1}  # although others have fewer tasks
    assert balance.choose([False] * 3) in range(3)
