"""Every rule of a plan, with its reason: seats, pools, splitting, threads, memory, warnings, refusals.

Machines are grids: two nodes of four cores of two threads unless told; CPUs 0-3 and 8-11 are node 0's.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from numapin import Allowed, Bind, Memory, Plan, RankPlan, Request, Topology, make_plan
from numapin.errors import MachineFileError, NumapinError, PlanError, UsageError
from tests.machines.grids import gpu, grid
from tests.unit.plan.seam import CpuSet, CpuSpeed, GpuRef, NicLibrary, cpu_set

if TYPE_CHECKING:
    from collections.abc import Callable


def _eight(**rest: Any) -> Topology:
    """Return two packages of four nodes of four cores: nodes 0-3 and 4-7, CPUs 4n to 4n+3, two L3 groups a node."""
    return grid(packages=2, nodes=4, l3=2, cores=2, smt=1, **rest)


def _cpus(plan: Plan) -> list[str]:
    return [cpu_set.render(rank.cpus) for rank in plan.ranks]


def _memory(plan: Plan) -> list[tuple[str, str]]:
    return [(rank.memory.value, cpu_set.render(rank.nodes)) for rank in plan.ranks]


def _limited(topology: Topology, cpus: str, nodes: str = "0-99") -> Topology:
    return topology.restrict(Allowed(cpus=CpuSet.parse(cpus), nodes=CpuSet.parse(nodes)))


# --- which GPU and which node ----------------------------------------------------------------------------------------


def test_rank_n_uses_visible_gpu_n_mod_g() -> None:
    """By default one rank a GPU, in CUDA's order; more ranks go round; fewer leave GPUs out."""
    gpus = (replace(gpu(0, 0), cuda_index=1), gpu(1, 1, visible=False), replace(gpu(2, 1), cuda_index=0))
    topology = replace(grid(), gpus=gpus)
    used = {
        n: [rank.gpu.index for rank in make_plan(topology, Request(num_ranks=n)).ranks if rank.gpu]
        for n in (None, 1, 2, 5)
    }
    assert used == {None: [2, 0], 1: [2], 2: [2, 0], 5: [2, 0, 2, 0, 2]}


def test_a_rank_names_its_gpu_fully() -> None:
    """Index, UUID and PCI address go into the plan, and the reason names node and source."""
    (rank,) = make_plan(grid(gpus=[1]), Request()).ranks
    assert rank.gpu == GpuRef(index=0, uuid="GPU-00000000-0000-4000-8000-000000000000", pci="0000:10:00.0")
    assert (rank.local_rank, rank.node, rank.exact) == (0, 1, True)
    assert rank.reason == "GPU 0 (0000:10:00.0) is on node 1 (sysfs); all 8 CPUs of node 1"


def test_gpus_option_chooses_and_orders() -> None:
    """--gpus takes any names, and rank n uses the n-th; CUDA's order does not matter then."""
    topology = replace(grid(), gpus=tuple(replace(gpu(i, i % 2), cuda_index=None) for i in range(4)))
    plan = make_plan(topology, Request(gpus=("3", "0000:10:00.0", "GPU-02")))
    assert [(rank.gpu.index, rank.node) for rank in plan.ranks if rank.gpu] == [(3, 1), (0, 0), (2, 0)]
    assert plan.exact


def test_unknown_cuda_order_binds_nothing() -> None:
    """If it is unknown which GPU is CUDA device n, no rank is bound by a guess."""
    topology = replace(grid(), gpus=(replace(gpu(0, 0), cuda_index=None), replace(gpu(1, 1), cuda_index=None)))
    plan = make_plan(topology, Request())
    assert [(rank.gpu, rank.node, rank.exact) for rank in plan.ranks] == [(None, None, False)] * 2
    assert _cpus(plan) == ["0-15"] * 2
    assert plan.ranks[1].reason.startswith(
        "not bound: its GPU is unknown; CUDA_DEVICE_ORDER=PCI_BUS_ID gives CUDA a known order"
    )
    assert [text for text in plan.warnings if "not bound" in text] == [
        "ranks 0-1: not bound: its GPU is unknown; CUDA_DEVICE_ORDER=PCI_BUS_ID gives CUDA a known order"
    ]


def test_an_unknown_node_is_not_bound() -> None:
    """The rank keeps all allowed CPUs, its part of the cores as threads and no memory policy, with the reason."""
    plan = make_plan(grid(gpus=[0, None]), Request())
    assert _cpus(plan) == ["0-3,8-11", "0-15"]
    assert [rank.num_threads for rank in plan.ranks] == [4, 4]
    assert _memory(plan)[1] == ("none", "0-1")
    assert plan.ranks[1].reason.startswith("not bound: the node of GPU 1 (0000:11:00.0) is unknown")
    assert not plan.exact
    assert any(warning.startswith("rank 1: not bound") for warning in plan.warnings)


