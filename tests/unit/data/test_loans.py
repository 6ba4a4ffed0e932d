"""Slots lent to the loop: until the last reference is gone, and no copy reads them. The GPU's driver is a stand-in."""

from __future__ import annotations

import _thread
import gc
import mmap
import operator
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import pytest
import torch

from tests.data.child import in_forked_child
from tests.data.loopback import WAIT_S, Loopback, gpu, lent, loopback, num_mapped, num_open
from tests.unit.data.seam import pool as pool_module
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE
NUM_KEPT: Final = 8
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


@pytest.fixture
def pinned(fake_cuda: FakeCuda) -> Iterator[Loopback]:
    """Give a pool with NUM_KEPT free slots that are pinned for the stand-in's GPU."""
    assert fake_cuda.registered_bytes() == 0
    with loopback(**gpu()) as made:
        pin(made, NUM_KEPT)
        assert fake_cuda.registered_bytes() == NUM_KEPT * PAGE
        yield made


def pin(loop: Loopback, num_slots: int) -> None:
    """Make slots for BATCH, and wait until they are pinned."""
    while sum(slot.is_settled for slot in loop.pool.slots) < num_slots:
        kept = [lent(loop, BATCH) for _ in range(num_slots)]
        del kept
        loop.settle()


class TestLending:
    """Slots on loan."""

    def test_references_may_end_on_any_thread(self, loop: Loopback) -> None:
        """References may end in any threads, even all at once; each slot is freed once."""
        for _ in range(20):
            batches = [[lent(loop, BATCH)] for _ in range(NUM_KEPT)]
            with ThreadPoolExecutor(NUM_KEPT) as threads:
                list(threads.map(list.clear, batches))
            assert (loop.num_on_loan(), loop.num_free()) == (0, len(loop.pool.slots))

    def test_ctrl_c_while_a_batch_is_freed_is_not_lost(self, loop: Loopback) -> None:
        """It reaches the loop: nothing of Python's, where exceptions are ignored, runs when a batch is freed."""

        class Pressing(weakref.ref[Callable[[], None]]):
            press = staticmethod(_thread.interrupt_main)

        for _ in range(3):
            trigger = lambda: None  # noqa: E731 - anything that goes at once
            pressing = Pressing(trigger, operator.methodcaller("press"))  # no line of Python's sees the Ctrl-C first
            goes_first = [lent(loop, BATCH), trigger]  # a list lets go of its last object first
            del trigger
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it is raised after the first statement
                del goes_first
                [None for _ in range(9)]  # here Python looks for signals
            assert pressing() is None
            assert (loop.num_on_loan(), loop.num_free()) == (0, 1)

    def test_slots_go_round_last_released_first(self, loop: Loopback) -> None:
        """A loop that keeps nothing reuses one slot, which stays in the cache, even if it once kept more."""
        kept = [lent(loop, BATCH) for _ in range(3)]
        del kept
        assert len({lent(loop, BATCH).data_ptr() for _ in range(20)}) == 1

    def test_what_dead_workers_held_is_taken_back(self, loop: Loopback) -> None:
        """Slots that the loop still refers to stay on loan; the others are free for the next workers."""
        kept = [lent(loop, BATCH) for _ in range(4)]
        del kept[1:]
        for _ in range(2):
            loop.begin()
            loop._is_busy[0] = False  # killed with the slot
        assert loop.num_free() == 1
        loop.pool.recover()
        assert (loop.num_free(), loop.num_on_loan()) == (3, 1)
        loop.start_workers()
        assert not lent(loop, BATCH * 0).any()
        assert torch.equal(kept[0], BATCH)


def test_a_pageable_slot_is_free_at_once(fake_cuda: FakeCuda) -> None:
    """A copy from pageable memory has ended when its call returns, so no event is recorded."""
    fake_cuda.hold_events()
    with loopback(**gpu(), budget_bytes=lambda: 0) as loop:
        for _ in range(5):
            lent(loop, BATCH)
            loop.settle()
        assert (len(loop.pool.slots), fake_cuda.get("recorded")) == (1, 0)


