"""The hwloc reader, on XML written here, on a captured machine, and on lstopo's output for this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineFileError
from numapin.topology.build import build
from numapin.topology.model import GpuVendor, NicKind, Pcie
from numapin.topology.readings import NO_CORES, NicReading
from numapin.topology.sources import xmlfile
from numapin.topology.sources.hwloc import read_hwloc

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.topology.readings import PciReading, Readings

CAPTURES = Path(__file__).parents[4] / "shared" / "machines"


def mask(numbers: Iterable[int]) -> str:
    """Write a set as hwloc does: words of 32 bits with 0x before each."""
    value = sum(1 << number for number in numbers)
    words: list[str] = []
    while value or not words:
        words.append(f"0x{value & 0xFFFFFFFF:08x}")
        value >>= 32
    return ",".join(reversed(words))


def obj(kind: str, *inner: str, **attributes: object) -> str:
    """Write an object."""
    written = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<object type="{kind}"{written}>\n{"".join(inner)}</object>\n'


def info(name: str, value: str) -> str:
    """Write an info."""
    return f'<info name="{name}" value="{value}"/>\n'


def node(number: int, cpus: Iterable[int], **attributes: object) -> str:
    """Write a NUMA node with the CPUs near it."""
    return obj("NUMANode", os_index=number, cpuset=mask(cpus), nodeset=mask([number]), **attributes)


def core(*cpus: int) -> str:
    """Write a core and its CPUs."""
    return obj("Core", *(obj("PU", os_index=cpu, cpuset=mask([cpu])) for cpu in cpus), cpuset=mask(cpus))


def package(number: int, *inner: str, cpus: Iterable[int], nodes: Iterable[int]) -> str:
    """Write a package with an L3 of its own around two cores of two CPUs; `cpus` are the four CPUs."""
    a, b, c, d = cpus
    l3 = obj("L3Cache", core(a, c), core(b, d), cpuset=mask(cpus), depth=3)
    return obj("Package", *inner, l3, os_index=number, cpuset=mask(cpus), nodeset=mask(nodes))


def machine(*inner: str, version: str = "2.0", after: str = "", **sets: str) -> str:
    """Write a topology of at most eight CPUs and four nodes."""
    root = obj("Machine", *inner, os_index=0, cpuset=mask(range(8)), nodeset=mask(range(4)), **sets)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
    return f'{head}<topology version="{version}">\n{root}{after}</topology>\n'


def two_packages(*devices: str, version: str = "2.0", after: str = "", **sets: str) -> str:
    """Write a machine of two packages with a node each: CPUs 0,1,4,5 and 2,3,6,7. Devices are below the second."""
    first = package(0, node(0, (0, 1, 4, 5), local_memory=4096), cpus=(0, 1, 4, 5), nodes=(0,))
    second = package(1, node(1, (2, 3, 6, 7), local_memory=8192), *devices, cpus=(2, 3, 6, 7), nodes=(1,))
    return machine(first, second, version=version, after=after, **sets)


def gpu(*inner: str, busid: str = "0000:18:00.0", pci_type: str = "0302 [10de:1eb8] [10de:12a2] a1") -> str:
    """Write a PCI device, by default a T4."""
    return obj("PCIDev", *inner, pci_busid=busid, pci_type=pci_type, pci_link_speed="15.753846")


def distances(indexes: str, *values: str, **attributes: object) -> str:
    """Write a matrix of latencies between nodes."""
    said = {"type": "NUMANode", "nbobjs": 2, "kind": 5, "name": "NUMALatency", "indexing": "os"} | attributes
    written = "".join(f' {key}="{value}"' for key, value in said.items())
    inner = "".join(f'<u64values length="9">{row}</u64values>' for row in values)
    return f'<distances2{written}><indexes length="4">{indexes}</indexes>{inner}</distances2>'


def read(text: str) -> Readings:
    """Read XML."""
    return read_hwloc(xmlfile.parse(text, source="m.xml"))


def only_pci(text: str) -> PciReading:
    """Return the one PCI device that the reader shows."""
    (reading,) = read(text).pci
    return reading


class TestCpusAndNodes:
    """Packages, cores, caches and NUMA nodes."""

    def test_two_packages(self) -> None:
        """CPUs know their core, package and L3; nodes their CPUs and memory; nothing else is made up."""
        readings = read(two_packages())
        assert readings.source == "m.xml"
        assert [(cpu.cpu, cpu_set.render(cpu.siblings or ()), cpu.package) for cpu in readings.cpus] == [
            (0, "0,4", 0), (1, "1,5", 0), (2, "2,6", 1), (3, "3,7", 1),
            (4, "0,4", 0), (5, "1,5", 0), (6, "2,6", 1), (7, "3,7", 1),
        ]  # fmt: skip
        assert {cpu_set.render(cpu.l3 or ()) for cpu in readings.cpus} == {"0-1,4-5", "2-3,6-7"}
        assert [(n.id, cpu_set.render(n.cpus), n.memory_bytes) for n in readings.nodes] == [
            (0, "0-1,4-5", 4096),
            (1, "2-3,6-7", 8192),
        ]
        assert [(n.free_bytes, n.distances) for n in readings.nodes] == [(None, {}), (None, {})]
        assert (readings.host, readings.allowed_cpus, readings.pci) == (None, None, ())

    def test_a_cpu_outside_a_core(self) -> None:
        """A CPU without core, package and L3 has unknown siblings, package and L3; a note says so."""
        readings = read(machine(node(0, [3]), obj("PU", os_index=3)))
        assert [(cpu.siblings, cpu.package, cpu.l3) for cpu in readings.cpus] == [(None, None, None)]
        assert readings.notes == (NO_CORES,)

    def test_a_package_without_a_number(self) -> None:
        """Its number is unknown, not 0."""
        assert read(machine(obj("Package", core(0)))).cpus[0].package is None

    def test_memory_only_nodes(self) -> None:
        """Hwloc writes the CPUs near a node without CPUs; the node of plain memory keeps them, whatever the order."""
        nodes = [node(0, (0, 4), subtype="HBM"), node(2, (0, 4), subtype="DRAM"), node(1, (0, 1, 4, 5), subtype="NVM")]
        text = machine(obj("Group", *nodes, core(0, 4)), core(1, 5))
        assert {n.id: cpu_set.render(n.cpus) for n in read(text).nodes} == {0: "", 1: "", 2: "0,4"}

    def test_without_subtypes_the_lowest_number_has_the_cpus(self) -> None:
        """Linux numbers nodes with CPUs first; a node near fewer CPUs owns them before one near all."""
        text = machine(node(0, (0, 1, 4, 5)), node(1, (0, 4)), node(3, (1, 5)), node(2, (1, 5)), core(0, 4), core(1, 5))
        assert {n.id: cpu_set.render(n.cpus) for n in read(text).nodes} == {0: "", 1: "0,4", 2: "1,5", 3: ""}

    def test_nodes_behind_a_memory_side_cache(self) -> None:
        """A node is found at any depth; without local_memory it has no memory."""
        (found,) = read(machine(obj("MemCache", node(7, [0])), core(0))).nodes
        assert (found.id, found.memory_bytes, sorted(found.cpus)) == (7, 0, [0])

    def test_a_node_near_cpus_that_are_not_shown(self) -> None:
        """CPUs without a PU (offline, not allowed) are in no node."""
        assert read(machine(node(0, range(8)), core(0, 4))).nodes[0].cpus == CpuSet({0, 4})

    def test_gpu_memory(self) -> None:
        """The subtype says that a node is a GPU's memory."""
        text = machine(
            node(0, [0]), node(255, [0], subtype="GPUMemory"), node(9, [0], subtype="CXL-GPUMemory"), core(0)
        )
        assert read(text).gpu_memory_nodes == CpuSet({9, 255})

    def test_what_was_allowed(self) -> None:
        """The machine has the allowed set of its reader; an infinite set means unknown."""
        readings = read(two_packages(allowed_cpuset="0x00000001,,0x00000003", allowed_nodeset="0x2"))
        assert cpu_set.render(readings.allowed_cpus or ()) == "0-1,64"
        assert cpu_set.render(readings.allowed_nodes or ()) == "1"
        assert read(two_packages(allowed_cpuset="0xf...f", allowed_nodeset="0xf...f,0x0")).allowed_cpus is None

    @pytest.mark.parametrize("version", ["2.0", "2.11", "3.0"])
    def test_the_host_name(self, version: str) -> None:
        """Version 2 writes it into the machine, version 3 after it."""
        assert read(machine(info("HostName", "h"), core(0), version=version)).host == "h"
        assert read(machine(core(0), version=version, after=info("HostName", "h"))).host == "h"


