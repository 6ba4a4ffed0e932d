"""Larger batches get larger slots, and loops that keep more batches get more; unused older slots are freed."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import torch

from numapin.data.slots.control import OwnSlots
from numapin.data.wire.message import Miss
from tests.data.loopback import (
    Loopback,
    build,
    gpu,
    held_bytes,
    lent,
    made,
    make_head,
    wait_until_built,
)

if TYPE_CHECKING:
    import pytest

    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE
NUM_SLOTS: Final = 5  # of `make_spec`: one worker that is asked for one batch ahead, and four to spare
CONTROL_BYTES: Final = PAGE
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


class TestGrowth:
    """Generations of slots, one after the other."""

    def test_a_larger_batch_brings_a_new_generation(self) -> None:
        """The new slots are a quarter larger than needed, and come after the older ones."""
        with made() as ring:
            build(ring, 4 * PAGE)
            build(ring, 8 * PAGE)
            assert (ring.slot_bytes, ring.num_slots) == (10 * PAGE, 2 * NUM_SLOTS)
            old, new = (ring.control.generation(number) for number in (0, 1))
            assert new.offset >= old.offset + old.num_bytes
            assert new.first_slot == old.first_slot + old.num_slots

    def test_the_old_generation_retires(self, fake_cuda: FakeCuda) -> None:
        """It is unlocked and freed once every worker uses the new one and nothing refers to the old."""
        with made(**gpu()) as ring:
            build(ring, 4 * PAGE)
            loop = Loopback(ring)
            kept = lent(loop, BATCH)
            build(ring, 8 * PAGE)
            ring.reclaim()
            assert fake_cuda.registered_bytes() == NUM_SLOTS * 14 * PAGE  # the worker has not been there yet
            lent(loop, BATCH)
            ring.reclaim()
            assert fake_cuda.registered_bytes() == NUM_SLOTS * 14 * PAGE  # `kept` is there
            assert torch.equal(kept, BATCH)
            del kept
            ring.reclaim()
            assert fake_cuda.registered_bytes() == ring.pinned_bytes == NUM_SLOTS * 10 * PAGE
            assert held_bytes(ring) == CONTROL_BYTES + NUM_SLOTS * 10 * PAGE
            assert ring.num_slots == NUM_SLOTS
            assert torch.equal(lent(loop, BATCH), BATCH)

    def test_all_workers_must_have_moved_on(self) -> None:
        """A worker that has not sent a batch from the new generation may still take a slot of the old one."""
        with made(num_workers=2, prefetch=0) as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            build(ring, 2 * PAGE)
            lent(loop, BATCH)
            ring.reclaim()
            assert len(ring._memories) == 2

    def test_a_worker_that_comes_after_a_retirement_finds_the_new_slots(self) -> None:
        """The next epoch's workers never touch memory that was freed."""
        with made() as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            build(ring, 2 * PAGE)
            lent(loop, BATCH)
            ring.reclaim()
            assert list(ring._memories) == [1]
            ring.recover()
            late = OwnSlots(ring.control, 0)
            found = late.take()
            assert found is not None
            assert (late.generation, found[0] >= NUM_SLOTS) == (1, True)

    def test_it_may_come_while_an_epoch_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A separate thread publishes the new slots, at any moment of the loop."""
        with made() as ring:
            build(ring, PAGE)
            state = ring.control.state

            def look_slowly(slot: int) -> int:
                build(ring, 2 * PAGE)
                return state(slot)

            monkeypatch.setattr(ring.control, "state", look_slowly)
            ring.recover()

    def test_a_loop_that_keeps_batches_gets_more_slots(self) -> None:
        """Their number doubles twice, but not because one worker was once short of a slot."""
        with made() as ring:
            build(ring, PAGE)
            counts = []
            for _ in range(10):
                ring.want(make_head(wanted_bytes=PAGE, miss=Miss.NO_SLOT))
                ring.prepare()
                wait_until_built(ring)
                newest = ring.control.generation(ring.control.num_generations - 1)
                counts.append((newest.num_slots, newest.slot_bytes))
            more = [(NUM_SLOTS, PAGE)] * 1 + [(2 * NUM_SLOTS, PAGE)] * 2 + [(4 * NUM_SLOTS, PAGE)] * 7
            assert counts == more

    def test_other_misses_bring_no_slots(self) -> None:
        """More slots would not help."""
        with made() as ring:
            build(ring, PAGE)
            for miss in (Miss.KEPT, Miss.STARTING, Miss.UNSUPPORTED, Miss.SHARED) * 5:
                ring.want(make_head(wanted_bytes=PAGE, miss=miss))
                ring.prepare()
            assert (ring._builder, ring.num_slots) == (None, NUM_SLOTS)

    def test_more_slots_are_never_fewer(self) -> None:
        """If the budget has no room for twice as many, the loop keeps its slots."""
        left = [7 * PAGE, 2 * PAGE]
        with made(budget_bytes=lambda: left.pop(0)) as ring:
            build(ring, PAGE)
            for _ in range(2):
                ring.want(make_head(wanted_bytes=PAGE, miss=Miss.NO_SLOT))
            ring.prepare()
            wait_until_built(ring)
            own, taken = OwnSlots(ring.control, 0), []
            while found := own.take():
                taken.append(found)
            assert len(taken) >= NUM_SLOTS

    def test_what_a_worker_keeps_is_not_given_back(self) -> None:
        """A collate_fn that caches a batch finds it unchanged after larger slots were made."""
        with made() as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            cached = loop.packer.allocate(torch.float32, (1000,))
            assert cached is not None
            assert torch.equal(lent(loop, cached.copy_(BATCH)), BATCH)
            build(ring, 2 * PAGE)
            for _ in range(3):
                lent(loop, BATCH)
                ring.reclaim()
            assert list(ring._memories) == [0, 1]
            assert torch.equal(cached, BATCH)
            del cached
            lent(loop, BATCH)
            ring.reclaim()
            assert list(ring._memories) == [1]

    def test_growth_ends(self) -> None:
        """After eight generations, larger batches travel outside the ring; nothing breaks."""
        with made() as ring:
            for power in range(10):
                build(ring, PAGE << power)
            assert ring.control.num_generations == 8
            assert Loopback(ring).post(torch.zeros(PAGE << 8))[0].miss == Miss.TOO_LARGE
