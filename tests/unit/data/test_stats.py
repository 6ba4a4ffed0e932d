"""The data path of a loader: which pool each of its iterators gets, its counts, and what is reported about it."""

from __future__ import annotations

import os
from typing import Final

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.loopback import Loopback, lent, make_head, num_open
from tests.unit.data.seam import NO_SLOT, Counts, DataPath, Miss, Stats

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
HEAD: Final = make_head(slot=1, slot_bytes=100, num_bytes=100)
BUSY: Final = Stats(
    batches=1200,
    bytes=1200 * (38 << 20),
    hits=1180,
    misses={"a tensor that only torch can send": 20},
    wait_s_per_batch=0.00042,
    wait_share=0.031,
    transfer_gbps=52.6,
    slots=24,
    slots_made=24,
    slot_bytes=40 << 20,
    slots_on_loan=3,
    pinned_bytes=24 * (40 << 20),
    nodes=(1,),
    share_on_node=1.0,
    placement="planned by numapin run: GPU 3 is on node 1",
    notes=("libstores.so cannot be loaded, so large batches use a third more memory bandwidth; see: numapin doctor",),
)


def test_arrivals() -> None:
    """A batch in a slot is a hit, even in a new one; one in part is a miss; one without memory is neither."""
    counts = Counts()
    heads = [HEAD._replace(made_bytes=PAGE), HEAD, HEAD, make_head()]
    heads += [HEAD._replace(miss=miss) for miss in (Miss.NO_MEMORY, Miss.UNSUPPORTED, Miss.NO_MEMORY)]
    for head in heads:
        counts.note_arrival(head)
    assert (counts.hits, counts.slots_made, counts.num_bytes) == (3, 1, 600)
    assert dict(counts.misses) == {"the kernel had no memory for a slot": 2, "a tensor that only torch can send": 1}


def test_stats_of_waits(path: DataPath) -> None:
    """The mean is over all batches, the share over the steps between them; unknown ones are None."""
    facts = path.stats().as_dict()
    assert {name for name, fact in facts.items() if fact} == {"placement"}
    unknown = {"wait_s_per_batch", "wait_share", "transfer_gbps", "share_on_node"}
    assert {name for name, fact in facts.items() if fact is None} == unknown
    path.counts.note_step(waited_s=30.0, stepped_s=None)
    before = path.stats()
    for _ in range(3):
        path.counts.note_step(waited_s=2.0, stepped_s=8.0)
    assert (before.wait_s_per_batch, before.wait_share) == (30.0, None)
    after = path.stats()
    assert (after.batches, after.wait_s_per_batch, after.wait_share) == (4, 9.0, 0.25)


def test_stats_of_slots(path: DataPath) -> None:
    """They are counted while they exist; nothing is pinned without a GPU."""
    lane = path.lane(DataLoader(range(8), num_workers=2), pins=False)  # type: ignore[arg-type]
    assert lane.pool is not None
    loop = Loopback(lane.pool)
    small, large = (lent(loop, torch.zeros(num_pages * PAGE, dtype=torch.uint8)) for num_pages in (1, 3))
    del large  # no batch has come since
    stats = path.stats()
    assert (stats.slots, stats.slot_bytes, stats.slots_on_loan, stats.pinned_bytes) == (2, 3 * PAGE, 1, 0)
    lane.end(workers_are_gone=True)
    path.close()
    assert path.stats().slots == 0
    assert not small.any()


def test_text() -> None:
    """Each fact has a line with its unit, and long ones are wrapped at 80 columns."""
    assert (
        str(BUSY)
        == """\
batches     1,200, 38.0 MiB each
in slots    1,180; 20: a tensor that only torch can send
waiting     420 us per batch, 3% of the loop's time
to the GPU  52.6 GB/s
slots       24 of up to 40.0 MiB, 3 in use, 960.0 MiB pinned
node        1 (planned by numapin run: GPU 3 is on node 1); 100.0% of the pages
            there
note        libstores.so cannot be loaded, so large batches use a third more
            memory bandwidth; see: numapin doctor"""
    )


LOADER: Final[DataLoader[int]] = DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("are_gone", [True, False])
def test_a_pool_is_used_again_if_its_workers_are_gone(path: DataPath, *, are_gone: bool) -> None:
    """One that lives may still write to its slots, so the next iterator gets others."""
    first = path.lane(LOADER, pins=False)
    pool = first.pool
    assert pool is not None
    first.end(workers_are_gone=are_gone)
    second = path.lane(LOADER, pins=False)
    assert (second.pool is pool) is are_gone
    second.end(workers_are_gone=True)


def test_what_a_workers_child_may_read_though_the_batch_never_arrives(path: DataPath) -> None:
    """The loop is left while the message waits in the pipe: the slot that it names goes to no other worker."""
    lane = path.lane(LOADER, pins=False)
    assert lane.pool is not None
    loop = Loopback(lane.pool)
    lent(loop, torch.arange(1000.0))
    packer = loop.begin()
    batch = packer.allocate(torch.float32, (1000,))
    loop.workers[0].note_fork()
    lane.results.send(loop.pack(batch))
    (slot,) = loop.pool.slots
    assert not slot.is_inherited
    lane.end(workers_are_gone=True)
    assert slot.is_inherited
    assert loop.pool.grant(0).slot == NO_SLOT


@pytest.mark.parametrize("step", ["forget", "close"])
def test_ctrl_c_at_the_end_of_an_epoch(path: DataPath, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The queue is closed and the pool given back; not used again unless all messages in the pipe were read."""
    lane = path.lane(LOADER, pins=False)
    pool, results, close = lane.pool, lane.results, lane.results.close
    assert pool is not None
    loop = Loopback(pool)
    lent(loop, torch.arange(1000.0))

    def interrupt(*_: object) -> None:
        if step == "close":
            close()
        raise KeyboardInterrupt

    monkeypatch.setattr(results, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        lane.end(workers_are_gone=True)
    assert results._reader.closed
    assert num_open() == (0 if step == "forget" else 1)
    following = path.lane(LOADER, pins=False)
    assert (following.pool is pool) is (step == "close")
    following.end(workers_are_gone=True)
