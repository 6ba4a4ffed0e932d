"""Readings become a topology: nodes, cores and packages, the sources of a GPU's node, links, notes, --gpu-nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.errors import UsageError
from numapin.topology.address import pci_address, pci_order
from numapin.topology.build import build, with_gpu_nodes
from numapin.topology.model import Allowed, NicKind, NodeKind, NodeSource, Package, Pcie, Topology
from numapin.topology.readings import CpuReading, NodeReading, NvmlReading, NvmlReadings, PciReading, Readings
from tests.machines.grids import gpu, grid

PCI = "0000:10:00.0"
OTHER = "0000:20:00.0"


def _cpu(cpu: int, *, siblings: str = "", package: int | None = 0, l3: str = "") -> CpuReading:
    return CpuReading(
        cpu=cpu,
        siblings=CpuSet.parse(siblings or str(cpu)),
        package=package,
        l3=CpuSet.parse(l3) if l3 else None,
    )


def _node(node: int, cpus: str, **rest: Any) -> NodeReading:
    return NodeReading(id=node, cpus=CpuSet.parse(cpus), **rest)


def _device(address: str = PCI, **rest: Any) -> PciReading:
    return PciReading(address=address, **rest)


def _interfaces(*names: str, kind: NicKind = NicKind.ETHERNET) -> tuple[tuple[str, NicKind], ...]:
    return tuple((name, kind) for name in names)


def _nvml(index: int = 0, pci: str = PCI, **rest: Any) -> NvmlReading:
    return NvmlReading(index=index, uuid=f"GPU-{index}", pci=pci, **rest)


def _readings(**rest: Any) -> Readings:
    """Return two nodes of two CPUs each (0-1, 2-3), in two packages, and a memory node 4."""
    values: dict[str, Any] = {
        "host": "h",
        "source": "test",
        "cpus": tuple(_cpu(cpu, package=cpu // 2) for cpu in range(4)),
        "nodes": (_node(0, "0-1"), _node(1, "2-3"), _node(4, "")),
    }
    return Readings(**(values | rest))


# --- nodes, cores, packages ------------------------------------------------------------------------------------------


def test_what_is_read_is_kept() -> None:
    """Memory, distances, host and source pass through; nodes come out sorted."""
    far = _node(9, "", memory_bytes=7, free_bytes=5, distances={0: 40, 9: 10})
    topology = build(_readings(nodes=(far, _node(1, "2-3"), _node(0, "0-1")), notes=("n",)))
    assert [node.id for node in topology.nodes] == [0, 1, 9]
    last = topology.nodes[2]
    assert (last.kind, last.memory_bytes, last.free_bytes, last.distances) == (NodeKind.MEMORY, 7, 5, {0: 40, 9: 10})
    assert (topology.host, topology.source, topology.notes) == ("h", "test", ("n",))


def test_a_kernel_without_numa_is_one_node() -> None:
    """If the kernel shows no nodes, all CPUs are on node 0, at distance 10 from itself."""
    topology = build(_readings(nodes=()))
    assert [(n.id, n.cpus, n.distances) for n in topology.nodes] == [(0, frozenset(range(4)), {0: 10})]
    assert topology.allowed == Allowed(cpus=CpuSet(range(4)), nodes=CpuSet({0}))


def test_offline_cpus_count_for_nothing() -> None:
    """A node's CPUs that were not read as online are left out; a node of offline CPUs is a memory node."""
    topology = build(_readings(nodes=(_node(0, "0-1,7"), _node(1, "2-3"), _node(2, "8-9"))))
    assert [(n.id, n.kind, cpu_set.render(n.cpus)) for n in topology.nodes] == [
        (0, NodeKind.CPU, "0-1"),
        (1, NodeKind.CPU, "2-3"),
        (2, NodeKind.MEMORY, ""),
    ]


@pytest.mark.parametrize(
    "seen",
    [
        {"gpu_memory_nodes": frozenset({4})},
        {"nvml": NvmlReadings(gpus=(_nvml(own_node=4),))},
        {"gpu_memory_nodes": frozenset({4, 0}), "nvml": NvmlReadings(gpus=(_nvml(own_node=4),))},
    ],
)
def test_gpu_memory_nodes(seen: dict[str, Any]) -> None:
    """The driver or NVML reports a GPU's own node; a node with CPUs is never GPU memory, whatever they report."""
    assert [n.kind for n in build(_readings(**seen)).nodes] == [NodeKind.CPU, NodeKind.CPU, NodeKind.GPU]


