"""Stage 2, the second half: which memory each rank gets. Pure.

Comes in: a rank's `Draft` with its CPUs. Goes out: its memory policy and the policy's nodes (step 7 of `make_plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.base.plural import listed
from numapin.errors import UsageError
from numapin.plan.request import Bind, Memory, Request
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from numapin.plan.cpus import Draft
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Node


def memory_of(machine: UsableMachine, request: Request, draft: Draft) -> tuple[Draft, Memory, CpuSet]:
    """Return the draft with any reason added, the policy, and its nodes: by default the nodes under the CPUs.

    Raises UsageError if a named node is not host memory that this process may use.
    """
    policy = request.policy
    if request.memory_nodes is not None:
        return draft, policy, _named_nodes(machine, request.memory_nodes)
    if policy in (Memory.NONE, Memory.LOCAL):
        return draft, policy, machine.nodes_under(draft.cpus)
    if len(machine.nodes) == 1:
        draft = draft.because("one NUMA node: all memory is on it")
        return draft, Memory.NONE, machine.nodes_under(draft.cpus)
    if policy is Memory.INTERLEAVE and machine.memory_nodes:
        return _with_doubt(machine, draft, machine.memory_node_ids), policy, machine.memory_node_ids
    if draft.home is None or not machine.memory_nodes:
        why = f"no usable node for --memory {policy}"
        draft = draft.because(why, exact=request.memory is None)
        return draft, Memory.NONE, machine.nodes_under(draft.cpus)
    return _home_memory(machine, request, draft, draft.home)


def _home_memory(machine: UsableMachine, request: Request, draft: Draft, home: int) -> tuple[Draft, Memory, CpuSet]:
    """Take the home's nodes, or the nearest with allowed memory, even if the CPUs had to come from another node."""
    wanted = machine.package_nodes(home) if request.bind is Bind.SOCKET else CpuSet({home})
    nodes = wanted & machine.memory_node_ids
    nearest = None if nodes else machine.nearest(home, machine.memory_nodes)
    if nearest is None:
        return _with_doubt(machine, draft, nodes), request.policy, nodes
    why = f"no allowed memory on node {home}; node {nearest.id} is the nearest"
    return draft.because(why, exact=False), request.policy, CpuSet({nearest.id})


def _with_doubt(machine: UsableMachine, draft: Draft, nodes: CpuSet) -> Draft:
    """Mark a rank as not exact if it is unknown whether a node of its policy has memory at all."""
    unknown = CpuSet(node for node in nodes if machine.nodes[node].memory_bytes is None)
    return draft.because(f"the memory of {listed('node', unknown)} is unknown", exact=False) if unknown else draft


def _named_nodes(machine: UsableMachine, named: CpuSet) -> CpuSet:
    allowed = machine.topology.allowed.nodes
    usable = allowed & {node.id for node in machine.topology.nodes if _is_host_memory(node)}
    unusable = named - usable
    if named and not unusable:
        return named
    problem = "no node is named"
    if unusable:
        has = "has" if len(unusable) == 1 else "have"
        problem = f"{listed('node', unusable)} {has} no host memory that this process may use"
    raise UsageError(f"--memory: {problem}; usable: {usable or 'none'}", "see them with: numapin topo")


def _is_host_memory(node: Node) -> bool:
    return node.kind is not NodeKind.GPU and node.memory_bytes != 0
