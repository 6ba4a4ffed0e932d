"""Stage 2: the usable part of a machine, indexed for planning. Pure.

Comes in: a `Topology` and the CPUs that ranks may use. Goes out: `UsableMachine`.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.topology.fast import fast_cores
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.fast import FastCores
    from numapin.topology.model import Core, Node, Topology


class UsableMachine:
    """A topology with its usable CPUs, indexed so that each step of planning is a few set operations.

    An index is made when it is first asked for.
    """

    def __init__(self, topology: Topology, usable: CpuSet) -> None:
        self.topology = topology
        self.usable = usable
        self.nodes = {node.id: node for node in topology.nodes}
        self.cpu_nodes = topology.cpu_nodes
        self._under: dict[CpuSet, CpuSet] = {}
        self._package_nodes: dict[int, CpuSet] = {}
        self._cpus_of: dict[CpuSet, tuple[CpuSet, CpuSet]] = {}

    @cached_property
    def core_of(self) -> dict[int, Core]:
        """The core of each usable CPU."""
        usable = self.usable
        return {cpu: core for core in self.topology.cores for cpu in core.cpus if cpu in usable}

    @cached_property
    def node_cpus(self) -> dict[int, CpuSet]:
        """The usable CPUs of each node that has CPUs."""
        inside = cpu_set.Inside(self.usable)  # faulty firmware lists all CPUs on every node
        return {node.id: inside.of(node.cpus) for node in self.cpu_nodes}

    @cached_property
    def open_nodes(self) -> list[Node]:
        """The nodes with usable CPUs."""
        return [node for node in self.cpu_nodes if self.node_cpus[node.id]]

    @cached_property
    def memory_nodes(self) -> list[Node]:
        """The nodes with CPUs whose memory may be used; unpopulated channels leave a node with CPUs and no memory."""
        allowed = self.topology.allowed.nodes
        return [node for node in self.cpu_nodes if node.id in allowed and node.memory_bytes != 0]

    @cached_property
    def memory_node_ids(self) -> CpuSet:
        """The numbers of `memory_nodes`."""
        return CpuSet(node.id for node in self.memory_nodes)

    @cached_property
    def gpu_memory_ids(self) -> CpuSet:
        """The nodes of GPU memory that the kernel may use for this process."""
        nodes = (node.id for node in self.topology.nodes if node.kind is NodeKind.GPU)
        return CpuSet(nodes) & self.topology.allowed.nodes

    @cached_property
    def _fast(self) -> tuple[FastCores, ...]:
        return fast_cores(self.topology)

    @cached_property
    def _fast_ids(self) -> frozenset[int]:
        return frozenset(cpu for fast in self._fast for cpu in fast.cpus)

    def is_fast(self, core: Core) -> bool:
        """Return whether a core is faster than others of its node."""
        return core.id in self._fast_ids

    def ratings_on(self, cpus: CpuSet) -> list[str]:
        """Return by what the fast cores of these CPUs' nodes count as fast."""
        nodes = self.nodes_under(cpus) if self._fast else CpuSet()
        return [fast.rating for fast in self._fast if fast.node in nodes]

    @cached_property
    def _node_of(self) -> dict[int, int]:
        """The node of each CPU."""
        return {cpu: node for cpus, node in _last_with(self.cpu_nodes).items() for cpu in cpus}

    def nodes_under(self, cpus: CpuSet) -> CpuSet:
        """Return the nodes that these CPUs belong to; ranks that share a pool ask for the same ones."""
        if cpus not in self._under:
            on_a_node = filter(self._node_of.__contains__, cpus)
            self._under[cpus] = CpuSet(map(self._node_of.__getitem__, on_a_node))
        return self._under[cpus]

    def cores(self, cpus: Iterable[int]) -> list[Core]:
        """Return the cores of these CPUs: cores that share an L3 cache side by side, then by their lowest CPU."""
        found = {core.id: core for core in map(self.core_of.__getitem__, cpus)}
        return sorted(found.values(), key=_core_order)

    def usable_cpus(self, cores: Iterable[Core]) -> CpuSet:
        """Return the usable CPUs of some cores."""
        cpus = chain.from_iterable(core.cpus for core in cores)
        return CpuSet(filter(self.usable.__contains__, cpus))

    def nearest(self, home: int, candidates: Iterable[Node]) -> Node | None:
        """Return the candidate at the smallest distance from `home`; the lower number wins a tie."""
        return min(candidates, key=lambda node: (self.nodes[home].distance_to(node.id), node.id), default=None)

    def package_nodes(self, node: int) -> CpuSet:
        """Return the nodes with CPUs of this node's package, or the node alone if its package is unknown."""
        if node not in self._package_nodes:
            self._package_nodes[node] = self._members(self.nodes[node].package) | {node}
        return self._package_nodes[node]

    def _members(self, package: int | None) -> CpuSet:
        """Return the nodes with CPUs of a package."""
        if package is None:
            return CpuSet()
        return CpuSet(node.id for node in self.cpu_nodes if node.package == package)

    def cpus_of(self, nodes: CpuSet) -> tuple[CpuSet, CpuSet]:
        """Return the usable CPUs of several nodes with CPUs, and all CPUs of these nodes."""
        if nodes not in self._cpus_of:
            usable = CpuSet().union(*map(self.node_cpus.__getitem__, nodes))
            self._cpus_of[nodes] = usable, CpuSet().union(*(self.nodes[node].cpus for node in nodes))
        return self._cpus_of[nodes]


def _core_order(core: Core) -> tuple[int, int]:
    return (-1 if core.l3 is None else core.l3, core.id)


def _last_with(nodes: Iterable[Node]) -> dict[CpuSet, int]:
    """Return the last of the nodes that list the same CPUs, in the order of the nodes."""
    last: dict[CpuSet, int] = {}
    for node in nodes:
        last.pop(node.cpus, None)
        last[node.cpus] = node.id
    return last
