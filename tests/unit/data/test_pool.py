"""The rank's pool of slots, those lent to the loop, and the workers' ends, in one process. The driver is a stand-in."""

from __future__ import annotations

import _thread
import gc
import mmap
import operator
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.contract.datasets import Raise
from tests.data.loopback import (
    BATCH,
    WAIT_S,
    Loopback,
    gpu,
    in_forked_child,
    lent,
    loopback,
    make_spec,
    num_mapped,
    num_open,
)
from tests.unit.data import seam
from tests.unit.data.seam import Miss, Pool, Slot, placement, unused_slots_hidden
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE


@pytest.fixture
def two() -> Iterator[Loopback]:
    with loopback(num_workers=2) as made:
        yield made


def pages(num_pages: int, value: int = 0) -> torch.Tensor:
    return torch.full((num_pages * PAGE,), value, dtype=torch.uint8)


def numbers(loop: Loopback) -> list[int]:
    return [slot.number for slot in loop.pool.slots]


def owners_of(loop: Loopback) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(slot.owner) for slot in loop.pool.slots]


def test_slots_that_are_not_needed_any_more_go(loop: Loopback) -> None:
    """A loop that once kept many batches does not hold their memory for its life."""
    gc.collect()
    before = num_mapped()
    kept = [lent(loop, BATCH) for _ in range(20)]
    del kept
    for _ in range(200):
        lent(loop, BATCH)
    assert len(loop.pool.slots) <= 4
    assert num_open() == len(loop.pool.slots)
    gc.collect()
    assert num_mapped() <= before + 2 * len(loop.pool.slots)  # the worker has unmapped them, too


class TestWorkers:
    def test_a_slot_goes_to_no_other_worker(self, two: Loopback) -> None:
        """Another process could not see that something refers to it. A worker without a slot makes one."""
        kept = two.begin().allocate(torch.float32, (1000,))
        assert kept is not None
        batches = [lent(two, kept.copy_(BATCH)), lent(two, BATCH)]
        del batches
        assert two.num_free() == 2
        head = two.send(-BATCH, worker=1).head
        assert (head.miss, head.made_bytes, len(two.pool.slots)) == (None, PAGE, 3)
        assert torch.equal(kept, BATCH)

    def test_an_idle_worker_keeps_one_slot(self, two: Loopback) -> None:
        """A worker that seldom gets a task does not lose its slot to the count of the others."""
        lent(two, BATCH, worker=1)
        for _ in range(300):
            lent(two, BATCH)
        assert [slot.worker for slot in two.pool.slots] == [1, 0]
        assert not two.send(BATCH, worker=1).head.made_bytes

    def test_a_worker_that_has_all_tasks_gets_a_slot_for_each(self, two: Loopback) -> None:
        """With `balance`, a worker may have more tasks than its own share: it must not make slots beside free ones."""
        kept = [lent(two, BATCH) for _ in range(4)]
        kept.clear()
        two.pool.reclaim()
        granted = [two.pool.grant(0).slot for _ in range(4)]
        assert sorted(granted) == sorted(numbers(two))

    def test_workers_do_not_inherit_unused_slots(self, loop: Loopback) -> None:
        """Workers of any loader would hold memory that the rank gives back; what is lent they may read.

        A child that the user forked may start workers, too: it hides its own slots only.
        """
        with loopback() as other:
            kept = [lent(loop, BATCH) for _ in range(2)]
            addresses = [kept[1].data_ptr(), lent(other, BATCH).data_ptr()]
            del kept[1:]
            loop.pool.reclaim()  # but not the other one's

            def are_mapped() -> list[bool]:
                maps = Path("/proc/self/maps").read_text(encoding="ascii")
                return [f"{address:x}-" in maps for address in addresses]

            def start_worker() -> bool:
                with unused_slots_hidden():
                    return in_forked_child(lambda: all(are_mapped()))

            with unused_slots_hidden():
                assert in_forked_child(lambda: not any(are_mapped()) and torch.equal(kept[0], BATCH))
            assert in_forked_child(lambda: all(are_mapped()) and torch.equal(kept[0], BATCH))
            assert in_forked_child(start_worker)


