"""Binding and reading back on this machine's own kernel, each time in a process of its own. Several nodes: tests/vm."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from tests.needs import needs_two_cpus
from tests.unit.planned import PLANNED
from tests.unit.rank.seam import CpuSet, bind, cpu_set, numa
from tests.unit.rank.seam import launcher_rehearse as rehearse

CPUS = CpuSet(os.sched_getaffinity(0))
RANK = replace(PLANNED, cpus=CPUS, node=0, nodes=CpuSet({0}), memory=Memory.BIND, num_threads=1, reason="a test")
PLAN = Plan(bind=Bind.NODE, memory=Memory.BIND, ranks=(RANK,))


def bound_one(rank: RankPlan) -> dict[str, Any]:
    """Bind a child of this process as a rank, and return what the kernel says of it."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(bind.apply(rank).to_json()).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as file:
        found: dict[str, Any] = json.load(file)
    return found


@pytest.mark.parametrize("memory", Memory)
def test_the_kernel_says_what_was_applied(memory: Memory) -> None:
    """Each policy reads back as itself, with its nodes and without shortfalls; binding knows every word of `Memory`."""
    nodes = {"local": "", "none": ""}.get(memory, "0")
    rest = {"cpus": cpu_set.render(CPUS), "nodes": nodes, "shortfalls": []}
    assert bound_one(replace(RANK, memory=memory)) == {"memory": memory, **rest}


@needs_two_cpus
def test_what_the_kernel_refuses_is_a_shortfall() -> None:
    """The kernel reports the one CPU; a CPU or a node that does not exist is no exception, and other CPUs stay."""
    lowest = min(CPUS)
    one, none, both = (bound_one(replace(RANK, cpus=CpuSet(cpus))) for cpus in ([lowest], [8000], [lowest, 8000]))
    assert one["cpus"] == both["cpus"] == str(lowest)
    assert none["cpus"] == cpu_set.render(CPUS)
    assert none["shortfalls"] == ["CPUs 8000 were refused (Invalid argument); the current CPUs stay"]
    assert both["shortfalls"][0].startswith("CPUs 8000 were dropped by the cpuset")
    assert bound_one(replace(RANK, nodes=CpuSet({63})))["shortfalls"][0].startswith(
        "memory policy 'bind' was refused (set_mempolicy: Invalid argument): pages go where they are first touched; "
    )


def test_a_rehearsal_leaves_the_launcher_as_it_was() -> None:
    """Affinity and policy of the calling thread do not change, whatever the ranks get."""
    one = replace(RANK, cpus=CpuSet({min(CPUS)}))
    before = (os.sched_getaffinity(0), numa.get_memory_policy())
    assert rehearse.rehearse(replace(PLAN, ranks=(one,)), strict=True).exact
    assert (os.sched_getaffinity(0), numa.get_memory_policy()) == before


def test_a_rank_as_it_turned_out() -> None:
    """A shortfall is in the reason once, even if the rehearsal put it there; the rank is not exact."""
    assert bind.as_bound(RANK, ()) is RANK
    foreseen = bind.as_bound(RANK, ("no policy",))
    assert (foreseen.exact, foreseen.reason) == (False, "a test; no policy")
    assert bind.as_bound(foreseen, ("no policy",)) == foreseen
    both = ("no policy", "no CPUs")
    assert bind.surprises(foreseen, both) == ("no CPUs",)
    assert bind.as_bound(foreseen, both).reason == "a test; no policy; no CPUs"


def test_what_is_not_there() -> None:
    """An impossible node is refused before the call: libnuma would write past its mask. No process is ESRCH."""
    with pytest.raises(OSError, match="no such NUMA node"):
        numa.set_memory_policy(numa.MPOL_BIND, [100_000])
    with pytest.raises(ProcessLookupError):
        numa.nodes_of_pages([0], pid=2**22 - 1)
