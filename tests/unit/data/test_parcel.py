"""Parcels: heads and pickles as bytes, and the two functions that a pickle calls in the rank."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numapin.data.wire.grant import NO_GRANT, Grant, decode_grant
from numapin.data.wire.message import NOTHING, Head, Miss, PartHead, decode, encode, encode_plain
from numapin.data.wire.tensors import StoragePlace, move, rebuild, tensor_over, unpickle

HEAD: Final = Head(
    number=7,
    worker=3,
    parts=(PartHead(11, 4096, 8192, is_new=False), NOTHING, PartHead((5 << 32) + 1, 512, 4 << 30, is_new=True)),
    wanted_bytes=1 << 40,
    miss=None,
    storages=((0, 0, 100), (2, 256, 17)),
    buffers=(0, None, ~1),
    refused=(8, 9),
    kept=((5 << 32) + 1,),
    notes=("memory on node 1 was refused",),
)
NUMBERS: Final = st.integers(-1, (1 << 63) - 1)


class TestMessages:
    """Bytes there and back."""

    @pytest.mark.parametrize(
        "head",
        [
            HEAD,
            HEAD._replace(parts=(), storages=(), buffers=(), refused=(), kept=(), notes=()),
            *(HEAD._replace(miss=miss) for miss in Miss),
            HEAD._replace(buffers=tuple(range(5000))),
        ],
    )
    def test_a_batch(self, head: Head) -> None:
        """Head and pickle come back; the pickle is not copied."""
        message = encode(head, memoryview(b"the pickle"))
        found, body = decode(message)
        assert found == head
        assert bytes(body) == b"the pickle"
        assert body.obj is message

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


class TestGrants:
    """What stands before a task."""

    @given(
        grant=st.builds(Grant, NUMBERS, NUMBERS, st.booleans(), NUMBERS, st.lists(NUMBERS, max_size=5).map(tuple)),
        task=st.binary(max_size=50),
    )
    def test_any_grant_and_task_come_back(self, grant: Grant, task: bytes) -> None:
        """Neither takes a byte of the other, and the types are the same."""
        found, rest = decode_grant(grant.encode() + task)
        assert (found, bytes(rest)) == (grant, task)
        assert isinstance(found.is_new, bool)

    def test_a_task_without_a_slot(self) -> None:
        """It says so, and nothing else."""
        assert decode_grant(NO_GRANT.encode() + b"task")[0] == (-1, 0, False, 0, ())


class TestTensorOver:
    """A tensor over a storage."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64, torch.complex128])
    def test_it_begins_where_it_is_told(self, dtype: torch.dtype) -> None:
        """`start` in bytes, stride in elements; it shares the memory and is no view of another tensor."""
        memory = torch.arange(64).to(dtype)
        tensor = tensor_over(memory.untyped_storage(), 3 * dtype.itemsize, dtype, (2, 3), (10, 2))
        assert tensor.tolist() == [[3, 5, 7], [13, 15, 17]]
        assert not tensor._is_view()
        tensor[0, 0] = 40
        assert memory[3] == 40

    def test_rebuild_counts_from_the_place(self) -> None:
        """The place is where the tensor's storage begins, `start` where in that the tensor does."""
        memory = torch.arange(64, dtype=torch.int16)
        place = StoragePlace(memory.untyped_storage(), 20)
        assert rebuild(place, torch.int16, (3,), (1,), 6).tolist() == [13, 14, 15]


class _Pickler(pickle.Pickler):
    """Pickles every tensor as something out of band."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return rebuild, (pickle.PickleBuffer(bytearray(1)), thing.dtype, tuple(thing.shape), thing.stride(), 0)
        return NotImplemented


def test_a_batch_is_unpacked_over_its_places() -> None:
    """Tensors get places in the order of the pickle; the rest of the batch is as it was."""
    file, memory = io.BytesIO(), torch.arange(8.0).untyped_storage()
    _Pickler(file, 5, buffer_callback=lambda _: False).dump({"x": torch.zeros(2), "y": ["text", torch.zeros(3)]})
    batch: Any = unpickle(file.getbuffer(), iter([StoragePlace(memory, 8), StoragePlace(memory, 20)]))
    assert batch["x"].tolist() == [2, 3]
    assert batch["y"][0] == "text"
    assert batch["y"][1].tolist() == [5, 6, 7]


def test_what_went_torchs_way_is_moved_once_built() -> None:
    """The mover gets what the build function returns."""
    assert move(lambda built: ("moved", built), max, (3, 9, 4)) == ("moved", 9)
