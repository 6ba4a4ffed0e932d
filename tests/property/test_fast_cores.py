"""Properties of plans on machines with fast and slow cores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from numapin import Bind, Request
from tests.machines.grids import grid
from tests.property.seam import CpuSet, CpuSpeed
from tests.property.test_plan import plan_or_none

if TYPE_CHECKING:
    from numapin import Core, Plan, RankPlan, Topology

several = settings(max_examples=200)
FAST, SLOW = 200, 100


@dataclass(frozen=True)
class Case:
    """A machine, the lowest CPUs of its fast cores, a request, and the plan; None: there is none."""

    topology: Topology
    fast: frozenset[int]
    request: Request
    plan: Plan | None


@st.composite
def cases(draw: st.DrawFn, bind: Bind) -> Case:
    """Draw a machine with any cores fast, by either rating, and ranks for any of its nodes."""
    nodes = draw(st.integers(1, 2))
    machine = grid(
        nodes=nodes,
        l3=draw(st.integers(1, 4)),
        cores=draw(st.integers(1, 5)),
        smt=draw(st.sampled_from([1, 2])),
        gpus=draw(st.lists(st.integers(0, nodes - 1), max_size=6)),
    )
    fast = draw(st.frozensets(st.sampled_from([core.id for core in machine.cores])))
    topology = replace(machine, speeds=_speeds(machine, fast, by_capacity=draw(st.booleans())))
    few = draw(st.none() | st.integers(1, 6)) if bind is Bind.EXCLUSIVE else None
    request = Request(bind=bind, num_ranks=draw(st.none() | st.integers(1, 6)), cpus_per_rank=few)
    return Case(topology, fast, request, plan_or_none(topology, request))


def _speeds(machine: Topology, fast: frozenset[int], *, by_capacity: bool) -> tuple[CpuSpeed, ...]:
    sets = {
        number: CpuSet(cpu for core in machine.cores if (core.id in fast) == is_fast for cpu in core.cpus)
        for number, is_fast in ((FAST, True), (SLOW, False))
    }
    return tuple(
        CpuSpeed(cpus=cpus, capacity=number) if by_capacity else CpuSpeed(cpus=cpus, highest_perf=number)
        for number, cpus in sets.items()
        if cpus
    )


def _nodes(case: Case) -> list[tuple[list[Core], list[RankPlan]]]:
    """Return the cores and the ranks of each node that has fast and slow cores, and ranks."""
    found = []
    for node in case.topology.cpu_nodes:
        cores = [core for core in case.topology.cores if core.node == node.id]
        ranks = [rank for rank in (case.plan.ranks if case.plan else ()) if rank.node == node.id]
        if ranks and 0 < len({core.id for core in cores} & case.fast) < len(cores):
            found.append((cores, ranks))
    return found


def _cores(rank: RankPlan, cores: list[Core]) -> list[Core]:
    return [core for core in cores if core.cpus & rank.cpus]


@several
@given(cases(Bind.EXCLUSIVE))
def test_exclusive_ranks_share_fast_cores_evenly(case: Case) -> None:
    """Ranks of a node get as many cores and fast cores, within one, none twice; no fast core idles by a slow one."""
    for cores, ranks in _nodes(case):
        own = [[core.id for core in _cores(rank, cores)] for rank in ranks]
        num_fast = [len(case.fast.intersection(ids)) for ids in own]
        assert max(num_fast) - min(num_fast) <= 1
        assert max(map(len, own)) - min(map(len, own)) <= 1
        taken = [core for ids in own for core in ids]
        assert len(taken) == len(set(taken))
        for rank, ids, number in zip(ranks, own, num_fast, strict=True):
            assert f"; {number} of its {len(ids)} core" in rank.reason
        left = {core.id for core in cores}.difference(taken)
        assert not left & case.fast or case.fast.issuperset(taken)


@several
@given(cases(Bind.CORE_COMPLEX))
def test_l3_groups_are_dealt_evenly_or_not_by_speed(case: Case) -> None:
    """Ranks of a node get L3 groups with the same number of fast cores, the most there are, if these suffice."""
    for cores, ranks in _nodes(case):
        num_fast = {l3: len({core.id for core in cores if core.l3 == l3} & case.fast) for l3 in {c.l3 for c in cores}}
        most_first = sorted(num_fast.values(), reverse=True)[: len(ranks)]
        own = [len({core.id for core in _cores(rank, cores)} & case.fast) for rank in ranks]
        if most_first[0] - most_first[-1] <= 1:
            assert sorted(set(own)) == sorted(set(most_first))


@several
@given(cases(Bind.EXCLUSIVE) | cases(Bind.CORE_COMPLEX))
def test_ratings_that_say_nothing_change_nothing(case: Case) -> None:
    """The plan is that of a machine without ratings if cores differ by a few percent."""
    assert plan_or_none(case.topology, case.request) == case.plan
    without = plan_or_none(replace(case.topology, speeds=()), case.request)
    speeds = tuple(
        replace(speed, highest_perf=(speed.highest_perf or speed.capacity or 0) // 50 + 200, capacity=None)
        for speed in case.topology.speeds
    )
    assert plan_or_none(replace(case.topology, speeds=speeds), case.request) == without
