"""Golden topologies and plans of every machine in tests/machines, and the truth about each, by hand.

The path is that of the program: a sysfs tree, NVML's and NCCL's word -> readings -> topology -> plans.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from numapin import Bind, Memory, Plan, Request, Topology, make_plan
from tests.machines.compact import compact
from tests.machines.described import describe
from tests.machines.roots import HERE, NAMES, Machine, load, nccl_xml, nvml_readings, write_root
from tests.unit.topology.seam import (
    PCI_ORDER,
    CpuSet,
    NodeKind,
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


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_read_back_as_what_they_were_written_from(
    name: str, readings_of: Callable[[str], Readings]
) -> None:
    """A saved topology and a saved plan are the topology and the plan."""
    golden = json.loads((HERE / "golden" / f"{name}.json").read_text())
    topology = build(readings_of(name))
    assert Topology.from_json(json.dumps(golden["topology"])) == topology
    for request, saved in zip(_requests(load(name)), golden["plans"], strict=True):
        assert Plan.from_json(json.dumps(saved["plan"])) == make_plan(topology, request)


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
    has_fabric = load(name).nvlinks or load(name).xgmi
    assert words[0] == (words[1] if has_fabric else {})  # without a matrix of them, there may be NVLinks: unknown


@pytest.mark.parametrize("name", [name for name, kind in FILES if kind == "nccl"])
def test_a_file_without_threads_of_cores_is_never_exact(name: str) -> None:
    """Which CPUs share a core is unknown: two exclusive ranks may get one core, so no plan claims to be exact."""
    topology = _build_file(name, "nccl")
    for bind in MODES:
        plan = make_plan(topology, Request(bind=bind))
        assert not any(rank.exact for rank in plan.ranks)
        assert all("which CPUs share a core is unknown" in rank.reason for rank in plan.ranks)
    (rank, *_) = make_plan(topology, Request()).ranks
    sharers = sum(other.node == rank.node for other in make_plan(topology, Request()).ranks)
    assert rank.num_threads == max(1, len(rank.cpus) // sharers // 2)


def test_a_file_that_leaves_open_whose_cpus_they_are_is_not_exact() -> None:
    """A memory node's near CPUs are written like a CPU node's own: a note says so, and no rank there is exact."""
    topology = _build_file("3node-memory-first-2gpu", "hwloc")
    assert str(topology.doubtful_nodes) == "0-1"
    assert "nodes 0-1 list the same CPUs, and the file does not say" in topology.warnings[0]
    first, second = make_plan(topology, Request()).ranks
    assert (first.exact, second.exact, second.node) == (False, True, 2)


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

# Machine and mode -> the fast and the other CPUs of each rank, from the facts.
_FAST: dict[tuple[str, Bind], list[tuple[str, str]]] = {
    ("1pkg-1node-20core-hybrid-1gpu", Bind.EXCLUSIVE): [("5-9,15-19", "0-4,10-14")],
    ("1pkg-1node-20core-hybrid-1gpu", Bind.CORE_COMPLEX): [("5-9", "0-4")],
    ("2pkg-2node-smt2-priority-8gpu", Bind.EXCLUSIVE): [
        ("0-1,32-33", "8-9,40-41"),
        ("2-3,34-35", "10-11,42-43"),
        ("4-5,36-37", "12-13,44-45"),
        ("6-7,38-39", "14-15,46-47"),
        ("16-17,48-49", "18-19,50-51"),
        ("20-21,52-53", "22-23,54-55"),
        ("24-25,56-57", "26-27,58-59"),
        ("28-29,60-61", "30-31,62-63"),
    ],
}


def test_every_machine_has_its_truth() -> None:
    """Every machine has hand-written facts; without them it would only be compared with the program's own output."""
    assert set(TRUTH) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_is_on_its_gpus_node(name: str, readings_of: Callable[[str], Readings]) -> None:
    """With the default request, every rank gets all usable CPUs of its GPU's node, as the facts say."""
    plan = make_plan(build(readings_of(name)), Request())
    assert [(rank.node, cpu_set.render(rank.cpus)) for rank in plan.ranks] == TRUTH[name]


