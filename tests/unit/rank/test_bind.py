"""Binding and reading back on this machine's own kernel, each time in a process of its own. Several nodes: tests/vm."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from numapin import Bind, Memory, Plan, RankPlan
from numapin.errors import BindingRefused
from tests.needs import needs_two_cpus
from tests.unit.rank.seam import CpuSet, bind, cpu_set, numa
from tests.unit.rank.seam import launcher_rehearse as rehearse

CPUS = CpuSet(os.sched_getaffinity(0))
RANK = RankPlan(
    local_rank=0,
    gpu=None,
    node=0,
    cpus=CPUS,
    nodes=CpuSet({0}),
    memory=Memory.BIND,
    num_threads=1,
    exact=True,
    reason="a test",
)
PLAN = Plan(bind=Bind.NODE, memory=Memory.BIND, ranks=(RANK,))


def in_child(expression: str) -> str:
    """Evaluate an expression over `bind` and the rank in a new process, and return what it prints."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from dataclasses import replace\n"
        "from numapin.rank import bind\n"
        "from numapin.plan.request import Memory\n"
        "from tests.unit.rank.test_bind import RANK, PLAN\n"
        f"print({expression})\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parents[3])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_kernel_says_what_was_applied() -> None:
    """Each policy reads back as itself, with its nodes and without shortfalls."""
    applied = json.loads(
        in_child("__import__('json').dumps([bind.apply(replace(RANK, memory=m)).to_json() for m in Memory])")
    )
    nodes = {"local": "", "none": ""}
    assert [found["memory"] for found in applied] == [*Memory]
    for found in applied:
        rest = {"cpus": cpu_set.render(CPUS), "nodes": nodes.get(found["memory"], "0"), "shortfalls": []}
        assert found == {"memory": found["memory"], **rest}


@needs_two_cpus
def test_cpus_are_bound_and_others_are_told() -> None:
    """The kernel reports the one CPU; a CPU that does not exist is a shortfall, and the launcher's CPUs stay."""
    lowest = min(CPUS)
    assert in_child(f"sorted(bind.apply(replace(RANK, cpus=frozenset([{lowest}]))).cpus)") == f"[{lowest}]"
    told = in_child("bind.apply(replace(RANK, cpus=frozenset([8000]))).shortfalls[0]")
    assert told == "CPUs 8000 were refused (Invalid argument); the current CPUs stay"
    told = in_child(f"bind.apply(replace(RANK, cpus=frozenset([{lowest}, 8000]))).shortfalls[0]")
    assert told.startswith("CPUs 8000 were dropped by the cpuset")


def test_a_node_that_does_not_exist_is_told() -> None:
    """A policy on an impossible node is refused by the kernel, which is a shortfall and not an exception."""
    told = in_child("bind.apply(replace(RANK, nodes=frozenset([63]))).shortfalls[0]")
    assert told.startswith(
        "memory policy 'bind' was refused (set_mempolicy: Invalid argument): pages go where they are first touched; "
    )


class TestRehearsal:
    """The rehearsal before the ranks start."""

    def test_leaves_the_launcher_as_it_was(self) -> None:
        """Affinity and policy of the calling thread do not change, whatever the ranks get."""
        one = replace(RANK, cpus=CpuSet({min(CPUS)}))
        before = (os.sched_getaffinity(0), numa.get_memory_policy())
        assert rehearse.rehearse(replace(PLAN, ranks=(one,)), strict=True).exact
        assert (os.sched_getaffinity(0), numa.get_memory_policy()) == before

    def test_strict_takes_a_plan_that_was_inexact_before(self) -> None:
        """A plan that was inexact before is an error too."""
        with pytest.raises(BindingRefused, match="the node is unknown"):
            rehearse.rehearse(
                replace(PLAN, ranks=(replace(RANK, exact=False, reason="the node is unknown"),)), strict=True
            )


def test_a_rank_as_it_turned_out() -> None:
    """A shortfall is in the reason once, even if the rehearsal put it there; the rank is not exact."""
    assert bind.as_bound(RANK, ()) is RANK
    foreseen = bind.as_bound(RANK, ("no policy",))
    assert (foreseen.exact, foreseen.reason) == (False, "a test; no policy")
    assert bind.as_bound(foreseen, ("no policy",)) == foreseen
    both = ("no policy", "no CPUs")
    assert bind.surprises(foreseen, both) == ("no CPUs",)
    assert bind.as_bound(foreseen, both).reason == "a test; no policy; no CPUs"


class TestPages:
    """The nodes of pages, from the kernel."""

    def test_touched_pages_have_a_node_and_others_do_not(self) -> None:
        """A written page has a node that exists; an untouched page is -ENOENT."""
        size = mmap.PAGESIZE
        with mmap.mmap(-1, 4 * size) as memory:
            memory[0] = memory[2 * size] = 1
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            nodes = numa.nodes_of_pages([start + i * size for i in range(4)])
            # The view that from_buffer made is gone with the expression above; closing the map needs that.
        assert nodes[0] >= 0
        assert nodes[2] >= 0
        assert nodes[1] == nodes[3] == -2

    def test_a_process_that_is_gone(self) -> None:
        """Asking about another process that does not exist is ESRCH."""
        with pytest.raises(ProcessLookupError):
            numa.nodes_of_pages([0], pid=2**22 - 1)

    def test_nodes_out_of_range(self) -> None:
        """An impossible node number is refused before the call: libnuma would write past its mask."""
        with pytest.raises(OSError, match="no such NUMA node"):
            numa.set_memory_policy(numa.MPOL_BIND, [100_000])
