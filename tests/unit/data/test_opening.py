"""Opening parcels on the host, over the slot or over copies, and the time when the slot is free again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

from tests.data.loopback import Loopback, batch_of, loopback
from tests.unit.data.seam import Copier, Lender, is_small, memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB: Final = 1 << 10
NUM_KEPT: Final = 10


@pytest.fixture
def loop() -> Iterator[Loopback]:
    """Give a pool with one worker."""
    with loopback() as made:
        yield made


@pytest.fixture(params=[Lender, Copier])
def opener(request: pytest.FixtureRequest) -> Copier:
    """Give an opener on the host."""
    made: Copier = request.param(pins=False)
    return made


def ramp(num_elements: int) -> torch.Tensor:
    """Return distinct float32 elements."""
    return torch.arange(num_elements, dtype=torch.float32)


def within(tensor: torch.Tensor, loop: Loopback) -> bool:
    """Return whether a tensor lies in a slot."""
    return any(0 <= tensor.data_ptr() - slot.address < slot.num_bytes for slot in loop.pool.slots)


class TestBoth:
    """With either opener, the batch belongs to the user."""

    def test_it_can_be_edited(self, loop: Loopback, opener: Copier) -> None:
        """A change in place affects no other batch, nor the worker's."""
        sent = ramp(1000)
        one, other = (batch_of(opener, loop.send(sent)) for _ in range(2))
        one.mul_(-1)
        assert torch.equal(other, sent)
        assert torch.equal(sent, ramp(1000))

    def test_every_storage_is_its_own(self, loop: Loopback, opener: Copier) -> None:
        """Each storage has its size from the worker: torch.save of one tensor writes only that one."""
        batch = batch_of(opener, loop.send([ramp(64 * KIB), ramp(1000), ramp(10)]))
        assert [tensor.untyped_storage().nbytes() for tensor in batch] == [256 * KIB, 4000, 40]
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch}) == 3
        assert not any(tensor._is_view() for tensor in batch)

    def test_views_share(self, loop: Loopback, opener: Copier) -> None:
        """Views share memory as in the worker, whether small beside the batch or not."""
        large, small = ramp(64 * KIB), ramp(100)
        batch = batch_of(opener, loop.send((large, large[::2], small, small.view(10, 10).t())))
        assert batch[1].untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()
        batch[2].zero_()
        assert not batch[3].any()

    def test_arrays_are_writable(self, loop: Loopback, opener: Copier) -> None:
        """Arrays are writable and do not share memory with the worker."""
        sent = np.arange(50_000.0)
        batch = batch_of(opener, loop.send([sent, ramp(10)]))
        batch[0] += 1
        assert batch[0][:3].tolist() == [1, 2, 3]
        assert sent[:3].tolist() == [0, 1, 2]

    def test_a_batch_that_outgrew_its_slot(self, loop: Loopback, opener: Copier) -> None:
        """It is in one slot, like any other."""
        loop.send(ramp(256 * KIB))
        batch: list[Any] = [ramp(200 * KIB), np.arange(100.0 * KIB), ramp(1000 * KIB), ramp(7)]
        opened: list[Any] = batch_of(opener, loop.send(batch))
        assert [one.tolist() for one in opened] == [one.tolist() for one in batch]

    def test_a_batch_without_memory(self, loop: Loopback, opener: Copier) -> None:
        """A batch without memory arrives unchanged."""
        assert batch_of(opener, loop.send(["text", None, {"x": 7}])) == ["text", None, {"x": 7}]

    def test_nothing_is_begun_before_its_turn(self, loop: Loopback, opener: Copier) -> None:
        """A parcel keeps its slot, and releases it if it is never opened."""
        parcel = loop.send(ramp(1000))
        opener.arrived(parcel)
        opener.poll()
        assert parcel.begun is None
        assert loop.num_on_loan() == 1
        opener.restart()
        del parcel
        assert loop.num_on_loan() == 0


