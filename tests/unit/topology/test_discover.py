"""Machine files: how their format is recognized, what is wrong with others, and the built-in machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numapin import Request, Topology, discover, make_plan
from numapin.errors import UsageError
from tests.machines.grids import grid
from tests.unit.topology.seam import reader, sysfs

PU = '<object type="PU" os_index="7"/>'
HWLOC = f'<topology version="2.0"><object type="Machine">{PU}</object></topology>'
NCCL = '<system version="1"><cpu numaid="0" affinity="00000100"/></system>'


def _file(folder: Path, content: str | bytes) -> Path:
    path = folder / "machine"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "cpu"),
    [
        (f'<?xml version="1.0"?>\n<!-- <system> -->\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n{HWLOC}', 7),
        (b"\xef\xbb\xbf \n<!-- <topology> -->" + NCCL.encode(), 8),
        (json.dumps(grid(nodes=1, cores=1).to_json()), 0),
    ],
)
def test_the_content_says_which_format_it_is(content: str | bytes, cpu: int, tmp_path: Path) -> None:
    """The root element of XML decides, whatever comes before it; JSON is ours."""
    assert cpu in discover(machine=_file(tmp_path, content)).cpus


def test_gpu_nodes_win_over_the_file(tmp_path: Path) -> None:
    """Pairs of a GPU and a node; one GPU on two nodes is refused."""
    path = _file(tmp_path, json.dumps(grid(gpus=[0, 0]).to_json()))
    assert [gpu.node for gpu in discover(machine=path, gpu_nodes=iter([("1", 1)])).gpus] == [0, 1]
    with pytest.raises(UsageError, match="puts gpu0 on nodes 1 and 0"):
        discover(machine=path, gpu_nodes=[("0", 1), ("0", 0)])


def test_a_bug_in_a_reader_is_not_called_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a contradiction that is found while the machine is built is reported as the machine's."""

    def broken(_root: Path, *, source: str) -> None:
        raise ValueError(f"a bug in {source}")

    monkeypatch.setattr(sysfs, "read_sysfs", broken)
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


def test_names_of_examples() -> None:
    """Every example has its facts here."""
    assert reader.example_names() == tuple(f"example:{name}" for name in sorted(MACHINES))


@pytest.mark.parametrize("name", ["example:", "example:dgx", "example:../machines/p4d", "example:p4d.json"])
def test_an_unknown_example_lists_the_known_ones(name: str) -> None:
    """A name is one of the list, not a path."""
    with pytest.raises(UsageError, match="there is no built-in machine") as raised:
        discover(machine=Path(name))
    assert name in raised.value.message
    assert "example:dgx-a100, example:dgx-h100" in (raised.value.hint or "")
