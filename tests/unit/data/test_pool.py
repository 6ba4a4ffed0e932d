"""The rank's pool of slots and the workers' ends of it, together in one process. The GPU's driver is a stand-in."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.data.child import in_forked_child
from tests.data.loopback import (
    WAIT_S,
    Loopback,
    gpu,
    lent,
    loopback,
    make_spec,
    num_mapped,
    num_open,
)
from tests.unit.data import seam
from tests.unit.data.seam import Miss, Pool, Slot, memory, placement, unused_slots_hidden
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


@pytest.fixture
def two() -> Iterator[Loopback]:
    """Give a pool with two workers."""
    with loopback(num_workers=2) as made:
        yield made


def pages(num_pages: int, value: int = 0) -> torch.Tensor:
    """Return a batch of this size."""
    return torch.full((num_pages * PAGE,), value, dtype=torch.uint8)


def numbers(loop: Loopback) -> list[int]:
    """Return the numbers of the slots that may be used again."""
    return [slot.number for slot in loop.pool.slots]


def owners_of(loop: Loopback) -> list[weakref.ref[torch.Tensor]]:
    """Return weak references to what keeps each slot's memory mapped in the rank."""
    return [weakref.ref(slot.owner) for slot in loop.pool.slots]


@pytest.mark.parametrize("is_old", [False, True])
def test_pages_of_a_slot_that_is_handed_down(loop: Loopback, monkeypatch: pytest.MonkeyPatch, *, is_old: bool) -> None:
    """The next worker faults in what it writes if its kernel, before 5.14, could not do so for the whole slot."""
    populate, touched = memory.populate, []

    def refuse(address: int, num_bytes: int, advice: int) -> None:
        if is_old:
            raise OSError(errno.EINVAL, "before 5.14")
        populate(address, num_bytes, advice)

    lent(loop, pages(4))
    loop.num_free()
    loop.pool.recover()
    monkeypatch.setattr(memory, "populate", refuse)
    loop.start_workers()
    monkeypatch.setattr(placement, "touch", lambda _, num_bytes: touched.append(num_bytes))
    assert set(lent(loop, pages(3, 7)).tolist()) == {7}
    assert len(loop.pool.slots) == 1
    assert touched == ([3 * PAGE] if is_old else [])


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
    """Several workers share the slots."""

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

    def test_new_workers_take_over_the_slots_of_their_number(self, two: Loopback) -> None:
        """Those of batches that are in use too: they may end before the workers do."""
        kept = [lent(two, BATCH, worker) for worker in (0, 1, 1)]
        before = {slot.number: slot.worker for slot in two.pool.slots}
        two.pool.recover()
        two.start_workers()
        kept.clear()
        for worker in (0, 1, 1):
            kept.append(two.send(-BATCH, worker))
            head = kept[-1].head
            assert (head.made_bytes, before[head.slot]) == (0, worker)
        assert {slot.number: slot.worker for slot in two.pool.slots} == before

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

    def test_a_fork_while_another_thread_starts_workers(self, loop: Loopback) -> None:
        """The child of a user's thread may read the batches in use, so their slots go to no worker."""
        kept = [lent(loop, BATCH)]
        is_starting, may_end = threading.Event(), threading.Event()

        def start_workers() -> None:
            with unused_slots_hidden():
                is_starting.set()
                may_end.wait(WAIT_S)

        thread = threading.Thread(target=start_workers)
        thread.start()
        assert is_starting.wait(WAIT_S)
        assert in_forked_child(lambda: torch.equal(kept[0], BATCH))
        may_end.set()
        thread.join()
        kept.clear()
        assert loop.num_free() == 0


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


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), KeyboardInterrupt()], ids=repr)
def test_a_slot_that_cannot_be_mapped(loop: Loopback, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Whether there is no memory or Ctrl-C comes, nothing is left of it, and its worker forgets it."""

    def refuse(*_: object) -> None:
        raise error

    head, _ = loop.post(BATCH)
    with monkeypatch.context() as patch:
        patch.setattr(seam.pool, "map_memfd", refuse)
        with pytest.raises(type(error)):
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
    """The end of a pool."""

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
            kept = [lent(loop, BATCH) for _ in range(2)]
            del kept
            loop.settle()
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

    def test_an_interrupted_close_loses_no_batch(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C while free slots are unpinned: the memory of a batch that is in use goes with its last reference."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        properties = gpu()
        loop = Loopback(Pool(make_spec(**properties)))
        batches = [lent(loop, BATCH) for _ in range(2)]
        loop.settle()
        address = batches[0].data_ptr()
        del batches[1]
        loop.pool.reclaim()
        with monkeypatch.context() as patch:
            patch.setattr(properties["driver"], "unregister", interrupt)
            with pytest.raises(KeyboardInterrupt):
                loop.pool.close()
        assert fake_cuda.is_registered(address)
        batches.clear()
        assert wait_until(lambda: not fake_cuda.is_registered(address), limit_s=WAIT_S)

    def test_an_interrupted_slot_is_not_lost(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C while the descriptor of a slot is closed that a batch uses: its memory goes with the batch."""
        close = os.close

        def interrupt(descriptor: int) -> None:
            close(descriptor)
            raise KeyboardInterrupt

        loop = Loopback(Pool(make_spec(**gpu())))
        batches = [lent(loop, BATCH)]
        loop.settle()
        address = batches[0].data_ptr()
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", interrupt)
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
            kept = [lent(loop, BATCH) for _ in range(2)]
            del kept
            loop.settle()
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
