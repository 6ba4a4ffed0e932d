"""Golden topologies and plans of every machine in tests/machines, and the truth about each, by hand.

The path is that of the program: a sysfs tree, NVML's and NCCL's word -> readings -> topology -> plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from numapin import Bind, Request, Topology, make_plan
from tests.machines.compact import compact
from tests.machines.roots import HERE, NAMES, describe, load, nvml_readings, write_root
from tests.recorded.screens import compare
from tests.topology.seam import (
    PCI_ORDER,
    NodeSource,
    NvmlReadings,
    build,
    cpu_set,
    read_hwloc,
    read_nccl,
    read_sysfs,
    xmlfile,
)

if TYPE_CHECKING:
    from tests.topology.seam import Readings

FILES = [(name, kind) for name in NAMES for kind in load(name).described]
_READERS = {"hwloc": read_hwloc, "nccl": read_nccl}
MODES = (Bind.NODE, Bind.SOCKET, Bind.EXCLUSIVE, Bind.CORE_COMPLEX)


@cache
def _readings(name: str) -> Readings:
    """Return the readings of a machine's tree, with those of NVML and NCCL's file."""
    machine = load(name)
    with TemporaryDirectory() as folder:
        from_sysfs = read_sysfs(write_root(machine, Path(folder)), source=name)
    return from_sysfs._replace(nvml=nvml_readings(machine), nccl_nodes=machine.nccl_nodes)


def _compare_with_golden(name: str, topology: Topology, requests: Iterable[Request]) -> None:
    usual, plans = Request(), []
    for request in requests:
        asked = {name: getattr(request, name) for name in Request.__slots__}
        told = {name: value for name, value in asked.items() if name == "bind" or value != getattr(usual, name)}
        plans.append({"request": told, "plan": make_plan(topology, request).to_json()})
    compare(compact({"topology": topology.to_json(), "plans": plans}), str(HERE / "golden" / f"{name}.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_and_its_plans_are_the_golden_ones(name: str) -> None:
    """Every change to a machine's topology or plans shows in a diff for review.

    With the default request, every rank gets all usable CPUs of its GPU's node: the truth, written by hand. Without
    NVML the kernel alone puts every GPU, by its PCI address, on the same node, unless the machine needs NCCL's file.
    """
    machine, topology = load(name), build(_readings(name))
    _compare_with_golden(
        name, topology, [*(Request(bind=bind) for bind in MODES), *(Request(**options) for options in machine.requests)]
    )
    ranks = make_plan(topology, Request()).ranks
    assert [[rank.node, cpu_set.render(rank.cpus)] for rank in ranks] == machine.truth
    without = build(_readings(name)._replace(nvml=NvmlReadings(gpus=None)))
    if not machine.nccl:
        assert {gpu.pci: gpu.node for gpu in without.gpus} == {gpu.pci: gpu.node for gpu in topology.gpus}


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_files_of_other_programs(name: str, kind: str) -> None:
    """What hwloc's or NCCL's file of a machine says shows in a diff as well, and agrees with the kernel.

    GPUs with vendor and node, the links between them, the nodes' CPUs and the NICs are those of the sysfs tree.
    """
    parsed = xmlfile.parse(describe(load(name), kind), source=f"{name}.{kind}")
    live, file = build(_readings(name)), build(_READERS[kind](parsed), environ=PCI_ORDER)
    _compare_with_golden(f"{name}.{kind}", file, [Request(bind=bind) for bind in (Bind.NODE, Bind.EXCLUSIVE)])
    if name == "3node-memory-first-2gpu":
        return
    assert [(gpu.pci, gpu.vendor, gpu.node) for gpu in file.gpus] == [(g.pci, g.vendor, g.node) for g in live.gpus]
    assert {(node.id, node.cpus) for node in file.cpu_nodes} == {(node.id, node.cpus) for node in live.cpu_nodes}
    assert {gpu.node_source for gpu in file.gpus} == {f"{kind}-file" if kind == "hwloc" else NodeSource.NCCL_FILE}
    on_pci = {(nic.name, nic.pci, nic.node) for nic in live.nics if nic.pci}
    assert {(nic.name, nic.pci, nic.node) for nic in file.nics if nic.pci} == on_pci
    words = [
        {(link.a, link.b): link.kind.rstrip("0123456789") for link in t.links if "gpu" in link.b} for t in (file, live)
    ]
    has_fabric = kind == "nccl" and (load(name).nvlinks or load(name).xgmi)
    assert words[0] == (words[1] if has_fabric else {})  # without a matrix of them, there may be NVLinks: unknown


def test_every_golden_file_belongs_to_a_machine() -> None:
    """No golden file is left behind by a machine that was renamed."""
    assert {path.stem for path in (HERE / "golden").iterdir()} == {*NAMES, *(f"{name}.{kind}" for name, kind in FILES)}