class TestDistances:
    """The matrix of latencies."""

    def test_rows_and_columns(self) -> None:
        """Row i, column j is the distance from node i to node j, by the kernel's numbers; lines break anywhere."""
        first, second = read(two_packages(after=distances("0 1 ", "10 21 ", "31 ", "10 "))).nodes
        assert (first.distances, second.distances) == ({0: 10, 1: 21}, {0: 31, 1: 10})

    def test_the_order_of_the_indexes(self) -> None:
        """The indexes name rows and columns."""
        assert read(two_packages(after=distances("1 0", "10 21 31 10"))).nodes[0].distances == {1: 31, 0: 10}

    @pytest.mark.parametrize(("name", "value"), [("type", "PU"), ("kind", 9), ("indexing", "gp"), ("kind", "")])
    def test_other_matrices(self, name: str, value: object) -> None:
        """Matrices of other objects, of bandwidths, or by hwloc's numbers are ignored."""
        text = two_packages(after=distances("0 1", "10 21 31 10", **{name: value}))
        assert read(text).nodes[0].distances == {}

    def test_the_kernels_matrix_first(self) -> None:
        """A matrix that a user added does not hide the kernel's."""
        text = two_packages(after=distances("0 1", "1 2 3 4", name="mine") + distances("0 1", "10 21 31 10"))
        assert read(text).nodes[0].distances == {0: 10, 1: 21}

    @pytest.mark.parametrize(("indexes", "values"), [("0 1", "10 21 31"), ("0 1", "10 21 31 x"), ("0", "10 21 31 10")])
    def test_a_matrix_of_the_wrong_size(self, indexes: str, values: str) -> None:
        """It is an error that names the element."""
        with pytest.raises(MachineFileError, match=r"m\.xml: line \d+: <distances2>: "):
            read(two_packages(after=distances(indexes, values)))


