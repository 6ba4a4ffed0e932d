"""Which ranks of a plan are where on a machine. Pure.

Comes in: a `Topology` and a `Plan` that may be of another machine. Goes out: the local ranks on each CPU, node and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from numapin.base import cpu_set
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

    def on(self, cpus: frozenset[int]) -> Ranks:
        """Return the ranks that use any of these CPUs."""
        return tuple(sorted({rank for cpu in cpus for rank in self.cpus.get(cpu, ())}))


def marks_of(topology: Topology, plan: Plan | None) -> Marks:
    """Return where the ranks of the plan are. Raises UsageError for a plan that is not of this machine."""
    ranks = () if plan is None else plan.ranks
    for rank in ranks:
        _require_of_machine(topology, rank)
    return Marks(
        cpus=_by_place((cpu, rank.local_rank) for rank in ranks for cpu in rank.cpus),
        memory=_by_place((node, rank.local_rank) for rank in ranks for node in rank.nodes),
        gpus=_by_place((rank.gpu.index, rank.local_rank) for rank in ranks if rank.gpu is not None),
    )


def _by_place(pairs: Iterable[tuple[int, int]]) -> dict[int, Ranks]:
    places: dict[int, list[int]] = {}
    for place, rank in pairs:
        places.setdefault(place, []).append(rank)
    return {place: tuple(sorted(ranks)) for place, ranks in places.items()}


def _require_of_machine(topology: Topology, rank: RankPlan) -> None:
    missing = {
        "CPUs": cpu_set.render(rank.cpus - topology.cpus),
        "nodes": cpu_set.render(rank.nodes - {node.id for node in topology.nodes}),
        "GPU": "" if rank.gpu is None or _has(topology, rank.gpu) else f"{rank.gpu.index} ({rank.gpu.pci})",
    }
    for what, names in missing.items():
        if names:
            raise UsageError(
                f"the plan is of another machine: rank {rank.local_rank} has {what} {names}, which this one has not",
                "name the plan's machine with --machine FILE, or plan for this one: numapin plan --json",
            )


def _has(topology: Topology, ref: GpuRef) -> bool:
    """Compare the PCI address too, where both know it: an index alone fits any machine."""
    found = [gpu for gpu in topology.gpus if gpu.index == ref.index]
    return bool(found) and (ref.pci is None or found[0].pci in (None, ref.pci))
