"""Properties of plans over generated machines and requests, and of their pictures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from xml.etree import ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from numapin import Bind, Link, Memory, Nic, Plan, RankPlan, Request, Topology, make_plan
from numapin.errors import PlanError
from tests.machines.grids import grid
from tests.pictures import assert_drawn_once, problems
from tests.property.seam import CpuSet, NodeKind, lay_out, svg


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Draw a machine: any shape, sparse ids, memory-only, GPU and empty nodes, GPUs anywhere, parts of it allowed."""
    packages, nodes, cores = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    smt, l3 = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 2]))
    num_cpus = packages * nodes * (l3 or 1) * cores * smt
    ids = draw(st.lists(st.integers(0, 300), min_size=packages * nodes + 2, max_size=packages * nodes + 2, unique=True))
    node_ids, memory_nodes, gpu_nodes = sorted(ids[:-2]), ids[-2:-1], ids[-1:]
    cpu_ids = (
        draw(st.permutations(range(num_cpus))) if draw(st.booleans()) else [3 * cpu + 1 for cpu in range(num_cpus)]
    )
    cpus = draw(st.frozensets(st.sampled_from(sorted(cpu_ids))).map(CpuSet)) if draw(st.booleans()) else None
    return grid(
        packages=packages,
        nodes=nodes,
        l3=l3,
        cores=cores,
        smt=smt,
        node_ids=node_ids,
        cpu_ids=cpu_ids,
        memory_nodes=memory_nodes,
        gpu_nodes=gpu_nodes,
        gpus=draw(st.lists(st.none() | st.sampled_from(node_ids), max_size=5)),
        memoryless=draw(st.lists(st.sampled_from(node_ids), max_size=2)),
        allowed_cpus=cpus,
        allowed_nodes=draw(st.none() | st.frozensets(st.sampled_from(sorted(ids))).map(CpuSet)),
    )


@st.composite
def requests(draw: st.DrawFn, topology: Topology) -> Request:
    bind = draw(st.sampled_from(Bind))
    few_cpus = st.frozensets(st.sampled_from(sorted(topology.cpus)), max_size=2).map(CpuSet)
    return Request(
        bind=bind,
        memory=draw(st.none() | st.sampled_from(Memory)),
        num_ranks=draw(st.none() | st.integers(1, 7)),
        cpus_per_rank=None if bind is Bind.NONE else draw(st.none() | st.integers(1, 5)),
        smt=draw(st.booleans()),
        reserve_cpus=draw(few_cpus),
    )


