"""numapin.batch_buffer: a batch is written once, straight into its slot, and is right whatever the dataset does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, get_worker_info

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import Made, Raise, row
from tests.contract.seam import Packer
from tests.contract.watching import TORCH, LoaderClass

BATCH, NUM_BATCHES = 4, 12
SHAPE = (64, 64)
SIZE = BATCH * NUM_BATCHES


def write(indices: Sequence[int]) -> torch.Tensor:
    batch = numapin.batch_buffer((len(indices), *SHAPE))
    for out, index in zip(batch, indices, strict=True):
        out.copy_(row(index))
    return batch


def arrays(indices: Sequence[int]) -> Any:
    return write(indices).numpy()[1:], torch.from_numpy(write(indices).numpy())


def changed_views(indices: Sequence[int]) -> Any:
    batch = write(indices)
    return batch[1:], batch.view(-1), batch.transpose(1, 2), batch.view(torch.int32)


def several(indices: Sequence[int]) -> Any:
    labels = numapin.batch_buffer(1024 * len(indices), torch.int64).fill_(indices[0])
    flags = numapin.batch_buffer((len(indices), 1024), torch.bool).fill_(True)
    return {"x": write(indices), "labels": labels, "flags": [flags, write(indices)], "first": indices[0]}


class Listed(Made):
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.make(indices)


@dataclass(frozen=True)
class Stream(IterableDataset[Any]):
    """An iterable dataset that yields whole batches; with `is_wasteful`, each with a buffer that is not sent."""

    make: Callable[[Sequence[int]], Any]
    is_wasteful: bool = False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for number in range(info.id if info else 0, NUM_BATCHES, info.num_workers if info else 1):
            yield self.make(range(BATCH * number, BATCH * (number + 1)))
        if self.is_wasteful:
            write(range(BATCH))


def in_batches(make: Callable[[Sequence[int]], Any], **options: Any) -> dict[str, Any]:
    sampler = BatchSampler(SequentialSampler(range(SIZE)), BATCH, drop_last=False)
    return {"dataset": Made(make, SIZE), "batch_size": None, "sampler": sampler, "num_workers": 2, **options}


def forbid_copies(_worker: int) -> None:
    for name in ("copy", "write"):
        setattr(Packer, name, Raise(AssertionError, ("a copy into the slot",)))


def assert_same(ours: LoaderClass, arguments: dict[str, Any], **options: Any) -> Any:
    loader = ours(**(arguments | options))
    theirs = list(TORCH(**arguments))
    for _ in range(2):
        for number, batch in enumerate(loader):
            torch.testing.assert_close(batch, theirs[number], rtol=0, atol=0)
    return loader


def all_of(*makes: Callable[[Sequence[int]], Any]) -> Callable[[Sequence[int]], Any]:
    return lambda indices: [make(indices) for make in makes]


@pytest.mark.parametrize(
    "arguments",
    [
        in_batches(all_of(write, arrays, changed_views, several)),
        {"dataset": Listed(write, SIZE), "collate_fn": lambda batch: batch, "batch_size": BATCH},
        {"dataset": range(SIZE), "collate_fn": write, "batch_size": BATCH},
        {"dataset": Stream(write), "batch_size": None},
    ],
    ids=["getitem", "getitems", "collate_fn", "iterable"],
)
def test_wherever_batches_are_made(own_class: LoaderClass, arguments: dict[str, Any]) -> None:
    """Buffers, views of them and numpy arrays over them travel in the slot as they are, without a copy.

    It works in `__getitem__`, in `__getitems__`, in a collate_fn and in an iterable dataset.
    """
    assert_same(own_class, arguments | {"num_workers": 2}, worker_init_fn=forbid_copies)


def test_kept_buffers(own_class: LoaderClass) -> None:
    """A buffer that the dataset keeps is never overwritten, and is copied if it comes with a later batch."""
    kept: list[tuple[int, torch.Tensor]] = []

    def make(indices: Sequence[int]) -> Any:
        for first, old in kept:
            assert torch.equal(old[0], row(first)), "a kept buffer was overwritten"
        kept.append((indices[0], write(indices)))
        write(indices)  # dropped
        return write(indices), kept[max(0, len(kept) - 4)][1]

    loader = own_class(**in_batches(make))
    for _ in range(3):
        for number, (batch, old) in enumerate(loader):
            assert torch.equal(batch[1], row(BATCH * number + 1))
            assert torch.equal(old[1], row(BATCH * (number - min(number // 2, 3) * 2) + 1))


def test_dropped_buffers(own_class: LoaderClass) -> None:
    """Memory that is not in the batch is not sent, and does not accumulate in the worker."""

    def make(indices: Sequence[int]) -> Any:
        write(indices)
        numapin.batch_buffer(1 << 20, torch.uint8)
        num_mapped = Path("/proc/self/maps").read_text().count("memfd:numapin-slot")
        return len(list(Path("/proc/self/fd").iterdir())), num_mapped

    loader = own_class(**in_batches(make, num_workers=1))
    seen = [tuple(batch) for batch in loader]
    assert len(set(seen[1:])) == 1, seen
    assert loader.stats().slots == 0  # type: ignore[attr-defined]


def test_a_buffer_at_the_end_of_a_stream(own_class: LoaderClass) -> None:
    """A buffer that was requested before an iterable dataset ended takes no room in the next epoch's first batch."""
    arguments = {"dataset": Stream(write, is_wasteful=True), "batch_size": None, "num_workers": 2}
    loader = assert_same(own_class, arguments, persistent_workers=True, worker_init_fn=forbid_copies)
    assert loader.stats().bytes == 2 * NUM_BATCHES * row(0).nbytes * BATCH
    loader.close()


def in_thread(indices: Sequence[int]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(write, indices).result()


def on_meta(indices: Sequence[int]) -> Any:
    with torch.device("meta"):
        batch = numapin.batch_buffer((len(indices), *SHAPE))
    return batch.copy_(write(indices))


def growing(indices: Sequence[int]) -> Any:
    length = 1 + indices[0] % 20 * 1000
    return numapin.batch_buffer((length, 3), torch.float64).fill_(indices[0]), write(indices)


def test_unusual_requests(own_class: LoaderClass) -> None:
    """Another thread, another default device, any size: the batch is right."""
    assert_same(own_class, in_batches(all_of(in_thread, on_meta, growing)))


@pytest.mark.parametrize("options", [{"pinned_budget": 0}, {"num_workers": 0}])
def test_without_slots(own_class: LoaderClass, options: dict[str, Any]) -> None:
    """Without slots, or without workers, the buffers are ordinary tensors."""
    assert_same(own_class, in_batches(several), **options)


def test_outside_a_worker_it_is_an_ordinary_tensor() -> None:
    """It is a contiguous CPU tensor of torch's default type, even if another device is the default.

    A negative size is a UsageError; one that does not fit into memory is torch's own error.
    """
    with torch.device("meta"):
        found = numapin.batch_buffer((2, 3))
    assert (found.shape, found.dtype, found.device.type) == ((2, 3), torch.get_default_dtype(), "cpu")
    assert numapin.batch_buffer(5, torch.uint8).shape == (5,)
    with pytest.raises(UsageError, match=r"shape \(2, -3\) has a negative size") as caught:
        numapin.batch_buffer((2, -3))
    assert caught.value.hint == "pass the size of each dimension"
    with pytest.raises(RuntimeError, match="memory"):
        numapin.batch_buffer(1 << 60)
    with pytest.raises(TypeError):
        numapin.batch_buffer((2.5,))  # type: ignore[arg-type]
