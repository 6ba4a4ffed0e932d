"""`numapin bench alloc`: its cases as data.

Does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    "numapin": "numapin.pinned.empty",
}
WITHOUT_GPU: Final = ("pageable", "fresh")
_QUESTIONS: Final = (
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
)


def alloc_benchmark(sizes: Sequence[int], peers: Sequence[str], *, num_samples: int, no_gpu: str | None) -> Benchmark:
    """Return the benchmark. `no_gpu` is the reason if there is no GPU; an extra case then lists the skipped peers."""
    left_out = _unfit_peers(peers, no_gpu)
    fit = [name for name in peers if name not in left_out]
    gpu = 0 if no_gpu is None else None
    measured = [_case(num_bytes, fit, num_samples=num_samples, gpu=gpu) for num_bytes in sizes]
    skipped = Case(name="page-locked", about=", ".join(left_out), skipped=no_gpu)
    cases = [*(measured if fit else ()), *([skipped] if left_out else ())]
    return Benchmark(
        name="alloc",
        module="numapin.bench.measure.alloc",
        cases=tuple(cases),
        comparisons=(
            Comparison(name="alloc_ratio", figure="alloc_us", against="pageable"),
            Comparison(name="filled_ratio", figure="filled_us", against="pageable"),
        ),
        questions=_QUESTIONS,
    )


def _unfit_peers(peers: Sequence[str], no_gpu: str | None) -> list[str]:
    """Return the peers that need a GPU, if there is none."""
    return [] if no_gpu is None else [name for name in peers if name not in WITHOUT_GPU]


def _case(num_bytes: int, peers: Sequence[str], *, num_samples: int, gpu: int | None) -> Case:
    common = {"num_bytes": num_bytes, "num_samples": num_samples, "gpu": gpu}
    return Case(
        name=f"alloc {num_bytes}",
        about=f"{num_bytes} bytes, median of {num_samples}",
        group="alloc",
        num_bytes=num_bytes,
        session="alloc",
        peers=tuple(Peer(name=name, specs=({**common, "peer": name},)) for name in peers),
    )
