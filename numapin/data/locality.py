"""Find the nodes and CPUs for a rank's pinned memory, workers and pin thread.

Under `numapin run` the launcher has decided. Without it, the rank asks the planner about its own GPU, as the launcher
would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError, PlanError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.request import Memory, Request
from numapin.rank.become import BINDING, read_binding
from numapin.system.tree import NODES, Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.plan.model import RankPlan

_LIVE: Final = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """The nodes and CPUs where a rank's memory and threads belong."""

    nodes: CpuSet  # for pinned memory; empty: unknown, the memory policy decides
    cpus: CpuSet  # for workers and pin thread; empty: they stay as they are
    memory: Memory | None  # the rank's memory policy; None: it stays as it is
    num_machine_nodes: int  # of every kind
    reason: str  # why these
    within: CpuSet = CpuSet()  # the only nodes where pages may be, lest they spill into GPU memory; empty: all


def find_locality(
    *, environ: Mapping[str, str], node: int | None, device_index: int | None, root: Path = _LIVE
) -> Locality:
    """Decide where this process's memory, workers and pin thread belong.

    1. `node`, if the user named one, and its CPUs.
    2. What `numapin run` planned for this rank (NUMAPIN_BINDING).
    3. On a machine with one node: that one, without reading the machine.
    4. The node of the GPU with CUDA index `device_index`, or the nearest with CPUs and memory (never a GPU's own).
    5. Otherwise nothing, and the reason says why.

    Raises UsageError for a `node` that does not exist or has no CPUs, MachineFileError for a broken NUMAPIN_BINDING.
    """
    tree = Tree(os.fspath(root).rstrip("/"))
    online = tree.numbers(f"{NODES}/online") or CpuSet({0})  # a kernel without NUMA shows no nodes and has one
    if node is not None:
        return _on_named_node(tree, online, node)
    nodes, rank, reason = CpuSet(), None, "no node and no device is known; the memory policy decides"
    if environ.get(BINDING):
        rank = read_binding(environ[BINDING])
        reason = f"planned by numapin run: {rank.reason}"
    elif len(online) == 1:
        nodes, reason = online, f"the machine has one NUMA node, {min(online)}"
    elif device_index is not None:
        rank, reason = _planned_for(device_index, environ, root)
    if rank is None:
        return Locality(nodes=nodes, cpus=CpuSet(), memory=None, num_machine_nodes=len(online), reason=reason)
    if len(online) == 1:
        nodes = online
    elif rank.memory not in (Memory.NONE, Memory.INTERLEAVE):  # else the policy places the pinned pages
        nodes = rank.nodes
    return Locality(
        nodes=nodes,
        cpus=rank.cpus,
        memory=None if rank.memory is Memory.NONE else rank.memory,
        num_machine_nodes=len(online),
        reason=reason,
        within=rank.within or CpuSet(),
    )


def _on_named_node(tree: Tree, online: CpuSet, node: int) -> Locality:
    """Return the place that the user named. Raises UsageError if the node has no CPUs or does not exist."""
    # A captured machine may use all of its CPUs.
    all_cpus = tree.numbers("sys/devices/system/cpu/online") or CpuSet()
    usable = all_cpus if tree.root else CpuSet(os.sched_getaffinity(0))
    cpus_of = {n: tree.node_cpus(n) for n in online}
    if len(online) == 1 and cpus_of[min(online)] is None:
        cpus_of = {min(online): usable}
    with_cpus = CpuSet(n for n in cpus_of if cpus_of[n])
    if node not in with_cpus:
        problem = "has no CPUs, so host memory cannot be placed there" if node in online else "does not exist"
        problem = f"node={node!r}: NUMA node {node!r} {problem}; usable nodes: {with_cpus}"
        raise UsageError(problem, "see: numapin topo")
    within = CpuSet()
    if len(online) > 1:
        from numapin.topology.sources.gpu_drivers import gpu_memory_nodes  # a machine with one node never needs it

        within = with_cpus if gpu_memory_nodes(tree) else within  # else a full node spills into GPU memory
    allowed = usable.intersection(cpus_of[node] or ())
    warning = "" if allowed else "; this process may use none of its CPUs, so CPUs stay as they are"
    return Locality(
        nodes=CpuSet({node}),
        cpus=allowed,
        memory=Memory.PREFERRED if len(online) > 1 else None,
        num_machine_nodes=len(online),
        reason=f"requested with node={node}{warning}",
        within=within,
    )


def _planned_for(device_index: int, environ: Mapping[str, str], root: Path) -> tuple[RankPlan | None, str]:
    """Plan one rank on a GPU; None: its node is unknown. The text is the reason."""
    from numapin.topology.discover import discover  # loads NVML and libnuma, which a machine with one node never needs

    name = f"cuda:{device_index}"
    unknown = f"{name}: its NUMA node is unknown"
    try:
        topology = discover(environ=environ) if root == _LIVE else discover(root=root)
        gpu = next((gpu for gpu in topology.gpus if gpu.cuda_index == device_index), None)
        if gpu is not None and gpu.node is not None:
            rank = make_plan(topology, Request(rank_gpus=(gpu.index,), num_ranks=1)).ranks[0]
            return rank, f"{name}: {rank.reason}"
    except (MachineError, PlanError) as error:
        return None, f"{unknown}: {error.message}; {error.hint}"
    seen = "no GPU with this CUDA index was found" if gpu is None else "no source reports it"
    return None, f"{unknown}: {seen}; if you know it, set it with node=N; see: numapin topo"
