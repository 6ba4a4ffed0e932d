"""`numapin bench overlap`: a loop that loads, copies and computes, and the share of the copies that compute hides."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from numapin.bench.model import Benchmark, Case, Column, Comparison, Peer, Question
from numapin.trace.analysis import Lengths, length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from numapin.bench.process import Harness

PEERS: Final = {
    "pageable": ".to(device) of ordinary memory",
    "pin-inline": ".pin_memory().to(device, non_blocking=True), both in the loop",
    "pinned": ".to(device, non_blocking=True) of memory that is already pinned",
    "side-stream": "the same, one batch ahead on a separate stream",
}
_NUM_BUFFERS: Final = 4
_NUM_AHEAD: Final = 4  # steps that the host may be ahead of the GPU, whose memory would otherwise fill up
_MIN_STEPS: Final = 5
_MATRIX: Final = 4096  # side, float16: 0.2 ms on an H200, much longer than the launch
_DEVICE: Final = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the loop: load on the CPU, copy the batch, work on the CPU again, compute on the GPU."""

    name: str
    why: str
    num_bytes: int
    compute_ms: float
    num_tensors: int = 1
    load_ms: float = 0.0
    between_ms: float = 0.0

    @property
    def about(self) -> str:
        """The step in words."""
        tensors = f"{self.num_tensors} tensors, " if self.num_tensors > 1 else ""
        parts = [
            f"load {self.load_ms:g} ms" if self.load_ms else "",
            f"{tensors}{self.num_bytes >> 20} MiB",
            f"CPU {self.between_ms:g} ms" if self.between_ms else "",
            f"compute {self.compute_ms:g} ms",
        ]
        return f"{self.why}: {', '.join(filter(None, parts))}"


_MIB: Final = 1 << 20
STEPS: Final = {
    step.name: step
    for step in (
        Step(name="transfer-bound", why="mostly the copy", num_bytes=256 * _MIB, load_ms=1, compute_ms=2),
        Step(name="balanced", why="equal shares", num_bytes=128 * _MIB, load_ms=2, compute_ms=3),
        Step(name="compute-bound", why="a small copy", num_bytes=16 * _MIB, load_ms=1, compute_ms=30),
        Step(name="load-bound", why="mostly the CPU", num_bytes=16 * _MIB, load_ms=15, compute_ms=3),
        Step(name="immediate", why="the batch is used at once", num_bytes=64 * _MIB, compute_ms=2),
        Step(name="several", why="the same bytes, split", num_bytes=64 * _MIB, num_tensors=16, compute_ms=2),
        Step(name="between", why="CPU work after the copy", num_bytes=64 * _MIB, between_ms=2, compute_ms=2),
    )
}


def overlap_benchmark(*, steps: Sequence[str], peers: Sequence[str], seconds: float, no_gpu: str | None) -> Benchmark:
    """Return the benchmark. `no_gpu` is the reason if there is no GPU; every case is then skipped."""
    cases = []
    for name in steps:
        measured = tuple(Peer(name=peer, specs=({"peer": peer, "step": name, "seconds": seconds},)) for peer in peers)
        cases.append(
            Case(
                name=name,
                about=STEPS[name].about,
                peers=measured if no_gpu is None else (),
                skipped=no_gpu,
                session="overlap",
            )
        )
    return Benchmark(
        name="overlap",
        module="numapin.bench.overlap",
        cases=tuple(cases),
        comparisons=(Comparison(name="ratio", figure="steps_per_s", against="pageable"),),
        questions=(
            Question(
                subject="pin ({own})",
                things="steps are",
                figure="steps_per_s",
                own=("pinned", "side-stream"),
                against="pageable",
            ),
        ),
        settings={"seconds": seconds, "peers_are": PEERS},
        columns=(
            Column(figure="steps_per_s", heading="steps/s", form=",.1f", spread=True),
            Column(figure="ratio", heading="x pageable", form=".2f", spread=True),
            Column(figure="copy_ms", heading="copy ms", form=".2f"),
            Column(figure="host_ms", heading="host ms", form=".2f", meaning="blocked by a copy"),
            Column(figure="compute_ms", heading="compute ms", form=".2f"),
            Column(figure="hidden_share", heading="hidden", form=".0%", meaning="copies during compute"),
            Column(figure="busy_share", heading="busy", form=".0%", meaning="GPU computing"),
        ),
    )


def spin(cpu_ns: int) -> None:
    """Hold the GIL by working in Python for `cpu_ns` of this thread's CPU time.

    Iterations would take twice as long if two workers share a core, and wall time also passes while another thread has
    the GIL.
    """
    until_ns = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until_ns:
        pass