@pytest.mark.parametrize(
    ("num_ranks", "homes"),
    [
        (None, [0]),
        (1, [0]),
        (2, [0, 4]),
        (3, [0, 1, 4]),
        (4, [0, 1, 4, 5]),
        (8, list(range(8))),
        (16, [node for node in range(8) for _ in range(2)]),
        (9, [0, 0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_without_gpus_ranks_are_spread_by_distance(num_ranks: int | None, homes: list[int]) -> None:
    """Ranks are as far apart as possible, neighbors side by side; more ranks than nodes share them evenly."""
    plan = make_plan(_eight(), Request(num_ranks=num_ranks))
    assert [rank.node for rank in plan.ranks] == homes
    assert [rank.gpu for rank in plan.ranks] == [None] * len(homes)
    assert plan.ranks[0].reason.startswith(f"no GPU: rank 0 of {len(homes)} placed on node 0")


def test_without_gpus_only_nodes_with_usable_cpus_count() -> None:
    """Ranks of a restricted launcher are spread over its allowed nodes."""
    plan = make_plan(_limited(_eight(), "8-11,20-23"), Request(num_ranks=2))
    assert [rank.node for rank in plan.ranks] == [2, 5]


@pytest.mark.parametrize(("gpus", "node"), [([], None), ([0], 0)])
def test_cpus_that_are_on_no_node_bind_nothing(gpus: list[int | None], node: int | None) -> None:
    """If no node lists a usable CPU, ranks are not bound, with the reason."""
    topology = replace(grid(gpus=gpus), nodes=grid().nodes[:1], packages=(), cores=_homeless())
    plan = make_plan(_limited(topology, "4"), Request())
    assert [(rank.node, cpu_set.render(rank.cpus), rank.exact) for rank in plan.ranks] == [(node, "4", False)]
    assert "no node has usable CPUs" in plan.ranks[0].reason


def _homeless() -> Any:
    return tuple(replace(core, node=None) for core in grid().cores)


# --- pools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "cpus", "threads"),
    [
        (Bind.NONE, ["0-31"] * 3, [10] * 3),
        (Bind.NODE, ["4-7", "4-7", "20-23"], [2, 2, 4]),
        (Bind.SOCKET, ["0-15", "0-15", "16-31"], [8, 8, 16]),
        (Bind.EXCLUSIVE, ["4-5", "6-7", "20-23"], [2, 2, 4]),
        (Bind.CORE_COMPLEX, ["4-5", "6-7", "20-21"], [2, 2, 2]),
    ],
)
def test_modes(bind: Bind, cpus: list[str], threads: list[int]) -> None:
    """The result of each mode for two GPUs of node 1 and one of node 5; threads are each rank's part of the cores."""
    plan = make_plan(_eight(gpus=[1, 1, 5]), Request(bind=bind))
    assert _cpus(plan) == cpus
    assert [rank.num_threads for rank in plan.ranks] == threads
    assert plan.exact


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        (Bind.NODE, "all 4 CPUs of node 1; CPUs shared by 2 ranks"),
        (Bind.SOCKET, "all 16 CPUs of socket 0 (nodes 0-3); CPUs shared by 2 ranks"),
        (Bind.EXCLUSIVE, "all 4 CPUs of node 1; 2 exclusive cores (2 ranks split these CPUs)"),
        (Bind.CORE_COMPLEX, "all 4 CPUs of node 1; L3 group 1 of 2: 2 CPUs"),
    ],
)
def test_reasons(bind: Bind, reason: str) -> None:
    """The reason has each decision, in the order of decisions."""
    plan = make_plan(_eight(gpus=[1, 1, 5]), Request(bind=bind))
    assert plan.ranks[0].reason == f"GPU 0 (0000:10:00.0) is on node 1 (sysfs); {reason}"


def test_reason_of_bind_none() -> None:
    """Without binding the GPU's node plays no part."""
    plan = make_plan(_eight(gpus=[1, 1, 5]), Request(bind=Bind.NONE))
    assert plan.ranks[0].reason == "--bind none: all allowed CPUs; CPUs shared by 3 ranks"


def test_ranks_that_see_one_gpu_each() -> None:
    """With --virtual-local-rank every rank has the GPU of its own entry, one GPU twice or unknown ones included."""
    topology = _eight(gpus=[1, 3, 5])
    plan = make_plan(topology, Request(rank_gpus=(2, 0, 2, None)))
    assert [rank.node for rank in plan.ranks] == [5, 1, 5, None]
    assert [rank.exact for rank in plan.ranks] == [True, True, True, False]
    with pytest.raises(UsageError, match=r"^rank_gpus names 2 GPUs for 3 ranks"):
        make_plan(topology, Request(rank_gpus=(0, 1), num_ranks=3))


def test_bind_none_on_an_unknown_node_is_exact() -> None:
    """Nothing was requested, so the rank is exact."""
    plan = make_plan(grid(gpus=[None, 0]), Request(bind=Bind.NONE))
    assert plan.exact
    assert not any(warning.startswith("rank") for warning in plan.warnings)


def test_partly_usable_nodes_say_how_much() -> None:
    """A reason counts the usable CPUs of a place and all its CPUs."""
    plan = make_plan(_limited(grid(gpus=[0]), "0-1,8"), Request())
    assert "3 usable of 8 CPUs of node 0" in plan.ranks[0].reason
    assert plan.ranks[0].num_threads == 2


def test_an_empty_home_goes_to_the_nearest_node() -> None:
    """The nearest node with usable CPUs takes over, the lower number at a tie, with the reason; it is not exact."""
    plan = make_plan(_limited(_eight(gpus=[5, 2]), "0-3,4-7,16-19,28-31"), Request())
    assert _cpus(plan) == ["16-19", "0-3"]
    assert "no usable CPU on node 5; node 4 is the nearest (distance 12)" in plan.ranks[0].reason
    assert [rank.exact for rank in plan.ranks] == [False, False]
    assert [rank.node for rank in plan.ranks] == [5, 2]
    assert [nodes for _, nodes in _memory(plan)] == ["5", "2"]


def test_socket_uses_what_its_package_has() -> None:
    """An empty home does not matter while its package has CPUs; an empty package is replaced by the nearest one."""
    topology = _eight(gpus=[5])
    plan = make_plan(_limited(topology, "0-15,28-31"), Request(bind=Bind.SOCKET))
    assert (_cpus(plan), plan.exact) == (["28-31"], True)
    plan = make_plan(_limited(topology, "4-7"), Request(bind=Bind.SOCKET))
    assert (_cpus(plan), plan.exact) == (["4-7"], False)
    assert "no usable CPU on node 5; node 1 is the nearest (distance 32)" in plan.ranks[0].reason


@pytest.mark.parametrize(
    ("wanted", "cpus"),
    [(2, ["0-1", "12-13"]), (4, ["0-3", "12-15"]), (8, ["0-7", "8-15"]), (6, ["0-5", "8-9,12-15"])],
)
def test_socket_with_fewer_cpus_takes_those_of_the_own_node_first(wanted: int, cpus: list[str]) -> None:
    """Of the package's CPUs a rank gets those next to its GPU; only what is missing comes from the other nodes."""
    plan = make_plan(_eight(gpus=[0, 3]), Request(bind=Bind.SOCKET, cpus_per_rank=wanted))
    assert _cpus(plan) == cpus


def _with_fast(topology: Topology, fast: CpuSet) -> Topology:
    speeds = (CpuSpeed(cpus=fast, highest_perf=200), CpuSpeed(cpus=topology.cpus - fast, highest_perf=100))
    return replace(topology, speeds=speeds)


def test_socket_with_fewer_cpus_splits_fast_cores_evenly() -> None:
    """Three ranks of one node and one of another: each gets the same number of the package's fast cores."""
    fast = CpuSet({0, 1, 2, 3, 8, 9, 10, 11})
    topology = _with_fast(grid(packages=1, nodes=2, cores=8, smt=1, gpus=[0, 0, 0, 1]), fast)
    plan = make_plan(topology, Request(bind=Bind.SOCKET, cpus_per_rank=4))
    assert [len(rank.cpus & fast) for rank in plan.ranks] == [2, 2, 2, 2]
    assert _cpus(plan)[3] == "8-9,12-13"
    assert [len(rank.cpus & CpuSet(range(8))) for rank in plan.ranks] == [3, 3, 2, 0]


@pytest.mark.parametrize(("cpus_per_rank", "cpus"), [(None, "0-7"), (4, "0-3")])
def test_socket_of_a_gpu_on_a_node_without_cpus(cpus_per_rank: int | None, cpus: str) -> None:
    """A node of memory alone that names its package takes the package's CPUs."""
    topology = grid(packages=2, nodes=2, cores=4, smt=1, memory_nodes=[8], gpus=[8])
    nodes = tuple(replace(node, package=0) if node.id == 8 else node for node in topology.nodes)
    plan = make_plan(replace(topology, nodes=nodes), Request(bind=Bind.SOCKET, cpus_per_rank=cpus_per_rank))
    assert (_cpus(plan), plan.ranks[0].node, plan.exact) == ([cpus], 8, True)


def test_socket_without_packages_is_node() -> None:
    """An unknown package is the node, and the rank is not exact."""
    topology = grid(gpus=[0])
    plan = make_plan(
        replace(topology, nodes=tuple(replace(n, package=None) for n in topology.nodes)), Request(bind=Bind.SOCKET)
    )
    assert (_cpus(plan), plan.exact) == (["0-3,8-11"], False)
    assert "the socket of node 0 is unknown" in plan.ranks[0].reason


def test_core_complexes_are_dealt_largest_first_and_then_shared() -> None:
    """With more ranks than L3 groups they are shared in turn; a group with fewer usable CPUs comes last."""
    topology = _limited(grid(nodes=1, l3=2, cores=2, smt=1, gpus=[0]), "0,2-3")
    plan = make_plan(topology, Request(bind=Bind.CORE_COMPLEX, num_ranks=3))
    assert _cpus(plan) == ["2-3", "0", "2-3"]
    assert [rank.num_threads for rank in plan.ranks] == [1, 1, 1]


@pytest.mark.parametrize(("fast", "cpus"), [({0, 4, 5}, ["4-7", "0-3"]), ({0, 4, 5, 6}, ["0-3", "4-7"])])
def test_core_complexes_with_fast_cores_come_first_if_ranks_stay_alike(fast: set[int], cpus: list[str]) -> None:
    """The L3 group with more fast cores is first, unless one rank would get two more of them than another."""
    topology = _with_fast(grid(nodes=1, l3=2, cores=4, smt=1, gpus=[0, 0]), CpuSet(fast))
    assert _cpus(make_plan(topology, Request(bind=Bind.CORE_COMPLEX))) == cpus


def test_fast_cores_that_no_rank_may_use_are_not_mentioned() -> None:
    """If all fast cores of a node are reserved, the others are alike."""
    topology = _with_fast(grid(nodes=1, cores=4, smt=1, gpus=[0]), CpuSet({0, 1}))
    plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, reserve_cpus=CpuSet({0, 1})))
    assert "2 exclusive cores" in plan.ranks[0].reason
    assert "fast" not in plan.ranks[0].reason


