"""The usable part of a machine, indexed so that each step of planning is a few set operations."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted
from numapin.topology.fast import fast_cores
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numapin.topology.model import Core, Node, Topology


class UsableMachine:
    """A topology and the CPUs of it that ranks may use. `node_cpus` are the usable CPUs of each node with CPUs.

    `memory_nodes` are the nodes with CPUs whose memory may be used, `gpu_memory` those of GPU memory that the kernel
    may use for this process.
    """

    def __init__(self, topology: Topology, usable: CpuSet) -> None:
        self.topology, self.usable = topology, usable
        self.nodes = {node.id: node for node in topology.nodes}
        self.cpu_nodes = topology.cpu_nodes
        usable_of = cache(lambda members: members & usable)  # faulty firmware lists all CPUs on every node
        self.node_cpus = {node.id: usable_of(node.cpus) for node in self.cpu_nodes}
        self.nodes_with_usable_cpus = [node for node in self.cpu_nodes if self.node_cpus[node.id]]

        allowed = topology.allowed.nodes
        # Unpopulated memory channels leave a node with CPUs and no memory.
        self.memory_nodes = {n.id: n for n in self.cpu_nodes if n.id in allowed and n.memory_bytes != 0}
        self.gpu_memory = CpuSet(n.id for n in topology.nodes if n.kind is NodeKind.GPU and n.id in allowed)

        self._core_of = {cpu: core for core in topology.cores for cpu in core.cpus if cpu in usable}
        last_with: dict[CpuSet, int] = {}  # of nodes that list the same CPUs, the last one has them
        for node in self.cpu_nodes:
            last_with.pop(node.cpus, None)
            last_with[node.cpus] = node.id
        self._node_of = {cpu: node_id for cpus, node_id in last_with.items() for cpu in cpus}
        self._under: dict[CpuSet, CpuSet] = {}
        self._cpus_of: dict[CpuSet, tuple[CpuSet, CpuSet]] = {}
        self._packages: defaultdict[int | None, set[int]] = defaultdict(set)
        for node in self.cpu_nodes:
            self._packages[node.package].add(node.id)
        self._fast = fast_cores(topology)
        self._fast_ids = frozenset(chain.from_iterable(fast.cpus for fast in self._fast))

    def cores(self, cpus: Iterable[int]) -> list[Core]:
        """Return the cores of these CPUs: cores that share an L3 cache side by side, then by their lowest CPU."""
        found = {core.id: core for core in map(self._core_of.__getitem__, cpus)}
        return sorted(found.values(), key=lambda core: (-1 if core.l3 is None else core.l3, core.id))

    def usable_cpus(self, cores: Iterable[Core]) -> CpuSet:
        """Return the usable CPUs of some cores."""
        return CpuSet(filter(self.usable.__contains__, chain.from_iterable(core.cpus for core in cores)))

    def nodes_under(self, cpus: CpuSet) -> CpuSet:
        """Return the nodes that these CPUs belong to; ranks that share a pool ask for the same ones."""
        if cpus not in self._under:
            self._under[cpus] = CpuSet(self._node_of[cpu] for cpu in cpus if cpu in self._node_of)
        return self._under[cpus]

    def cpus_of(self, nodes: CpuSet) -> tuple[CpuSet, CpuSet]:
        """Return the usable CPUs of several nodes, and all their CPUs; equal nodes share one set, hashed only once."""
        if nodes not in self._cpus_of:
            usable = CpuSet().union(*(self.node_cpus.get(node, ()) for node in nodes))
            self._cpus_of[nodes] = usable, CpuSet().union(*(self.nodes[node].cpus for node in nodes))
        return self._cpus_of[nodes]

    def package_nodes(self, node: int) -> CpuSet:
        """Return the nodes with CPUs of this node's package, and the node itself; alone if its package is unknown."""
        package = self.nodes[node].package
        return CpuSet({node} if package is None else self._packages[package] | {node})

    def nearest(self, home: int, candidates: Iterable[Node]) -> Node | None:
        """Return the candidate at the smallest distance from `home`; the lower number wins a tie."""
        return min(candidates, key=lambda node: (self.nodes[home].distance_to(node.id), node.id), default=None)

    # --- fast cores: cores that are faster than others of their node --------------------------------------------------

    def is_fast(self, core: Core) -> bool:
        """Return whether a core is faster than others of its node."""
        return core.id in self._fast_ids

    def num_fast(self, cores: Iterable[Core]) -> int:
        """Return how many of some cores are fast."""
        return sum(map(self.is_fast, cores))

    def rating_of(self, pool: CpuSet) -> str:
        """Return by what some cores of a pool are faster than others; "" if all are alike."""
        if not self._fast:
            return ""
        nodes, cores = self.nodes_under(pool), self.cores(pool)
        ratings = dict.fromkeys(fast.rating for fast in self._fast if fast.node in nodes)
        return "; ".join(ratings) if 0 < self.num_fast(cores) < len(cores) else ""

    def why_fast(self, cores: Collection[Core], rating: str) -> str:
        """Return how many cores of a rank are fast, and by which rating."""
        number = self.num_fast(cores)
        are = "is a fast one" if number == 1 else "are fast ones"
        return f"{number} of its {counted(len(cores), 'core')} {are} ({rating})"

    def even_shares(self, cores: Sequence[Core], num_ranks: int) -> list[list[Core]]:
        """Split cores into shares of the same size and with the same number of fast cores, each within one.

        The first ranks get the cores that are left over. Fast cores come first in a share. Shares are cut from the fast
        cores and from the others in the order given, so that cores that share a cache stay together where possible.
        """
        fast = [core for core in cores if self.is_fast(core)]
        others = [core for core in cores if not self.is_fast(core)]
        shares, at_fast, at_others = [], 0, 0
        for rank in range(num_ranks):
            size = len(cores) // num_ranks + (rank < len(cores) % num_ranks)
            size_fast = len(fast) // num_ranks + (rank < len(fast) % num_ranks)
            end_fast, end_others = at_fast + size_fast, at_others + size - size_fast
            shares.append([*fast[at_fast:end_fast], *others[at_others:end_others]])
            at_fast, at_others = end_fast, end_others
        return shares
