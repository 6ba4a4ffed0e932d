"""Stage 2, the first half: which CPUs each rank gets. Pure.

Comes in: a `Topology` and a `Request`. Goes out: one `Draft` per rank, with its CPUs, thread count and the reason;
`make.py` adds the memory and makes the `Plan`. The sections are the numbered steps of `make_plan`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, cycle, islice
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.base.plural import counted, listed
from numapin.errors import PlanError, UsageError
from numapin.plan.doubts import with_doubts
from numapin.plan.fast import even_shares, fast_groups_first, rating_of, why_fast
from numapin.plan.gpus import rank_gpus
from numapin.plan.request import Bind, Request
from numapin.plan.roles import with_roles
from numapin.plan.usable import UsableMachine
from numapin.topology.address import pci_order
from numapin.topology.sources.vendors.table import support_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from numapin.plan.model import RoleCpus
    from numapin.topology.model import Core, Gpu, Node, Topology


def assign_cpus(topology: Topology, request: Request) -> tuple[UsableMachine, list[Draft]]:
    """Return the indexed machine and a draft for each rank, in the order of local ranks."""
    machine = UsableMachine(topology, _usable_cpus(topology, request))
    drafts = [_with_pool(machine, request, draft) for draft in _drafts(machine, request)]
    split = _split(machine, request, drafts)
    if request.cores_for is not None:
        split = with_roles(machine, request.cores_for, sorted(split, key=_seat_order))
    return machine, [with_doubts(machine, request, draft) for draft in split]


class Draft(NamedTuple):
    """A rank while it is being planned. A tuple, because it is copied with changes some six times.

    `home` is the node that the rank belongs to; None: it has none, or it is unknown. A rank that is not `bound` gets
    all usable CPUs. `shortfalls` are the reasons in `why` for which it gets less than was requested.
    """

    local_rank: int
    gpu: Gpu | None
    home: int | None
    pool: CpuSet = CpuSet()
    cpus: CpuSet = CpuSet()
    num_threads: int = 1
    bound: bool = True
    why: tuple[str, ...] = ()
    shortfalls: tuple[str, ...] = ()
    roles: RoleCpus | None = None

    def because(self, why: str, *, exact: bool = True) -> Draft:
        """Add a reason, and whether the rank still gets all that was requested."""
        shortfalls = self.shortfalls if exact else (*self.shortfalls, why)
        return self._replace(why=(*self.why, why), shortfalls=shortfalls)

    @property
    def exact(self) -> bool:
        """Whether the rank gets all that was requested."""
        return not self.shortfalls


# --- 1. usable CPUs --------------------------------------------------------------------------------------------------


def _usable_cpus(topology: Topology, request: Request) -> CpuSet:
    online = topology.cpus
    unknown = request.reserve_cpus - online
    if unknown:
        raise UsageError(
            f"--reserve-cpus: CPUs {unknown} do not exist; online are {online}", "see them with: numapin topo"
        )
    if not online:
        raise PlanError(
            f"{topology.source} lists no CPUs, so there is nothing to plan with", "see what it has: numapin topo --json"
        )
    allowed = topology.allowed.cpus & online  # a machine file may allow CPUs that are offline
    usable = allowed - request.reserve_cpus
    if not request.smt:
        usable = _first_threads(topology.cores, usable)
    if not usable:
        raise PlanError(
            f"no CPU is left: allowed are {allowed or 'none'}, --reserve-cpus takes {request.reserve_cpus or 'none'}",
            _see_allowed(topology),
        )
    return usable


def _see_allowed(topology: Topology) -> str:
    if topology.source == "live":
        return "see what is allowed with: grep Cpus_allowed_list /proc/self/status"
    return "see what is allowed there in the field `allowed` of: numapin topo --json"


def _first_threads(cores: Iterable[Core], usable: CpuSet) -> CpuSet:
    """Return the lowest usable CPU of each core that has one."""
    lowest = (min(filter(usable.__contains__, core.cpus), default=None) for core in cores)
    return CpuSet(not_none(lowest))


# --- 2. which GPU each rank uses -------------------------------------------------------------------------------------


def _drafts(machine: UsableMachine, request: Request) -> list[Draft]:
    """Draft each rank at its GPU, or on a node if there are no GPUs, with the reason, and whether it is bound."""
    gpus = rank_gpus(machine.topology, request)
    num_ranks = request.num_ranks or max(1, len(gpus))
    _require_gpu_of_each(request, len(gpus), num_ranks)
    drafts = list(map(_unbound, range(num_ranks), cycle(gpus or (None,))))
    if request.bind is Bind.NONE:
        return [draft.because("--bind none: all allowed CPUs") for draft in drafts]
    if not gpus:
        return _spread(machine, drafts)
    vendor = next((gpu.vendor for gpu in machine.topology.vendor_gpus), None)
    remedy = support_of(vendor).order_remedy
    return [_near_gpu(draft, draft.gpu, remedy) for draft in drafts]


def _require_gpu_of_each(request: Request, num_gpus: int, num_ranks: int) -> None:
    if request.rank_gpus and num_ranks > num_gpus:
        raise UsageError(
            f"rank_gpus names {counted(num_gpus, 'GPU')} for {counted(num_ranks, 'rank')}", "name the GPU of each rank"
        )


def _unbound(rank: int, gpu: Gpu | None) -> Draft:
    return Draft(local_rank=rank, gpu=gpu, home=gpu.node if gpu else None, bound=False)


def _near_gpu(draft: Draft, gpu: Gpu | None, remedy: str) -> Draft:
    if gpu is None:
        return draft.because("; ".join(filter(None, ("not bound: its GPU is unknown", remedy))), exact=False)
    name = f"GPU {gpu.index}" + (f" ({gpu.pci})" if gpu.pci else "")
    if gpu.node is None:
        return draft.because(f"not bound: the node of {name} is unknown", exact=False)
    return draft._replace(bound=True).because(f"{name} is on node {gpu.node} ({gpu.node_source})")


def _spread(machine: UsableMachine, drafts: list[Draft]) -> list[Draft]:
    """Spread ranks without GPUs: over nodes as far apart as possible, neighboring ranks side by side."""
    if not machine.open_nodes:
        return [draft.because("not bound: no node has usable CPUs", exact=False) for draft in drafts]
    nodes = sorted(_far_apart(machine.open_nodes, len(drafts)))
    return [_with_home(draft, nodes[draft.local_rank * len(nodes) // len(drafts)], len(drafts)) for draft in drafts]


def _with_home(draft: Draft, home: int, num_ranks: int) -> Draft:
    why = f"no GPU: rank {draft.local_rank} of {num_ranks} placed on node {home}"
    return draft._replace(home=home, bound=True).because(why)


def _far_apart(nodes: Sequence[Node], count: int) -> list[int]:
    """Choose up to `count` nodes: the lowest first, then repeatedly the one farthest from the chosen ones.

    The farthest node is the one whose nearest chosen node is farthest. A tie goes to the node with the larger sum of
    distances to the chosen ones, which fills packages evenly, then to the lowest.
    """
    by_id = {node.id: node for node in nodes}
    chosen: list[int] = []
    candidates = dict.fromkeys(by_id, (inf, 0.0))  # the distance to the nearest chosen node, and the sum of distances
    while candidates and len(chosen) < count:
        pick = max(candidates, key=lambda node: (*candidates[node], -node))
        del candidates[pick]
        chosen.append(pick)
        for node, (nearest, total) in candidates.items():
            distance = by_id[pick].distance_to(node)
            candidates[node] = min(nearest, distance), total + distance
    return chosen


# --- 3. and 4. the pool of CPUs that a rank draws from ---------------------------------------------------------------


def _with_pool(machine: UsableMachine, request: Request, draft: Draft) -> Draft:
    """Give a draft its pool: the CPUs of its home, or of the nearest node with usable CPUs."""
    if not draft.bound or draft.home is None:
        return draft._replace(pool=machine.usable)
    source = _open_home(machine, request, draft.home)
    if source is None:
        return draft._replace(pool=machine.usable, bound=False).because("no node has usable CPUs", exact=False)
    if source != draft.home:
        distance = machine.nodes[draft.home].distances.get(source, "unknown")
        draft = draft.because(
            f"no usable CPU on node {draft.home}; node {source} is the nearest (distance {distance})", exact=False
        )
    return _POOLS[request.bind](machine, draft, source)


def _open_home(machine: UsableMachine, request: Request, home: int) -> int | None:
    """Return the home, or the nearest node with usable CPUs if the home (for `socket`, its package) has none."""
    reach = machine.package_nodes(home) if request.bind is Bind.SOCKET else {home}
    if any(map(machine.node_cpus.get, reach)):
        return home
    nearest = machine.nearest(home, machine.open_nodes)
    return nearest.id if nearest else None


def _node_pool(machine: UsableMachine, draft: Draft, source: int) -> Draft:
    cpus = machine.node_cpus[source]
    return draft._replace(pool=cpus).because(_part(cpus, machine.nodes[source].cpus, f"node {source}"))


def _socket_pool(machine: UsableMachine, draft: Draft, source: int) -> Draft:
    package = machine.nodes[source].package
    if package is None:
        return _node_pool(machine, draft, source).because(f"the package of node {source} is unknown", exact=False)
    nodes = machine.package_nodes(source)
    cpus, there = machine.cpus_of(nodes)
    draft = draft._replace(pool=cpus).because(_part(cpus, there, f"package {package} ({listed('node', nodes)})"))
    unknown = CpuSet(node.id for node in machine.cpu_nodes if node.package is None)
    return draft.because(f"the package of {listed('node', unknown)} is unknown", exact=False) if unknown else draft


def _part(usable: CpuSet, cpus: CpuSet, place: str) -> str:
    """Say how many of the CPUs of a place are usable."""
    whole = counted(len(cpus), "CPU")
    return f"all {whole} of {place}" if usable == cpus else f"{len(usable)} usable of {whole} of {place}"


_POOLS: Final[dict[Bind, Callable[[UsableMachine, Draft, int], Draft]]] = {
    Bind.NODE: _node_pool,
    Bind.SOCKET: _socket_pool,
    Bind.EXCLUSIVE: _node_pool,
    Bind.CORE_COMPLEX: _node_pool,  # cut into L3 groups once it is known how many ranks draw from the node
}


# --- 5. and 6. sharing and splitting a pool --------------------------------------------------------------------------


def _split(machine: UsableMachine, request: Request, drafts: list[Draft]) -> list[Draft]:
    drafts = _with_l3_groups(machine, request, drafts)
    anywhere = [draft.local_rank for draft in drafts if not draft.bound]
    taken: set[int] = set()  # pools overlap only if firmware lists a CPU on two nodes
    done: list[Draft] = []
    for group in _groups(drafts):
        if _is_split(request, group):
            split = _split_group(machine, request, group, taken)
            taken.update(*(draft.cpus for draft in split))
            done += [_beside(draft, anywhere) for draft in split]
        else:
            done += _shared_group(machine, group, len(drafts))
    return sorted(done, key=attrgetter("local_rank"))


def _with_l3_groups(machine: UsableMachine, request: Request, drafts: list[Draft]) -> list[Draft]:
    """Give each rank an L3 group as its pool if the request asks for that."""
    if request.bind is not Bind.CORE_COMPLEX:
        return drafts
    return list(chain.from_iterable(_dealt_complexes(machine, group) for group in _groups(drafts)))


def _is_split(request: Request, group: list[Draft]) -> bool:
    """Return whether each rank of a group gets CPUs of its own."""
    has_own = request.bind is Bind.EXCLUSIVE or request.cpus_per_rank is not None
    return has_own and group[0].bound


def _beside(draft: Draft, anywhere: list[int]) -> Draft:
    """Mark a rank with CPUs of its own as not exact if other ranks are not bound, and so may run there."""
    if not anywhere:
        return draft
    return draft.because(
        f"not exclusive: {listed('rank', anywhere)} may run on these CPUs, not being bound", exact=False
    )


def _groups(drafts: list[Draft]) -> list[list[Draft]]:
    """Group ranks by pool, bound ones apart from others; each group is in the order of its GPUs' PCI addresses."""
    groups: dict[tuple[bool, CpuSet], list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.bound, draft.pool].append(draft)
    return [sorted(group, key=_seat_order) for group in groups.values()]


