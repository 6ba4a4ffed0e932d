"""GPUs and network devices from /sys/bus/pci and /proc/driver/nvidia below any root directory. Edge.

Comes in: a `Tree` and the online CPUs. Goes out: a `PciReading` for each NVIDIA GPU and each NIC with an interface, and
the nodes that are GPU memory.
Source: Documentation/ABI/testing/sysfs-bus-pci; the NVIDIA driver's README, chapter on /proc.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from numapin.base.bounds import MAX_PARENTS
from numapin.base.cpu_set import CpuSet
from numapin.topology.address import pci_address
from numapin.topology.model import NicKind, Pcie
from numapin.topology.readings import (
    CONTROLLER_3D,
    DISPLAY,
    NETWORK,
    PciReading,
    nic_kind,
    pci_class,
    pcie_generation,
    pcie_width,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numapin.system.tree import Tree

_DEVICES: Final = "sys/bus/pci/devices"
_DRIVER: Final = "proc/driver/nvidia/gpus"
_NVIDIA: Final = 0x10DE
_HEXADECIMAL: Final = re.compile(r"(?:0x)?([0-9a-fA-F]{1,8})")
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_pci(tree: Tree, online: CpuSet) -> Iterator[PciReading]:
    """Yield the GPUs and the NICs in order of address. `local_cpus` are the online ones."""
    driver = {address: name for name in tree.names(_DRIVER) if (address := pci_address(name))}
    for name in tree.names(_DEVICES):
        address, at = pci_address(name), f"{_DEVICES}/{name}"
        device_class = pci_class(tree.text(f"{at}/class"))
        if address is None or device_class is None:
            continue
        if _is_gpu(tree, at, device_class, known_to_driver=address in driver):
            model, uuid = _information(tree.text(f"{_DRIVER}/{driver.get(address)}/information") or "")
            yield replace(_device(tree, at, address, online), name=model, uuid=uuid)
        elif interfaces := _interfaces(tree, at, device_class):
            yield replace(_device(tree, at, address, online), interfaces=interfaces)


def read_gpu_memory_nodes(tree: Tree) -> CpuSet:
    """Return the nodes that are the memory of a GPU; the driver says -1 for a GPU whose memory is no node."""
    statuses = (tree.text(f"{_DRIVER}/{name}/numa_status") or "" for name in tree.names(_DRIVER))
    matches = (re.search(r"^Node:\s*([0-9]{1,6})\s*$", status, re.MULTILINE) for status in statuses)
    return CpuSet(int(match[1]) for match in matches if match)


def _is_gpu(tree: Tree, at: str, device_class: int, *, known_to_driver: bool) -> bool:
    if device_class >> 8 != DISPLAY:
        return False
    vendor = _vendor(tree, at)
    if vendor is None:  # some captures have the class alone: a VGA device may then be the board's own
        return known_to_driver or device_class == CONTROLLER_3D
    return vendor == _NVIDIA


def _vendor(tree: Tree, at: str) -> int | None:
    config = tree.data(f"{at}/config") if (named := _hexadecimal(tree.text(f"{at}/vendor"))) is None else None
    return int.from_bytes(config[:2], "little") if config and len(config) > 1 else named


def _device(tree: Tree, at: str, address: str, online: CpuSet) -> PciReading:
    """Read what GPUs and NICs share."""
    parents, host_bridge = _above(tree, at)
    local_cpus = tree.numbers(f"{at}/local_cpulist", mask=f"{at}/local_cpus")
    parent_nodes = (tree.number(f"{path}/numa_node") for path in parents.values())
    return PciReading(
        address=address,
        node=tree.number(f"{at}/numa_node"),
        parent_nodes=tuple(node for node in parent_nodes if node is not None),
        local_cpus=None if local_cpus is None else local_cpus & online,
        parents=tuple(parents),
        host_bridge=host_bridge,
        pcie=_pcie(tree, at),
    )


def _above(tree: Tree, at: str) -> tuple[Mapping[str, str], str | None]:
    """Return the bridges above a device with their directories, nearest first, and the root bus they hang from.

    They are the directories that the device's link leads through: sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0.
    """
    *above, _own = (tree.link(at) or "").split("/")
    parents: dict[str, str] = {}
    host_bridge = None
    for end in range(len(above), 0, -1):
        address = pci_address(above[end - 1])
        if address is not None:
            parents[address] = f"{_DEVICES}/{'/'.join(above[:end])}"
        elif host_bridge is None and _HOST_BRIDGE.fullmatch(above[end - 1]):
            host_bridge = above[end - 1]
    return dict(islice(parents.items(), MAX_PARENTS)), host_bridge


def _pcie(tree: Tree, at: str) -> Pcie:
    return Pcie(
        gen=pcie_generation(tree.text(f"{at}/current_link_speed")),
        width=pcie_width(tree.number(f"{at}/current_link_width")),
        max_gen=pcie_generation(tree.text(f"{at}/max_link_speed")),
        max_width=pcie_width(tree.number(f"{at}/max_link_width")),
    )


def _interfaces(tree: Tree, at: str, device_class: int) -> tuple[tuple[str, NicKind], ...]:
    """Return the names below a network device; a virtio device has its own directory in between."""
    if device_class >> 8 != NETWORK:
        return ()
    places = [at, *(f"{at}/{name}" for name in tree.names(at) if name.startswith("virtio"))]
    return tuple(
        (name, kind)
        for place in places
        for folder, kind in (("net", nic_kind(device_class)), ("infiniband", NicKind.INFINIBAND))
        for name in tree.names(f"{place}/{folder}")
    )


def _information(text: str) -> tuple[str | None, str | None]:
    """Return the driver's name and UUID of a GPU; until the GPU is initialised, the UUID is question marks."""
    lines = (line.partition(":") for line in text.splitlines())
    known = {key.strip(): value.strip() for key, _, value in lines}
    uuid = known.get("GPU UUID") or "?"
    return known.get("Model") or None, None if "?" in uuid else uuid


def _hexadecimal(text: str | None) -> int | None:
    match = _HEXADECIMAL.fullmatch(text or "")
    return int(match[1], 16) if match else None