@pytest.mark.parametrize(("cores", "num_threads"), [(1, 1), (4, 2)])
def test_unknown_siblings_halve_the_threads(cores: int, num_threads: int) -> None:
    """Two threads per core are assumed, and a rank has at least one."""
    topology = replace(grid(nodes=1, cores=cores, smt=1, gpus=[0]), siblings_known=False)
    (rank,) = make_plan(topology, Request()).ranks
    assert (rank.num_threads, rank.exact) == (num_threads, False)


def test_gpus_without_addresses_split_in_the_order_of_their_uuids() -> None:
    """Renumbering such GPUs moves no CPUs either."""
    gpus = tuple(replace(gpu(index, 0), pci=None, uuid=f"GPU-{name}") for index, name in enumerate("ba"))
    topology = replace(grid(nodes=1, cores=2, smt=1), gpus=gpus)
    assert _cpus(make_plan(topology, Request(bind=Bind.EXCLUSIVE))) == ["1", "0"]


@pytest.mark.parametrize(
    ("num_ranks", "cpus_per_rank", "warnings"),
    [
        (1, None, ("12 CPUs of node 0, in L3 groups without a rank, stay idle; --bind node uses them",)),
        (4, None, ()),
        (1, 2, ()),
    ],
)
def test_idle_core_complexes_are_a_warning(
    num_ranks: int, cpus_per_rank: int | None, warnings: tuple[str, ...]
) -> None:
    """L3 groups of a rank's node that no rank gets stay idle; with --cpus-per-rank that was asked for."""
    request = Request(bind=Bind.CORE_COMPLEX, num_ranks=num_ranks, cpus_per_rank=cpus_per_rank)
    assert make_plan(grid(nodes=1, l3=4, cores=2), request).warnings == warnings


