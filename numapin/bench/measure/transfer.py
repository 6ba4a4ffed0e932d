"""The process of `bench transfer`: copy between host memory and a GPU."""

from __future__ import annotations

import statistics
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin.bench.cases.transfer import Direction
from numapin.bench.child import serve
from numapin.bench.measure.buffers import bind_to_node, buffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.bench.child import Harness

_MIN_CALLS: Final = 3
_BURST_S: Final = 0.01  # of copies between two reads of the clock; waiting for them takes 10 us, 0.1 % of that
_MAX_BURST: Final = 1000  # copies; a stream holds more before the call itself blocks


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one kind of memory, size and direction."""
    bind_to_node(spec["node"])
    torch.cuda.set_device(spec["gpu"])
    copy = _copier(spec)

    def copy_once() -> None:
        copy()
        torch.cuda.synchronize()

    for _ in range(_MIN_CALLS):
        copy_once()
    harness.wait_for_start(copy_once)
    host_s, whole_s = _single(copy, spec["seconds"] / 2)
    num_ways = 2 if spec["direction"] == Direction.BOTH else 1
    figures = {
        "gbps": spec["num_bytes"] * num_ways * _calls_per_s(copy, spec["seconds"], whole_s) / 1e9,
        "us": whole_s * 1e6,
        "host_us": host_s * 1e6,
        "host_share": host_s / whole_s,
    }
    harness.report(figures, details={}, idle=copy_once)


def _copier(spec: dict[str, Any]) -> Callable[[], None]:
    """Return a function that starts the copy, or one copy in each direction."""
    gpu, size, max_size = spec["gpu"], spec["num_bytes"], spec["max_bytes"]
    numbers = range(2 if spec["direction"] == Direction.BOTH else 1)
    hosts = [buffer(spec["memory"], max_size, gpu=gpu, node=spec["node"], number=number)[:size] for number in numbers]
    gpus = [_on_gpu(max_size, gpu, number)[:size] for number in numbers]

    def upload() -> None:
        gpus[0].copy_(hosts[0], non_blocking=True)

    def download() -> None:
        hosts[-1].copy_(gpus[-1], non_blocking=True)

    up, down = _streams(gpu)

    def both() -> None:
        with torch.cuda.stream(up):
            upload()
        with torch.cuda.stream(down):
            download()

    return {Direction.H2D: upload, Direction.D2H: download, Direction.BOTH: both}[Direction(spec["direction"])]


@cache
def _on_gpu(num_bytes: int, gpu: int, _number: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}")


@cache
def _streams(gpu: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)


def _single(copy: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Return the median times until the call returns and until the copy has arrived, on an idle GPU."""
    calls: list[float] = []
    wholes: list[float] = []
    until = time.perf_counter() + seconds
    while len(calls) < _MIN_CALLS or time.perf_counter() < until:
        start = time.perf_counter()
        copy()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        calls.append(returned - start)
        wholes.append(time.perf_counter() - start)
    return statistics.median(calls), statistics.median(wholes)


def _calls_per_s(copy: Callable[[], None], seconds: float, one_s: float) -> float:
    """Return the number of back-to-back copies per second; one takes about `one_s`."""
    burst = max(1, min(_MAX_BURST, round(_BURST_S / one_s)))
    count, start = 0, time.perf_counter()
    while count < _MIN_CALLS or time.perf_counter() - start < seconds:
        for _ in range(burst):
            copy()
        torch.cuda.synchronize()
        count += burst
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    serve(measure)
