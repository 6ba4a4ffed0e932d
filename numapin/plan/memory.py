"""Stage 2, the second half: which memory each rank gets. Pure.

Comes in: a rank's `Draft` with its CPUs. Goes out: its memory policy and the policy's nodes (step 7 of `make_plan`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.plural import listed
from numapin.errors import UsageError
from numapin.plan.request import Bind, Memory, Request
from numapin.topology.model import NodeKind

if TYPE_CHECKING:
    from numapin.plan.cpus import Draft
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Node


class PlacedDraft(NamedTuple):
    """A draft with its memory policy and the policy's nodes, and the only nodes where its pages may be."""

    draft: Draft
    policy: Memory
    nodes: CpuSet
    within: CpuSet | None = None


def memory_of(machine: UsableMachine, request: Request, draft: Draft) -> PlacedDraft:
    """Return the draft with any reason added, the policy, and its nodes: by default the nodes under the CPUs.

    Raises UsageError if a named node is not host memory that this process may use.
    """
    placed = PlacedDraft(*_requested_memory(machine, request, draft))
    if not machine.gpu_memory_ids or placed.policy is Memory.BIND:
        return placed
    return _out_of_gpu_memory(machine, request, placed)


def _requested_memory(machine: UsableMachine, request: Request, draft: Draft) -> tuple[Draft, Memory, CpuSet]:
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


def _out_of_gpu_memory(machine: UsableMachine, request: Request, placed: PlacedDraft) -> PlacedDraft:
    """Keep pages out of GPU memory, or say why that is impossible.

    Every policy but `bind` falls back to any other node when its own are full, the page cache included (mm/mempolicy.c,
    "normal fallback"), and thus to GPU memory. `bind` takes the node that is nearest to the CPU that touches a page, as
    `local` does, and has no fallback. On CPUs of the preferred nodes, `bind` over the host's nodes is thus `preferred`
    without the spill.
    """
    draft, policy, nodes, _ = placed
    gpu_memory = f"GPU memory ({listed('node', machine.gpu_memory_ids)})"
    host = machine.memory_node_ids | (request.memory_nodes or CpuSet())
    if request.policy in (Memory.NONE, Memory.INTERLEAVE) or not host:
        why = f"with --memory {request.policy}, pages may go to {gpu_memory} when the host's memory is full"
        return placed._replace(draft=draft.because(why))
    draft = draft.because(f"pages stay on {listed('node', host)}: {gpu_memory} is never used for them")
    if policy is Memory.PREFERRED and not machine.nodes_under(draft.cpus) <= nodes:
        why = f"{listed('node', nodes)} cannot be preferred from CPUs of other nodes; pages go to the CPU's own node"
        draft = draft.because(why, exact=False)
    kept = Memory.LOCAL if policy is Memory.NONE else policy
    return placed._replace(draft=draft, policy=kept, within=host)


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
    raise UsageError(f"--memory: {_why_refused(unusable)}; usable: {usable or 'none'}", "see them with: numapin topo")


def _why_refused(unusable: CpuSet) -> str:
    if not unusable:
        return "no node is named"
    has = "has" if len(unusable) == 1 else "have"
    return f"{listed('node', unusable)} {has} no host memory that this process may use"


def _is_host_memory(node: Node) -> bool:
    return node.kind is not NodeKind.GPU and node.memory_bytes != 0
