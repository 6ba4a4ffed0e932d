"""Slots are checked and pinned beside the loop, as far as budget and driver allow. The GPU's driver is a stand-in."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.data.loopback import ANYWHERE, WAIT_S, Loopback, gpu, held_bytes, lent, loopback, make_spec, num_open
from tests.unit.data.seam import CpuSet, Placement, Pool, Settling, Slot, _Settler, memory, pinning, placement, share_on
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cuda.fake import FakeCuda
    from tests.unit.data.seam import Driver

PAGE: Final = mmap.PAGESIZE
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


class Gate:
    """A function that waits until it is opened before it calls another."""

    def __init__(self, then: Any) -> None:
        self.then, self.is_reached, self.is_open = then, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Wait, and call the other function."""
        self.is_reached.set()
        assert self.is_open.wait(WAIT_S)
        return self.then(*args, **options)


@pytest.fixture
def gate(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Gate, dict[str, Any]]]:
    """Give a gate before the driver pins anything, and a pool's properties with that driver."""
    properties = gpu()
    driver: Driver = properties["driver"]
    assert fake_cuda.registered_bytes() == 0
    made = Gate(driver.register)
    monkeypatch.setattr(driver, "register", made)
    yield made, properties
    made.is_open.set()


def release(loop: Loopback, batch: torch.Tensor = BATCH) -> None:
    """Have a batch come and go, and its slot settled."""
    lent(loop, batch)
    loop.settle()


class TestPinning:
    """A slot is pinned once its first batch is gone."""

    def test_it_is_pinned_once(self, fake_cuda: FakeCuda) -> None:
        """Not while a batch is in it, which the loop is waiting for; later batches use it as it is."""
        before = placement.PINNED.total
        with loopback(**gpu()) as loop:
            batch = lent(loop, BATCH)
            assert fake_cuda.registered_bytes() == 0
            del batch
            loop.settle()
            for _ in range(5):
                release(loop)
            assert (fake_cuda.registered_bytes(), fake_cuda.get("registered_ranges")) == (PAGE, 1)
            assert (placement.PINNED.total, sum(slot.pinned_bytes for slot in loop.pool.slots)) == (before + PAGE, PAGE)
        assert (fake_cuda.registered_bytes(), placement.PINNED.total) == (0, before)

    def test_the_batch_stays_as_it_is_meanwhile(self, gate: tuple[Gate, dict[str, Any]]) -> None:
        """The loop goes on: what is being pinned is not used, and the next batches have other slots."""
        wall, properties = gate
        with loopback(**properties) as loop:
            first = lent(loop, BATCH)
            address = first.data_ptr()
            del first
            loop.pool.reclaim()
            assert wall.is_reached.wait(WAIT_S)
            assert loop.num_free() == 0
            other = lent(loop, -BATCH)
            assert other.data_ptr() != address
            wall.is_open.set()
            loop.settle()
            assert torch.equal(other, -BATCH)
            assert lent(loop, BATCH).data_ptr() == address

    def test_at_most_two_slots_of_a_pool_are_away(self, gate: tuple[Gate, dict[str, Any]]) -> None:
        """The workers need the others at once; those are pinned when they come back again."""
        wall, properties = gate
        with loopback(**properties) as loop:
            kept = [lent(loop, BATCH) for _ in range(5)]
            del kept
            assert loop.num_free() == 3
            wall.is_open.set()
            loop.settle()
            assert [slot.is_settled for slot in loop.pool.slots].count(True) == 2
            for _ in range(2):
                kept = [lent(loop, BATCH) for _ in range(5)]
                del kept
                loop.settle()
            assert all(slot.pinned_on == 0 for slot in loop.pool.slots)

    def test_a_slot_may_be_larger_than_its_batch_was(self, fake_cuda: FakeCuda) -> None:
        """Pages that no batch needed so far exist before the slot is used again, so that no write can fail."""
        with loopback(**gpu()) as loop:
            kept = lent(loop, torch.zeros(64 * PAGE, dtype=torch.uint8))
            small = lent(loop, BATCH)
            assert held_bytes(loop.pool) == 65 * PAGE
            del kept, small
            loop.settle()
            assert held_bytes(loop.pool) == fake_cuda.registered_bytes() == 2 * 64 * PAGE

    def test_without_anything_to_do_no_thread_is_needed(self) -> None:
        """On a host without a GPU and with one node a slot is free at once."""
        with loopback() as loop:
            lent(loop, BATCH)
            assert loop.num_free() == 1
            assert not loop.pool._settling.is_needed
            assert [slot.pages for slot in loop.pool.slots] == [None]