@pytest.mark.parametrize(("name", "mode"), _FAST)
def test_fast_cores_are_shared_evenly(name: str, mode: Bind, readings_of: Callable[[str], Readings]) -> None:
    """Each rank gets its part of the node's fast cores, and the reason says how many."""
    plan = make_plan(build(readings_of(name)), Request(bind=mode))
    assert [rank.cpus for rank in plan.ranks] == [
        CpuSet.parse(fast) | CpuSet.parse(others) for fast, others in _FAST[name, mode]
    ]
    assert all(" cores are fast ones (highest_perf " in rank.reason for rank in plan.ranks)


def test_ranks_of_a_few_cpus_get_fast_ones(readings_of: Callable[[str], Readings]) -> None:
    """With --cpus-per-rank, a rank's fast cores come first."""
    request = Request(bind=Bind.EXCLUSIVE, cpus_per_rank=4)
    ranks = make_plan(build(readings_of("2pkg-2node-smt2-priority-8gpu")), request).ranks
    assert [cpu_set.render(rank.cpus) for rank in ranks[:3]] == ["0-1,32-33", "2-3,34-35", "4-5,36-37"]
    assert "2 of its 2 cores are fast ones (highest_perf 46, others 36)" in ranks[0].reason


def test_ratings_that_contradict_each_other_prefer_no_core(readings_of: Callable[[str], Readings]) -> None:
    """Where one rating contradicts another, or the threads of a core differ, no core is fast, and a note says why."""
    topology = build(readings_of("3node-smt2-speeds-contradict-3gpu"))
    assert topology.notes == (
        "node 0: highest_perf and cpu_capacity disagree on which cores are faster, so none is preferred; see: "
        "grep . /sys/devices/system/cpu/cpu*/acpi_cppc/highest_perf /sys/devices/system/cpu/cpu*/cpu_capacity",
        "node 1: highest_perf differs between the threads of a core (CPUs 4,16), so it is ignored; see: "
        "grep . /sys/devices/system/cpu/cpu*/acpi_cppc/highest_perf",
    )
    plan = make_plan(topology, Request(bind=Bind.EXCLUSIVE, cpus_per_rank=2))
    assert [cpu_set.render(rank.cpus) for rank in plan.ranks] == ["0,12", "4,16", "8,20"]
    assert ["fast" in rank.reason for rank in plan.ranks] == [False, False, True]


