"""Golden topologies and plans of every machine in tests/machines, and the truth about each, by hand.

The path is that of the program: a sysfs tree, NVML's and NCCL's word -> readings -> topology -> plans.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from numapin import Bind, Memory, Request, Topology, make_plan
from tests.machines.compact import compact
from tests.machines.roots import HERE, NAMES, Machine, describe, load, nccl_xml, nvml_readings, write_root
from tests.unit.topology.seam import (
    PCI_ORDER,
    NodeSource,
    NvmlReadings,
    build,
    cpu_set,
    nccl_nodes,
    read_hwloc,
    read_nccl,
    read_sysfs,
    xmlfile,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.topology.seam import Readings

FILES = [(name, kind) for name in NAMES for kind in load(name).described]
_READERS = {"hwloc": read_hwloc, "nccl": read_nccl}
MODES = (Bind.NODE, Bind.SOCKET, Bind.EXCLUSIVE, Bind.CORE_COMPLEX)


@pytest.fixture(scope="session")
def readings_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Readings]:
    """Return a function that writes a machine's tree once and reads it, with the readings of NVML and NCCL's file."""

    @cache
    def read(name: str) -> Readings:
        machine = load(name)
        from_sysfs = read_sysfs(write_root(machine, tmp_path_factory.mktemp("root")), source=name)
        xml = nccl_xml(machine)
        nccl = nccl_nodes(xmlfile.parse(xml, source="nccl.xml")) if xml else {}
        return from_sysfs._replace(nvml=nvml_readings(machine), nccl_nodes=nccl)

    return read


# --- golden files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_topology_and_plans_are_the_golden_ones(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Every change to a machine's topology or plans shows in a diff for review."""
    topology = build(readings_of(name))
    plans = [_planned(topology, request) for request in _requests(load(name))]
    text = compact({"topology": topology.to_json(), "plans": plans})
    golden = HERE / "golden" / f"{name}.json"
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert golden.is_file(), f"write {golden.name} with: NUMAPIN_UPDATE_GOLDEN=1 pytest {Path(__file__).name}"
    assert text == golden.read_text()


def test_every_golden_file_belongs_to_a_machine() -> None:
    """No golden file is left behind by a machine that was renamed."""
    assert {path.stem for path in (HERE / "golden").iterdir()} == {*NAMES, *(f"{name}.{kind}" for name, kind in FILES)}


def _build_file(name: str, kind: str) -> Topology:
    text = describe(load(name), kind)
    return build(_READERS[kind](xmlfile.parse(text, source=f"{name}.{kind}")), environ=PCI_ORDER)


@pytest.mark.parametrize(("name", "kind"), FILES)
def test_files_of_other_programs_give_the_golden_topology_and_plans(name: str, kind: str) -> None:
    """What hwloc's or NCCL's file of a machine says shows in a diff as well."""
    topology = _build_file(name, kind)
    plans = [_planned(topology, Request(bind=bind)) for bind in (Bind.NODE, Bind.EXCLUSIVE)]
    text = compact({"topology": topology.to_json(), "plans": plans})
    golden = HERE / "golden" / f"{name}.{kind}.json"
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize(("name", "kind"), [file for file in FILES if file[0] != "3node-memory-first-2gpu"])
def test_files_of_other_programs_agree_with_the_kernel(
    name: str, kind: str, readings_of: Callable[[str], Readings]
) -> None:
    """GPUs with vendor and node, the links between them, the nodes' CPUs and the NICs are those of the sysfs tree."""
    live, file = build(readings_of(name)), _build_file(name, kind)
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


def _requests(machine: Machine) -> list[Request]:
    return [*(Request(bind=bind) for bind in MODES), *(_request(**options) for options in machine.requests)]


def _request(*, bind: str, memory: str | None = None, gpus: list[str] | None = None, **rest: Any) -> Request:
    return Request(
        bind=Bind(bind), memory=Memory(memory) if memory else None, gpus=None if gpus is None else tuple(gpus), **rest
    )


def _planned(topology: Topology, request: Request) -> dict[str, object]:
    defaults = Request()
    asked = {name: getattr(request, name) for name in Request.__slots__}
    told = {name: value for name, value in asked.items() if name == "bind" or value != getattr(defaults, name)}
    return {"request": told, "plan": make_plan(topology, request).to_json()}


# --- the truth, by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_is_on_its_gpus_node(name: str, readings_of: Callable[[str], Readings]) -> None:
    """With the default request, every rank gets all usable CPUs of its GPU's node: the truth, written by hand."""
    plan = make_plan(build(readings_of(name)), Request())
    assert [[rank.node, cpu_set.render(rank.cpus)] for rank in plan.ranks] == load(name).truth


@pytest.mark.parametrize("name", [name for name in NAMES if not load(name).nccl])
def test_no_other_machine_needs_nvml_to_find_its_nodes(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Without NVML the kernel alone puts every GPU, by its PCI address, on the same node."""
    with_nvml = build(readings_of(name))
    without = build(readings_of(name)._replace(nvml=NvmlReadings(gpus=None)))
    assert {gpu.pci: gpu.node for gpu in without.gpus} == {gpu.pci: gpu.node for gpu in with_nvml.gpus}
