"""Memory in the worker: batches that a collate function keeps, drops or shares must be correct, as with torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import numapin
from tests.contract.datasets import Made, Rows, cached, row
from tests.contract.describe import Described, assert_same_batches, describe
from tests.contract.seam import MOST_KEPT
from tests.contract.test_ownership import DATASET, SIZE, expected
from tests.contract.watching import TORCH, LoaderClass, reused
from tests.data.loopback import num_mapped


def hoarding() -> Callable[[list[Any]], Any]:
    kept: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        kept[:] = [*kept[-3:], default_collate(rows)]
        return kept[-1], kept[0]

    return collate


def viewing() -> Callable[[list[Any]], Any]:
    kept: list[torch.Tensor] = []

    def collate(rows: list[Any]) -> Any:
        kept.append(default_collate(rows)["x"])
        del kept[1:-1]
        return kept[-1], kept[0][:2, 7]

    return collate


def dropping(rows: list[Any]) -> Any:
    return [default_collate(rows) for _ in range(3)][1]


def beside_shared(rows: list[Any]) -> Any:
    return default_collate(rows) | {"shared": row(1).share_memory_()}


@pytest.mark.parametrize("make", [hoarding, viewing])
def test_batches_kept_in_the_worker(loader_class: LoaderClass, make: Callable[[], Any]) -> None:
    """Batches that a collate function keeps are still correct when sent later, also when slots are reused."""

    def delivered(kind: LoaderClass) -> list[Described]:
        return [describe(batch) for batch in kind(DATASET, batch_size=4, num_workers=2, collate_fn=make())]

    theirs = delivered(TORCH)
    for _ in range(2):
        assert_same_batches(delivered(loader_class), theirs)


@pytest.mark.parametrize("collate", [dropping, beside_shared])
def test_batches_that_are_not_sent(loader_class: LoaderClass, collate: Callable[[list[Any]], Any]) -> None:
    """Batches that are collated and dropped, or sent torch's way, return their slots, which later batches use."""

    def in_first_half(rows: list[Any]) -> Any:
        return (collate if rows[0]["index"] < SIZE // 2 else default_collate)(rows)

    loader = loader_class(DATASET, batch_size=4, num_workers=2, collate_fn=in_first_half)
    before = None
    for number, batch in enumerate(loader):
        assert torch.equal(batch["x"], expected(number)), number
        if number == SIZE // 4 // 2 + 6:  # this many may have been collated ahead
            before = reused(loader)
    assert before is None or reused(loader) - before >= 16, loader.stats()  # type: ignore[operator, attr-defined]


def forking(rows: list[Any]) -> torch.Tensor:
    """Collate here while a forked child, which writes later, collates other rows, e.g. to write them to a log."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            other = default_collate([row(-1)] * len(rows))
            os.close(write_end)
            os.read(read_end, 1)
            other.fill_(-5)
        finally:
            os._exit(0)
    batch: torch.Tensor = default_collate([each["x"] for each in rows])
    os.close(write_end)
    os.close(read_end)
    os.waitpid(pid, 0)
    return batch


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_of_a_worker_that_collates(loader_class: LoaderClass) -> None:
    """A process that the user forks in a worker does not write into the worker's batch."""
    loader = loader_class(Rows(80), batch_size=4, num_workers=1, collate_fn=forking)
    for number, batch in enumerate(loader):
        assert torch.equal(batch, expected(number)), number


class Logging:
    def __init__(self) -> None:
        self.num_calls = self.child = self.go = 0

    def __call__(self, rows: list[Any]) -> Any:
        self.num_calls += 1
        batch = default_collate([each["x"] for each in rows])
        if self.num_calls == 8:
            self.child, self.go = compare_later(batch)
        if self.num_calls == 20:
            os.close(self.go)
            return batch, os.waitpid(self.child, 0)[1]
        return batch, None


def compare_later(batch: torch.Tensor) -> tuple[int, int]:
    before = batch.clone()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0 if bool((batch == before).all()) else 1)  # no call that may start threads
    os.close(read_end)
    return pid, write_end


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_of_a_worker_that_reads(loader_class: LoaderClass) -> None:
    """A process that the user forks in a worker can read a batch for as long as it lives; whichever worker is next."""
    loader = loader_class(DATASET, batch_size=4, num_workers=2, collate_fn=Logging())
    found = [judged for number, (batch, judged) in enumerate(loader) if torch.equal(batch, expected(number))]
    assert len(found) == SIZE // 4
    assert [judged for judged in found if judged is not None] == [0, 0]


def test_memory_that_the_user_shares(loader_class: LoaderClass) -> None:
    """A tensor in torch's shared memory is sent as itself, not as a copy: the dataset sees the rank's writes."""
    written = []
    for kind in (loader_class, TORCH):
        memory = torch.stack([row(i) for i in range(40)]).share_memory_()
        for batch in kind(Made(memory.__getitem__, 40, pause_s=0.002), batch_size=None, num_workers=1):
            batch.fill_(-7)
        written.append(int((memory == -7).sum()))
    assert written[0] == written[1] == 40 * 64 * 64


def test_a_dataset_that_keeps_collated_samples_keeps_no_slots() -> None:
    """Only the loader's own collate_fn writes into slots: those of a sample would stay with it."""
    make = cached(lambda index: default_collate([torch.full((1024,), float(index))] * 8), 16)
    with numapin.DataLoader(Made(make, 64), batch_size=4, num_workers=1) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, 0, 0].tolist() == [float((4 * number + sample) % 16) for sample in range(4)]
        assert loader.stats().slots_made <= 5
        assert loader.stats().bytes == 16 * 4 * 8 * 1024 * 4


def test_a_dataset_that_keeps_whole_batches_keeps_few_slots(
    own_class: LoaderClass, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker whose dataset keeps more batches than slots are worth gets no more of them, with one warning."""

    def make(index: int) -> tuple[torch.Tensor, int]:
        return keep(index), num_mapped()

    inherited = num_mapped()
    keep = cached(lambda index: default_collate([torch.full((4096,), float(index))] * 2), 60)
    loader = own_class(Made(make, 120), batch_size=None, num_workers=1)
    mapped = []
    for number, (batch, num) in enumerate(loader):
        assert batch.unique().tolist() == [float(number % 60)]
        mapped.append(num)
    stats = loader.stats()  # type: ignore[attr-defined]
    assert max(mapped) - inherited <= MOST_KEPT + 8
    assert (stats.hits, stats.misses, stats.bytes) == (120, {}, 120 * 2 * 4096 * 4)
    assert stats.slots_made <= MOST_KEPT + 8
    assert capfd.readouterr().err.count("your dataset or collate_fn keeps batch memory") == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_slots_of_batches_dropped_between_epochs_serve_the_next(*, persistent: bool) -> None:
    """No worker makes a slot while one that it made is free."""
    with numapin.DataLoader(DATASET, batch_size=4, num_workers=2, persistent_workers=persistent) as loader:
        assert len(list(loader)) == loader.stats().slots == SIZE // 4  # all kept at once, then dropped
        for number, batch in enumerate(loader):
            assert torch.equal(batch["x"], expected(number))
        assert loader.stats().slots_made == SIZE // 4
