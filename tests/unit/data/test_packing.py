"""Batches go into a slot, cast or as they are, and come out, opened over the slot or over copies; their messages."""

from __future__ import annotations

import gc
import pickle
from typing import Any, Final

import numpy as np
import pytest
import torch

from numapin.errors import UsageError
from tests.data.loopback import Loopback, batch_of, in_slot, lent, ramp, same
from tests.unit.data import seam
from tests.unit.data.seam import casts_of, decode, encode_plain
from tests.unit.data.seam import message_encode as encode

KIB: Final = 1 << 10
HEAD: Final = seam.Head(
    number=7,
    worker=3,
    slot=(5 << 32) + 1,
    slot_bytes=4096,
    made_bytes=8192,
    num_bytes=1 << 41,
    wanted_bytes=1 << 40,
    miss=None,
    storages=((0, 100), (256, 17)),
    buffers=((0, 5, (4, 25), (25, 1), 0, True), None, 1),
    report=seam.Report(kept=((5 << 32) + 1,), refused=(8, 9), notes=("memory on node 1 was refused",)),
)


@pytest.mark.parametrize("part_bytes", [1 << 30, 4], ids=["whole", "in parts"])
@pytest.mark.parametrize("body", [b"the pickle", b""], ids=["with a pickle", "with an empty pickle"])
@pytest.mark.parametrize("miss", [None, *seam.Miss], ids=str)
def test_a_batchs_message(
    monkeypatch: pytest.MonkeyPatch, body: bytes, miss: seam.Miss | None, part_bytes: int
) -> None:
    """Head and pickle come back, however many buffers there are and parts it takes; an empty pickle is a batch, too."""
    monkeypatch.setattr(seam.message, "_PART_BYTES", part_bytes)
    for head in (HEAD._replace(miss=miss), HEAD._replace(miss=miss, buffers=tuple(range(5000)))):
        assert decode(encode(head, body)) == (head, body)


@pytest.mark.parametrize("message", [(3, None), {"key": [1, 2]}, b"", None], ids=repr)
def test_a_plain_message(message: object) -> None:
    """The message is distinguished from a batch, whatever its contents are."""
    assert decode(encode_plain(message)) == (None, message)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
