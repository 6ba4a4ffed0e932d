"""Intel's GPUs in the files of their drivers (i915, xe). Edge.

Comes in: a `Tree` and PCI devices. Goes out: a reading for each device that Level Zero shows by default: tiles are
devices of their own.

No Intel machine was at hand: files and documentation only.
Source: the kernel's Documentation/ABI/testing/sysfs-driver-intel-xe-*; include/drm/intel/pciids.h.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.topology.readings import DriverReading
from numapin.topology.sources.render_nodes import may_compute, render_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.system.tree import Tree
    from numapin.topology.readings import PciReading

_TILE: Final = re.compile(r"tile([0-9])")


def read(tree: Tree, gpus: Sequence[PciReading], *, is_live: bool) -> DriverReading:
    """Return the GPUs with their tiles. A board's VGA chip does not count."""
    here = [gpu for gpu in gpus if may_compute(tree, gpu)]
    return DriverReading(tuple(device for gpu in here for device in _tiles(tree, gpu, is_live=is_live)))


def _tiles(tree: Tree, gpu: PciReading, *, is_live: bool) -> list[PciReading]:
    tiles = _tile_numbers(tree, gpu.address)
    gpu = replace(gpu, is_driven=_is_reachable(tree, gpu) if is_live else None)
    if not tiles:
        return [gpu.with_tiles_unread()]
    return [replace(gpu, partition=tile) for tile in tiles] if len(tiles) > 1 else [gpu]


def _tile_numbers(tree: Tree, address: str) -> list[int]:
    names = tree.names(f"sys/bus/pci/devices/{address}")
    return [int(match[1]) for match in map(_TILE.fullmatch, names) if match]


def _is_reachable(tree: Tree, gpu: PciReading) -> bool:
    """Return whether a process can open the GPU: containers show all GPUs in sysfs, but not their device files."""
    return not set(render_nodes(tree, gpu.address)).isdisjoint(tree.names("dev/dri"))
