"""Which node is nearest to each GPU, by what `bench transfer` measured. Pure.

Comes in: the cases of each GPU alone from each node. Goes out: a `NearestNode` a GPU, and the machine with those GPUs
put on their node that no other source places.
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
    from numapin.topology.model import Topology

_MIN_REPEATS: Final = 3
_MIN_GAIN: Final = 1.02  # the repeats share their memory and process: what these change by chance is not in the spread
_LOCKED: Final = ("registered", "ring", "pinned")  # the kernel tells where the first two lie


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestNode:
    """The node nearest to a GPU (torch's index), None where the figures do not tell; `reason` has the figures."""

    gpu: int
    node: int | None
    reason: str


def nearest_nodes(cases: Sequence[CaseResult], *, num_gpus: int, nodes: Sequence[int]) -> tuple[NearestNode, ...]:
    """Judge each GPU by its largest copies from page-locked memory to the GPU, it alone."""
    return tuple(_nearest(gpu, _row(cases, gpu, nodes)) for gpu in range(num_gpus))


def with_measured(topology: Topology, verdicts: Iterable[NearestNode]) -> Topology:
    """Return the machine with what was measured for GPUs whose node is unknown; other sources keep their word.

    Raises NumapinError where that changes nothing; it says why of each GPU.
    """
    indices = {gpu.cuda_index: gpu for gpu in topology.gpus}
    pairs, why = [], []
    for verdict in verdicts:
        gpu = indices.get(verdict.gpu)
        if gpu is None:
            why.append(f"cuda:{verdict.gpu}: which GPU that is, is unknown")
        elif gpu.node is not None:
            why.append(f"{gpu.label} is on node {gpu.node} ({gpu.node_source}) already; measured: {verdict.reason}")
        elif verdict.node is None:
            why.append(f"{gpu.label}: {verdict.reason}")
        else:
            pairs.append((str(gpu.index), verdict.node))
    if not pairs:
        raise NumapinError(f"nothing was saved: {'; '.join(why)}", "see what is known: numapin topo")
    return with_gpu_nodes(topology, pairs, source=NodeSource.MEASURED)


def _row(cases: Sequence[CaseResult], gpu: int, nodes: Sequence[int]) -> dict[int, Spread | None]:
    """Return each node's figure, of the first kind of page-locked memory that all nodes have: kinds differ, too."""
    rows = [{node: _gbps(cases, CopyPlace(gpu=gpu, node=node), kind) for node in nodes} for kind in _LOCKED]
    return next((row for row in rows if None not in row.values()), rows[0])


def _gbps(cases: Sequence[CaseResult], place: CopyPlace, kind: str) -> Spread | None:
    group = group_name(Direction.H2D, place)
    own = [case for case in cases if case.group == group]
    largest = max(own, key=lambda case: case.num_bytes or 0, default=None)
    peers = {peer.name: peer for peer in largest.peers} if largest else {}
    return peers[kind].figures.get("gbps") if kind in peers else None


def _nearest(gpu: int, row: Mapping[int, Spread | None]) -> NearestNode:
    """Believe the highest median where even its lowest repeat is clearly above the highest of every other node."""
    known = {node: spread for node, spread in row.items() if spread is not None}
    if len(row) < 2:
        return NearestNode(gpu=gpu, node=None, reason="with one NUMA node there is nothing to measure")
    if len(known) < len(row):
        return NearestNode(gpu=gpu, node=None, reason="no kind of page-locked memory was measured on every node")
    num_repeats = min(len(spread.values) for spread in known.values())
    if num_repeats < _MIN_REPEATS:
        return NearestNode(
            gpu=gpu, node=None, reason=f"{num_repeats} repeats are too few for a spread; take {_MIN_REPEATS}"
        )
    figures = ", ".join(f"node {n} {s.median:.1f} [{s.low:.1f}, {s.high:.1f}] GB/s" for n, s in known.items())
    best = max(known, key=lambda node: known[node].median)
    if known[best].low <= _MIN_GAIN * max(spread.high for node, spread in known.items() if node != best):
        return NearestNode(gpu=gpu, node=None, reason=f"the nodes differ by no more than the spread and 2 %: {figures}")
    return NearestNode(gpu=gpu, node=best, reason=f"node {best} is fastest: {figures}")