def test_dtypes(loop: Loopback) -> None:
    """Every byte of every dtype is kept, alone and after a tensor of an odd length."""
    names = {name for name in vars(torch) if name.startswith(("q", "bits"))}
    for dtype in sorted(set(seam.DTYPES) - {getattr(torch, name) for name in names}, key=str):
        tensor = torch.arange(2, 98, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        if dtype is torch.bool:
            tensor = torch.arange(96) % 3 == 0
        in_slot(loop, tensor)
        in_slot(loop, (torch.zeros(3, dtype=torch.uint8), tensor[5:], tensor))


def test_small_arrays_stay_in_the_pickle(loop: Loopback) -> None:
    """Arrays below 1 KiB stay in the pickle, which is cheaper. Tensors of any size go into the slot."""
    assert loop.post(np.zeros(127))[0].slot == seam.NO_SLOT
    assert in_slot(loop, np.zeros(128)).storages == ((0, 1024),)
    assert in_slot(loop, torch.zeros(1)).storages == ((0, 4),)


@pytest.mark.parametrize("batch", [None, "text", [], {"x": torch.zeros(0, 5)}], ids=repr)
def test_nothing_to_send_needs_no_slot(loop: Loopback, batch: Any) -> None:
    """For a batch without memory no slot is made, and it is not a miss."""
    head, body = loop.post(batch)
    assert (head.miss, head.slot, head.wanted_bytes) == (None, seam.NO_SLOT, 0)
    assert not loop.pool.slots
    assert same(pickle.loads(body), batch)


def test_conjugated_and_negated_views(loop: Loopback) -> None:
    """They are in the slot, share its memory, and keep their values, which torch's own pickling changes."""
    base = torch.view_as_complex(ramp(300, 2) + 1)
    batch = [base, base.conj(), base.conj().imag, torch._neg_view(base.conj()), base.conj()[5:]]
    arrived = lent(loop, batch)
    assert [(each.is_conj(), each.is_neg()) for each in arrived] == [(t.is_conj(), t.is_neg()) for t in batch]
    assert all(torch.equal(each, expected) for each, expected in zip(arrived, batch, strict=True))
    arrived[0].zero_()
    assert not any(each.any() for each in arrived)


def test_of_a_huge_storage_only_what_is_seen_is_sent(loop: Loopback) -> None:
    """A row of a large table is sent without the table, unless the table is at most four times its size."""
    table = ramp(1000, 1000)
    assert in_slot(loop, (table[7], table[9, :50])).storages == ((0, 4000), (4096, 200))
    assert in_slot(loop, ramp(4, 100)[2]).storages == ((0, 1600),)
    assert in_slot(loop, ramp(5, 100)[2]).storages == ((0, 400),)
    whole, part = lent(loop, (table[7], table[7, 10:20]))
    whole[10:20] = -1
    assert part.unique().tolist() == [-1]  # views within what was sent share it


@pytest.mark.parametrize("kind", [seam.Lender, seam.Copier])
def test_an_opened_batch_belongs_to_the_user(loop: Loopback, kind: type[seam.Copier]) -> None:
    """Each storage has its own size; edits reach views, but no other tensor or batch, nor the worker; arrays too."""
    sent: list[Any] = [ramp(64 * KIB), ramp(1000), np.arange(50_000.0), ramp(100)]
    sent.append(sent[3].view(10, 10).t())
    one, other = (batch_of(kind(pins=False), loop.send(sent)) for _ in range(2))
    tensors = [one[0], one[1], one[3]]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [256 * KIB, 4000, 400]
    assert not any(tensor._is_view() for tensor in tensors)
    for each in (one[0], one[2], one[3]):
        each[:] = 0
    assert not one[4].any()
    assert one[1].any()
    assert all((mine == theirs).all() for mine, theirs in zip(other, sent, strict=True))
    assert all(each.any() for each in sent)


@pytest.mark.parametrize("label", [ramp(100), np.arange(200.0)], ids=["tensor", "array"])
def test_what_is_small_beside_its_batch_does_not_keep_the_slot(loop: Loopback, label: Any) -> None:
    """A loop that keeps the labels of an epoch must not keep all images with them."""
    labels = [lent(loop, {"image": ramp(64 * KIB), "label": label})["label"] for _ in range(10)]
    assert all((one == label).all() for one in labels)
    assert (loop.num_on_loan(), len(loop.pool.slots)) == (0, 1)


def test_a_small_batch_is_lent_as_a_whole(loop: Loopback) -> None:
    """A small tensor that is large beside its batch is not copied."""
    for batch in ([ramp(10)], [ramp(100)] * 2 + [ramp(99)]):
        for tensor in lent(loop, batch):
            assert any(0 <= tensor.data_ptr() - slot.address < slot.num_bytes for slot in loop.pool.slots)


@pytest.mark.parametrize("batch", [ramp(64 * KIB), np.arange(1000)], ids=["a tensor", "an array"])
def test_nothing_copied_refers_to_the_slot(loop: Loopback, batch: Any) -> None:
    """The slot is free at once, so a loop that keeps batches needs one slot."""
    opened = batch_of(seam.Copier(pins=False), loop.send(batch))
    assert (loop.num_on_loan(), len(loop.pool.slots)) == (0, 1)
    assert same(opened, batch)


BF16, FLOAT = torch.bfloat16, torch.float32
CASTS = casts_of(BF16)


@pytest.mark.parametrize(
    ("cast", "pairs"),
    [
        (None, {}),
        (torch.bfloat16, {torch.float64: BF16, torch.float32: BF16}),
        (torch.float16, {torch.float64: torch.float16, torch.float32: torch.float16}),
        (torch.float32, {torch.float64: torch.float32}),
        ({torch.float32: torch.bfloat16}, {torch.float32: BF16}),
    ],
)
def test_what_is_cast(cast: object, pairs: dict[torch.dtype, torch.dtype]) -> None:
    """A dtype stands for all wider floating-point dtypes."""
    assert dict(casts_of(cast)) == pairs


@pytest.mark.parametrize(
    ("cast", "text"),
    [
        (torch.float64, "cast=torch.float64: tensors can be cast to torch.float32, torch.bfloat16 and"),
        (torch.int8, "cast=torch.int8: tensors can"),
        (torch.float8_e4m3fn, "cast=torch.float8_e4m3fn: tensors can"),
        ("bfloat16", "cast=bfloat16: tensors can"),
        ({torch.int64: BF16}, "cast from torch.int64: only torch.float64 and torch.float32 tensors can be cast"),
        ({torch.float16: BF16}, "cast from torch.float16: only"),
        ({torch.float32: torch.int8}, "cast to torch.int8: tensors can be cast to"),
        ({torch.float32: torch.float32}, "cast from torch.float32 to torch.float32: that does not make tensors"),
        ({torch.float32: "half"}, "cast to half"),
    ],
)
def test_what_makes_no_sense(cast: object, text: str) -> None:
    """Everything else is a UsageError that shows a cast that works."""
    with pytest.raises(UsageError) as caught:
        casts_of(cast)
    assert str(caught.value).startswith(text)
    assert "cast=torch.bfloat16" in str(caught.value.hint)


def test_a_slot_is_free_once_its_batch_is_gone(loop: Loopback) -> None:
    """A worker that has cast a tensor refers to it no more when the batch is packed, without the garbage collector."""
    loop.packers = [seam.Packer(loop.workers[0], worker=0, pins=False, moves=False, casts=CASTS)]
    gc.disable()
    try:
        numbers = [loop.send(torch.ones(1 << 16)).head.slot for _ in range(5)]
    finally:
        gc.enable()
    assert len(set(numbers)) == 1
