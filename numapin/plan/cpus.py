"""Stage 2, the first half: which CPUs each rank gets. Pure.

Comes in: a `Topology` and a `Request`. Goes out: one `Draft` a rank, with its CPUs, thread count and the reason; `plan`
adds the memory and makes the `Plan`. The sections are the numbered steps of `plan.make_plan`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.errors import PlanError, UsageError
from numapin.plan.gpus import rank_gpus
from numapin.plan.request import Bind, Request
from numapin.topology.address import pci_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from numapin.topology.model import Core, Gpu, Node, Topology


def allot(topology: Topology, request: Request) -> tuple[UsableMachine, list[Draft]]:
    """Return the indexed machine and a draft for each rank, in the order of local ranks."""
    machine = UsableMachine(topology, _usable_cpus(topology, request))
    return machine, _split(machine, request, [_pooled(machine, request, seat) for seat in _seats(machine, request)])


# --- the machine as the steps below ask for it -----------------------------------------------------------------------


class UsableMachine:
    """A topology with its usable CPUs, indexed so that each step is a few set operations."""

    def __init__(self, topology: Topology, usable: CpuSet) -> None:
        self.topology = topology
        self.usable = usable
        self.nodes = {node.id: node for node in topology.nodes}
        self.core_of = {cpu: core for core in topology.cores for cpu in core.cpus if cpu in usable}
        self.cpu_nodes = topology.cpu_nodes
        inside = cpu_set.Inside(usable)  # firmware that is wrong lists all CPUs on every node
        self.node_cpus = {node.id: inside.of(node.cpus) for node in self.cpu_nodes}
        self.open_nodes = [node for node in self.cpu_nodes if self.node_cpus[node.id]]
        # A node may have CPUs and no memory (unpopulated channels).
        allowed = topology.allowed.nodes
        self.memory_nodes = [node for node in self.cpu_nodes if node.id in allowed and node.memory_bytes != 0]
        self._node_of = {cpu: node for cpus, node in _last_with(self.cpu_nodes).items() for cpu in cpus}
        self._under: dict[CpuSet, CpuSet] = {}
        self._package_nodes: dict[int, CpuSet] = {}
        self._cpus_of: dict[CpuSet, tuple[CpuSet, CpuSet]] = {}

    def nodes_under(self, cpus: CpuSet) -> CpuSet:
        """Return the nodes that these CPUs belong to; ranks that share a pool ask for the same ones."""
        if cpus not in self._under:
            self._under[cpus] = CpuSet(self._node_of[cpu] for cpu in cpus if cpu in self._node_of)
        return self._under[cpus]

    def cores(self, cpus: Iterable[int]) -> list[Core]:
        """Return the cores of these CPUs, those that share an L3 side by side, then by their lowest CPU."""
        found = {core.id: core for core in (self.core_of[cpu] for cpu in cpus)}
        return sorted(found.values(), key=lambda core: (-1 if core.l3 is None else core.l3, core.id))

    def nearest(self, home: int, candidates: Iterable[Node]) -> Node | None:
        """Return the candidate at the smallest distance from `home`; the lower number wins a tie."""
        return min(candidates, key=lambda node: (self.nodes[home].distance_to(node.id), node.id), default=None)

    def package_nodes(self, node: int) -> CpuSet:
        """Return the nodes with CPUs of this node's package, or the node alone where its package is unknown."""
        if node not in self._package_nodes:
            package = self.nodes[node].package
            members = CpuSet(n.id for n in self.cpu_nodes if package is not None and n.package == package)
            self._package_nodes[node] = members | {node}
        return self._package_nodes[node]

    def cpus_of(self, nodes: CpuSet) -> tuple[CpuSet, CpuSet]:
        """Return the usable CPUs of several nodes with CPUs, and all CPUs of them."""
        if nodes not in self._cpus_of:
            usable = CpuSet().union(*(self.node_cpus[node] for node in nodes))
            self._cpus_of[nodes] = usable, CpuSet().union(*(self.nodes[node].cpus for node in nodes))
        return self._cpus_of[nodes]


def _last_with(nodes: Iterable[Node]) -> dict[CpuSet, int]:
    """Return the last node of those that list the same CPUs, in the order of the nodes."""
    last: dict[CpuSet, int] = {}
    for node in nodes:
        last.pop(node.cpus, None)
        last[node.cpus] = node.id
    return last


_BIND_NONE: Final = "--bind none: all allowed CPUs"


