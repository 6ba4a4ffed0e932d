"""The sysfs reader, on trees written here, on captured machines, and against hwloc as a second oracle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from numapin.base import cpu_set
from numapin.base.bounds import MAX_PARENTS
from numapin.base.cpu_set import CpuSet
from numapin.errors import MachineError, MachineFileError
from numapin.system import tree
from numapin.topology.model import Pcie
from numapin.topology.readings import NO_CORES
from numapin.topology.sources import xmlfile
from numapin.topology.sources.hwloc import read_hwloc
from numapin.topology.sources.sysfs import read_sysfs
from tests.hostile import winding_capture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numapin.topology.readings import PciReading, Readings

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
PCI = "sys/bus/pci/devices"
NVIDIA = "proc/driver/nvidia/gpus"
CAPTURES = Path(__file__).parents[4] / "shared" / "machines"
MEMINFO = "Node 0 MemTotal:       2048 kB\nNode 0 MemFree:        1024 kB\nNode 0 MemUsed:  1024 kB\n"


def write(root: Path, files: Mapping[str, str | bytes | None]) -> Path:
    """Write files below `root`, with the line end that the kernel adds to text; None removes one."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two packages of one node, two cores of two threads and one L3 each: CPUs 0-3,8-11 (siblings n and n+8)."""
    files: dict[str, str] = {f"{CPU}/online": "0-3,8-11", f"{NODE}/online": "0-1"}
    for cpu in (0, 1, 2, 3, 8, 9, 10, 11):
        package = cpu % 8 // 2
        both = "2-3,10-11" if package else "0-1,8-9"
        files |= {
            f"{CPU}/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}",
            f"{CPU}/cpu{cpu}/topology/package_cpus_list": both,
            f"{CPU}/cpu{cpu}/topology/physical_package_id": str(package),
            f"{CPU}/cpu{cpu}/cache/index3/level": "3",
            f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list": both,
        }
    for node, cpus, distance in ((0, "0-1,8-9", "10 21"), (1, "2-3,10-11", "21 10")):
        files |= {
            f"{NODE}/node{node}/cpulist": cpus,
            f"{NODE}/node{node}/distance": distance,
            f"{NODE}/node{node}/meminfo": MEMINFO,
        }
    return write(tmp_path / "machine", files)


def read(root: Path) -> Readings:
    """Read a tree."""
    return read_sysfs(root, source="test")


def cores(readings: Readings) -> dict[int, str]:
    """Return each CPU's siblings as a list string."""
    return {cpu.cpu: cpu_set.render(cpu.siblings or ()) for cpu in readings.cpus}


def packages(readings: Readings) -> dict[int, int | None]:
    """Return each CPU's package."""
    return {cpu.cpu: cpu.package for cpu in readings.cpus}


def caches(readings: Readings) -> dict[int, str | None]:
    """Return each CPU's L3 group as a list string."""
    return {cpu.cpu: None if cpu.l3 is None else cpu_set.render(cpu.l3) for cpu in readings.cpus}


def node_cpus(readings: Readings) -> dict[int, str]:
    """Return each node's CPUs as a list string."""
    return {node.id: cpu_set.render(node.cpus) for node in readings.nodes}


def device(root: Path, address: str, files: Mapping[str, str | bytes], *, below: str = "pci0000:16") -> Path:
    """Write a PCI device into the tree of bridges, with its link, as in live sysfs."""
    home = f"sys/devices/{below}/{address}"
    write(root, {f"{home}/{name}": content for name, content in files.items()})
    (root / PCI).mkdir(parents=True, exist_ok=True)
    (root / PCI / address).symlink_to(f"../../../devices/{below}/{address}")
    return root


def allowed(root: Path) -> tuple[str | None, str | None]:
    """Return the allowed CPUs and nodes as list strings."""
    readings = read(root)
    cpus, nodes = readings.allowed_cpus, readings.allowed_nodes
    return (None if cpus is None else cpu_set.render(cpus), None if nodes is None else cpu_set.render(nodes))


def only_pci(root: Path) -> PciReading:
    """Return the one PCI device that the reader shows."""
    (reading,) = read(root).pci
    return reading


