"""The process of `bench loader`: run one peer on one case."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from numapin import pinned
from numapin.bench.cases.loader import PEAK, SAMPLES, LoaderCase, Work
from numapin.bench.child import serve
from numapin.bench.measure.loader_data import InMemory, num_bytes, require_intact, tensors
from numapin.bench.measure.loader_peers import BUILDERS, Setup
from numapin.bench.measure.loader_samples import SampleMakers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numapin.bench.child import Harness
    from numapin.bench.measure.loader_data import Batch

_PATIENCE_S: Final = 30.0  # until numapin makes and pins no more slots
_PAGE_BYTES: Final = 4096
_PEAK_BYTES: Final = 256 << 20
_PEAK_COPIES: Final = 8  # between two synchronizations


class _HitCounts(Protocol):
    """The counts of numapin.DataLoader.stats() that tell whether it is past its start."""

    @property
    def hits(self) -> int: ...
    @property
    def slots_made(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def misses(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A number of batches, and the wall-clock and this thread's CPU seconds that they took."""

    num_batches: int
    wall_s: float
    cpu_s: float


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one peer, between the harness's start and stop."""
    device = None if spec["gpu"] is None else torch.device("cuda", spec["gpu"])
    torch.set_num_threads(1)  # peers have many threads or processes of their own
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()  # initialize CUDA before any peer is timed
    if spec["peer"] == PEAK:
        _measure_peak(spec, harness)
    elif spec["peer"] == SAMPLES:
        _measure_samples(spec, harness)
    else:
        _measure_peer(spec, harness, device)


def _measure_peak(spec: dict[str, Any], harness: Harness) -> None:
    """Measure repeated copies of one pinned buffer to the GPU."""
    source = torch.empty(_PEAK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(source, device="cuda")

    def copy() -> None:
        for _ in range(_PEAK_COPIES):
            on_gpu.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    harness.wait_for_start(copy)
    window = _window(copy, seconds=min(spec["seconds"], 1.0), num_batches=1)
    gbps = window.num_batches * _PEAK_COPIES * _PEAK_BYTES / window.wall_s / 1e9
    harness.report({"gbps": gbps}, details={}, idle=copy)


def _measure_samples(spec: dict[str, Any], harness: Harness) -> None:
    """Measure processes that make the case's samples and do nothing with them."""
    case = _case_of(spec)
    dataset = InMemory(case, spec["gil_ns"])
    with SampleMakers(dataset, batch_size=case.batch_size, num_workers=case.num_workers) as makers:
        harness.wait_for_start(makers.wait)
        before = makers.num_batches
        window = _window(makers.wait, seconds=spec["seconds"], num_batches=1)
        num_batches = makers.num_batches - before
        figures = {"batches_per_s": num_batches / window.wall_s, "num_batches": float(num_batches)}
        harness.report(figures, details={}, idle=makers.wait)


def _case_of(spec: dict[str, Any]) -> LoaderCase:
    return LoaderCase(**{**spec["case"], "shape": tuple(spec["case"]["shape"]), "work": Work(spec["case"]["work"])})


def _measure_peer(spec: dict[str, Any], harness: Harness, device: torch.device | None) -> None:
    case = _case_of(spec)
    dataset = InMemory(case, spec["gil_ns"])
    os.environ["LOCAL_WORLD_SIZE"] = str(spec["num_ranks"])  # as in a rank, where CPUs are shared
    source = BUILDERS[spec["peer"]](Setup(case=case, dataset=dataset, device=device))
    start = time.perf_counter()
    batches = iter(source.batches)
    batch = next(batches)
    _finish(device)
    first_batch_s = time.perf_counter() - start
    require_intact(batch, case)
    batch_bytes = num_bytes(batch)
    del batch

    take = _taker(batches, device)
    _warm_up(take, source.stats, seconds=spec["warm_up_s"], num_outstanding=case.num_ahead)
    harness.wait_for_start(take)
    before = source.stats()
    window = _window(take, seconds=spec["seconds"], num_batches=spec["num_batches"], end=lambda: _finish(device))
    after = source.stats()
    require_intact(next(batches), case)
    figures = {
        "batches_per_s": window.num_batches / window.wall_s,
        "gbps": window.num_batches * batch_bytes / window.wall_s / 1e9,
        "main_cpu_ms": window.cpu_s / window.num_batches * 1e3,
        "first_batch_s": first_batch_s,
        "num_batches": window.num_batches,
        **_hits(before, after),
        **_pinned_mb(device),
    }
    harness.report(figures, details={"stats": after and dataclasses.asdict(after)}, idle=take)
    source.close()


def _taker(batches: Iterator[Batch], device: torch.device | None) -> Callable[[], None]:
    """Return a function that takes the next batch as a training loop would; without a GPU it reads every page."""

    def take() -> None:
        next(batches)

    def take_and_touch() -> None:
        for tensor in tensors(next(batches)):
            tensor.flatten().view(torch.uint8)[::_PAGE_BYTES].sum()

    return take_and_touch if device is None else take


def _warm_up(
    take: Callable[[], None], stats: Callable[[], _HitCounts | None], *, seconds: float, num_outstanding: int
) -> None:
    """Take rounds of `num_outstanding` batches for `seconds`, and until numapin makes and pins no slots in a round."""
    start = time.perf_counter()
    earliest, latest, steady = start + seconds, start + _PATIENCE_S, False
    while time.perf_counter() < earliest or not (steady or time.perf_counter() > latest):
        before = stats()
        for _ in range(num_outstanding):
            take()
        after = stats()
        found = _hits(before, after)
        steady = not found or (found["misses"] == 0 and _memory(before) == _memory(after))


def _window(
    take: Callable[[], None], *, seconds: float, num_batches: int, end: Callable[[], None] = lambda: None
) -> Window:
    """Take at least `num_batches` for at least `seconds`; `end`, which waits for the copies, is part of the time."""
    count, cpu, start = 0, time.thread_time(), time.perf_counter()
    while count < num_batches or time.perf_counter() - start < seconds:
        take()
        count += 1
    end()
    return Window(num_batches=count, wall_s=time.perf_counter() - start, cpu_s=time.thread_time() - cpu)


def _finish(device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.synchronize(device)


def _pinned_mb(device: torch.device | None) -> dict[str, float]:
    """Return the page-locked memory of torch and numapin together; empty if torch does not report its own."""
    budget = None if device is None else pinned.budget()
    if budget is None or budget.torch_pinned_bytes is None:
        return {}
    return {"pinned_mb": (budget.torch_pinned_bytes + budget.pinned_bytes) / 1e6}


def _memory(stats: _HitCounts | None) -> tuple[int, int]:
    """Return what changes while slots are made and pinned."""
    return (0, 0) if stats is None else (stats.slots_made, stats.pinned_bytes)


def _hits(before: _HitCounts | None, after: _HitCounts | None) -> dict[str, float]:
    """Return how many batches found a slot in between, and how many did not; empty for other peers."""
    if before is None or after is None:
        return {}
    return {
        "hits": after.hits - before.hits,
        "misses": sum(after.misses.values()) - sum(before.misses.values()),
    }


if __name__ == "__main__":
    serve(measure)
