"""Render nodes, by which drivers let processes use GPUs. Edge.

Comes in: a `Tree` and a PCI device. Goes out: its render nodes, and whether it can be more than the board's VGA chip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numapin.system.tree import Tree
    from numapin.topology.readings import PciReading


def render_nodes(tree: Tree, address: str) -> list[str]:
    """Return the names of a GPU's render nodes, such as renderD128."""
    names = tree.names(f"sys/bus/pci/devices/{address}/drm")
    return [name for name in names if name.startswith("renderD")]


def may_compute(tree: Tree, gpu: PciReading) -> bool:
    """Return whether a GPU may be for computing: servers have VGA chips that no driver serves for that."""
    return not gpu.may_be_board_vga or bool(render_nodes(tree, gpu.address))
