"""The common facts of all parts of a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.topology.fast import fast_cores
from numapin.view.picture.boxes import PAD, CellSize
from numapin.view.structure import empty_nodes, spanning_l3s

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numapin.base.cpu_set import CpuSet
    from numapin.topology.fast import FastCores
    from numapin.topology.model import Link, Node, Topology
    from numapin.topology.nics import NearestNics
    from numapin.view.marks import Marks
    from numapin.view.structure import SpanningL3

_NODE_WIDTHS: Final = {0: 616, 1: 616, 2: 460}
_MANY_NODES: Final = 320  # four nodes in a row


class Links(NamedTuple):
    """The links of each device by its name, and the nearest NICs of each GPU by its index."""

    of: Mapping[str, Sequence[Link]]
    nearest_nics: Mapping[int, NearestNics]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The common facts. `width` is the inner width of the frame that is drawn, `scale` the size of a CPU's row."""

    topology: Topology
    marks: Marks
    links: Links
    scale: CellSize
    width: float
    page_width: float
    empty_nodes: CpuSet
    l3_of: Mapping[int, SpanningL3]
    fast: Mapping[int, FastCores]

    @classmethod
    def of(cls, topology: Topology, marks: Marks, *, page_width: float) -> Drawing:
        """Choose the width of nodes by their number."""
        l3_of = spanning_l3s(topology)
        frames = 3 if l3_of else 2  # package, perhaps cache, node
        return cls(
            topology=topology,
            marks=marks,
            links=_links(topology),
            scale=_scale(len(topology.cpus)),
            width=min(_NODE_WIDTHS.get(len(topology.cpu_nodes), _MANY_NODES), page_width - frames * 2 * PAD),
            page_width=page_width,
            empty_nodes=empty_nodes(topology),
            l3_of=l3_of,
            fast={fast.node: fast for fast in fast_cores(topology)},
        )

    def drawn(self, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes that get a box of their own."""
        return [node for node in nodes if node.id not in self.empty_nodes]


def _links(topology: Topology) -> Links:
    found: dict[str, list[Link]] = {}
    for link in topology.links:
        found.setdefault(link.a, []).append(link)
        found.setdefault(link.b, []).append(link)
    return Links(of=found, nearest_nics=topology.nearest_nics)


def _scale(num_cpus: int) -> CellSize:
    """Return the size of a CPU's row: the more CPUs, the smaller; beyond 640 there is no space for text."""
    if num_cpus <= 64:
        return CellSize(width=46, height=18, font=11)
    if num_cpus <= 640:
        return CellSize(width=32, height=14, font=9)
    return CellSize(width=14, height=6, font=0)
