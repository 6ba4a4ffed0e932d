"""GPUs and network devices from /sys/bus/pci and /proc/driver/nvidia below any root directory. Edge.

Comes in: a `Tree` and the online CPUs. Goes out: a `PciReading` for each NVIDIA GPU and each NIC with an interface, and
the nodes that consist of GPU memory.
Source: Documentation/ABI/testing/sysfs-bus-pci; the NVIDIA driver's README, chapter on /proc.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, islice, product
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
    names = tree.names(_DRIVER)
    driver = dict(zip(map(pci_address, names), names, strict=True))
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
    """Return the nodes that are the memory of a GPU; the driver reports -1 if a GPU's memory is not a node."""
    statuses = (tree.text(f"{_DRIVER}/{name}/numa_status") or "" for name in tree.names(_DRIVER))
    matches = (re.search(r"^Node:\s*([0-9]{1,6})\s*$", status, re.MULTILINE) for status in statuses)
    return CpuSet(int(match[1]) for match in matches if match)


def _is_gpu(tree: Tree, at: str, device_class: int, *, known_to_driver: bool) -> bool:
    if device_class >> 8 != DISPLAY:
        return False
    vendor = _vendor(tree, at)
    if vendor is None:  # some captures have only the class: a VGA device may then be the board's own
        return known_to_driver or device_class == CONTROLLER_3D
    return vendor == _NVIDIA


def _vendor(tree: Tree, at: str) -> int | None:
    vendor = _hexadecimal(tree.text(f"{at}/vendor"))
    if vendor is not None:
        return vendor
    number = (tree.data(f"{at}/config") or b"")[:2]
    return int.from_bytes(number, "little") if len(number) == 2 else None


def _device(tree: Tree, at: str, address: str, online: CpuSet) -> PciReading:
    """Read the values that GPUs and NICs share."""
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


def _interfaces(tree: Tree, at: str, device_class: int) -> tuple[tuple[str, NicKind], ...]:
    """Return the names below a network device; a virtio device has its own directory in between."""
    if device_class >> 8 != NETWORK:
        return ()
    folders = (("net", nic_kind(device_class)), ("infiniband", NicKind.INFINIBAND))
    virtio = (f"{at}/{name}" for name in tree.names(at) if name.startswith("virtio"))
    places = product([at, *virtio], folders)
    return tuple((name, kind) for place, (folder, kind) in places for name in tree.names(f"{place}/{folder}"))


def _information(text: str) -> tuple[str | None, str | None]:
    """Return the driver's name and UUID of a GPU; until the GPU is initialized, the UUID is question marks."""
    lines = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in lines}
    model, uuid = values.get("Model") or None, values.get("GPU UUID") or "?"
    return model, None if "?" in uuid else uuid


def _hexadecimal(text: str | None) -> int | None:
    match = _HEXADECIMAL.fullmatch(text or "")
    return int(match[1], 16) if match else None
