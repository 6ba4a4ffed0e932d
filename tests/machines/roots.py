"""Turn a machine's facts (NAME.toml) into the files of a real one: a sysfs/proc tree, and NVML readings.

The facts are data: packages, nodes, the numbering of SMT siblings, host bridges with their node, devices by their path.
The tree has Linux's own layout, with lists and masks, so that our reader can be compared with others (hwloc).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tests.machines.seam import CpuSet, NvmlReading, NvmlReadings, cpu_set, pci_order

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.toml")))
_CPU, _NODE = "sys/devices/system/cpu", "sys/devices/system/node"
_KFD = "sys/class/kfd/kfd/topology/nodes"
_VENDORS = {"nvidia": ("0x10de", "0x030200"), "amd": ("0x1002", "0x120000"), "intel": ("0x8086", "0x038000")}
_MAX_CPUS = 512  # the width of the generated masks, like a kernel's NR_CPUS


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts of one machine, as in the TOML file (tests/machines/README.md explains each key)."""

    name: str
    facts: str
    truth: list[list[Any]]
    packages: list[dict[str, Any]]
    nodes: list[dict[str, Any]] = field(default_factory=list)
    no_node_directory: bool = False
    smt: int = 1
    siblings: str = "apart"
    l3_cores: int | None = None
    distance: dict[str, int] = field(default_factory=lambda: {"package": 12, "other": 32})
    offline: str = ""
    gpu: str = ""
    nvlinks: int = 0
    vendor: str = "nvidia"
    xgmi: int = 0
    partitions: int = 1
    host_gib: int | None = None
    capture: dict[str, Any] = field(default_factory=dict)
    described: list[str] = field(default_factory=list)
    bridges: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    nics: list[dict[str, Any]] = field(default_factory=list)
    nccl: dict[str, list[str]] = field(default_factory=dict)
    allowed: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    highest_perf: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)

    @cached_property
    def present(self) -> CpuSet:
        return CpuSet().union(*(CpuSet.parse(p["cpus"]) for p in self.packages))

    @cached_property
    def online(self) -> CpuSet:
        return self.present - CpuSet.parse(self.offline)

    @cached_property
    def cpu_nodes(self) -> dict[int, CpuSet]:
        found = {node["id"]: CpuSet.parse(node.get("cpus", "")) & self.online for node in self.nodes}
        return {node: cpus for node, cpus in found.items() if cpus}

    @property
    def nccl_nodes(self) -> dict[str, int]:
        return {address: int(node) for node, addresses in self.nccl.items() for address in addresses}


def load(name: str) -> Machine:
    return Machine(name=name, **tomllib.loads((HERE / f"{name}.toml").read_text()))


def describe(machine: Machine, kind: str) -> str:
    return (HERE / "described" / f"{machine.name}.{kind}.xml").read_text()


def write_root(machine: Machine, root: Path) -> Path:
    end = "\n\0" if machine.capture.get("nul") else "\n"
    sources = (_cpu_files, _node_files, _pci_files, _other_nic_files, _kfd_files, _proc_files)
    for path, text in chain.from_iterable(files(machine) for files in sources):
        at = root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{text}{end}")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    for path in _pci_paths(machine):
        (links / path.rpartition("/")[2]).symlink_to(f"../../../devices/{path}")
    _link_interfaces(machine, root)
    return root


def _link_interfaces(machine: Machine, root: Path) -> None:
    """Make the links of /sys/class/net, which has the interfaces of PCI devices too, and of /sys/class/infiniband."""
    for kind in ("net", "infiniband"):
        (root / "sys/class" / kind).mkdir(parents=True)
    for nic in machine.nics:
        is_verbs = nic.get("kind") == "infiniband"
        names = [("infiniband", nic["name"]), ("net", nic.get("net"))] if is_verbs else [("net", nic["name"])]
        for kind, name in names:
            if name is not None:
                (root / "sys/class" / kind / name).symlink_to(f"../../devices/{_nic_path(nic)}/{kind}/{name}")
    (root / "sys/class/net/lo").symlink_to("../../devices/virtual/net/lo")


def _nic_path(nic: dict[str, Any]) -> str:
    return str(nic["at"]) if "at" in nic else f"{nic['bus']}/{nic['name']}"


