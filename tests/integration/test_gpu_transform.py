"""On a GPU: device_transform, its order with the loop's streams, its memory and its modes; every value is checked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import numapin
from tests.integration.gpu_loading import BATCH, CYCLES, MIB, Filled, assert_no_error_is_pending, cuda, needs_gpu
from tests.integration.seam import Driver

pytestmark = needs_gpu

NUM_BATCHES = 24


class Held:
    """What a function may return: an object with tensors in its attributes."""

    def __init__(self, values: torch.Tensor) -> None:
        self.parts = {"values": values}

    @property
    def values(self) -> torch.Tensor:
        return self.parts["values"]


def held(batch: torch.Tensor) -> Held:
    """Return twice the batch, in new memory, which a late kernel has written."""
    cuda._sleep(CYCLES // 10)
    return Held(batch * 2)


def loader_of(function: Callable[[Any], Any], **options: Any) -> Any:
    data = Filled(NUM_BATCHES * BATCH)
    return numapin.DataLoader(data, BATCH, num_workers=2, device="cuda", device_transform=function, **options)


def wrong_among(seen: torch.Tensor) -> list[int]:
    cuda.synchronize()
    expected = 2 * torch.arange(len(seen) * BATCH, dtype=torch.int32, device="cuda").view(len(seen), BATCH, 1)
    return (seen != expected).flatten(1).any(1).nonzero().flatten().tolist()


def room() -> torch.Tensor:
    return torch.zeros((NUM_BATCHES, BATCH, MIB // 4), dtype=torch.int32, device="cuda")


def kept_by(loader: Any, consumer: Any, *, is_late: bool) -> torch.Tensor:
    """Return copies of all batches, which a stream made of them after a delay; each batch is dropped at once."""
    seen, iterator = room(), iter(loader)
    for target in seen:
        with cuda.stream(consumer):
            batch = next(iterator)
            if is_late:
                cuda._sleep(CYCLES // 4)
            target.copy_(batch.values)
            del batch
    return seen


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_loop_waits_for_the_function(is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """The stream that is current at next() waits for the function's late kernels; without the event it would not."""
    if not is_guarded:
        monkeypatch.setattr(Driver, "let_wait", lambda *_: None)
    seen = kept_by(loader_of(held), cuda.Stream(), is_late=False)
    assert (wrong_among(seen) == []) is is_guarded


