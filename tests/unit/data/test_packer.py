"""Batches that no slot can carry travel otherwise, with a reason; and no failure of a batch loses its slot."""

from __future__ import annotations

import errno
import gc
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch

from tests.contract.datasets import Raise, Reduced
from tests.data.loopback import Loopback, batch_of, in_slot, lent, loopback, num_open, ramp, same
from tests.unit.data import seam
from tests.unit.data.seam import copied, packing, placement, unpack

KIB: Final = 1 << 10


def allocated(loop: Loopback, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    found = loop.begin().allocate(dtype, size)
    assert found is not None
    return found


SPECIAL: Final[dict[str, Callable[[], torch.Tensor]]] = {
    "sparse": lambda: torch.eye(30).to_sparse(),
    "sparse rows": lambda: torch.eye(30).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(1024), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(4)]),
    "with gradient": lambda: torch.ones(300, requires_grad=True),
    "without data": lambda: torch.ones(300, device="meta"),
    "parameter": lambda: torch.nn.Parameter(torch.ones(300)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds of tensors that are in beta or deprecated
class TestTorchsWay:
    @pytest.mark.parametrize("kind", SPECIAL)
    def test_it_is_moved_beside_what_is_in_the_slot(self, kind: str) -> None:
        """It keeps its type, and is a miss; if the batch goes to a device, it is moved there once rebuilt."""
        make, moved = SPECIAL[kind], list[object]()

        def mover(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(type(tensor))
            return tensor

        with loopback(moves=True) as loop:
            parcel = loop.send((ramp(10), make(), np.arange(300.0)))
            in_slot = (0, seam.DTYPES.index(torch.float32), (10,), (1,), 0, True)
            assert parcel.head.buffers == (in_slot, None, 1)
            assert parcel.head.miss == (None if kind == "without data" else seam.Miss.UNSUPPORTED)

            def storage_at(start: int, size: int) -> tuple[torch.UntypedStorage, int]:
                return torch.frombuffer(copied(parcel.view, start, size), dtype=torch.uint8).untyped_storage(), 0

            batch: Any = unpack(parcel, storage_at, partial(copied, parcel.view), mover)
            plain, special, array = batch
            assert same((plain, array), (ramp(10), np.arange(300.0)))
            expected = make()
            assert moved == [type(expected)]
            looks = [(type(t), t.layout, t.dtype, t.requires_grad, t.is_quantized) for t in (special, expected)]
            assert looks[0] == looks[1]

    def test_shared_memory_that_must_be_pinned_is_copied(self) -> None:
        """For the GPU it must be in a slot, so it is copied."""
        with loopback(pins=True) as loop:
            in_slot(loop, ramp(300).share_memory_())


class TestSlots:
    def test_a_batch_that_does_not_fit_goes_on_in_a_new_slot(self, loop: Loopback) -> None:
        """It is in one slot as a whole, at the offsets that it had, and nothing larger than needed is kept."""
        loop.send(ramp(16 * KIB))
        batch = [ramp(12 * KIB), ramp(8 * KIB), ramp(4 * KIB - 64), np.arange(8.0 * KIB)]
        head = in_slot(loop, batch)
        starts = [0, 48 * KIB, 80 * KIB, 96 * KIB - 256]
        assert [start for start, _ in head.storages] == starts
        assert (head.made_bytes, head.miss, head.wanted_bytes) == (160 * KIB, None, 160 * KIB - 256)

    def test_what_was_collated_in_the_old_slot_is_copied_at_the_end(self, loop: Loopback) -> None:
        """Tensors in both, and views of them, arrive as they are when the batch is sent; views go on sharing."""
        loop.send(ramp(16 * KIB))
        first, second, third = (allocated(loop, torch.float32, (size,)) for size in (12 * KIB, 12 * KIB, 2 << 20))
        for number, tensor in enumerate((first, second, third)):
            tensor.fill_(number)
        first[7] = 9
        arrived = lent(loop, (first, second, third[1:], first[5:10], second[:3]))
        assert [tensor.unique().tolist() for tensor in arrived] == [[0, 9], [1], [2], [0, 9], [1]]
        arrived[0].fill_(-1)
        assert arrived[3].tolist() == [-1] * 5

    @pytest.mark.parametrize("limit", [64 * KIB, 256 * KIB, 1 << 20])
    def test_it_may_go_on_more_than_once(self, loop: Loopback, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        """Where address space is limited, a larger slot has little more room than was asked for."""
        loop.send(ramp(KIB))
        monkeypatch.setattr(packing, "_UNKNOWN_BYTES", limit)
        in_slot(loop, [ramp(3 * KIB) + number for number in range(100)])
        assert num_open() == len(loop.pool.slots)

    def test_without_memory_for_a_larger_slot_the_rest_goes_torchs_way(
        self, loop: Loopback, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was in the slot before stays there."""
        loop.send(ramp(16 * KIB))
        batch = [ramp(12 * KIB), ramp(8 * KIB), ramp(KIB)]
        loop.begin()
        refused: list[object] = []

        def refuse(*arguments: object) -> int:
            refused.append(arguments)
            raise OSError(errno.EMFILE, "too many")

        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            parcel = loop.send([*batch, *[ramp(8 * KIB) + number for number in range(50)]])
            assert len(refused) == 2  # with much room and with little, at the first tensor without room
            assert loop.send([ramp(20 * KIB), ramp(20 * KIB)]).head.miss is seam.Miss.NO_MEMORY
            assert len(refused) > 2  # the next batch tries again
        assert (parcel.head.miss, parcel.head.storages) == (seam.Miss.NO_MEMORY, ((0, 48 * KIB), (48 * KIB, 4 * KIB)))
        assert same(batch_of(seam.Copier(pins=False), parcel)[:3], batch)

    def test_memory_that_runs_out_in_the_middle_of_a_batch(
        self, loop: Loopback, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was written stays in its slot, the rest goes torch's way, and no signal ends the worker."""
        batch = [ramp(KIB), ramp(2 * KIB), ramp(3 * KIB)]
        touch, calls = placement.touch, []

        def run_out(address: int, num_bytes: int) -> None:
            calls.append(num_bytes)
            if len(calls) >= 2:
                raise OSError(errno.ENOMEM, "the kernel has no memory for this")
            touch(address, num_bytes)

        monkeypatch.setattr(placement, "touch", run_out)
        parcel = loop.send(batch)
        assert same(batch_of(seam.Copier(pins=False), parcel), batch)
        places = [entry[0] for entry in parcel.head.buffers if isinstance(entry, tuple)]
        assert (parcel.head.miss, places) == (seam.Miss.NO_MEMORY, [0])
        assert len(calls) > 2


def test_what_is_sent_of_it(loop: Loopback) -> None:
    """A view brings no copy; the rank counts what the batch uses, once; a slot has room for what was dropped."""
    head, _ = loop.post(allocated(loop, torch.float32, (1000,)).fill_(1)[100:110])
    assert (head.storages, head.slot_bytes, head.num_bytes) == (((400, 40),), 440, 40)
    _first, used, _last = (allocated(loop, torch.float32, (1000,)) for _ in range(3))
    head, _ = loop.post((used.fill_(1), used[500:], used.numpy()))
    assert (head.slot_bytes, head.num_bytes, head.wanted_bytes) == (4096 + 4000, 4000, 3 * 4096)


class TestEnd:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MemoryError])
    def test_a_batch_that_cannot_be_pickled_gives_its_slot_back(
        self, loop: Loopback, granted: int, error: type[BaseException]
    ) -> None:
        """Whatever the error is, nothing keeps the batch, and the slot serves what is sent instead."""
        batch = [ramp(100), np.arange(1000), Reduced(Raise(error))]
        for _ in range(10):
            with pytest.raises(error):
                loop.packers[0].pack(0, batch)
        watched = weakref.ref(batch.pop(0))
        gc.collect()
        assert watched() is None
        assert in_slot(loop, ramp(100))[3:6] == (granted, 400, 0)

    @pytest.fixture
    def granted(self, loop: Loopback) -> int:
        slot = in_slot(loop, ramp(16 * KIB)).slot
        loop.begin()
        return slot

    def test_so_does_one_that_cannot_be_sent(
        self, loop: Loopback, granted: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new slot cannot be handed to the rank, after the batch has outgrown the one that it was granted."""
        batch = [ramp(100), ramp(32 * KIB)]
        before = num_open()
        with monkeypatch.context() as patch:
            patch.setattr(loop.pool.arrivals, "send", Raise(OSError, (errno.ETOOMANYREFS, "Too many references")))
            for _ in range(5):
                with pytest.raises(OSError, match="Too many references"):
                    loop.packers[0].pack(0, batch)
        assert num_open() == before
        assert in_slot(loop, ramp(100)).slot == granted
        in_slot(loop, batch)

    def test_a_large_batch_of_objects_leaves_nothing(self, loop: Loopback) -> None:
        """A pickler remembers each object: its table would stay, and slow down every later batch of the worker."""
        packer = loop.packers[0]
        packer.pack(0, [[number] for number in range(100_000)])
        with pytest.raises(ValueError, match="is broken"):
            packer.pack(0, [[[number] for number in range(100_000)], Reduced(Raise(ValueError))])
        packer.pack(0, ramp(10))
        assert sys.getsizeof(packer) < 10_000

    @pytest.mark.parametrize("batch", [b"abc" * 50_000, (ramp(300), ["a", b"b" * 100_000], np.arange(4000))])
    def test_a_long_pickle_is_in_the_slot(self, loop: Loopback, batch: object) -> None:
        """A pipe would take many calls for it. The slot is for the batch as a whole, and free afterwards."""
        assert len(loop.packers[0].pack(0, batch)) < 500
        parcel = loop.send(batch)
        assert parcel.head.slot_bytes <= parcel.head.wanted_bytes
        assert same(batch_of(seam.Copier(pins=False), parcel), batch)
        del parcel
        assert loop.num_on_loan() == 0

    @pytest.mark.parametrize(("num_floats", "stays"), [(100_000, False), (900_000, True)])
    def test_a_kept_tensor_does_not_keep_a_longer_pickle(self, loop: Loopback, num_floats: int, *, stays: bool) -> None:
        """A loop that keeps the tensors of all batches must not keep all texts with them."""
        tensor, _text = batch_of(seam.Lender(pins=False), loop.send((ramp(num_floats), b"abc" * 500_000)))
        assert same(tensor, ramp(num_floats))
        assert loop.num_on_loan() == int(stays)
