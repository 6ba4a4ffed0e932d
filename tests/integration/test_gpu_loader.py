"""On a GPU: how batches reach the device, and which memory is pinned."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import numapin
from tests.integration.gpu_loading import (
    BATCH,
    CYCLES,
    MIB,
    ROOT,
    Filled,
    assert_no_error_is_pending,
    copies_to_device,
    cuda,
    is_right,
    uses_gpu,
    warmed,
    wrong_ones,
)
from tests.integration.seam import Driver

pytestmark = uses_gpu


class Fields(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return batch `index`: field f is filled with 1000 f + index."""
        time.sleep(0.002)
        return {f"field {field}": torch.full((1024,), 1000.0 * field + index) for field in range(200)}


class Turns(Dataset[torch.Tensor]):
    """Samples that workers make in turn; a sample that has to wait for seconds is an error."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = multiprocessing.get_context("fork").RawValue("q", 0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return sample `index` once the samples before it have been received."""
        end = time.monotonic() + 5
        while self.turn.value < index:
            assert time.monotonic() < end, f"sample {self.turn.value} is held back until sample {index} is there"
            time.sleep(0.0005)
        return torch.full((MIB // 4,), index, dtype=torch.int32)


class TestMoving:
    """How batches reach the device, and how the loop may use them."""

    @pytest.mark.filterwarnings("ignore")  # a warning of the profiler
    def test_one_copy_a_batch(self) -> None:
        """CUDA's own trace shows one copy per batch of 200 tensors, each from pinned memory."""
        with numapin.DataLoader(Fields(), batch_size=None, num_workers=2, device="cuda") as loader:
            for _ in range(3):
                list(loader)
            before = loader.stats().hits
            with copies_to_device() as copies:
                batches = list(loader)
            assert loader.stats().hits - before == len(batches) == 40, loader.stats()
        assert copies == ["Memcpy HtoD (Pinned -> Device)"] * 40
        for index, batch in enumerate(batches):
            assert [float(value) for value in torch.stack([*batch.values()])[:, -1].cpu()] == [
                1000 * field + index for field in range(200)
            ]

    def test_no_wait_for_the_next_batch(self) -> None:
        """Batch k is returned although batch k+1 cannot be made before k has been received."""
        dataset = Turns(60)
        with numapin.DataLoader(dataset, batch_size=None, num_workers=2, device="cuda") as loader:
            for index, sample in enumerate(loader):
                assert bool((sample == index).all())
                dataset.turn.value = index + 1
                time.sleep(0.005)
            assert loader.stats().hits >= 10, loader.stats()

    @pytest.mark.parametrize("is_guarded", [True, False])
    def test_a_consumer_waits_for_the_copy(self, is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
        """The stream that is current at next() waits for a late copy; without numapin's event it would not."""
        if not is_guarded:
            monkeypatch.setattr(Driver, "let_wait", lambda *_: None)
        copies: Any = lambda loader: loader._numapin_path._mover._stream  # noqa: E731 - only a name
        assert (self.wrong_after(lambda loader, _: self.delay(copies(loader)), num_batches=12) == []) is is_guarded

    @pytest.mark.parametrize("is_guarded", [True, False])
    def test_memory_waits_for_its_consumer(self, is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
        """A dropped batch is not overwritten before the consumer's stream has read it (record_stream)."""
        if not is_guarded:
            monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        assert (self.wrong_after(lambda _, consumer: self.delay(consumer), num_batches=24) == []) is is_guarded

    def wrong_after(self, delay: Callable[[Any, Any], None], num_batches: int) -> list[int]:
        """Read batches on the loop's own stream, each after a delay, and return the numbers of wrong ones."""
        consumer = cuda.Stream()
        seen = torch.zeros((num_batches, BATCH, MIB // 4), dtype=torch.int32, device="cuda")
        with numapin.DataLoader(Filled(), BATCH, num_workers=2, device="cuda") as loader:
            iterator, first = warmed(loader)
            torch.cuda.synchronize()
            for destination in seen:
                with cuda.stream(consumer):
                    batch = next(iterator)
                    delay(loader, consumer)
                    destination.copy_(batch)
                    del batch
            torch.cuda.synchronize()
            del iterator
        return wrong_ones(seen, first)

    @staticmethod
    def delay(stream: Any) -> None:
        with cuda.stream(stream):
            cuda._sleep(CYCLES)

    def test_a_loop_that_moves_batches_itself(self) -> None:
        """.to(), .cuda() and .to() with a device without a number return the same tensor: scripts work unchanged."""
        with numapin.DataLoader(Filled(200, 1 << 16), BATCH, num_workers=2, device="cuda", pin_memory=True) as loader:
            for number, batch in enumerate(loader):
                assert batch.to("cuda", non_blocking=True) is batch.to("cuda:0") is batch.cuda() is batch
                assert is_right(batch, number)

    @pytest.mark.multigpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs that torch can use")
    def test_another_gpu(self) -> None:
        """device="cuda:1" puts batches on that GPU for its current stream, and does not change the current device."""
        with numapin.DataLoader(Filled(), BATCH, num_workers=2, device="cuda:1") as loader:
            iterator, first = warmed(loader)
            batches = [next(iterator) for _ in range(20)]
            del iterator
        assert torch.cuda.current_device() == 0
        assert {batch.device for batch in batches} == {torch.device("cuda", 1)}
        assert wrong_ones(batches, first) == []


def test_no_allocation_in_steady_state() -> None:
    """Once slots are reused, CUDA's host allocator gets no further requests."""
    tell: Any = getattr(torch.cuda, "host_memory_stats", dict)
    if "num_host_alloc" not in tell():
        pytest.skip("this torch does not count its allocations of pinned memory")
    destination = torch.empty((BATCH, MIB // 4), dtype=torch.int32, device="cuda")
    with numapin.DataLoader(Filled(), BATCH, num_workers=2, pin_memory=True) as loader:
        iterator, first = warmed(loader, num_hits=16)
        for number in range(first, first + 120):
            if number == first + 20:  # the loop has by now allocated what it needs to read from the GPU
                before, hits = tell()["num_host_alloc"], loader.stats().hits
            destination.copy_(next(iterator), non_blocking=True)
            assert is_right(destination, number)
        assert tell()["num_host_alloc"] == before
        assert loader.stats().hits - hits >= 90, loader.stats()
        del iterator
    assert_no_error_is_pending()


WITHOUT_A_NAME = """
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator
Iterator.renamed = Iterator._try_put_index
del Iterator._try_put_index
for function in vars(Iterator).values():
    if code := getattr(function, "__code__", None):
        names = tuple("renamed" if name == "_try_put_index" else name for name in code.co_names)
        function.__code__ = code.replace(co_names=names)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.tensor(float(index), dtype=torch.float64)
import numapin
for options in ({"num_workers": 2}, {"num_workers": 2, "pin_memory": True, "persistent_workers": True}, {}):
    loader = numapin.DataLoader(Rows(), batch_size=2, device="cuda", cast=torch.float32, **options)
    copy = torch.utils.data.DataLoader(Rows(), batch_size=2, pin_memory_device=loader.pin_memory_device, **options)
    for each in (loader, copy, loader):
        print([(str(batch.device), str(batch.dtype), batch.tolist()) for batch in each])
"""


def test_batches_reach_the_gpu_without_the_data_path() -> None:
    """With a torch that numapin does not know, torch's own loader makes the batches, and they are cast and moved."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_A_NAME],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    batch = "('cuda:0', 'torch.float32', [{}.0, {}.0])"
    assert (done.returncode, done.stdout) == (0, f"[{batch.format(0, 1)}, {batch.format(2, 3)}]\n" * 9), done.stderr
    (line,) = done.stderr.splitlines()
    assert "_try_put_index, so numapin's data path is off" in line
