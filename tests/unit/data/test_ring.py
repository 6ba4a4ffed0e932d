"""The rank's end of the ring: slots are made, lent, held back and freed. The GPU's driver is a stand-in."""

from __future__ import annotations

import gc
import mmap
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from numapin.base.cpu_set import CpuSet
from numapin.data.slots import ring as ring_module
from numapin.data.slots.control import NOT_READY
from numapin.data.slots.ring import Ring
from numapin.data.wire.message import Miss
from numapin.system import memory, placement
from numapin.system.placement import Placement
from tests.data.loopback import (
    ANYWHERE,
    Loopback,
    build,
    gpu,
    held_bytes,
    is_open,
    lent,
    made,
    make_head,
    make_spec,
    wait_until_built,
    wait_until_closed,
)

if TYPE_CHECKING:
    from tests.cuda.fake import FakeCuda

PAGE: Final = mmap.PAGESIZE
NUM_SLOTS: Final = 5  # of `make_spec`: one worker that is asked for one batch ahead, and four to spare
CONTROL_BYTES: Final = PAGE
BATCH: Final = torch.arange(1000.0)  # 4000 bytes: a slot of a page


class TestMaking:
    """Slots are made when batches need them."""

    def test_a_new_ring_has_no_slots(self) -> None:
        """A new ring has no slots: their size is not known yet."""
        with made() as ring:
            ring.prepare()
            assert ring._builder is None
            assert (ring.num_slots, ring.slot_bytes, ring.num_bytes, ring.num_on_loan) == (0, 0, 0, 0)
            assert held_bytes(ring) <= CONTROL_BYTES

    @pytest.mark.parametrize(("num_workers", "prefetch", "num_slots"), [(1, 2, 6), (2, 2, 8), (3, 1, 9), (8, 2, 24)])
    def test_there_are_enough_slots(self, num_workers: int, prefetch: int, num_slots: int) -> None:
        """There is one for each batch that a worker may be asked for, and four spares, of the largest batch's size."""
        with made(num_workers=num_workers, prefetch=prefetch) as ring:
            for size in (PAGE, 2 * PAGE + 1, 1):
                ring.want(make_head(wanted_bytes=size))
            build(ring, 0)
            assert (ring.num_slots, ring.slot_bytes, ring.num_bytes) == (num_slots, 3 * PAGE, num_slots * 3 * PAGE)

    def test_all_memory_is_there_before_it_is_used(self) -> None:
        """Every page exists, so neither worker nor loop gets a page fault or SIGBUS."""
        with made() as ring:
            build(ring, 100 * PAGE)
            assert held_bytes(ring) == CONTROL_BYTES + NUM_SLOTS * 100 * PAGE

    def test_what_fits_makes_nothing_more(self) -> None:
        """In the steady state, wanting the same size or less does nothing."""
        with made() as ring:
            build(ring, PAGE)
            for size in (1, PAGE):
                ring.want(make_head(wanted_bytes=size))
                ring.prepare()
                assert ring._builder is None
            assert ring.control.num_generations == 1

    def test_it_is_made_beside_the_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`prepare` returns at once, and a second call starts nothing while the first is at work."""
        settle = placement.settle

        def settle_slowly(*args: Any, **kwargs: Any) -> tuple[str, ...]:
            time.sleep(0.1)
            return settle(*args, **kwargs)

        monkeypatch.setattr(placement, "settle", settle_slowly)
        with made() as ring:
            ring.want(make_head(wanted_bytes=PAGE))
            ring.prepare()
            builder = ring._builder
            ring.prepare()
            assert ring._builder is builder
            assert ring.num_slots == 0
            wait_until_built(ring)
            assert ring.num_slots == NUM_SLOTS

    def test_memory_is_placed_as_the_rank_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nodes and CPUs are the locality's; the kernel's report on the pages is kept, and refusals are reported."""
        there: dict[str, Any] = {"nodes": CpuSet({1}), "num_machine_nodes": 2}
        asked: list[dict[str, object]] = []

        def settle(_address: int, _num_bytes: int, **where: object) -> tuple[str, ...]:
            asked.append(where)
            return ("not there",)

        def check(_address: int, num_bytes: int, **where: object) -> Placement:
            asked.append(where)
            return Placement(pages={1: num_bytes // PAGE - 1, None: 1}, shortfalls=("not all",))

        monkeypatch.setattr(placement, "settle", settle)
        monkeypatch.setattr(placement, "check", check)
        told: list[str] = []
        cpus = CpuSet({2})
        with made(told=told, locality=replace(ANYWHERE, cpus=cpus, **there)) as ring:
            build(ring, 2 * PAGE)
            assert asked == [there | {"cpus": cpus}, there]
            assert (ring.pages, ring.is_verified) == (Counter({1: 9, None: 1}), True)
            assert told == ["not there", "not all"]

    def test_pages_that_nobody_tells_of_are_unverified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ring is not verified if the kernel does not report its pages."""
        monkeypatch.setattr(placement, "check", lambda *_args, **_kwargs: Placement(pages=None))
        with made() as ring:
            build(ring, PAGE)
            assert not ring.is_verified


class TestPieces:
    """Memory is pinned in pieces."""

    @pytest.mark.parametrize(("slot_pages", "sizes"), [(1, [4, 1]), (2, [4, 4, 2]), (3, [3] * 5), (7, [7] * 5)])
    def test_no_slot_crosses_a_piece(
        self,
        slot_pages: int,
        sizes: list[int],
        fake_cuda: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A copy cannot span two registrations. Pieces of four pages: whole slots in each, at least one."""
        monkeypatch.setattr(ring_module, "_PIECE_BYTES", 4 * PAGE)
        with made(**gpu()) as ring:
            build(ring, slot_pages * PAGE)
            memory = ring._memories[0]
            assert [size // PAGE for _, size in memory.locked] == sizes
            assert [at - memory.address for at, _ in memory.locked] == [
                PAGE * sum(sizes[:n]) for n in range(len(sizes))
            ]
            assert ring.pinned_bytes == fake_cuda.registered_bytes() == ring.num_bytes
        assert fake_cuda.registered_bytes() == 0

    def test_the_first_slots_serve_while_others_are_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each piece is usable as soon as it is ready."""
        monkeypatch.setattr(ring_module, "_PIECE_BYTES", 2 * PAGE)
        settle, seen = placement.settle, []
        with made() as ring:
            loop = Loopback(ring)

            def watch(*args: Any, **kwargs: Any) -> tuple[str, ...]:
                seen.append([state > 0 for state in loop.states()])
                return settle(*args, **kwargs)

            monkeypatch.setattr(placement, "settle", watch)
            build(ring, PAGE)
        assert seen == [[], [True] * 2 + [False] * 3, [True] * 4 + [False]]

    def test_a_ring_that_is_closed_stops_being_made(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """It stops at the next piece; the last thread unpins the memory."""
        monkeypatch.setattr(ring_module, "_PIECE_BYTES", PAGE)
        with made(**gpu()) as ring:
            settle, pieces = placement.settle, []

            def close(*args: Any, **kwargs: Any) -> tuple[str, ...]:
                pieces.append(args)
                ring.close()
                return settle(*args, **kwargs)

            monkeypatch.setattr(placement, "settle", close)
            build(ring, PAGE)
            wait_until_closed(ring)
        assert len(pieces) == 1
        assert fake_cuda.registered_bytes() == 0


class TestRefusals:
    """A refusal is reported once, and batches travel without slots."""

    def test_a_registration_that_is_refused(self, fake_cuda: FakeCuda) -> None:
        """Nothing stays pinned, the memory is freed, and there is no second attempt."""
        fake_cuda.refuse_registration()
        told: list[str] = []
        before = placement.PINNED.total
        with made(told=told, **gpu()) as ring:
            for _ in range(3):
                build(ring, 64 * PAGE)
            assert (ring.num_slots, ring.pinned_bytes, fake_cuda.registered_bytes()) == (0, 0, 0)
            assert placement.PINNED.total == before
            assert held_bytes(ring) <= CONTROL_BYTES
            assert len(told) == 1
            assert told[0].startswith(f"no slots of {64 * PAGE} bytes")
            assert "CUDA_ERROR_OUT_OF_MEMORY" in told[0]
            assert told[0].endswith("or give the container more memory")
            assert ring.is_refused
            assert Loopback(ring).post(BATCH)[0].miss == Miss.STARTING

    def test_a_second_piece_that_is_refused(self, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        """The slots of the first piece stay in use; only the refused memory is freed, and all of it at the end."""
        monkeypatch.setattr(ring_module, "_PIECE_BYTES", 2 * PAGE)
        fake_cuda.refuse_registration(above_bytes=3 * PAGE)
        told: list[str] = []
        with made(told=told, **gpu()) as ring:
            build(ring, PAGE)
            assert not ring.is_refused
            assert [state > NOT_READY for state in Loopback(ring).states()] == [True, True, False, False, False]
            assert (ring.pinned_bytes, fake_cuda.registered_bytes(), len(told)) == (2 * PAGE, 2 * PAGE, 1)
            assert held_bytes(ring) == CONTROL_BYTES + 2 * PAGE
        assert fake_cuda.registered_bytes() == 0

    def test_memory_that_runs_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The pages touched so far are freed, and the kernel's message is reported."""

        def run_out(address: int, num_bytes: int, **_where: object) -> None:
            memory.populate(address, num_bytes // 2)
            raise OSError(12, "the kernel has no memory for this")

        monkeypatch.setattr(placement, "settle", run_out)
        told: list[str] = []
        with made(told=told) as ring:
            build(ring, 64 * PAGE)
            assert held_bytes(ring) <= CONTROL_BYTES
        assert [text for text in told if "the kernel has no memory" in text] == told != []

    @pytest.mark.parametrize(("budget", "per_worker"), [(40, 2), (16, 2), (15, 1), (8, 1)])
    def test_a_small_budget_means_fewer_slots(self, budget: int, per_worker: int) -> None:
        """Each worker gets as many slots as the budget (in pages; a slot has four) allows; it is reported once."""
        told: list[str] = []
        with made(told=told, num_workers=2, prefetch=0, budget_bytes=lambda: budget * PAGE) as ring:
            for _ in range(2):
                build(ring, 4 * PAGE)
            assert ring.num_slots == 2 * per_worker
            text = f"1 slot per worker instead of 2: the budget is {budget * PAGE} bytes"
            assert told == ([] if per_worker == 2 else [text])

    def test_a_budget_that_is_too_small_means_none(self) -> None:
        """It is reported once, with the need and the remedy; a later, larger batch does not try again."""
        told: list[str] = []
        with made(told=told, num_workers=2, budget_bytes=lambda: 8 * PAGE - 1) as ring:
            for size in (4 * PAGE, 4 * PAGE, 9 * PAGE):
                build(ring, size)
            assert (ring.num_slots, len(told)) == (0, 1)
            assert f"2 workers need {8 * PAGE} bytes, the budget is {8 * PAGE - 1}" in told[0]


class TestClosing:
    """The end of the ring."""

    def test_all_is_given_back_at_once(self, fake_cuda: FakeCuda) -> None:
        """A ring without references is closed at once; a second close does nothing."""
        before = placement.PINNED.total
        ring = Ring(make_spec(**gpu()))
        build(ring, PAGE)
        assert placement.PINNED.total == before + NUM_SLOTS * PAGE
        for _ in range(2):
            ring.close()
            assert (fake_cuda.registered_bytes(), is_open(ring), placement.PINNED.total) == (0, False, before)

    def test_a_batch_outlives_the_ring(self, fake_cuda: FakeCuda) -> None:
        """Its memory stays pinned until the last reference is gone; then everything is freed."""
        ring = Ring(make_spec(**gpu()))
        build(ring, PAGE)
        batch = lent(Loopback(ring), BATCH)
        ring.close()
        time.sleep(0.12)  # two looks
        assert fake_cuda.registered_bytes() == NUM_SLOTS * PAGE
        assert is_open(ring)
        assert torch.equal(batch, BATCH)
        del batch
        wait_until_closed(ring)
        assert (fake_cuda.registered_bytes(), ring.num_slots) == (0, 0)

    def test_a_copy_outlives_the_ring(self, fake_cuda: FakeCuda) -> None:
        """Memory that the GPU may be reading is not unpinned."""
        ring = Ring(make_spec(**gpu()))
        build(ring, PAGE)
        fake_cuda.hold_events()
        lent(Loopback(ring), BATCH)
        ring.close()
        time.sleep(0.12)
        assert fake_cuda.registered_bytes() == NUM_SLOTS * PAGE
        fake_cuda.pass_events()
        wait_until_closed(ring)
        assert fake_cuda.registered_bytes() == 0

    def test_a_closed_ring_makes_nothing(self) -> None:
        """Wanting slots after the close is not an error."""
        ring = Ring(make_spec())
        ring.close()
        ring.want(make_head(wanted_bytes=PAGE))
        ring.prepare()
        assert ring._builder is None

    def test_a_hundred_rings_leave_nothing(self, fake_cuda: FakeCuda) -> None:
        """A closed ring leaves no descriptor, no mapping and no registration."""

        def mappings() -> int:
            with open("/proc/self/maps", encoding="ascii") as maps:  # noqa: PTH123
                return sum("numapin-ring" in line for line in maps)

        gc.collect()
        before = mappings()
        for _ in range(100):
            with made(**gpu()) as ring:
                build(ring, PAGE)
                lent(Loopback(ring), BATCH)
        del ring
        gc.collect()
        assert (mappings(), fake_cuda.registered_bytes()) == (before, 0)