@pytest.mark.parametrize("is_guarded", [True, False])
def test_memory_waits_for_the_loop(is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """What the function returned, also in attributes, is not overwritten before the loop's kernels have read it."""
    if not is_guarded:
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    seen = kept_by(loader_of(lambda batch: Held(batch * 2)), cuda.Stream(), is_late=True)
    assert (wrong_among(seen) == []) is is_guarded


def test_it_runs_ahead_beside_the_loop() -> None:
    """While the loop's kernels run, the next batch's are done on another stream; calls are in order, one a batch."""
    numbers: list[int] = []
    events: list[Any] = []

    def note(batch: torch.Tensor) -> torch.Tensor:
        assert cuda.current_stream() != cuda.default_stream()
        numbers.append(len(numbers))
        result = batch * 2
        events.append(cuda.Event())
        events[-1].record()
        return result

    num_done = 0
    for number, batch in enumerate(loader_of(note)):
        assert cuda.current_stream() == cuda.default_stream()
        cuda._sleep(CYCLES)
        busy = cuda.Event()
        busy.record()
        time.sleep(0.02)
        num_done += len(events) == number + 2 and events[-1].query() and not busy.query()
        assert int(batch[0, 0]) == 2 * number * BATCH
    assert numbers == list(range(NUM_BATCHES))
    assert num_done > NUM_BATCHES // 2


def test_batches_that_are_kept_and_epochs_that_end_early() -> None:
    """All batches of many short epochs are right at the end, whatever the function made ahead was dropped."""
    loader, kept = loader_of(held, persistent_workers=True), []
    for last in (0, 3, NUM_BATCHES, 1, 5):
        for number, batch in enumerate(loader):
            kept.append((number, batch.values))
            if number == last:
                break
    loader.close()
    gc.collect()
    junk = torch.full((64, MIB), -1, dtype=torch.int32, device="cuda")  # what was freed is written
    assert len(kept) == 1 + 4 + NUM_BATCHES + 2 + 6
    assert all(wrong_among(values[None] - 2 * number * BATCH) == [] for number, values in kept)
    del junk
    assert_no_error_is_pending()


def test_state_that_the_loop_s_stream_made() -> None:
    """The function sees a tensor that late kernels of the loop's stream wrote before the epoch."""
    offset = torch.zeros(1, dtype=torch.int32, device="cuda")
    loader = loader_of(lambda batch: batch + offset)
    for epoch in range(1, 4):
        cuda._sleep(CYCLES)
        offset.fill_(1000 * epoch)
        batches = list(loader)
        assert [int(batch[0, 0]) for batch in batches] == [1000 * epoch + BATCH * n for n in range(NUM_BATCHES)]


def test_a_graph_is_captured_and_replayed_in_the_loop() -> None:
    """Captures in the loop's thread, between batches and beside what was made ahead, are not disturbed."""
    static = torch.zeros((BATCH, MIB // 4), dtype=torch.int32, device="cuda")
    graph: Any = None
    for number, batch in enumerate(loader_of(held)):
        static.copy_(batch.values)
        if number % 6 == 2:
            graph = cuda.CUDAGraph()
            with cuda.graph(graph):
                total = static.long().sum()
        if graph is not None:
            graph.replay()
            assert int(total) == 2 * sum(range(number * BATCH, (number + 1) * BATCH)) * (MIB // 4)
    assert_no_error_is_pending()


def test_modes_of_the_loop() -> None:
    """Autocast, inference and gradient mode are the loop's, and the results are of the mode."""
    seen: list[Any] = []
    weight = torch.ones((MIB // 4, 8), device="cuda")

    def multiply(batch: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return batch.float() @ weight

    iterator = iter(loader_of(multiply))
    next(iterator)
    time.sleep(0.2)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        next(iterator)
        time.sleep(0.2)
        batch = next(iterator)
        time.sleep(0.2)
        batch = next(iterator)
    assert (batch.dtype, batch.is_inference()) == (torch.bfloat16, True)
    list(iterator)
    assert seen[0] == (False, True)
    assert (True, False) in seen
    assert seen[-1] == (False, True)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested)")
def test_tensors_of_which_torch_records_no_stream() -> None:
    """Conjugated, negated, nested and quantized tensors are handed over like any other."""

    def make(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        values = batch[:, :8].float()
        lazy = torch.complex(values, values).conj()
        nested = torch.nested.nested_tensor([values[0], values[1, :4]])
        return {
            "conjugated": lazy,
            "negated": lazy.imag,
            "nested": nested,
            "quantized": torch.quantize_per_tensor(values, 1.0, 0, torch.qint32),
        }

    for number, batch in enumerate(loader_of(make)):
        first = number * BATCH
        assert complex(batch["conjugated"][0, 0].resolve_conj()) == complex(first, -first)
        assert float(batch["negated"][0, 0]) == -first
        assert float(batch["nested"].unbind()[1][0]) == first + 1
        assert float(batch["quantized"].dequantize()[0, 0]) == first
    assert number == NUM_BATCHES - 1


def test_a_buffer_that_is_filled_again() -> None:
    """A function that returns its own buffer is not called ahead, and its kernels wait for the loop's."""
    buffer, seen = torch.zeros((BATCH, MIB // 4), dtype=torch.int32, device="cuda"), room()
    loader = loader_of(lambda batch: torch.mul(batch, 2, out=buffer))
    for target, batch in zip(seen, loader, strict=True):
        time.sleep(0.02)
        cuda._sleep(CYCLES // 4)
        target.copy_(batch)
    assert wrong_among(seen) == []
    assert "returned memory that it had returned before" in loader.stats().notes[0]


def test_errors_and_an_early_end() -> None:
    """Out of memory and any other error name their batch; the batches around it come, and none is lost."""

    def fails(batch: torch.Tensor) -> torch.Tensor:
        if int(batch[0, 0]) == 5 * BATCH:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return batch * 2

    iterator, seen = iter(loader_of(fails)), []
    for number in range(NUM_BATCHES):
        if number == 5:
            with pytest.raises(torch.OutOfMemoryError, match="device_transform of batch 5"):
                next(iterator)
        else:
            seen.append(int(next(iterator)[0, 0]))
    assert seen == [2 * BATCH * number for number in range(NUM_BATCHES) if number != 5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader(num_workers: int) -> None:
    """numapin.StatefulDataLoader transforms on the GPU, and its states lead to the same batches."""
    pytest.importorskip("torchdata")
    options: Any = {"num_workers": num_workers, "device": "cuda", "device_transform": held}
    loader = numapin.StatefulDataLoader(Filled(NUM_BATCHES * BATCH), BATCH, **options)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    resumed = numapin.StatefulDataLoader(Filled(NUM_BATCHES * BATCH), BATCH, **options)
    resumed.load_state_dict(loader.state_dict())
    assert [int(batch.values[0, 0]) for batch in resumed] == [2 * BATCH * number for number in range(7, NUM_BATCHES)]