def test_a_loop_that_runs_far_ahead_waits_for_the_gpu(pinned: Loopback, fake_cuda: FakeCuda) -> None:
    """With more than four slots behind copies it waits, but not for long: the GPU may be waiting for the loop."""
    fake_cuda.hold_events()
    batches = [lent(pinned, BATCH) for _ in range(5)]
    batches.clear()
    began_s = time.monotonic()
    pinned.pool.reclaim()
    assert time.monotonic() - began_s > 0.04
    assert len(pinned.pool.quarantine) == 5
    fake_cuda.set(hold_events=0)
    pinned.pool.reclaim()
    assert pinned.num_on_loan() == 0


def test_a_loop_goes_on_as_soon_as_the_gpu_does(
    pinned: Loopback, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks often, and does not wait for the rest of its time."""
    monkeypatch.setattr(pool_module, "_CATCH_UP_S", 60)
    monkeypatch.setattr(time, "sleep", lambda _: fake_cuda.pass_events())
    fake_cuda.hold_events()
    batches = [lent(pinned, BATCH) for _ in range(5)]
    batches.clear()
    assert pinned.num_on_loan() == 0


def test_the_finalizers_of_a_forked_child_free_nothing(loop: Loopback) -> None:
    """The end of the last reference in the child frees nothing; the parent's batch stays as it is."""
    batches = [lent(loop, BATCH)]

    def drop() -> bool:
        batches.clear()
        gc.collect()
        loop.pool.reclaim()
        return loop.num_free() == 0

    assert in_forked_child(drop)
    assert (loop.num_free(), loop.num_on_loan()) == (0, 1)
    assert not lent(loop, BATCH * 0).any()
    assert torch.equal(batches[0], BATCH)


def test_the_close_of_a_forked_child_closes_nothing(pinned: Loopback, fake_cuda: FakeCuda) -> None:
    """Pinned memory and slots belong to the parent."""
    kept = lent(pinned, BATCH)

    def close() -> bool:
        pinned.pool.close()
        return num_open() == NUM_KEPT == len(pinned.pool.slots)

    assert in_forked_child(close)
    assert (fake_cuda.registered_bytes(), num_open()) == (NUM_KEPT * PAGE, NUM_KEPT)
    assert torch.equal(lent(pinned, -BATCH), -BATCH)
    assert torch.equal(kept, BATCH)


def test_a_batch_of_a_closed_pool_that_ends_in_a_forked_child(pinned: Loopback, fake_cuda: FakeCuda) -> None:
    """Its memory stays pinned for the parent, and the child neither calls the driver nor starts a thread for it."""
    kept = [lent(pinned, BATCH)]
    pinned.pool.close()

    def drop() -> bool:
        kept.clear()
        gc.collect()
        return not any(thread.name.startswith("numapin") for thread in threading.enumerate())

    assert in_forked_child(drop)
    assert fake_cuda.registered_bytes() == PAGE
    assert torch.equal(kept[0], BATCH)
    kept.clear()
    assert wait_until(lambda: fake_cuda.registered_bytes() == 0, limit_s=WAIT_S)


def test_a_slot_that_is_of_no_use_goes_with_its_batch(loop: Loopback) -> None:
    """Until the last reference is gone the batch is intact, then nothing is left of it."""
    for _ in range(20):
        lent(loop, BATCH)
    gc.collect()  # of other tests' garbage
    before = num_mapped()
    outlier = lent(loop, torch.arange(100_000.0))
    view = outlier[7:9]
    del outlier
    assert loop.num_on_loan() == 1
    assert view.tolist() == [7, 8]
    del view
    loop.begin()  # the worker hears of it
    loop.pool.reclaim()
    assert (num_mapped(), num_open()) == (before, 1)


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_was_never_received_goes(*, is_closed: bool) -> None:
    """With the workers, and not mistaken for a batch of the next ones, or with the pool."""
    with loopback() as loop:
        loop.post(BATCH)
        head, _ = loop.post(BATCH)
        loop.post(BATCH)
        assert loop.pool.lend(head)[0] is not None  # the first descriptor was received on the way
        if not is_closed:
            loop.pool.recover()
            assert num_open() == 1
            loop.start_workers()
            assert torch.equal(lent(loop, -BATCH), -BATCH)
    assert num_open() == 0
