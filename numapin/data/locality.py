"""Where a rank's pinned memory, workers and pin thread belong. Edge.

Comes in: the environment, and what the user said of the node or the device. Goes out: one `Locality` with its reason.
Under `numapin run` the launcher has decided; alone, the rank asks the planner about its own GPU, as the launcher would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.fields import Fields
from numapin.errors import MachineError, PlanError, UsageError
from numapin.plan.make import make_plan
from numapin.plan.model import RankPlan
from numapin.plan.request import Memory, Request
from numapin.rank.become import BINDING
from numapin.system.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping

_NODE: Final = "sys/devices/system/node"
_LIVE: Final = Path("/")
_SAY_IT: Final = "name the node where it is known: node=N; see: numapin topo"
_ON_ITS_NODES: Final = frozenset({Memory.LOCAL, Memory.PREFERRED, Memory.BIND})


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """Where things belong. Empty `nodes`: unknown, the memory policy decides. Empty `cpus`: leave them as they are.

    `memory` is the rank's memory policy, None to leave it as it is; `num_machine_nodes` counts nodes of every kind.
    """

    nodes: CpuSet
    cpus: CpuSet
    memory: Memory | None
    num_machine_nodes: int
    reason: str


def find_locality(
    *, environ: Mapping[str, str], node: int | None, device_index: int | None, root: Path = _LIVE
) -> Locality:
    """Decide where this process's memory and helpers belong.

    1. `node`, as the user named it, and its CPUs.
    2. What `numapin run` planned for this rank (NUMAPIN_BINDING).
    3. On a machine with one node: that one, without reading the machine.
    4. The node of the GPU with CUDA index `device_index`, or the nearest with CPUs and memory (never a GPU's own).
    5. Otherwise nothing, and the reason says why.

    Raises UsageError for a `node` that does not exist or has no CPUs, MachineFileError for a broken NUMAPIN_BINDING.
    """
    tree = Tree(os.fspath(root).rstrip("/"))
    online = tree.numbers(f"{_NODE}/online") or CpuSet({0})  # a kernel without NUMA shows no nodes and has one
    if node is not None:
        return _named(tree, online, node)
    if environ.get(BINDING):
        rank = _read_binding(environ[BINDING])
        return _of_rank(rank, online, f"planned by numapin run: {rank.reason}")
    if len(online) == 1:
        return _unbound(online, f"the machine has one NUMA node, {min(online)}", online)
    if device_index is None:
        return _unbound(online, "neither a node nor a device is known; the memory policy decides", CpuSet())
    return _of_device(online, device_index, environ, root)


def _named(tree: Tree, online: CpuSet, node: int) -> Locality:
    cpus = {n: _cpus(tree, n, online) for n in sorted(online)}
    if not cpus.get(node):
        problem = "has no CPUs: it is no place for host memory" if node in cpus else "does not exist"
        usable = str(CpuSet(n for n in cpus if cpus[n]))
        raise UsageError(f"node={node}: NUMA node {node} {problem}; there are: {usable}", "see: numapin topo")
    allowed = cpus[node] & _allowed_cpus(tree)
    return Locality(
        nodes=CpuSet({node}),
        cpus=allowed,
        memory=Memory.PREFERRED if len(online) > 1 else None,
        num_machine_nodes=len(online),
        reason=f"node={node} was asked for" + ("" if allowed else "; none of its CPUs is allowed: CPUs stay"),
    )


def _cpus(tree: Tree, node: int, online: CpuSet) -> CpuSet:
    at = f"{_NODE}/node{node}"
    cpus = tree.numbers(f"{at}/cpulist", mask=f"{at}/cpumap")
    if cpus is None and len(online) == 1:
        return _allowed_cpus(tree)
    return cpus or CpuSet()


def _allowed_cpus(tree: Tree) -> CpuSet:
    """Return the CPUs that this process may use; of a captured machine, all."""
    if not tree.root:
        return CpuSet(os.sched_getaffinity(0))
    return tree.numbers("sys/devices/system/cpu/online") or CpuSet()


def _read_binding(text: str) -> RankPlan:
    fields = Fields.top(BINDING, text, hint=f"numapin run sets it; without numapin run: unset {BINDING}")
    try:
        return RankPlan.from_fields(fields)
    except ValueError as error:
        raise fields.error("", str(error)) from None


def _of_rank(rank: RankPlan, online: CpuSet, reason: str) -> Locality:
    """Take over a plan; without a policy that names nodes, or with interleave, the policy places the pinned pages."""
    planned = rank.nodes if rank.memory in _ON_ITS_NODES else CpuSet()
    return Locality(
        nodes=online if len(online) == 1 else planned,
        cpus=rank.cpus,
        memory=None if rank.memory is Memory.NONE else rank.memory,
        num_machine_nodes=len(online),
        reason=reason,
    )


def _of_device(online: CpuSet, device_index: int, environ: Mapping[str, str], root: Path) -> Locality:
    from numapin.topology.discover import discover  # brings NVML and libnuma, which one node does without

    try:
        topology = discover(environ=environ) if root == _LIVE else discover(root=root)
        gpu = next((gpu for gpu in topology.gpus if gpu.cuda_index == device_index), None)
        if gpu is None or gpu.node is None:
            what = "which GPU it is" if gpu is None else "its NUMA node"
            return _unbound(online, f"cuda:{device_index}: {what} is unknown; {_SAY_IT}", CpuSet())
        rank = make_plan(topology, Request(rank_gpus=(gpu.index,), num_ranks=1)).ranks[0]
    except (MachineError, PlanError) as error:
        why = f"cuda:{device_index}: its NUMA node is unknown: {error.message}; {error.hint}"
        return _unbound(online, why, CpuSet())
    return _of_rank(rank, online, f"cuda:{device_index}: {rank.reason}")


def _unbound(online: CpuSet, reason: str, nodes: CpuSet) -> Locality:
    return Locality(nodes=nodes, cpus=CpuSet(), memory=None, num_machine_nodes=len(online), reason=reason)
