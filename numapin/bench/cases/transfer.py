"""`numapin bench transfer`: its cases as data.

Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Final

from numapin.bench.model import Benchmark, Case, Comparison, Peer, Question

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIZES: Final = tuple(1 << bits for bits in (12, 16, 20, 24, 27, 30))
QUICK_SIZES: Final = tuple(1 << bits for bits in (16, 26))

MEMORIES: Final = {
    "pageable": "ordinary memory",
    "pinned": "torch.empty(pin_memory=True)",
    "registered": "ordinary memory, page-locked afterwards",
    "slot": "a page-locked memfd, as numapin.DataLoader's slots",
}
_QUESTION: Final = Question(
    subject="pin ({own})",
    things="copies are",
    figure="gbps",
    own=("pinned", "slot", "registered"),
    against="pageable",
)


class Direction(StrEnum):
    """The direction of a copy."""

    H2D = "h2d"
    D2H = "d2h"
    BOTH = "both"
    """Both at once, on two streams; the bytes of both count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBenchOptions:
    """The user's choices. A window lasts at least `seconds` and three calls."""

    sizes: Sequence[int] = SIZES
    memories: Sequence[str] = tuple(MEMORIES)
    directions: Sequence[str] = tuple(Direction)
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlace:
    """A GPU by torch's index, and the node of the host memory; None leaves it to the kernel."""

    gpu: int
    node: int | None

    @property
    def name(self) -> str:
        """The GPU and the node in short."""
        return f"gpu{self.gpu}" if self.node is None else f"gpu{self.gpu} node{self.node}"


def transfer_benchmark(
    options: TransferBenchOptions, *, gpu_nodes: Sequence[int | None], nodes: Sequence[int], no_gpu: str | None
) -> Benchmark:
    """Return the benchmark for GPUs on these nodes (None: unknown): each alone from each of `nodes`, then all at once.

    When all run at once, each GPU's memory is on its own node. Without a GPU there is one case, skipped with `no_gpu`.
    """
    sweeps = product(_places(gpu_nodes, nodes), options.directions, options.sizes)
    cases = tuple(_case(options, *sweep) for sweep in sweeps)
    skipped = Case(name="transfer", about="copies between host and GPU", skipped=no_gpu or "no allowed node has CPUs")
    return Benchmark(
        name="transfer",
        module="numapin.bench.measure.transfer",
        cases=cases or (skipped,),
        comparisons=(Comparison(name="ratio", figure="gbps", against="pageable"),),
        summed=frozenset({"gbps"}),
        questions=(_QUESTION,),
    )


def _places(gpu_nodes: Sequence[int | None], nodes: Sequence[int]) -> list[tuple[CopyPlace, ...]]:
    """Return each GPU with each node, and last, with several GPUs, all GPUs at once."""
    pairs = product(range(len(gpu_nodes)), nodes)
    alone: list[tuple[CopyPlace, ...]] = [(CopyPlace(gpu=gpu, node=node),) for gpu, node in pairs]
    if len(gpu_nodes) < 2:
        return alone
    return [*alone, tuple(CopyPlace(gpu=gpu, node=node) for gpu, node in enumerate(gpu_nodes))]


def _case(options: TransferBenchOptions, places: tuple[CopyPlace, ...], direction: str, num_bytes: int) -> Case:
    where = places[0].name if len(places) == 1 else f"{len(places)} GPUs at once"
    group = f"{direction} {where}"
    common = {
        "direction": direction,
        "num_bytes": num_bytes,
        "max_bytes": max(options.sizes),
        "seconds": options.seconds,
    }
    specs = [{**common, "gpu": place.gpu, "node": place.node} for place in places]
    return Case(
        name=f"{group} {num_bytes}",
        about=f"{num_bytes} bytes, {group}",
        group=group,
        num_bytes=num_bytes,
        session=" ".join(place.name for place in places),
        peers=tuple(_peer(memory, specs) for memory in options.memories),
    )


def _peer(memory: str, specs: Sequence[Mapping[str, object]]) -> Peer:
    return Peer(name=memory, specs=tuple({**spec, "memory": memory} for spec in specs))