class TestLender:
    """Nothing is copied; the slot is lent."""

    def test_it_is_the_slot(self, loop: Loopback) -> None:
        """The tensor is the slot's memory: writes at one end are visible at the other."""
        tensor = batch_of(Lender(pins=False), loop.send(ramp(64 * KIB)))
        assert within(tensor, loop)
        (slot,) = loop.pool.slots
        torch.frombuffer(memory.view_of(memory.window(slot.address, 4, owner=slot)), dtype=torch.float32)[0] = -7
        assert tensor[0] == -7

    @pytest.mark.parametrize(
        "refer",
        [
            lambda batch: batch,
            lambda batch: batch[0],
            lambda batch: batch[1][5],
            lambda batch: batch[0].untyped_storage(),
            lambda batch: batch[0].detach().numpy(),
            lambda batch: (batch[1] * torch.ones(64 * KIB, requires_grad=True)).sum(),
            pytest.param(
                lambda batch: batch[2],
            ),
        ],
        ids=["batch", "tensor", "scalar view", "storage", "tensor as array", "graph", "array"],
    )
    def test_the_slot_is_lent_until_the_last_reference_is_gone(
        self, loop: Loopback, refer: Callable[[Any], object]
    ) -> None:
        """One reference to any part keeps the whole slot."""
        kept = refer(batch_of(Lender(pins=False), loop.send((ramp(64 * KIB), ramp(64 * KIB), np.arange(32.0 * KIB)))))
        assert loop.num_on_loan() == 1
        del kept
        assert loop.num_on_loan() == 0

    def test_an_array_is_not_written_over(self, loop: Loopback) -> None:
        """A batch that is kept does not change, however many batches follow."""
        lender = Lender(pins=False)
        kept = [batch_of(lender, loop.send(np.full(32 * KIB, float(number)))) for number in range(NUM_KEPT)]
        assert [np.unique(array).tolist() for array in kept] == [[float(number)] for number in range(len(kept))]

    @pytest.mark.parametrize("label", [ramp(100), np.arange(200.0)], ids=["tensor", "array"])
    def test_what_is_small_beside_its_batch_does_not_keep_the_slot(self, loop: Loopback, label: Any) -> None:
        """A loop that keeps the labels of an epoch must not keep all images with them."""
        labels = []
        for _ in range(NUM_KEPT):
            parcel = loop.send({"image": ramp(64 * KIB), "label": label})
            labels.append(batch_of(Lender(pins=False), parcel)["label"])
            del parcel
            assert loop.num_on_loan() == 0
        assert all((one == label).all() for one in labels)
        assert len(loop.pool.slots) == 1

    def test_a_small_batch_is_lent_as_a_whole(self, loop: Loopback) -> None:
        """A small tensor that is large beside its batch is not copied."""
        assert within(batch_of(Lender(pins=False), loop.send(ramp(10))), loop)
        assert all(
            within(tensor, loop) for tensor in batch_of(Lender(pins=False), loop.send([ramp(100)] * 2 + [ramp(99)]))
        )

    @pytest.mark.parametrize(
        ("num_bytes", "batch_bytes", "small"),
        [(1, 8, False), (1, 9, True), (256 * KIB, 1 << 30, True), (256 * KIB + 1, 1 << 30, False), (100, 100, False)],
    )
    def test_what_is_small(self, num_bytes: int, batch_bytes: int, *, small: bool) -> None:
        """Small means at most 256 KiB, and less than an eighth of the batch."""
        assert is_small(num_bytes, batch_bytes) is small


class TestCopier:
    """The slot is free at once."""

    @pytest.mark.parametrize(
        "batch",
        [ramp(64 * KIB), {"x": ramp(1000), "y": np.arange(1000.0)}, np.arange(1000), [ramp(10), ramp(10)]],
        ids=["tensor", "dict", "array", "list"],
    )
    def test_nothing_opened_refers_to_it(self, loop: Loopback, batch: Any) -> None:
        """Neither tensors nor arrays refer to the slot: the batch stays intact when the slot is overwritten."""
        parcel = loop.send(batch)
        opened = batch_of(Copier(pins=False), parcel)
        before = repr(opened)
        del parcel
        assert loop.num_on_loan() == 0
        (slot,) = loop.pool.slots
        slot.poison()
        assert repr(opened) == before

    def test_kept_batches_hold_no_slots(self, loop: Loopback) -> None:
        """A loop that keeps batches needs one slot; with lent slots, it needs one for each batch."""
        kept = [batch_of(Copier(pins=False), loop.send(ramp(1000) + number)) for number in range(NUM_KEPT)]
        assert [int(tensor[0]) for tensor in kept] == list(range(NUM_KEPT))
        assert len(loop.pool.slots) == 1
        kept = [batch_of(Lender(pins=False), loop.send(ramp(1000) + number)) for number in range(NUM_KEPT)]
        assert [int(tensor[0]) for tensor in kept] == list(range(NUM_KEPT))
        assert len(loop.pool.slots) == NUM_KEPT
