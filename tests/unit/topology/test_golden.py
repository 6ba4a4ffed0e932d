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
from tests.machines.described import describe
from tests.machines.roots import HERE, NAMES, Machine, load, nccl_xml, nvml_readings, write_root
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
    """Return the topology that is read from a machine's file of another program."""
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

_DGX = {3: "48-63,176-191", 1: "16-31,144-159", 7: "112-127,240-255", 5: "80-95,208-223"}
_AWS = {0: "0-23,48-71", 1: "24-47,72-95"}

# Machine -> the node and the CPUs of ranks 0, 1, … with `--bind node`, from the facts and not from the program.
TRUTH: dict[str, list[tuple[int | None, str]]] = {
    "2pkg-8node-smt2-8gpu-pairs": [(node, _DGX[node]) for node in (3, 3, 1, 1, 7, 7, 5, 5)],
    "4node-24cpu-8gpu-nosysfs": [
        *[(1, "24-47")] * 2,
        *[(0, "0-23")] * 2,
        *[(3, "72-95")] * 2,
        *[(2, "48-71")] * 2,
    ],
    "2node-48cpu-8gpu-nosysfs": [*[(0, "0-47")] * 4, *[(1, "48-95")] * 4],
    "2pkg-2node-smt2-8gpu-a100": [*[(0, _AWS[0])] * 4, *[(1, _AWS[1])] * 4],
    "2pkg-2node-smt2-8gpu-h100": [*[(0, "0-55,112-167")] * 4, *[(1, "56-111,168-223")] * 4],
    "2pkg-2node-smt2-8gpu-t4": [*[(0, _AWS[0])] * 4, *[(1, _AWS[1])] * 4],
    # CUDA's order is that of the bus, on nodes 1, 3, 5, 7; NVML's is not (below).
    "2pkg-8node-snc4-4gpu-unordered": [
        (1, "14-27,126-139"),
        (3, "42-55,154-167"),
        (5, "70-83,182-195"),
        (7, "98-111,210-223"),
    ],
    "2pkg-8node-gpumem-smt4-6gpu": [*[(0, "0-87")] * 3, *[(8, "88-175")] * 3],
    "4pkg-36node-gpumem-4gpu": [(0, "0-71"), (1, "72-143"), (2, "144-215"), (3, "216-287")],
    "2pkg-34node-gpumem-4gpu": [*[(0, "0-71")] * 2, *[(1, "72-143")] * 2],
    "2pkg-2node-smt2-2gpu-node0": [(0, "0-7,16-23")] * 2,
    "1node-16cpu-1gpu-vm": [(0, "0-15")],
    "1pkg-nonode-2cpu": [(0, "0-1")],
    "2node-cpu0-node0-offline": [(1, "1-2,6-8"), (2, "3-5,9-11")],
    "8node-sparse-2gpu": [(45, "10-11"), (33, "6-7")],
    "2node-every-node-lists-all": [(0, "0-7"), (1, "0-7")],
    "2node-domain32-2gpu": [(1, "4-7"), (0, "0-3")],  # domain 0x10000 comes after domain 0
    "2node-interleaved-smt2-2gpu": [(1, "1,3,5,7,9,11,13,15"), (0, "0,2,4,6,8,10,12,14")],
    "4node-memoryless-2gpu": [(1, "4-7"), (2, "8-11")],
    "4node-cpuset-3gpu": [(0, "0-3"), (2, "12-15"), (3, "12-15")],
    # HIP's order is that of the driver's nodes.
    "2pkg-8node-nps4-8amd": [
        *[(3, "12-15,44-47")] * 2,
        *[(1, "4-7,36-39")] * 2,
        *[(5, "20-23,52-55")] * 2,
        *[(7, "28-31,60-63")] * 2,
    ],
    "1pkg-4node-smt2-8amd": [
        *[(3, "12-15,28-31")] * 2,
        *[(1, "4-7,20-23")] * 2,
        *[(0, "0-3,16-19")] * 2,
        *[(2, "8-11,24-27")] * 2,
    ],
    "2pkg-2node-2amd-cpx4": [*[(1, "16-31")] * 4, *[(0, "0-15")] * 4],
    "2pkg-2node-2intel-2tile": [*[(0, "0-7")] * 2, *[(1, "8-15")] * 2],
    "2node-capture-cgroup1-2gpu": [(0, "0-1,3"), (1, "4-5")],
    "2node-capture-cgroup2-2gpu": [(0, "1-2"), (1, "5")],
    "2node-nics-of-all-kinds-2gpu": [(0, "0-3"), (1, "4-7")],
    "2pkg-2node-8gpu-16nic": [*[(0, "0-15,32-47")] * 4, *[(1, "16-31,48-63")] * 4],
    "2pkg-2node-8gpu-4nic": [*[(0, "0-15,32-47")] * 4, *[(1, "16-31,48-63")] * 4],
    "2pkg-2node-4gpu-2nic-far": [(0, "0-15,32-47")] * 4,
    "2pkg-equal-numbers-2gpu": [(0, "0-3"), (1, "4-7")],
    "3node-memory-first-2gpu": [(1, "0-3"), (2, "4-7")],
    "1pkg-1node-20core-hybrid-1gpu": [(0, "0-19")],
    "2pkg-2node-smt2-priority-8gpu": [*[(0, "0-15,32-47")] * 4, *[(1, "16-31,48-63")] * 4],
    "3node-smt2-speeds-contradict-3gpu": [(0, "0-3,12-15"), (1, "4-7,16-19"), (2, "8-11,20-23")],
}


def test_every_machine_has_its_truth() -> None:
    """Every machine has hand-written facts; without them it would only be compared with the program's own output."""
    assert set(TRUTH) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_is_on_its_gpus_node(name: str, readings_of: Callable[[str], Readings]) -> None:
    """With the default request, every rank gets all usable CPUs of its GPU's node, as the facts say."""
    plan = make_plan(build(readings_of(name)), Request())
    assert [(rank.node, cpu_set.render(rank.cpus)) for rank in plan.ranks] == TRUTH[name]


@pytest.mark.parametrize("name", [name for name in NAMES if not load(name).nccl])
def test_no_other_machine_needs_nvml_to_find_its_nodes(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Without NVML the kernel alone puts every GPU, by its PCI address, on the same node."""
    with_nvml = build(readings_of(name))
    without = build(readings_of(name)._replace(nvml=NvmlReadings(gpus=None)))
    assert {gpu.pci: gpu.node for gpu in without.gpus} == {gpu.pci: gpu.node for gpu in with_nvml.gpus}