class TestPci:
    """GPUs and network devices."""

    def test_a_gpu_that_nvml_showed(self) -> None:
        """Its index, UUID and name are NVML's; CUDA's number and the link's bandwidth are ignored."""
        nvml = obj("OSDev", info("GPUModel", "Tesla T4"), info("NVIDIAUUID", "GPU-1"), name="nvml3", osdev_type=1)
        cuda = obj("OSDev", info("GPUModel", "no"), name="cuda0", subtype="CUDA", osdev_type=5)
        found = only_pci(two_packages(gpu(cuda, obj("OSDev", name="opencl0d0", osdev_type=5), nvml)))
        assert (found.address, found.is_gpu, found.index) == ("0000:18:00.0", True, 3)
        assert (found.uuid, found.name, found.pcie) == ("GPU-1", "Tesla T4", Pcie())

    def test_a_gpu_without_nvml(self) -> None:
        """It is known by vendor and class; index and UUID are unknown, the name is the PCI database's."""
        found = only_pci(two_packages(gpu(info("PCIDevice", "TU104GL"), pci_type="0300 [10DE:1eb8] [10de:12a2] a1 00")))
        assert (found.is_gpu, found.index, found.uuid, found.name) == (True, None, None, "TU104GL")

    @pytest.mark.parametrize("pci_type", ["0302 [1a03:1eb8] [0:0] 0", "0680 [10de:1ac2] [0000:0000] a1", "", "x"])
    def test_what_is_no_gpu(self, pci_type: str) -> None:
        """Other vendors' GPUs, NVSwitches and devices without a type are not GPUs."""
        assert read(two_packages(gpu(pci_type=pci_type))).pci == ()

    def test_nvml_knows_better_than_the_type(self) -> None:
        """A device that NVML showed is a GPU even if its type could not be read."""
        assert only_pci(two_packages(gpu(obj("OSDev", name="nvml0", osdev_type=12), pci_type="0300 [0:0]"))).is_gpu

    def test_locality(self) -> None:
        """A device is on the node of the package above its PCI tree: package 1 has node 1."""
        found = only_pci(two_packages(obj("Bridge", gpu(), bridge_type="0-1", bridge_pci="0000:[17-19]")))
        assert (found.node, cpu_set.render(found.local_cpus or ())) == (1, "2-3,6-7")

    def test_locality_unknown(self) -> None:
        """Below a machine of two nodes, the node is unknown and the CPUs are all."""
        found = only_pci(machine(node(0, (0, 4)), core(0, 4), gpu(), obj("Group", node(1, (1, 5)), core(1, 5))))
        assert (found.node, cpu_set.render(found.local_cpus or ())) == (None, "0-7")

    def test_locality_next_to_memory_only_nodes(self) -> None:
        """Nodes without CPUs do not make the one with CPUs unknown."""
        assert only_pci(machine(node(0, (0, 4)), node(1, (0, 4)), core(0, 4), gpu())).node == 0

    def test_bridges(self) -> None:
        """The bridges above are parents, nearest first; the host bridge is the root, in the kernel's spelling."""
        inner = obj("Bridge", gpu(), bridge_type="1-1", bridge_pci="0000:[18-18]", pci_busid="0000:17:0A.0")
        outer = obj("Bridge", inner, bridge_type="1-1", bridge_pci="0000:[17-18]", pci_busid="0000:16:02.0")
        found = only_pci(two_packages(obj("Bridge", outer, bridge_type="0-1", bridge_pci="0000:[16-18]")))
        assert (found.parents, found.parent_nodes) == (("0000:17:0a.0", "0000:16:02.0"), ())
        assert found.host_bridge == "pci0000:16"

    def test_network_devices(self) -> None:
        """Version 2 numbers the types, version 3 adds bits; a verbs device is InfiniBand, an Ethernet one is not."""
        nic = "0200 [1d0f:efa0] [0000:0000] 00"

        def devices(network: int, verbs: int, disk: int) -> str:
            types = {"eth0": network, "mlx5_0": verbs, "nvme0n1": disk}
            return gpu(*(obj("OSDev", name=name, osdev_type=kind) for name, kind in types.items()), pci_type=nic)

        expected = (("eth0", "ethernet"), ("mlx5_0", "infiniband"))
        assert only_pci(two_packages(devices(2, 3, 0))).interfaces == expected
        assert only_pci(two_packages(devices(16, 48, 1), version="3.0")).interfaces == expected
        assert only_pci(two_packages(devices(16, 32, 2), version="3.0")).interfaces == expected
        assert not only_pci(two_packages(devices(2, 3, 0))).is_gpu

    def test_an_infiniband_network_device(self) -> None:
        """IP over an InfiniBand device is InfiniBand."""
        nic = gpu(obj("OSDev", name="ib0", osdev_type=2), pci_type="0207 [15b3:1013] [0:0] 0")
        assert only_pci(two_packages(nic)).interfaces == (("ib0", "infiniband"),)

    def test_a_nic_without_interfaces(self) -> None:
        """It is left out."""
        assert read(two_packages(gpu(pci_type="0200 [1d0f:efa0] [0000:0000] 00"))).pci == ()


