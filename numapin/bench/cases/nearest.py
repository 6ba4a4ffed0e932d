"""The nearest node of each GPU, from the results of `bench transfer`. Pure.

Comes in: the cases of each GPU alone from each node. Goes out: a `NearestNode` per GPU, and the machine with nodes for
GPUs whose node was unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from numapin.bench.cases.transfer import CopyPlace, Direction, group_name
from numapin.errors import NumapinError
from numapin.topology.build import with_gpu_nodes
from numapin.topology.model import NodeSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.bench.model import CaseResult, Spread
    from numapin.topology.model import Gpu, Topology

_MIN_REPEATS: Final = 3
_MIN_GAIN: Final = 1.02  # repeats share memory and process, so the spread lacks the variation between these
_LOCKED: Final = ("registered", "slot", "pinned")  # the kernel reports the node of the first two


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNode:
    """The nearest node of a GPU (torch's index), None if the figures do not show one; `reason` has the figures."""

    gpu: int
    node: int | None
    reason: str


def nearest_nodes(cases: Sequence[CaseResult], *, num_gpus: int, nodes: Sequence[int]) -> tuple[NearestNode, ...]:
    """Judge each GPU by its largest copies from page-locked memory, made while the other GPUs were idle."""
    return tuple(_nearest(gpu, _row(cases, gpu, nodes)) for gpu in range(num_gpus))


def with_measured(topology: Topology, verdicts: Iterable[NearestNode]) -> Topology:
    """Return the machine with measured nodes for GPUs whose node is unknown; other sources take precedence.

    Raises:
        NumapinError: Nothing would change; the message has the reason for each GPU.
    """
    by_cuda_index = {gpu.cuda_index: gpu for gpu in topology.gpus}
    judged = [(by_cuda_index.get(verdict.gpu), verdict) for verdict in verdicts]
    pairs = [pair for gpu, verdict in judged for pair in _news(gpu, verdict)]
    if not pairs:
        reasons = "; ".join(_reason(gpu, verdict) for gpu, verdict in judged)
        raise NumapinError(f"nothing was saved: {reasons}", "see what is known: numapin topo")
    return with_gpu_nodes(topology, pairs, source=NodeSource.MEASURED)


def _news(gpu: Gpu | None, verdict: NearestNode) -> list[tuple[str, int]]:
    """Return the GPU and its measured node if no other source knows the node."""
    if gpu is None or verdict.node is None:
        return []
    return [(str(gpu.index), verdict.node)] if gpu.node is None else []


def _reason(gpu: Gpu | None, verdict: NearestNode) -> str:
    """Return why a verdict changes nothing."""
    if gpu is None:
        return f"cuda:{verdict.gpu}: no GPU of the machine is known by this index"
    if gpu.node is not None:
        return f"{gpu.label} is already on node {gpu.node} ({gpu.node_source}); measured: {verdict.reason}"
    return f"{gpu.label}: {verdict.reason}"


def _row(cases: Sequence[CaseResult], gpu: int, nodes: Sequence[int]) -> dict[int, Spread | None]:
    """Return each node's figure, for the first kind of page-locked memory that was measured on all nodes."""
    rows = [{node: _gbps(cases, CopyPlace(gpu=gpu, node=node), kind) for node in nodes} for kind in _LOCKED]
    return next((row for row in rows if None not in row.values()), rows[0])


def _gbps(cases: Sequence[CaseResult], place: CopyPlace, kind: str) -> Spread | None:
    group = group_name(Direction.H2D, place)
    own = {case.num_bytes or 0: case for case in cases if case.group == group}
    return _gbps_of(own[max(own)], kind) if own else None


def _gbps_of(case: CaseResult, kind: str) -> Spread | None:
    figures = {peer.name: peer.figures for peer in case.peers}
    return figures.get(kind, {}).get("gbps")


def _nearest(gpu: int, row: Mapping[int, Spread | None]) -> NearestNode:
    """Choose the highest median if its lowest repeat is clearly above the highest repeat of every other node."""
    known = {node: spread for node, spread in row.items() if spread is not None}
    doubt = _doubt(row, known)
    if doubt:
        return NearestNode(gpu=gpu, node=None, reason=doubt)
    return _fastest(gpu, known)


def _fastest(gpu: int, known: Mapping[int, Spread]) -> NearestNode:
    figures = ", ".join(f"node {n} {s.median:.1f} [{s.low:.1f}, {s.high:.1f}] GB/s" for n, s in known.items())
    best = max(known, key=lambda node: known[node].median)
    if not _is_clearly_best(best, known):
        reason = f"the nodes differ by no more than the spread plus 2 %: {figures}"
        return NearestNode(gpu=gpu, node=None, reason=reason)
    return NearestNode(gpu=gpu, node=best, reason=f"node {best} is fastest: {figures}")


def _is_clearly_best(best: int, known: Mapping[int, Spread]) -> bool:
    """Return whether the slowest repeat of a node is faster than the fastest repeat of every other one."""
    highest_other = max(spread.high for node, spread in known.items() if node != best)
    return known[best].low > _MIN_GAIN * highest_other


def _doubt(row: Mapping[int, Spread | None], known: Mapping[int, Spread]) -> str:
    """Return why the figures cannot be compared; empty if they can."""
    if len(row) < 2:
        return "with one NUMA node there is nothing to measure"
    if len(known) < len(row):
        return "no kind of page-locked memory was measured on every node"
    num_repeats = min(len(spread.values) for spread in known.values())
    if num_repeats < _MIN_REPEATS:
        return f"{num_repeats} repeats are too few for a spread; use --repeats {_MIN_REPEATS}"
    return ""
