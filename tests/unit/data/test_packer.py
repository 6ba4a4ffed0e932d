"""Batches that no slot can carry travel otherwise, with a reason; and no failure of a batch loses its slot."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

from tests.data.batches import Sample, in_slot, ramp, same
from tests.data.loopback import Loopback, batch_of, lent, loopback, num_mapped, num_open
from tests.unit.data.seam import (
    DTYPES,
    MOST_KEPT,
    NO_SLOT,
    Copier,
    Lender,
    Miss,
    Packer,
    copied,
    decode,
    packing,
    placement,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KIB: Final = 1 << 10


def allocated(loop: Loopback, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """Return memory of the batch that the worker is making."""
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
    """Tensors that only torch can send stay in the pickle."""

    @pytest.mark.parametrize("kind", SPECIAL)
    @pytest.mark.parametrize("moves", [False, True], ids=["host", "device"])
    def test_it_arrives_beside_what_is_in_the_slot(self, kind: str, *, moves: bool) -> None:
        """It keeps its type, and is a miss; if the batch goes to a device, it is moved there once rebuilt."""
        make, moved = SPECIAL[kind], list[object]()

        def mover(tensor: torch.Tensor) -> torch.Tensor:
            moved.append(type(tensor))
            return tensor

        with loopback(moves=moves) as loop:
            parcel = loop.send((ramp(10), make(), np.arange(300.0)))
            in_slot = (0, DTYPES.index(torch.float32), (10,), (1,), 0, True)
            assert parcel.head.buffers == ((in_slot, None, 1) if moves else (in_slot, 1))
            assert parcel.head.miss == (None if kind == "without data" else Miss.UNSUPPORTED)

            def storage_at(start: int, size: int) -> tuple[torch.UntypedStorage, int]:
                return torch.frombuffer(copied(parcel.view, start, size), dtype=torch.uint8).untyped_storage(), 0

            batch: Any = unpack(parcel, storage_at, partial(copied, parcel.view), mover)
            plain, special, array = batch
            assert same((plain, array), (ramp(10), np.arange(300.0)))
            expected = make()
            assert moved == ([type(expected)] if moves else [])
            looks = [(type(t), t.layout, t.dtype, t.requires_grad, t.is_quantized) for t in (special, expected)]
            assert looks[0] == looks[1]

    def test_shared_memory_is_left_to_torch(self, loop: Loopback) -> None:
        """It is sent without a copy: the rank sees later writes of the worker."""
        shared = ramp(300).share_memory_()
        head, body = loop.post(shared)
        assert (head.miss, head.slot) == (Miss.SHARED, NO_SLOT)
        arrived: Any = pickle.loads(body)
        shared[5] = -1
        assert arrived[5] == -1

    def test_shared_memory_that_must_be_pinned_is_copied(self) -> None:
        """For the GPU it must be in a slot, so it is copied."""
        with loopback(pins=True) as loop:
            in_slot(loop, ramp(300).share_memory_())


class TestSlots:
    """Batches that need more than the slot that came with the task."""

    @pytest.mark.parametrize("code", [errno.EMFILE, None], ids=["no memory", "no pool"])
    def test_without_a_slot_all_goes_torchs_way(
        self, loop: Loopback, monkeypatch: pytest.MonkeyPatch, code: int | None
    ) -> None:
        """The batch arrives, the reason is reported, and the next batch has a slot again."""
        batch = (ramp(1000), np.arange(1000.0), b"abc" * 50_000)
        if code is None:
            packer = Packer(None, worker=0, pins=False, moves=False)
            assert packer.allocate(torch.float32, (3,)) is None
            head, body = decode(packer.pack(9, batch))
            assert head is not None
            assert decode(packer.pack(9, b"abc" * 50_000))[0] == head._replace(miss=None, num_bytes=0, wanted_bytes=0)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(os, "memfd_create", _refuse(code))
                head, body = loop.post(batch)
            in_slot(loop, ramp(1000))
        assert head.miss is (Miss.NO_SLOTS if code is None else Miss.NO_MEMORY)
        assert (head.slot, head.buffers, head.body_room) == (NO_SLOT, (), None)
        assert same(pickle.loads(body), batch)

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
            assert loop.send([ramp(20 * KIB), ramp(20 * KIB)]).head.miss is Miss.NO_MEMORY
            assert len(refused) > 2  # the next batch tries again
        assert (parcel.head.miss, parcel.head.storages) == (Miss.NO_MEMORY, ((0, 48 * KIB), (48 * KIB, 4 * KIB)))
        assert same(batch_of(Copier(pins=False), parcel)[:3], batch)

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
        assert same(batch_of(Copier(pins=False), parcel), batch)
        places = [entry[0] for entry in parcel.head.buffers if isinstance(entry, tuple)]
        assert (parcel.head.miss, places) == (Miss.NO_MEMORY, [0])
        assert len(calls) > 2


def _refuse(code: int) -> Callable[..., Any]:
    def refuse(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_what_is_sent_of_it(loop: Loopback) -> None:
    """A view brings no copy; the rank counts what the batch uses, once; a slot has room for what was dropped."""
    head, _ = loop.post(allocated(loop, torch.float32, (1000,)).fill_(1)[100:110])
    assert (head.storages, head.slot_bytes, head.num_bytes) == (((400, 40),), 440, 40)
    _first, used, _last = (allocated(loop, torch.float32, (1000,)) for _ in range(3))
    head, _ = loop.post((used.fill_(1), used[500:], used.numpy()))
    assert (head.slot_bytes, head.num_bytes, head.wanted_bytes) == (4096 + 4000, 4000, 3 * 4096)


def test_a_worker_whose_code_keeps_many_batches_gets_none(loop: Loopback) -> None:
    """Its batches are copied into slots that later batches use, too; once it keeps fewer, it gets memory again."""
    kept, of_others = [], num_mapped()
    for number in range(40):
        tensor = loop.begin().allocate(torch.float32, (1000,))
        kept.append((torch.empty(1000) if tensor is None else tensor).fill_(number))
        assert loop.send(kept[-1]).head.miss is None
    del tensor
    assert [each.unique().tolist() for each in kept] == [[number] for number in range(40)]
    assert num_mapped() - of_others <= 2 * MOST_KEPT + 6  # in this process the rank's end has them mapped, too
    assert loop.begin().allocate(torch.float32, (1000,)) is None
    kept.clear()
    loop.send(ramp(1000))
    assert loop.begin().allocate(torch.float32, (1000,)) is not None


class Raises:
    """An object that raises an error when it is pickled, after the tensors before it were put into the slot."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse."""
        raise self.error


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_tensor_that_comes_twice_stays_one(loop: Loopback, kind: type[Any]) -> None:
    """As in any pickle."""
    x = ramp(4 * KIB)
    batch: Any = lent(loop, kind([x, x]))
    assert type(batch) is kind
    assert batch[0] is batch[1]
    assert torch.equal(batch[0], x)


