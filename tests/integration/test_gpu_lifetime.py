"""On a GPU: when a slot may be reused, CUDA graph captures, and the end of loaders and ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import numapin
from tests.contract.test_processes import Program
from tests.integration.gpu_loading import (
    BATCH,
    CYCLES,
    DEVICE,
    HOST,
    MIB,
    ROOT,
    Filled,
    assert_no_error_is_pending,
    cuda,
    is_right,
    lies_in_slot,
    run_program,
    settled_pinned_bytes,
    uses_gpu,
    warmed,
    wrong_ones,
)
from tests.integration.seam import PINNED
from tests.integration.seam_torch import Quarantine
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.seam import Slot

pytestmark = uses_gpu


NUM_COPIES = 24
two_gpus = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs that torch can use"),
]


def late(batch: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy on the current stream, after other work that delays it."""
    cuda._sleep(CYCLES)
    destination.copy_(batch, non_blocking=True)


def on_the_current_stream(iterator: Iterator[Any], destination: torch.Tensor, _side: Any) -> None:
    late(next(iterator), destination)


def on_a_side_stream(iterator: Iterator[Any], destination: torch.Tensor, side: Any) -> None:
    with cuda.stream(side):
        late(next(iterator), destination)


def from_a_prefetcher(iterator: Iterator[Any], destination: torch.Tensor, side: Any) -> None:
    """Call next() outside the stream block and copy inside it, so the stream at next() carries no information."""
    batch = next(iterator)
    with cuda.stream(side):
        late(batch, destination)


def let_everything_pass(patch: pytest.MonkeyPatch) -> None:
    """Disable the quarantine: a slot is free as soon as this process has no reference to it."""

    def at_once(quarantine: Quarantine[Slot]) -> list[Slot]:
        slots, quarantine._waiting = quarantine._waiting, []
        return slots

    patch.setattr(Quarantine, "passed", at_once)


