"""Built-in machines: well-known machines, with the nodes and NICs of their GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numapin import Request, Topology, discover, make_plan
from numapin.errors import UsageError
from tests.unit.topology.seam import reader

# Name -> the node and the own NIC of each GPU, by hand.
MACHINES = {
    "dgx-a100": ([3, 3, 1, 1, 7, 7, 5, 5], [f"mlx5_{number}" for number in (0, 1, 2, 3, 6, 7, 8, 9)]),
    "dgx-h100": ([0, 0, 0, 0, 1, 1, 1, 1], [f"mlx5_{number}" for number in (0, 3, 4, 5, 6, 9, 10, 11)]),
    "gb200": ([0, 0, 1, 1], [f"mlx5_{number}" for number in (0, 1, 3, 4)]),
    "ndv4": ([1, 1, 0, 0, 3, 3, 2, 2], [f"mlx5_ib{number}" for number in range(8)]),
    "p4d": ([0, 0, 0, 0, 1, 1, 1, 1], [f"rdmap{bus}s27" for bus in (16, 16, 32, 32, 144, 144, 160, 160)]),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_file_is_what_save_would_write(name: str) -> None:
    """An example has all fields, and no value that differs between machines of a kind."""
    topology = discover(f"example:{name}")
    assert Topology.from_json(json.dumps(topology.to_json())) == topology
    file = Path(reader.__file__).with_name("machines") / f"{name}.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(topology.to_json()))
    assert not any(gpu.uuid for gpu in topology.gpus)
    assert not any(node.free_bytes for node in topology.nodes)


@pytest.mark.parametrize("name", MACHINES)
def test_each_rank_is_on_its_gpus_node(name: str) -> None:
    """A plan for an example has a rank for each GPU on the node and with the NIC that the machine is known for."""
    topology = discover(f"example:{name}")
    nodes, nics = MACHINES[name]
    assert [gpu.node for gpu in topology.gpus] == nodes
    plan = make_plan(topology, Request())
    assert [rank.node for rank in plan.ranks] == nodes
    assert all(rank.exact for rank in plan.ranks)
    assert [(rank.nics or ("",))[0] for rank in plan.ranks] == nics


def test_names() -> None:
    """Every example has its facts here."""
    assert reader.example_names() == tuple(f"example:{name}" for name in sorted(MACHINES))


@pytest.mark.parametrize("name", ["example:", "example:dgx", "example:../machines/p4d", "example:p4d.json"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    """A name is one of the list, not a path."""
    with pytest.raises(UsageError, match="there is no built-in machine") as raised:
        discover(machine=Path(name))
    assert name in raised.value.message
    assert "example:dgx-a100, example:dgx-h100" in (raised.value.hint or "")
