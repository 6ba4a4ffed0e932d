"""Which ranks of a plan are where on a machine. Pure.

Comes in: a `Topology` and a `Plan` that may be of another machine. Goes out: the local ranks on each CPU, node and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.plan.model import GpuRef, Plan, RankPlan
    from numapin.topology.model import Topology

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The ranks on each CPU (by number), of each node's memory (by number), and of each GPU (by NVML index)."""

    cpus: Mapping[int, Ranks] = field(default_factory=dict)
    memory: Mapping[int, Ranks] = field(default_factory=dict)
    gpus: Mapping[int, Ranks] = field(default_factory=dict)
    _known: dict[CpuSet, Ranks] = field(default_factory=dict, repr=False, compare=False)

    def on(self, cpus: CpuSet) -> Ranks:
        """Return the ranks that use any of these CPUs."""
        if cpus not in self._known:
            together = {id(ranks): ranks for cpu in cpus for ranks in [self.cpus.get(cpu, ())]}  # many share one tuple
            self._known[cpus] = tuple(sorted(set().union(*together.values())))
        return self._known[cpus]


def marks_of(topology: Topology, plan: Plan | None) -> Marks:
    """Return where the ranks of the plan are. Raises UsageError for a plan that is not of this machine."""
    ranks = () if plan is None else plan.ranks
    _require_of_machine(topology, ranks)
    return Marks(
        cpus=_by_place((rank.cpus, rank.local_rank) for rank in ranks),
        memory=_by_place((rank.nodes, rank.local_rank) for rank in ranks),
        gpus=_by_place((frozenset({rank.gpu.index}), rank.local_rank) for rank in ranks if rank.gpu is not None),
    )


def _by_place(pairs: Iterable[tuple[frozenset[int], int]]) -> dict[int, Ranks]:
    """Return the ranks of each place; places with the same ranks share one tuple, because ranks share sets of CPUs."""
    sharers: dict[frozenset[int], list[int]] = {}
    for places, rank in pairs:
        sharers.setdefault(places, []).append(rank)
    groups: dict[int, tuple[frozenset[int], ...]] = {}
    for places in sharers:
        for place in places:
            groups[place] = (*groups.get(place, ()), places)
    merged = cache(lambda sets: tuple(sorted(rank for places in sets for rank in sharers[places])))
    return {place: merged(sets) for place, sets in groups.items()}


def _require_of_machine(topology: Topology, ranks: Iterable[RankPlan]) -> None:
    cpus, nodes = topology.cpus, CpuSet(node.id for node in topology.nodes)
    absent = cache(lambda places, there: str(places - there))
    for rank in ranks:
        missing = {
            "CPUs": absent(rank.cpus, cpus),
            "nodes": absent(rank.nodes, nodes),
            "GPU": "" if rank.gpu is None or _has(topology, rank.gpu) else f"{rank.gpu.index} ({rank.gpu.pci})",
        }
        for what, names in missing.items():
            if names:
                raise UsageError(
                    f"the plan is of another machine: rank {rank.local_rank} has {what} {names}, "
                    "which this one has not",
                    "name the plan's machine with --machine FILE, or plan for this one: numapin plan --json",
                )


def _has(topology: Topology, ref: GpuRef) -> bool:
    """Compare the PCI address too, where both know it: an index alone fits any machine."""
    found = [gpu for gpu in topology.gpus if gpu.index == ref.index]
    return bool(found) and (ref.pci is None or found[0].pci in (None, ref.pci))
