"""numapin.DataLoader(device="cuda") on the stand-in for the driver, whose device memory is host memory."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import numapin
from numapin.errors import UsageError
from tests.cuda.fake import moving
from tests.data.child import in_forked_child
from tests.integration.gpu_loading import BATCH, Filled, wrong_ones
from tests.unit.data.seam import CudaRefused, opening

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.fake import FakeCuda

NUM_BATCHES = 40


@pytest.fixture
def loader(fake_cuda: FakeCuda) -> Iterator[Any]:
    """Give a loader whose batches are moved to the stand-in's device."""
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
        patch.setattr(opening.Mover, "_empty", _no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            list(iterator)  # at first, batches whose copies were begun before
    assert fake_cuda.depth() == 0
    rest = list(iterator)
    assert wrong_ones([first], 0) == []
    assert wrong_ones(rest[-1:], NUM_BATCHES - 1) == []


def _no_memory(_mover: object, num_bytes: int) -> torch.Tensor:
    raise torch.OutOfMemoryError(num_bytes)
