"""Batches that a slot cannot take travel otherwise, with a reason; and no failure of a batch loses its slot."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

from numapin.data.opening.host import Copier, copied, stand_ins
from numapin.data.wire.message import SLOT, SPILL, Miss, decode
from numapin.data.wire.tensors import unpickle
from numapin.data.worker.packing import Packer
from tests.data.batches import Sample, bytes_of, in_slot, ramp, same
from tests.data.loopback import Loopback, batch_of, lent, loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB: Final = 1 << 10
SLOT_BYTES: Final = 64 * KIB


class Unpicklable:
    """Fails after the tensors before it have been put into the slot."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse."""
        raise ValueError("not this one")


@pytest.fixture
def loop() -> Iterator[Loopback]:
    """Give a ring with five slots of 64 KiB."""
    with loopback(SLOT_BYTES) as made:
        yield made


class _Subclass(torch.Tensor):
    """A user's own tensor type."""


SPECIAL: Final[dict[str, Callable[[], torch.Tensor]]] = {
    "sparse": lambda: torch.eye(30).to_sparse(),
    "sparse rows": lambda: torch.eye(30).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(300), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
    "with gradient": lambda: torch.ones(300, requires_grad=True),
    "conjugate": lambda: torch.ones(300, dtype=torch.complex64).conj(),
    "without data": lambda: torch.ones(300, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.ones(300)),
    "subclass": lambda: torch.ones(300).as_subclass(_Subclass),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds of tensors that are in beta or deprecated
class TestTorchsWay:
    """Tensors that only torch can send stay in the pickle."""

    @pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
    @pytest.mark.parametrize("moves", [False, True], ids=["host", "device"])
    def test_it_arrives_beside_what_is_in_the_slot(self, make: Callable[[], torch.Tensor], *, moves: bool) -> None:
        """It keeps its type; if the batch goes to a device, it is moved there once rebuilt."""
        moved: list[object] = []

        def mover(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(type(tensor))
            return tensor

        with loopback(SLOT_BYTES, moves=moves) as loop:
            parcel = loop.send((ramp(10), make(), np.arange(300.0)))
            assert parcel.head.buffers == ((0, None, ~1) if moves else (0, ~1))
            over_copy = partial(Copier(pins=False)._copy, parcel)
            batch: Any = unpickle(parcel.body, stand_ins(parcel, over_copy, copied, mover))
            plain, special, array = batch
            assert same((plain, array), (ramp(10), np.arange(300.0)))
            expected = make()
            assert moved == ([type(expected)] if moves else [])
            assert type(special) is type(expected)
            looks = [(t.layout, t.dtype, t.requires_grad, t.is_quantized) for t in (special, expected)]
            assert looks[0] == looks[1]

    @pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
    def test_it_is_a_miss(self, loop: Loopback, make: Callable[[], torch.Tensor]) -> None:
        """The reason is reported even if the rest is in a slot."""
        assert loop.post([make()])[0].miss == Miss.UNSUPPORTED
        head, _ = loop.post([ramp(3), make()])
        assert (head.miss, head.parts[SLOT]) == (Miss.UNSUPPORTED, (4, 256))

    def test_shared_memory_is_left_to_torch(self, loop: Loopback) -> None:
        """It is sent without a copy: the rank sees later writes of the worker."""
        shared = ramp(300).share_memory_()
        head, body = loop.post(shared)
        assert (head.miss, head.parts) == (Miss.SHARED, (None, None))
        arrived: Any = unpickle(body, iter(()))
        shared[5] = -1
        assert arrived[5] == -1

    def test_shared_memory_that_must_be_pinned_is_copied(self) -> None:
        """For the GPU it must be in a slot, so it is copied."""
        with loopback(SLOT_BYTES, pins=True) as loop:
            in_slot(loop, ramp(300).share_memory_())


class TestMisses:
    """Batches that do not fit into a slot, and the reasons."""

    def test_what_is_too_large_for_the_rest_of_the_slot_is_spilled(self, loop: Loopback) -> None:
        """The parts that fit go in; the head has the slot size that the whole batch would need."""
        batch = [ramp(12 * KIB), ramp(8 * KIB), ramp(4 * KIB - 64), np.arange(8.0 * KIB)]
        parcel = loop.send(batch)
        assert same(batch_of(Copier(pins=False), parcel), batch)
        head = parcel.head
        assert [part for part, _, _ in head.storages] == [SLOT, SPILL, SLOT, SPILL]
        assert (head.miss, head.wanted_bytes) == (Miss.TOO_LARGE, 160 * KIB - 256)

    def test_a_slot_can_be_filled_to_its_last_byte(self, loop: Loopback) -> None:
        """A single byte too many does not fit."""
        assert in_slot(loop, ramp(16 * KIB)).parts[SLOT] == (4, SLOT_BYTES)
        head, _ = loop.post(torch.zeros(SLOT_BYTES + 1, dtype=torch.uint8))
        assert (head.miss, head.parts[SLOT]) == (Miss.TOO_LARGE, None)

    def test_before_there_are_slots_all_is_spilled(self) -> None:
        """The rank learns the size of slots from batches that have separate memory."""
        with loopback(0) as loop:
            one, other = loop.send(ramp(1000)), loop.send([np.arange(1000), ramp(5)])
            assert [parcel.head.miss for parcel in (one, other)] == [Miss.STARTING] * 2
            assert [parcel.head.wanted_bytes for parcel in (one, other)] == [4096, 8192 + 256]
            assert same(batch_of(Copier(pins=False), one), ramp(1000))
            assert same(batch_of(Copier(pins=False), other), [np.arange(1000), ramp(5)])

    def test_without_a_free_slot_all_is_spilled(self, loop: Loopback) -> None:
        """The rank holds all slots; nothing waits and nothing is overwritten."""
        kept = [loop.send(ramp(10) + number) for number in range(5)]
        parcel = loop.send(ramp(10) - 1)
        assert parcel.head.miss == Miss.NO_SLOT
        opened = [batch_of(Copier(pins=False), one) for one in (*kept, parcel)]
        assert [int(tensor[0]) for tensor in opened] == [0, 1, 2, 3, 4, -1]

    def test_without_a_ring_all_goes_torchs_way(self) -> None:
        """So does a batch for which there is no address space."""
        head, body = decode(Packer(None, worker=3, pins=False, moves=False).pack(9, (ramp(300), np.arange(300))))
        assert head is not None
        assert (head.number, head.worker, head.miss, head.parts, head.buffers) == (
            9,
            3,
            Miss.NO_RING,
            (None, None),
            (),
        )
        assert same(unpickle(body, iter(())), (ramp(300), np.arange(300)))

    def test_what_is_kept_in_the_worker_blocks_its_slot(self, loop: Loopback) -> None:
        """A collate_fn that caches its batches finds them unchanged, and the reason is reported."""
        kept = []
        for number in range(8):
            tensor = loop.packer.allocate(torch.float32, (100,))
            assert tensor is not None
            kept.append(tensor.fill_(number))
            head, _ = loop.post(tensor)
            if (taken := head.parts[SLOT]) is not None:
                loop.ring.control.set_state(taken[0], 100 + number)  # the rank is done with it
        assert head.miss == Miss.KEPT
        assert [tensor.unique().tolist() for tensor in kept] == [[number] for number in range(8)]
        kept.clear()
        del tensor
        in_slot(loop, ramp(10))


class TestAllocate:
    """Memory for batches that are collated before they are packed."""

    @pytest.mark.parametrize("size", [(), (7,), (3, 4, 5)])
    def test_it_is_contiguous_and_in_the_slot(self, loop: Loopback, size: tuple[int, ...]) -> None:
        """Tensors written there are sent without a copy."""
        tensor = loop.packer.allocate(torch.float64, size)
        assert tensor is not None
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (size, torch.float64, True)
        tensor.fill_(2.5)
        head, _ = loop.post([tensor])
        assert (head.storages, head.parts[SLOT]) == (((SLOT, 0, tensor.nbytes),), (4, -(-tensor.nbytes // 256) * 256))
        slot = loop.ring._memories[0].mapped[4 * SLOT_BYTES : 5 * SLOT_BYTES]
        assert bytes(slot[: tensor.nbytes]) == bytes_of(tensor)

    def test_two_do_not_overlap(self, loop: Loopback) -> None:
        """Each tensor begins at a multiple of 256 bytes."""
        one, other = (loop.packer.allocate(torch.uint8, (100,)) for _ in range(2))
        assert one is not None
        assert other is not None
        assert other.data_ptr() - one.data_ptr() == 256
        assert one.data_ptr() % 256 == 0
        assert loop.post((one, other, ramp(3)))[0].storages == ((SLOT, 0, 100), (SLOT, 256, 100), (SLOT, 512, 12))

    def test_a_view_of_it_brings_no_copy(self, loop: Loopback) -> None:
        """A small view of a collated tensor is not copied: it is in the slot already."""
        tensor = loop.packer.allocate(torch.float32, (1000,))
        assert tensor is not None
        head, _ = loop.post(tensor.fill_(1)[100:110])
        assert (head.storages, head.parts[SLOT]) == (((SLOT, 400, 40),), (4, 4096))

    def test_nothing_needs_no_room(self, loop: Loopback) -> None:
        """No slot is taken for it."""
        assert loop.packer.allocate(torch.float32, (0, 3)) is None
        assert loop.num_free() == 5

    def test_another_thread_gets_none(self, loop: Loopback) -> None:
        """A batch may be collated on several threads: which batch would it be for?"""
        found: list[Any] = ["not asked"]
        thread = threading.Thread(target=lambda: found.append(loop.packer.allocate(torch.float32, (3,))))
        thread.start()
        thread.join(20)
        assert found == ["not asked", None]
        assert loop.num_free() == 5

    def test_without_a_ring_there_is_none(self) -> None:
        """Torch stacks as ever."""
        assert Packer(None, worker=0, pins=False, moves=False).allocate(torch.float32, (3,)) is None


class TestEnd:
    """Whatever happens to a batch, the next one gets its slot."""

    def test_a_batch_that_cannot_be_pickled_gives_its_slot_back(self, loop: Loopback) -> None:
        """The error is pickle's, and the slot is free again."""
        for _ in range(10):
            with pytest.raises(ValueError, match="not this one"):
                loop.packer.pack(0, [ramp(100), np.arange(1000), Unpicklable()])
            assert loop.num_free() == 5
        in_slot(loop, ramp(100))

    def test_so_does_one_that_cannot_be_sent(self, loop: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
        """The spill cannot be sent to the rank, after the whole batch is in memory."""

        def refuse(*_args: object) -> None:
            raise OSError(109, "Too many references: cannot splice")

        batch = [ramp(100), ramp(32 * KIB)]
        with monkeypatch.context() as patch:
            patch.setattr(loop.ring.control.handover, "send", refuse)
            with pytest.raises(OSError, match="Too many references"):
                loop.packer.pack(0, batch)
        assert loop.num_free() == 5
        assert same(lent(loop, batch), batch)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    def test_so_does_one_that_is_interrupted(self, loop: Loopback, error: type[BaseException]) -> None:
        """Ctrl-C at any moment loses no slot."""

        class Interrupted:
            def __reduce__(self) -> tuple[Any, ...]:
                raise error

        with pytest.raises(error):
            loop.packer.pack(0, [ramp(100), Interrupted()])
        assert loop.num_free() == 5

    def test_a_slot_in_which_nothing_is_sent_is_given_back(self, loop: Loopback) -> None:
        """The batch was collated, but something else was returned."""
        assert loop.packer.allocate(torch.float32, (100,)) is not None
        assert loop.num_free() == 4
        assert loop.post("something else")[0].parts == (None, None)
        assert loop.num_free() == 5

    def test_a_batch_collated_and_dropped_is_nothing_to_the_next(self, loop: Loopback) -> None:
        """The error that is sent instead also frees the slot."""
        assert loop.packer.allocate(torch.float32, (12 * KIB,)) is not None
        loop.post(ValueError("dataset"))
        assert in_slot(loop, ramp(12 * KIB)).storages == ((SLOT, 0, 48 * KIB),)

    def test_nothing_refers_to_the_batch_any_more(self, loop: Loopback) -> None:
        """A packed batch is freed with its last reference, without waiting for the garbage collector."""
        batch = Sample(ramp(100), 1, [np.arange(1000), ramp(1 << 15), ramp(7).requires_grad_()])
        watched = [weakref.ref(thing) for thing in (batch, batch.image, *batch.more)]
        gc.disable()
        try:
            loop.packer.pack(0, batch)
            del batch
            assert [ref() for ref in watched] == [None] * 5
        finally:
            gc.enable()

    def test_an_error_does_not_keep_it_either(self, loop: Loopback) -> None:
        """A batch that could not be packed is freed with its error."""
        batch = [ramp(100), Unpicklable()]
        watched = weakref.ref(batch[0])
        with pytest.raises(ValueError, match="not this one"):
            loop.packer.pack(0, batch)
        del batch
        gc.collect()
        assert watched() is None

    def test_the_pickle_is_small(self, loop: Loopback) -> None:
        """The pickle does not contain the tensors and arrays a second time."""
        message = loop.packer.pack(0, {"x": ramp(4000), "y": np.arange(4000)})
        assert len(message) < 1000
