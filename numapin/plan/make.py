"""Stage 2: a machine and a request become a plan. The same input gives the same plan.

`make_plan` lists the steps; the functions below it follow in that order (step 7 is `Topology.nearest_nics`).
`add_doubts` adds what the machine's description leaves open. A rank is a `Draft` until all steps are done. Each step
adds its reason to the draft, so that a plan explains itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, cycle, islice
from math import ceil, inf
from typing import TYPE_CHECKING

from numapin.base.cpu_set import CpuSet
from numapin.base.text import counted, listed, not_none
from numapin.errors import PlanError, UsageError
from numapin.plan.gpus import rank_gpus
from numapin.plan.model import GpuRef, Plan, RankPlan
from numapin.plan.request import Bind, Memory
from numapin.plan.usable import UsableMachine
from numapin.topology.address import pci_order
from numapin.topology.model import NodeKind
from numapin.topology.vendors import GpuVendor, support_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numapin.plan.request import Request
    from numapin.topology.model import Core, Gpu, Topology


def make_plan(topology: Topology, request: Request) -> Plan:
    """Decide which CPUs and memory each rank of this host uses.

    1. Usable CPUs are the allowed ones without `reserve_cpus`; without SMT, only the lowest of each core.
    2. Rank n uses GPU n mod G. Without GPUs, ranks are spread over the nodes, those with memory first.
    3. A rank's home is its GPU's node; a home without usable CPUs is replaced by the nearest node that has some.
    4. The mode makes a pool of CPUs of the home.
    5. Ranks of one pool share it, or split it by whole cores (`exclusive`, `cpus_per_rank`), in the order of their
       GPUs' PCI addresses, so that renumbering GPUs moves no CPUs. Of several nodes, a rank's own comes first. Fast
       cores are taken first, evenly.
    6. A rank's thread count is its part of the physical cores of its pool.
    7. Its NICs are the nearest of its GPU (`Topology.nearest_nics`).
    8. Its memory is on its GPU's node (the package's nodes for `socket`), or on the nearest node with allowed memory.
       Where nodes of GPU memory exist, pages stay on nodes with CPUs.

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
    plan, _ = plan_and_rank_warnings(topology, request)
    return plan


