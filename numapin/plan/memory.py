"""Stage 2, the second half: which memory each rank gets. Pure.

Comes in: a rank's `Draft` with its CPUs. Goes out: its memory policy and the nodes of it (step 7 of `plan.make_plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.plan.request import Bind, Memory, Request
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from numapin.plan.cpus import Draft, UsableMachine
    from numapin.topology.model import Node


def memory_of(machine: UsableMachine, request: Request, draft: Draft) -> tuple[Draft, Memory, CpuSet]:
    """Return the draft with any reason added, the policy, and its nodes: those under the CPUs where it names none.

    Raises UsageError for named nodes that are no host memory of this process.
    """
    policy = request.policy
    under_cpus = machine.nodes_under(draft.cpus)
    if request.memory_nodes is not None:
        return draft, policy, _named_nodes(machine, request.memory_nodes)
    if policy in (Memory.NONE, Memory.LOCAL):
        return draft, policy, under_cpus
    if len(machine.nodes) == 1:
        return draft.because("one NUMA node: memory can be nowhere else"), Memory.NONE, under_cpus
    usable = machine.memory_nodes
    if policy is Memory.INTERLEAVE and usable:
        return draft, policy, CpuSet(node.id for node in usable)
    if draft.home is None or not usable:
        why = f"no node is known whose memory --memory {policy} could use"
        return draft.because(why, exact=draft.exact and request.memory is None), Memory.NONE, under_cpus
    return _home_memory(machine, request, draft, usable)


def _home_memory(
    machine: UsableMachine, request: Request, draft: Draft, usable: list[Node]
) -> tuple[Draft, Memory, CpuSet]:
    """Take the home's nodes, or the nearest with allowed memory, even where the CPUs had to come from elsewhere."""
    assert draft.home is not None  # noqa: S101 - the caller asked
    wanted = machine.package_nodes(draft.home) if request.bind is Bind.SOCKET else CpuSet({draft.home})
    nodes = wanted & {node.id for node in usable}
    nearest = None if nodes else machine.nearest(draft.home, usable)
    if nearest is None:
        return draft, request.policy, nodes
    why = f"no allowed memory on node {draft.home}; node {nearest.id} is the nearest"
    return draft.because(why, exact=False), request.policy, CpuSet({nearest.id})


def _named_nodes(machine: UsableMachine, named: CpuSet) -> CpuSet:
    allowed = machine.topology.allowed.nodes
    nodes = machine.topology.nodes
    usable = CpuSet(n.id for n in nodes if n.kind is not NodeKind.GPU and n.id in allowed and n.memory_bytes != 0)
    if not named or named - usable:
        raise UsageError(
            f"--memory: nodes {named - usable or 'none'} are not host memory this process may use; there are {usable}",
            "see them with: numapin topo",
        )
    return named
