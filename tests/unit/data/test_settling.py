"""Slots are checked and pinned beside the loop, as far as budget and driver allow. The GPU's driver is a stand-in."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.contract.datasets import Raise
from tests.data.loopback import (
    ANYWHERE,
    BATCH,
    WAIT_S,
    Loopback,
    gpu,
    held_bytes,
    lent,
    loopback,
    make_slot,
    make_spec,
    num_open,
)
from tests.unit.data import seam
from tests.unit.data.seam import memory, pinning, placement, share_on
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE


class Gate:
    """Lets no slot be pinned before it is open; `properties` are those of a pool behind it."""

    def __init__(self) -> None:
        self.properties = gpu()
        self.then = self.properties["driver"].register
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.is_reached.set()
        assert self.is_open.wait(WAIT_S)
        return self.then(*args, **options)


@pytest.fixture
def gate(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    assert fake_cuda.registered_bytes() == 0
    made = Gate()
    monkeypatch.setattr(made.properties["driver"], "register", made)
    yield made
    made.is_open.set()


class TestPinning:
    def test_it_is_pinned_once(self, fake_cuda: FakeCuda) -> None:
        """Later batches use it as it is."""
        before = placement.PINNED.total
        with loopback(**gpu()) as loop:
            for _ in range(5):
                lent(loop, BATCH)
                loop.settle()
            assert (fake_cuda.registered_bytes(), fake_cuda.get("registered_ranges")) == (PAGE, 1)
            assert (placement.PINNED.total, sum(slot.pinned_bytes for slot in loop.pool.slots)) == (before + PAGE, PAGE)
        assert (fake_cuda.registered_bytes(), placement.PINNED.total) == (0, before)

    def test_the_slot_is_used_meanwhile(self, gate: Gate) -> None:
        """Pinning changes no byte: the batch stays as it is, and the next one may have the same slot."""
        with loopback(**gate.properties) as loop:
            first = lent(loop, BATCH)
            address = first.data_ptr()
            assert gate.is_reached.wait(WAIT_S)
            assert torch.equal(first, BATCH)
            del first
            assert loop.num_free() == 1
            other = lent(loop, -BATCH)
            assert other.data_ptr() == address
            gate.is_open.set()
            loop.settle()
            assert torch.equal(other, -BATCH)
            assert [slot.pinned_on for slot in loop.pool.slots] == [0]

    def test_a_slot_may_be_larger_than_its_batch_was(self, fake_cuda: FakeCuda) -> None:
        """Pages that no batch needed so far exist before the slot is used again, so that no write can fail."""
        with loopback(**gpu()) as loop:
            kept = lent(loop, torch.zeros(64 * PAGE, dtype=torch.uint8))
            small = lent(loop, BATCH)
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


def test_what_exceeds_it_stays_pageable(fake_cuda: FakeCuda) -> None:
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


@pytest.mark.parametrize(("code", "num_pinned"), [(errno.ENOMEM, 0), (errno.EINVAL, 1)])
def test_pages_that_cannot_be_faulted_in(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, code: int, num_pinned: int
) -> None:
    """Without memory the slot is not pinned. A kernel before 5.14 cannot do it: the driver does."""
    populate = memory.populate

    def refuse(address: int, num_bytes: int, advice: int = memory.MADV_POPULATE_WRITE) -> None:
        if advice == memory.MADV_POPULATE_READ:  # the rank's
            raise OSError(code, os.strerror(code))
        populate(address, num_bytes, advice)

    told: list[str] = []
    monkeypatch.setattr(memory, "populate", refuse)
    with loopback(told=told, **gpu()) as loop:
        lent(loop, BATCH)
        loop.settle()
        assert fake_cuda.registered_bytes() == num_pinned * PAGE
        assert [os.strerror(code) in text for text in told] == [True] * (1 - num_pinned)
        assert torch.equal(lent(loop, -BATCH), -BATCH)


def test_a_defect_is_reported_and_keeps_no_other_waiting(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours in one slot: the loop goes on without pinned memory."""
    told: list[str] = []
    monkeypatch.setattr(seam.Slot, "pin", Raise(ArithmeticError, ("a defect",)))
    with loopback(told=told, **gpu()) as loop:
        parcels = [loop.send(BATCH) for _ in range(4)]
        assert not any(parcel.slot.wait_until_settled() for parcel in parcels if parcel.slot is not None)
    assert told == ["batches are not pinned from now on: a defect"]
    assert fake_cuda.registered_bytes() == 0