def nvml_readings(machine: Machine) -> NvmlReadings:
    """Return NVML's readings: by default the device's local CPUs and node, as NVML takes them from the kernel."""
    if machine.vendor != "nvidia":
        return NvmlReadings(gpus=None)
    gpus = tuple(_nvml_reading(machine, index, gpu) for index, gpu in enumerate(machine.gpus))
    pairs = [(a, b) for a in range(len(gpus)) for b in range(a + 1, len(gpus))] if machine.nvlinks else []
    return NvmlReadings(gpus=gpus, links=tuple((a, b, f"NV{machine.nvlinks}") for a, b in pairs))


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-00000000000{index:x}"


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _cpu_files(machine: Machine) -> Iterator[tuple[str, str]]:
    if not machine.capture.get("no_online_list"):
        yield f"{_CPU}/online", cpu_set.render(machine.online)
    yield f"{_CPU}/possible", cpu_set.render(machine.present)
    yield f"{_CPU}/present", cpu_set.render(machine.present)
    for cpu in machine.present - machine.online:
        yield f"{_CPU}/cpu{cpu}/online", "0"  # an offline CPU has no topology folder
    for package in machine.packages:
        cpus = CpuSet.parse(package["cpus"])
        cores = cores_of(machine, sorted(cpus))
        for number, core in enumerate(cores):
            yield from _topology_files(machine, package["id"], number, {"thread": core, "core": cpus})
        yield from _cache_files(machine, cores)
    for name, ratings in (("acpi_cppc/highest_perf", machine.highest_perf), ("cpu_capacity", machine.capacity)):
        for listed, number in ratings.items():
            yield from ((f"{_CPU}/cpu{cpu}/{name}", str(number)) for cpu in CpuSet.parse(listed) & machine.online)


def cores_of(machine: Machine, cpus: list[int]) -> list[CpuSet]:
    """Pair SMT siblings within a package, numbered side by side (POWER) or one round after the other (x86)."""
    count = len(cpus) // machine.smt
    if machine.siblings == "adjacent":
        return [CpuSet(cpus[i * machine.smt : (i + 1) * machine.smt]) for i in range(count)]
    return [CpuSet(cpus[i::count]) for i in range(count)]


def _topology_files(machine: Machine, package: int, core: int, groups: dict[str, CpuSet]) -> Iterator[tuple[str, str]]:
    """Yield the files of each online CPU of a core; `groups` are the CPUs of the core and of its package."""
    values = {"physical_package_id": str(package), "core_id": str(core)}
    for word, cpus in groups.items():
        values[f"{word}_siblings"] = _mask(cpus & machine.online)
        values[f"{word}_siblings_list"] = cpu_set.render(cpus & machine.online)
    for cpu in groups["thread"] & machine.online:
        yield from ((f"{_CPU}/cpu{cpu}/topology/{name}", value) for name, value in values.items())


def _cache_files(machine: Machine, cores: list[CpuSet]) -> Iterator[tuple[str, str]]:
    size = machine.l3_cores or 0
    for start in range(0, len(cores), size) if size else ():
        l3 = CpuSet().union(*cores[start : start + size]) & machine.online
        values = {"level": "3", "type": "Unified", "size": "16384K", "shared_cpu_map": _mask(l3)}
        for cpu in l3:
            yield from ((f"{_CPU}/cpu{cpu}/cache/index3/{name}", value) for name, value in values.items())


def _node_files(machine: Machine) -> Iterator[tuple[str, str]]:
    if machine.no_node_directory:
        return
    ids = sorted(node["id"] for node in machine.nodes)
    yield f"{_NODE}/online", cpu_set.render(ids)
    yield f"{_NODE}/possible", f"0-{ids[-1]}"
    for node in machine.nodes:
        at, cpus = f"{_NODE}/node{node['id']}", machine.cpu_nodes.get(node["id"], CpuSet())
        kilobytes = node.get("gib", 64) << 20
        yield f"{at}/cpulist", cpu_set.render(cpus)
        yield f"{at}/cpumap", _mask(cpus)
        yield f"{at}/distance", " ".join(str(_distance(machine, node["id"], other)) for other in ids)
        begin = f"Node {node['id']} Mem"
        yield f"{at}/meminfo", f"{begin}Total: {kilobytes:14} kB\n{begin}Free: {kilobytes // 2:15} kB"


