"""Casting batches: which dtypes, and with which values and strides."""

from __future__ import annotations

import gc

import pytest
import torch

from numapin.errors import UsageError
from tests.data.loopback import lent, loopback
from tests.unit.data.seam import Packer, casts_of

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


def test_every_value_and_unusual_tensors() -> None:
    """Every value is rounded as `.to` rounds; views, odd storages and expanded tensors have its strides."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16  # all exponents, NaNs, infinities, ties
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every = (upper[:, None] + lower).flatten().to(torch.int32).view(torch.float32)
    whole = torch.arange(4096.0).view(64, 64)
    odd = torch.empty(0).set_(torch.arange(43, dtype=torch.uint8).untyped_storage(), 1, (9,), (1,))
    wide = [every, whole, whole[3:], whole.T, whole[:, 5], whole[7, 9:], odd, torch.ones(1, 3).expand(1000, 3)]
    with loopback() as loop:
        (slots,) = loop.workers
        loop.packers = [Packer(slots, worker=0, pins=False, moves=False, casts=CASTS)]
        *found, labels = lent(loop, [*wide, torch.arange(3)])
        for tensor, narrow in zip(wide, found, strict=True):
            assert torch.equal(narrow.view(torch.int16), tensor.to(BF16).view(torch.int16))
            assert narrow.stride() == tensor.to(BF16).stride()
        assert labels.dtype is torch.int64


def test_a_slot_is_free_once_its_batch_is_gone() -> None:
    """A worker that has cast a tensor refers to it no more when the batch is packed, without the garbage collector."""
    gc.disable()
    try:
        with loopback() as loop:
            (slots,) = loop.workers
            loop.packers = [Packer(slots, worker=0, pins=False, moves=False, casts=CASTS)]
            numbers = [loop.send(torch.ones(1 << 16)).head.slot for _ in range(5)]
            assert len(set(numbers)) == 1
    finally:
        gc.enable()