@dataclass(frozen=True)
class Case:
    """A machine, a request, and the plan; the plan is None if the request cannot be met."""

    topology: Topology
    request: Request
    plan: Plan | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case; any exception of make_plan other than PlanError fails the calling test."""
    topology = draw(machines())
    request = draw(requests(topology))
    return Case(topology, request, plan_or_none(topology, request))


def plan_or_none(topology: Topology, request: Request) -> Plan | None:
    try:
        return make_plan(topology, request)
    except PlanError:
        return None


def _bound(case: Case, plan: Plan) -> list[RankPlan]:
    """Return the ranks that are bound to the pool of their node."""
    return [rank for rank in plan.ranks if case.request.bind is not Bind.NONE and rank.node is not None]


def every_rank_gets_usable_cpus_a_thread_and_a_reason(case: Case, plan: Plan) -> None:
    """Every rank has usable CPUs, a thread and a reason; without SMT, at most one CPU of each core."""
    usable = case.topology.allowed.cpus - case.request.reserve_cpus
    num_gpus = len(case.topology.visible_gpus)
    assert [r.local_rank for r in plan.ranks] == list(range(case.request.num_ranks or max(1, num_gpus)))
    for rank in plan.ranks:
        assert rank.cpus
        assert rank.cpus <= usable
        assert rank.num_threads >= 1
        assert rank.reason
        assert case.request.smt or all(len(rank.cpus & core.cpus) <= 1 for core in case.topology.cores)


def no_plan_only_where_there_is_none(case: Case) -> None:
    """A request is refused only for lack of CPUs: fewer usable ones than a rank wants, or than exclusive ranks."""
    usable = case.topology.allowed.cpus - case.request.reserve_cpus
    num_ranks = case.request.num_ranks or max(1, len(case.topology.gpus))
    per_node = [
        sum(bool(core.cpus & usable) for core in case.topology.cores if core.node == node.id)
        for node in case.topology.cpu_nodes
    ]
    num_usable = len(usable) if case.request.smt else sum(per_node)
    wanted = case.request.cpus_per_rank or 1
    assert wanted > num_usable or (case.request.bind is Bind.EXCLUSIVE and min(filter(None, per_node)) < num_ranks)


def ranks_that_split_a_pool_share_no_core(case: Case, plan: Plan) -> None:
    """Exclusive ranks share no core; with --cpus-per-rank a core is shared as a whole, with a note, or not at all."""
    if case.request.bind is not Bind.EXCLUSIVE and case.request.cpus_per_rank is None:
        return
    ranks = _bound(case, plan)
    for core in case.topology.cores:
        users = [rank for rank in ranks if rank.cpus & core.cpus]
        assert len(users) <= 1 or case.request.bind is not Bind.EXCLUSIVE
        assert len(users) <= 1 or (len({rank.cpus for rank in users}) == 1 and not any(rank.exact for rank in users))


def thread_counts_never_exceed_the_cores(case: Case, plan: Plan) -> None:
    """Ranks on the same cores have no more threads than cores in total, unless there are more ranks than cores."""
    core_of = {cpu: core.id for core in case.topology.cores for cpu in core.cpus}
    groups: dict[frozenset[int], list[RankPlan]] = {}
    for rank in _bound(case, plan):
        groups.setdefault(rank.cpus, []).append(rank)
    for cpus, ranks in groups.items():
        cores = {core_of[cpu] for cpu in cpus}
        assert sum(rank.num_threads for rank in ranks) <= max(len(cores), len(ranks))


def bound_ranks_are_at_home_or_say_why_not(case: Case, plan: Plan) -> None:
    """A rank's CPUs are on its node (for `socket`: its package), or all elsewhere, and then the plan is not exact."""
    nodes = {node.id: node for node in case.topology.nodes}
    for rank in _bound(case, plan):
        assert rank.node is not None
        near = {rank.node}
        if case.request.bind is Bind.SOCKET:
            near = {n for n, node in nodes.items() if node.package == nodes[rank.node].package}
        at_home = rank.cpus <= frozenset().union(*(nodes[n].cpus for n in near))
        assert at_home or not rank.exact


