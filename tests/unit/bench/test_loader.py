"""What measuring processes do: samples that are recognized, the warm-up, and the measured window."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.unit.bench.seam import CASES, InMemory, _warm_up, _window, loader, require_intact


@pytest.mark.parametrize("name", ["1MB", "38MB"])
def test_samples_can_be_recognized(name: str) -> None:
    """A batch passes the check, unless a row begins or ends with another sample's code; samples repeat after 512.

    The dataset's pickle is small: a spawned worker makes its own samples.
    """
    case = replace(CASES[name], batch_size=3)
    dataset = InMemory(case)
    batch = default_collate([dataset[index] for index in (5, 510, 515)])
    require_intact(batch, case)
    assert (batch[0].nbytes, batch[1].tolist()) == (case.batch_bytes, [5, 510, 515])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert torch.equal(dataset[7][0], pickle.loads(pickled)[7][0])  # noqa: S301 - our own
    for end in (0, -1):
        wrong = [batch[0].clone(), batch[1]]
        wrong[0][1].view(-1)[end] += 1
        with pytest.raises(ValueError, match="a batch differs from the dataset"):
            require_intact(wrong, case)


def test_a_dataset_that_writes_whole_batches() -> None:
    """Its batches have the samples' codes, too."""
    case = replace(CASES["1MB"], num_workers=1, batch_size=3)
    source = loader.build("numapin-buffer", case, None)
    first, second = itertools.islice(source.batches, 2)
    require_intact(second, case)
    assert (first[1].tolist(), second[1].tolist()) == ([0, 1, 2], [3, 4, 5])
    source.close()


def test_work_under_the_gil() -> None:
    """A sample of such a case takes 0.1 ms of CPU time."""
    dataset = InMemory(replace(CASES["1MB"], holds_gil=True))
    found_s = []
    for _ in range(5):  # the least: a host takes CPU time away from a virtual machine, which counts as the thread's
        start_s = time.thread_time()
        for index in range(100):
            dataset[index]
        found_s.append(time.thread_time() - start_s)
    assert 0.01 <= min(found_s) < 0.1


def _stats(hits: int, slots_made: int = 0, pinned_bytes: int = 0, **misses: int) -> SimpleNamespace:
    return SimpleNamespace(hits=hits, slots_made=slots_made, pinned_bytes=pinned_bytes, misses=misses)


@pytest.mark.parametrize(
    ("stats", "num_taken"),
    [
        (lambda taken: _stats(taken, slots_made=min(taken, 10)), 16),
        (lambda taken: _stats(taken, pinned_bytes=min(taken, 10)), 16),
        (lambda taken: _stats(max(0, taken - 10), no_memory=min(taken, 10)), 16),
        (lambda _taken: None, 4),
    ],
    ids=["made", "pinned", "missed", "torch's"],
)
def test_warm_up_lasts_until_slots_are_only_reused(stats: Callable[[int], Any], num_taken: int) -> None:
    """The warm-up takes the rounds in which slots are made or pinned or missed, and one more."""
    taken = list[None]()
    _warm_up(lambda: taken.append(None), lambda: stats(len(taken)), seconds=0, num_outstanding=4)
    assert len(taken) == num_taken


def test_window_is_long_enough_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window has at least the batches and the seconds; the time of `end` counts."""
    now_s = 0.0

    def last(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = SimpleNamespace(perf_counter=lambda: now_s, thread_time=lambda: now_s / 4)
    monkeypatch.setattr(loader, "time", clock)
    window = _window(lambda: last(0.125), seconds=0, num_batches=7, end=lambda: last(2))
    assert (window.num_batches, window.wall_s, window.cpu_s) == (7, 2.875, 2.875 / 4)
    window = _window(lambda: last(0.125), seconds=1, num_batches=1)
    assert (window.num_batches, window.wall_s) == (8, 1)