def plan_and_rank_warnings(topology: Topology, request: Request) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan, and those of its warnings that are about ranks, not about the machine."""
    machine = UsableMachine(topology, usable_cpus(topology, request))  # step 1 of `make_plan`
    drafts = assign_gpus(machine, request)  # step 2
    assign_pools(machine, request, drafts)  # steps 3 and 4
    assign_cpus(machine, request, drafts)  # steps 5 and 6
    nearest_nics = topology.nearest_nics
    ranks = []
    for draft in drafts:
        add_doubts(topology, request, draft)
        gpu = draft.gpu
        nics = None if gpu is None else nearest_nics.get(gpu.index)  # step 7
        if request.nic_env and (nics is None or not nics.has_verbs):
            missing = "no GPU is known" if gpu is None else "no RDMA NIC is known near its GPU"
            if nics is not None:
                missing = "its NIC is one of Slingshot, which has no verbs device"
            draft.because(f"--nic-env {','.join(request.nic_env)} sets nothing: {missing}", exact=False)
        assign_memory(machine, request, draft)  # step 8
        ranks.append(
            RankPlan(
                local_rank=draft.local_rank,
                gpu=None if gpu is None else GpuRef(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci),
                node=draft.home,
                cpus=draft.cpus,
                nodes=draft.nodes,
                memory=draft.memory,
                num_threads=draft.num_threads,
                exact=not draft.shortfalls,
                reason="; ".join(draft.why),
                within=draft.within,
                nics=None if nics is None else nics.names,
                nics_reason=None if nics is None else nics.reason,
                nic_env=request.nic_env if nics is not None and nics.has_verbs else (),
            )
        )
    of_ranks = _rank_warnings(ranks, drafts)
    warnings = (*topology.warnings, *of_ranks, *_idle_warnings(machine, request, ranks))
    return Plan(bind=request.bind, memory=request.policy, ranks=tuple(ranks), warnings=warnings), of_ranks


def default_num_ranks(topology: Topology, *, is_this_host: bool = True) -> int | None:
    """Return the default number of ranks: None, which is one per GPU, or 1 if no driver reports a GPU.

    The file of another machine may lack what its driver reports, so its GPUs count in any case.
    """
    return 1 if is_this_host and not topology.has_usable_gpu else None


@dataclass(slots=True)
class Draft:
    """A rank while it is being planned.

    `home` is the node that the rank belongs to; None: it has none, or it is unknown. A rank that is not `bound` gets
    all usable CPUs. `shortfalls` are the reasons in `why` for which it gets less than was requested.
    """

    local_rank: int
    gpu: Gpu | None
    home: int | None
    bound: bool = False
    pool: CpuSet = CpuSet()
    cpus: CpuSet = CpuSet()
    num_threads: int = 1
    memory: Memory = Memory.NONE
    nodes: CpuSet = CpuSet()
    within: CpuSet | None = None
    why: list[str] = field(default_factory=list)
    shortfalls: list[str] = field(default_factory=list)

    def because(self, why: str, *, exact: bool = True) -> None:
        """Add a reason, and whether the rank still gets all that was requested."""
        self.why.append(why)
        if not exact:
            self.shortfalls.append(why)


# --- 1. usable CPUs --------------------------------------------------------------------------------------------------


def usable_cpus(topology: Topology, request: Request) -> CpuSet:
    """Return the CPUs that ranks may use. Raises UsageError or PlanError."""
    online = topology.cpus
    unknown = request.reserve_cpus - online
    if unknown:
        raise UsageError(
            f"--reserve-cpus: CPUs {unknown} do not exist; online are {online}", "see them with: numapin topo"
        )
    if not online:
        hint = "see what it has, with the same --machine or --root: numapin topo --json"
        raise PlanError(f"{topology.source} lists no CPUs, so there is nothing to plan with", hint)
    allowed = topology.allowed.cpus & online  # a machine file may allow CPUs that are offline
    usable = allowed - request.reserve_cpus
    if not request.smt:
        threads = ([cpu for cpu in core.cpus if cpu in usable] for core in topology.cores)
        usable = CpuSet(min(left) for left in threads if left)
    if not usable:
        see = "see the field `allowed`, with the same --machine or --root, of: numapin topo --json"
        if topology.source == "live":
            see = "see what is allowed with: grep Cpus_allowed_list /proc/self/status"
        raise PlanError(
            f"no CPU is left: allowed are {allowed or 'none'}, --reserve-cpus takes {request.reserve_cpus or 'none'}",
            see,
        )
    if (request.cpus_per_rank or 0) > len(usable):
        raise PlanError(
            f"--cpus-per-rank {request.cpus_per_rank}: ranks may use {counted(len(usable), 'CPU')} in all ({usable})",
            "ask for fewer CPUs per rank",
        )
    return usable


# --- 2. which GPU each rank uses -------------------------------------------------------------------------------------


def assign_gpus(machine: UsableMachine, request: Request) -> list[Draft]:
    """Draft each rank at its GPU, or on a node if there are no GPUs, with the reason, and whether it is bound."""
    gpus = rank_gpus(machine.topology, request)
    num_ranks = request.num_ranks or max(1, len(gpus))
    if request.rank_gpus and num_ranks > len(gpus):
        raise UsageError(
            f"rank_gpus names {counted(len(gpus), 'GPU')} for {counted(num_ranks, 'rank')}", "name the GPU of each rank"
        )
    gpu_of_rank = enumerate(islice(cycle(gpus or (None,)), num_ranks))
    drafts = [Draft(local_rank=rank, gpu=gpu, home=gpu.node if gpu else None) for rank, gpu in gpu_of_rank]

    if request.bind is Bind.NONE:
        for draft in drafts:
            draft.because("--bind none: all allowed CPUs")
    elif gpus:
        vendor = next((gpu.vendor for gpu in machine.topology.vendor_gpus), None)
        remedy = support_of(vendor).order_remedy
        for draft in drafts:
            gpu = draft.gpu
            if gpu is None:
                draft.because("; ".join(filter(None, ("not bound: its GPU is unknown", remedy))), exact=False)
                continue
            name = f"GPU {gpu.index}" + (f" ({gpu.pci})" if gpu.pci else "")
            draft.bound = gpu.node is not None
            if draft.bound:
                draft.because(f"{name} is on node {gpu.node} ({gpu.node_source})")
            else:
                draft.because(f"not bound: the node of {name} is unknown", exact=False)
    elif not machine.nodes_with_usable_cpus:
        for draft in drafts:
            draft.because("not bound: no node has usable CPUs", exact=False)
    else:  # neighboring ranks side by side, on nodes that are far apart
        nodes = sorted(_far_apart(machine, num_ranks))
        for draft in drafts:
            draft.home, draft.bound = nodes[draft.local_rank * len(nodes) // num_ranks], True
            draft.because(f"no GPU: rank {draft.local_rank} of {num_ranks} placed on node {draft.home}")
    return drafts


def _far_apart(machine: UsableMachine, count: int) -> list[int]:
    """Choose up to `count` nodes: the lowest first, then repeatedly the one farthest from the chosen ones.

    Nodes with usable memory come before all others. The farthest node is the one whose nearest chosen node is farthest.
    A tie goes to the node with the larger sum of distances to the chosen ones, which fills packages evenly, then to the
    lowest.
    """
    by_id = {node.id: node for node in machine.nodes_with_usable_cpus}
    chosen: list[int] = []
    candidates = dict.fromkeys(by_id, (inf, 0.0))  # the distance to the nearest chosen node, and the sum of distances
    while candidates and len(chosen) < count:
        pick = max(candidates, key=lambda node: (node in machine.memory_nodes, *candidates[node], -node))
        del candidates[pick]
        chosen.append(pick)
        for node, (nearest, total) in candidates.items():
            distance = by_id[pick].distance_to(node)
            candidates[node] = min(nearest, distance), total + distance
    return chosen


# --- 3. and 4. the pool of CPUs that a rank draws from ---------------------------------------------------------------


def assign_pools(machine: UsableMachine, request: Request, drafts: list[Draft]) -> None:
    """Give each draft its pool; with `core-complex`, one L3 group of its node."""
    pool_of = cache(lambda home: _pool_of(machine, home, by_package=request.bind is Bind.SOCKET))
    for draft in drafts:
        draft.pool = machine.usable
        if draft.bound and draft.home is not None:
            draft.pool, draft.bound, reasons = pool_of(draft.home)
            for why, exact in reasons:
                draft.because(why, exact=exact)
    if request.bind is Bind.CORE_COMPLEX:
        for group in _groups(drafts):
            if group[0].bound:
                _assign_l3_groups(machine, group)


def _pool_of(machine: UsableMachine, home: int, *, by_package: bool) -> tuple[CpuSet, bool, Sequence[tuple[str, bool]]]:
    """Return the CPUs of a node or its package; of the nearest node with usable CPUs if there are none.

    Also returns whether ranks are bound to them, and reasons, each with whether ranks still get all that was requested.
    """
    reasons = []
    source = home
    if not any(machine.node_cpus.get(node) for node in (machine.package_nodes(home) if by_package else {home})):
        nearest = machine.nearest(home, machine.nodes_with_usable_cpus)
        if nearest is None:
            return machine.usable, False, [("no node has usable CPUs", False)]
        source = nearest.id
        distance = machine.nodes[home].distances.get(source, "unknown")
        reasons.append((f"no usable CPU on node {home}; node {source} is the nearest (distance {distance})", False))

    nodes, place = CpuSet({source}), f"node {source}"
    package = machine.nodes[source].package
    if by_package and package is not None:
        nodes = machine.package_nodes(source).intersection(machine.node_cpus)
        place = f"socket {package} ({listed('node', nodes)})"
    cpus, there = machine.cpus_of(nodes)
    whole = counted(len(there), "CPU")
    why = f"all {whole} of {place}" if cpus == there else f"{len(cpus)} usable of {whole} of {place}"
    reasons.append((why, True))

    unknown = CpuSet(node.id for node in machine.cpu_nodes if node.package is None)
    if by_package and unknown:
        nodes_without = listed("node", {source} if package is None else unknown)
        reasons.append((f"the socket of {nodes_without} is unknown", False))
    return cpus, True, reasons


def _assign_l3_groups(machine: UsableMachine, group: list[Draft]) -> None:
    """Assign the L3 groups of a node to its ranks, the largest first; if there are more ranks, groups are shared."""
    pool = group[0].pool
    by_l3: dict[int | None, list[Core]] = defaultdict(list)
    for core in machine.cores(pool):
        by_l3[core.l3].append(core)
    if not by_l3 or None in by_l3:
        for draft in group:
            draft.because("the L3 caches are unknown, the whole node is used", exact=False)
        return
    pools = sorted(map(machine.usable_cpus, by_l3.values()), key=lambda cpus: (-len(cpus), min(cpus)))

    # Groups with fast cores come first, unless some ranks would then have all fast cores and others none.
    num_fast = {cpus: machine.num_fast(machine.cores(cpus)) for cpus in pools}
    fast_first = sorted(pools, key=lambda cpus: -num_fast[cpus])
    num_fast_of_ranks = [num_fast[cpus] for cpus in fast_first[: len(group)]]
    if max(num_fast_of_ranks) - min(num_fast_of_ranks) <= 1:
        pools = fast_first

    rating = machine.rating_of(pool)
    for number, draft in enumerate(group):
        draft.pool = pools[number % len(pools)]
        draft.because(f"L3 group {number % len(pools) + 1} of {len(pools)}: {counted(len(draft.pool), 'CPU')}")
        if rating:
            draft.because(machine.why_fast(machine.cores(draft.pool), rating))


# --- 5. and 6. sharing and splitting a pool --------------------------------------------------------------------------


def assign_cpus(machine: UsableMachine, request: Request, drafts: list[Draft]) -> None:
    """Let the ranks of each pool share its CPUs, or split them by whole cores."""
    has_own = request.bind is Bind.EXCLUSIVE or request.cpus_per_rank is not None
    anywhere = [draft.local_rank for draft in drafts if not draft.bound]
    taken: set[int] = set()  # pools overlap only if firmware lists a CPU on two nodes
    for group in _groups(drafts):
        is_bound, pool = group[0].bound, group[0].pool
        if has_own and is_bound:
            _split(machine, request, group, machine.cores(pool - taken))
            taken.update(*(draft.cpus for draft in group))
            if anywhere:
                for draft in group:
                    others = listed("rank", anywhere)
                    draft.because(f"not exclusive: {others} may run on these CPUs, not being bound", exact=False)
            continue
        sharers = len(group) if is_bound else len(drafts)  # ranks that are not bound share the cores with all ranks
        num_threads = max(1, len(machine.cores(pool)) // sharers)
        for draft in group:
            draft.cpus, draft.num_threads = pool, num_threads
            if sharers > 1:
                draft.because(f"CPUs shared by {sharers} ranks")


def _groups(drafts: Iterable[Draft]) -> list[list[Draft]]:
    """Group ranks by pool, bound ones apart from others; each group is in the order of its GPUs' PCI addresses."""
    groups: dict[tuple[bool, CpuSet], list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.bound, draft.pool].append(draft)
    return [sorted(group, key=_pci_order) for group in groups.values()]


