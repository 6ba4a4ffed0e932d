"""How GPUs and NICs reach each other. Pure.

Comes in: `Readings`, and the GPUs and NICs that were made of them. Goes out: a `Link` for each pair whose way is known.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product
from math import comb
from typing import TYPE_CHECKING, TypeAlias

from numapin.base.bounds import MAX_LINKS
from numapin.topology.model import Gpu, Link, LinkKind, Nic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.topology.readings import PciReading, Readings

_Device: TypeAlias = "tuple[str, PciReading | None, int | None]"
"""A device's name, what was read of it, and its node."""


def links_of(
    readings: Readings, gpus: tuple[Gpu, ...], nics: tuple[Nic, ...]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """List the links between all GPUs and NICs: NVML's word where it has one, else what the PCI tree shows.

    A host with hundreds of virtual functions would have millions: then those between its NICs are left out, then those
    of NICs, and a note says so.
    """
    told = {frozenset((f"gpu{a}", f"gpu{b}")): word for a, b, word in readings.nvml.links}
    tree = {reading.address: reading for reading in readings.pci}
    on_gpus = [(gpu.label, tree.get(gpu.pci or ""), gpu.node) for gpu in gpus]
    on_nics = [(nic.name, tree.get(nic.pci or ""), nic.node) for nic in nics]
    notes: tuple[str, ...] = ()
    if comb(len(on_gpus) + len(on_nics), 2) <= MAX_LINKS:
        chosen: Iterable[tuple[_Device, _Device]] = combinations([*on_gpus, *on_nics], 2)
    else:
        between = combinations(on_gpus, 2)
        has_room = comb(len(on_gpus), 2) + len(on_gpus) * len(on_nics) <= MAX_LINKS
        chosen = chain(between, product(on_gpus, on_nics)) if has_room else between
        what = "links between network interfaces" if has_room else "links of network interfaces"
        notes = (f"{what} are left out: there are {len(nics)} interfaces on this machine",)
    pairs = (
        (a, b, told.get(frozenset((a, b))) or _pci_link(pci_a, pci_b, node_a, node_b))
        for (a, pci_a, node_a), (b, pci_b, node_b) in chosen
    )
    return tuple(Link(a=a, b=b, kind=word) for a, b, word in pairs if word), notes


def _pci_link(a: PciReading | None, b: PciReading | None, node_a: int | None, node_b: int | None) -> str | None:
    """Name the way between two PCI devices, or None where nothing tells."""
    if a is None or b is None:
        return None
    if a is b:
        return LinkKind.SAME_BOARD  # two names of one device: the network and the verbs side of a NIC
    common = next((bridge for bridge in a.parents if bridge in b.parents), None)
    if common is not None:
        # One switch is its upstream port above one downstream port a device.
        single = a.parents.index(common) <= 1 and b.parents.index(common) <= 1
        return LinkKind.ONE_SWITCH if single else LinkKind.SWITCHES
    if a.host_bridge is not None and a.host_bridge == b.host_bridge:
        return LinkKind.HOST_BRIDGE
    return _by_nodes(node_a, node_b)


def _by_nodes(a: int | None, b: int | None) -> LinkKind | None:
    """Name the way between devices of different host bridges."""
    if a is None or b is None:
        return None
    return LinkKind.SAME_NODE if a == b else LinkKind.SYSTEM


def with_moved(links: tuple[Link, ...], moved: frozenset[str], nodes: Mapping[str, int | None]) -> tuple[Link, ...]:
    """Say NODE or SYS anew for the links of moved devices; nearer words do not depend on nodes."""
    by_nodes = {LinkKind.SAME_NODE, LinkKind.SYSTEM}
    return tuple(
        replace(link, kind=_by_nodes(nodes.get(link.a), nodes.get(link.b)) or link.kind)
        if link.kind in by_nodes and moved & {link.a, link.b}
        else link
        for link in links
    )