def test_its_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is kept, even without a GPU; what is not as it should be is reported once."""
    asked: list[dict[str, object]] = []

    def check(_address: int, num_bytes: int, **where: object) -> seam.Placement:
        asked.append(where)
        return seam.Placement(pages={1: num_bytes // PAGE - 1, None: 1}, shortfalls=(f"not all of {len(asked)}",))

    monkeypatch.setattr(placement, "check", check)
    monkeypatch.setattr(placement, "prefer", lambda *_, **_within: iter(()))
    told: list[str] = []
    with loopback(told=told, locality=replace(ANYWHERE, nodes=seam.CpuSet({1}), num_machine_nodes=2)) as loop:
        for _ in range(3):
            lent(loop, torch.zeros(4 * PAGE, dtype=torch.uint8))
            loop.settle()
        assert asked == [{"nodes": seam.CpuSet({1}), "num_machine_nodes": 2}]
        assert told == ["not all of 1"]
        assert [dict(slot.pages or {}) for slot in loop.pool.slots] == [{1: 3, None: 1}]
        assert share_on(seam.CpuSet({1}), loop.pool.slots) == 0.75
        kept = [lent(loop, torch.zeros(4 * PAGE, dtype=torch.uint8)) for _ in range(2)]
        del kept
        loop.settle()
        assert (len(asked), told) == (2, ["not all of 1"])  # the share is another, and in the stats


def test_what_is_being_pinned_is_unpinned_again(gate: Gate, fake_cuda: FakeCuda) -> None:
    """Nothing stays pinned, neither the slot at the driver nor those after it."""
    before = placement.PINNED.total
    with loopback(**gate.properties) as loop:
        kept = [lent(loop, BATCH) for _ in range(4)]
        del kept
        loop.pool.reclaim()
        assert gate.is_reached.wait(WAIT_S)
    gate.is_open.set()
    assert wait_until_ended(pinning.settlers[os.getpid()])
    assert wait_until(lambda: fake_cuda.registered_bytes() == 0, limit_s=WAIT_S)
    assert wait_until(lambda: placement.PINNED.total == before, limit_s=WAIT_S)


def test_slots_that_are_being_pinned_are_not_lost(gate: Gate) -> None:
    """The end of an epoch does not give them up, or free them twice."""
    with loopback(**gate.properties) as loop:
        lent(loop, BATCH)
        loop.pool.reclaim()
        assert gate.is_reached.wait(WAIT_S)
        loop.pool.recover()
        gate.is_open.set()
        loop.settle()
        assert (loop.num_free(), [slot.pinned_on for slot in loop.pool.slots]) == (1, [0])


@pytest.mark.parametrize("where", ["adopt", "lend"])
@pytest.mark.parametrize("end", [seam.Pool.close, seam.Pool.recover])
@pytest.mark.parametrize("is_settled", [True, False])
def test_ctrl_c_while_a_slot_is_taken_in(
    gate: Gate,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    *,
    where: str,
    end: Callable[[seam.Pool], None],
    is_settled: bool,
) -> None:
    """At the end of the epoch, or of the loader, the slot is unpinned and closed, pinned by then or not."""
    before, interrupt = placement.PINNED.total, Raise(KeyboardInterrupt)
    with loopback(**gate.properties) as loop:
        begin = loop.pool._settling.begin
        head, _body = loop.post(BATCH)
        with monkeypatch.context() as patch:
            if where == "lend":
                patch.setattr(seam.Slot, "lend", interrupt)
            else:
                patch.setattr(loop.pool._settling, "begin", lambda slot: interrupt(begin(slot)))
            with pytest.raises(KeyboardInterrupt):
                loop.pool.lend(head)
        assert gate.is_reached.wait(WAIT_S)
        if is_settled:
            gate.is_open.set()
            assert wait_until_ended(pinning.settlers[os.getpid()])
            assert fake_cuda.registered_bytes() == PAGE
        end(loop.pool)
        assert (loop.pool.slots, num_open()) == ((), 0)
        gate.is_open.set()
        assert wait_until_ended(pinning.settlers[os.getpid()])
        assert wait_until(lambda: placement.PINNED.total == before, limit_s=WAIT_S)
        assert fake_cuda.registered_bytes() == 0


class TestThread:
    def test_they_end_when_there_is_nothing_to_do(self) -> None:
        """A loader in its steady state has no thread more; the next job starts one again."""
        settler, done = seam.Settler(), list[int]()
        for number in range(3):
            settler.submit(threading.Event(), partial(done.append, number))
            assert wait_until_ended(settler)
        assert done == [0, 1, 2]

    def test_a_batch_that_arrives_while_python_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing is pinned any more, and the loop does not wait for that."""
        settler = seam.Settler()
        for lock in settler._idle:
            lock.is_over = True
        monkeypatch.setitem(pinning.settlers, os.getpid(), settler)
        slot = make_slot(1)
        seam.Settling(make_spec()).begin(slot)
        assert not slot.wait_until_settled()
        assert not slot.is_settled

    def test_a_defect_in_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is reported as any error in a thread, and the jobs behind it are done."""
        settler, done, reported = seam.Settler(), list[int](), []
        monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

        fail = Raise(SystemError)
        for job in (fail, fail, fail, lambda: done.append(4)):
            settler.submit(threading.Event(), job)
        assert wait_until_ended(settler)
        assert (done, reported) == ([4], [SystemError] * 3)

    @pytest.mark.parametrize("has_begun", [True, False])
    def test_ctrl_c_while_a_thread_is_started(self, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool) -> None:
        """The loop may wait for the job all the same, and there are no more threads than two afterwards."""
        settler, start, done = seam.Settler(), threading.Thread.start, list[int]()

        def interrupted(thread: threading.Thread) -> None:
            if has_begun:
                start(thread)
            raise KeyboardInterrupt

        over = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                settler.submit(over, partial(done.append, 1))
        settler.finish(over)
        assert wait_until_ended(settler)
        assert (done, len(set(settler._idle))) == ([1], 2)


def wait_until_ended(settler: seam.Settler) -> bool:
    return wait_until(lambda: len(settler._idle) == 2 and not settler._jobs, limit_s=WAIT_S)
