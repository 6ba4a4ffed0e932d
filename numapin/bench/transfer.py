"""`numapin bench transfer`: copies between each kind of host memory and each GPU, from each node."""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from numapin.bench.model import Benchmark, Case, Column, Comparison, Peer, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numapin.bench.process import Harness

SIZES: Final = tuple(1 << bits for bits in (12, 16, 20, 24, 27, 30))
QUICK_SIZES: Final = tuple(1 << bits for bits in (16, 26))
DIRECTIONS: Final = ("h2d", "d2h")
PEERS: Final = {
    "pageable": "ordinary memory",
    "pinned": "torch.empty(pin_memory=True)",
    "registered": "ordinary memory, page-locked afterwards",
    "slot": "a page-locked memfd, as numapin.DataLoader's slots",
}
_MIN_CALLS: Final = 3
_BURST_S: Final = 0.01  # of copies between two reads of the clock; waiting for them takes 10 us, 0.1 % of that
_MAX_BURST: Final = 1000  # copies; a stream holds more before the call itself blocks


def transfer_benchmark(
    *,
    sizes: Sequence[int],
    peers: Sequence[str],
    directions: Sequence[str],
    seconds: float,
    gpu_nodes: Sequence[int | None],
    nodes: Sequence[int],
    no_gpu: str | None,
) -> Benchmark:
    """Return the benchmark for GPUs on these nodes (None: unknown): each alone from each of `nodes`, then all at once.

    When all run at once, each GPU's memory is on its own node. Without a GPU there is one case, skipped with `no_gpu`.
    A window lasts at least `seconds` and three calls.
    """
    places: list[tuple[tuple[int, int | None], ...]] = [(pair,) for pair in product(range(len(gpu_nodes)), nodes)]
    if len(gpu_nodes) > 1:
        places.append(tuple(enumerate(gpu_nodes)))
    cases = []
    for pairs, direction, num_bytes in product(places, directions, sizes):
        names = [f"gpu{gpu}" if node is None else f"gpu{gpu} node{node}" for gpu, node in pairs]
        group = f"{direction} {names[0] if len(names) == 1 else f'{len(names)} GPUs at once'}"
        common = {"direction": direction, "num_bytes": num_bytes, "max_bytes": max(sizes), "seconds": seconds}
        specs = [{**common, "gpu": gpu, "node": node} for gpu, node in pairs]
        cases.append(
            Case(
                name=f"{group} {num_bytes}",
                about=f"{num_bytes} bytes, {group}",
                group=group,
                num_bytes=num_bytes,
                session=" ".join(names),
                peers=tuple(
                    Peer(name=memory, specs=tuple({**spec, "memory": memory} for spec in specs)) for memory in peers
                ),
            )
        )
    skipped = Case(name="transfer", about="copies between host and GPU", skipped=no_gpu or "no allowed node has CPUs")
    return Benchmark(
        name="transfer",
        module="numapin.bench.transfer",
        cases=tuple(cases) or (skipped,),
        comparisons=(Comparison(name="ratio", figure="gbps", against="pageable"),),
        summed=frozenset({"gbps"}),
        questions=(
            Question(
                subject="pin ({own})",
                things="copies are",
                figure="gbps",
                own=("pinned", "slot", "registered"),
                against="pageable",
            ),
        ),
        settings={
            "sizes": sizes,
            "memories": peers,
            "directions": directions,
            "seconds": seconds,
            "peers_are": PEERS,
            "nodes": nodes,
            "gpu_nodes": gpu_nodes,
        },
        columns=(
            Column(figure="gbps", heading="GB/s", spread=True),
            Column(figure="us", heading="us", spread=True, meaning="time of a single copy"),
            Column(figure="host_us", heading="host us", spread=True, meaning="time for which a copy blocks the host"),
        ),
        legend="median ± largest deviation",
    )


# --- in the measuring process -----------------------------------------------------------------------------------------


def measure(spec: dict[str, Any], harness: Harness) -> None:
    """Measure one kind of memory, size and direction."""
    import torch

    from numapin.bench.buffers import bind_to_node

    bind_to_node(spec["node"])
    torch.cuda.set_device(spec["gpu"])
    copy = _copier(spec)

    def copy_once() -> None:
        copy()
        torch.cuda.synchronize()

    for _ in range(_MIN_CALLS):
        copy_once()
    harness.wait_for_start(copy_once)

    # Single copies on an idle GPU: until the call returns, and until the copy has arrived.
    calls: list[float] = []
    wholes: list[float] = []
    until = time.perf_counter() + spec["seconds"] / 2
    while len(calls) < _MIN_CALLS or time.perf_counter() < until:
        start = time.perf_counter()
        copy()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        calls.append(returned - start)
        wholes.append(time.perf_counter() - start)
    host_s, whole_s = statistics.median(calls), statistics.median(wholes)

    # Copies back to back.
    burst = max(1, min(_MAX_BURST, round(_BURST_S / whole_s)))
    count, start = 0, time.perf_counter()
    while count < _MIN_CALLS or time.perf_counter() - start < spec["seconds"]:
        for _ in range(burst):
            copy()
        torch.cuda.synchronize()
        count += burst
    copies_per_s = count / (time.perf_counter() - start)

    figures = {
        "gbps": spec["num_bytes"] * copies_per_s / 1e9,
        "us": whole_s * 1e6,
        "host_us": host_s * 1e6,
        "host_share": host_s / whole_s,
    }
    harness.report(figures, details={}, idle=copy_once)


def _copier(spec: dict[str, Any]) -> Callable[[], object]:
    """Return a function that starts the copy."""
    import torch

    from numapin.bench.buffers import buffer

    gpu, size, max_size = spec["gpu"], spec["num_bytes"], spec["max_bytes"]
    host = buffer(spec["memory"], max_size, gpu=gpu, node=spec["node"])[:size]
    on_gpu = torch.zeros(max_size, dtype=torch.uint8, device=f"cuda:{gpu}")[:size]
    if spec["direction"] == "h2d":
        return lambda: on_gpu.copy_(host, non_blocking=True)
    return lambda: host.copy_(on_gpu, non_blocking=True)