def test_nvml_order_is_not_rank_order(readings_of: Callable[[str], Readings]) -> None:
    """If NVML numbers GPUs in another order than CUDA, a rank still runs on the node of the GPU that CUDA gives it."""
    topology = build(readings_of("2pkg-8node-snc4-4gpu-unordered"))
    assert [gpu.node for gpu in topology.gpus] == [3, 1, 7, 5]
    plan = make_plan(topology, Request())
    assert [(rank.gpu.index, rank.gpu.pci) for rank in plan.ranks if rank.gpu] == [
        (1, "0000:4c:00.0"),
        (0, "0000:5d:00.0"),
        (3, "0000:cc:00.0"),
        (2, "0000:dd:00.0"),
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if not load(name).nccl])
def test_no_other_machine_needs_nvml_to_find_its_nodes(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Without NVML the kernel alone puts every GPU, by its PCI address, on the same node."""
    with_nvml = build(readings_of(name))
    without = build(readings_of(name)._replace(nvml=NvmlReadings(gpus=None)))
    assert {gpu.pci: gpu.node for gpu in without.gpus} == {gpu.pci: gpu.node for gpu in with_nvml.gpus}


def test_gpus_that_no_source_places_stay_unplaced(readings_of: Callable[[str], Readings]) -> None:
    """NDv4 without its NCCL file: -1 is not node 0; every rank runs unbound, says so, and follows --gpu-nodes."""
    topology = build(readings_of("4node-24cpu-8gpu-nosysfs")._replace(nccl_nodes={}))
    plan = make_plan(topology, Request())
    assert {(gpu.node, gpu.node_source) for gpu in topology.gpus} == {(None, None)}
    assert {(rank.node, cpu_set.render(rank.cpus), rank.exact, rank.memory) for rank in plan.ranks} == {
        (None, "0-95", False, Memory.NONE)
    }
    assert "--gpu-nodes" in plan.warnings[0]
    assert "NCCL_TOPO_FILE" in plan.warnings[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("2pkg-8node-smt2-8gpu-pairs", NodeSource.SYSFS),
        ("4node-24cpu-8gpu-nosysfs", NodeSource.NCCL_FILE),
        ("2pkg-8node-gpumem-smt4-6gpu", NodeSource.LOCAL_CPUS),
    ],
)
def test_node_sources(name: str, source: NodeSource, readings_of: Callable[[str], Readings]) -> None:
    """A GPU's node comes from the source that knows it on this machine."""
    assert {gpu.node_source for gpu in build(readings_of(name)).gpus} == {source}


@pytest.mark.parametrize(
    ("name", "gpu", "memory"),
    [
        ("2pkg-8node-gpumem-smt4-6gpu", "250-255", ""),
        ("4pkg-36node-gpumem-4gpu", "4,12,20,28", "5-11,13-19,21-27,29-35"),
        ("2pkg-34node-gpumem-4gpu", "2,10,18,26", "3-9,11-17,19-25,27-33"),
        ("4node-memoryless-2gpu", "", ""),
    ],
)
def test_gpu_memory_is_no_host_memory(name: str, gpu: str, memory: str, readings_of: Callable[[str], Readings]) -> None:
    """GPU memory nodes are recognized, and no plan puts a rank's memory on a node without CPUs."""
    topology = build(readings_of(name))
    kinds = {kind: cpu_set.render(n.id for n in topology.nodes if n.kind is kind) for kind in NodeKind}
    assert (kinds[NodeKind.GPU], kinds[NodeKind.MEMORY]) == (gpu, memory)
    for bind in MODES:
        for policy in (Memory.PREFERRED, Memory.INTERLEAVE):
            plan = make_plan(topology, Request(bind=bind, memory=policy))
            assert frozenset().union(*(r.nodes for r in plan.ranks)) <= {n.id for n in topology.cpu_nodes}


def test_gpus_name_their_own_memory(readings_of: Callable[[str], Readings]) -> None:
    """Each GPU of a GB200 tray names the node of its memory, by NVML or by the driver's file in a capture."""
    readings = readings_of("2pkg-34node-gpumem-4gpu")
    assert [gpu.memory_node for gpu in build(readings).gpus] == [2, 10, 18, 26]
    assert {gpu.memory_node for gpu in build(readings_of("2pkg-2node-smt2-8gpu-a100")).gpus} == {None}
    capture = readings._replace(nvml=NvmlReadings(gpus=None))
    assert {gpu.pci: gpu.memory_node for gpu in build(capture).gpus} == {
        gpu.pci: gpu.memory_node for gpu in build(readings).gpus
    }


# Machine -> each GPU's nearest NICs, its own first, from the facts and not from the program.
NICS: dict[str, list[str]] = {
    "2pkg-2node-8gpu-16nic": [
        *("mlx5_0 mlx5_1 mlx5_2 mlx5_3", "mlx5_1 mlx5_0 mlx5_2 mlx5_3"),
        *("mlx5_4 mlx5_5 mlx5_6 mlx5_7", "mlx5_5 mlx5_4 mlx5_6 mlx5_7"),
        *("mlx5_8 mlx5_9 mlx5_10 mlx5_11", "mlx5_9 mlx5_8 mlx5_10 mlx5_11"),
        *("mlx5_12 mlx5_13 mlx5_14 mlx5_15", "mlx5_13 mlx5_12 mlx5_14 mlx5_15"),
    ],
    "2pkg-2node-8gpu-4nic": [
        *("mlx5_0 mlx5_1", "mlx5_1 mlx5_0", "mlx5_0 mlx5_1", "mlx5_1 mlx5_0"),
        *("mlx5_2", "mlx5_2", "mlx5_3", "mlx5_3"),
    ],
    "2pkg-2node-4gpu-2nic-far": ["mlx5_0 mlx5_1", "mlx5_1 mlx5_0"] * 2,
    "2pkg-8node-smt2-8gpu-pairs": [*["mlx5_0"] * 4, *["mlx5_6"] * 4],
    "2pkg-8node-nps4-8amd": [*["mlx5_0"] * 4, *["mlx5_1"] * 4],
    "2node-nics-of-all-kinds-2gpu": ["mlx4_0", "mlx4_0"],
}


@pytest.mark.parametrize("name", NICS)
def test_the_nearest_nics_of_each_gpu(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Each GPU's nearest NICs are those of the facts, and GPUs with equally near ones start with different ones."""
    topology = build(readings_of(name))
    nearest = topology.nearest_nics
    assert [" ".join(nearest[gpu.index].names) for gpu in topology.gpus] == NICS[name]
    assert [rank.nics for rank in make_plan(topology, Request()).ranks] == [tuple(n.split()) for n in NICS[name]]


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NICS)))
def test_machines_without_rdma_have_no_nearest_nics(name: str, readings_of: Callable[[str], Readings]) -> None:
    """Without a verbs device, the nearest NICs are unknown, in the plan as well."""
    topology = build(readings_of(name))
    assert topology.nearest_nics == {}
    assert {rank.nics for rank in make_plan(topology, Request()).ranks} == {None}


