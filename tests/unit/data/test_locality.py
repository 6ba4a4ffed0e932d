"""The nodes and CPUs of a rank's memory and threads, on synthetic machines and under `numapin run`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from numapin import Memory, RankPlan
from numapin.errors import LibnumaError, UsageError
from tests.contract.datasets import Raise
from tests.data.loopback import ANYWHERE
from tests.machines import roots
from tests.unit.data import seam
from tests.unit.data.seam import BINDING, CpuSet, Locality, find_locality

Written: TypeAlias = "Callable[[str], Path]"
RANK = RankPlan(
    local_rank=1,
    gpu=None,
    node=1,
    cpus=CpuSet({24, 25}),
    nodes=CpuSet({1}),
    memory=Memory.PREFERRED,
    num_threads=2,
    exact=True,
    reason="a test",
)
TWO_NODES = "2pkg-2node-smt2-8gpu-a100"
HIDDEN = "2node-48cpu-8gpu-nosysfs"
REMEDY = "if you know it, set it with node=N; see: numapin topo"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    @cache
    def write(machine: str) -> Path:
        root = tmp_path_factory.mktemp(machine)
        roots.write_root(roots.load(machine), root)
        return root

    return write


def found(
    written: Written, machine: str, *, node: int | None = None, device: int | None = None, rank: RankPlan | None = None
) -> Locality:
    environ = {} if rank is None else {BINDING: json.dumps(rank.to_json())}
    return find_locality(environ=environ, node=node, device_index=device, root=written(machine))


def near(node: int, machine: str) -> Locality:
    facts = roots.load(machine)
    here = replace(ANYWHERE, nodes=CpuSet({node}), cpus=facts.cpu_nodes[node])
    return replace(here, memory=Memory.PREFERRED, num_machine_nodes=len(facts.nodes))


class TestAlone:
    @pytest.mark.parametrize(
        ("machine", "device", "node"),
        [
            (TWO_NODES, 7, 1),
            ("8node-sparse-2gpu", 0, 45),
            ("2pkg-34node-gpumem-4gpu", 3, 1),  # 34 nodes, 32 of them GPU memory: never the GPU's own
        ],
    )
    def test_the_node_of_the_gpu(self, written: Written, machine: str, device: int, node: int) -> None:
        """Memory prefers the GPU's node, workers get its CPUs, and the reason names the GPU."""
        facts = roots.load(machine)
        locality = found(written, machine, device=device)
        assert locality.reason.startswith(f"cuda:{device}: GPU {device} (")
        assert replace(locality, reason="") == replace(
            near(node, machine), reason="", within=CpuSet(facts.cpu_nodes) if "gpumem" in machine else CpuSet()
        )

    def test_no_memory_on_the_node(self, written: Written) -> None:
        """The CPUs stay near the GPU; the memory is on the nearest node that has some."""
        locality = found(written, "4node-memoryless-2gpu", device=0)
        assert (locality.cpus, locality.nodes) == (frozenset(range(4, 8)), frozenset({0}))
        assert "no allowed memory on node 1; node 0 is the nearest" in locality.reason

    @pytest.mark.parametrize(
        ("machine", "device", "reason"),
        [
            (TWO_NODES, None, "no node and no device is known; the memory policy decides"),
            (TWO_NODES, 99, f"cuda:99: its NUMA node is unknown: no GPU with this CUDA index was found; {REMEDY}"),
            (HIDDEN, 0, f"cuda:0: its NUMA node is unknown: no source reports it; {REMEDY}"),
        ],
    )
    def test_nothing_is_known(self, written: Written, machine: str, device: int | None, reason: str) -> None:
        """Nothing is placed or bound, and the reason says why; a virtual machine may hide the node."""
        assert found(written, machine, device=device) == replace(ANYWHERE, num_machine_nodes=2, reason=reason)

    def test_a_machine_that_cannot_be_read(self, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
        """A missing library prevents the placement, not the program; its remedy is in the reason."""
        fail = Raise(LibnumaError, ("libnuma could not be loaded: gone", "install it"))
        monkeypatch.setattr(seam.discover, "discover", fail)
        locality = found(written, TWO_NODES, device=0)
        assert locality.nodes == frozenset()
        assert locality.reason.endswith("libnuma could not be loaded: gone; install it")


@pytest.mark.parametrize("machine", ["1node-16cpu-1gpu-vm", "1pkg-nonode-2cpu"])
def test_the_only_node(written: Written, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node is known without reading the machine; CPUs and policy stay as they are."""
    monkeypatch.setattr(seam.discover, "discover", None)
    reason = "the machine has one NUMA node, 0"
    assert found(written, machine, device=0) == replace(ANYWHERE, nodes=CpuSet({0}), reason=reason)


def test_the_plan_still_gives_the_cpus(written: Written) -> None:
    """`numapin run` splits a node's CPUs among ranks."""
    rank = replace(RANK, cpus=CpuSet({3}), memory=Memory.NONE, nodes=CpuSet())
    locality = found(written, "1node-16cpu-1gpu-vm", device=0, rank=rank)
    assert (locality.nodes, locality.cpus, locality.memory) == (frozenset({0}), frozenset({3}), None)


@pytest.mark.parametrize(
    ("memory", "nodes"), [(Memory.LOCAL, {1}), (Memory.BIND, {1}), (Memory.INTERLEAVE, set()), (Memory.NONE, set())]
)
def test_the_plan_is_taken_over(written: Written, memory: Memory, nodes: set[int]) -> None:
    """The launcher's plan counts, whatever the device; its policy spreads interleaved memory, or leaves all."""
    assert found(written, TWO_NODES, device=0, rank=replace(RANK, memory=memory)) == Locality(
        nodes=CpuSet(nodes),
        cpus=CpuSet({24, 25}),
        memory=None if memory is Memory.NONE else memory,
        num_machine_nodes=2,
        reason="planned by numapin run: a test",
    )


def test_a_named_node_wins(written: Written) -> None:
    """It takes precedence over the plan and the GPU, and brings its CPUs; pages stay on nodes with CPUs."""
    locality = found(written, "2pkg-34node-gpumem-4gpu", node=1)
    assert (locality.nodes, locality.within) == (frozenset({1}), frozenset({0, 1}))
    expected = replace(near(0, TWO_NODES), reason="requested with node=0")
    assert found(written, TWO_NODES, node=0, device=7, rank=RANK) == expected


@pytest.mark.parametrize(
    ("machine", "node", "problem"),
    [
        (TWO_NODES, 2, "node=2: NUMA node 2 does not exist; usable nodes: 0-1"),
        (TWO_NODES, "1", "node='1': NUMA node '1' does not exist; usable nodes: 0-1"),
        (
            "2pkg-34node-gpumem-4gpu",
            2,
            "node=2: NUMA node 2 has no CPUs, so host memory cannot be placed there; usable",
        ),
    ],
)
def test_no_such_node(written: Written, machine: str, node: int, problem: str) -> None:
    """The usable nodes are named; a node of GPU memory is not one of them."""
    with pytest.raises(UsageError) as caught:
        found(written, machine, node=node)
    assert caught.value.message.startswith(problem)
    assert caught.value.hint == "see: numapin topo"


def test_none_of_its_cpus_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers then keep their CPUs, and the reason says so."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {9999})
    monkeypatch.setattr(seam.Tree, "numbers", lambda *_paths, **_options: CpuSet({0}))
    locality = find_locality(environ={}, node=0, device_index=None)
    assert (locality.nodes, locality.cpus) == (frozenset({0}), frozenset())
    assert locality.reason == "requested with node=0; this process may use none of its CPUs, so CPUs stay as they are"
