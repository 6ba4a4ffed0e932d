"""Stage 2: which CPUs and which memory each rank must use. Pure.

Comes in: a `Topology` and a `Request`. Goes out: a `Plan` (schema numapin.plan/1): what each rank gets, and why. The
same input gives the same plan.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.base.plural import counted, listed
from numapin.plan.cpus import assign_cpus
from numapin.plan.memory import memory_of
from numapin.plan.model import GpuRef, Plan, RankPlan
from numapin.plan.nics import with_nic_doubts, with_nics
from numapin.plan.request import Bind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.plan.cpus import Draft
    from numapin.plan.memory import PlacedDraft
    from numapin.plan.request import Request
    from numapin.plan.usable import UsableMachine
    from numapin.topology.model import Topology


def default_num_ranks(topology: Topology, *, is_this_host: bool = True) -> int | None:
    """Return the default number of ranks: None, which is one per GPU, or 1 if no driver reports a GPU.

    The file of another machine may lack what its driver reports, so its GPUs count in any case.
    """
    return 1 if is_this_host and not topology.has_usable_gpu else None


def make_plan(topology: Topology, request: Request) -> Plan:
    """Decide which CPUs and memory each rank of this host uses.

    1. Usable CPUs are the allowed ones without `reserve_cpus`; without SMT, only the lowest of each core.
    2. Rank n uses GPU n mod G. Without GPUs, ranks are spread over the nodes.
    3. A rank's home is its GPU's node; a home without usable CPUs is replaced by the nearest node that has some.
    4. The mode makes a pool of CPUs of the home.
    5. Ranks of one pool share it, or split it by whole cores (`exclusive`, `cpus_per_rank`), in the order of their
       GPUs' PCI addresses, so that renumbering GPUs moves no CPUs. Fast cores are taken first, evenly.
    6. A rank's thread count is its part of the physical cores of its pool. With `cores_for`, the loader's workers and
       the optimizer's threads get cores of their own, and the main thread the others (`plan/roles.py`).
    7. Its memory is on its GPU's node (the package's nodes for `socket`), or on the nearest node with allowed memory.
       Where nodes of GPU memory exist, pages stay on nodes with CPUs.
    8. Its NICs are the nearest of its GPU (`Topology.nearest_nics`).

    Args:
        topology: The machine.
        request: What the user asked for.

    Returns:
        What each rank gets, with reasons and warnings. The same arguments always give the same plan.

    Raises:
        PlanError: No CPU is left, exclusive ranks outnumber the cores, or `cores_for` leaves no core for a rank's main
            thread.
        UsageError: The request names a CPU, node or GPU that does not exist.

    Example:
        ```python
        import numapin

        plan = numapin.make_plan(numapin.discover(), numapin.Request(bind=numapin.Bind.EXCLUSIVE, num_ranks=2))
        print([rank.reason for rank in plan.ranks])
        ```
    """
    plan, _ = plan_and_rank_warnings(topology, request)
    return plan


def plan_and_rank_warnings(topology: Topology, request: Request) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, and those of its warnings that are about ranks, not about the machine."""
    machine, drafts = assign_cpus(topology, request)
    nearest = topology.nearest_nics
    placed = [memory_of(machine, request, with_nic_doubts(draft, request, nearest)) for draft in drafts]
    ranks = tuple(with_nics(_rank_plan(each), request, nearest) for each in placed)
    of_ranks = (*_shared_gpu_warning(ranks), *_inexact_warnings([each.draft for each in placed]))
    warnings = (*topology.warnings, *of_ranks, *_idle_warnings(machine, request, ranks))
    return Plan(bind=request.bind, memory=request.policy, ranks=ranks, warnings=warnings), of_ranks


def _rank_plan(placed: PlacedDraft) -> RankPlan:
    draft, memory, nodes, within = placed
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
        within=within,
        roles=draft.roles,
    )


def _shared_gpu_warning(ranks: tuple[RankPlan, ...]) -> tuple[str, ...]:
    """Warn if several ranks use one GPU."""
    num_ranks_of = Counter(rank.gpu for rank in ranks if rank.gpu is not None)
    fewest, most = min(num_ranks_of.values(), default=1), max(num_ranks_of.values(), default=1)
    if most == 1:
        return ()
    sharers = f"{most} ranks" if fewest == most else f"up to {most} ranks"
    gpus = counted(len(num_ranks_of), "GPU")
    return (f"{num_ranks_of.total()} ranks on {gpus}: each GPU is shared by {sharers}",)


def _inexact_warnings(drafts: Sequence[Draft]) -> list[str]:
    """Return one warning for each reason why ranks get less than was requested."""
    ranks_by_reason: dict[str, list[int]] = {}
    for draft in drafts:
        if not draft.exact:
            ranks_by_reason.setdefault("; ".join(draft.shortfalls), []).append(draft.local_rank)
    return [f"{listed('rank', numbers)}: {reason}" for reason, numbers in ranks_by_reason.items()]


def _idle_warnings(machine: UsableMachine, request: Request, ranks: tuple[RankPlan, ...]) -> tuple[str, ...]:
    """Warn of idle CPUs: on nodes without a rank that `--bind socket` would use, and on other packages."""
    if request.bind is Bind.NONE:
        return ()
    near, far = _idle_nodes(machine, ranks)
    warnings = []
    if near and request.bind is not Bind.SOCKET:
        warnings.append(f"{_idle(machine, near)}, which {_have(near)} no rank, stay idle; --bind socket uses them")
    if far:
        warnings.append(f"{_idle(machine, far)}, on packages without a rank, stay idle; {_remedy(machine, far)}")
    return tuple(warnings)


def _idle(machine: UsableMachine, nodes: CpuSet) -> str:
    num_cpus = sum(len(machine.node_cpus[node]) for node in nodes)
    return f"{counted(num_cpus, 'CPU')} of {listed('node', nodes)}"


def _have(nodes: CpuSet) -> str:
    return "has" if len(nodes) == 1 else "have"


def _remedy(machine: UsableMachine, nodes: CpuSet) -> str:
    """Return how to use the CPUs of nodes that are far from all ranks."""
    topology = machine.topology
    gpus = CpuSet(gpu.index for gpu in topology.visible_gpus if gpu.node in nodes)
    if gpus:
        be = "is" if len(gpus) == 1 else "are"
        return f"{listed('gpu', gpus)} {be} there: name GPUs with --gpus, or start more ranks"
    return "no GPU is there; --bind none uses them" if topology.visible_gpus else "more ranks use them"


def _idle_nodes(machine: UsableMachine, ranks: tuple[RankPlan, ...]) -> tuple[CpuSet, CpuSet]:
    """Return the nodes with usable CPUs of which no rank uses any: in packages where ranks are at home, and others."""
    homes = set(not_none(rank.node for rank in ranks))
    reachable = CpuSet().union(*map(machine.package_nodes, homes))
    used: set[int] = set().union(*(rank.cpus for rank in ranks))
    idle = CpuSet(node.id for node in machine.open_nodes if machine.node_cpus[node.id].isdisjoint(used)) - homes
    return idle & reachable, idle - reachable