class TestBudget:
    """Memory that may be pinned."""

    def test_what_exceeds_it_stays_pageable(self, fake_cuda: FakeCuda) -> None:
        """Such slots serve all the same, and it is reported once with its remedies."""
        told: list[str] = []
        pools: list[Loopback] = []

        def left() -> int:
            return 3 * PAGE - sum(slot.pinned_bytes for slot in pools[0].pool.slots)

        with loopback(told=told, budget_bytes=left, **gpu()) as loop:
            pools.append(loop)
            for _ in range(4):
                kept = [lent(loop, BATCH + number) for number in range(6)]
                assert [int(batch[0]) for batch in kept] == list(range(6))
                del kept
                loop.settle()
            assert len(loop.pool.slots) == 6
            assert (fake_cuda.registered_bytes(), len(told)) == (3 * PAGE, 1)
            assert "the budget for pinned memory is used up: 0" in told[0]
            assert "pinned_budget=" in told[0]


class TestRefusals:
    """A refusal is reported once, and batches travel in slots that are not pinned."""

    def test_a_registration_that_is_refused(self, fake_cuda: FakeCuda) -> None:
        """Those that are pinned stay so; there is no further attempt, and no batch is lost."""
        fake_cuda.refuse_registration(above_bytes=2 * PAGE)
        told: list[str] = []
        with loopback(told=told, **gpu()) as loop:
            for number in range(5):
                kept = [lent(loop, BATCH + number) for _ in range(4)]
                assert all(torch.equal(batch, BATCH + number) for batch in kept)
                del kept
                loop.settle()
            assert (len(loop.pool.slots), fake_cuda.registered_bytes()) == (4, 2 * PAGE)
            fake_cuda.refuse_registration(above_bytes=100 * PAGE)
            kept = [lent(loop, BATCH) for _ in range(6)]
            del kept
            loop.settle()
            assert fake_cuda.registered_bytes() == 2 * PAGE
            (text,) = told
            assert text.startswith("batches are not pinned from now on: ")
            assert "CUDA_ERROR_OUT_OF_MEMORY" in text
        assert fake_cuda.registered_bytes() == 0

    @pytest.mark.parametrize(("code", "num_pinned"), [(errno.ENOMEM, 0), (errno.EINVAL, 1)])
    def test_pages_that_cannot_be_faulted_in(
        self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, code: int, num_pinned: int
    ) -> None:
        """Without memory the slot is not pinned. A kernel before 5.14 cannot do it: the driver does."""

        def refuse(_address: int, _num_bytes: int) -> None:
            raise OSError(code, os.strerror(code))

        told: list[str] = []
        with loopback(told=told, **gpu()) as loop:
            batch = lent(loop, BATCH)
            monkeypatch.setattr(memory, "populate", refuse)
            del batch
            loop.settle()
            assert fake_cuda.registered_bytes() == num_pinned * PAGE
            assert [os.strerror(code) in text for text in told] == [True] * (1 - num_pinned)
            assert torch.equal(lent(loop, -BATCH), -BATCH)

    def test_no_thread_can_be_started(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """The slots stay pageable; the remedy is reported once."""

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        told: list[str] = []
        with loopback(told=told, **gpu()) as loop:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                for _ in range(3):
                    assert torch.equal(lent(loop, BATCH), BATCH)
                    loop.pool.reclaim()
            kept = [lent(loop, BATCH) for _ in range(3)]
            del kept
            loop.settle()
            assert (len(told), fake_cuda.registered_bytes()) == (1, 0)
            assert told[0].endswith("see: ulimit -u")


class TestPlacement:
    """The kernel is asked where a slot's pages are."""

    @pytest.fixture
    def there(self) -> dict[str, Any]:
        """Give the properties of a pool on the second of two nodes."""
        return {"locality": replace(ANYWHERE, nodes=CpuSet({1}), num_machine_nodes=2)}

    def test_its_answer_is_kept(self, there: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Even without a GPU; what is not as it should be is reported once."""
        asked: list[dict[str, object]] = []

        def check(_address: int, num_bytes: int, **where: object) -> Placement:
            asked.append(where)
            return Placement(pages={1: num_bytes // PAGE - 1, None: 1}, shortfalls=(f"not all of {len(asked)}",))

        monkeypatch.setattr(placement, "check", check)
        monkeypatch.setattr(placement, "prefer", lambda *_, **_within: iter(()))
        told: list[str] = []
        with loopback(told=told, **there) as loop:
            for _ in range(3):
                release(loop, torch.zeros(4 * PAGE, dtype=torch.uint8))
            assert asked == [{"nodes": CpuSet({1}), "num_machine_nodes": 2}]
            assert told == ["not all of 1"]
            assert [dict(slot.pages or {}) for slot in loop.pool.slots] == [{1: 3, None: 1}]
            assert share_on(CpuSet({1}), loop.pool.slots) == 0.75
            kept = [lent(loop, torch.zeros(4 * PAGE, dtype=torch.uint8)) for _ in range(2)]
            del kept
            loop.settle()
            assert (len(asked), told) == (2, ["not all of 1"])  # the share is another, and in the stats


class TestClosing:
    """A pool may be closed while its slots are being pinned."""

    def test_what_is_being_pinned_is_unpinned_again(
        self, gate: tuple[Gate, dict[str, Any]], fake_cuda: FakeCuda
    ) -> None:
        """Nothing stays pinned, neither the slot at the driver nor the one after it."""
        wall, properties = gate
        before = placement.PINNED.total
        with loopback(**properties) as loop:
            kept = [lent(loop, BATCH) for _ in range(2)]
            del kept
            loop.pool.reclaim()
            assert wall.is_reached.wait(WAIT_S)
        wall.is_open.set()
        settling = loop.pool._settling
        assert wait_until(lambda: pinning._settler()._is_running is False, limit_s=WAIT_S)
        assert wait_until(lambda: fake_cuda.registered_bytes() == 0, limit_s=WAIT_S)
        assert (placement.PINNED.total, len(settling._done), fake_cuda.get("registered_ranges")) == (before, 0, 0)

    def test_what_was_pinned_and_not_taken_back_is_unpinned(self, fake_cuda: FakeCuda) -> None:
        """The slot waits for the loop's next step, which does not come."""
        with loopback(**gpu()) as loop:
            lent(loop, BATCH)
            loop.pool.reclaim()
            assert wait_until(lambda: loop.pool._settling._done, limit_s=WAIT_S)
            assert fake_cuda.registered_bytes() == PAGE
        assert wait_until(lambda: fake_cuda.registered_bytes() == 0, limit_s=WAIT_S)

    @pytest.mark.parametrize("is_opened", [True, False])
    def test_a_batch_that_waits_for_its_slot(
        self, gate: tuple[Gate, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, *, is_opened: bool
    ) -> None:
        """A slot that is pinned at once, and is through just before or after the end of the pool, is unpinned again."""
        wall, properties = gate
        before = placement.PINNED.total
        with loopback(pins_at_once=True, **properties) as loop:
            parcel = loop.send(BATCH)
            assert wall.is_reached.wait(WAIT_S)
            settling, slot = loop.pool._settling, parcel.slot
            assert slot is not None
            assert slot.settled is not None
            close = settling.close
            if not is_opened:
                del parcel

            def let_it_through_and_close() -> None:
                wall.is_open.set()
                slot.wait_until_settled()
                close()

            monkeypatch.setattr(settling, "close", let_it_through_and_close)
        assert slot.pinned_on == (0 if is_opened else None)
        if is_opened:
            del parcel
        assert wait_until(lambda: placement.PINNED.total == before, limit_s=WAIT_S)

    def test_two_threads_may_drop_what_is_done(self) -> None:
        """The loop closes the pool while the settling thread is through with the last slot; neither fails."""

        class Raced(deque[Slot]):
            def popleft(self) -> Slot:
                self.clear()  # by the other thread
                return super().popleft()

        settling = Settling(make_spec())
        settling._done = Raced([make_slot()])
        settling.close()
        assert not settling._done


class TestCtrlC:
    """Ctrl-C may arrive between any two steps of the rank."""

    @pytest.mark.parametrize("where", ["adopt", "lend"])
    @pytest.mark.parametrize("end", [Pool.close, Pool.recover])
    @pytest.mark.parametrize("is_settled", [True, False])
    def test_while_a_slot_is_taken_in(
        self,
        gate: tuple[Gate, dict[str, Any]],
        fake_cuda: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
        *,
        where: str,
        end: Callable[[Pool], None],
        is_settled: bool,
    ) -> None:
        """At the end of the epoch, or of the loader, the slot is unpinned and closed, pinned by then or not."""
        wall, properties = gate
        before = placement.PINNED.total

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with loopback(pins_at_once=True, **properties) as loop:
            begin_at_once = loop.pool._settling.begin_at_once
            head, _body = loop.post(BATCH)
            with monkeypatch.context() as patch:
                if where == "lend":
                    patch.setattr(Slot, "lend", interrupt)
                else:
                    patch.setattr(loop.pool._settling, "begin_at_once", lambda slot: interrupt(begin_at_once(slot)))
                with pytest.raises(KeyboardInterrupt):
                    loop.pool.lend(head)
            assert wall.is_reached.wait(WAIT_S)
            if is_settled:
                wall.is_open.set()
                assert wait_until_ended(pinning._settler())
                assert fake_cuda.registered_bytes() == PAGE
            end(loop.pool)
            assert (loop.pool.slots, num_open()) == ((), 0)
            wall.is_open.set()
            assert wait_until_ended(pinning._settler())
            assert wait_until(lambda: placement.PINNED.total == before, limit_s=WAIT_S)
            assert fake_cuda.registered_bytes() == 0

    def test_slots_that_are_being_pinned_are_not_lost(self, gate: tuple[Gate, dict[str, Any]]) -> None:
        """The end of an epoch does not give them up, or free them twice."""
        wall, properties = gate
        with loopback(**properties) as loop:
            lent(loop, BATCH)
            loop.pool.reclaim()
            assert wall.is_reached.wait(WAIT_S)
            loop.pool.recover()
            wall.is_open.set()
            loop.settle()
            assert (loop.num_free(), [slot.pinned_on for slot in loop.pool.slots]) == (1, [0])


class TestThread:
    """One thread for the whole process."""

    def test_it_rests_after_each_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pinning holds locks of the driver that kernel launches need; a rest is at most 50 ms."""
        rests: list[float] = []
        sleep = time.sleep
        monkeypatch.setattr(time, "sleep", rests.append)
        settler = _Settler()
        for pause_s in (0.0, 0.04, 0.6):
            assert settler.submit(lambda pause_s=pause_s: sleep(pause_s))  # type: ignore[misc]
        assert wait_until_ended(settler)
        assert rests[0] < 0.004 <= rests[1] < 0.05
        assert rests[2] == 0.05

    def test_it_ends_when_there_is_nothing_to_do(self) -> None:
        """A loader in its steady state has no thread more; the next job starts one again."""
        settler, done = _Settler(), []
        for number in range(3):
            assert settler.submit(lambda number=number: done.append(number))  # type: ignore[misc]
            assert wait_until_ended(settler)
        assert done == [0, 1, 2]

    def test_a_batch_that_arrives_while_python_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is pinned any more, and the loop does not wait for that."""
        settler = _Settler()
        settler._work.is_over = True
        monkeypatch.setattr(pinning, "_settler", lambda: settler)
        slot = make_slot()
        Settling(make_spec()).begin_at_once(slot)
        assert slot.settled is not None
        assert slot.settled.wait(WAIT_S)
        assert slot.pinned_on is None

    @pytest.mark.parametrize("can_start", [True, False])
    def test_a_job_that_fails_keeps_no_other_waiting(self, monkeypatch: pytest.MonkeyPatch, *, can_start: bool) -> None:
        """The jobs behind it are done without a further one; if no thread can be started, nothing waits for them."""
        settler, may_fail, told = _Settler(), threading.Event(), list[str]()
        was_done, was_dropped = threading.Event(), threading.Event()
        monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))

        def fail() -> None:
            assert may_fail.wait(WAIT_S)
            raise ArithmeticError("a defect")

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        assert settler.submit(fail)
        assert settler.submit(was_done.set, dropped=was_dropped.set)
        if not can_start:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        may_fail.set()
        assert (was_done if can_start else was_dropped).wait(WAIT_S)
        assert wait_until_ended(settler)
        assert wait_until(lambda: told == ["a defect"], limit_s=WAIT_S)
        assert was_done.is_set() != was_dropped.is_set()

    def test_jobs_that_no_thread_has_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C while the thread is started leaves one; the next job runs it, or, without a thread, lets go of it."""
        settler, was_dropped = _Settler(), threading.Event()
        errors: list[BaseException] = [KeyboardInterrupt(), RuntimeError("can't start new thread")]

        def refuse(_thread: threading.Thread) -> None:
            raise errors.pop(0)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(KeyboardInterrupt):
            settler.submit(print, dropped=was_dropped.set)
        assert not settler.submit(print, dropped=errors.clear)
        assert was_dropped.is_set()
        assert not settler._jobs

    def test_a_forked_child_has_its_own(self) -> None:
        """The parent's thread does not exist there."""
        assert pinning._settler_of(1) is not pinning._settler_of(2)
        assert pinning._settler() is pinning._settler_of(os.getpid())


def make_slot() -> Slot:
    """Return a slot without memory."""
    return Slot(number=1, fd=None, num_bytes=0, address=0, owner=torch.empty(0), worker=0)


def wait_until_ended(settler: _Settler) -> bool:
    """Return whether a settler's thread ends in time."""
    end = time.monotonic() + WAIT_S
    while settler._is_running and time.monotonic() < end:
        threading.Event().wait(0.002)
    return not settler._is_running