@pytest.mark.parametrize(
    ("reserved", "allowed", "smt", "reason"),
    [
        ("4", "0-7", True, "3 exclusive cores and 1 core with a thread that is reserved or not allowed"),
        ("", "0-3,5-7", True, "3 exclusive cores and 1 core with a thread that is reserved or not allowed"),
        ("4-7", "0-7", True, "0 exclusive cores and 4 cores with a thread that is reserved or not allowed"),
        ("0,4", "0-7", True, "3 exclusive cores"),
        ("", "0-7", False, "4 exclusive cores"),
    ],
)
def test_a_core_with_a_reserved_thread_is_not_exclusive(reserved: str, allowed: str, smt: bool, reason: str) -> None:  # noqa: FBT001
    """The other thread is for other programs; without --smt it is idle."""
    request = Request(bind=Bind.EXCLUSIVE, reserve_cpus=CpuSet.parse(reserved), smt=smt)
    plan = make_plan(_limited(grid(nodes=1, gpus=[0]), allowed), request)
    assert plan.ranks[0].reason.split("; ")[2] == reason


def test_core_complex_without_caches_is_node() -> None:
    """Unknown caches leave the whole node, and the rank is not exact."""
    plan = make_plan(grid(l3=None, gpus=[0]), Request(bind=Bind.CORE_COMPLEX))
    assert (_cpus(plan), plan.exact) == (["0-3,8-11"], False)
    assert "the L3 caches are unknown, the whole node is used" in plan.ranks[0].reason


# --- splitting, SMT, reserved CPUs -----------------------------------------------------------------------------------


def test_exclusive_ranks_split_by_whole_cores() -> None:
    """Siblings stay together; the first ranks, in the order of their GPUs' addresses, get what is left over."""
    plan = make_plan(grid(gpus=[0, 0, 0]), Request(bind=Bind.EXCLUSIVE))
    assert _cpus(plan) == ["0-1,8-9", "2,10", "3,11"]
    reversed_ = replace(grid(), gpus=tuple(replace(gpu(i, 0), cuda_index=2 - i) for i in range(3)))
    assert _cpus(make_plan(reversed_, Request(bind=Bind.EXCLUSIVE))) == ["3,11", "2,10", "0-1,8-9"]


def test_exclusive_keeps_l3_groups_together() -> None:
    """Cores that share an L3 are given out together, whatever their CPU numbers."""
    topology = grid(nodes=1, l3=2, cores=2, smt=1, cpu_ids=[0, 2, 1, 3], gpus=[0, 0])
    assert _cpus(make_plan(topology, Request(bind=Bind.EXCLUSIVE))) == ["0,2", "1,3"]


def test_several_ranks_per_gpu_are_spread_evenly() -> None:
    """Two ranks a GPU split its node; the second round takes the second part."""
    plan = make_plan(grid(gpus=[0, 1]), Request(bind=Bind.EXCLUSIVE, num_ranks=4))
    assert _cpus(plan) == ["0-1,8-9", "4-5,12-13", "2-3,10-11", "6-7,14-15"]