def test_a_slots_descriptor_is_closed_once(loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after it was closed leaves no number behind, which another file may have by then."""
    loop.send(BATCH)
    (slot,) = loop.pool.slots
    numbers: list[int] = []

    def interrupted(fd: int) -> None:
        numbers.append(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slot.retire()
    slot.retire()
    assert slot.fd is None
    os.close(numbers.pop())
    assert numbers == []


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_slot_that_cannot_be_mapped(
    loop: Loopback, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Whether there is no memory or Ctrl-C comes, nothing is left of it, and its worker forgets it."""
    head, _ = loop.post(BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(seam.pool, "map_memfd", Raise(error))
        with pytest.raises(error):
            loop.pool.lend(head)
    loop.begin()
    assert (loop.pool.slots, num_open(), loop.workers[0]._mapped) == ((), 0, {})


@pytest.mark.parametrize(("prefetch", "num_slots"), [(2, 16), (100, 32)], ids=["a quarter", "half, for many tasks"])
def test_a_loop_may_keep_more_batches_than_files(
    monkeypatch: pytest.MonkeyPatch, prefetch: int, num_slots: int
) -> None:
    """Some of the files are slots, at most half of them; the oldest batches keep their memory only."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with loopback(prefetch=prefetch) as loop:
        kept = [lent(loop, BATCH + number) for number in range(100)]
        loop.pool.reclaim()
        assert num_open() == len(loop.pool.slots) == num_slots
        assert all(torch.equal(batch, BATCH + number) for number, batch in enumerate(kept))
        gc.collect()
        before = num_mapped()
        del kept[50:]
        loop.pool.reclaim()
        assert num_mapped() <= before - 50 + num_slots
        del kept
        assert torch.equal(lent(loop, -BATCH), -BATCH)


def test_batches_beyond_the_limit_stay_pinned_until_they_end(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool forgets their slots, which are unpinned once a batch is gone and no copy reads it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    before = placement.PINNED.total
    with loopback(**gpu()) as loop:
        kept = [lent(loop, BATCH + number) for number in range(40)]
        loop.pool.reclaim()
        assert len(loop.pool.slots) == 16
        assert wait_until(lambda: fake_cuda.registered_bytes() == 40 * PAGE, limit_s=WAIT_S)
        fake_cuda.hold_events()
        del kept[:24]
        assert all(torch.equal(batch, BATCH + number) for number, batch in enumerate(kept, 24))
        assert fake_cuda.registered_bytes() == 40 * PAGE
        fake_cuda.set(hold_events=0)
        assert wait_until(lambda: fake_cuda.registered_bytes() == 16 * PAGE, limit_s=WAIT_S)
        kept.clear()
        loop.pool.reclaim()
    assert wait_until(lambda: placement.PINNED.total == before, limit_s=WAIT_S)
    assert fake_cuda.registered_bytes() == 0


def test_without_memory_the_size_is_learned_all_the_same(loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on address space may forbid the first slot, whose size is unknown, and no other."""
    monkeypatch.setattr(seam.packing, "_UNKNOWN_BYTES", 1 << 49)
    assert loop.send(BATCH.clone()).head.miss == Miss.NO_MEMORY
    assert loop.send(BATCH.clone()).head.miss is None


class TestClosing:
    def test_it_may_be_closed_in_the_middle_of_itself(self, loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
        """A finalizer may call it while it runs."""
        lent(loop, BATCH)
        let_go = Slot.let_go

        def close_again(slot: Slot, driver: Any) -> None:
            loop.pool.close()
            let_go(slot, driver)

        loop.pool.reclaim()
        monkeypatch.setattr(Slot, "let_go", close_again)
        loop.pool.close()
        assert num_open() == 0

    def test_a_batch_outlives_the_pool(self, fake_cuda: FakeCuda) -> None:
        """Its memory stays pinned until the last reference is gone; the other slots do not wait for it."""
        with loopback(**gpu()) as loop:
            loop.pin(2)
            assert fake_cuda.registered_bytes() == 2 * PAGE
            batch, owners = lent(loop, BATCH), owners_of(loop)
        assert (fake_cuda.registered_bytes(), num_open()) == (PAGE, 0)
        assert torch.equal(batch, BATCH)
        del batch
        assert wait_until(lambda: not fake_cuda.registered_bytes(), limit_s=WAIT_S)
        assert wait_until(lambda: all(owner() is None for owner in owners), limit_s=WAIT_S)

    def test_a_batch_that_outlives_the_pool_keeps_no_other_slot(self, loop: Loopback) -> None:
        """Neither a free one nor one that a worker has: the batch refers to the pool."""
        batches = [lent(loop, BATCH) for _ in range(3)]
        batch = batches.pop()
        batches.clear()
        loop.pool.reclaim()
        loop.pool.grant(0)
        gc.collect()
        before = num_mapped()
        loop.pool.close()
        gc.collect()
        assert num_mapped() == before - 2
        assert torch.equal(batch, BATCH)

    @pytest.mark.parametrize("is_unpinning", [True, False])
    def test_an_interrupted_close_loses_no_batch(
        self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, is_unpinning: bool
    ) -> None:
        """Ctrl-C while a slot is unpinned, or its descriptor closed: a batch's memory goes with its last reference."""
        properties, close = gpu(), os.close

        def close_and_interrupt(descriptor: int) -> None:
            close(descriptor)
            raise KeyboardInterrupt

        loop = Loopback(Pool(make_spec(**properties)))
        batches = [lent(loop, BATCH) for _ in range(1 + is_unpinning)]
        loop.settle()
        address = batches[0].data_ptr()
        del batches[1:]
        loop.pool.reclaim()
        with monkeypatch.context() as patch:
            if is_unpinning:
                patch.setattr(properties["driver"], "unregister", Raise(KeyboardInterrupt))
            else:
                patch.setattr(os, "close", close_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                loop.pool.close()
        del loop
        gc.collect()
        assert fake_cuda.is_registered(address)
        batches.clear()
        assert wait_until(lambda: not fake_cuda.is_registered(address), limit_s=WAIT_S)

    def test_what_arrives_while_it_is_closed_is_let_go(self, loop: Loopback) -> None:
        """Another thread may open a batch at that moment: it is whole, and its slot goes with the last reference."""
        is_closed, loop.pool._is_closed = loop.pool._is_closed, True  # as if `close` had just begun
        batch = lent(loop, BATCH)
        loop.pool._is_closed = is_closed
        assert torch.equal(batch, BATCH)
        assert num_open() == 0
        (owner,) = owners_of(loop)
        loop.pool.close()
        assert owner() is not None
        del batch
        assert owner() is None

    def test_a_copy_outlives_the_pool(self, fake_cuda: FakeCuda) -> None:
        """Memory that the GPU may be reading is not unpinned, whether the loop has looked for it or not."""
        with loopback(**gpu()) as loop:
            loop.pin(2)
            fake_cuda.hold_events()
            one, other = lent(loop, BATCH), lent(loop, BATCH)
            owners = owners_of(loop)
            del one
            loop.pool.reclaim()
            assert len(loop.pool.quarantine) == 1
            recorded = fake_cuda.get("recorded")
            del other
        assert wait_until(lambda: fake_cuda.get("recorded") > recorded, limit_s=WAIT_S)  # the reclaiming thread's
        assert fake_cuda.registered_bytes() == 2 * PAGE
        assert all(owner() is not None for owner in owners)
        fake_cuda.set(hold_events=0)
        assert wait_until(lambda: not fake_cuda.registered_bytes(), limit_s=WAIT_S)
        assert wait_until(lambda: all(owner() is None for owner in owners), limit_s=WAIT_S)

    def test_the_last_references_may_end_while_it_is_closed(
        self, loop: Loopback, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On another thread, at any moment: each slot is let go."""
        kept = [lent(loop, BATCH) for _ in range(3)]
        owners = owners_of(loop)
        retire = Slot.retire

        def end_and_retire(slot: Slot) -> None:
            if kept:
                kept.pop()
            retire(slot)

        monkeypatch.setattr(Slot, "retire", end_and_retire)
        loop.pool.close()
        assert not kept
        assert all(owner() is None for owner in owners)


NUM_KEPT: Final = 8


@pytest.fixture
def pinned(fake_cuda: FakeCuda) -> Iterator[Loopback]:
    assert fake_cuda.registered_bytes() == 0
    with loopback(**gpu()) as made:
        made.pin(NUM_KEPT)
        assert fake_cuda.registered_bytes() == NUM_KEPT * PAGE
        yield made


class TestLending:
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
    monkeypatch.setattr(seam.pool, "_CATCH_UP_S", 60)
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
