"""`numapin bench alloc`: allocate memory, write it twice, copy it to the GPU.

The steps are timed separately, because page faults happen at the first write and not at the allocation.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from numapin.bench.model import Benchmark, Case, Column, Comparison, Peer, Question
from numapin.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from numapin.bench.process import Harness

SIZES: Final = tuple(1 << bits for bits in (12, 16, 20, 24, 27))
QUICK_SIZES: Final = tuple(1 << bits for bits in (16, 24))
PEERS: Final = {
    "pageable": "torch.empty: malloc may return memory that was in use before",
    "fresh": "new ordinary memory, with no page faulted in",
    "pinned-cold": "torch.empty(pin_memory=True) with an empty pool of pinned memory",
    "pinned-pool": "the same, from the pool",
    "pin-cold": "tensor.pin_memory(), which copies, with an empty pool",
    "pin-pool": "the same, from the pool",
    "registered": "ordinary memory, page-locked afterwards",
    "numapin": "numapin.pinned.empty, with nothing to reuse",
    "numapin-pool": "the same, of memory that was freed",
}
_WITHOUT_GPU: Final = ("pageable", "fresh")
_PATIENCE_S: Final = 5.0  # for memory that is freed to be there again


def alloc_benchmark(*, sizes: Sequence[int], peers: Sequence[str], num_samples: int, no_gpu: str | None) -> Benchmark:
    """Return the benchmark. `no_gpu` is the reason if there is no GPU; an extra case then lists the skipped peers."""
    fit = [name for name in peers if no_gpu is None or name in _WITHOUT_GPU]
    left_out = [name for name in peers if name not in fit]
    gpu = 0 if no_gpu is None else None
    cases = []
    for num_bytes in sizes if fit else ():
        common = {"num_bytes": num_bytes, "num_samples": num_samples, "gpu": gpu}
        cases.append(
            Case(
                name=f"alloc {num_bytes}",
                about=f"{num_bytes} bytes, median of {num_samples}",
                group="alloc",
                num_bytes=num_bytes,
                session="alloc",
                peers=tuple(Peer(name=name, specs=({**common, "peer": name},)) for name in fit),
            )
        )
    if left_out:
        cases.append(Case(name="page-locked", about=", ".join(left_out), skipped=no_gpu))
    return Benchmark(
        name="alloc",
        module="numapin.bench.alloc",
        cases=tuple(cases),
        comparisons=(
            Comparison(name="alloc_ratio", figure="alloc_us", against="pageable"),
            Comparison(name="filled_ratio", figure="filled_us", against="pageable"),
        ),
        questions=(
            Question(
                subject="reuse pinned memory",
                things="allocations are",
                figure="alloc_us",
                own=("pinned-pool",),
                against="pinned-cold",
                less_is_better=True,
            ),
            Question(
                subject="reuse memory",
                things="allocation and first write are",
                figure="filled_us",
                own=("pageable",),
                against="fresh",
                less_is_better=True,
            ),
        ),
        settings={"sizes": sizes, "num_samples": num_samples, "peers_are": PEERS},
        columns=(
            Column(figure="alloc_us", heading="allocate", spread=True),
            Column(figure="touch_us", heading="first write"),
            Column(figure="again_us", heading="second write"),
            Column(figure="copy_us", heading="copy to GPU"),
            Column(figure="filled_ratio", heading="x pageable", meaning="allocation plus first write"),
        ),
        legend="median ± largest deviation, in us of one thread",
    )


# --- in the measuring process -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to get memory: the untimed preparation, the timed allocation, and the untimed release."""

    allocate: Callable[[int], torch.Tensor]
    before: Callable[[int], None] = lambda _num_bytes: None
    release: Callable[[torch.Tensor], None] = lambda _tensor: None


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one way to get memory of one size."""
    import torch

    torch.set_num_threads(1)  # so that one thread has all page faults
    way, num_bytes = _ways()[spec["peer"]], spec["num_bytes"]
    on_gpu = None if spec["gpu"] is None else torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{spec['gpu']}")

    def sample() -> dict[str, float]:
        """Return the microseconds of each step, by name; `filled_us` is the sum of the first two."""
        way.before(num_bytes)
        times = [time.perf_counter()]
        tensor = way.allocate(num_bytes)
        times.append(time.perf_counter())
        for value in (1, 2):
            tensor.fill_(value)
            times.append(time.perf_counter())
        if on_gpu is not None:
            on_gpu.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        way.release(tensor)
        steps = [(end - start) * 1e6 for start, end in pairwise(times)]
        named = dict(zip(("alloc_us", "touch_us", "again_us", "copy_us"), steps, strict=False))
        return named | {"filled_us": named["alloc_us"] + named["touch_us"]}

    sample()  # loads and initializes libraries
    harness.wait_for_start(lambda: time.sleep(0.001))
    samples = [sample() for _ in range(spec["num_samples"])]
    figures = {name: statistics.median(one[name] for one in samples) for name in samples[0]}
    harness.report(figures, details={}, idle=lambda: time.sleep(0.001))


@cache
def _ways() -> dict[str, Way]:
    """Return the ways to get memory, by peer."""
    import torch

    from numapin import pinned
    from numapin.bench.buffers import pageable, torch_pinned, working_driver
    from numapin.system import pages

    def registered(num_bytes: int) -> torch.Tensor:
        tensor = pageable(num_bytes)
        working_driver().register(0, tensor.data_ptr(), num_bytes)
        return tensor

    def empty_ours(_num_bytes: int) -> None:
        until = time.monotonic() + _PATIENCE_S
        while pages.PINNED.total and time.monotonic() < until:
            pinned.trim()
            time.sleep(0.001)

    def fill_ours(num_bytes: int) -> None:
        until = time.monotonic() + _PATIENCE_S
        pinned.empty(num_bytes, torch.uint8)
        while pinned.budget().idle_bytes < num_bytes and time.monotonic() < until:
            time.sleep(0.001)

    def empty_pool(_num_bytes: int) -> None:
        """Return all of torch's free pinned memory to CUDA. The function's name depends on torch's version."""
        torch.cuda.synchronize()  # a block is free only after all copies from it
        known = torch._C  # noqa: SLF001
        empty = getattr(known, "_host_emptyCache", None) or getattr(known, "_accelerator_emptyHostCache", None)
        if empty is None:
            raise MachineError("this version of torch cannot empty its pool of pinned memory", "use torch 2.9 or later")
        empty()

    def fill_pool(num_bytes: int) -> None:
        """Make sure that the pool has a free block of this size."""
        torch_pinned(num_bytes)
        torch.cuda.synchronize()

    @cache
    def source(num_bytes: int) -> torch.Tensor:
        return torch.ones(num_bytes, dtype=torch.uint8)

    return {
        "pageable": Way(allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)),
        "fresh": Way(allocate=pageable),
        "pinned-cold": Way(allocate=torch_pinned, before=empty_pool),
        "pinned-pool": Way(allocate=torch_pinned, before=fill_pool),
        "pin-cold": Way(allocate=lambda num_bytes: source(num_bytes).pin_memory(), before=empty_pool),
        "pin-pool": Way(allocate=lambda num_bytes: source(num_bytes).pin_memory(), before=fill_pool),
        "registered": Way(
            allocate=registered, release=lambda tensor: working_driver().unregister(0, tensor.data_ptr())
        ),
        "numapin": Way(allocate=lambda num_bytes: pinned.empty(num_bytes, torch.uint8), before=empty_ours),
        "numapin-pool": Way(allocate=lambda num_bytes: pinned.empty(num_bytes, torch.uint8), before=fill_ours),
    }