@pytest.mark.parametrize(
    ("wanted", "cpus", "threads", "exact"),
    [(1, "0", 1, True), (2, "0,8", 1, True), (3, "0-1,8", 2, True), (4, "0-1,8-9", 2, True), (5, "0-1,8-9", 2, False)],
)
def test_cpus_per_rank(wanted: int, cpus: str, threads: int, *, exact: bool) -> None:
    """Ranks get whole cores first, and no more than their even part; the rest of a core stays unused."""
    plan = make_plan(grid(gpus=[0, 0]), Request(cpus_per_rank=wanted))
    first, second = plan.ranks
    assert (cpu_set.render(first.cpus), first.num_threads, first.exact) == (cpus, threads, exact)
    assert second.cpus == CpuSet(cpu + 2 for cpu in first.cpus)
    if not exact:
        assert "4 CPUs instead of 5: 2 ranks share these CPUs" in first.reason


def test_cpus_per_rank_with_fewer_cores_than_ranks() -> None:
    """Cores are given out in turn, which is not exact."""
    plan = make_plan(grid(cores=2, gpus=[0]), Request(cpus_per_rank=1, num_ranks=3))
    assert _cpus(plan) == ["0,4", "1,5", "0,4"]
    assert [rank.num_threads for rank in plan.ranks] == [1, 1, 1]
    assert "3 ranks share 2 cores" in plan.ranks[0].reason
    assert not plan.exact


def test_no_smt_uses_one_thread_of_each_core() -> None:
    """The lowest usable thread of each core stays; the number of cores does not change."""
    assert _cpus(make_plan(grid(gpus=[0]), Request(smt=False))) == ["0-3"]
    plan = make_plan(grid(gpus=[0]), Request(smt=False, reserve_cpus=CpuSet({0, 1})))
    assert _cpus(plan) == ["2-3,8-9"]
    assert plan.ranks[0].num_threads == 4


def test_reserved_cpus_go_to_nobody() -> None:
    """In every mode no rank uses reserved CPUs; a core whose siblings are all reserved does not count."""
    for bind in Bind:
        plan = make_plan(grid(gpus=[0, 1]), Request(bind=bind, reserve_cpus=CpuSet({0, 4, 12})))
        assert not any(rank.cpus & {0, 4, 12} for rank in plan.ranks)
    assert [
        rank.num_threads for rank in make_plan(grid(gpus=[0, 1]), Request(reserve_cpus=CpuSet({0, 4, 12}))).ranks
    ] == [*(4, 3)]


def test_more_ranks_than_cores_still_have_a_thread_each() -> None:
    """In a shared pool each rank gets at least one thread."""
    plan = make_plan(grid(nodes=1, cores=2, gpus=[0]), Request(num_ranks=5))
    assert [rank.num_threads for rank in plan.ranks] == [1] * 5


def test_exclusive_ranks_on_overlapping_nodes_are_disjoint() -> None:
    """Firmware that lists a CPU on two nodes does not make two exclusive ranks share it."""
    topology = grid(smt=1, gpus=[0, 1])
    both = tuple(replace(node, cpus=CpuSet(range(8))) for node in topology.nodes)
    assert _cpus(make_plan(replace(topology, nodes=both), Request(bind=Bind.EXCLUSIVE))) == ["0-3", "4-7"]
    partly = replace(grid(smt=1, gpus=[1, 0]), nodes=(both[0], topology.nodes[1]))
    assert _cpus(make_plan(partly, Request(bind=Bind.EXCLUSIVE))) == ["4-7", "0-3"]


def test_allowed_cpus_that_are_offline_are_not_used() -> None:
    """A machine file may allow more than it has."""
    topology = replace(grid(gpus=[0]), allowed=Allowed(cpus=CpuSet(range(64)), nodes=CpuSet({0, 1})))
    assert _cpus(make_plan(topology, Request(bind=Bind.NONE))) == ["0-15"]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "memory"),
    [
        (Request(), [("preferred", "1"), ("preferred", "5")]),
        (Request(bind=Bind.SOCKET), [("preferred", "0-3"), ("preferred", "4-7")]),
        (Request(bind=Bind.NONE), [("none", "0-7"), ("none", "0-7")]),
        (Request(bind=Bind.NONE, memory=Memory.PREFERRED), [("preferred", "1"), ("preferred", "5")]),
        (Request(memory=Memory.NONE), [("none", "1"), ("none", "5")]),
        (Request(memory=Memory.LOCAL), [("local", "1"), ("local", "5")]),
        (Request(memory=Memory.BIND), [("bind", "1"), ("bind", "5")]),
        (Request(memory=Memory.INTERLEAVE), [("interleave", "0-7"), ("interleave", "0-7")]),
        (Request(memory=Memory.BIND, memory_nodes=CpuSet({2, 8})), [("bind", "2,8"), ("bind", "2,8")]),
        (Request(memory=Memory.INTERLEAVE, memory_nodes=CpuSet({0})), [("interleave", "0"), ("interleave", "0")]),
    ],
    ids=str,
)
def test_memory_policies(request_: Request, memory: list[tuple[str, str]]) -> None:
    """Each policy's nodes: the home's, the package's, all with CPUs, or the named ones (CXL memory is 8, a GPU's 9)."""
    plan = make_plan(_eight(memory_nodes=[8], gpu_nodes=[9], gpus=[1, 5]), request_)
    assert _memory(plan) == memory
    assert plan.memory is request_.policy
    from_all_cpus = request_ == Request(bind=Bind.NONE, memory=Memory.PREFERRED)  # not without a spill: test_gpu_memory
    assert plan.exact is not from_all_cpus