@pytest.mark.parametrize("kind", ["hwloc", "nccl"])
def test_files_of_other_programs_give_the_same_nearest_nics(kind: str) -> None:
    """Files of hwloc and NCCL have the verbs names and the links of NICs, too."""
    nearest = _build_file("2pkg-2node-8gpu-4nic", kind).nearest_nics
    assert [" ".join(nearest[index].names) for index in range(8)] == NICS["2pkg-2node-8gpu-4nic"]


def test_dgx_a100_in_other_modes(readings_of: Callable[[str], Readings]) -> None:
    """Half of a DGX A100 idles in node mode, with a warning; socket mode uses it; pairs split a node by whole cores."""
    topology = build(readings_of("2pkg-8node-smt2-8gpu-pairs"))
    node, socket, exclusive, complexes = (make_plan(topology, Request(bind=bind)) for bind in MODES)
    assert node.warnings == ("128 CPUs of nodes 0,2,4,6, which have no rank, stay idle; --bind socket uses them",)
    assert [r.num_threads for r in node.ranks] == [8] * 8
    assert [cpu_set.render(r.cpus) for r in socket.ranks] == [*["0-63,128-191"] * 4, *["64-127,192-255"] * 4]
    assert [cpu_set.render(r.nodes) for r in socket.ranks] == [*["0-3"] * 4, *["4-7"] * 4]
    assert [cpu_set.render(r.cpus) for r in exclusive.ranks[:2]] == ["48-55,176-183", "56-63,184-191"]
    assert [cpu_set.render(r.cpus) for r in complexes.ranks[:2]] == ["48-51,176-179", "52-55,180-183"]
    assert {link.kind for link in topology.links if link.b.startswith("gpu")} == {"NV12"}
    assert {(link.a, link.kind) for link in topology.links if link.b == "mlx5_0"} >= {("gpu0", "PIX"), ("gpu2", "SYS")}


def test_memory_of_special_machines(readings_of: Callable[[str], Readings]) -> None:
    """Memory comes from the nearest allowed node that has some; with one node there is nothing to choose."""
    memory = {
        name: [
            (r.memory, cpu_set.render(r.nodes), r.exact) for r in make_plan(build(readings_of(name)), Request()).ranks
        ]
        for name in ("4node-memoryless-2gpu", "4node-cpuset-3gpu", "1node-16cpu-1gpu-vm")
    }
    preferred = Memory.PREFERRED
    assert memory["4node-memoryless-2gpu"] == [(preferred, "0", False), (preferred, "2", True)]
    assert memory["4node-cpuset-3gpu"] == [(preferred, "0", True), (preferred, "3", False), (preferred, "3", True)]
    assert memory["1node-16cpu-1gpu-vm"] == [(Memory.NONE, "0", True)]


def test_firmware_that_lists_cpus_twice_is_reported(readings_of: Callable[[str], Readings]) -> None:
    """Overlapping nodes are used as the kernel lists them, with a note; exclusive ranks still share no CPU."""
    topology = build(readings_of("2node-every-node-lists-all"))
    assert any("list the same CPUs" in note for note in topology.warnings)
    first, second = make_plan(topology, Request(bind=Bind.EXCLUSIVE)).ranks
    assert not first.cpus & second.cpus
    for bind in MODES:
        assert not any(rank.exact for rank in make_plan(topology, Request(bind=bind)).ranks)
