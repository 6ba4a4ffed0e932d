"""numapin.pack_bytes: pieces of bytes in one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import numapin
from tests.contract.datasets import Made
from tests.integration.gpu_loading import lies_in_slot

PIECES = [b"one", bytearray(b""), memoryview(b"three"), np.arange(40_000, dtype=np.uint16), torch.arange(7).byte()]


def content(piece: Any) -> bytes:
    return bytes(piece.numpy().data if isinstance(piece, torch.Tensor) else piece)


FILES = Made(lambda index: bytes([index]) * (20_000 + 100 * index), 32)


def test_pieces() -> None:
    """All that has a buffer is taken, empty pieces and wider types too, and comes back as uint8 tensors."""
    packed = numapin.pack_bytes(PIECES)
    assert [content(piece) for piece in packed] == [content(piece) for piece in PIECES]
    assert (len(packed), content(packed[2]), content(packed[-1])) == (5, b"three", bytes(range(7)))
    assert {(piece.dtype, piece.ndim, piece.device.type) for piece in packed} == {(torch.uint8, 1, "cpu")}
    assert packed[3].data_ptr() == packed.data[8:].ctypes.data  # no copy
    assert content(packed[np.int64(-3)]) == b"three"
    wrong: Any
    for wrong, error in ((slice(3), TypeError), (1.0, TypeError), (5, IndexError), (-6, IndexError)):
        with pytest.raises(error):
            packed[wrong]
    assert list(numapin.pack_bytes([])) == []


@pytest.mark.parametrize("wrong", ["text", 3, [1, 2]])
def test_what_has_no_bytes(wrong: object) -> None:
    """Text and numbers are refused."""
    with pytest.raises(TypeError):
        numapin.pack_bytes([wrong])


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "device": "cpu"}])
def test_through_a_loader(options: dict[str, Any]) -> None:
    """A batch is in its slot, written once; its pieces are right, also in batches that the loop keeps."""
    loader = numapin.DataLoader(FILES, 8, collate_fn=numapin.pack_bytes, **options)
    batches: list[Any] = list(loader)
    pieces = [content(piece) for batch in batches for piece in batch]
    assert pieces == [FILES[index] for index in range(len(FILES))]
    if options["num_workers"]:
        assert all(lies_in_slot(loader, piece) for batch in batches for piece in batch)
        assert (loader.stats().hits, dict(loader.stats().misses)) == (4, {})