def _seat_order(draft: Draft) -> tuple[tuple[int, ...], str, int]:
    gpu = draft.gpu
    if gpu is None:
        return (), "", draft.local_rank
    return pci_order(gpu.pci), gpu.uuid or "", draft.local_rank


def _dealt_complexes(machine: UsableMachine, group: list[Draft]) -> list[Draft]:
    """Deal a node's L3 groups out to its ranks, those with fast cores first, then the largest.

    If there are more ranks, groups are shared.
    """
    if not group[0].bound:
        return group
    pools = _l3_pools(machine, group[0].pool)
    if not pools:
        return [draft.because("the L3 caches are unknown, the whole node is used", exact=False) for draft in group]
    rating, pools = rating_of(machine, group[0].pool), fast_groups_first(machine, pools, len(group))
    complexes = [_in_complex(draft, pools, number % len(pools)) for number, draft in enumerate(group)]
    return [_with_fast(machine, draft, rating) for draft in complexes] if rating else complexes


def _l3_pools(machine: UsableMachine, pool: CpuSet) -> list[CpuSet]:
    """Return the usable CPUs of each L3 cache of a pool, the largest first; none if the L3 of any core is unknown."""
    complexes: dict[int | None, list[Core]] = defaultdict(list)
    for core in machine.cores(pool):
        complexes[core.l3].append(core)
    if None in complexes:
        return []
    return sorted(map(machine.usable_cpus, complexes.values()), key=lambda cpus: (-len(cpus), min(cpus)))


