"""The rank's pool of slots and a worker's end of it, together in one process."""

from __future__ import annotations

import gc
import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from numapin.base.cpu_set import CpuSet
from numapin.data.locality import Locality
from numapin.data.slots.handover import Handover
from numapin.data.slots.pool import Pool, PoolSpec
from numapin.data.wire.message import Head, decode
from numapin.data.worker.packing import Packer
from numapin.data.worker.slots import WorkerSlots

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Locality(nodes=CpuSet({0}), cpus=CpuSet(), memory=None, num_machine_nodes=1, reason="a test")
MB = 1 << 20


class Bench:
    """A pool and its workers, all here."""

    def __init__(self, num_workers: int = 1, **changes: object) -> None:
        self.told: list[str] = []
        spec = {
            "num_workers": num_workers,
            "prefetch": 2,
            "locality": HERE,
            "device": 0,
            "driver": None,
            "reader": lambda: None,
            "budget_bytes": lambda: None,
            "report": self.told.append,
        }
        self.pool = Pool(PoolSpec(**(spec | changes)))  # type: ignore[arg-type]
        self.descriptors = [Handover(child_sends=False) for _ in range(num_workers)]
        slots = [WorkerSlots(self.pool.arrivals, HERE, serial=number) for number in range(num_workers)]
        self.packers = [Packer(own, worker=n, pins=False, moves=False) for n, own in enumerate(slots)]
        self.num = 0

    def batch(self, num_bytes: int, worker: int = 0, value: int = 1) -> tuple[Head, memoryview | None]:
        """Give a worker a task, have it make a batch, and return how that arrives."""
        self.pool.reclaim()
        grant = self.pool.grant(worker, lambda number, fd: not self.descriptors[worker].send(number, fd))
        self.packers[worker].accept(grant, self.descriptors[worker])
        tensor = self.packers[worker].allocate(torch.uint8, (num_bytes,))
        assert tensor is not None
        tensor.fill_(value)
        message = self.packers[worker].pack(self.num, tensor)
        self.num += 1
        del tensor
        head, _body = decode(message)
        assert head is not None
        return head, self.pool.lend(head)[0]

    def close(self) -> None:
        self.pool.close()
        for end in self.descriptors:
            end.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Return a pool with one worker."""
    with closing(Bench()) as bench:
        yield bench


def test_first_batch_makes_a_slot_and_the_second_uses_it(bench: Bench) -> None:
    """A slot is made once; the next batch is written into it."""
    head, view = bench.batch(MB)
    assert head.parts[0].is_new
    assert view is not None
    assert bytes(view[:4]) == b"\1\1\1\1"
    del view
    head, view = bench.batch(MB, value=2)
    assert head.miss is None
    assert view is not None
    assert bytes(view[-4:]) == b"\2\2\2\2"
    assert len(bench.pool.slots) == 1


def test_kept_batch_is_not_overwritten(bench: Bench) -> None:
    """A batch that the loop keeps has its memory for itself."""
    _, kept = bench.batch(MB, value=7)
    for value in range(20):
        bench.batch(MB, value=value)
    assert kept is not None
    assert set(bytes(kept)) == {7}
    assert len(bench.pool.slots) == 2


def test_outlier_leaves_memory(bench: Bench) -> None:
    """A batch that is far larger than the others takes its memory with it."""
    for _ in range(20):
        bench.batch(MB)
    bench.batch(200 * MB)
    for _ in range(10):
        bench.batch(MB)
    assert sum(slot.num_bytes for slot in bench.pool.slots) < 4 * MB


def test_growing_sizes_leave_no_small_slots(bench: Bench) -> None:
    """Sizes may grow for ever; slots that are too small go."""
    for size in range(1, 64):
        bench.batch(size * MB // 4)
    assert len(bench.pool.slots) < 6


def test_slots_go_to_other_workers_once_clean() -> None:
    """A worker without a slot gets one of a worker that has several, once that one refers to it no more."""
    with closing(Bench(2)) as bench:
        held = [bench.batch(MB, worker=0) for _ in range(3)]
        del held
        bench.batch(MB, worker=0)
        head, _ = bench.batch(MB, worker=1)
        assert head.miss is None
        assert len(bench.pool.slots) == 3


def test_slot_that_a_worker_keeps_is_not_written(bench: Bench) -> None:
    """What a collate_fn keeps of an earlier batch stays as it was."""
    packer = bench.packers[0]
    kept = packer.allocate(torch.uint8, (MB,))
    assert kept is not None
    kept.fill_(9)
    head, _ = decode(packer.pack(0, kept))
    assert head is not None
    bench.pool.lend(head)
    for value in range(10):
        bench.batch(MB, value=value)
    assert bool((kept == 9).all())


def test_kept_batches_hold_no_descriptors() -> None:
    """A batch that outlives its loader keeps its memory, and nothing else."""
    before = len(os.listdir("/proc/self/fd"))
    bench = Bench()
    kept = [bench.batch(MB, value=n)[1] for n in range(5)]
    bench.close()
    bench.packers.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert [view[0] for view in kept if view is not None] == [0, 1, 2, 3, 4]
