"""The measuring processes' own code, as far as it runs without a GPU: memory of each kind, steps of an allocation."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from numapin import region
from numapin.bench import (
    alloc,
    alloc_case,
    buffers,
    exec_case,
    launch_case,
    overlap,
    overlap_case,
    transfer,
    transfer_case,
)
from numapin.errors import MachineError, NumapinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.cuda.fake import FakeCuda

PAGE = 4096


class FakeHarness:
    """Keeps what a measuring process says."""

    figures: Mapping[str, float]

    def wait_for_start(self, idle: Callable[[], object]) -> None:
        """Let it idle once, and begin."""
        idle()

    def report(self, figures: Mapping[str, float], **_rest: object) -> None:
        """Keep the figures."""
        self.figures = figures


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave torch's threads as they were, and no memory in the caches."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    buffers.buffer.cache_clear()
    buffers.settle_on.cache_clear()


@pytest.mark.parametrize("memory", ["pageable", "registered", "ring"])
def test_memory_is_touched_and_locked_if_it_should_be(memory: str, fake_cuda: FakeCuda) -> None:
    """The bytes that were asked for, each page of them somewhere; locked whole pages, or none; the same ones again."""
    tensor = buffers.buffer(memory, 3 * PAGE + 5, gpu=0, node=None)
    assert tensor.numel() == 3 * PAGE + 5
    assert None not in (region.find_pages(tensor.data_ptr(), tensor.nbytes) or {})
    assert fake_cuda.registered_bytes() == (0 if memory == "pageable" else 4 * PAGE)
    assert buffers.buffer(memory, 3 * PAGE + 5, gpu=0, node=None).data_ptr() == tensor.data_ptr()
    other = buffers.buffer(memory, 3 * PAGE + 5, gpu=0, node=None, number=1)
    other.fill_(9)
    assert set(tensor.tolist()) == {1}


@pytest.mark.parametrize(
    ("pages", "is_right"), [({0: 2}, True), ({None: 2}, True), (None, True), ({0: 1, 7: 1}, False)]
)
def test_memory_on_another_node_is_refused(pages: Any, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """A figure of node 0 whose pages lie elsewhere would be wrong; where the kernel does not tell it is taken."""
    monkeypatch.setattr(region, "find_pages", lambda *_: pages)
    with (
        nullcontext() if is_right else pytest.raises(MachineError, match=r"for node 0 lies elsewhere, in pages: .*7: 1")
    ):
        assert buffers.buffer("pageable", PAGE, gpu=0, node=0).numel() == PAGE


def test_every_kind_that_is_offered_can_be_made() -> None:
    """The names that the commands know are those that the processes know."""
    assert transfer.MEMORIES.keys() == buffers._MAKERS.keys()
    assert alloc.PEERS.keys() == alloc_case._WAYS.keys()
    assert overlap.PEERS.keys() == overlap_case._BATCHES.keys()


@pytest.mark.parametrize("direction", list(transfer.Direction))
def test_copies_go_the_way_they_are_named(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With host memory in the GPU's place: its bytes arrive on the other side, and both ways double the rate."""
    on_gpu = [torch.full((1 << 16,), 7, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(transfer_case, "_on_gpu", lambda _size, _gpu, number: on_gpu[number])
    monkeypatch.setattr(transfer_case, "_streams", lambda _gpu: (None, None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _gpu: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    spec = {"memory": "pageable", "direction": direction, "num_bytes": PAGE, "max_bytes": 1 << 16, "gpu": 0,
            "node": None, "seconds": 0.01}  # fmt: skip
    harness: Any = FakeHarness()
    transfer_case.measure(spec, harness)
    hosts = [buffers.buffer("pageable", 1 << 16, gpu=0, node=None, number=number) for number in range(2)]
    is_up, is_down = on_gpu[0][0] == 1, 7 in (hosts[0][0], hosts[1][0])
    assert (bool(is_up), is_down) == {"h2d": (True, False), "d2h": (False, True), "both": (True, True)}[direction]
    assert on_gpu[0][PAGE] == 7  # no more than was asked for
    assert harness.figures["host_share"] <= 1
    assert harness.figures["gbps"] > 0


def test_both_ways_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same calls a second carry twice the bytes."""
    monkeypatch.setattr(transfer_case, "_calls_per_s", lambda *_: 1000.0)
    monkeypatch.setattr(transfer_case, "_copier", lambda _spec: lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _gpu: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rates = {}
    for direction in ("h2d", "both"):
        harness: Any = FakeHarness()
        spec = {"direction": direction, "num_bytes": 1_000_000, "gpu": 0, "node": None, "seconds": 0.001}
        transfer_case.measure(spec, harness)
        rates[direction] = harness.figures["gbps"]
    assert rates == {"h2d": pytest.approx(1.0), "both": pytest.approx(2.0)}


def test_the_steps_of_an_allocation_are_told_apart() -> None:
    """A slow allocation is in its own figure only; both of the first two are in their sum."""

    def slow(num_bytes: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.empty(num_bytes, dtype=torch.uint8)

    given_back: list[int] = []
    way = alloc_case.Way(allocate=slow, give_back=lambda tensor: given_back.append(tensor.numel()))
    sample = alloc_case._sample(way, PAGE, None)
    assert sample["alloc_us"] > 20_000
    assert sample["touch_us"] < 20_000
    assert sample["filled_us"] == sample["alloc_us"] + sample["touch_us"]
    assert "copy_us" not in sample
    assert given_back == [PAGE]


def test_fresh_memory_has_no_page() -> None:
    """As the kernel gives it: the first write brings every page; torch may hand back what was written before."""
    fresh = alloc_case._fresh(64 * PAGE)
    assert region.find_pages(fresh.data_ptr(), fresh.nbytes) == {None: 64}


def test_registered_memory_is_let_go(fake_cuda: FakeCuda) -> None:
    """Each sample locks its own memory, and unlocks it."""
    way = alloc_case._WAYS["registered"]
    tensor = way.allocate(8 * PAGE)
    assert fake_cuda.registered_bytes() == 8 * PAGE
    way.give_back(tensor)
    assert fake_cuda.registered_bytes() == 0


class FakeEvent:
    """An event that passes when it is recorded: the host in the GPU's place."""

    def __init__(self, **_options: bool) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        """Take the time."""
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return the milliseconds in between."""
        return (other.at_s - self.at_s) * 1e3


class FakeStream:
    """A stream that keeps no order of its own."""

    def wait_event(self, event: FakeEvent) -> None:
        """Wait for nothing that has not been recorded."""
        assert event.at_s > 0


@pytest.fixture
def host_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop of `bench overlap` run with the host in the GPU's place."""
    monkeypatch.setattr(overlap_case, "_DEVICE", "cpu")
    monkeypatch.setattr(overlap_case, "_MATRIX", 64)
    monkeypatch.setattr(overlap_case, "_calls_for", lambda _ms: 1)
    batches = overlap_case._host_batches.__wrapped__
    monkeypatch.setattr(overlap_case, "_host_batches", lambda size, number, **_: batches(size, number, pinned=False))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _tensor, _stream: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    overlap_case._matrices.cache_clear()


@pytest.mark.usefixtures("host_as_gpu")
@pytest.mark.parametrize("peer", list(overlap.PEERS))
class TestOverlap:
    """The loop of `bench overlap`."""

    def test_every_batch_is_used_once_and_in_order(self, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is loaded is what is computed with, however far ahead it is copied; several tensors stay together."""
        step = overlap.Step(name="x", why="", num_bytes=64, num_tensors=2, compute_ms=1)
        loop, used = overlap_case.Loop(step, peer), []
        monkeypatch.setattr(overlap_case, "_compute", lambda batch, _calls: used.append(batch))
        load, loaded = loop.load, iter(range(100))

        def numbered() -> list[torch.Tensor]:
            number = next(loaded)
            return [tensor.fill_(number) for tensor in load()]

        monkeypatch.setattr(loop, "load", numbered)
        seen = []
        for _ in range(9):
            loop.step()
            seen.append([(int(tensor[0]), tensor.numel()) for tensor in used[-1]])
        assert seen == [[(number, 32)] * 2 for number in range(9)]

    def test_figures(self, peer: str) -> None:
        """A step takes at least its CPU work; each figure is there, and copies and compute do not lie in each other."""
        step = overlap.Step(name="x", why="", num_bytes=1 << 16, compute_ms=1, load_ms=2, between_ms=3)
        harness: Any = FakeHarness()
        overlap_case.measure({"peer": peer, "step": dataclasses.asdict(step), "seconds": 0.05}, harness)
        figures = harness.figures
        assert 0 < figures["steps_per_s"] <= 200
        assert figures["hidden_share"] == 0
        assert figures["host_ms"] >= figures["copy_ms"] > 0
        assert 0 < figures["busy_share"] < 1


class TestExec:
    """Starts with and without what stands before a command."""

    def test_figures(self) -> None:
        """Medians, the median of each pair's difference, and what is least of each."""
        assert exec_case.figures([(1, 11, 5), (2, 10, 4), (3, 30, 9)]) == {
            "plain_ms": 2, "total_ms": 11, "added_ms": 10, "least_ms": 9, "cpu_ms": 4,
        }  # fmt: skip

    def test_a_command_that_fails(self) -> None:
        """It is an error, and no figure."""
        assert exec_case.time_ms(["true"])[0] > 0
        with pytest.raises(NumapinError, match="false ended with status 1"):
            exec_case.time_ms(["false"])


class TestLaunch:
    """One run of a launcher."""

    def test_times_are_of_the_script(self, tmp_path: Path) -> None:
        """First comes what the first of several lines says, then the end; with the memory."""
        script = Path(tmp_path, "script.py")
        script.write_text("import time\nfor _ in range(2): print('MARK', time.time(), flush=True); time.sleep(0.2)\n")
        figures = launch_case.run((sys.executable, str(script)))
        assert 0 < figures["first_s"] < figures["total_s"] - 0.4
        assert figures["rss_mb"] > 1

    @pytest.mark.parametrize(
        ("code", "why"),
        [
            ("import sys; sys.exit('no such rank')", "status 1: no such rank"),
            ("pass", "status 0: nothing on stderr"),
            ("import os; os.kill(os.getpid(), 9)", "status -9"),
        ],
    )
    def test_a_launcher_that_fails_or_prints_nothing(self, code: str, why: str) -> None:
        """It is an error with its last words, not a figure."""
        with pytest.raises(NumapinError, match=why):
            launch_case.run((sys.executable, "-c", code))