def test_cores_come_from_sibling_lists() -> None:
    """A core's number is its lowest CPU, its L3 group's the lowest of the group; bad lists never share a CPU."""
    cpus = (
        _cpu(0, siblings="0,2", l3="0-3"),
        _cpu(1, siblings="1-2", l3="0-3"),  # contradicts CPU 0's: the first wins
        _cpu(2, siblings="0,2", l3="0-3"),
        _cpu(3, siblings="", package=None),
    )
    topology = build(_readings(cpus=cpus, nodes=(_node(0, "0,2"), _node(1, "1,3"))))
    assert [(c.id, cpu_set.render(c.cpus), c.node, c.package, c.l3) for c in topology.cores] == [
        (0, "0,2", 0, 0, 0),
        (1, "1", 1, 0, 0),
        (3, "3", 1, None, None),
    ]


def test_a_core_across_nodes_has_no_node() -> None:
    """A core whose threads lie on two nodes, or on a CPU that two nodes list, has no node."""
    cpus = (_cpu(0, siblings="0-1"), _cpu(1, siblings="0-1"), _cpu(2), _cpu(3))
    topology = build(_readings(cpus=cpus, nodes=(_node(0, "0,2-3"), _node(1, "1,3"))))
    assert {core.id: core.node for core in topology.cores} == {0: None, 2: 0, 3: None}


def test_packages() -> None:
    """A package has the nodes that its CPUs are on; a node across two packages belongs to neither."""
    topology = build(_readings(nodes=(_node(0, "0-2"), _node(1, "3"))))
    assert topology.packages == (Package(id=0, nodes=CpuSet({0})), Package(id=1, nodes=CpuSet({0, 1})))
    assert [n.package for n in topology.nodes] == [None, 1]


def test_allowed_is_within_what_is_there() -> None:
    """A cpuset may name CPUs and nodes that are offline; unknown means all."""
    allowed = build(_readings(allowed_cpus=frozenset({1, 2, 77}), allowed_nodes=frozenset({1, 4, 9}))).allowed
    assert allowed == Allowed(cpus=CpuSet({1, 2}), nodes=CpuSet({1, 4}))
    assert build(_readings()).allowed == Allowed(cpus=CpuSet(range(4)), nodes=CpuSet({0, 1, 4}))


# --- the ladder ------------------------------------------------------------------------------------------------------

# Every source in order. Each reports node 1; a case removes it to see the next one answer.
_PCI_SOURCES: list[tuple[NodeSource, str, Any]] = [
    (NodeSource.SYSFS, "node", 1),
    (NodeSource.PCI_PARENT, "parent_nodes", (1, 0)),
    (NodeSource.LOCAL_CPUS, "local_cpus", frozenset({2, 3})),
]
_NVML_SOURCES: list[tuple[NodeSource, str, Any]] = [
    (NodeSource.NVML_MEMORY, "memory_nodes", frozenset({1, 4})),
    (NodeSource.NVML_CPUS, "cpus", frozenset({3})),
]
_ORDER = [
    NodeSource.SYSFS,
    NodeSource.PCI_PARENT,
    NodeSource.NVML_MEMORY,
    NodeSource.LOCAL_CPUS,
    NodeSource.NVML_CPUS,
    NodeSource.NCCL_FILE,
]


def _located(known: list[NodeSource], **wrong: Any) -> tuple[int | None, NodeSource | None]:
    pci = {key: value for source, key, value in _PCI_SOURCES if source in known}
    nvml = {key: value for source, key, value in _NVML_SOURCES if source in known}
    for values, sources in ((pci, _PCI_SOURCES), (nvml, _NVML_SOURCES)):
        values |= {key: wrong[key] for _, key, _ in sources if key in wrong}
    nccl = {PCI: 1} if NodeSource.NCCL_FILE in known else {}
    topology = build(
        _readings(
            pci=(_device(**pci),),
            nvml=NvmlReadings(gpus=(_nvml(**nvml),)),
            nccl_nodes={PCI: wrong["nccl"]} if "nccl" in wrong else nccl,
        )
    )
    return topology.gpus[0].node, topology.gpus[0].node_source