def wrong_copies(way: Callable[..., None], device: str) -> list[int]:
    """Copy batches in one way, drop each at once, keep loading, and return the numbers of wrong copies."""
    destinations = torch.zeros((NUM_COPIES, BATCH, MIB // 4), dtype=torch.int32, device=device)
    with numapin.DataLoader(Filled(), BATCH, num_workers=1, **HOST) as loader:
        iterator, first = warmed(loader)
        before = loader.stats().hits
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            side = cuda.Stream()
            for destination in destinations:
                way(iterator, destination, side)
            torch.cuda.synchronize()
        assert loader.stats().hits - before >= NUM_COPIES // 4, loader.stats()
        del iterator
    return wrong_ones(destinations, first)


class TestQuarantine:
    """Copies with non_blocking=True from batches that the user drops at once."""

    @pytest.mark.parametrize("is_on", [True, False])
    @pytest.mark.parametrize(
        ("way", "device"),
        [
            (on_the_current_stream, "cuda:0"),
            (on_a_side_stream, "cuda:0"),
            (from_a_prefetcher, "cuda:0"),
            pytest.param(from_a_prefetcher, "cuda:1", marks=two_gpus),
        ],
    )
    def test_copies(
        self, way: Callable[..., None], device: str, is_on: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No slot is overwritten while a copy waits to read it, on any GPU in use, whether its stream is known or not.

        Without the quarantine the same schedule shows samples of other batches, so this test can fail.
        """
        if not is_on:
            let_everything_pass(monkeypatch)
        assert (wrong_copies(way, device) == []) is is_on

    def test_a_kept_view_is_enough(self) -> None:
        """A batch of which only a view is left is not overwritten, however long the view is kept."""
        with numapin.DataLoader(Filled(), BATCH, num_workers=1, **HOST) as loader:
            iterator, first = warmed(loader)
            views = [next(iterator)[:, 5:7] for _ in range(3)]
            assert any(lies_in_slot(loader, view) for view in views)
            for batch in itertools.islice(iterator, 40):
                batch.to("cuda", non_blocking=True)
            assert wrong_ones(views, first) == []
            del iterator


def take(iterator: Iterator[Any], num_batches: int) -> list[Any]:
    return [next(iterator) for _ in range(num_batches)]


class TestCaptures:
    """CUDA graphs, captured in the default global mode in the middle of an epoch."""

    @pytest.mark.parametrize("num_taken", [1, 12])
    @pytest.mark.parametrize("options", [HOST, DEVICE], ids=["host", "device"])
    def test_beside_a_thread_that_loads(self, options: dict[str, Any], num_taken: int) -> None:
        """Batches dropped before a capture, and another thread's steps during it, damage neither graph nor batches."""
        ones = torch.ones(8, device="cuda")
        with numapin.DataLoader(Filled(), BATCH, num_workers=2, **options) as loader, ThreadPoolExecutor(1) as pool:
            iterator, number = warmed(loader)
            for _ in range(3):
                held = take(iterator, 3)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    ones.mul_(2)
                    held.clear()
                    taken = pool.submit(take, iterator, num_taken).result()
                    ones.add_(1)
                graph.replay()
                assert wrong_ones(taken, number + 3) == []
                number += 3 + num_taken
            assert ones.tolist() == [15] * 8  # 1, 3, 7, 15
            taken.clear()
            self.assert_slots_come_back(loader, iterator, number)
            del iterator

    def test_in_the_thread_that_loads(self) -> None:
        """In host mode next() is harmless inside the capturing block."""
        ones, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with numapin.DataLoader(Filled(), BATCH, num_workers=2, **HOST) as loader:
            iterator, number = warmed(loader)
            held = take(iterator, 3)
            with torch.cuda.graph(graph):
                ones.mul_(2)
                held.clear()
                taken = take(iterator, 6)
            graph.replay()
            assert ones.tolist() == [2] * 8
            assert wrong_ones(taken, number + 3) == []
            taken.clear()
            self.assert_slots_come_back(loader, iterator, number + 9)
            del iterator

    def assert_slots_come_back(self, loader: Any, iterator: Iterator[Any], number: int) -> None:
        """Fail unless slots come back after the captures: most of the next batches are in the ring, and correct."""
        before, destination = loader.stats().hits, torch.empty((BATCH, MIB // 4), dtype=torch.int32, device="cuda")
        for next_number in range(number, number + 40):
            destination.copy_(next(iterator), non_blocking=True)
            assert is_right(destination, next_number)
        assert loader.stats().hits - before >= 24, loader.stats()
        assert loader.stats().slots_on_loan < loader.stats().slots
        assert_no_error_is_pending()

    @pytest.mark.parametrize(("guard", "outcome"), [("guarded", "whole"), ("unguarded", "broken")])
    def test_the_guard_is_needed(self, guard: str, outcome: str) -> None:
        """Without the guard, slots that are released during a capture would break it."""
        assert run_program("capture", guard).strip() == outcome


class TestOutliving:
    """Batches that are kept longer than their loader."""

    def test_on_the_host(self) -> None:
        """The ring's memory stays pinned while batches use it, and is unlocked with the last of them."""
        before = settled_pinned_bytes()
        loader = numapin.DataLoader(Filled(), BATCH, num_workers=2, **HOST)
        iterator, first = warmed(loader)
        numbered = zip(range(first, first + 4), iterator, strict=False)
        kept = {number: batch for number, batch in numbered if lies_in_slot(loader, batch)}
        assert kept
        del iterator, numbered
        loader.close()
        del loader
        while kept:
            time.sleep(0.2)
            assert PINNED.total > before
            assert all(batch.is_pinned() and is_right(batch, number) for number, batch in kept.items())
            kept.popitem()
        assert wait_until(lambda: PINNED.total == before, limit_s=2)
        assert_no_error_is_pending()

    def test_on_the_device(self) -> None:
        """Nothing stays locked for batches on the GPU, and they stay correct."""
        before = settled_pinned_bytes()
        with numapin.DataLoader(Filled(), BATCH, num_workers=2, **DEVICE) as loader:
            iterator, first = warmed(loader)
            kept = take(iterator, 20)
            assert loader.stats().pinned_bytes > 0
            del iterator
        assert wait_until(lambda: PINNED.total == before, limit_s=2)
        assert wrong_ones(kept, first) == []

    @pytest.mark.parametrize("what", ["closed", "dropped"])
    def test_copies_to_the_device_outlive_their_loader(self, what: str) -> None:
        """Batches are correct if their copies end after the loader; then nothing of the loader stays locked."""
        assert json.loads(run_program("vanish", what)) == {"wrong": [], "pinned_bytes": 0}

    def test_a_copy_outlives_them_all(self) -> None:
        """Memory stays locked while a copy waits to read it, even if loader and batches are gone."""
        before, destination = settled_pinned_bytes(), torch.zeros((BATCH, MIB // 4), dtype=torch.int32, device="cuda")
        loader = numapin.DataLoader(Filled(), BATCH, num_workers=2, **HOST)
        iterator, number = warmed(loader)
        batch, passed = next(iterator), cuda.Event()
        assert lies_in_slot(loader, batch)
        cuda._sleep(8 * CYCLES)
        destination.copy_(batch, non_blocking=True)
        passed.record()
        del iterator, batch
        loader.close()
        del loader
        assert PINNED.total > before or passed.query()
        assert wait_until(lambda: PINNED.total == before, limit_s=3)
        assert passed.query()
        assert is_right(destination, number)


def start_training(stack: contextlib.ExitStack, method: str) -> Program:
    """Start a rank in its own session; leaving the stack ends all of it."""
    command = [sys.executable, "-m", "tests.integration.gpu_program", "train", method]
    process = stack.enter_context(
        subprocess.Popen(
            command, cwd=ROOT, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    stack.callback(end)
    assert process.stdout is not None
    assert process.stderr is not None
    return Program(process, process.stdout, process.stderr)


def kill(program: Program) -> list[float]:
    """Kill a rank that holds a GiB of the GPU; return the seconds until no process, and none of its memory, is left."""
    free = torch.cuda.mem_get_info()[0]
    start, ends = time.monotonic(), [0.0, 0.0]
    program.process.kill()
    while not all(ends) and time.monotonic() - start < 10:
        program.process.poll()
        if not ends[0] and not program.members():
            ends[0] = time.monotonic() - start
        if not ends[1] and torch.cuda.mem_get_info()[0] >= free + 1024 * MIB:
            ends[1] = time.monotonic() - start
        time.sleep(0.01)
    return [end or 10 for end in ends]


def test_killed_ranks() -> None:
    """Two seconds after SIGKILL no worker, server or tracker is alive, and the rank's GPU memory is free again."""
    with contextlib.ExitStack() as stack:
        programs = [start_training(stack, method) for method in ("fork", "spawn", "forkserver")]
        for program in programs:
            program.wait_for("ready")
            assert len(program.members()) >= 3  # the rank and two workers
        ends = [kill(program) for program in programs]
    assert max(seconds for each in ends for seconds in each) < 2, ends
