"""NVIDIA's GPUs in the files of their driver. Edge.

Comes in: a `Tree` and PCI devices. Goes out: readings with model, UUID and memory node; the nodes of GPU memory.
NVML is read on the live host only, by nvml.py.
Source: the driver's README, chapter on /proc.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.not_none import not_none
from numapin.topology.address import pci_address
from numapin.topology.readings import DriverReading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.system.tree import Tree
    from numapin.topology.readings import PciReading

_DRIVER: Final = "proc/driver/nvidia/gpus"
_MAX_CHARS: Final = 4096  # the driver writes some 500
_NODE: Final = re.compile(r"^Node:\s*([0-9]{1,6})\s*$", re.MULTILINE)


def names_by_address(tree: Tree) -> Mapping[str | None, str]:
    """Return the driver's name of each GPU, by PCI address."""
    return {pci_address(name): name for name in tree.names(_DRIVER)}


def read(tree: Tree, gpus: Sequence[PciReading], *, is_live: bool) -> DriverReading:  # noqa: ARG001 - as all drivers
    """Return the GPUs; a capture without the driver's files leaves open whether there was a driver."""
    names = names_by_address(tree)
    return DriverReading(tuple(_informed(tree, gpu, names.get(gpu.address)) for gpu in gpus))


def _informed(tree: Tree, gpu: PciReading, name: str | None) -> PciReading:
    if name is None:
        return gpu
    text = tree.text(f"{_DRIVER}/{name}/information") or ""
    model, uuid = _information(text[:_MAX_CHARS])
    return replace(gpu, name=model, uuid=uuid, is_driven=True, memory_node=_memory_node(tree, name))


def gpu_memory_nodes(tree: Tree) -> CpuSet:
    """Return the nodes that are the memory of a GPU, whether or not the GPU is on the PCI bus here."""
    nodes = (_memory_node(tree, name) for name in tree.names(_DRIVER))
    return CpuSet(not_none(nodes))


def _memory_node(tree: Tree, name: str) -> int | None:
    """Return the node that is a GPU's memory; the driver reports -1 if its memory is not a node."""
    match = _NODE.search(tree.text(f"{_DRIVER}/{name}/numa_status") or "")
    return int(match[1]) if match else None


def _information(text: str) -> tuple[str | None, str | None]:
    """Return the driver's name and UUID of a GPU; until the GPU is initialized, the UUID is question marks."""
    lines = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in lines}
    model, uuid = values.get("Model") or None, values.get("GPU UUID") or "?"
    return model, None if "?" in uuid else uuid