def _distance(machine: Machine, a: int, b: int) -> int:
    """Return 10 for the node itself, the far distance if a node without CPUs is involved, else the packages' one."""
    if a == b:
        return 10
    if a not in machine.cpu_nodes or b not in machine.cpu_nodes:
        return machine.distance.get("memory", machine.distance["other"])
    package = {n["id"]: n.get("package") for n in machine.nodes}
    return machine.distance["package" if package[a] == package[b] is not None else "other"]


# --- PCI -------------------------------------------------------------------------------------------------------------


def _pci_paths(machine: Machine) -> dict[str, dict[str, Any]]:
    """Return the facts of each device by its path below sys/devices, including the bridges on the way."""
    devices = {device["at"]: device for device in (*machine.gpus, *machine.nics) if "at" in device}
    above = {path.rsplit("/", up)[0] for path in devices for up in range(1, path.count("/"))}
    return {**{path: {"bridge": True} for path in above}, **devices}


def _pci_files(machine: Machine) -> Iterator[tuple[str, str]]:
    for path, device in _pci_paths(machine).items():
        at, values = f"sys/devices/{path}", _attributes(machine, path, device)
        yield from ((f"{at}/{name}", value) for name, value in values.items())
        if "name" in device:
            folder = "infiniband" if device.get("kind") == "infiniband" else "net"
            yield f"{at}/{folder}/{device['name']}/uevent", ""
        if "type" in device:
            yield f"{at}/net/{device.get('net', device['name'])}/type", str(device["type"])
        if machine.vendor == "intel" and device in machine.gpus and machine.partitions > 1:
            yield from ((f"{at}/tile{tile}/uevent", "") for tile in range(machine.partitions))


def _other_nic_files(machine: Machine) -> Iterator[tuple[str, str]]:
    for nic in (nic for nic in machine.nics if "bus" in nic):
        at = f"sys/devices/{_nic_path(nic)}/net/{nic['name']}"
        yield f"{at}/type", str(nic.get("type", 1))
        yield f"{at}/device/numa_node", str(nic.get("numa_node", -1))