@pytest.mark.parametrize("first", range(len(_ORDER)), ids=lambda i: _ORDER[i].value)
def test_the_first_source_that_knows_is_believed(first: int) -> None:
    """Each source answers if all before it are silent, however many come after it."""
    assert _located(_ORDER[first:]) == (1, _ORDER[first])
    assert _located([_ORDER[first]]) == (1, _ORDER[first])


@pytest.mark.parametrize(
    "wrong",
    [
        {"node": 4},  # GPU memory, CXL
        {"node": 77},
        {"parent_nodes": (4, 1)},
        {"memory_nodes": frozenset({0, 1})},  # NVML that reports all nodes
        {"memory_nodes": frozenset({4})},
        {"memory_nodes": frozenset()},
        {"local_cpus": frozenset(range(4))},  # the kernel's mask if the node is -1
        {"local_cpus": frozenset()},
        {"cpus": frozenset({1, 2})},
        {"cpus": frozenset()},
        {"nccl": 4},
    ],
    ids=str,
)
def test_what_names_no_cpu_node_knows_nothing(wrong: dict[str, Any]) -> None:
    """A source that names a node without CPUs, or several nodes, is passed over; alone it leaves the node unknown."""
    assert _located([], **wrong) == (None, None)
    if "nccl" not in wrong:
        assert _located([NodeSource.NCCL_FILE], **wrong) == (1, NodeSource.NCCL_FILE)


def test_sources_may_disagree() -> None:
    """The earlier source wins: node 0 of sysfs over node 1 of all others."""
    assert _located(_ORDER[1:], node=0) == (0, NodeSource.SYSFS)


def test_on_one_cpu_node_that_node_is_the_answer() -> None:
    """With one CPU node, every GPU is on it without any source; memory-only nodes do not count."""
    one = (_node(0, "0-3"), _node(4, ""))
    topology = build(_readings(nodes=one, pci=(_device(),)))
    assert [(g.node, g.node_source) for g in topology.gpus] == [(0, NodeSource.SINGLE)]
    assert topology.warnings == ()


def test_an_unknown_node_has_a_warning_with_the_remedy() -> None:
    """The warning comes from the topology, not from a reader; it names the GPU and both ways to set its node."""
    topology = build(_readings(pci=(_device(),)))
    assert topology.notes == ()
    (note,) = topology.warnings
    assert note == (
        f"the NUMA node of gpu0 ({PCI}) is unknown; if you know it, set it with --gpu-nodes 0=NODE,… or NCCL_TOPO_FILE"
    )


# --- GPUs and NICs ---------------------------------------------------------------------------------------------------


def test_nvml_and_sysfs_are_merged() -> None:
    """NVML gives order and names; sysfs fills in values that NVML lacks; the GPU's CPUs are its node's."""
    topology = build(
        _readings(
            pci=(_device(node=1, pcie=Pcie(gen=3, width=8, max_width=16), name="from sysfs", uuid="GPU-s"),),
            nvml=NvmlReadings(gpus=(_nvml(pci=PCI, pcie=Pcie(gen=5, max_gen=5)),)),
        )
    )
    (found,) = topology.gpus
    assert (found.uuid, found.pci, found.name) == ("GPU-0", PCI, "from sysfs")
    assert found.pcie == Pcie(gen=5, width=8, max_gen=5, max_width=16)
    assert found.cpus == frozenset({2, 3})


def test_a_gpu_without_a_node_keeps_its_local_cpus() -> None:
    """Its local CPUs are still shown, from sysfs or else from NVML."""
    local = frozenset(range(4))
    assert build(_readings(pci=(_device(local_cpus=local),))).gpus[0].cpus == local
    assert build(_readings(nvml=NvmlReadings(gpus=(_nvml(cpus=local),)))).gpus[0].cpus == local


