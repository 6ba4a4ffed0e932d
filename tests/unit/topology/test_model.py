"""The topology: its invariants, queries and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from numapin import Allowed, Core, Gpu, Link, Nic, Node, Package, Topology
from tests.machines.grids import gpu, grid
from tests.unit.topology.seam import CpuSet, Mig, NicInterface, NicKind, NodeKind, NodeSource, Pcie

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = CpuSet({0})
ETH0 = Nic(
    name="eth0",
    pci="0000:01:00.0",
    node=0,
    interface=NicInterface.NETWORK,
    is_up=True,
    rate_gbit_s=2.5,
    pci_parents=("0000:00:01.0",),
)


def _full() -> Topology:
    """Return a topology in which every field is set."""
    one = replace(
        gpu(0, 1), cpus=CpuSet({2, 3}), pcie=Pcie(gen=5, width=16, max_gen=5, max_width=16), mig=(Mig(uuid="MIG-1"),)
    )
    return replace(
        grid(gpu_nodes=[9], memory_nodes=[8]),
        host="h",
        gpus=(one, gpu(1, None, visible=False)),
        nics=(ETH0, Nic(name="mlx5_0", kind=NicKind.INFINIBAND)),
        links=(Link(a="gpu0", b="gpu1", kind="NV4"),),
        notes=("a note",),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Node(id=0, kind=NodeKind.CPU, cpus=CpuSet()), "node 0 of kind 'cpu' has CPUs ''"),
        (lambda: Node(id=3, kind=NodeKind.GPU, cpus=CPU), "node 3 of kind 'gpu' has CPUs '0'"),
        (lambda: Core(id=0, cpus=CpuSet()), "core 0 has no CPUs"),
        (lambda: Gpu(index=0, node=1), "GPU 0 has node 1 from source None"),
        (lambda: Gpu(index=0, node_source=NodeSource.SYSFS), "GPU 0 has node None from source sysfs"),
        (lambda: Gpu(index=2, visible=False, cuda_index=0), "GPU 2 is not visible but has CUDA index 0"),
        (lambda: replace(grid(), gpus=(gpu(0, 7),)), "gpu0 is on node 7, which the machine does not have"),
        (lambda: replace(grid(), nics=(Nic(name="e", node=7),)), "e is on node 7, which the machine does not have"),
        (lambda: replace(grid(), cores=(Core(id=0, cpus=CPU, node=7),)), "core 0 is on node 7, which"),
        (lambda: replace(grid(), packages=(Package(id=0, nodes=CpuSet({7})),)), "package 0 is on node 7, which"),
        (lambda: replace(grid(), nodes=grid().nodes * 2), "node 0 appears twice"),
        (lambda: replace(grid(), packages=grid().packages * 2), "package 0 appears twice"),
        (lambda: replace(grid(), cores=grid().cores * 2), "CPU 0 appears twice"),
        (lambda: replace(grid(), gpus=(gpu(0, 0), gpu(0, 1))), "GPU 0 appears twice"),
        (lambda: replace(grid(), gpus=(gpu(1, 0), replace(gpu(0, 1), cuda_index=1))), "CUDA index 1 appears twice"),
    ],
)
def test_invariants(make: Callable[[], object], message: str) -> None:
    """A topology that contradicts itself cannot be made."""
    with pytest.raises(ValueError, match=message):
        make()


def test_distance_to() -> None:
    """A node is at distance 10 from itself by default; an unknown distance is the farthest."""
    node = Node(id=0, kind=NodeKind.CPU, cpus=CPU, distances={1: 21})
    assert [node.distance_to(other) for other in (0, 1, 2)] == [10, 21, float("inf")]


def test_queries() -> None:
    """CPUs, CPU nodes, and GPUs in CUDA's order without the hidden ones."""
    topology = replace(
        _full(), gpus=(replace(gpu(0, 0), cuda_index=1), gpu(1, 0, visible=False), replace(gpu(2, 1), cuda_index=0))
    )
    assert topology.cpus == CpuSet(range(16))
    assert [node.id for node in topology.cpu_nodes] == [0, 1]
    assert [g.index for g in topology.visible_gpus] == [2, 0]
    unordered = replace(topology, gpus=(replace(gpu(1, 0), cuda_index=None), replace(gpu(0, 0), cuda_index=None)))
    assert [g.index for g in unordered.visible_gpus] == [0, 1]


def test_restrict_only_ever_takes_away() -> None:
    """Restricting twice leaves the intersection; the machine itself stays whole."""
    topology = grid()
    once = topology.restrict(Allowed(cpus=CpuSet({0, 1, 99}), nodes=CpuSet({0})))
    twice = once.restrict(Allowed(cpus=CpuSet({1, 2}), nodes=CpuSet({0, 1})))
    assert once.allowed == Allowed(cpus=CpuSet({0, 1}), nodes=CpuSet({0}))
    assert twice.allowed == Allowed(cpus=CpuSet({1}), nodes=CpuSet({0}))
    assert replace(twice, allowed=topology.allowed) == topology


def test_json_reads_back() -> None:
    """A saved topology with every field reads back equal; files of versions that lack newer fields are read too."""
    data = _full().to_json()
    assert data["schema"] == "numapin.topology/1"
    assert {"nics": None, "nics_reason": None}.items() <= data["gpus"][0].items()  # type: ignore[index] # JSON
    assert Topology.from_json(json.dumps(data)) == _full()
    for added in (
        "notes",
        "siblings_known",
        "doubtful_nodes",
        "memory_bytes",
        "speeds",
        "gpu_order_known",
        "allowed_known",
    ):
        del data[added]
    assert Topology.from_json(json.dumps(data)) == replace(_full(), notes=())