def test_keys_with_memory(loop: Loopback) -> None:
    """Tensors in keys and in values keep their places."""
    batch = lent(loop, {("a", ramp(KIB)): ramp(2 * KIB), ("b", ramp(3 * KIB)): ramp(4 * KIB)})
    assert [(key[0], len(key[1]) // KIB, len(value) // KIB) for key, value in batch.items()] == [
        ("a", 1, 2),
        ("b", 3, 4),
    ]


class TestEnd:
    """Whatever happens to a batch, the next one gets its slot."""

    @pytest.mark.parametrize("error", [ValueError("not this one"), KeyboardInterrupt(), MemoryError()], ids=repr)
    def test_a_batch_that_cannot_be_pickled_gives_its_slot_back(
        self, loop: Loopback, granted: int, error: BaseException
    ) -> None:
        """Whatever the error is, nothing keeps the batch, and the slot serves what is sent instead."""
        batch = [ramp(100), np.arange(1000), Raises(error)]
        for _ in range(10):
            with pytest.raises(type(error)):
                loop.packers[0].pack(0, batch)
        watched = weakref.ref(batch.pop(0))
        error.__traceback__ = None
        gc.collect()
        assert watched() is None
        assert in_slot(loop, ramp(100))[3:6] == (granted, 400, 0)

    @pytest.fixture
    def granted(self, loop: Loopback) -> int:
        """Give the number of a slot of 64 KiB that came with the worker's task."""
        slot = in_slot(loop, ramp(16 * KIB)).slot
        loop.begin()
        return slot

    def test_a_new_slot_of_such_a_batch_is_dropped(self, loop: Loopback) -> None:
        """Neither memory nor a descriptor is left of it."""
        gc.collect()
        before = num_mapped()
        for _ in range(3):
            with pytest.raises(ValueError, match="not this one"):
                loop.pack([ramp(100), Raises(ValueError("not this one"))])
            assert num_open() == 0
        gc.collect()
        assert num_mapped() <= before

    def test_so_does_one_that_cannot_be_sent(
        self, loop: Loopback, granted: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A new slot cannot be handed to the rank, after the batch has outgrown the one that it was granted."""
        batch = [ramp(100), ramp(32 * KIB)]
        before = num_open()
        with monkeypatch.context() as patch:
            patch.setattr(loop.pool.arrivals, "send", _refuse(errno.ETOOMANYREFS))
            for _ in range(5):
                with pytest.raises(OSError, match="Too many references"):
                    loop.packers[0].pack(0, batch)
        assert num_open() == before
        assert in_slot(loop, ramp(100)).slot == granted
        in_slot(loop, batch)

    def test_a_slot_in_which_nothing_is_sent_is_given_back(self, loop: Loopback, granted: int) -> None:
        """The batch was collated, but something else was returned; the slot waits in the worker for the next one."""
        assert loop.begin().allocate(torch.float32, (100,)) is not None
        head = loop.send("something else").head
        assert (head.slot, head.miss, head.report.refused) == (NO_SLOT, None, ())
        assert in_slot(loop, ramp(100)).slot == granted

    def test_nothing_refers_to_the_batch_any_more(self, loop: Loopback) -> None:
        """A packed batch is freed with its last reference, without waiting for the garbage collector."""
        batch = Sample(ramp(100), 1, [np.arange(1000), ramp(1 << 15), ramp(7).requires_grad_()])
        watched = [weakref.ref(thing) for thing in (batch, batch.image, *batch.more)]
        gc.disable()
        try:
            loop.packers[0].pack(0, batch)
            del batch
            assert [ref() for ref in watched] == [None] * 5
        finally:
            gc.enable()

    def test_a_large_batch_of_objects_leaves_nothing(self, loop: Loopback) -> None:
        """A pickler remembers each object: its table would stay, and slow down every later batch of the worker."""
        packer = loop.packers[0]
        packer.pack(0, [[number] for number in range(100_000)])
        with pytest.raises(ValueError, match="not this one"):
            packer.pack(0, [[[number] for number in range(100_000)], Raises(ValueError("not this one"))])
        packer.pack(0, ramp(10))
        assert sys.getsizeof(packer) < 10_000

    @pytest.mark.parametrize("batch", [b"abc" * 50_000, (ramp(300), ["a", b"b" * 100_000], np.arange(4000))])
    def test_a_long_pickle_is_in_the_slot(self, loop: Loopback, batch: object) -> None:
        """A pipe would take many calls for it. The slot is for the batch as a whole, and free afterwards."""
        assert len(loop.packers[0].pack(0, batch)) < 500
        parcel = loop.send(batch)
        assert parcel.head.slot_bytes <= parcel.head.wanted_bytes
        assert same(batch_of(Copier(pins=False), parcel), batch)
        del parcel
        assert loop.num_on_loan() == 0

    @pytest.mark.parametrize(("num_floats", "stays"), [(100_000, False), (900_000, True)])
    def test_a_kept_tensor_does_not_keep_a_longer_pickle(self, loop: Loopback, num_floats: int, *, stays: bool) -> None:
        """A loop that keeps the tensors of all batches must not keep all texts with them."""
        tensor, _text = batch_of(Lender(pins=False), loop.send((ramp(num_floats), b"abc" * 500_000)))
        assert same(tensor, ramp(num_floats))
        assert loop.num_on_loan() == int(stays)

    def test_a_long_pickle_is_not_among_the_memory_for_the_gpu(self, loop: Loopback) -> None:
        """Only what lies before it is copied; nothing if there are no tensors."""
        assert not loop.send(b"abc" * 500_000).view
        assert len(loop.send((ramp(1024), b"abc" * 500_000)).view) == 4096
