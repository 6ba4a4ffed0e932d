"""Machine files: how their format is recognized, what is wrong with others, the built-in ones; the topology."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from numapin import Core, Gpu, Nic, Node, Package, Request, Topology, discover, make_plan
from numapin.errors import UsageError
from tests.machines.grids import gpu, grid
from tests.topology.seam import CpuSet, NodeKind, NodeSource, reader, sysfs

HWLOC = '<topology version="2.0"><object type="Machine"><object type="PU" os_index="7"/></object></topology>'
NCCL = '<system version="1"><cpu numaid="0" affinity="00000100"/></system>'


JSON = json.dumps(grid(gpus=[0, 0]).to_json())


@pytest.mark.parametrize(
    ("content", "cpu"),
    [
        (f'<?xml version="1.0"?>\n<!-- <system> -->\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n{HWLOC}', 7),
        (f"\ufeff \n<!-- <topology> -->{NCCL}", 8),
        (JSON, 0),
    ],
)
def test_the_content_says_which_format_it_is(content: str, cpu: int, tmp_path: Path) -> None:
    """The root element of XML decides, whatever comes before it; JSON is ours."""
    (tmp_path / "machine").write_text(content)
    assert cpu in discover(machine=tmp_path / "machine").cpus


def test_a_bug_in_a_reader_is_not_called_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a contradiction that is found while the machine is built is reported as the machine's."""
    monkeypatch.setattr(sysfs, "read_sysfs", Mock(side_effect=ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        discover()


# Name -> the node and the own NIC of each GPU, by hand.
MACHINES = {
    "dgx-a100": ([3, 3, 1, 1, 7, 7, 5, 5], [f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9)]),
    "dgx-h100": ([0, 0, 0, 0, 1, 1, 1, 1], [f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)]),
    "gb200": ([0, 0, 1, 1], [f"mlx5_{number}" for number in (0, 1, 3, 4)]),
    "ndv4": ([1, 1, 0, 0, 3, 3, 2, 2], [f"mlx5_ib{number}" for number in range(8)]),
    "p4d": ([0, 0, 0, 0, 1, 1, 1, 1], [f"rdmap{bus}s27" for bus in (16, 16, 32, 32, 144, 144, 160, 160)]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_an_example_is_what_save_would_write(name: str) -> None:
    """It has all fields, none that differs between machines of a kind, and the nodes and NICs that it is known for."""
    topology = discover(f"example:{name}")
    assert Topology.from_json(json.dumps(topology.to_json())) == topology
    file = Path(reader.__file__).with_name("machines") / f"{name}.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(topology.to_json()))
    assert not any(gpu.uuid for gpu in topology.gpus)
    assert not any(node.free_bytes for node in topology.nodes)
    plan = make_plan(topology, Request())
    found = [
        (gpu.node, rank.node, (rank.nics or ("",))[0]) for gpu, rank in zip(topology.gpus, plan.ranks, strict=True)
    ]
    assert found == [(node, node, nic) for node, nic in zip(*MACHINES[name], strict=True)]
    assert plan.exact


def test_every_example_has_its_facts_here() -> None:
    """A name is one of the list, not a path."""
    assert reader.example_names() == tuple(f"example:{known}" for known in sorted(MACHINES))
    with pytest.raises(UsageError, match="there is no built-in machine"):
        discover(machine=Path("example:../machines/p4d"))


# --- the topology: its invariants, queries and JSON ------------------------------------------------------------------


CPU = CpuSet({0})


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