# --- in the measuring process -----------------------------------------------------------------------------------------


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one peer on one kind of step."""
    import torch

    loop = Loop(STEPS[spec["step"]], spec["peer"])
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
    wall_s = time.perf_counter() - start

    copies, computes = (
        tuple((base.elapsed_time(began), base.elapsed_time(ended)) for began, ended in part)
        for part in (loop.copies, loop.computes)
    )
    compute_ms = [end - begin for begin, end in computes]
    figures = {
        "steps_per_s": num_steps / wall_s,
        "copy_ms": statistics.median(end - begin for begin, end in copies),
        "host_ms": statistics.median(loop.host_ms),
        "compute_ms": statistics.median(compute_ms),
        "busy_share": sum(compute_ms) / (wall_s * 1e3),
    }
    if length(copies) > 0:
        figures["hidden_share"] = Lengths(computes).within(copies) / length(copies)
    harness.report(figures, details={}, idle=lambda: time.sleep(0.001))


def _timed(work: Callable[[], None]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Run work on the current stream; return the events before and after it.

    Both must have passed before `elapsed_time` is asked.
    """
    from torch.cuda import Event

    began, ended = Event(enable_timing=True), Event(enable_timing=True)
    began.record()
    work()
    ended.record()
    return began, ended


class Loop:
    """The loop of one peer. `step` runs one step, which extends the lists."""

    def __init__(self, step: Step, peer: str) -> None:
        self._step, self._compute_calls = step, _calls_for(step.compute_ms)
        self.copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # begin and end
        self.computes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.host_ms: list[float] = []
        self._hosts = _host_batches(step.num_bytes, step.num_tensors, pinned=peer in ("pinned", "side-stream"))
        self._used: deque[torch.cuda.Event] = deque()  # copies from the host's buffers, oldest first
        self._computing: deque[torch.cuda.Event] = deque()
        self._number = 0
        self._batches = self._side_stream() if peer == "side-stream" else self._in_the_loop(peer)

    def step(self) -> None:
        """Take a batch, work on the CPU, compute with the batch on the GPU."""
        if len(self._computing) >= _NUM_AHEAD:
            self._computing.popleft().synchronize()
        batch = next(self._batches)
        spin(round(self._step.between_ms * 1e6))
        self.computes.append(_timed(lambda: _compute(batch, self._compute_calls)))
        self._computing.append(self.computes[-1][1])

    def _in_the_loop(self, peer: str) -> Iterator[list[torch.Tensor]]:
        """Yield batches that the loop itself copies, and pins first if the peer says so."""
        while True:
            host = self._load()
            start = time.perf_counter()
            if peer == "pin-inline":
                host = [tensor.pin_memory() for tensor in host]
            pin_ms = (time.perf_counter() - start) * 1e3
            batch = self._copy(host, non_blocking=peer != "pageable")
            self.host_ms[-1] += pin_ms
            yield batch

    def _side_stream(self) -> Iterator[list[torch.Tensor]]:
        """Yield a batch that was copied on a separate stream, after starting the copy of the next one."""
        from torch import cuda

        side = cuda.Stream()
        ahead: deque[tuple[list[torch.Tensor], torch.cuda.Event]] = deque()
        while True:
            host = self._load()
            with cuda.stream(side):
                ahead.append((self._copy(host, non_blocking=True), self.copies[-1][1]))
            if len(ahead) < 2:
                continue
            batch, copied = ahead.popleft()
            cuda.current_stream().wait_event(copied)
            for tensor in batch:
                tensor.record_stream(cuda.current_stream())
            yield batch

    def _load(self) -> list[torch.Tensor]:
        """Load the next batch into the next host buffer, after the last copy from that buffer has ended."""
        if len(self._used) >= _NUM_BUFFERS:
            self._used.popleft().synchronize()
        spin(round(self._step.load_ms * 1e6))
        self._number += 1
        return self._hosts[self._number % _NUM_BUFFERS]

    def _copy(self, host: Iterable[torch.Tensor], *, non_blocking: bool) -> list[torch.Tensor]:
        """Copy a batch on the current stream."""
        batch: list[torch.Tensor] = []
        start = time.perf_counter()
        events = _timed(lambda: batch.extend(tensor.to(_DEVICE, non_blocking=non_blocking) for tensor in host))
        self.host_ms.append((time.perf_counter() - start) * 1e3)
        self.copies.append(events)
        self._used.append(events[1])
        return batch


@cache
def _host_batches(num_bytes: int, num_tensors: int, *, pinned: bool) -> tuple[list[torch.Tensor], ...]:
    import torch

    size = num_bytes // num_tensors
    return tuple(
        [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1) for _ in range(num_tensors)]
        for _ in range(_NUM_BUFFERS)
    )


def _compute(batch: list[torch.Tensor], num_calls: int) -> None:
    """Read the batch and multiply matrices."""
    from torch import mm

    weights, result = _matrices()
    for tensor in batch:
        weights[0, 0] = tensor[0]
    for _ in range(num_calls):
        mm(weights, weights, out=result)


@cache
def _matrices() -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    weights = torch.rand(_MATRIX, _MATRIX, dtype=torch.float16, device=_DEVICE)  # zeros would take less power and time
    return weights, torch.empty_like(weights)


@cache
def _calls_for(compute_ms: float) -> int:
    """Return how many multiplications take about `compute_ms` on this GPU, at least one."""
    from torch import cuda

    num_calls = 20
    for _ in range(2):  # the first time warms it up
        began, ended = _timed(lambda: _compute([], num_calls))
        cuda.synchronize()
    taken_ms: float = began.elapsed_time(ended)
    return max(1, round(compute_ms / taken_ms * num_calls))