class TestErrors:
    """Every bad file is a MachineFileError that names the file and the place, with the remedy."""

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "line 1, column 1: not XML: no element found"),
            ("{}", "line 1, column 1: not XML: not well-formed"),
            ("<topology version='2.0'><object>", "line 1, column 33: not XML: no element found"),
            ("<topology version='2.0'>\n</object>", "line 2, column 3: not XML: mismatched tag"),
            ("<topology version='2.0'>\0", "not XML"),
            ("<topology version='2.0'>\ud800</topology>", "line 1: <topology>: the first element"),
            ("<topology/>", "line 1: <topology>: no version, which is hwloc 1; versions 2 and 3"),
            ("<topology version='1.11'/>", "version '1.11'; versions 2 and 3"),
            ("<topology version='4.0'/>", "version '4.0'; versions 2 and 3"),
            ("<topology version='20'/>", "version '20'; versions 2 and 3"),
            ("<topology version='2.0'/>", "the first element in it is not <object"),
            ("<topology version='2.0'><object type='PCIDev'/></topology>", "the first element in it is not <object"),
            (machine(), r"line 4: <object>: it has no PU"),
            (machine(core(0), core(0)), "os_index=0 appears twice"),
            (machine(obj("PU")), "line 5: <object>: os_index is missing"),
            (machine(obj("PU", os_index="x")), "os_index='x' is not a number"),
            (machine(obj("PU", os_index="-1")), "os_index is missing"),
            (machine(obj("PU", os_index=1 << 20)), "os_index=1048576 is larger than any CPU"),
            (machine(core(0), node(0, [0]), node(0, [0])), "os_index=0 appears twice"),
            (machine(core(0), obj("NUMANode", os_index=0, cpuset="0xzz")), "cpuset: '0xzz' is not a CPU mask"),
            (machine(core(0), obj("NUMANode", os_index=0, cpuset="0x0," * 2000)), "cpuset is 8000 characters long"),
            (two_packages(gpu(busid="18")), "pci_busid='18' is not a PCI address"),
            ("<a>" * 150 + "</a>" * 150, "line 1: <a> is more than 100 elements deep"),
        ],
    )
    def test_a_bad_file(self, text: str, problem: str) -> None:
        """The message names file, place and problem; the hint has the command that writes a good file."""
        with pytest.raises(MachineFileError) as caught:
            read(text)
        assert caught.value.message.startswith("m.xml: ")
        assert problem in caught.value.message
        assert re.search("lstopo (-i old.xml )?--of xml", caught.value.hint)

    def test_every_truncation(self) -> None:
        """A file cut anywhere before its end is refused."""
        text = two_packages(gpu(), after=distances("0 1", "10 21 31 10")).rstrip()
        for end in range(0, len(text) - 1, 7):
            with pytest.raises(MachineFileError, match=r"^m\.xml: line \d+, column \d+: not XML"):
                read(text[:end])

    def test_a_billion_laughs(self) -> None:
        """Entities that would grow without bound are refused before their declaration, at once."""
        laughs = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10 if i else "ha"}">' for i in range(12))
        text = f'<!DOCTYPE topology [{laughs}]>\n<topology version="2.0">&l11;</topology>'
        started = time.monotonic()
        with pytest.raises(MachineFileError, match=r"m\.xml: line 1: the DOCTYPE contains declarations"):
            read(text)
        assert time.monotonic() - started < 1

    def test_an_external_entity(self) -> None:
        """A file cannot name another file."""
        with pytest.raises(MachineFileError, match="the DOCTYPE contains declarations"):
            read('<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/hostname">]><topology version="2.0">&x;</topology>')

    @pytest.mark.parametrize("declared", ['ATTLIST a z CDATA "x"', "ELEMENT a ANY", "", "NOTATION n SYSTEM 'n'"])
    def test_other_declarations(self, declared: str) -> None:
        """Every declaration is refused; a default value of an attribute would be stored for each element."""
        inside = f"<!{declared}>" if declared else ""
        text = f'<!DOCTYPE topology SYSTEM "hwloc2.dtd" [{inside}]>\n{two_packages().partition("hwloc2.dtd")[2][3:]}'
        with pytest.raises(MachineFileError, match=r"m\.xml: line 1: the DOCTYPE contains declarations"):
            read(text)

    def test_an_encoding_that_does_not_fit(self) -> None:
        """The encoding declaration is ignored because the text is decoded already."""
        assert read(two_packages().replace("UTF-8", "UTF-16")).cpus
        assert read("\ufeff" + two_packages()).cpus