class Draft(NamedTuple):
    """A rank while it is being planned. A tuple: a changed copy, of which planning makes some six, costs the least.

    `home` is the node it belongs to, None where there is none or it is unknown. A rank that is not `bound` gets all
    usable CPUs.
    """

    local_rank: int
    gpu: Gpu | None
    home: int | None
    pool: CpuSet = CpuSet()
    cpus: CpuSet = CpuSet()
    num_threads: int = 1
    bound: bool = True
    exact: bool = True
    why: tuple[str, ...] = ()

    def because(self, why: str, *, exact: bool = True) -> Draft:
        """Add a reason, and whether what it tells is all that was asked."""
        return self._replace(why=(*self.why, why), exact=self.exact and exact)


# --- 1. usable CPUs --------------------------------------------------------------------------------------------------


def _usable_cpus(topology: Topology, request: Request) -> CpuSet:
    unknown = request.reserve_cpus - topology.cpus
    if unknown:
        raise UsageError(
            f"--reserve-cpus: CPUs {unknown} do not exist; online are {topology.cpus}",
            "see them with: numapin topo",
        )
    allowed = topology.allowed.cpus & topology.cpus  # a machine file may allow CPUs that are offline
    usable = allowed - request.reserve_cpus
    if not request.smt:
        usable = CpuSet(_first_of(topology.cores, usable))
    if not usable:
        raise PlanError(
            f"no CPU is left: allowed are {allowed or 'none'}, --reserve-cpus takes {request.reserve_cpus or 'none'}",
            "see what is allowed with: grep Cpus_allowed_list /proc/self/status",
        )
    return usable


def _first_of(cores: Iterable[Core], usable: CpuSet) -> Iterator[int]:
    """Return the lowest usable CPU of each core that has one."""
    for core in cores:
        cpus = [cpu for cpu in core.cpus if cpu in usable]
        if cpus:
            yield min(cpus)


# --- 2. which GPU each rank uses -------------------------------------------------------------------------------------


def _seats(machine: UsableMachine, request: Request) -> list[Draft]:
    """Seat every rank on its GPU, or on a node where there are no GPUs; each seat says why, and whether it is bound."""
    gpus = rank_gpus(machine.topology, request)
    num_ranks = request.num_ranks or max(1, len(gpus))
    if not gpus:
        return _spread(machine, request, num_ranks)
    if request.rank_gpus is not None and num_ranks > len(gpus):
        raise UsageError(
            f"--virtual-local-rank shows each rank one GPU; there are {num_ranks} ranks and {len(gpus)} GPUs",
            "start fewer ranks with --nproc-per-node",
        )
    return [_seat(rank, gpus[rank % len(gpus)], request) for rank in range(num_ranks)]


def _seat(rank: int, gpu: Gpu | None, request: Request) -> Draft:
    free = Draft(local_rank=rank, gpu=gpu, home=gpu.node if gpu else None, bound=False)
    if request.bind is Bind.NONE:
        return free.because(_BIND_NONE)
    if gpu is None:
        return free.because(
            "not bound: its GPU is unknown; CUDA_DEVICE_ORDER=PCI_BUS_ID gives CUDA a known order", exact=False
        )
    name = f"GPU {gpu.index}" + (f" ({gpu.pci})" if gpu.pci else "")
    if gpu.node is None:
        return free.because(f"not bound: the node of {name} is unknown", exact=False)
    return free._replace(bound=True).because(f"{name} is on node {gpu.node} ({gpu.node_source})")