def test_without_nvml_gpus_come_from_sysfs() -> None:
    """They have the source's numbers, else they are numbered by bus address; a long domain comes last."""
    devices = (
        _device("10000:01:00.0"),
        _device("0000:90:00.0"),
        _device("0000:20:00.0"),
        _device("0000:a0:00.0", index=1),
    )
    found = {g.index: (g.pci, g.uuid) for g in build(_readings(pci=devices)).gpus}
    assert found == {
        1: ("0000:a0:00.0", None),
        0: ("0000:20:00.0", None),
        2: ("0000:90:00.0", None),
        3: ("10000:01:00.0", None),
    }


def test_nvml_that_sees_no_gpu_is_believed() -> None:
    """A container without a GPU may still see one in sysfs, but cannot use it."""
    assert build(_readings(pci=(_device(),), nvml=NvmlReadings(gpus=()))).gpus == ()


def test_nvml_notes_only_where_a_gpu_is_missed() -> None:
    """A machine without GPUs has no note that NVML is missing."""
    silent = NvmlReadings(gpus=None, notes=("no NVML",))
    nic = _device(OTHER, interfaces=_interfaces("eth0"))
    assert build(_readings(nvml=silent, pci=(nic,))).notes == ()
    broken = silent._replace(broken=True)
    assert build(_readings(nvml=broken, pci=(nic,))).notes == ("no NVML",)
    assert "no NVML" in build(_readings(nvml=silent, pci=(_device(node=0),))).notes


def test_nics_are_sorted_and_located() -> None:
    """Every interface of a device is a NIC; its node comes from the same sources, NCCL's file included."""
    nics = (
        _device(OTHER, interfaces=_interfaces("mlx5_0", "ib0", kind=NicKind.INFINIBAND)),
        _device(PCI, node=1, interfaces=_interfaces("eth0")),
    )
    topology = build(_readings(pci=nics, nccl_nodes={OTHER: 0}))
    assert [(n.name, n.pci, n.node, n.kind) for n in topology.nics] == [
        ("eth0", PCI, 1, "ethernet"),
        ("ib0", OTHER, 0, "infiniband"),
        ("mlx5_0", OTHER, 0, "infiniband"),
    ]


# --- links -----------------------------------------------------------------------------------------------------------

SWITCH, ROOT = "0000:03:00.0", "0000:00:01.0"


@pytest.mark.parametrize(
    ("a", "b", "word"),
    [
        ({"parents": ("d1", SWITCH, ROOT)}, {"parents": ("d2", SWITCH, ROOT)}, "PIX"),
        ({"parents": (ROOT,)}, {"parents": (ROOT,)}, "PIX"),
        ({"parents": ("d1", "u1", "d3", SWITCH, ROOT)}, {"parents": ("d2", SWITCH, ROOT)}, "PXB"),
        ({"parents": ("r1",), "host_bridge": "pci0000:00"}, {"parents": ("r2",), "host_bridge": "pci0000:00"}, "PHB"),
        ({"node": 0, "host_bridge": "pci0000:00"}, {"node": 0, "host_bridge": "pci0000:10"}, "NODE"),
        ({"node": 0}, {"node": 1}, "SYS"),
        ({"node": 0}, {}, None),
    ],
)
def test_link_words(a: dict[str, Any], b: dict[str, Any], word: str | None) -> None:
    """The words of nvidia-smi topo -m, from the PCI tree, between GPUs and to NICs alike; unknown is no link."""
    gpus = build(_readings(pci=(_device(PCI, **a, reports_fabric=True), _device(OTHER, **b, reports_fabric=True))))
    assert [(link.a, link.b, link.kind) for link in gpus.links] == ([("gpu0", "gpu1", word)] if word else [])
    nic = _device(OTHER, interfaces=_interfaces("eth0"), **b)
    to_nic = build(_readings(pci=(_device(PCI, **a), nic)))
    assert [(link.a, link.b, link.kind) for link in to_nic.links] == ([("gpu0", "eth0", word)] if word else [])


def test_a_source_without_nvlink_does_not_know_the_link_of_two_gpus() -> None:
    """GPUs may have NVLinks that a file does not show: their link is unknown, and that to a NIC is known."""
    silent = (_device(PCI, node=0), _device(OTHER, node=1, reports_fabric=True))
    nic = _device("0000:30:00.0", node=1, interfaces=_interfaces("eth0"))
    topology = build(_readings(pci=(*silent, nic)))
    assert [(link.a, link.b, link.kind) for link in topology.links] == [
        ("gpu0", "eth0", "SYS"),
        ("gpu1", "eth0", "NODE"),
    ]