def test_memory_comes_from_the_nearest_node_that_has_some() -> None:
    """A home without allowed memory is replaced by the nearest node, with the reason, and is not exact."""
    for topology in (
        _eight(memoryless=[5], gpus=[5]),
        _eight(gpus=[5], allowed_nodes=frozenset({0, 1, 4, 6})),
    ):
        plan = make_plan(topology, Request())
        assert (_cpus(plan), _memory(plan)) == (["20-23"], [("preferred", "4")])
        assert plan.ranks[0].reason.endswith("no allowed memory on node 5; node 4 is the nearest")
        assert not plan.exact


def test_interleave_leaves_out_empty_and_forbidden_nodes() -> None:
    """Pages can only go where memory is allowed and exists."""
    topology = _eight(memoryless=[0], gpus=[1], allowed_nodes=frozenset({0, 1, 2}))
    assert _memory(make_plan(topology, Request(memory=Memory.INTERLEAVE))) == [("interleave", "1-2")]


def test_one_node_needs_no_policy() -> None:
    """With one node there is no policy, with the reason, and the plan is exact."""
    plan = make_plan(grid(nodes=1, gpus=[0]), Request(memory=Memory.BIND))
    assert _memory(plan) == [("none", "0")]
    assert plan.ranks[0].reason.endswith("one NUMA node: all memory is on it")
    assert plan.exact


def test_one_cpu_node_beside_gpu_memory_has_a_policy() -> None:
    """On a single Grace Hopper memory could also land on the GPU's node."""
    assert _memory(make_plan(grid(nodes=1, gpu_nodes=[1], gpus=[0]), Request())) == [("preferred", "0")]


def test_memory_that_cannot_be_placed_is_told() -> None:
    """A requested policy without a node to name is not exact; the default only adds a reason."""
    unplaced = Request(bind=Bind.NONE, memory=Memory.BIND)
    (rank,) = make_plan(grid(), unplaced).ranks
    assert (rank.memory, rank.exact) == (Memory.NONE, False)
    assert "--memory bind" in rank.reason
    (rank,) = make_plan(grid(gpus=[0], allowed_nodes=CpuSet()), Request()).ranks
    assert rank.memory is Memory.NONE
    assert "--memory preferred" in rank.reason


def test_a_file_without_cpus_is_named() -> None:
    """What has no CPUs is the file, not this process's allowed CPUs."""
    with pytest.raises(PlanError, match=r"^cloud\.xml lists no CPUs") as caught:
        make_plan(
            replace(
                grid(),
                source="cloud.xml",
                cores=(),
                packages=(),
                nodes=(),
                allowed=Allowed(cpus=CpuSet(), nodes=CpuSet()),
            ),
            Request(),
        )
    assert "/proc/self/status" not in str(caught.value)


def test_counts_of_one() -> None:
    """One CPU, one core and one package are not "1 CPUs"; unknown packages are not "0 packages"."""
    one = grid(nodes=1, cores=1, smt=1, gpus=[0])
    reasons = [rank.reason for bind in Bind for rank in make_plan(one, Request(bind=bind)).ranks]
    assert "all 1 CPU of node 0" in reasons[1]
    assert not any(re.search(r"\b1 (CPUs|cores|ranks|GPUs|nodes)\b", reason) for reason in reasons)
    assert "1 socket, 1 NUMA node, 1 GPU, 1 core, 1 CPU" in str(one)
    assert "sockets unknown" in str(replace(one, packages=()))


# --- warnings --------------------------------------------------------------------------------------------------------


def test_idle_cpus_are_warned_of() -> None:
    """Nodes without a rank are counted: in a rank's package with the mode that uses them, and in other packages."""
    topology = _eight(gpus=[1, 3])
    idle = "8 CPUs of nodes 0,2, which have no rank, stay idle; --bind socket uses them"
    far = "16 CPUs of nodes 4-7, on sockets without a rank, stay idle; no GPU is there; --bind none uses them"
    groups = "4 CPUs of nodes 1,3, in L3 groups without a rank, stay idle; --bind node uses them"
    for bind in (Bind.NODE, Bind.EXCLUSIVE):
        assert make_plan(topology, Request(bind=bind)).warnings == (idle, far)
    assert make_plan(topology, Request(bind=Bind.CORE_COMPLEX)).warnings == (idle, far, groups)
    assert make_plan(topology, Request(bind=Bind.SOCKET)).warnings == (far,)
    assert make_plan(topology, Request(bind=Bind.NONE)).warnings == ()


@pytest.mark.parametrize("bind", [Bind.NODE, Bind.SOCKET, Bind.EXCLUSIVE])
def test_idle_cpus_of_another_package_are_warned_of(bind: Bind) -> None:
    """A package without a rank is reported with what would use it: its GPUs, no binding, or more ranks."""
    idle = "8 CPUs of node 1, on sockets without a rank, stay idle; "
    only_one_side = grid(packages=2, nodes=1, gpus=[0, 0])
    assert make_plan(only_one_side, Request(bind=bind)).warnings == (f"{idle}no GPU is there; --bind none uses them",)
    all_sides = grid(packages=2, nodes=1, gpus=[0, 0, 1, 1])
    there = "gpus 2-3 are there: name GPUs with --gpus, or start more ranks"
    assert make_plan(all_sides, Request(bind=bind, num_ranks=2)).warnings == (f"{idle}{there}",)
    without = make_plan(grid(packages=2, nodes=1), Request(bind=bind, num_ranks=1))
    assert without.warnings == (f"{idle}more ranks use them",)
    assert make_plan(grid(packages=2, nodes=1), Request(bind=bind, num_ranks=2)).warnings == ()