def ranks_of_a_socket_use_their_own_node_first(case: Case, plan: Plan) -> None:
    """If there are enough cores, a rank uses its part of its own node's before those of the package's other nodes."""
    if case.request.bind is not Bind.SOCKET or case.request.cpus_per_rank is None:
        return
    usable = case.topology.allowed.cpus - case.request.reserve_cpus
    num_ranks_at = Counter(rank.node for rank in plan.ranks)
    for rank in _bound(case, plan):
        used = [core for core in case.topology.cores if core.cpus & rank.cpus]
        own = [core for core in case.topology.cores if core.node == rank.node and core.cpus & usable]
        part = min(len(used), len(own) // num_ranks_at[rank.node])
        assert sum(core.node == rank.node for core in used) >= part or " ranks share " in rank.reason


def memory_is_allowed_host_memory(case: Case, plan: Plan) -> None:
    """The nodes of a policy are allowed and have memory and CPUs; a GPU's node is never among them."""
    nodes = {node.id: node for node in case.topology.nodes}
    for rank in plan.ranks:
        assert all(nodes[n].kind is NodeKind.CPU for n in rank.nodes)
        if rank.memory in (Memory.PREFERRED, Memory.BIND, Memory.INTERLEAVE):
            assert rank.nodes
            assert rank.nodes <= case.topology.allowed.nodes
            assert all(nodes[n].memory_bytes for n in rank.nodes)


@settings(max_examples=80)
@given(st.data())
def test_renumbering_gpus_permutes_the_plan(data: st.DataObject) -> None:
    """New NVML and CUDA numbers move ranks to other GPUs, but a PCI address keeps its CPUs and nodes."""
    topology = data.draw(machines().filter(lambda t: t.gpus))
    drawn = data.draw(requests(topology))
    request = replace(drawn, num_ranks=len(topology.gpus) * data.draw(st.integers(1, 2)))
    indices = data.draw(st.permutations(range(len(topology.gpus))))
    order = data.draw(st.permutations(range(len(topology.gpus))))
    renumbered = [
        replace(gpu, index=index, cuda_index=cuda)
        for gpu, index, cuda in zip(topology.gpus, indices, order, strict=True)
    ]
    other = replace(topology, gpus=tuple(sorted(renumbered, key=lambda gpu: gpu.index)))
    assert _by_address(plan_or_none(other, request)) == _by_address(plan_or_none(topology, request))


def _by_address(plan: Plan | None) -> list[tuple[str | None, frozenset[int], frozenset[int], Memory, int, bool]] | None:
    if plan is None:
        return None
    ranks = [(r.gpu.pci if r.gpu else None, r.cpus, r.nodes, r.memory, r.num_threads, r.exact) for r in plan.ranks]
    return sorted(ranks, key=lambda rank: rank[0] or "")


def plans_are_repeatable_and_go_to_json_and_back(case: Case) -> None:
    """The same input gives the same plan; topology and plan survive JSON; a saved machine gives the same plan."""
    saved = Topology.from_json(json.dumps(case.topology.to_json()))
    assert saved == case.topology
    assert plan_or_none(saved, case.request) == case.plan
    if case.plan is not None:
        assert Plan.from_json(json.dumps(case.plan.to_json())) == case.plan


@settings(max_examples=200)  # of each property
@given(cases())
def test_every_property(case: Case) -> None:
    """Each plan has all the properties above: machines take longer to draw than to check."""
    if case.plan is None:
        no_plan_only_where_there_is_none(case)
    else:
        for holds in PROPERTIES:
            holds(case, case.plan)
    plans_are_repeatable_and_go_to_json_and_back(case)


PROPERTIES = (
    every_rank_gets_usable_cpus_a_thread_and_a_reason,
    ranks_that_split_a_pool_share_no_core,
    thread_counts_never_exceed_the_cores,
    bound_ranks_are_at_home_or_say_why_not,
    ranks_of_a_socket_use_their_own_node_first,
    memory_is_allowed_host_memory,
)


NAMES = st.text(max_size=40)
SWITCHES = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS"])
OWN_LINKS = st.sampled_from(["NV12", "NV12", "NV4", "XGMI", "PIX", "SYS"])


@settings(max_examples=60)
@given(cases(), st.data())
def test_everything_is_drawn_once_and_nothing_overlaps(case: Case, data: st.DataObject) -> None:
    """For any machine, names and plan, each CPU, core, GPU and NIC is exactly one box, and no boxes overlap."""
    nodes = [None, *(node.id for node in case.topology.nodes)]
    nics = tuple(
        Nic(name=name, node=data.draw(st.sampled_from(nodes))) for name in data.draw(st.lists(NAMES, max_size=3))
    )
    topology = replace(
        case.topology,
        host=data.draw(NAMES),
        gpus=tuple(replace(gpu, name=data.draw(NAMES)) for gpu in case.topology.gpus),
        nics=nics,
        links=(
            *(Link(a="gpu0", b=nic.name, kind=data.draw(NAMES | SWITCHES)) for nic in nics),
            *(
                Link(a=a.label, b=b.label, kind=data.draw(OWN_LINKS))
                for a, b in combinations(case.topology.gpus[:6], 2)
            ),
        ),
    )
    picture = lay_out(topology, case.plan)
    assert problems(picture) == []
    assert_drawn_once(picture, topology)
    ET.fromstring(svg(topology, case.plan))  # noqa: S314 - ours