def _kfd_files(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the KFD's nodes: the NUMA nodes, then each GPU or partition, with xGMI links between all of them."""
    if machine.vendor != "amd":
        return
    devices = [(gpu, part) for gpu in machine.gpus for part in range(machine.partitions)]
    first = len(machine.cpu_nodes)
    for number in range(first):
        yield f"{_KFD}/{number}/gpu_id", "0"
        yield f"{_KFD}/{number}/properties", "cpu_cores_count 8\nsimd_count 0\nlocation_id 0"
    for number, (gpu, part) in enumerate(devices, first):
        yield f"{_KFD}/{number}/gpu_id", str(1000 + number)
        domain, bus, device, function = pci_order(gpu["at"].rpartition("/")[2])
        place = part << 28 | bus << 8 | device << 3 | function
        unique = 0 if gpu.get("no_uuid") else 0xA000 + machine.gpus.index(gpu)
        names = f"domain {domain}\nlocation_id {place}\nunique_id {unique}"
        yield f"{_KFD}/{number}/properties", f"cpu_cores_count 0\nsimd_count 304\n{names}"
        others = [other for other in range(first, first + len(devices)) if other != number and machine.xgmi]
        for place, other in enumerate(others):
            speeds = f"min_bandwidth 64000\nmax_bandwidth {machine.xgmi * 64000}"
            text = f"type 11\nnode_from {number}\nnode_to {other}\nweight 15\n{speeds}"
            yield f"{_KFD}/{number}/io_links/{place}/properties", text


def _attributes(machine: Machine, path: str, device: dict[str, Any]) -> dict[str, str]:
    local, node = _local_cpus(machine, path, device), _kernel_node(machine, path, device)
    values = {"local_cpus": _mask(local), "local_cpulist": cpu_set.render(local)}
    if node is not None:
        values["numa_node"] = str(node)
    if device not in machine.gpus:
        device_class = device.get("class", "0x020000") if device in machine.nics else "0x060400"  # else a bridge
        return {"class": device_class, "vendor": "0x15b3", "device": "0x20b0", **values}
    vendor, device_class = _VENDORS[machine.vendor]
    return {
        "class": device.get("class", device_class),
        "vendor": vendor,
        "device": "0x0bd5" if machine.vendor == "intel" else "0x20b0",
        **values,
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_width": "16",
    }


def _bridge(machine: Machine, path: str) -> dict[str, Any]:
    """Return the facts of a device's host bridge; in the short form, the file has only its node."""
    facts = machine.bridges[path.partition("/")[0]]
    return facts if isinstance(facts, dict) else {"node": facts}


def _kernel_node(machine: Machine, path: str, device: dict[str, Any]) -> int | None:
    """Return what the kernel writes to numa_node: the host bridge's node, -1 if unknown, None if there is no file."""
    node: int | None = device.get("numa_node", _bridge(machine, path).get("node"))
    return node


def _local_cpus(machine: Machine, path: str, device: dict[str, Any]) -> CpuSet:
    """Return the CPUs of the device's node; if the node is unknown, the kernel shows all online CPUs."""
    listed = _bridge(machine, path).get("local_cpus")
    node = _kernel_node(machine, path, device)
    return CpuSet.parse(listed) if listed else machine.cpu_nodes.get(-1 if node is None else node, machine.online)


# --- the driver and the process --------------------------------------------------------------------------------------


def _proc_files(machine: Machine) -> Iterator[tuple[str, str]]:
    for gpu in machine.gpus if machine.vendor == "nvidia" else ():
        at = f"proc/driver/nvidia/gpus/{gpu['at'].rpartition('/')[2]}"
        yield f"{at}/information", f"Model: \t\t {machine.gpu}\nGPU UUID: \t {uuid(machine.gpus.index(gpu))}"
        if "own_node" in gpu:
            yield f"{at}/numa_status", f"Node:      {gpu['own_node']}\nStatus:    online"
    nodes = cpu_set.render(node["id"] for node in machine.nodes) or "0"
    cpus = machine.allowed.get("cpus", cpu_set.render(machine.online))
    if machine.host_gib is not None:
        yield "proc/meminfo", f"MemTotal: {machine.host_gib << 20:15} kB"
    if "cpuset" in machine.capture:
        yield from _cpuset_files(machine, machine.capture["cpuset"])
        return
    yield "proc/self/status", f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{machine.allowed.get('nodes', nodes)}"


def _cpuset_files(machine: Machine, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the files of an old capture: the cpuset's name, its mount, and no status of the process."""
    at, names = {
        "cgroup1": ("dev/cpuset", ("cpus", "mems")),
        "cgroup2": ("sys/fs/cgroup", ("cpuset.cpus.effective", "cpuset.mems.effective")),
    }[kind]
    mount = "cgroup2 rw" if kind == "cgroup2" else "cgroup rw,cpuset,noprefix"
    yield "proc/mounts", f"none /{at} {mount} 0 0"
    if kind == "cgroup2":
        yield f"{at}/cgroup.controllers", "cpuset cpu io memory pids"
    yield "proc/self/cpuset", "/job"
    for name, allowed in zip(names, (machine.allowed["cpus"], machine.allowed["nodes"]), strict=True):
        yield f"{at}/job/{name}", allowed


def _nvml_reading(machine: Machine, index: int, gpu: dict[str, Any]) -> NvmlReading:
    path, node = gpu["at"], _kernel_node(machine, gpu["at"], gpu)
    known = node is not None and node in machine.cpu_nodes
    return NvmlReading(
        index=index,
        uuid=uuid(index),
        pci=path.rpartition("/")[2],
        name=machine.gpu,
        memory_nodes=CpuSet({node} if known and node is not None else machine.cpu_nodes),
        cpus=_local_cpus(machine, path, gpu),
        own_node=gpu.get("own_node"),
    )


def _mask(cpus: CpuSet) -> str:
    value = sum(1 << cpu for cpu in cpus)
    words = range(_MAX_CPUS // 32 - 1, -1, -1)
    return ",".join(f"{value >> 32 * word & 0xFFFFFFFF:08x}" for word in words)