def test_no_idle_warning_without_usable_cpus() -> None:
    """Nodes without usable CPUs are not reported as idle."""
    assert make_plan(_limited(grid(gpus=[0]), "0-3"), Request()).warnings == ()


def test_a_node_that_took_over_is_not_idle() -> None:
    """A node without a GPU whose CPUs serve the rank of an empty node is in use."""
    (warning,) = make_plan(_limited(grid(gpus=[0]), "4-7"), Request()).warnings
    assert warning.startswith("rank 0: ")


def test_notes_of_the_machine_come_first() -> None:
    """Notes of the readers are warnings of every plan."""
    plan = make_plan(replace(grid(gpus=[None]), notes=("a note",)), Request())
    assert plan.warnings[0] == "a note"
    assert plan.warnings[1].startswith("the NUMA node of gpu0 (0000:10:00.0) is unknown")
    assert plan.warnings[2] == "rank 0: not bound: the node of GPU 0 (0000:10:00.0) is unknown"


def test_ranks_that_share_a_gpu_are_warned_of() -> None:
    """If there are more ranks than GPUs, one warning says so, in every mode."""
    for bind in Bind:
        plan = make_plan(grid(gpus=[0, 1]), Request(bind=bind, num_ranks=4))
        assert plan.warnings == ("4 ranks on 2 GPUs: each GPU is shared by 2 ranks",)
    (uneven,) = make_plan(grid(gpus=[0, 1]), Request(num_ranks=3)).warnings
    assert uneven == "3 ranks on 2 GPUs: each GPU is shared by up to 2 ranks"
    assert make_plan(grid(gpus=[0, 1]), Request(num_ranks=2)).warnings == ()


def test_one_warning_for_one_shortfall() -> None:
    """Ranks on different GPUs that lack the same have one warning; their reasons name the GPUs."""
    plan = make_plan(grid(gpus=[0, 0, 1, 1]), Request(cpus_per_rank=16))
    assert plan.warnings == ("ranks 0-3: 4 CPUs instead of 16: 2 ranks share these CPUs",)
    alone, *_ = make_plan(grid(gpus=[0]), Request(cpus_per_rank=16)).warnings
    assert alone == "rank 0: 8 CPUs instead of 16"


# --- refusals --------------------------------------------------------------------------------------------------------

_TWO = grid(gpus=[0, 1])


