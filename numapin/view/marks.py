"""The places of a plan's ranks on a machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.view.words import ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.plan.model import GpuRef, Plan, RankPlan
    from numapin.topology.model import Gpu, Topology

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The ranks on each CPU (by number), in each node's memory (by number), and on each GPU (by index)."""

    cpus: Mapping[int, Ranks] = field(default_factory=dict)
    memory: Mapping[int, Ranks] = field(default_factory=dict)
    gpus: Mapping[int, Ranks] = field(default_factory=dict)
    _known: dict[CpuSet, Ranks] = field(default_factory=dict, repr=False, compare=False)

    def on(self, cpus: CpuSet) -> Ranks:
        """Return the ranks that use any of these CPUs."""
        if cpus not in self._known:
            each = (self.cpus.get(cpu, ()) for cpu in cpus)
            distinct = {id(ranks): ranks for ranks in each}  # many CPUs share one tuple, whose hash would be slow
            self._known[cpus] = tuple(sorted(set().union(*distinct.values())))
        return self._known[cpus]


def marks_of(topology: Topology, plan: Plan | None) -> Marks:
    """Return the places of the plan's ranks. Raises UsageError for a plan of another machine."""
    ranks = ranks_of(plan)
    _require_of_machine(topology, ranks)
    return Marks(
        cpus=_by_place((rank.cpus, rank.local_rank) for rank in ranks),
        memory=_by_place((rank.nodes, rank.local_rank) for rank in ranks),
        gpus=_by_place((frozenset({rank.gpu.index}), rank.local_rank) for rank in ranks if rank.gpu is not None),
    )


def _by_place(pairs: Iterable[tuple[frozenset[int], int]]) -> dict[int, Ranks]:
    """Return the ranks of each place; places with the same ranks share one tuple, because ranks share sets of CPUs."""
    sharers = _sharers(pairs)
    sets_around: dict[int, tuple[frozenset[int], ...]] = {}
    for places in sharers:
        for place in places:
            sets_around[place] = (*sets_around.get(place, ()), places)
    merged = cache(lambda sets: tuple(sorted(chain.from_iterable(map(sharers.__getitem__, sets)))))
    return {place: merged(sets) for place, sets in sets_around.items()}


def _sharers(pairs: Iterable[tuple[frozenset[int], int]]) -> dict[frozenset[int], list[int]]:
    """Return the ranks of each set of places."""
    sharers: dict[frozenset[int], list[int]] = {}
    for places, rank in pairs:
        sharers.setdefault(places, []).append(rank)
    return sharers


def _require_of_machine(topology: Topology, ranks: Iterable[RankPlan]) -> None:
    """Raise UsageError if a rank has CPUs, nodes or a GPU that the machine does not have."""
    cpus, nodes = topology.cpus, CpuSet(node.id for node in topology.nodes)
    absent = cache(lambda places, present: str(places - present))  # ranks share sets
    for rank in ranks:
        missing = {
            "CPUs": absent(rank.cpus, cpus),
            "nodes": absent(rank.nodes, nodes),
            "GPU": _absent_gpu(topology, rank.gpu),
        }
        for what, names in missing.items():
            if names:
                raise UsageError(
                    f"the plan is of another machine: rank {rank.local_rank} has {what} {names}, "
                    "which this machine does not have",
                    "name the plan's machine with --machine FILE, or plan for this one: numapin plan --json",
                )


def _absent_gpu(topology: Topology, ref: GpuRef | None) -> str:
    """Return the name of a GPU that the machine does not have, or ""."""
    if ref is None or any(_is_same(gpu, ref) for gpu in topology.gpus):
        return ""
    return f"{ref.index} ({ref.pci})"


def _is_same(gpu: Gpu, ref: GpuRef) -> bool:
    """Compare the PCI addresses too if both are known, because an index alone fits any machine."""
    return gpu.index == ref.index and (None in (gpu.pci, ref.pci) or gpu.pci == ref.pci)
