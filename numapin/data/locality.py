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
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.plan.model import RankPlan

_NODE: Final = "sys/devices/system/node"
_LIVE: Final = Path("/")
_NAME_NODE: Final = "if you know it, set it with node=N; see: numapin topo"
_ON_ITS_NODES: Final = frozenset({Memory.LOCAL, Memory.PREFERRED, Memory.BIND})


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """The nodes and CPUs where a rank's memory and threads belong.

    Attributes:
        nodes: The nodes for pinned memory. Empty: unknown, the memory policy decides.
        cpus: The CPUs for workers and pin thread. Empty: they stay as they are.
        memory: The rank's memory policy. None: it stays as it is.
        num_machine_nodes: The number of nodes of the machine, of every kind.
        reason: Why these.
        within: The only nodes where pages may be, so that they do not spill into GPU memory. Empty: not limited.
    """

    nodes: CpuSet
    cpus: CpuSet
    memory: Memory | None
    num_machine_nodes: int
    reason: str
    within: CpuSet = CpuSet()


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
    online = tree.numbers(f"{_NODE}/online") or CpuSet({0})  # a kernel without NUMA shows no nodes and has one
    if node is not None:
        return _on_named_node(tree, online, node)
    if environ.get(BINDING):
        rank = read_binding(environ[BINDING])
        return _of_rank(rank, online, f"planned by numapin run: {rank.reason}")
    if len(online) == 1:
        return _unbound(online, f"the machine has one NUMA node, {min(online)}", nodes=online)
    if device_index is None:
        return _unbound(online, "no node and no device is known; the memory policy decides")
    return _of_device(online, device_index, environ, root)


def _on_named_node(tree: Tree, online: CpuSet, node: int) -> Locality:
    cpus = _cpus_to_place_on(tree, online, node) & _allowed_cpus(tree)
    warning = "" if cpus else "; this process may use none of its CPUs, so CPUs stay as they are"
    return Locality(
        nodes=CpuSet({node}),
        cpus=cpus,
        memory=Memory.PREFERRED if len(online) > 1 else None,
        num_machine_nodes=len(online),
        reason=f"requested with node={node}{warning}",
        within=_host_nodes(tree, online),
    )


def _host_nodes(tree: Tree, online: CpuSet) -> CpuSet:
    """Return the nodes with CPUs if other nodes are GPU memory, into which a full node would spill; else none."""
    if len(online) == 1:
        return CpuSet()
    from numapin.topology.sources.gpu_drivers import gpu_memory_nodes  # a machine with one node never needs it

    return CpuSet(node for node in online if _cpus(tree, node, online)) if gpu_memory_nodes(tree) else CpuSet()


def _cpus_to_place_on(tree: Tree, online: CpuSet, node: int) -> CpuSet:
    """Return the CPUs of a node. Raises UsageError if it has none or does not exist."""
    cpus = {n: _cpus(tree, n, online) for n in sorted(online)}
    if cpus.get(node):
        return cpus[node]
    problem = "has no CPUs, so host memory cannot be placed there" if node in cpus else "does not exist"
    usable = CpuSet(n for n in cpus if cpus[n])
    raise UsageError(f"node={node!r}: NUMA node {node!r} {problem}; usable nodes: {usable}", "see: numapin topo")


def _cpus(tree: Tree, node: int, online: CpuSet) -> CpuSet:
    folder = f"{_NODE}/node{node}"
    cpus = tree.numbers(f"{folder}/cpulist", mask=f"{folder}/cpumap")
    if cpus is None and len(online) == 1:
        return _allowed_cpus(tree)
    return cpus or CpuSet()


def _allowed_cpus(tree: Tree) -> CpuSet:
    """Return the CPUs that this process may use; all CPUs of a captured machine."""
    if not tree.root:
        return CpuSet(os.sched_getaffinity(0))
    return tree.numbers("sys/devices/system/cpu/online") or CpuSet()


def _of_rank(rank: RankPlan, online: CpuSet, reason: str) -> Locality:
    """Adopt a plan. If its policy names no nodes, or is interleave, the policy places the pinned pages."""
    planned = rank.nodes if rank.memory in _ON_ITS_NODES else CpuSet()
    return Locality(
        nodes=online if len(online) == 1 else planned,
        cpus=rank.cpus,
        memory=None if rank.memory is Memory.NONE else rank.memory,
        num_machine_nodes=len(online),
        reason=reason,
        within=rank.within or CpuSet(),
    )


def _of_device(online: CpuSet, device_index: int, environ: Mapping[str, str], root: Path) -> Locality:
    name = f"cuda:{device_index}"
    try:
        rank = _plan_device(device_index, environ, root)
    except (MachineError, PlanError) as error:
        return _unbound(online, f"{name}: its NUMA node is unknown: {error.message}; {error.hint}")
    return _of_rank(rank, online, f"{name}: {rank.reason}")


def _plan_device(device_index: int, environ: Mapping[str, str], root: Path) -> RankPlan:
    """Plan one rank on a GPU. Raises PlanError, and MachineError if the GPU or its node is unknown."""
    from numapin.topology.discover import discover  # loads NVML and libnuma, which a machine with one node never needs

    topology = discover(environ=environ) if root == _LIVE else discover(root=root)
    gpu = next((gpu for gpu in topology.gpus if gpu.cuda_index == device_index), None)
    if gpu is None:
        raise MachineError("no GPU with this CUDA index was found", _NAME_NODE)
    if gpu.node is None:
        raise MachineError("no source reports it", _NAME_NODE)
    return make_plan(topology, Request(rank_gpus=(gpu.index,), num_ranks=1)).ranks[0]


def _unbound(online: CpuSet, reason: str, *, nodes: CpuSet | None = None) -> Locality:
    return Locality(nodes=nodes or CpuSet(), cpus=CpuSet(), memory=None, num_machine_nodes=len(online), reason=reason)
