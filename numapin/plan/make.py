"""Stage 2: which CPUs and which memory each rank must use. Pure.

Comes in: a `Topology` and a `Request`. Goes out: a `Plan` (schema numapin.plan/1) that says for each rank what it gets
and why. The same input gives the same plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.plan.model import GpuRef, Plan, RankPlan
from numapin.plan.request import Bind

if TYPE_CHECKING:
    from numapin.plan.cpus import Draft, UsableMachine
    from numapin.plan.request import Request
    from numapin.topology.model import Topology


def default_num_ranks(topology: Topology, *, is_this_host: bool = True) -> int | None:
    """Return the number of ranks where nobody says it: None, which is one per GPU, or 1 where no driver told of one.

    Another machine's file need not know what its driver tells, and counts with the GPUs that it has.
    """
    return 1 if is_this_host and not topology.has_usable_gpu else None


def make_plan(topology: Topology, request: Request) -> Plan:
    """Decide which CPUs and memory each rank of this host uses.

    1. Usable CPUs are the allowed ones, less `reserve_cpus`, less all but one of each core's without SMT.
    2. Rank n uses GPU n mod G. Without GPUs, ranks are spread over the nodes.
    3. A rank's home is its GPU's node; a home without usable CPUs is replaced by the nearest node that has some.
    4. The mode makes a pool of CPUs of the home.
    5. Ranks of one pool share it, or split it by whole cores (`exclusive`, `cpus_per_rank`), in the order of their
       GPUs' PCI addresses, so that renumbering GPUs moves no CPUs.
    6. A rank's thread count is its part of the physical cores of its pool.
    7. Its memory is on its GPU's node (the package's nodes for `socket`), or the nearest allowed one.

    Args:
        topology: The machine.
        request: What the user asked for.

    Returns:
        What each rank gets, with reasons and warnings. The same arguments always give the same plan.

    Raises:
        PlanError: No CPU is left, or exclusive ranks outnumber the cores.
        UsageError: The request names a CPU, node or GPU that does not exist.

    Example:
        ```python
        import numapin

        plan = numapin.make_plan(numapin.discover(), numapin.Request(bind=numapin.Bind.EXCLUSIVE, num_ranks=2))
        print([rank.reason for rank in plan.ranks])
        ```
    """
    # Imported here because each rank reads its slice of a plan through this module before its own program starts.
    from numapin.plan.cpus import allot

    machine, drafts = allot(topology, request)
    ranks = tuple(_with_memory(machine, request, draft) for draft in drafts)
    return Plan(
        bind=request.bind,
        memory=request.policy,
        ranks=ranks,
        warnings=(*topology.warnings, *inexact_warnings(ranks), *_idle_warning(machine, request, ranks)),
    )


def _with_memory(machine: UsableMachine, request: Request, draft: Draft) -> RankPlan:
    from numapin.plan.memory import memory_of

    draft, memory, nodes = memory_of(machine, request, draft)
    gpu = draft.gpu
    return RankPlan(
        local_rank=draft.local_rank,
        gpu=None if gpu is None else GpuRef(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci),
        node=draft.home,
        cpus=draft.cpus,
        nodes=nodes,
        memory=memory,
        num_threads=draft.num_threads,
        exact=draft.exact,
        reason="; ".join(draft.why),
    )


def inexact_warnings(ranks: tuple[RankPlan, ...]) -> list[str]:
    """Say once each why ranks got less than was asked."""
    why: dict[str, list[int]] = {}
    for rank in ranks:
        if not rank.exact:
            why.setdefault(rank.reason, []).append(rank.local_rank)
    return [f"rank{'s' if len(told) > 1 else ''} {cpu_set.render(told)}: {reason}" for reason, told in why.items()]


def _idle_warning(machine: UsableMachine, request: Request, ranks: tuple[RankPlan, ...]) -> tuple[str, ...]:
    """Say how many CPUs stay idle on nodes without a rank that `--bind socket` would use."""
    if request.bind in (Bind.NONE, Bind.SOCKET):
        return ()
    homes = {rank.node for rank in ranks if rank.node is not None}
    reachable = CpuSet().union(*(machine.package_nodes(home) for home in homes)) if homes else CpuSet()
    used = CpuSet().union(*(rank.cpus for rank in ranks))
    idle = sorted(n for n in reachable - homes if machine.node_cpus[n] and not machine.node_cpus[n] & used)
    if not idle:
        return ()
    count = sum(len(machine.node_cpus[node]) for node in idle)
    return (f"{count} CPUs of nodes {CpuSet(idle)}, which have no rank, stay idle; --bind socket uses them",)
