"""The process of `bench alloc`: allocate memory, write it twice, copy it to the GPU.

The steps are timed separately, because page faults happen at the first write and not at the allocation.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from numapin import pinned
from numapin.bench.child import serve
from numapin.bench.measure.buffers import pageable, torch_pinned, working_driver
from numapin.errors import MachineError
from numapin.system import pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from numapin.bench.child import Harness

_PATIENCE_S: Final = 5.0  # for the thread that unlocks freed memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to get memory: the untimed preparation, the timed allocation, and the untimed release."""

    allocate: Callable[[int], torch.Tensor]
    before: Callable[[int], None] = lambda _num_bytes: None
    release: Callable[[torch.Tensor], None] = lambda _tensor: None


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one way to get memory of one size."""
    torch.set_num_threads(1)  # so that one thread has all page faults
    way, num_bytes = _WAYS[spec["peer"]], spec["num_bytes"]
    on_gpu = None if spec["gpu"] is None else torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{spec['gpu']}")

    def sample() -> dict[str, float]:
        way.before(num_bytes)
        return _sample(way, num_bytes, on_gpu)

    sample()  # loads and initializes libraries
    harness.wait_for_start(lambda: time.sleep(0.001))
    samples = [sample() for _ in range(spec["num_samples"])]
    figures = {name: statistics.median(one[name] for one in samples) for name in samples[0]}
    harness.report(figures, details={}, idle=lambda: time.sleep(0.001))


def _sample(way: Way, num_bytes: int, on_gpu: torch.Tensor | None) -> dict[str, float]:
    """Return the microseconds of each step, by name; `filled_us` is the sum of the first two."""
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


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _registered(num_bytes: int) -> torch.Tensor:
    tensor = pageable(num_bytes)
    working_driver().register(0, tensor.data_ptr(), num_bytes)
    return tensor


def _unregister(tensor: torch.Tensor) -> None:
    working_driver().unregister(0, tensor.data_ptr())


def _numapin(num_bytes: int) -> torch.Tensor:
    return pinned.empty(num_bytes, torch.uint8)


def _wait_until_unlocked(_num_bytes: int) -> None:
    until = time.monotonic() + _PATIENCE_S
    while pages.PINNED.total and time.monotonic() < until:
        time.sleep(0.001)


def _empty_pool(_num_bytes: int) -> None:
    """Return all of torch's free pinned memory to CUDA. The function has two names, depending on torch's version."""
    torch.cuda.synchronize()  # a block is free only after all copies from it
    empty = getattr(torch._C, "_host_emptyCache", None) or getattr(torch._C, "_accelerator_emptyHostCache", None)  # noqa: SLF001
    if empty is None:
        raise MachineError("this version of torch cannot empty its pool of pinned memory", "use torch 2.9 or later")
    empty()


def _fill_pool(num_bytes: int) -> None:
    """Make sure that the pool has a free block of this size."""
    torch_pinned(num_bytes)
    torch.cuda.synchronize()


@cache
def _source(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


def _pin(num_bytes: int) -> torch.Tensor:
    """Pin an existing tensor."""
    return _source(num_bytes).pin_memory()


_WAYS: Final = {
    "pageable": Way(allocate=_empty),
    "fresh": Way(allocate=pageable),
    "pinned-cold": Way(allocate=torch_pinned, before=_empty_pool),
    "pinned-pool": Way(allocate=torch_pinned, before=_fill_pool),
    "pin-cold": Way(allocate=_pin, before=_empty_pool),
    "pin-pool": Way(allocate=_pin, before=_fill_pool),
    "registered": Way(allocate=_registered, release=_unregister),
    "numapin": Way(allocate=_numapin, before=_wait_until_unlocked),
}


if __name__ == "__main__":
    serve(measure)