def _pci_order(draft: Draft) -> tuple[tuple[int, ...], str, int]:
    gpu = draft.gpu
    return ((), "", draft.local_rank) if gpu is None else (pci_order(gpu.pci), gpu.uuid or "", draft.local_rank)


def _split(machine: UsableMachine, request: Request, group: list[Draft], cores: list[Core]) -> None:
    """Split cores evenly, fast cores too. Fewer cores than ranks are assigned in turn, unless they are exclusive."""
    if len(cores) < len(group):
        if request.bind is Bind.EXCLUSIVE or not cores:
            homes = listed("node", set(not_none(draft.home for draft in group)))
            usable = f"{counted(len(cores), 'usable core')} (CPUs {machine.usable_cpus(cores) or 'none'})"
            raise PlanError(
                f"too few exclusive cores for {counted(len(group), 'rank')} on {homes}: {usable}",
                "reserve fewer CPUs (--reserve-cpus), share them (--bind node), or start fewer ranks",
            )
        why = f"{counted(len(group), 'rank')} share {counted(len(cores), 'core')}"
        for draft, core in zip(group, cycle(cores), strict=False):
            draft.cpus, draft.num_threads = core.cpus & machine.usable, 1
            draft.because(why, exact=False)
        return

    rating, allowed = machine.rating_of(group[0].pool), machine.topology.allowed.cpus
    sharers = len(group)
    for draft, own in zip(group, _shares(machine, group, cores), strict=True):
        share, cpus = own, machine.usable_cpus(own)
        wanted = request.cpus_per_rank or len(cpus)
        if len(cpus) < wanted:
            cause = f": {sharers} ranks share these CPUs" if sharers > 1 else ""
            draft.because(f"{counted(len(cpus), 'CPU')} instead of {wanted}{cause}", exact=False)
        else:
            if len(cpus) > wanted:  # whole cores first; if the last one gives one thread, no rank gets its other
                in_core_order = chain.from_iterable(sorted(core.cpus) for core in share)
                cpus = CpuSet(islice(filter(machine.usable.__contains__, in_core_order), wanted))
                share = machine.cores(cpus)
            split = f" ({sharers} ranks split these CPUs)" if sharers > 1 else ""
            taken = request.reserve_cpus | (CpuSet().union(*(core.cpus for core in share)) - allowed)
            shared = sum(not core.cpus.isdisjoint(taken) for core in share)
            whole = counted(len(share) - shared, "exclusive core")
            if shared:
                whole += f" and {counted(shared, 'core')} with a thread that is reserved or not allowed"
            draft.because(whole + split)
        draft.cpus, draft.num_threads = cpus, len(share)
        if rating:
            draft.because(machine.why_fast(share, rating))