def test_nvml_has_the_word_on_links() -> None:
    """Only NVML reports NVLink; the order of the pair does not matter."""
    nvml = NvmlReadings(gpus=(_nvml(0, PCI), _nvml(1, OTHER)), links=((1, 0, "NV4"),))
    topology = build(_readings(pci=(_device(PCI, node=0), _device(OTHER, node=1)), nvml=nvml))
    assert [(link.a, link.b, link.kind) for link in topology.links] == [("gpu0", "gpu1", "NV4")]


# --- visibility, --gpu-nodes, find_gpu -------------------------------------------------------------------------------


def test_cuda_variables_are_applied() -> None:
    """CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER give `visible` and `cuda_index`."""
    nvml = NvmlReadings(gpus=(_nvml(0, PCI, name="T4"), _nvml(1, OTHER, name="T4")))
    topology = build(_readings(nvml=nvml), environ={"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [(g.visible, g.cuda_index) for g in topology.gpus] == [(False, None), (True, 0)]


def _unknown() -> Topology:
    return build(_readings(pci=(_device(PCI, name="T4"), _device(OTHER, name="T4", node=1))))


@pytest.mark.parametrize("key", ["0", " 0 ", PCI, "00000000:10:00.0", "10:00.0"])
def test_the_users_word_wins(key: str) -> None:
    """--gpu-nodes places a GPU by any of its names and removes the warning that its node is unknown."""
    topology = with_gpu_nodes(_unknown(), [(key, 1)])
    first = topology.gpus[0]
    assert (first.node, first.node_source, first.cpus) == (1, NodeSource.USER, frozenset({2, 3}))
    assert topology.warnings == ()
    assert topology.gpus[1] == _unknown().gpus[1]


def test_what_the_user_replaces_is_noted() -> None:
    """The note has the node that was read; a GPU whose node does not change has no note."""
    topology = with_gpu_nodes(_unknown(), [("0", 0), ("1", 0)])
    assert topology.notes == ("--gpu-nodes puts gpu1 on node 0; sysfs says node 1",)
    assert with_gpu_nodes(_unknown(), [("0", 0), ("1", 1)]).notes == ()


def test_the_links_of_a_moved_gpu_are_judged_anew() -> None:
    """NODE and SYS follow the user's node; words for nearer paths and between other devices stay."""
    nic = _device("0000:30:00.0", node=1, interfaces=_interfaces("eth0"))
    nvml = NvmlReadings(gpus=(_nvml(0, PCI), _nvml(1, OTHER), _nvml(2, "0000:40:00.0")), links=((0, 2, "NV4"),))
    pci = (_device(PCI, node=0), _device(OTHER, node=1), _device("0000:40:00.0", node=0), nic)
    topology = build(_readings(nvml=nvml, pci=pci))
    words = {(link.a, link.b): link.kind for link in topology.links}
    assert words == {
        ("gpu0", "gpu1"): "SYS",
        ("gpu0", "gpu2"): "NV4",
        ("gpu0", "eth0"): "SYS",
        ("gpu1", "gpu2"): "SYS",
        ("gpu1", "eth0"): "NODE",
        ("gpu2", "eth0"): "SYS",
    }
    moved = {(link.a, link.b): link.kind for link in with_gpu_nodes(topology, [("0", 1)]).links}
    assert moved == words | {("gpu0", "gpu1"): "NODE", ("gpu0", "eth0"): "NODE"}


@pytest.mark.parametrize(
    ("gpu_nodes", "message"),
    [
        ([("7", 0)], "--gpu-nodes: no GPU matches '7'; available: 0 (0000:10:00.0), 1 (0000:20:00.0)"),
        ([("0", 9)], "--gpu-nodes: node 9 has no CPUs or does not exist; nodes with CPUs: 0-1"),
        ([("0", 4)], "--gpu-nodes: node 4 has no CPUs or does not exist; nodes with CPUs: 0-1"),
        ([("0", 0), (PCI, 1)], "--gpu-nodes puts gpu0 on nodes 0 and 1"),
        ([("0", 1), ("0", 0)], "--gpu-nodes puts gpu0 on nodes 1 and 0"),
    ],
)
def test_bad_gpu_nodes_are_refused(gpu_nodes: list[tuple[str, int]], message: str) -> None:
    """An error about an unknown GPU or node lists the existing ones."""
    with pytest.raises(UsageError) as caught:
        with_gpu_nodes(_unknown(), gpu_nodes)
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "index"),
    [
        ("1", 1),
        ("GPU-01", 1),
        ("GPU-01000000-0000-4000-8000-000000000000", 1),
        ("0000:11:00.0", 1),
        ("00000000:10:00.0", 0),
    ],
)
def test_find_gpu(key: str, index: int) -> None:
    """A GPU is found by NVML index, by the unique beginning of its UUID, and by PCI address in any spelling."""
    assert grid(gpus=[0, 1]).find_gpu(key, option="--gpus").index == index


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("GPU-0", "more than one GPU"),
        ("GPU-02", "no GPU"),
        ("2", "no GPU"),
        ("-1", "no GPU"),
        ("0000:12:00.0", "no GPU"),
        ("", "no GPU"),
    ],
)
def test_find_gpu_says_what_there_is(key: str, problem: str) -> None:
    """The message has the option, the key, the problem and the list; the hint says how to see more."""
    with pytest.raises(UsageError) as caught:
        grid(gpus=[0, 1]).find_gpu(key, option="--gpus")
    assert caught.value.message == f"--gpus: {problem} matches {key!r}; available: 0 (0000:10:00.0), 1 (0000:11:00.0)"
    assert caught.value.hint == "list them with: numapin topo"


