"""What a machine says that a job needs. Pure.

Comes in: the `Topology` of one node of the cluster, and how many of its GPUs the job takes. Goes out: a `Share`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from numapin.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a node that goes with some of its GPUs: whole cores, and memory where the machine tells it."""

    cores: int
    threads_per_core: int
    memory_bytes: int | None
    is_whole: bool

    def cpus_of(self, tasks: int) -> int:
        """Return the CPUs of each of so many tasks, in whole cores. Raises UsageError where there are too few."""
        if self.cores < tasks:
            raise UsageError(
                f"{tasks} tasks a node are more than the {self.cores} cores that are there for them",
                "give fewer --ranks-per-node, or the number of CPUs yourself: --cpus-per-task",
            )
        return self.cores // tasks * self.threads_per_core


def share_of(topology: Topology, *, gpus: int, smt: bool, spare_cores_per_node: int = 0) -> Share:
    """Return what goes with `gpus` GPUs of this machine: as large a part of it as they are of its GPUs.

    `spare_cores_per_node` are left to the system on every NUMA node with CPUs.
    """
    there = len(topology.gpus)
    if gpus > there:
        raise UsageError(
            f"--gpus-per-node {gpus}: {topology.source} has {there} GPUs",
            "give the machine file of the nodes that the job is for",
        )
    cores = len(topology.cores) - spare_cores_per_node * len(topology.cpu_nodes)
    memory = [node.memory_bytes for node in topology.nodes if node.kind is not NodeKind.GPU]
    part, whole = (gpus, there) if gpus else (1, 1)
    return Share(
        cores=max(cores, 1) * part // whole,
        threads_per_core=min(len(core.cpus) for core in topology.cores) if smt else 1,
        memory_bytes=None if None in memory else sum(size or 0 for size in memory) * part // whole,
        is_whole=part == whole,
    )
