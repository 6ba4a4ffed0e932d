"""The process of `bench overlap`: a loop that loads, copies and computes."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.bench.cases.loader import spin
from numapin.bench.cases.overlap import Step, share_within
from numapin.bench.child import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numapin.bench.child import Harness

_NUM_BUFFERS: Final = 4
_NUM_AHEAD: Final = 4  # steps that the host may be ahead of the GPU, whose memory would otherwise fill up
_MIN_STEPS: Final = 5
_MATRIX: Final = 4096  # side, float16: 0.2 ms on an H200, much longer than the launch
_DEVICE: Final = "cuda"


@dataclass(slots=True)
class Stretch:
    """The work of a stream between two events, from `began` to `ended`."""

    began: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def of(cls, work: Callable[[], None]) -> Stretch:
        """Run work on the current stream, between two events."""
        stretch = cls(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        stretch.began.record()
        work()
        stretch.ended.record()
        return stretch

    def since(self, base: torch.cuda.Event) -> tuple[float, float]:
        """Return begin and end in milliseconds after an event; all three must have passed."""
        return base.elapsed_time(self.began), base.elapsed_time(self.ended)


class Loop:
    """The loop of one peer. `step` runs one step, which extends the lists."""

    def __init__(self, step: Step, peer: str) -> None:
        self._step, self._compute_calls = step, _calls_for(step.compute_ms)
        self.copies: list[Stretch] = []
        self.computes: list[Stretch] = []
        self.host_ms: list[float] = []
        self._hosts = _host_batches(step.num_bytes, step.num_tensors, pinned=peer in ("pinned", "side-stream"))
        self._used: deque[torch.cuda.Event] = deque()  # copies from the host's buffers, oldest first
        self._computing: deque[torch.cuda.Event] = deque()
        self._number = 0
        self._batches: Iterator[list[torch.Tensor]] = _BATCHES[peer](self)

    def step(self) -> None:
        """Take a batch, work on the CPU, compute with the batch on the GPU."""
        if len(self._computing) >= _NUM_AHEAD:
            self._computing.popleft().synchronize()
        batch = next(self._batches)
        spin(round(self._step.between_ms * 1e6))
        self.computes.append(Stretch.of(lambda: _compute(batch, self._compute_calls)))
        self._computing.append(self.computes[-1].ended)

    def load(self) -> list[torch.Tensor]:
        """Load the next batch into the next host buffer, after the last copy from that buffer has ended."""
        if len(self._used) >= _NUM_BUFFERS:
            self._used.popleft().synchronize()
        spin(round(self._step.load_ms * 1e6))
        self._number += 1
        return self._hosts[self._number % _NUM_BUFFERS]

    def copy(self, host: Iterable[torch.Tensor], *, non_blocking: bool) -> list[torch.Tensor]:
        """Copy a batch on the current stream."""
        batch: list[torch.Tensor] = []
        start = time.perf_counter()
        stretch = Stretch.of(lambda: batch.extend(tensor.to(_DEVICE, non_blocking=non_blocking) for tensor in host))
        self.host_ms.append((time.perf_counter() - start) * 1e3)
        self.copies.append(stretch)
        self._used.append(stretch.ended)
        return batch


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one peer on one kind of step."""
    loop = Loop(Step(**spec["step"]), spec["peer"])
    for _ in range(_MIN_STEPS):
        loop.step()
    torch.cuda.synchronize()
    harness.wait_for_start(loop.step)
    torch.cuda.synchronize()
    for warm_up in (loop.copies, loop.computes, loop.host_ms):
        warm_up.clear()
    base = torch.cuda.Event(enable_timing=True)
    base.record()
    start, num_steps = time.perf_counter(), 0
    while num_steps < _MIN_STEPS or time.perf_counter() - start < spec["seconds"]:
        loop.step()
        num_steps += 1
    torch.cuda.synchronize()
    figures = _figures(loop, base, wall_s=time.perf_counter() - start, num_steps=num_steps)
    harness.report(figures, details={}, idle=lambda: time.sleep(0.001))


def _figures(loop: Loop, base: torch.cuda.Event, *, wall_s: float, num_steps: int) -> dict[str, float]:
    copies = [stretch.since(base) for stretch in loop.copies]
    computes = [stretch.since(base) for stretch in loop.computes]
    compute_ms = _lengths(computes)
    figures = {
        "steps_per_s": num_steps / wall_s,
        "copy_ms": statistics.median(_lengths(copies)),
        "host_ms": statistics.median(loop.host_ms),
        "compute_ms": statistics.median(compute_ms),
        "busy_share": sum(compute_ms) / (wall_s * 1e3),
    }
    hidden = share_within(copies, computes)
    return figures if hidden is None else figures | {"hidden_share": hidden}


def _lengths(intervals: Iterable[tuple[float, float]]) -> list[float]:
    return [end - begin for begin, end in intervals]


def _pageable(loop: Loop) -> Iterator[list[torch.Tensor]]:
    while True:
        yield loop.copy(loop.load(), non_blocking=False)


def _pin_inline(loop: Loop) -> Iterator[list[torch.Tensor]]:
    while True:
        host = loop.load()
        start = time.perf_counter()
        pinned = [tensor.pin_memory() for tensor in host]
        pin_ms = (time.perf_counter() - start) * 1e3
        batch = loop.copy(pinned, non_blocking=True)
        loop.host_ms[-1] += pin_ms
        yield batch


def _pinned(loop: Loop) -> Iterator[list[torch.Tensor]]:
    while True:
        yield loop.copy(loop.load(), non_blocking=True)


def _side_stream(loop: Loop) -> Iterator[list[torch.Tensor]]:
    """Yield a batch that was copied on a separate stream, after starting the copy of the next one."""
    side = torch.cuda.Stream()
    ahead: deque[tuple[list[torch.Tensor], torch.cuda.Event]] = deque()
    while True:
        host = loop.load()
        with torch.cuda.stream(side):
            ahead.append((loop.copy(host, non_blocking=True), loop.copies[-1].ended))
        if len(ahead) < 2:
            continue
        batch, copied = ahead.popleft()
        torch.cuda.current_stream().wait_event(copied)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        yield batch


_BATCHES: Final = {
    "pageable": _pageable,
    "pin-inline": _pin_inline,
    "pinned": _pinned,
    "side-stream": _side_stream,
}


@cache
def _host_batches(num_bytes: int, num_tensors: int, *, pinned: bool) -> tuple[list[torch.Tensor], ...]:
    size = num_bytes // num_tensors
    return tuple(
        [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1) for _ in range(num_tensors)]
        for _ in range(_NUM_BUFFERS)
    )


def _compute(batch: list[torch.Tensor], num_calls: int) -> None:
    """Read the batch and multiply matrices."""
    weights, result = _matrices()
    for tensor in batch:
        weights[0, 0] = tensor[0]
    for _ in range(num_calls):
        torch.mm(weights, weights, out=result)


@cache
def _matrices() -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.rand(_MATRIX, _MATRIX, dtype=torch.float16, device=_DEVICE)  # zeros would take less power and time
    return weights, torch.empty_like(weights)


@cache
def _calls_for(compute_ms: float) -> int:
    """Return how many multiplications take about `compute_ms` on this GPU, at least one."""
    num_calls = 20
    for _ in range(2):  # the first time warms it up
        stretch = Stretch.of(lambda: _compute([], num_calls))
        torch.cuda.synchronize()
    taken_ms: float = stretch.began.elapsed_time(stretch.ended)
    return max(1, round(compute_ms / taken_ms * num_calls))


if __name__ == "__main__":
    serve(measure)
