"""Slots lent to the loop: until the last reference is gone, and no copy reads them. The GPU's driver is a stand-in."""

from __future__ import annotations

import gc
import mmap
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import torch

from numapin.data.opening.capture import watch_captures
from numapin.data.wire.message import Miss
from tests.data.loopback import (
    Loopback,
    build,
    gpu,
    is_open,
    lent,
    made,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE
NUM_SLOTS: Final = 5  # of `make_spec`: one worker that is asked for one batch ahead, and four to spare
CONTROL_BYTES: Final = PAGE
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


class TestLending:
    """Slots on loan."""

    @pytest.fixture
    def loop(self) -> Iterator[Loopback]:
        """Give a ring with slots of one page that only this process reads."""
        with made() as ring:
            build(ring, PAGE)
            yield Loopback(ring)

    @pytest.mark.parametrize(
        "refer",
        [
            lambda tensor: tensor,
            lambda tensor: tensor[3:5],
            lambda tensor: tensor.view(10, 100).t()[4],
            lambda tensor: tensor.untyped_storage(),
            lambda tensor: tensor.numpy()[::7],
            lambda tensor: memoryview(tensor.numpy())[2:3],
            lambda tensor: (tensor * torch.ones(1000, requires_grad=True)).sum(),
        ],
        ids=["tensor", "view", "view of a view", "storage", "array", "buffer", "graph"],
    )
    def test_it_ends_with_the_last_reference(self, loop: Loopback, refer: Callable[[torch.Tensor], object]) -> None:
        """The slot is free with the last reference of any kind, including autograd's saved tensors, and not before."""
        kept = refer(lent(loop, BATCH))
        gc.collect()
        loop.ring.reclaim()
        assert (loop.ring.num_on_loan, loop.num_free()) == (1, NUM_SLOTS - 1)
        del kept
        loop.ring.reclaim()
        assert (loop.ring.num_on_loan, loop.num_free()) == (0, NUM_SLOTS)

    def test_references_may_end_on_any_thread(self, loop: Loopback) -> None:
        """References may end in any threads, even all at once; each slot is freed once."""
        from concurrent.futures import ThreadPoolExecutor

        for _ in range(20):
            batches = [[lent(loop, BATCH)] for _ in range(NUM_SLOTS)]
            with ThreadPoolExecutor(NUM_SLOTS) as threads:
                list(threads.map(list.clear, batches))
            loop.ring.reclaim()
            assert (loop.ring.num_on_loan, loop.num_free()) == (0, NUM_SLOTS)

    def test_the_loop_never_sees_a_batch_change(self, loop: Loopback) -> None:
        """If more batches are kept than there are slots, later ones travel outside, and none is overwritten."""
        kept = []
        for number in range(3 * NUM_SLOTS):
            loop.ring.reclaim()
            kept.append(lent(loop, torch.full((1000,), float(number))))
        assert [batch.unique().tolist() for batch in kept] == [[float(number)] for number in range(len(kept))]
        assert loop.post(BATCH)[0].miss == Miss.NO_SLOT

    def test_slots_go_round_last_released_first(self, loop: Loopback) -> None:
        """A loop that keeps nothing reuses one slot, which stays in the cache."""
        used = set()
        for _ in range(20):
            loop.ring.reclaim()
            used.add(lent(loop, BATCH).data_ptr())
        assert len(used) == 1

    def test_poison_overwrites_a_released_slot(self) -> None:
        """Code that still reads the slot sees 0xA5, and only that slot's bytes change."""
        with made(poison=True) as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            one, other = lent(loop, BATCH), lent(loop, BATCH)
            address = one.data_ptr()
            del one
            ring.reclaim()
            start = address - ring._memories[0].address
            assert set(ring._memories[0].mapped[start : start + PAGE]) == {0xA5}
            assert torch.equal(other, BATCH)

    def test_without_poison_nothing_is_written(self, loop: Loopback) -> None:
        """Slots are not overwritten by default: it is for debugging and costs a write of every slot."""
        at = lent(loop, BATCH).data_ptr() - loop.ring._memories[0].address
        loop.ring.reclaim()
        assert bytes(loop.ring._memories[0].mapped[at : at + 4000]) == BATCH.numpy().tobytes()

    def test_what_dead_workers_held_is_taken_back(self, loop: Loopback) -> None:
        """Slots that the loop still refers to stay on loan."""
        kept = lent(loop, BATCH)
        for _ in range(2):
            loop.slots.take()
        loop.ring.recover()
        assert (loop.num_free(), loop.ring.num_on_loan) == (NUM_SLOTS - 1, 1)
        assert torch.equal(kept, BATCH)


class TestCopies:
    """Slots without references that a copy of the user's may still read."""

    def test_a_slot_is_not_free_before_its_event_has_passed(self, fake_cuda: FakeCuda) -> None:
        """The slot counts as on loan until the copy has ended."""
        with made(**gpu()) as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            fake_cuda.hold_events()
            lent(loop, BATCH)
            ring.reclaim()
            ring.reclaim()
            assert (loop.num_free(), ring.num_on_loan) == (NUM_SLOTS - 1, 1)
            fake_cuda.pass_events()
            ring.reclaim()
            assert (loop.num_free(), ring.num_on_loan) == (NUM_SLOTS, 0)

    def test_a_slot_is_not_free_during_a_capture(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """The capture goes through, and the slot is free afterwards."""

        class CUDAGraph:
            def capture_begin(self) -> None:
                fake_cuda.begin_capture()

            def capture_end(self) -> None:
                fake_cuda.end_capture()

            def reset(self) -> None:
                """Do nothing."""

        monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
        watch_captures()
        with made(**gpu()) as ring:
            build(ring, PAGE)
            loop, graph = Loopback(ring), CUDAGraph()
            graph.capture_begin()
            lent(loop, BATCH)
            ring.reclaim()
            build(ring, 2 * PAGE)  # growth goes on beside it
            assert (loop.num_free(), fake_cuda.invalidated()) == (2 * NUM_SLOTS - 1, 0)
            graph.capture_end()
            ring.reclaim()
            assert loop.num_free() == 2 * NUM_SLOTS

    def test_a_loop_that_runs_far_ahead_waits_for_the_gpu(self, fake_cuda: FakeCuda) -> None:
        """With more than four slots behind copies it waits, but not for long: the GPU may be waiting for the loop."""
        with made(**gpu()) as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            fake_cuda.hold_events()
            batches = [lent(loop, BATCH) for _ in range(NUM_SLOTS)]
            batches.clear()
            began_s = time.monotonic()
            ring.reclaim()
            assert 0.04 < time.monotonic() - began_s < 1
            assert ring.num_on_loan == NUM_SLOTS
            fake_cuda.set(hold_events=0)
            ring.reclaim()
            assert ring.num_on_loan == 0


def in_forked_child(check: Callable[[], bool]) -> bool:
    """Return the result of a check in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        pid = os.fork()
    if not pid:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


class TestFork:
    """A child that the user forks inherits everything, and must change nothing."""

    def test_its_finalizers_free_nothing(self) -> None:
        """The end of the last reference in the child frees nothing."""
        with made() as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            batches = [lent(loop, BATCH), lent(loop, torch.zeros(1 << 20))]  # in a slot, and spilled

            def drop() -> bool:
                batches.clear()
                gc.collect()
                ring.reclaim()
                return loop.num_free() == NUM_SLOTS - 1 and not ring._ended

            assert in_forked_child(drop)
            ring.reclaim()
            assert (loop.num_free(), ring.num_on_loan) == (NUM_SLOTS - 1, 1)
            assert torch.equal(batches[0], BATCH)
            assert not batches[1].any()

    def test_its_close_closes_nothing(self, fake_cuda: FakeCuda) -> None:
        """Pinned memory and slots belong to the parent."""
        with made(**gpu()) as ring:
            build(ring, PAGE)

            def close() -> bool:
                ring.close()
                return is_open(ring) and ring.num_slots == NUM_SLOTS

            assert in_forked_child(close)
            assert (fake_cuda.registered_bytes(), is_open(ring)) == (NUM_SLOTS * PAGE, True)
            assert torch.equal(lent(Loopback(ring), BATCH), BATCH)


def num_mapped() -> int:
    """Return the number of spilled batches that this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="ascii").count("/memfd:numapin-spill")


def num_open() -> int:
    """Return the number of this process's descriptors of spilled batches."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("numapin-spill" in str(entry.readlink()) for entry in entries)


class TestSpills:
    """Batches without a slot have separate memory."""

    def test_it_goes_with_the_last_reference(self) -> None:
        """Until then the batch is intact."""
        with made() as ring:
            spilled = lent(Loopback(ring), BATCH)
            assert num_mapped() == 1
            view = spilled[7:9]
            del spilled
            assert num_mapped() == 1
            assert view.tolist() == [7, 8]
            del view
            assert (num_mapped(), num_open()) == (0, 0)

    def test_it_costs_no_descriptor(self) -> None:
        """A loop may keep more batches than it may open files."""
        with made() as ring:
            kept = lent(Loopback(ring), BATCH)
            found = num_open()
            del kept  # not with the failure's traceback
            assert found == 0

    def test_it_outlives_the_ring(self) -> None:
        """The mapping keeps the memory."""
        with made() as ring:
            spilled = lent(Loopback(ring), BATCH)
        assert torch.equal(spilled, BATCH)

    def test_the_next_workers_leave_it_alone(self) -> None:
        """A batch that is kept for longer than an epoch is not overwritten by the next one."""
        with made() as ring:
            kept = lent(Loopback(ring), BATCH)
            ring.recover()
            assert torch.equal(lent(Loopback(ring), -BATCH), -BATCH)
            assert torch.equal(kept, BATCH)

    def test_what_was_never_received_is_forgotten(self) -> None:
        """It is freed once the workers are gone, and not mistaken for a batch of the next workers."""
        with made() as ring:
            loop = Loopback(ring)
            loop.post(BATCH)
            head, _ = loop.post(BATCH)
            assert ring.lend(head)[1] is not None  # the first has been taken in on the way
            assert num_open() == 1
            ring.recover()
            assert num_open() == 0
            assert torch.equal(lent(Loopback(ring), -BATCH), -BATCH)

    def test_what_the_worker_keeps_stays_as_it_is(self) -> None:
        """A collate_fn that caches a batch finds it unchanged after the loop has released it."""
        with made() as ring:
            loop = Loopback(ring)
            cached = loop.packer.allocate(torch.float32, (1000,))
            assert cached is not None
            cached.copy_(BATCH)
            for _ in range(3):
                assert torch.equal(lent(loop, cached), BATCH)
                ring.reclaim()
                assert torch.equal(cached, BATCH)

    @pytest.mark.parametrize("is_sent", [False, True])
    def test_what_was_collated_and_not_sent_goes(self, *, is_sent: bool) -> None:
        """Memory does not grow with a collate_fn that stacks a large batch and sends a small part of it."""
        with made() as ring:
            build(ring, PAGE)
            loop = Loopback(ring)
            for _ in range(3):
                stacked = loop.packer.allocate(torch.float32, (1 << 18,))
                assert stacked is not None
                part = stacked.fill_(1)[:1000].clone()
                del stacked
                loop.post(part if is_sent else None)
                del part
                assert (num_mapped(), num_open()) == (0, 0)
                ring.recover()
