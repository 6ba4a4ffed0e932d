"""Built-in machines: some machines of tests/machines under well-known names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from numapin import Request, discover, make_plan
from numapin.errors import UsageError
from tests.machines.compact import compact
from tests.machines.roots import HERE
from tests.unit.topology.seam import examples

# Name -> title, the machine in tests/machines, and the node of each GPU, by hand.
MACHINES = {
    "dgx-a100": ("DGX A100", "2pkg-8node-smt2-8gpu-pairs", [3, 3, 1, 1, 7, 7, 5, 5]),
    "dgx-h100": ("DGX H100", "2pkg-2node-smt2-8gpu-h100", [0, 0, 0, 0, 1, 1, 1, 1]),
    "gb200": ("GB200 tray, two Grace and four Blackwell", "2pkg-34node-gpumem-4gpu", [0, 0, 1, 1]),
    "ndv4": ("Azure NDv4", "4node-24cpu-8gpu-nosysfs", [1, 1, 0, 0, 3, 3, 2, 2]),
    "p4d": ("AWS p4d.24xlarge", "2pkg-2node-smt2-8gpu-a100", [0, 0, 0, 0, 1, 1, 1, 1]),
}


def _expected(name: str) -> str:
    """Return the text of an example: the golden topology without values that differ between machines of a kind."""
    title, machine, _ = MACHINES[name]
    topology = json.loads((HERE / "golden" / f"{machine}.json").read_text())["topology"]
    topology |= {"host": f"example: {title}", "source": f"example:{name}"}
    topology["nodes"] = [{**node, "free_bytes": None} for node in topology["nodes"]]
    unknown = {"uuid": None, "pcie": dict.fromkeys(("gen", "width", "max_gen", "max_width"))}
    topology["gpus"] = [{**gpu, **unknown} for gpu in topology["gpus"]]
    return compact(topology)


@pytest.mark.parametrize("name", MACHINES)
def test_examples_agree_with_the_machines(name: str) -> None:
    """An example is the machine of tests/machines; NUMAPIN_UPDATE_GOLDEN=1 writes it."""
    file = Path(examples.__file__).with_name("machines") / f"{name}.json"
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        file.write_text(_expected(name))
    assert file.read_text() == _expected(name)


@pytest.mark.parametrize("name", MACHINES)
def test_each_rank_is_on_its_gpus_node(name: str) -> None:
    """A plan for an example has a rank for each GPU on the node that the machine is known for."""
    topology = discover(f"example:{name}")
    nodes = MACHINES[name][2]
    assert [gpu.node for gpu in topology.gpus] == nodes
    plan = make_plan(topology, Request())
    assert [rank.node for rank in plan.ranks] == nodes
    assert all(rank.exact for rank in plan.ranks)


def test_names() -> None:
    """Every example has its facts here."""
    assert examples.example_names() == tuple(f"example:{name}" for name in sorted(MACHINES))


@pytest.mark.parametrize("name", ["example:", "example:dgx", "example:../machines/p4d", "example:p4d.json"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    """A name is one of the list, not a path."""
    with pytest.raises(UsageError, match="there is no built-in machine") as raised:
        discover(machine=Path(name))
    assert name in raised.value.message
    assert "example:dgx-a100, example:dgx-h100" in (raised.value.hint or "")