@pytest.mark.parametrize(
    ("make", "kind", "message", "hint"),
    [
        (
            lambda: make_plan(_TWO, Request(reserve_cpus=CpuSet({3, 99}))),
            UsageError,
            "--reserve-cpus: CPUs 99 do not exist; online are 0-15",
            "see them with: numapin topo",
        ),
        (
            lambda: make_plan(_TWO, Request(reserve_cpus=CpuSet(range(16)))),
            PlanError,
            "no CPU is left: allowed are 0-15, --reserve-cpus takes 0-15",
            "see what is allowed there in the field `allowed` of: numapin topo --json",
        ),
        (
            lambda: make_plan(_limited(_TWO, ""), Request()),
            PlanError,
            "no CPU is left: allowed are none, --reserve-cpus takes none",
            "see what is allowed there in the field `allowed` of: numapin topo --json",
        ),
        (
            lambda: make_plan(_TWO, Request(cpus_per_rank=9, smt=False)),
            PlanError,
            "--cpus-per-rank 9: ranks may use 8 CPUs in all (0-7)",
            "ask for fewer CPUs per rank",
        ),
        (
            lambda: make_plan(_TWO, Request(bind=Bind.EXCLUSIVE, num_ranks=10)),
            PlanError,
            "too few exclusive cores for 5 ranks on node 0: 4 usable cores (CPUs 0-3,8-11)",
            "use fewer ranks (--nproc-per-node), reserve fewer CPUs (--reserve-cpus), or share them: --bind node",
        ),
        (
            lambda: make_plan(_TWO, Request(gpus=("0", "9"))),
            UsageError,
            "--gpus: no GPU matches '9'; available: 0 (0000:10:00.0), 1 (0000:11:00.0)",
            "list them with: numapin topo",
        ),
        (
            lambda: make_plan(_TWO, Request(gpus=("2",))),
            UsageError,
            "--gpus: no GPU matches '2'; available: 0 (0000:10:00.0), 1 (0000:11:00.0)",
            "for 2 ranks, give --nproc-per-node 2; --gpus lists GPUs, such as 0,1: see numapin topo",
        ),
        (
            lambda: make_plan(_TWO, Request(gpus=("0", "0000:10:00.0"))),
            UsageError,
            "--gpus names a GPU twice: [0, 0]",
            "for several ranks per GPU: --nproc-per-node N",
        ),
        (
            lambda: make_plan(replace(grid(), gpus=(gpu(0, 0), gpu(1, 1, visible=False))), Request(gpus=("1",))),
            UsageError,
            "--gpus names gpu1; CUDA_VISIBLE_DEVICES shows gpu0",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            lambda: make_plan(_TWO, Request(gpus=())),
            UsageError,
            "--gpus names nothing; CUDA_VISIBLE_DEVICES shows gpu0, gpu1",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            lambda: make_plan(grid(gpu_nodes=[9], gpus=[0]), Request(memory=Memory.BIND, memory_nodes=CpuSet({0, 9}))),
            UsageError,
            "--memory: node 9 has no host memory that this process may use; usable: 0-1",
            "see them with: numapin topo",
        ),
        (
            lambda: make_plan(
                grid(memoryless=[0], memory_nodes=[7], allowed_nodes=CpuSet({0, 7})),
                Request(memory=Memory.INTERLEAVE, memory_nodes=CpuSet({0, 1, 7})),
            ),
            UsageError,
            "--memory: nodes 0-1 have no host memory that this process may use; usable: 7",
            "see them with: numapin topo",
        ),
        (
            lambda: make_plan(_TWO, Request(memory=Memory.BIND, memory_nodes=CpuSet())),
            UsageError,
            "--memory: no node is named; usable: 0-1",
            "see them with: numapin topo",
        ),
        (
            lambda: Request(num_ranks=0),
            UsageError,
            "--nproc-per-node is 0; it must be at least 1",
            "numapin run --help",
        ),
        (
            lambda: Request(cpus_per_rank=-1),
            UsageError,
            "--cpus-per-rank is -1; it must be at least 1",
            "numapin run --help",
        ),
        (
            lambda: Request(bind=Bind.NONE, cpus_per_rank=2),
            UsageError,
            "--cpus-per-rank with --bind none binds nothing",
            "choose a mode, such as: --bind node",
        ),
        (
            lambda: Request(memory=Memory.LOCAL, memory_nodes=CpuSet({0})),
            UsageError,
            "--memory local takes no nodes",
            "name them with bind, preferred or interleave",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(make: Callable[[], object], kind: type[NumapinError], message: str, hint: str) -> None:
    """Each error says what failed, on what, what was seen, and what to type next."""
    with pytest.raises(NumapinError) as caught:
        make()
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == (message, hint)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_is_the_contract() -> None:
    """The keys of numapin.plan/1; a rank without a GPU has null there."""
    rank = RankPlan(
        local_rank=0,
        gpu=None,
        node=None,
        cpus=CpuSet({0, 1, 4}),
        nodes=CpuSet({0}),
        memory=Memory.NONE,
        num_threads=3,
        exact=False,
        reason="why",
    )
    bound = replace(
        rank,
        local_rank=1,
        gpu=GpuRef(index=1, uuid="GPU-1", pci=None),
        node=0,
        memory=Memory.BIND,
        nics=("mlx5_1", "mlx5_0"),
        nics_reason="nearest (PIX), one of 2 equally near",
        nic_env=(NicLibrary.NVSHMEM,),
        roles={"main": "0-1"},
    )
    plan = Plan(bind=Bind.NODE, memory=Memory.BIND, ranks=(rank, bound), warnings=("w",))
    data = plan.to_json()
    assert {key: value for key, value in data.items() if key != "ranks"} == {
        "schema": "numapin.plan/1",
        "bind": "node",
        "memory": "bind",
        "warnings": ["w"],
    }
    assert data["ranks"] == [
        {
            "local_rank": 0,
            "gpu": None,
            "node": None,
            "cpus": "0-1,4",
            "nodes": "0",
            "memory": "none",
            "num_threads": 3,
            "exact": False,
            "reason": "why",
            "within": None,
            "nics": None,
            "nics_reason": None,
            "nic_env": [],
            "roles": None,
        },
        {
            **rank.to_json(),
            "local_rank": 1,
            "gpu": {"index": 1, "uuid": "GPU-1", "pci": None},
            "node": 0,
            "memory": "bind",
            "nics": ["mlx5_1", "mlx5_0"],
            "nics_reason": "nearest (PIX), one of 2 equally near",
            "nic_env": ["nvshmem"],
            "roles": {"main": "0-1"},
        },
    ]
    assert Plan.from_json(json.dumps(data)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json: not JSON: Expecting property name"),
        ("9" * 5000, "plan.json: not JSON: Exceeds the limit"),
        ("[" * 100_000, "plan.json: not JSON: it is nested too deeply"),
        (
            '{"schema": "numapin.topology/1"}',
            "plan.json: schema: expected 'numapin.plan/1', found 'numapin.topology/1'",
        ),
        ('{"schema": "numapin.plan/1", "bind": "core"}', "plan.json: bind: 'core' is not a valid Bind"),
        (
            '{"schema": "numapin.plan/1", "bind": "node", "memory": "none", "ranks": [{}], "warnings": []}',
            "plan.json: ranks[0].local_rank: expected a non-negative integer, found nothing",
        ),
        (
            '{"schema": "numapin.plan/1", "bind": "node", "memory": "none", "ranks": [], "warnings": [1]}',
            "plan.json: warnings[0]: expected a string, found 1",
        ),
    ],
)
def test_bad_plan_files_are_named_with_the_element(text: str, message: str) -> None:
    """A malformed plan says which file and which element."""
    with pytest.raises(MachineFileError) as caught:
        Plan.from_json(text, source="plan.json")
    assert caught.value.message.startswith(message)
    assert caught.value.hint