def _shares(machine: UsableMachine, group: Sequence[Draft], cores: Sequence[Core]) -> list[list[Core]]:
    """Split the cores of a pool evenly; in a pool of several nodes, each rank gets those of its own node first.

    Fast cores are split evenly, too, within one where the own nodes have enough others.
    """
    if len({core.node for core in cores}) == 1:
        return machine.even_shares(cores, len(group))
    own_shares = {
        node: iter(machine.even_shares([core for core in cores if core.node == node], number))
        for node, number in Counter(draft.home for draft in group).items()
    }
    most_fast = ceil(machine.num_fast(cores) / len(group))
    sizes = [len(cores) // len(group) + (place < len(cores) % len(group)) for place in range(len(group))]
    shares = []
    for draft, size in zip(group, sizes, strict=True):
        own = next(own_shares[draft.home])
        fast = list(filter(machine.is_fast, own))  # they come first
        shares.append([*fast[:most_fast], *own[len(fast) :], *fast[most_fast:]][:size])

    # Cores of other nodes fill the shares up: fast ones where the fewest are, the others side by side.
    taken = {core.id for share in shares for core in share}
    left = [core for core in cores if core.id not in taken]
    for core in filter(machine.is_fast, left):
        short = [share for share, size in zip(shares, sizes, strict=True) if len(share) < size]
        min(short, key=machine.num_fast).append(core)
    others = (core for core in left if not machine.is_fast(core))
    return [[*share, *islice(others, size - len(share))] for share, size in zip(shares, sizes, strict=True)]


# --- what the machine's description leaves open ----------------------------------------------------------------------


def add_doubts(topology: Topology, request: Request, draft: Draft) -> None:
    """Add the facts that the machine's description leaves open: a plan that stands on an assumption is not exact."""
    takes_home_memory = request.policy in (Memory.PREFERRED, Memory.BIND) and request.memory_nodes is None
    needs_node = draft.bound or (request.bind is Bind.NONE and takes_home_memory)  # for its CPUs or its memory
    if needs_node and draft.home in topology.doubtful_nodes:
        draft.because(f"it is uncertain which CPUs belong to node {draft.home}", exact=False)
    gpu = None if topology.gpu_order_known else draft.gpu
    if gpu is not None and (needs_node or request.nic_env):
        draft.because("the order of the GPUs is assumed, so the rank may use another GPU", exact=False)
    elif gpu is not None and request.num_ranks is None and gpu.vendor is GpuVendor.AMD and gpu.uuid is None:
        # A GPU that is known as a PCI device only may have partitions.
        draft.because("how many partitions the GPUs have is unknown, so each counts as one", exact=False)
    if not topology.allowed_known:
        draft.because("it is unknown which CPUs and nodes may be used, so all count as allowed", exact=False)
    if not topology.siblings_known:
        draft.num_threads = max(1, draft.num_threads // 2)
        why = "which CPUs share a core is unknown, so ranks may share cores; two threads per core are assumed"
        draft.because(why, exact=False)


# --- 8. memory -------------------------------------------------------------------------------------------------------


def assign_memory(machine: UsableMachine, request: Request, draft: Draft) -> None:
    """Give a rank its memory policy and the policy's nodes. Raises UsageError for a node without usable host memory."""
    policy, memory_ids = request.policy, CpuSet(machine.memory_nodes)
    draft.memory, draft.nodes = Memory.NONE, machine.nodes_under(draft.cpus)
    if request.memory_nodes is not None:
        nodes = machine.topology.nodes
        host = CpuSet(node.id for node in nodes if node.kind is not NodeKind.GPU and node.memory_bytes != 0)
        usable = machine.topology.allowed.nodes & host
        unusable = request.memory_nodes - usable
        if unusable or not request.memory_nodes:
            why = "no node is named"
            if unusable:
                has = "has" if len(unusable) == 1 else "have"
                why = f"{listed('node', unusable)} {has} no host memory that this process may use"
            raise UsageError(f"--memory: {why}; usable: {usable or 'none'}", "see them with: numapin topo")
        draft.memory, draft.nodes = policy, request.memory_nodes
    elif policy in (Memory.NONE, Memory.LOCAL):
        draft.memory = policy
    elif len(machine.nodes) == 1:
        draft.because("one NUMA node: all memory is on it")
    elif policy is Memory.INTERLEAVE and memory_ids:
        draft.memory, draft.nodes = policy, memory_ids
        _doubt_memory(machine, draft)
    elif draft.home is None or not memory_ids:
        draft.because(f"no usable node for --memory {policy}", exact=request.memory is None)
    else:
        # The home's, or the nearest with allowed memory, even if the CPUs had to come from another node.
        draft.memory = policy
        wanted = machine.package_nodes(draft.home) if request.bind is Bind.SOCKET else {draft.home}
        draft.nodes = memory_ids & wanted
        nearest = None if draft.nodes else machine.nearest(draft.home, machine.memory_nodes.values())
        if nearest is None:
            _doubt_memory(machine, draft)
        else:
            draft.nodes = CpuSet({nearest.id})
            why = f"no allowed memory on node {draft.home}; node {nearest.id} is the nearest"
            draft.because(why, exact=False)
    if machine.gpu_memory and draft.memory is not Memory.BIND:
        _keep_out_of_gpu_memory(machine, request, draft)


def _keep_out_of_gpu_memory(machine: UsableMachine, request: Request, draft: Draft) -> None:
    """Keep pages out of GPU memory, or say why that is impossible.

    Every policy but `bind` falls back to any other node when its own are full, the page cache included (mm/mempolicy.c,
    "normal fallback"), and thus to GPU memory. `bind` takes the node that is nearest to the CPU that touches a page, as
    `local` does, and has no fallback. On CPUs of the preferred nodes, `bind` over the host's nodes is thus `preferred`
    without the spill.
    """
    gpu_memory = f"GPU memory ({listed('node', machine.gpu_memory)})"
    host = CpuSet(machine.memory_nodes) | (request.memory_nodes or CpuSet())
    if request.policy in (Memory.NONE, Memory.INTERLEAVE) or not host:
        draft.because(f"with --memory {request.policy}, pages may go to {gpu_memory} when the host's memory is full")
        return
    draft.because(f"pages stay on {listed('node', host)}: {gpu_memory} is never used for them")
    if draft.memory is Memory.PREFERRED and not machine.nodes_under(draft.cpus) <= draft.nodes:
        nodes = listed("node", draft.nodes)
        why = f"{nodes} cannot be preferred from CPUs of other nodes; pages go to the CPU's own node"
        draft.because(why, exact=False)
    if draft.memory is Memory.NONE:
        draft.memory = Memory.LOCAL
    draft.within = host


def _doubt_memory(machine: UsableMachine, draft: Draft) -> None:
    """Mark a rank as not exact if it is unknown whether a node of its policy has memory at all."""
    unknown = CpuSet(node for node in draft.nodes if machine.nodes[node].memory_bytes is None)
    if unknown:
        draft.because(f"the memory of {listed('node', unknown)} is unknown", exact=False)


# --- warnings --------------------------------------------------------------------------------------------------------


def _rank_warnings(ranks: Sequence[RankPlan], drafts: Sequence[Draft]) -> tuple[str, ...]:
    """Warn if ranks share a GPU, and once for each reason why ranks get less than was requested."""
    warnings = []
    num_ranks_of = Counter(rank.gpu for rank in ranks if rank.gpu is not None)
    most = max(num_ranks_of.values(), default=1)
    if most > 1:
        sharers = f"{most} ranks" if min(num_ranks_of.values()) == most else f"up to {most} ranks"
        gpus = counted(len(num_ranks_of), "GPU")
        warnings.append(f"{num_ranks_of.total()} ranks on {gpus}: each GPU is shared by {sharers}")
    ranks_by_reason: dict[str, list[int]] = defaultdict(list)
    for draft in drafts:
        if draft.shortfalls:
            ranks_by_reason["; ".join(draft.shortfalls)].append(draft.local_rank)
    return *warnings, *(f"{listed('rank', numbers)}: {reason}" for reason, numbers in ranks_by_reason.items())


def _idle_warnings(machine: UsableMachine, request: Request, ranks: Sequence[RankPlan]) -> tuple[str, ...]:
    """Warn of idle CPUs: on nodes without a rank that `--bind socket` would use, on other packages, in L3 groups."""
    if request.bind is Bind.NONE:
        return ()
    homes = set(not_none(rank.node for rank in ranks))
    reachable = CpuSet().union(*map(machine.package_nodes, homes))
    used: set[int] = set().union(*(rank.cpus for rank in ranks))
    unused = (node for node in machine.nodes_with_usable_cpus if machine.node_cpus[node.id].isdisjoint(used))
    idle = CpuSet(node.id for node in unused) - homes
    near, far = idle & reachable, idle - reachable

    warnings = []
    if near and request.bind is not Bind.SOCKET:
        have = "has" if len(near) == 1 else "have"
        warnings.append(f"{_idle(machine, near)}, which {have} no rank, stay idle; --bind socket uses them")
    if far:
        visible = machine.topology.visible_gpus
        gpus = CpuSet(gpu.index for gpu in visible if gpu.node in far)
        remedy = "no GPU is there; --bind none uses them" if visible else "more ranks use them"
        if gpus:
            be = "is" if len(gpus) == 1 else "are"
            remedy = f"{listed('gpu', gpus)} {be} there: name GPUs with --gpus, or start more ranks"
        warnings.append(f"{_idle(machine, far)}, on sockets without a rank, stay idle; {remedy}")
    if request.bind is Bind.CORE_COMPLEX and request.cpus_per_rank is None:
        partly = CpuSet(node.id for node in machine.nodes_with_usable_cpus if node.id not in idle)
        left = machine.cpus_of(partly)[0] - used
        if left:
            where = listed("node", machine.nodes_under(left))
            warnings.append(
                f"{counted(len(left), 'CPU')} of {where}, in L3 groups without a rank, stay idle; --bind node uses them"
            )
    return tuple(warnings)


def _idle(machine: UsableMachine, nodes: CpuSet) -> str:
    return f"{counted(sum(len(machine.node_cpus[node]) for node in nodes), 'CPU')} of {listed('node', nodes)}"
