"""Parcels: heads and pickles as bytes, and the two functions that a pickle calls in the rank."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import pytest
import torch

from tests.unit.data.seam import (
    DTYPES,
    NO_SLOT,
    Head,
    Miss,
    Parcel,
    buffer,
    decode,
    encode_plain,
    move,
    unpack,
)
from tests.unit.data.seam import message_encode as encode

HEAD: Final = Head(
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
    refused=(8, 9),
    kept=((5 << 32) + 1,),
    notes=("memory on node 1 was refused",),
)


class TestMessages:
    """Bytes there and back."""

    @pytest.mark.parametrize(
        "head",
        [
            HEAD,
            HEAD._replace(
                slot=NO_SLOT, slot_bytes=0, made_bytes=0, storages=(), buffers=(), refused=(), kept=(), notes=()
            ),
            *(HEAD._replace(miss=miss) for miss in Miss),
            HEAD._replace(buffers=tuple(range(5000))),
        ],
    )
    def test_a_batch(self, head: Head) -> None:
        """Head and pickle come back."""
        assert decode(encode(head, b"the pickle")) == (head, b"the pickle")

    @pytest.mark.parametrize("message", [(3, None), "end", {"key": [1, 2]}, b"", None])
    def test_a_plain_message(self, message: object) -> None:
        """The message is distinguished from a batch, whatever its contents are."""
        assert decode(encode_plain(message)) == (None, message)

    def test_an_empty_pickle_is_a_batch(self) -> None:
        """The kind is told by the message, not by what is in it."""
        found, body = decode(encode(HEAD, b""))
        assert found == HEAD
        assert bytes(body) == b""

    def test_misses_have_texts_of_their_own(self) -> None:
        """They are keys of the statistics, and travel as plain strings."""
        assert len({str(miss) for miss in Miss}) == len(Miss)
        assert all(Miss(miss.value) is miss for miss in Miss)


def test_a_batch_is_unpacked_over_its_places() -> None:
    """Tensors get places in the order of the pickle; the rest of the batch is as it was."""
    entries = (
        (0, DTYPES.index(torch.float32), (2,), (1,), 0, False),
        (0, DTYPES.index(torch.float32), (3,), (1,), 12, False),
    )
    file, memory = io.BytesIO(), torch.arange(8.0).untyped_storage()
    mark = pickle.PickleBuffer(bytearray(1))

    class Pickler(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            return (buffer, (mark,)) if isinstance(thing, torch.Tensor) else NotImplemented

    Pickler(file, 5, buffer_callback=lambda _: False).dump({"x": torch.zeros(2), "y": ["text", torch.zeros(3)]})
    head = HEAD._replace(storages=((0, 32),), buffers=entries)
    batch: Any = unpack(Parcel(head, file.getvalue()), lambda *_: (memory, 8), lambda *_: memoryview(b""))
    assert batch["x"].tolist() == [2, 3]
    assert batch["y"][0] == "text"
    assert batch["y"][1].tolist() == [5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64, torch.complex128])
def test_a_tensor_begins_where_it_is_told(dtype: torch.dtype) -> None:
    """`start` in bytes, stride in elements; it shares the memory and is no view of another tensor."""
    memory = torch.arange(64).to(dtype)
    entry = (0, DTYPES.index(dtype), (2, 3), (10, 2), 2 * dtype.itemsize, False)
    head = HEAD._replace(storages=((0, memory.nbytes),), buffers=(entry,))
    body, begin = pickle.dumps(pickle.PickleBuffer(bytearray(1)), 5, buffer_callback=lambda _: False), dtype.itemsize
    tensor: Any = unpack(Parcel(head, body), lambda *_: (memory.untyped_storage(), begin), lambda *_: memoryview(b""))
    assert tensor.tolist() == [[3, 5, 7], [13, 15, 17]]
    assert not tensor._is_view()
    tensor[0, 0] = 40
    assert memory[3] == 40


def test_what_went_torchs_way_is_moved_once_built() -> None:
    """The mover gets what the build function returns."""
    assert move(lambda built: ("moved", built), max, (3, 9, 4)) == ("moved", 9)
