"""GPUs and network devices from /sys/bus/pci and /sys/class/net below any root directory.

Source: Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-net.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_PARENTS
from numapin.base.not_none import not_none
from numapin.topology.address import pci_address
from numapin.topology.model import GpuVendor, NicInterface, NicKind, Pcie
from numapin.topology.readings import (
    CONTROLLER_3D,
    VGA,
    NicReading,
    PciReading,
    gbit_s,
    is_network,
    may_be_gpu,
    nic_kind,
    pci_class,
    pcie_generation,
    pcie_width,
)
from numapin.topology.sources.gpu_drivers import nvidia_names
from numapin.topology.vendors import BY_PCI_ID, is_gpu

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping

    from numapin.base.cpu_set import CpuSet
    from numapin.system.tree import Tree

_DEVICES: Final = "sys/bus/pci/devices"
_NET: Final = "sys/class/net"
# Types of interfaces (ARPHRD_*): others are tunnels, radio and the like.
_TYPES: Final = {1: NicKind.ETHERNET, 32: NicKind.INFINIBAND}
_HEXADECIMAL: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,8})")
_OPERATIONAL_STATES: Final = frozenset({"up", "down", "lowerlayerdown", "dormant", "notpresent", "testing"})
_ACTIVE: Final = "4:"  # of "4: ACTIVE" (IB_PORT_ACTIVE)
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9])?) Gb/sec", re.ASCII)
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_pci(tree: Tree, online: CpuSet) -> Iterator[PciReading]:
    """Yield the GPUs and the NICs in order of address. `local_cpus` are the online ones."""
    driver = nvidia_names(tree)
    for name in tree.names(_DEVICES):
        address, at = pci_address(name), f"{_DEVICES}/{name}"
        device_class = pci_class(tree.text(f"{at}/class"))
        if address is None or device_class is None:
            continue
        vendor = _gpu_vendor(tree, at, device_class, address, known_to_nvidia=address in driver)
        if vendor is not None:
            yield replace(
                _device(tree, at, address, online),
                vendor=vendor,
                is_vga=device_class == VGA,
                device_id=_hexadecimal(tree.text(f"{at}/device")),
            )
        elif is_network(device_class) and (interfaces := _interfaces(tree, at, device_class)):
            yield replace(_device(tree, at, address, online), interfaces=interfaces)


def read_other_nics(tree: Tree, known: Container[str]) -> Iterator[NicReading]:
    """Yield the network interfaces of devices that are not on PCI; virtual interfaces have no device."""
    for name in tree.names(_NET):
        if name in known or _is_virtual(tree, name):
            continue
        kind = _TYPES.get(tree.number(f"{_NET}/{name}/type") or 0)
        if kind is not None:
            node = tree.number(f"{_NET}/{name}/device/numa_node")
            yield _network_interface(tree, f"{_NET}/{name}", kind)._replace(node=node)


def _is_virtual(tree: Tree, interface: str) -> bool:
    return "/virtual/" in (tree.link(f"{_NET}/{interface}") or "/virtual/")


def _gpu_vendor(tree: Tree, at: str, device_class: int, address: str, *, known_to_nvidia: bool) -> GpuVendor | None:
    """Return the vendor of a GPU; None for any other device."""
    if not may_be_gpu(device_class):
        return None
    number = _vendor_id(tree, at)
    if number is None:  # some captures have only the class: a VGA device may then be the board's own
        return GpuVendor.NVIDIA if known_to_nvidia or device_class == CONTROLLER_3D else None
    vendor = BY_PCI_ID.get(number)
    return vendor if is_gpu(vendor, device_class, address) else None


def _vendor_id(tree: Tree, at: str) -> int | None:
    vendor_id = _hexadecimal(tree.text(f"{at}/vendor"))
    if vendor_id is not None:
        return vendor_id
    number = (tree.data(f"{at}/config") or b"")[:2]
    return int.from_bytes(number, "little") if len(number) == 2 else None


def _device(tree: Tree, at: str, address: str, online: CpuSet) -> PciReading:
    """Read the values that GPUs and NICs share."""
    parents, host_bridge = _above(tree, at)
    local_cpus = tree.numbers(f"{at}/local_cpulist", mask=f"{at}/local_cpus")
    return PciReading(
        address=address,
        node=tree.number(f"{at}/numa_node"),
        parent_nodes=_nodes_of(tree, parents.values()),
        local_cpus=None if local_cpus is None else local_cpus & online,
        parents=tuple(parents),
        host_bridge=host_bridge,
        pcie=_pcie(tree, at),
    )


def _nodes_of(tree: Tree, bridges: Iterable[str]) -> tuple[int, ...]:
    nodes = (tree.number(f"{path}/numa_node") for path in bridges)
    return tuple(not_none(nodes))


def _above(tree: Tree, at: str) -> tuple[Mapping[str, str], str | None]:
    """Return the bridges above a device with their directories, nearest first, and the root bus above them.

    They are the directories on the path of the device's link: sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0.
    """
    *above, _own = (tree.link(at) or "").split("/")
    paths = accumulate(above, lambda outer, name: f"{outer}/{name}")
    bridges = {pci_address(name): f"{_DEVICES}/{path}" for name, path in zip(above, paths, strict=True)}
    parents = {address: path for address, path in reversed(bridges.items()) if address is not None}
    return dict(islice(parents.items(), MAX_PARENTS)), next(filter(_HOST_BRIDGE.fullmatch, reversed(above)), None)


def _pcie(tree: Tree, at: str) -> Pcie:
    return Pcie(
        gen=pcie_generation(tree.text(f"{at}/current_link_speed")),
        width=pcie_width(tree.number(f"{at}/current_link_width")),
        max_gen=pcie_generation(tree.text(f"{at}/max_link_speed")),
        max_width=pcie_width(tree.number(f"{at}/max_link_width")),
    )


def _interfaces(tree: Tree, at: str, device_class: int) -> tuple[NicReading, ...]:
    """Return the names below a network device; a virtio device has its own directory in between."""
    virtio = (f"{at}/{name}" for name in tree.names(at) if name.startswith("virtio"))
    return tuple(interface for place in (at, *virtio) for interface in _interfaces_in(tree, place, device_class))


def _interfaces_in(tree: Tree, place: str, device_class: int) -> Iterator[NicReading]:
    for name in tree.names(f"{place}/net"):
        known = _TYPES.get(tree.number(f"{place}/net/{name}/type") or 0)
        yield _network_interface(tree, f"{place}/net/{name}", known or nic_kind(device_class))
    for name in tree.names(f"{place}/infiniband"):
        yield _verbs_device(tree, f"{place}/infiniband/{name}")


def _network_interface(tree: Tree, at: str, kind: NicKind) -> NicReading:
    """Read a network interface; some drivers have no state, which the kernel calls unknown."""
    state = tree.text(f"{at}/operstate")
    return NicReading(
        name=at.rpartition("/")[2],
        kind=kind,
        interface=NicInterface.NETWORK,
        is_up=state == "up" if state in _OPERATIONAL_STATES else None,
        rate_gbit_s=gbit_s(tree.text(f"{at}/speed")),
    )


def _verbs_device(tree: Tree, at: str) -> NicReading:
    """Read a verbs device with its first port, the one that `--nic-env` names."""
    state, rate = tree.text(f"{at}/ports/1/state"), _RATE.match(tree.text(f"{at}/ports/1/rate") or "")
    return NicReading(
        name=at.rpartition("/")[2],
        kind=NicKind.INFINIBAND,
        interface=NicInterface.VERBS,
        is_up=state.startswith(_ACTIVE) if state else None,
        rate_gbit_s=float(rate[1]) if rate else None,
    )


def _hexadecimal(text: str | None) -> int | None:
    match = _HEXADECIMAL.fullmatch(text or "")
    return int(match[1], 16) if match else None