def _spread(machine: UsableMachine, request: Request, num_ranks: int) -> list[Draft]:
    """Spread ranks without GPUs: over nodes that lie as far apart as possible, neighbouring ranks side by side."""
    free = [Draft(local_rank=rank, gpu=None, home=None, bound=False) for rank in range(num_ranks)]
    if request.bind is Bind.NONE:
        return [draft.because(_BIND_NONE) for draft in free]
    if not machine.open_nodes:
        return [draft.because("not bound: no node has usable CPUs", exact=False) for draft in free]
    nodes = sorted(_far_apart(machine.open_nodes, num_ranks))
    homes = [nodes[rank * len(nodes) // num_ranks] for rank in range(num_ranks)]
    return [
        draft._replace(home=home, bound=True).because(f"no GPU: rank {rank} of {num_ranks} is spread to node {home}")
        for rank, (draft, home) in enumerate(zip(free, homes, strict=True))
    ]


def _far_apart(nodes: Sequence[Node], count: int) -> list[int]:
    """Choose up to `count` nodes: the lowest first, then always the one farthest from those chosen.

    That is the one whose nearest chosen node is farthest; at a tie the one farther from all of them together, which
    fills packages evenly; then the lowest.
    """
    by_id = {node.id: node for node in nodes}
    chosen = [nodes[0]]
    away = {node.id: (nodes[0].distance_to(node.id),) * 2 for node in nodes[1:]}  # from the nearest, from all
    while away and len(chosen) < count:
        pick = by_id[max(away, key=lambda n: (*away[n], -n))]
        chosen.append(pick)
        del away[pick.id]
        steps = {n: pick.distance_to(n) for n in away}
        away = {n: (min(near, steps[n]), total + steps[n]) for n, (near, total) in away.items()}
    return [node.id for node in chosen]


# --- 3. and 4. the pool of CPUs that a rank draws from ---------------------------------------------------------------


def _pooled(machine: UsableMachine, request: Request, seat: Draft) -> Draft:
    if not seat.bound or seat.home is None:
        return seat._replace(pool=machine.usable)
    source = _open_home(machine, request, seat.home)
    if source is None:
        return seat._replace(pool=machine.usable, bound=False).because("no node has usable CPUs", exact=False)
    if source != seat.home:
        distance = machine.nodes[seat.home].distances.get(source, "unknown")
        seat = seat.because(
            f"no usable CPU on node {seat.home}; node {source} is the nearest (distance {distance})", exact=False
        )
    return _POOLS[request.bind](machine, seat, source)


def _open_home(machine: UsableMachine, request: Request, home: int) -> int | None:
    """Return the home, or the nearest node with usable CPUs where the home (for `socket`, its package) has none."""
    reach = machine.package_nodes(home) if request.bind is Bind.SOCKET else {home}
    if any(machine.node_cpus.get(node) for node in reach):
        return home
    nearest = machine.nearest(home, machine.open_nodes)
    return nearest.id if nearest else None


def _node_pool(machine: UsableMachine, seat: Draft, source: int) -> Draft:
    cpus = machine.node_cpus[source]
    return seat._replace(pool=cpus).because(_part(cpus, machine.nodes[source].cpus, f"node {source}"))


def _socket_pool(machine: UsableMachine, seat: Draft, source: int) -> Draft:
    package = machine.nodes[source].package
    if package is None:
        return _node_pool(machine, seat, source).because(f"the package of node {source} is unknown", exact=False)
    nodes = machine.package_nodes(source)
    cpus, there = machine.cpus_of(nodes)
    return seat._replace(pool=cpus).because(_part(cpus, there, f"package {package} (nodes {nodes})"))


def _part(cpus: CpuSet, there: CpuSet, what: str) -> str:
    count = f"all {len(cpus)}" if cpus == there else f"{len(cpus)} usable of {len(there)}"
    return f"{count} CPUs of {what}"


_POOLS: Final[dict[Bind, Callable[[UsableMachine, Draft, int], Draft]]] = {
    Bind.NODE: _node_pool,
    Bind.SOCKET: _socket_pool,
    Bind.EXCLUSIVE: _node_pool,
    Bind.CORE_COMPLEX: _node_pool,  # cut into L3 groups once it is known how many ranks draw from the node
}


# --- 5. and 6. sharing and splitting a pool --------------------------------------------------------------------------


def _split(machine: UsableMachine, request: Request, drafts: list[Draft]) -> list[Draft]:
    if request.bind is Bind.CORE_COMPLEX:
        drafts = [draft for group in _groups(drafts) for draft in _dealt_complexes(machine, group)]
    splits = request.bind is Bind.EXCLUSIVE or request.cpus_per_rank is not None
    taken: set[int] = set()  # pools overlap only where firmware lists a CPU on two nodes
    done: list[Draft] = []
    for group in _groups(drafts):
        if splits and group[0].bound:
            split = _split_group(machine, request, group, taken)
            taken.update(*(draft.cpus for draft in split))
            done += split
        else:
            done += _shared_group(machine, group, len(drafts))
    return sorted(done, key=lambda draft: draft.local_rank)


def _groups(drafts: list[Draft]) -> list[list[Draft]]:
    """Group ranks by pool, bound ones apart from others, each group in the order of its GPUs' PCI addresses."""
    groups: dict[tuple[bool, CpuSet], list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.bound, draft.pool].append(draft)
    return [sorted(group, key=_seat_order) for group in groups.values()]


def _seat_order(draft: Draft) -> tuple[tuple[int, ...], str, int]:
    gpu = draft.gpu
    return (pci_order(gpu.pci) if gpu else (), (gpu.uuid or "") if gpu else "", draft.local_rank)


def _dealt_complexes(machine: UsableMachine, group: list[Draft]) -> list[Draft]:
    """Deal a node's L3 groups out to its ranks, the largest first; more ranks than groups share them in turn."""
    if not group[0].bound:
        return group
    complexes: dict[int | None, list[Core]] = defaultdict(list)
    for core in machine.cores(group[0].pool):
        complexes[core.l3].append(core)
    if None in complexes:
        return [draft.because("the L3 caches are unknown, the whole node is used", exact=False) for draft in group]
    pools = sorted((_cpus_of(machine, cores) for cores in complexes.values()), key=lambda cpus: (-len(cpus), min(cpus)))
    return [
        draft._replace(pool=(pool := pools[i % len(pools)])).because(
            f"L3 group {i % len(pools) + 1} of {len(pools)}: {len(pool)} CPUs"
        )
        for i, draft in enumerate(group)
    ]


def _shared_group(machine: UsableMachine, group: list[Draft], num_ranks: int) -> list[Draft]:
    """Give every rank of the group the whole pool. Ranks that are not bound share the cores with all ranks."""
    cores = len(machine.cores(group[0].pool))
    sharers = len(group) if group[0].bound else num_ranks
    why = f"shared by {sharers} ranks" if sharers > 1 else ""
    threads = max(1, cores // sharers)
    shared = [draft._replace(cpus=draft.pool, num_threads=threads) for draft in group]
    return [draft.because(why) for draft in shared] if why else shared


def _split_group(machine: UsableMachine, request: Request, group: list[Draft], taken: AbstractSet[int]) -> list[Draft]:
    """Split the pool by whole cores, evenly; the first ranks get the cores that are left over."""
    cores = machine.cores(group[0].pool - taken)
    if len(cores) < len(group):
        return _overcommitted(machine, request, group, cores)
    base, extra = divmod(len(cores), len(group))
    starts = [i * base + min(i, extra) for i in range(len(group) + 1)]
    return [
        _share(machine, request, draft, cores[starts[i] : starts[i + 1]], len(group)) for i, draft in enumerate(group)
    ]


def _share(machine: UsableMachine, request: Request, draft: Draft, cores: list[Core], sharers: int) -> Draft:
    wanted = request.cpus_per_rank
    cpus = _cpus_of(machine, cores)
    if wanted is not None and len(cpus) > wanted:
        # Whole cores first; the last core may give only some of its threads, and no other rank gets the rest.
        in_core_order = [cpu for core in cores for cpu in sorted(core.cpus) if cpu in machine.usable]
        cpus = CpuSet(in_core_order[:wanted])
        cores = machine.cores(cpus)
    draft = draft._replace(cpus=cpus, num_threads=len(cores))
    if wanted is not None and len(cpus) < wanted:
        return draft.because(f"{len(cpus)} CPUs instead of {wanted}: {sharers} ranks split the pool", exact=False)
    return draft.because(f"its own {len(cores)} cores" + (f" of a pool of {sharers} ranks" if sharers > 1 else ""))


def _overcommitted(machine: UsableMachine, request: Request, group: list[Draft], cores: list[Core]) -> list[Draft]:
    """Fewer cores than ranks: an error for exclusive ranks, else cores are given out in turn."""
    if request.bind is Bind.EXCLUSIVE or not cores:
        ranks = cpu_set.render(draft.local_rank for draft in group)
        raise PlanError(
            f"ranks {ranks} want cores of their own but share {len(cores)} cores (CPUs "
            f"{_cpus_of(machine, cores) or 'none'})",
            "use fewer ranks (--nproc-per-node), free CPUs (--reserve-cpus), or share: --bind node",
        )
    return [
        draft._replace(cpus=core.cpus & machine.usable, num_threads=1).because(
            f"{len(group)} ranks share {len(cores)} cores", exact=False
        )
        for draft, core in ((draft, cores[i % len(cores)]) for i, draft in enumerate(group))
    ]


def _cpus_of(machine: UsableMachine, cores: Iterable[Core]) -> CpuSet:
    return CpuSet(cpu for core in cores for cpu in core.cpus if cpu in machine.usable)