def test_a_captured_g4dn_metal() -> None:
    """Eight T4: nvml0-3 on node 0, nvml4-7 on node 1, two threads a core."""
    path = CAPTURES / "hwloc-g4dn.metal.xml"
    if not path.is_file():
        pytest.skip("captured machines are not beside this checkout")
    readings = read(path.read_text())
    gpus = {device.index: device for device in readings.pci if device.is_gpu}
    assert {index: gpu.node for index, gpu in gpus.items()} == {i: i // 4 for i in range(8)}
    assert {len(cpu.siblings or ()) for cpu in readings.cpus} == {2}
    assert (gpus[7].address, gpus[7].name) == ("0000:f5:00.0", "Tesla T4")
    assert gpus[7].parents == ("0000:f3:02.0",)
    assert readings.nodes[0].distances == {0: 10, 1: 21}
    nics = [(device.interfaces, device.node) for device in readings.pci if not device.is_gpu]
    assert nics == [((("rdmap197s0", "infiniband"),), 1), ((("eth0", "ethernet"),), 1)]


def test_a_synthetic_machine_of_lstopo() -> None:
    """The XML that lstopo writes for a described machine reads as described."""
    lstopo = shutil.which("lstopo-no-graphics")
    if lstopo is None:
        pytest.skip("lstopo-no-graphics is not installed (Debian package hwloc-nox)")
    command = [lstopo, "--input", "package:2 [numa(memory=1GB)] l3:2 core:3 pu:2", "--of", "xml"]
    readings = read(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(readings.cpus) == 24
    assert {len(cpu.siblings or ()) for cpu in readings.cpus} == {2}
    assert {cpu_set.render(cpu.l3 or ()) for cpu in readings.cpus} == {"0-5", "6-11", "12-17", "18-23"}
    assert [(n.id, cpu_set.render(n.cpus)) for n in readings.nodes] == [(0, "0-11"), (1, "12-23")]


class TestVendorsAndLinks:
    """GPUs of other vendors, partitions, links, and network devices that are easily missed."""

    def test_partitions(self) -> None:
        """Several devices of ROCm SMI below one PCI device are its partitions; AMD's UUIDs get ROCr's prefix."""
        parts = [obj("OSDev", info("AMDUUID", f"{n}a"), name=f"rsmi{n}", osdev_type=5, gp_index=70 + n) for n in (0, 1)]
        readings = read(two_packages(gpu(*parts, pci_type="1200 [1002:74a1] [0:0] 0")))
        assert [(r.vendor, r.index, r.partition, r.uuid) for r in readings.pci] == [
            (GpuVendor.AMD, 0, 0, "GPU-0a"),
            (GpuVendor.AMD, 1, 1, "GPU-1a"),
        ]

    @pytest.mark.parametrize(
        ("pci_type", "busid", "vendor"),
        [
            ("0300 [1002:66a1] [1002:0834] 00", "0000:13:00.0", None),
            ("0380 [1002:740f] [1002:0834] 00", "0000:13:00.0", GpuVendor.AMD),
            ("0380 [8086:0bd5] [0:0] 0", "0000:18:00.0", GpuVendor.INTEL),
            ("0300 [8086:4680] [0:0] 0", "0000:00:02.0", None),
        ],
    )
    def test_other_vendors_without_their_library(self, pci_type: str, busid: str, vendor: GpuVendor | None) -> None:
        """They are known by vendor and class; integrated graphics and a board's VGA chip are not GPUs for ranks."""
        found = read(two_packages(gpu(pci_type=pci_type, busid=busid))).pci
        assert [reading.vendor for reading in found] == ([vendor] if vendor else [])

    @pytest.mark.parametrize("name", ["renderD128", "rsmi0"])
    def test_a_vga_device_that_a_driver_serves_is_a_gpu(self, name: str) -> None:
        """Workstation GPUs are VGA controllers, too; their render node or ROCm SMI tells them apart."""
        device = gpu(obj("OSDev", name=name, osdev_type=1), pci_type="0300 [1002:66a1] [1002:0834] 00")
        assert [reading.vendor for reading in read(two_packages(device)).pci] == [GpuVendor.AMD]

    def test_tiles_are_devices_with_their_links(self) -> None:
        """LevelZeroSubdevices are devices; the matrix of Xe Links names them, and what is not in it stays unknown."""
        devices = []
        for card in (0, 1):
            whole = obj("OSDev", info("LevelZeroSubdevices", "2"), name=f"ze{card}", gp_index=50 + 3 * card)
            tiles = [obj("OSDev", name=f"ze{card}.{tile}", gp_index=51 + 3 * card + tile) for tile in (0, 1)]
            devices.append(gpu(whole, *tiles, busid=f"0000:{card + 1}8:00.0", pci_type="0380 [8086:0bd5] [0:0] 0"))
        devices.append(gpu(obj("OSDev", name="ze2", gp_index=60), busid="0000:38:00.0", pci_type="0380 [8086:56c0] 0"))
        rows = "9 9 8 0", "9 9 0 8", "8 0 9 9", "0 8 9 9"
        inner = "<indexes>51 52 54 55</indexes>" + "".join(f"<u64values>{row}</u64values>" for row in rows)
        head = 'type="OSDev" indexing="gp" nbobjs="4" kind="42" name="XeLinkBandwidth"'
        matrix = f"<distances2 {head}>{inner}</distances2>"
        readings = read(two_packages(*devices, after=matrix))
        topology = build(readings)
        assert [(g.index, g.pci, g.partition) for g in topology.gpus] == [
            (0, "0000:18:00.0", 0),
            (1, "0000:18:00.0", 1),
            (2, "0000:28:00.0", 0),
            (3, "0000:28:00.0", 1),
            (4, "0000:38:00.0", None),
        ]
        assert topology.gpu_order_known
        links = {(link.a, link.b): link.kind for link in topology.links}
        assert links == {
            ("gpu0", "gpu1"): "PSB",
            ("gpu0", "gpu2"): "XELINK",
            ("gpu0", "gpu3"): "NODE",
            ("gpu1", "gpu2"): "NODE",
            ("gpu1", "gpu3"): "XELINK",
            ("gpu2", "gpu3"): "PSB",
        }

    @pytest.mark.parametrize("text", ["99999999999", "x", "-1"])
    def test_an_absurd_number_of_tiles(self, text: str) -> None:
        """It is not believed, and takes no time."""
        device = gpu(obj("OSDev", info("LevelZeroSubdevices", text), name="ze0"), pci_type="0380 [8086:0bd5] [0:0] 0")
        assert len(read(two_packages(device)).pci) == 1

    def test_unknown_tiles_make_the_order_unknown(self) -> None:
        """Without Level Zero's library, a GPU Max may be one device or two."""
        devices = [gpu(busid=f"0000:{n}8:00.0", pci_type="0380 [8086:0bd5] [0:0] 0") for n in (1, 2)]
        topology = build(read(two_packages(*devices)))
        assert not topology.gpu_order_known
        assert any("the number of tiles of gpu0, gpu1 is unknown" in note for note in topology.notes)

    def test_a_core_that_is_missing_is_unknown(self) -> None:
        """CPUs without a Core element have unknown siblings, so that no exclusive plan is exact."""
        text = two_packages().replace('type="Core"', 'type="Group"')
        assert {cpu.siblings for cpu in read(text).cpus} == {None}

    def test_links_through_a_switch(self) -> None:
        """An NVSwitch is a PCI device in the matrix; GPUs reach each other through it, processors do not forward."""
        devices = [
            gpu(
                obj("OSDev", info("GPUModel", "NVIDIA H100"), name=f"nvml{n}", osdev_type=5, gp_index=70 + n),
                busid=f"0000:{n + 1}8:00.0",
            )
            for n in (0, 1)
        ]
        rows = "0 0 50000 9", "0 0 50000 9", "50000 50000 0 0", "9 9 0 0"
        inner = "<indexes>OSDev:70 OSDev:71 PCIDev:5 Package:6</indexes>" + "".join(
            f"<u64values>{r}</u64values>" for r in rows
        )
        matrix = f'<distances2hetero nbobjs="4" kind="25" name="NVLinkBandwidth">{inner}</distances2hetero>'
        topology = build(read(two_packages(*devices, after=matrix)))
        assert [(link.a, link.b, link.kind) for link in topology.links] == [("gpu0", "gpu1", "NV2")]

    def test_interfaces(self) -> None:
        """The long address of IP over InfiniBand tells its kind; interfaces need not be below a PCI device."""
        long_address = info("Address", ":".join(["80"] * 20))
        card = gpu(obj("OSDev", long_address, name="ib0", osdev_type=2), pci_type="0200 [15b3:1] [0:0] 0")
        readings = read(two_packages(card, obj("OSDev", name="eth7", osdev_type=2)))
        assert [reading.interfaces for reading in readings.pci] == [(("ib0", NicKind.INFINIBAND),)]
        assert readings.nics == (NicReading(name="eth7", kind=NicKind.ETHERNET, node=1),)

    def test_packages_of_one_number(self) -> None:
        """They stay apart: the second gets a number of its own, and a note says so."""
        first = package(0, node(0, (0, 1, 4, 5)), cpus=(0, 1, 4, 5), nodes=(0,))
        second = package(0, node(1, (2, 3, 6, 7)), cpus=(2, 3, 6, 7), nodes=(1,))
        topology = build(read(machine(first, second)))
        assert [str(package.nodes) for package in topology.packages] == ["0", "1"]
        assert "several packages have the same number" in topology.notes[0]

    @pytest.mark.parametrize("version", ["", "version='1.11'"])
    def test_hwloc_1_names_the_conversion(self, version: str) -> None:
        """The hint has the command that converts the file."""
        with pytest.raises(MachineFileError) as caught:
            read(f"<topology {version}/>")
        assert "lstopo -i old.xml --of xml new.xml" in caught.value.hint
