"""No rank's pages go to GPU memory: what the kernel is told for every machine, mode and policy.

The kernel is a stand-in of a few lines: `bind` allows its own nodes only; every other policy falls back to any node
that the process may use (mm/mempolicy.c: "normal fallback"; `bind`: "no fallback").
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Memory, Plan, RankPlan, Request, Topology, make_plan
from tests.machines.grids import grid
from tests.machines.roots import NAMES
from tests.pictures import golden_machine
from tests.unit.plan.seam import CpuSet, NodeKind, RankSlice, bind, environment_lines, numa, slice_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WITH_GPU_MEMORY = [name for name in NAMES if "gpumem" in name]
REQUESTS = [Request(bind=mode, memory=memory) for mode in Bind for memory in (None, *Memory)]
CANNOT = (Memory.NONE, Memory.INTERLEAVE)
"""Policies that cannot be kept out of GPU memory."""
GRACE = grid(packages=2, nodes=1, smt=1, gpus=[0, 1], gpu_nodes=[2, 3])


@pytest.fixture
def policy_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[RankPlan | RankSlice], tuple[int, CpuSet]]:
    """Return a function for the mode and the nodes that the kernel is given for a rank; its CPUs are not bound."""
    told: list[tuple[int, CpuSet]] = []

    def record(mode: int, nodes: Iterable[int]) -> None:
        told.append((mode, CpuSet(nodes)))

    monkeypatch.setattr(numa, "set_memory_policy", record)
    monkeypatch.setattr(bind, "_bind_cpus", lambda _cpus: ())

    def policy(rank: RankPlan | RankSlice) -> tuple[int, CpuSet]:
        told[:] = [(numa.MPOL_DEFAULT, CpuSet())]
        assert bind.apply(rank).shortfalls == ()
        return told[-1]

    return policy


def _gpu_memory(topology: Topology) -> CpuSet:
    return CpuSet(node.id for node in topology.nodes if node.kind is NodeKind.GPU)


def _may_use(policy: tuple[int, CpuSet], topology: Topology) -> CpuSet:
    """Return the nodes where the kernel may put pages under a policy."""
    mode, nodes = policy
    return nodes if mode == numa.MPOL_BIND else topology.allowed.nodes


def test_machines_with_gpu_memory_are_among_the_fixtures() -> None:
    """Three machines have nodes of GPU memory, so that the test below means something."""
    assert len(WITH_GPU_MEMORY) == 3
    assert all(_gpu_memory(golden_machine(name)) for name in WITH_GPU_MEMORY)


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_allows_gpu_memory(
    name: str, policy_of: Callable[[RankPlan | RankSlice], tuple[int, CpuSet]]
) -> None:
    """No policy names GPU memory, and none can spill into it; where a policy cannot avoid it, the plan says so."""
    topology = golden_machine(name)
    gpu_memory = _gpu_memory(topology) & topology.allowed.nodes
    for request, rank in ((one, rank) for one in REQUESTS for rank in make_plan(topology, one).ranks):
        mode, nodes = policy_of(rank)
        assert policy_of(RankSlice(slice_text(rank))) == (mode, nodes), request
        assert not nodes & _gpu_memory(topology), request
        spills = bool(_may_use((mode, nodes), topology) & gpu_memory)
        assert spills == bool(gpu_memory and request.policy in CANNOT), request
        assert spills == ("pages may go to GPU memory (node" in rank.reason), request


def test_the_default_on_a_grace_host(policy_of: Callable[[RankPlan | RankSlice], tuple[int, CpuSet]]) -> None:
    """`preferred` keeps its nodes, the kernel binds to all nodes with CPUs, and the reason says why."""
    plan = make_plan(GRACE, Request())
    assert [(rank.memory, rank.nodes, rank.within) for rank in plan.ranks] == [
        (Memory.PREFERRED, CpuSet({0}), CpuSet({0, 1})),
        (Memory.PREFERRED, CpuSet({1}), CpuSet({0, 1})),
    ]
    assert plan.exact
    assert plan.ranks[0].reason.endswith("; pages stay on nodes 0-1: GPU memory (nodes 2-3) is never used for them")
    assert policy_of(plan.ranks[0]) == (numa.MPOL_BIND, CpuSet({0, 1}))
    assert "NUMAPIN_MEMORY=bind NUMAPIN_NODES=0-1" in environment_lines(plan, {})[0]


def test_a_preference_for_far_memory_is_not_exact() -> None:
    """Without a fallback the kernel takes the CPU's own node, so a preference for another one cannot be kept."""
    for request in (
        Request(bind=Bind.NONE, memory=Memory.PREFERRED),
        Request(memory=Memory.PREFERRED, memory_nodes=CpuSet({1})),
    ):
        rank = make_plan(GRACE, request).ranks[0]
        assert (rank.exact, rank.within) == (False, CpuSet({0, 1}))
        assert "cannot be preferred from CPUs of other nodes; pages go to the CPU's own node" in rank.reason


def test_named_memory_without_cpus_is_among_the_nodes() -> None:
    """CXL memory that the user named is used, but not by default."""
    machine = grid(packages=2, nodes=1, smt=1, gpus=[0], gpu_nodes=[3], memory_nodes=[2])
    named = Request(memory=Memory.PREFERRED, memory_nodes=CpuSet({0, 2}))
    assert make_plan(machine, named).ranks[0].within == CpuSet({0, 1, 2})
    assert make_plan(machine, Request()).ranks[0].within == CpuSet({0, 1})


def test_a_rank_without_a_home_stays_out_of_gpu_memory() -> None:
    """A rank whose node is unknown gets the policy `local`, limited to host memory."""
    (rank,) = make_plan(replace(GRACE, gpus=grid(gpus=[None]).gpus), Request()).ranks
    assert (rank.memory, rank.within) == (Memory.LOCAL, CpuSet({0, 1}))


def test_a_cpuset_without_gpu_memory_needs_no_limit() -> None:
    """Where the cpuset forbids GPU memory, the kernel does not fall back to it."""
    machine = grid(packages=2, nodes=1, smt=1, gpus=[0], gpu_nodes=[2], allowed_nodes=CpuSet({0, 1}))
    (rank,) = make_plan(machine, Request()).ranks
    assert (rank.memory, rank.within) == (Memory.PREFERRED, None)


def test_files_without_the_field_are_read() -> None:
    """Plans of older versions have no `within`."""
    plan = make_plan(GRACE, Request())
    text = {**plan.to_json(), "ranks": [{k: v for k, v in r.to_json().items() if k != "within"} for r in plan.ranks]}
    assert {rank.within for rank in Plan.from_json(json.dumps(text)).ranks} == {None}
