"""Iterators that are abandoned or forgotten leave no memory, descriptors, processes or threads behind."""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from numapin.errors import NumapinError
from tests.contract.datasets import Made, Raise, Rows, rows_with
from tests.contract.seam import queues as channel
from tests.data.loopback import num_open
from tests.garbage import left_by
from tests.waiting import joins_in_vain, wait_until

if TYPE_CHECKING:
    from tests.contract.watching import LoaderClass

DATASET = Rows(400, delay_s=0.0005)
PATIENCE_S = 120.0


def holdings() -> dict[str, int]:
    """Count what this process holds, without cycles."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
        "children": len(multiprocessing.active_children()),
        "threads": threading.active_count(),
        "shared maps": Path("/proc/self/maps").read_text().count(" rw-s "),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def grown(before: dict[str, int]) -> list[str]:
    """Return what has grown, after waiting for threads that are about to end."""
    found: list[str] = []

    def is_as_before() -> bool:
        found[:] = [name for name, number in holdings().items() if number > before[name]]
        return not found

    wait_until(is_as_before, limit_s=PATIENCE_S)
    return found


def abandon(loader: Any, num_batches: int) -> None:
    list(itertools.islice(loader, num_batches))


def warmed(loader_class: LoaderClass) -> dict[str, int]:
    abandon(loader_class(DATASET, batch_size=4, num_workers=2), 10)
    time.sleep(0.1)
    return holdings()


@pytest.mark.parametrize("persistent", [False, True])
def test_abandoned_many_times(loader_class: LoaderClass, monkeypatch: pytest.MonkeyPatch, *, persistent: bool) -> None:
    """Thirty epochs of one loader, each abandoned after some batches, hold no more than ten."""
    loader = loader_class(DATASET, batch_size=4, num_workers=1, persistent_workers=persistent)
    taken = itertools.cycle([0, 1, 3, 9, 24])
    for _ in range(10):
        abandon(loader, next(taken))
    list(loader)
    time.sleep(0.1)
    held, memory = holdings(), resident_bytes()
    in_vain = joins_in_vain(monkeypatch)
    for _ in range(20):
        abandon(loader, next(taken))
    assert not grown(held)
    assert in_vain == []
    assert resident_bytes() - memory < 16 << 20


@pytest.mark.parametrize(("num_batches", "persistent"), [(2, False), (40, True), (100, False)])
def test_forgotten(
    loader_class: LoaderClass, monkeypatch: pytest.MonkeyPatch, num_batches: int, *, persistent: bool
) -> None:
    """A loader that is deleted at any point of an epoch, without close(), leaves nothing behind. Its workers end."""
    before = warmed(loader_class)
    loader = loader_class(DATASET, batch_size=4, num_workers=2, persistent_workers=persistent)
    iterator: Any = iter(loader)
    workers = iterator._workers
    list(itertools.islice(iterator, num_batches))
    assert all(worker.is_alive() for worker in workers) or num_batches == 100
    in_vain = joins_in_vain(monkeypatch)
    del loader, iterator, workers
    assert not grown(before)
    assert in_vain == []


def closed(loader: Any) -> list[Any]:
    """Take all batches twice; then keep some, and close the loader in the middle."""
    list(loader)
    with loader:
        return [str(loader.stats()), *list(loader)[-2:], *itertools.islice(loader, 3)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "balance": True, "cast": torch.float16},
        {"num_workers": 0},
    ],
    ids=["persistent", "balanced", "local"],
)
def test_no_garbage_in_cycles(own_class: LoaderClass, options: dict[str, Any]) -> None:
    """A loader goes with its last reference, also if batches are kept: a forked child has nothing to collect."""
    dataset, uses = Rows(60), (partial(abandon, num_batches=60), partial(abandon, num_batches=3), closed)
    assert left_by(lambda: [use(own_class(dataset, batch_size=4, **options)) for use in uses]) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_garbage_in_any_order(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch, *, persistent: bool) -> None:
    """An iterator in a cycle may be collected after what it refers to, as in free-threaded Python. It ends its workers.

    With the GIL, older objects are collected first, so the pipes are made before the iterator.
    """
    before = warmed(own_class)
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    gc.collect()
    problems: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    monkeypatch.setattr(channel, "Pipe", lambda duplex: pipes.pop())  # noqa: ARG005
    gc.disable()
    try:
        loader = own_class(DATASET, batch_size=4, num_workers=2, persistent_workers=persistent)
        loader.sampler.owner = loader  # type: ignore[attr-defined] # a user's sampler may refer to its loader
        iterator = iter(loader)
        next(iterator)
        cycle: list[object] = [loader, iterator]
        cycle.append(cycle)
        del loader, iterator, cycle
        gc.collect()
    finally:
        gc.enable()
    assert not pipes
    assert not problems
    assert not grown(before)


def test_after_an_error(own_class: LoaderClass, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator that raised is in a cycle with its exception; once collected, its workers end when they are asked to.

    torch waits for each of its own in vain, for five seconds, because the collector has taken its queues apart by then.
    """
    loader = own_class(rows_with(Raise(ValueError), at=3, size=400), num_workers=2)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="is broken"):
            list(loader)
        in_vain = joins_in_vain(monkeypatch)
        gc.collect()
    finally:
        gc.enable()
    assert in_vain == []
    assert not multiprocessing.active_children()


def test_close(own_class: LoaderClass) -> None:
    """close() and the end of a with block end persistent workers; the loader can be iterated again afterwards."""
    made: Any = own_class(DATASET, batch_size=4, num_workers=2, persistent_workers=True)
    with made as loader:
        assert loader is made
        first = [batch["index"].tolist() for batch in loader]
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()
    assert [batch["index"].tolist() for batch in loader] == first
    loader.close()
    loader.close()
    assert not multiprocessing.active_children()
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(NumapinError, match="closed in the middle of this epoch"):
        next(batches)


def test_small_batches_that_are_kept_take_no_descriptors(own_class: LoaderClass) -> None:
    """Batches of a few KiB travel without a slot, so that a loop may keep thousands of them."""

    def make(index: int) -> Any:
        values = torch.full((4096 if index % 40 == 39 else 512,), float(index))
        return values, values[100:], np.full(200, index)

    loader = own_class(Made(make, 1000), batch_size=None, num_workers=2)
    kept = list(loader)
    num_descriptors = num_open()
    for number, (values, view, array) in enumerate(kept):
        assert values.unique().tolist() == view.unique().tolist() == np.unique(array).tolist() == [number]
        view.fill_(-1)
        assert values[100:].unique().tolist() == [-1]
        array[:] = 0
    assert num_descriptors <= 2 * 1000 // 40  # of the large ones, and of small ones that followed in their slots
    assert (loader.stats().hits, loader.stats().misses) == (1000, {})  # type: ignore[attr-defined]