def test_find_gpu_on_a_machine_without_gpus() -> None:
    """The list of GPUs in the message is "none"."""
    with pytest.raises(UsageError, match="available: none"):
        grid().find_gpu("0", option="--gpus")


def test_gpus_without_an_address_are_listed_by_uuid() -> None:
    """NVML always knows the UUID."""
    with pytest.raises(UsageError, match=r"available: 0 \(GPU-00000000-"):
        replace(grid(), gpus=(replace(gpu(0, 0), pci=None),)).find_gpu("5", option="--gpus")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("1b:00.0", "0000:1b:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:1b:00.8", None),
        ("0000:1b:00", None),
        ("GPU-1", None),
        ("", None),
    ],
)
def test_pci_addresses_have_one_spelling(text: str, address: str | None) -> None:
    """NVML's, hwloc's and the kernel's spellings are normalized to the kernel's."""
    assert pci_address(text) == address


def test_pci_addresses_are_ordered_as_numbers() -> None:
    """A domain above 0xffff comes last, however its text sorts; unknown and malformed addresses come first."""
    ordered = [None, "0000:0a:00.0", "0000:0a:01.0", "0000:a0:00.0", "0001:00:00.0", "10000:01:00.0"]
    assert sorted({*ordered}, key=pci_order) == ordered
    assert pci_order("GPU-1") == ()


def test_an_affinity_that_equals_the_cpuset_is_ignored() -> None:
    """Under a cpuset of one node, an NVML affinity that covers all allowed CPUs does not place a GPU on that node."""
    readings = Readings(
        host=None,
        source="test",
        cpus=tuple(CpuReading(cpu=cpu, siblings=CpuSet({cpu})) for cpu in range(8)),
        nodes=tuple(NodeReading(id=n, cpus=CpuSet(range(4 * n, 4 * n + 4))) for n in (0, 1)),
        nvml=NvmlReadings(
            gpus=(
                NvmlReading(
                    index=0,
                    uuid="GPU-0",
                    pci="0000:01:00.0",
                    cpus=CpuSet(range(4)),
                    memory_nodes=CpuSet({0}),
                ),
            )
        ),
    )
    assert build(readings).gpus[0].node == 0
    inside = readings._replace(allowed_cpus=CpuSet(range(4)), allowed_nodes=CpuSet({0}))
    assert build(inside).gpus[0].node is None
    elsewhere = readings._replace(allowed_cpus=CpuSet(range(2, 8)), allowed_nodes=CpuSet({0, 1}))
    assert build(elsewhere).gpus[0].node == 0