class TestCpus:
    """Online CPUs, cores, packages and L3 groups."""

    def test_an_ordinary_machine(self, machine: Path) -> None:
        """Every online CPU has its siblings, package and L3 group."""
        readings = read(machine)
        assert readings.source == "test"
        assert cores(readings) == {cpu: f"{cpu % 8},{cpu % 8 + 8}" for cpu in (0, 1, 2, 3, 8, 9, 10, 11)}
        assert packages(readings) == {0: 0, 1: 0, 2: 1, 3: 1, 8: 0, 9: 0, 10: 1, 11: 1}
        assert caches(readings) == {cpu: "0-1,8-9" if cpu % 8 < 2 else "2-3,10-11" for cpu in cores(readings)}

    def test_what_a_core_shares_is_read_once(self, machine: Path) -> None:
        """The files of a second sibling are not read, so large machines stay fast."""
        for cpu in (8, 9, 10, 11):
            shutil.rmtree(machine / f"{CPU}/cpu{cpu}/topology")
            shutil.rmtree(machine / f"{CPU}/cpu{cpu}/cache")
        readings = read(machine)
        assert cores(readings)[11] == "3,11"
        assert packages(readings)[11] == 1
        assert caches(readings)[11] == "2-3,10-11"

    def test_an_offline_cpu_is_in_no_set(self, machine: Path) -> None:
        """An offline CPU appears neither by itself nor among siblings, L3 groups or nodes."""
        readings = read(write(machine, {f"{CPU}/online": "0-3,9-11"}))
        assert cores(readings) == {0: "0", 1: "1,9", 2: "2,10", 3: "3,11", 9: "1,9", 10: "2,10", 11: "3,11"}
        assert caches(readings)[0] == "0-1,9"
        assert node_cpus(readings) == {0: "0-1,9", 1: "2-3,10-11"}

    def test_an_online_cpu_without_a_directory_is_not_there(self, machine: Path) -> None:
        """A reduced capture keeps the list of all CPUs; a CPU without a directory is unknown."""
        assert set(cores(read(write(machine, {f"{CPU}/online": "0-1023"})))) == {0, 1, 2, 3, 8, 9, 10, 11}

    @pytest.mark.parametrize(
        ("name", "content"), [("core_cpus_list", "0,8"), ("thread_siblings", "101"), ("core_cpus", "00000101")]
    )
    def test_other_names_of_the_siblings(self, machine: Path, name: str, content: str) -> None:
        """New kernels have core_cpus_list, old captures only masks."""
        at = f"{CPU}/cpu0/topology"
        write(machine, {f"{at}/thread_siblings_list": None, f"{at}/{name}": content})
        assert cores(read(machine))[8] == "0,8"

    def test_a_cpu_of_which_nothing_is_known(self, machine: Path) -> None:
        """Without topology files a CPU's siblings, package and cache are unknown, and a note says so."""
        for cpu in (0, 8):
            shutil.rmtree(machine / f"{CPU}/cpu{cpu}/topology")
            shutil.rmtree(machine / f"{CPU}/cpu{cpu}/cache")
        for cpu in (1, 9):
            write(machine, {f"{CPU}/cpu{cpu}/topology/package_cpus_list": "1,9"})
            write(machine, {f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list": "1,9"})
        readings = read(machine)
        assert {cpu.cpu for cpu in readings.cpus if cpu.siblings is None} == {0, 8}
        assert readings.notes == (NO_CORES,)
        assert (packages(readings)[0], packages(readings)[8]) == (None, None)
        assert (caches(readings)[0], caches(readings)[8]) == (None, None)

    def test_sibling_lists_that_contradict_leave_cores_disjoint(self, machine: Path) -> None:
        """A CPU that two lists claim belongs to the first."""
        write(machine, {f"{CPU}/cpu1/topology/thread_siblings_list": "1,8-9"})
        assert cores(read(machine))[1] == "1,9"
        assert cores(read(machine))[8] == "0,8"

    def test_package_minus_one_is_unknown(self, machine: Path) -> None:
        """Virtual machines write -1, which is not a package."""
        write(machine, {f"{CPU}/cpu0/topology/physical_package_id": "-1"})
        assert packages(read(machine))[0] is None

    def test_packages_from_old_files(self, machine: Path) -> None:
        """Without package_cpus_list, core_siblings or each core's own package id is used."""
        for cpu in (0, 1, 8, 9):
            write(machine, {f"{CPU}/cpu{cpu}/topology/package_cpus_list": None})
        write(machine, {f"{CPU}/cpu0/topology/core_siblings": "101"})
        assert packages(read(machine)) == {0: 0, 1: 0, 2: 1, 3: 1, 8: 0, 9: 0, 10: 1, 11: 1}

    def test_the_l3_is_found_by_its_level(self, machine: Path) -> None:
        """If index3 is another cache, the one of level 3 counts; its mask is used if there is no list."""
        for cpu in (2, 3, 10, 11):
            at = f"{CPU}/cpu{cpu}/cache"
            write(machine, {f"{at}/index3/level": "2", f"{at}/index2/level": "3"})
            write(machine, {f"{at}/index2/shared_cpu_map": f"{1 << cpu:08x}"})
        assert caches(read(machine))[10] == "10"
        assert caches(read(machine))[0] == "0-1,8-9"


class TestNodes:
    """NUMA nodes, their memory and distances."""

    def test_an_ordinary_machine(self, machine: Path) -> None:
        """Nodes have CPUs, bytes and named distances."""
        first, second = read(machine).nodes
        assert (first.id, second.id) == (0, 1)
        assert (first.memory_bytes, first.free_bytes) == (2048 * 1024, 1024 * 1024)
        assert (first.distances, second.distances) == ({0: 10, 1: 21}, {0: 21, 1: 10})

    def test_the_distance_row_follows_the_online_ids(self, machine: Path) -> None:
        """With sparse ids, columns are the online nodes in ascending order, not 0, 1, 2."""
        write(machine, {f"{NODE}/online": "0-1,250", f"{NODE}/node250/distance": "80 81 10"})
        write(machine, {f"{NODE}/node250/cpulist": "", f"{NODE}/node0/distance": "10 21 80"})
        readings = read(machine)
        assert readings.nodes[2].distances == {0: 80, 1: 81, 250: 10}
        assert readings.nodes[0].distances == {0: 10, 1: 21, 250: 80}
        assert node_cpus(readings)[250] == ""

    @pytest.mark.parametrize("row", ["10", "10 21 30", "10 -1", "10 x", ""])
    def test_a_row_that_fits_not_is_unknown(self, machine: Path, row: str) -> None:
        """A row of the wrong length, or with other words than numbers, is ignored."""
        assert read(write(machine, {f"{NODE}/node0/distance": row})).nodes[0].distances == {}

    def test_offline_nodes_are_left_out(self, machine: Path) -> None:
        """The directory of an offline node is ignored."""
        write(machine, {f"{NODE}/online": "1", f"{NODE}/node1/distance": "10"})
        assert [(node.id, node.distances) for node in read(machine).nodes] == [(1, {1: 10})]

    def test_without_an_online_list_the_directories_count(self, machine: Path) -> None:
        """Old captures have no list of online nodes."""
        assert node_cpus(read(write(machine, {f"{NODE}/online": None}))) == {0: "0-1,8-9", 1: "2-3,10-11"}

    def test_a_mask_serves_for_the_list(self, machine: Path) -> None:
        """Old kernels write cpumap only."""
        write(machine, {f"{NODE}/node0/cpulist": None, f"{NODE}/node0/cpumap": "00000000,00000303"})
        assert node_cpus(read(machine))[0] == "0-1,8-9"

    def test_a_node_without_memory_has_none(self, machine: Path) -> None:
        """No memory is 0; an unknown size is None."""
        write(machine, {f"{NODE}/node0/meminfo": "Node 0 MemTotal: 0 kB", f"{NODE}/node1/meminfo": None})
        first, second = read(machine).nodes
        assert (first.memory_bytes, first.free_bytes) == (0, None)
        assert second.memory_bytes is None

    def test_no_node_directory(self, machine: Path) -> None:
        """A kernel without NUMA shows no nodes, and the reader adds none."""
        shutil.rmtree(machine / NODE)
        assert read(machine).nodes == ()


class TestAllowed:
    """The CPUs and nodes that a process may use, and the host's name."""

    def test_from_the_status_of_the_process(self, machine: Path) -> None:
        """The status file of this process comes first."""
        status = "Name:\tx\nCpus_allowed:\tf\nCpus_allowed_list:\t0-1,9\nMems_allowed_list:\t1\n"
        cgroup = {"proc/self/cgroup": "0::/", "proc/mounts": "c /cg cgroup2 rw 0 0", "cg/cpuset.cpus.effective": "3"}
        assert allowed(write(machine, {"proc/self/status": status, **cgroup})) == ("0-1,9", "1")

    def test_from_cgroup_v1(self, machine: Path) -> None:
        """The cpuset controller's mount and path lead to the lists."""
        write(machine, {"proc/self/cgroup": "9:cpu,cpuacct:/other\n7:cpuset:/job", "cg/cpuset/job/cpuset.cpus": "2-3"})
        write(machine, {"proc/mounts": "cgroup /cg/cpu cgroup rw,cpu 0 0\ncgroup /cg/cpuset cgroup rw,cpuset 0 0"})
        write(machine, {"cg/cpuset/job/cpuset.mems": "1", "cg/cpu/other/cpuset.cpus": "0"})
        assert allowed(machine) == ("2-3", "1")

    def test_from_cgroup_v2(self, machine: Path) -> None:
        """The nearest group with the cpuset controller counts; an empty list means that the group above does."""
        write(machine, {"proc/self/cgroup": "0::/slice/job", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"})
        write(machine, {"sys/fs/cgroup/slice/cpuset.cpus.effective": "0,8", "sys/fs/cgroup/cpuset.cpus.effective": "1"})
        write(machine, {"sys/fs/cgroup/slice/job/cpuset.mems.effective": "0"})
        write(machine, {"sys/fs/cgroup/slice/job/cpuset.cpus.effective": ""})
        assert allowed(machine) == ("0,8", "0")

    def test_from_the_cpuset_file_system(self, machine: Path) -> None:
        """Old systems mount cpusets at /dev/cpuset, where files have no prefix."""
        write(machine, {"proc/self/cpuset": "/dummy", "proc/mounts": "none /dev/cpuset cpuset rw 0 0"})
        write(machine, {"dev/cpuset/dummy/cpus": "1-2", "dev/cpuset/dummy/mems": "0-1"})
        assert allowed(machine) == ("1-2", "0-1")

    @pytest.mark.parametrize("cgroup", ["", "garbage", "0::/\0", "::", "7:cpuset:/gone"])
    def test_unknown(self, machine: Path, cgroup: str) -> None:
        """Without any of these files, the allowed sets are unknown."""
        write(
            machine, {"proc/self/cgroup": cgroup, "proc/mounts": "x\nc /cg cgroup rw,cpuset 0 0\nc /cg cgroup2 rw 0 0"}
        )
        assert allowed(machine) == (None, None)

    def test_the_host_name(self, machine: Path) -> None:
        """The kernel's name comes before the file in /etc; without both it is unknown."""
        assert read(machine).host is None
        assert read(write(machine, {"etc/hostname": "file"})).host == "file"
        assert read(write(machine, {"proc/sys/kernel/hostname": "kernel"})).host == "kernel"


class TestGpus:
    """NVIDIA GPUs on the PCI bus."""

    GPU: Mapping[str, str] = {"vendor": "0x10de", "class": "0x030200", "numa_node": "1", "local_cpulist": "2-3,10-11"}

    def test_below_bridges(self, machine: Path) -> None:
        """A GPU has its node, its CPUs, the bridges above it, nearest first, and the root bus."""
        device(machine, "0000:18:00.0", self.GPU, below="pci0000:16/0000:16:02.0/0000:17:00.0")
        write(machine, {"sys/devices/pci0000:16/0000:16:02.0/numa_node": "1"})
        write(machine, {"sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/numa_node": "0"})
        gpu = only_pci(machine)
        assert (gpu.address, gpu.is_gpu, gpu.node) == ("0000:18:00.0", True, 1)
        assert cpu_set.render(gpu.local_cpus or ()) == "2-3,10-11"
        assert (gpu.parents, gpu.parent_nodes) == (("0000:17:00.0", "0000:16:02.0"), (0, 1))
        assert gpu.host_bridge == "pci0000:16"
        assert (gpu.name, gpu.uuid, gpu.index, gpu.interfaces) == (None, None, None, ())

    def test_parents_that_tell_no_node(self, machine: Path) -> None:
        """A bridge of node -1 is a parent, but has no node."""
        device(machine, "0000:18:00.0", {**self.GPU, "numa_node": "-1"}, below="pci0000:16/0000:16:02.0/0000:17:00.0")
        write(machine, {"sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0/numa_node": "-1"})
        gpu = only_pci(machine)
        assert (gpu.node, gpu.parent_nodes, len(gpu.parents)) == (None, (), 2)

    def test_a_32_bit_domain(self, machine: Path) -> None:
        """Behind a volume management device the domain has five digits and the nearest root bus counts."""
        below = "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0"
        device(machine, "10000:e1:00.0", self.GPU, below=below)
        gpu = only_pci(machine)
        assert (gpu.address, gpu.host_bridge) == ("10000:e1:00.0", "pci10000:e0")
        assert gpu.parents == ("10000:e0:01.0", "0000:00:0e.0")

    def test_a_device_far_below(self, machine: Path) -> None:
        """Of more bridges than any machine has, the nearest are read."""
        below = "/".join(("pci0000:00", *(f"0000:{bus:02x}:00.0" for bus in range(MAX_PARENTS + 8))))
        device(machine, "0000:80:00.0", self.GPU, below=below)
        gpu = only_pci(machine)
        assert (len(gpu.parents), gpu.parents[0]) == (MAX_PARENTS, f"0000:{MAX_PARENTS + 7:02x}:00.0")
        assert gpu.host_bridge == "pci0000:00"

    def test_a_plain_directory_has_no_parents(self, machine: Path) -> None:
        """Captures may have devices as directories outside any tree."""
        gpu = only_pci(write(machine, {f"{PCI}/0004:05:00.0/{name}": text for name, text in self.GPU.items()}))
        assert (gpu.address, gpu.parents, gpu.host_bridge, gpu.node) == ("0004:05:00.0", (), None, 1)

    def test_local_cpus_from_a_mask(self, machine: Path) -> None:
        """If there is only a mask, it is used; offline CPUs are left out."""
        device(machine, "0000:18:00.0", {"vendor": "0x10de", "class": "0x030000", "local_cpus": "ffffffff,0000ff03"})
        assert cpu_set.render(only_pci(machine).local_cpus or ()) == "0-1,8-11"

    @pytest.mark.parametrize(
        ("files", "found"),
        [
            ({"vendor": "0x10de", "class": "0x030000"}, True),
            ({"vendor": "0x10de", "class": "0x068000"}, False),
            ({"vendor": "0x1a03", "class": "0x030200"}, False),
            ({"class": "0x030200"}, True),
            ({"class": "0x030000"}, False),
            ({"class": "0x030000", "config": b"\xde\x10\x34\x12"}, True),
            ({"class": "0x030200", "config": b"\x03\x1a\x34\x12"}, False),
            ({"class": "0x030200", "config": b""}, True),
            ({"vendor": "0x10de"}, False),
            ({"vendor": "0x10de", "class": "display"}, False),
        ],
    )
    def test_what_is_an_nvidia_gpu(self, machine: Path, files: dict[str, str | bytes], *, found: bool) -> None:
        """Its vendor comes from a file or its configuration space; without a vendor, only a 3D controller counts."""
        device(machine, "0000:18:00.0", files)
        assert [reading.is_gpu for reading in read(machine).pci] == [True] * found

    def test_a_vga_device_that_the_driver_knows(self, machine: Path) -> None:
        """Without a vendor, the driver's entry makes a VGA device a GPU, however the driver spells the address."""
        device(machine, "000a:18:00.0", {"class": "0x030000"})
        write(machine, {f"{NVIDIA}/000A:18:00.0/numa_status": "Node: -1"})
        assert only_pci(machine).is_gpu

    @pytest.mark.parametrize(
        ("speed", "gen"),
        [
            ("2.5 GT/s PCIe", 1),
            ("5.0 GT/s PCIe", 2),
            ("8.0 GT/s PCIe", 3),
            ("16.0 GT/s PCIe", 4),
            ("32.0 GT/s PCIe", 5),
            ("64.0 GT/s PCIe", 6),
            ("8 GT/s", 3),
            ("Unknown", None),
            ("12.0 GT/s PCIe", None),
        ],
    )
    def test_link_speeds(self, machine: Path, speed: str, gen: int | None) -> None:
        """The kernel's speed is a generation; another speed is unknown."""
        device(machine, "0000:18:00.0", {**self.GPU, "current_link_speed": speed, "max_link_width": "16"})
        assert only_pci(machine).pcie == Pcie(gen=gen, max_width=16)

    def test_link_now_and_at_most(self, machine: Path) -> None:
        """The current link and its maximum are separate; width 63 is an unreachable device."""
        link = {"current_link_width": "8", "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "63"}
        device(machine, "0000:18:00.0", {**self.GPU, **link})
        assert only_pci(machine).pcie == Pcie(width=8, max_gen=5)

    def test_the_driver_names_the_gpu(self, machine: Path) -> None:
        """The driver's /proc file gives model and UUID."""
        information = "Model: \t\t NVIDIA H100\nIRQ:   \t\t 66\nGPU UUID: \t GPU-1234\nBus Location: \t 0000:18:00.0"
        device(machine, "0000:18:00.0", self.GPU)
        gpu = only_pci(write(machine, {f"{NVIDIA}/0000:18:00.0/information": information}))
        assert (gpu.name, gpu.uuid) == ("NVIDIA H100", "GPU-1234")

    def test_a_uuid_of_question_marks_is_unknown(self, machine: Path) -> None:
        """Before a GPU is initialized the driver masks its UUID."""
        device(machine, "0000:18:00.0", self.GPU)
        write(machine, {f"{NVIDIA}/0000:18:00.0/information": "Model: Unknown\nGPU UUID: GPU-????????-????"})
        assert only_pci(machine).uuid is None

    def test_nodes_that_are_gpu_memory(self, machine: Path) -> None:
        """The driver reports them; -1 is not a node."""
        statuses = {"0000:18:00.0": "Node:      250\nStatus: online", "0000:19:00.0": "Node: -1", "x": "garbage"}
        write(machine, {f"{NVIDIA}/{address}/numa_status": text for address, text in statuses.items()})
        assert read(machine).gpu_memory_nodes == CpuSet({250})


class TestNics:
    """Network devices on the PCI bus."""

    def test_an_ethernet_device(self, machine: Path) -> None:
        """Names below net are interfaces, sorted."""
        device(machine, "0000:18:00.0", {"class": "0x020000", "vendor": "0x8086", "net/b/mtu": "1", "net/a/mtu": "1"})
        nic = only_pci(machine)
        assert (nic.is_gpu, nic.interfaces) == (False, (("a", "ethernet"), ("b", "ethernet")))

    def test_a_roce_device(self, machine: Path) -> None:
        """A device of class Ethernet with verbs has both kinds."""
        device(machine, "0000:18:00.0", {"class": "0x020000", "net/eth0/mtu": "1", "infiniband/mlx5_0/fw_ver": "1"})
        assert only_pci(machine).interfaces == (("eth0", "ethernet"), ("mlx5_0", "infiniband"))

    def test_an_infiniband_device(self, machine: Path) -> None:
        """An interface on an InfiniBand device is InfiniBand."""
        device(machine, "0000:18:00.0", {"class": "0x020700", "net/ib0/mtu": "1", "infiniband/mlx5_0/fw_ver": "1"})
        assert only_pci(machine).interfaces == (("ib0", "infiniband"), ("mlx5_0", "infiniband"))

    def test_a_virtio_device(self, machine: Path) -> None:
        """Its interface is one directory deeper."""
        device(machine, "0000:18:00.0", {"class": "0x020000", "virtio0/net/eth0/mtu": "1"})
        assert only_pci(machine).interfaces == (("eth0", "ethernet"),)

    def test_devices_that_do_not_count(self, machine: Path) -> None:
        """A NIC without an interface, a disk controller, and names that are not addresses are left out."""
        device(machine, "0000:18:00.0", {"class": "0x020000"})
        device(machine, "0000:19:00.0", {"class": "0x010802", "net/eth0/mtu": "1"})
        write(machine, {f"{PCI}/power/class": "0x020000", f"{PCI}/power/net/eth0/mtu": "1"})
        assert read(machine).pci == ()


class TestErrors:
    """Errors name the file and the remedy."""

    def test_not_a_machine(self, tmp_path: Path) -> None:
        """A directory without sys/devices/system is named, with how to capture a machine."""
        with pytest.raises(MachineError, match="is not a captured machine: it has no sys/devices/system") as caught:
            read(tmp_path)
        assert str(tmp_path) in caught.value.message
        assert "hwloc-gather-topology" in caught.value.hint
        assert caught.value.exit_code == 3

    def test_no_cpu(self, tmp_path: Path) -> None:
        """A tree without a CPU is not a machine."""
        with pytest.raises(MachineError, match="no online CPU"):
            read(write(tmp_path, {f"{NODE}/online": "0", f"{CPU}/online": "0"}))

    @pytest.mark.parametrize(
        "name",
        [
            f"{CPU}/online",
            f"{CPU}/cpu0/topology/thread_siblings_list",
            f"{CPU}/cpu0/topology/package_cpus_list",
            f"{CPU}/cpu0/cache/index3/shared_cpu_list",
            f"{NODE}/online",
            f"{NODE}/node1/cpulist",
            f"{PCI}/0000:18:00.0/local_cpulist",
        ],
    )
    @pytest.mark.parametrize("content", ["0-x", b"\xff\x00"])
    def test_a_garbled_list_is_named(self, machine: Path, name: str, content: str | bytes) -> None:
        """Half a list would make a wrong plan: the file is named instead."""
        device(machine, "0000:18:00.0", {"class": "0x030200"})
        with pytest.raises(MachineFileError) as caught:
            read(write(machine, {name: content}))
        assert f"{machine}/{name}: " in caught.value.message
        assert "hwloc-gather-topology" in caught.value.hint

    def test_a_garbled_allowed_list_is_named(self, machine: Path) -> None:
        """The same holds for the list in the status file."""
        with pytest.raises(MachineFileError, match=r"proc/self/status: '0-x'"):
            read(write(machine, {"proc/self/status": "Cpus_allowed_list:\t0-x"}))

    def test_links_that_wind_through_many_folders(self, tmp_path: Path) -> None:
        """A capture whose links take too many steps is refused at once, with the place where that was seen."""
        winding_capture(tmp_path / "root", 64)
        begun = time.process_time()
        with pytest.raises(MachineFileError, match=r"root/sys/.*: its files and links take more than 600000 steps"):
            read(tmp_path / "root")
        assert time.process_time() - begun < 4

    def test_other_garbled_files_are_unknown(self, machine: Path) -> None:
        """Any other garbled value, or one of the wrong type, is unknown and not an error."""
        device(machine, "0000:18:00.0", {"class": "0x030200", "vendor": "nvidia", "numa_node": "¹"})
        write(machine, {f"{CPU}/cpu0/topology/physical_package_id": b"\xff", f"{NODE}/node0/meminfo": "MemTotal: x kB"})
        write(machine, {f"{NODE}/node0/distance": b"\x00", f"{NVIDIA}/0000:18:00.0/information": b"\xff:\xfe"})
        (machine / f"{PCI}/0000:18:00.0/max_link_width").mkdir()
        os.mkfifo(machine / f"{PCI}/0000:18:00.0/max_link_speed")
        readings = read(machine)
        assert packages(readings)[0] is None
        assert (readings.nodes[0].memory_bytes, readings.nodes[0].distances) == (None, {})
        assert [(gpu.node, gpu.pcie) for gpu in readings.pci] == [(None, Pcie())]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which each captured machine is unpacked once."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture
def capture(request: pytest.FixtureRequest, unpacked: Path) -> Path:
    """Unpack a captured machine."""
    archive = CAPTURES / f"{request.param}.tar.bz2"
    if not archive.is_file():
        pytest.skip("captured machines are not beside this checkout")
    root = unpacked / str(request.param)
    if not root.exists():
        with tarfile.open(archive) as tar:
            tar.extraction_filter = lambda member, _path: member
            tar.extractall(unpacked)  # noqa: S202 - files of our own, links and modes as captured
    return root


class TestCaptures:
    """Captured machines; the facts were written by hand."""

    @pytest.mark.parametrize("capture", ["nvidiagpunumanodes"], indirect=True)
    def test_power9_with_gpu_memory_nodes(self, capture: Path) -> None:
        """CPUs on nodes 0 and 8, GPU memory on 250-255, GPUs by their local CPUs only, SMT4."""
        readings = read(capture)
        assert {n: cpus for n, cpus in node_cpus(readings).items() if cpus} == {0: "0-15", 8: "88-103"}
        assert readings.gpu_memory_nodes == CpuSet(range(250, 256))
        assert readings.nodes[-1].distances == dict.fromkeys([0, 8, *range(250, 255)], 80) | {255: 10}
        sides = {gpu.address: cpu_set.render(gpu.local_cpus or ()) for gpu in readings.pci if gpu.is_gpu}
        first = dict.fromkeys(["0004:05:00.0", "0004:06:00.0", "0006:00:00.0"], "0-15")
        assert sides == first | dict.fromkeys(["0007:00:00.0", "0035:04:00.0", "0035:05:00.0"], "88-103")
        assert {gpu.node for gpu in readings.pci} == {None}
        assert cores(readings)[101] == "100-103"
        assert caches(readings)[88] == "88-95"
        assert allowed(capture) == ("0-175", "0,8,250-255")

    @pytest.mark.parametrize("capture", ["fakeheteromemtiers"], indirect=True)
    def test_sparse_nodes(self, capture: Path) -> None:
        """Possible 0-9, online 0-2,4,6,8-9, CPUs on 0-2."""
        readings = read(capture)
        assert node_cpus(readings) == {0: "0-1", 1: "2-3", 2: "4-5", 4: "", 6: "", 8: "", 9: ""}
        assert set(readings.nodes[0].distances) == {0, 1, 2, 4, 6, 8, 9}

    @pytest.mark.parametrize("capture", ["16amd64-8n2c-cpusets"], indirect=True)
    def test_a_cpuset(self, capture: Path) -> None:
        """The old cpuset file system limits the process; CPU 4 is off."""
        readings = read(capture)
        assert len(readings.nodes) == 8
        assert cpu_set.render(cpu.cpu for cpu in readings.cpus) == "0-3,5-15"
        assert allowed(capture) == ("0-6,12-15", "1-4")

    @pytest.mark.parametrize("capture", ["2pa-pcidomain32bits"], indirect=True)
    def test_a_32_bit_domain(self, capture: Path) -> None:
        """Its only NIC is a virtio device of node -1; the VGA device of another vendor is not a GPU."""
        (nic,) = read(capture).pci
        assert (nic.address, nic.node, nic.interfaces) == ("0000:00:03.0", None, (("ens3", "ethernet"),))

    @pytest.mark.parametrize("capture", ["2arm-2c"], indirect=True)
    def test_no_nodes(self, capture: Path) -> None:
        """A kernel without NUMA."""
        readings = read(capture)
        assert readings.nodes == ()
        assert cores(readings) == {0: "0", 1: "1"}

    @pytest.mark.parametrize(
        "capture",
        ["nvidiagpunumanodes", "fakeheteromemtiers", "16amd64-8n2c-cpusets", "2pa-pcidomain32bits", "2arm-2c"],
        indirect=True,
    )
    def test_agrees_with_hwloc(self, capture: Path) -> None:
        """Hwloc, reading the same tree, sees the same nodes, memory, distances, cores, packages and L3 groups."""
        if shutil.which("lstopo-no-graphics") is None:
            pytest.skip("lstopo-no-graphics is not installed (Debian package hwloc-nox)")
        ours, theirs = read(capture), read_hwloc(xmlfile.parse(lstopo(capture), source="lstopo"))
        assert cores(ours) == cores(theirs)
        assert packages(ours) == packages(theirs)
        assert caches(ours) == caches(theirs)
        if ours.nodes:
            assert node_cpus(ours) == node_cpus(theirs)
            assert [node.memory_bytes for node in ours.nodes] == [node.memory_bytes for node in theirs.nodes]
        if len(ours.nodes) > 1:
            assert [node.distances for node in ours.nodes] == [node.distances for node in theirs.nodes]
        assert ours.gpu_memory_nodes == theirs.gpu_memory_nodes


class TestWithoutProc:
    """Captures on a host whose /proc is not mounted, such as a bare chroot."""

    CHROOTED = """if True:
        import ctypes, os, sys
        from pathlib import Path
        from numapin.topology.sources.sysfs import read_sysfs
        if os.geteuid():
            ctypes.CDLL(None).unshare(0x10000000)  # CLONE_NEWUSER
        try:
            os.chroot(sys.argv[1])
        except PermissionError:
            sys.exit(77)
        assert not os.path.exists("/proc")
        print(read_sysfs(Path(sys.argv[2]), source="test"))
    """

    def test_nothing_is_missing(self, machine: Path) -> None:
        """The same is read as with /proc, through links too."""
        device(machine, "0000:18:00.0", {"class": "0x030200", "vendor": "0x10de", "numa_node": "1"})
        command = [sys.executable, "-c", self.CHROOTED, str(machine.parent), f"/{machine.name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 77:
            pytest.skip("no right to change the root directory here")
        assert done.stderr == ""
        assert done.stdout == f"{read(machine)}\n"

    def test_a_file_that_is_replaced_meanwhile(self, tmp_path: Path) -> None:
        """A file that has taken the name of the one that was found is not read."""
        write(tmp_path, {"found": "1", "other": "2"})
        with tree._Walk(str(tmp_path), "found", tree._Steps()) as walk:
            os.close(walk._open_by_name(os.O_RDONLY))
            (tmp_path / "other").rename(tmp_path / "found")
            with pytest.raises(OSError, match="Stale file handle"):
                walk._open_by_name(os.O_RDONLY)


def lstopo(root: Path) -> str:
    """Let hwloc read a captured machine, including disallowed CPUs and the memory of GPUs."""
    environment = {
        **os.environ,
        "HWLOC_FSROOT": str(root),
        "HWLOC_COMPONENTS": "linux,stop",
        "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
    }
    command = ["lstopo-no-graphics", "--disallowed", "--of", "xml"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_live_machine() -> None:
    """On the test's own machine, CPUs and nodes are those that the kernel reports to this process."""
    if not Path("/sys/devices/system/cpu/online").is_file():
        pytest.skip("/sys is not mounted")
    readings = read(Path("/"))
    assert os.sched_getaffinity(0) <= {cpu.cpu for cpu in readings.cpus}
    assert allowed(Path("/"))[0] == cpu_set.render(os.sched_getaffinity(0))
    assert all(cpu.cpu in (cpu.siblings or ()) for cpu in readings.cpus)
