"""CPUs, nodes, the cpuset, GPUs and NICs from /sys and /proc below any root directory.

A machine with 256 CPUs takes some milliseconds: the files of a core or an L3 cache are read for one of its CPUs only.
Source: Documentation/ABI/stable/sysfs-devices-node; .../testing/sysfs-devices-system-cpu, sysfs-bus-pci and
sysfs-class-net; admin-guide/cgroup-*/cpusets; admin-guide/acpi/cppc_sysfs.rst. Slingshot:
docs/ABI/testing/sysfs-class-cxi and drivers/net/ethernet/hpe/ss1 of https://github.com/HewlettPackard/shs-cxi-driver.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_NICS, MAX_PARENTS
from numapin.base.cpu_set import CpuSet
from numapin.base.text import not_none, without_none
from numapin.errors import MachineError
from numapin.system.cgroup import cpuset_of, own_cgroups
from numapin.system.tree import CAPTURE, NODES, Tree
from numapin.topology.address import pci_address
from numapin.topology.model import CpuSpeed, NodeSource, Pcie
from numapin.topology.nics import Nic, NicInterface, NicKind
from numapin.topology.readings import (
    CONTROLLER_3D,
    VGA,
    CpuReading,
    NodeReading,
    PciReading,
    Readings,
    gbit_s,
    hexadecimal,
    is_network,
    may_be_gpu,
    nic_kind,
    pci_class,
    pcie_generation,
    pcie_width,
)
from numapin.topology.sources.gpu_drivers import gpu_memory_nodes, nvidia_names, read_drivers
from numapin.topology.vendors import BY_PCI_ID, GpuVendor, is_gpu

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from pathlib import Path

_SYSTEM: Final = "sys/devices/system"
_CPU: Final = f"{_SYSTEM}/cpu"
_ALLOWED: Final = tuple(re.compile(rf"^{what}_allowed_list:\s*(\S*)", re.MULTILINE) for what in ("Cpus", "Mems"))
_DISTANCE: Final = re.compile(r"[0-9]{1,9}")

_DEVICES: Final = "sys/bus/pci/devices"
_NET: Final = "sys/class/net"
_INFINIBAND: Final = "sys/class/infiniband"
# Types of interfaces (ARPHRD_*): others are tunnels, radio and the like.
_TYPES: Final = {1: NicKind.ETHERNET, 32: NicKind.INFINIBAND}
_OPERATIONAL_STATES: Final = frozenset({"up", "down", "lowerlayerdown", "dormant", "notpresent", "testing"})
_ACTIVE: Final = "4:"  # of "4: ACTIVE" (IB_PORT_ACTIVE)
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9])?) Gb/sec", re.ASCII)
_CASSINI: Final = frozenset({(0x17DB, 0x0501), (0x1590, 0x0371), (0x1590, 0x0372)})  # PCI vendor and device
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_sysfs(root: Path, *, source: str) -> Readings:
    """Read /sys and /proc below `root`.

    Raises MachineError if `root` is not a captured machine, MachineFileError if a CPU or node list is malformed.
    """
    tree = Tree(os.fspath(root).rstrip("/"))
    if not tree.names(_SYSTEM):
        raise MachineError(f"{tree.root or '/'} is not a captured machine: it has no {_SYSTEM}", CAPTURE)
    present = _numbered(tree, _CPU, "cpu")
    online = tree.numbers(f"{_CPU}/online")
    if online is None:  # captures without the list; a CPU that cannot go offline has no file of its own
        online = CpuSet(cpu for cpu in present if tree.number(f"{_CPU}/cpu{cpu}/online") != 0)
    online &= CpuSet(present)
    if not online:
        raise MachineError(f"{tree.root}/{_CPU} shows no online CPU (cpu0, cpu1, … and the file online)", CAPTURE)
    cpus = _read_cpus(tree, online)
    cores = sorted({reading.siblings for reading in cpus if reading.siblings}, key=min)
    pci, fabric = read_drivers(tree, tuple(_read_pci(tree, online)))
    names_on_pci = {nic.name for device in pci for nic in device.interfaces}
    # What the reading process may use, or the process that captured the machine.
    allowed_cpus, allowed_nodes = (tree.numbers("proc/self/status", line=line) for line in _ALLOWED)
    allowed_cpus = cpuset_of(tree, what="cpus") if allowed_cpus is None else allowed_cpus
    allowed_nodes = cpuset_of(tree, what="mems") if allowed_nodes is None else allowed_nodes
    # The cpuset of the whole machine needs no file of its own.
    cpuset = tree.text("proc/self/cpuset")
    own_cpuset = [cpuset] if cpuset else own_cgroups(tree, "cpuset") or own_cgroups(tree, "")
    return Readings(
        host=tree.text("proc/sys/kernel/hostname") or tree.text("etc/hostname") or None,
        source=source,
        cpus=cpus,
        nodes=tuple(_read_nodes(tree, online)),
        allowed_cpus=allowed_cpus,
        allowed_nodes=allowed_nodes,
        pci=pci,
        nics=tuple(islice(_read_other_nics(tree, names_on_pci), MAX_NICS + 1)),  # `build` refuses that many
        fabric=fabric,
        gpu_memory_nodes=gpu_memory_nodes(tree),
        memory_bytes=_kilobytes(tree.text("proc/meminfo") or "", "MemTotal"),
        speeds=_read_speeds(tree, cores),
        allowed_known=None not in (allowed_cpus, allowed_nodes) or own_cpuset == ["/"],
    )


# --- CPUs and nodes --------------------------------------------------------------------------------------------------


def _read_cpus(tree: Tree, online: CpuSet) -> tuple[CpuReading, ...]:
    siblings, caches = dict[int, CpuSet](), dict[int, CpuSet]()
    in_order = sorted(online)
    for groups, read in ((siblings, _siblings), (caches, _l3)):
        # A list is read for one CPU of each group. A CPU without a list, or with one that lacks it, has no group.
        left = set(online)
        for cpu in in_order:
            members = read(tree, f"{_CPU}/cpu{cpu}") if cpu in left else None
            if members is not None and cpu in members:
                group = members & left
                left -= group
                groups.update(dict.fromkeys(group, group))
    cores = {cpu: siblings.get(cpu) or CpuSet({cpu}) for cpu in in_order}
    packages = {
        core: tree.number(f"{_CPU}/cpu{min(core)}/topology/physical_package_id")
        for core in dict.fromkeys(cores.values())
    }
    return tuple(CpuReading(cpu, siblings.get(cpu), packages[core], caches.get(cpu)) for cpu, core in cores.items())


def _siblings(tree: Tree, at: str) -> CpuSet | None:
    listed = tree.numbers(f"{at}/topology/thread_siblings_list", mask=f"{at}/topology/thread_siblings")
    return listed or tree.numbers(f"{at}/topology/core_cpus_list", mask=f"{at}/topology/core_cpus")


def _l3(tree: Tree, at: str) -> CpuSet | None:
    caches = (name for name in tree.names(f"{at}/cache") if name.startswith("index"))
    for name in sorted(caches, key=lambda name: name != "index3"):  # index3 first, because it is nearly always the L3
        if tree.number(f"{at}/cache/{name}/level") == 3:
            return tree.numbers(f"{at}/cache/{name}/shared_cpu_list", mask=f"{at}/cache/{name}/shared_cpu_map")
    return None


def _read_nodes(tree: Tree, online: CpuSet) -> Iterator[NodeReading]:
    present = _numbered(tree, NODES, "node")
    listed = tree.numbers(f"{NODES}/online")
    ids = present if listed is None else sorted(listed)
    for node in sorted(set(present).intersection(ids)):
        at = f"{NODES}/node{node}"
        cpus = tree.node_cpus(node) or CpuSet()
        meminfo = tree.text(f"{at}/meminfo") or ""
        # The kernel writes a distance for each online node, in ascending order.
        distances = (tree.text(f"{at}/distance") or "").split()
        are_known = len(distances) == len(ids) and all(map(_DISTANCE.fullmatch, distances))
        yield NodeReading(
            id=node,
            cpus=cpus & online,
            memory_bytes=_kilobytes(meminfo, "MemTotal"),
            free_bytes=_kilobytes(meminfo, "MemFree"),
            distances=dict(zip(ids, map(int, distances), strict=True)) if are_known else {},
        )


def _kilobytes(meminfo: str, key: str) -> int | None:
    match = re.search(rf"\b{key}:\s*([0-9]{{1,15}}) kB", meminfo)
    return int(match[1]) * 1024 if match else None


def _numbered(tree: Tree, path: str, word: str) -> list[int]:
    matches = (re.fullmatch(rf"{word}([0-9]{{1,6}})", name) for name in tree.names(path))
    return sorted(int(match[1]) for match in matches if match)


def _read_speeds(tree: Tree, cores: Sequence[CpuSet]) -> tuple[CpuSpeed, ...]:
    """Return the ratings of the CPUs of these cores, in the order of their lowest CPUs."""
    perf, capacity = _ratings(tree, cores, "acpi_cppc/highest_perf"), _ratings(tree, cores, "cpu_capacity")
    alike: dict[tuple[int | None, int | None], list[int]] = {}
    for cpu in sorted({*perf, *capacity}):
        alike.setdefault((perf.get(cpu), capacity.get(cpu)), []).append(cpu)
    return tuple(
        CpuSpeed(cpus=CpuSet(cpus), highest_perf=highest_perf, capacity=number)
        for (highest_perf, number), cpus in alike.items()
    )


def _ratings(tree: Tree, cores: Sequence[CpuSet], name: str) -> Mapping[int, int]:
    """Return the number in a file of each CPU; none if the first CPU has no such file.

    If the first threads of all cores have one number, it is that of the other threads too, which are not read.
    """
    file = f"{_CPU}/cpu{{}}/{name}"
    first = list(map(min, cores))
    if not first or tree.number(file.format(first[0])) is None:
        return {}
    known = dict(zip(first, map(tree.number, map(file.format, first)), strict=True))
    all_cpus = set(chain.from_iterable(cores))
    if len(set(known.values())) == 1:
        return without_none(dict.fromkeys(all_cpus, known[first[0]]))
    others = all_cpus.difference(first)
    return without_none(known | dict(zip(others, map(tree.number, map(file.format, others)), strict=True)))


# --- GPUs and NICs ---------------------------------------------------------------------------------------------------


def _read_pci(tree: Tree, online: CpuSet) -> Iterator[PciReading]:
    """Yield the GPUs and the NICs in order of address."""
    driver = nvidia_names(tree)
    for name in tree.names(_DEVICES):
        address, at = pci_address(name), f"{_DEVICES}/{name}"
        device_class = pci_class(tree.text(f"{at}/class"))
        if address is None or device_class is None:
            continue
        if is_network(device_class):
            reading = PciReading(address=address, interfaces=tuple(_interfaces(tree, at, device_class)))
            if not reading.interfaces:
                continue
        elif may_be_gpu(device_class):
            number = hexadecimal(tree.text(f"{at}/vendor"))
            if number is None:
                config = (tree.data(f"{at}/config") or b"")[:2]
                number = int.from_bytes(config, "little") if len(config) == 2 else None
            vendor = BY_PCI_ID.get(number or 0)
            if number is None and (address in driver or device_class == CONTROLLER_3D):
                vendor = GpuVendor.NVIDIA  # some captures have only the class: a VGA device may be the board's own
            elif not is_gpu(vendor, device_class, address):
                continue
            device_id = hexadecimal(tree.text(f"{at}/device"))
            reading = PciReading(address=address, vendor=vendor, device_id=device_id, is_vga=device_class == VGA)
        else:
            continue

        # The bridges above a device are the directories on the path of its link, the root bus before them:
        # sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0.
        *above, _own = (tree.link(at) or "").split("/")
        paths = accumulate(above, lambda outer, name: f"{outer}/{name}")
        bridges = {pci_address(name): f"{_DEVICES}/{path}" for name, path in zip(above, paths, strict=True)}
        nearest_first = ((parent, path) for parent, path in reversed(bridges.items()) if parent is not None)
        parents = dict(islice(nearest_first, MAX_PARENTS))
        nodes_above = (tree.number(f"{path}/numa_node") for path in parents.values())
        local_cpus = tree.numbers(f"{at}/local_cpulist", mask=f"{at}/local_cpus") or CpuSet()
        yield replace(
            reading,
            evidence={
                NodeSource.SYSFS: CpuSet(not_none([tree.number(f"{at}/numa_node")])),
                NodeSource.PCI_PARENT: CpuSet(islice((node for node in nodes_above if node is not None), 1)),
                NodeSource.LOCAL_CPUS: online & local_cpus,
            },
            parents=tuple(parents),
            host_bridge=next(filter(_HOST_BRIDGE.fullmatch, reversed(above)), None),
            pcie=Pcie(
                gen=pcie_generation(tree.text(f"{at}/current_link_speed")),
                width=pcie_width(tree.number(f"{at}/current_link_width")),
                max_gen=pcie_generation(tree.text(f"{at}/max_link_speed")),
                max_width=pcie_width(tree.number(f"{at}/max_link_width")),
            ),
        )


def _read_other_nics(tree: Tree, known: Container[str]) -> Iterator[Nic]:
    """Yield the names of network devices that are not on PCI; virtual interfaces have no device."""
    places = [f"{_NET}/{name}" for name in tree.names(_NET) if name not in known]
    places += [f"{_INFINIBAND}/{name}" for name in tree.names(_INFINIBAND) if name not in known]
    for at in places:
        if "/virtual/" in (tree.link(at) or "/virtual/"):
            continue
        kind = _TYPES.get(tree.number(f"{at}/type") or 0)
        if at.startswith(_INFINIBAND):
            yield replace(_verbs_device(tree, at), node=tree.number(f"{at}/device/numa_node"))
        elif kind is not None:
            yield replace(_network_interface(tree, at, kind), node=tree.number(f"{at}/device/numa_node"))


def _interfaces(tree: Tree, at: str, device_class: int) -> Iterator[Nic]:
    """Yield the names below a network device; a virtio device has its own directory in between."""
    cxi = tree.names(f"{at}/cxi")
    for name in cxi:
        link, rate = tree.number(f"{at}/properties/link"), gbit_s(tree.text(f"{at}/properties/speed"))
        is_up = None if link is None else link == 1
        yield Nic(name=name, kind=NicKind.SLINGSHOT, interface=NicInterface.CXI, is_up=is_up, rate_gbit_s=rate)
    virtio = (f"{at}/{name}" for name in tree.names(at) if name.startswith("virtio"))
    for place in (at, *virtio):
        for name in tree.names(f"{place}/net"):
            kind = _TYPES.get(tree.number(f"{place}/net/{name}/type") or 0) or nic_kind(device_class)
            ids = (tree.text(f"{at}/{file}") for file in ("vendor", "device"))
            if cxi or (name.startswith("hs") and tuple(map(hexadecimal, ids)) in _CASSINI):
                kind = NicKind.SLINGSHOT  # hsn0; captures may lack cxi
            yield _network_interface(tree, f"{place}/net/{name}", kind)
        for name in tree.names(f"{place}/infiniband"):
            yield _verbs_device(tree, f"{place}/infiniband/{name}")


def _verbs_device(tree: Tree, at: str) -> Nic:
    """Read a verbs device with its first port, which is the one that `--nic-env` names."""
    state, rate = tree.text(f"{at}/ports/1/state"), _RATE.match(tree.text(f"{at}/ports/1/rate") or "")
    return Nic(
        name=at.rpartition("/")[2],
        kind=NicKind.INFINIBAND,
        interface=NicInterface.VERBS,
        is_up=state.startswith(_ACTIVE) if state else None,
        rate_gbit_s=float(rate[1]) if rate else None,
    )


def _network_interface(tree: Tree, at: str, kind: NicKind) -> Nic:
    """Read a network interface; some drivers have no state, which the kernel calls unknown."""
    state = tree.text(f"{at}/operstate")
    return Nic(
        name=at.rpartition("/")[2],
        kind=kind,
        interface=NicInterface.NETWORK,
        is_up=state == "up" if state in _OPERATIONAL_STATES else None,
        rate_gbit_s=gbit_s(tree.text(f"{at}/speed")),
    )