def _in_complex(draft: Draft, pools: list[CpuSet], number: int) -> Draft:
    pool = pools[number]
    return draft._replace(pool=pool).because(f"L3 group {number + 1} of {len(pools)}: {counted(len(pool), 'CPU')}")


def _with_fast(machine: UsableMachine, draft: Draft, rating: str) -> Draft:
    """Add how many of the rank's cores are fast by this rating."""
    return draft.because(why_fast(machine, machine.cores(draft.cpus or draft.pool), rating))


def _shared_group(machine: UsableMachine, group: list[Draft], num_ranks: int) -> list[Draft]:
    """Give every rank of the group the whole pool. Ranks that are not bound share the cores with all ranks."""
    num_cores = len(machine.cores(group[0].pool))
    sharers = len(group) if group[0].bound else num_ranks
    threads = max(1, num_cores // sharers)
    shared = [draft._replace(cpus=draft.pool, num_threads=threads) for draft in group]
    return [draft.because(f"CPUs shared by {sharers} ranks") for draft in shared] if sharers > 1 else shared


def _split_group(machine: UsableMachine, request: Request, group: list[Draft], taken: AbstractSet[int]) -> list[Draft]:
    """Split the pool by whole cores, evenly, fast cores too; the first ranks get the cores that are left over."""
    cores = machine.cores(group[0].pool - taken)
    if len(cores) < len(group):
        return _overcommitted(machine, request, group, cores)
    rating = rating_of(machine, group[0].pool)
    shares = even_shares(machine, cores, len(group))
    split = [_share(machine, request, draft, share, len(group)) for draft, share in zip(group, shares, strict=True)]
    return [_with_fast(machine, draft, rating) for draft in split] if rating else split


def _share(machine: UsableMachine, request: Request, draft: Draft, cores: list[Core], sharers: int) -> Draft:
    """Give a rank its cores, or as many of their CPUs as were requested, the fast ones first."""
    cpus = machine.usable_cpus(cores)
    wanted = request.cpus_per_rank or len(cpus)
    if len(cpus) < wanted:
        cause = f": {sharers} ranks share these CPUs" if sharers > 1 else ""
        why = f"{counted(len(cpus), 'CPU')} instead of {wanted}{cause}"
        return draft._replace(cpus=cpus, num_threads=len(cores)).because(why, exact=False)
    if len(cpus) > wanted:
        cpus = _first_cpus(machine, cores, wanted)
        cores = machine.cores(cpus)
    split = f" ({sharers} ranks split these CPUs)" if sharers > 1 else ""
    why = counted(len(cores), "exclusive core") + split
    return draft._replace(cpus=cpus, num_threads=len(cores)).because(why)


def _first_cpus(machine: UsableMachine, cores: Iterable[Core], wanted: int) -> CpuSet:
    """Take whole cores first; the last core may give only some of its threads, and no other rank gets the rest."""
    in_core_order = chain.from_iterable(sorted(core.cpus) for core in cores)
    return CpuSet(islice(filter(machine.usable.__contains__, in_core_order), wanted))


def _overcommitted(machine: UsableMachine, request: Request, group: list[Draft], cores: list[Core]) -> list[Draft]:
    """Deal out fewer cores than ranks in turn; for exclusive ranks that is an error."""
    if request.bind is Bind.EXCLUSIVE or not cores:
        raise _too_few_cores(machine, group, cores)
    why = f"{counted(len(group), 'rank')} share {counted(len(cores), 'core')}"
    return [
        draft._replace(cpus=core.cpus & machine.usable, num_threads=1).because(why, exact=False)
        for draft, core in zip(group, cycle(cores), strict=False)
    ]


def _too_few_cores(machine: UsableMachine, group: list[Draft], cores: list[Core]) -> PlanError:
    homes = listed("node", set(not_none(draft.home for draft in group)))
    usable = f"{counted(len(cores), 'usable core')} (CPUs {machine.usable_cpus(cores) or 'none'})"
    return PlanError(
        f"too few exclusive cores for {counted(len(group), 'rank')} on {homes}: {usable}",
        "use fewer ranks (--nproc-per-node), reserve fewer CPUs (--reserve-cpus), or share them: --bind node",
        hint_for_fixed_ranks="reserve fewer CPUs (--reserve-cpus), or share them: --bind node",
    )
