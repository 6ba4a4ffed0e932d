"""numapin.DataLoader(device="cuda") on the stand-in for the driver, whose device memory is host memory."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import numapin
from numapin.errors import UsageError
from tests.contract.datasets import Raise
from tests.cuda.fake import FakeCuda, moving
from tests.data.loopback import in_forked_child, make_head
from tests.integration.gpu_loading import BATCH, Filled, wrong_ones
from tests.unit.data.seam import CudaRefused, _Copy, opening, small_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


NUM_BATCHES = 40


@pytest.fixture
def loader(fake_cuda: FakeCuda) -> Iterator[Any]:
    with (
        moving(),
        numapin.DataLoader(Filled(NUM_BATCHES * BATCH, 1 << 14), BATCH, num_workers=2, device="cuda") as made,
    ):
        yield made
        gc.collect()  # an iterator that an error's traceback holds in a cycle; the stand-in is about to go
    assert fake_cuda.depth() == 0


def test_events_are_used_again(loader: Any, fake_cuda: FakeCuda) -> None:
    """Three epochs have the right batches with few events, which the next loader uses."""
    for _ in range(3):
        assert wrong_ones(list(loader), 0) == []
    num_created = fake_cuda.get("created")
    assert num_created <= 2 * opening._IN_FLIGHT + 2  # of copies, and two timed ones
    assert loader.stats().transfer_gbps > 0
    other: Any = numapin.DataLoader(Filled(NUM_BATCHES, 1 << 14), 1, num_workers=1, device="cuda")
    assert len(list(other)) == NUM_BATCHES
    assert fake_cuda.get("created") <= max(num_created, 2 * opening._IN_FLIGHT + 2)


def test_a_consumer_waits_for_each_late_copy(loader: Any, fake_cuda: FakeCuda) -> None:
    """The current stream waits for the event of a copy that is not known to have ended."""
    fake_cuda.hold_events()
    assert wrong_ones(list(loader), 0) == []
    assert fake_cuda.get("waited") >= NUM_BATCHES - opening._AHEAD


def test_any_thread_may_load(loader: Any) -> None:
    """A new thread has no current context."""
    with ThreadPoolExecutor(1) as pool:
        assert wrong_ones(pool.submit(lambda: list(loader)).result(), 0) == []


def test_a_forked_child_is_refused(loader: Any) -> None:
    """A child of a process that uses CUDA cannot use it; the error names the reason and the remedy."""
    next(iter(loader))

    def is_refused() -> bool:
        with pytest.raises(UsageError, match="forked from one that uses CUDA") as caught:
            next(iter(loader))
        return "spawn" in caught.value.hint

    assert in_forked_child(is_refused)


def test_a_kernel_that_failed_is_told(loader: Any, fake_cuda: FakeCuda) -> None:
    """A query that fails reaches the loop with the driver's name, and a hint how to find the kernel."""
    iterator = iter(loader)
    next(iterator)
    fake_cuda.set(query_fails=710)
    with pytest.raises(CudaRefused, match="CUDA_ERROR_ASSERT") as caught:
        list(iterator)
    assert "CUDA_LAUNCH_BLOCKING=1" in caught.value.hint
    fake_cuda.set(query_fails=0)


def test_without_memory_the_batch_is_lost_and_no_other(
    loader: Any, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop gets torch's error for a batch that the device has no room for; its slot and the context come back."""
    iterator = iter(loader)
    first = next(iterator)
    with monkeypatch.context() as patch:
        patch.setattr(opening.Mover, "_empty", Raise(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            list(iterator)  # at first, batches whose copies were begun before
    assert fake_cuda.depth() == 0
    rest = list(iterator)
    assert wrong_ones([first], 0) == []
    assert wrong_ones(rest[-1:], NUM_BATCHES - 1) == []


BATCH_BYTES: Final = 4 << 20
LARGE_BYTES: Final = 256 << 10  # what is larger is not small
BYTES: Final = torch.randint(0, 256, (BATCH_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def runs_of(storages: Sequence[tuple[int, int]], num_bytes: int = BATCH_BYTES) -> tuple[tuple[int, int], ...]:
    """Return the runs of small tensors of a batch whose storages are (start, length) in its slot."""
    return small_runs(make_head(slot=1, slot_bytes=num_bytes, storages=tuple(storages)))


def check(storages: Sequence[tuple[int, int]]) -> None:
    runs = runs_of(storages)
    small = torch.cat([BYTES[first:last] for first, last in runs]) if runs else None
    event: Any = None
    copy = _Copy(BYTES, BYTES.untyped_storage(), event, small, runs)
    for start, size in storages:
        storage, begin = copy.place(start, size)
        assert begin + size <= storage.nbytes(), (start, size)
        found = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (size,), (1,))
        assert torch.equal(found, BYTES[start : start + size]), (start, size)


def test_runs_of_small_tensors() -> None:
    """Neighbors are one run, in multiples of 256 bytes within the batch; a batch below 2 MiB has none."""
    first = 3 << 20
    storages = [(0, first), (first, 100), (first + 256, 1000), (first + 4096, 8)]
    assert runs_of(storages) == ((first, first + 1280), (first + 4096, first + 4352))
    assert runs_of([(0, 100)], (2 << 20) - 1) == ()
    assert runs_of([(0, 100)], 2 << 20) == ((0, 256),)
    assert runs_of([(BATCH_BYTES - 100, 100)]) == ((BATCH_BYTES - 100, BATCH_BYTES),)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=12))
def test_every_storage_has_its_bytes(sizes: list[tuple[bool, int]]) -> None:
    """Every storage has its bytes, for any sequence of large and small ones."""
    storages, end = [], 0
    for is_large, size in sizes:
        length = LARGE_BYTES + size if is_large else size
        if end + length <= BATCH_BYTES:
            storages.append((end, length))
            end = -(-(end + length) // 256) * 256
    check(storages)


@pytest.mark.parametrize(
    "storages",
    [[(0, 240), (200, 200)], [(0, 40), (0, 4 << 20)], [(1000, 40), (1000, 3 << 20)]],
    ids=["overlapping views", "a view and its base", "a view and a longer one"],
)
def test_views_of_what_was_collated_may_overlap(storages: list[tuple[int, int]]) -> None:
    """Overlapping storages keep their positions: each has its own bytes."""
    check(storages)
