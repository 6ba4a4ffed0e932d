"""The paths between GPUs and NICs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product
from math import comb
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from numapin.base.bounds import MAX_LINKS
from numapin.topology.model import Gpu, Link, LinkKind, Nic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numapin.topology.readings import FabricLink, GpuPart, PciReading, Readings


class _Endpoint(NamedTuple):
    """A GPU or NIC: its name, its PCI device if that was read, and its node."""

    name: str
    pci: PciReading | None
    node: int | None


_Pairs: TypeAlias = "Iterable[tuple[_Endpoint, _Endpoint]]"


def links_of(
    readings: Readings, gpus: tuple[Gpu, ...], nics: tuple[Nic, ...]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Return the links between all GPUs and NICs, and notes: NVML's or the fabric's word for a pair, else PCI's.

    Two GPUs without a word of their own are on PCI only if the source would show NVLink or xGMI.

    A host with hundreds of virtual functions would have millions of links. Those between its NICs are left out then,
    or all links of NICs, and a note says so.
    """
    by_part = {reading.part: _with_nvml(reading, readings) for reading in readings.pci}
    words = _reported_words(readings, gpus)
    pairs, notes = _pairs(
        [_Endpoint(gpu.label, _of_gpu(gpu, by_part), gpu.node) for gpu in gpus],
        [_Endpoint(nic.name, by_part.get((nic.pci or "", None)), nic.node) for nic in nics],
    )
    return tuple(filter(None, (_link(a, b, words) for a, b in pairs))), notes


def _reported_words(readings: Readings, gpus: tuple[Gpu, ...]) -> dict[frozenset[str], str]:
    """Return the words that NVML or the fabric has for two GPUs, by their labels."""
    label_of = {(gpu.pci, gpu.partition): gpu.label for gpu in gpus if gpu.pci is not None}
    by_nvml = {frozenset((f"gpu{a}", f"gpu{b}")): word for a, b, word in readings.nvml.links}
    return by_nvml | _fabric_words(readings.fabric, label_of)


def _fabric_words(fabric: Iterable[FabricLink], label_of: Mapping[GpuPart, str]) -> dict[frozenset[str], str]:
    known = (link for link in fabric if label_of.keys() >= {link.a, link.b})
    return {frozenset((label_of[link.a], label_of[link.b])): link.word for link in known}


def _with_nvml(reading: PciReading, readings: Readings) -> PciReading:
    """Return a GPU's reading as one that reports NVLink if NVML answered."""
    by_nvml = reading.is_nvidia and readings.nvml.gpus is not None
    return replace(reading, reports_fabric=True) if by_nvml else reading


def _of_gpu(gpu: Gpu, by_part: Mapping[GpuPart, PciReading]) -> PciReading | None:
    return by_part.get((gpu.pci or "", gpu.partition))


def _link(a: _Endpoint, b: _Endpoint, words: Mapping[frozenset[str], str]) -> Link | None:
    word = words.get(frozenset((a.name, b.name))) or _pci_word(a, b)
    return Link(a=a.name, b=b.name, kind=word) if word else None


def _pairs(gpus: list[_Endpoint], nics: list[_Endpoint]) -> tuple[_Pairs, tuple[str, ...]]:
    """Return as many pairs as a topology may have links: those of GPUs before those of NICs."""
    if comb(len(gpus) + len(nics), 2) <= MAX_LINKS:
        return combinations([*gpus, *nics], 2), ()
    between_gpus = combinations(gpus, 2)
    left_out = f"are left out: there are {len(nics)} interfaces on this machine"
    if comb(len(gpus), 2) + len(gpus) * len(nics) <= MAX_LINKS:
        return chain(between_gpus, product(gpus, nics)), (f"links between network interfaces {left_out}",)
    return between_gpus, (f"links of network interfaces {left_out}",)


def _pci_word(a: _Endpoint, b: _Endpoint) -> str | None:
    """Return the word for the path between two PCI devices, or None if it is unknown."""
    if a.pci is None or b.pci is None:
        return None
    if a.pci.address == b.pci.address:
        return LinkKind.SAME_BOARD  # two names of one device: the network and the verbs side of a NIC; two partitions
    if _may_have_hidden_links(a.pci, b.pci):
        return None
    return _common_bridge(a.pci, b.pci) or _by_nodes(a.node, b.node)


def _may_have_hidden_links(a: PciReading, b: PciReading) -> bool:
    """Return whether two devices are GPUs that may have NVLinks, which their source does not show."""
    return a.is_gpu and b.is_gpu and not (a.reports_fabric and b.reports_fabric)


def _common_bridge(a: PciReading, b: PciReading) -> LinkKind | None:
    """Return the word for the path through the nearest PCI or host bridge above both devices; None: there is none."""
    nearest = next((bridge for bridge in a.parents if bridge in b.parents), None)
    if nearest is None:
        return LinkKind.HOST_BRIDGE if _have_one_host_bridge(a, b) else None
    # One switch is its upstream port, above one downstream port per device.
    num_bridges = max(a.parents.index(nearest), b.parents.index(nearest))
    return LinkKind.ONE_SWITCH if num_bridges <= 1 else LinkKind.SWITCHES


def _have_one_host_bridge(a: PciReading, b: PciReading) -> bool:
    return a.host_bridge is not None and a.host_bridge == b.host_bridge


def _by_nodes(a: int | None, b: int | None) -> LinkKind | None:
    """Return the word for the path between devices of different host bridges."""
    if a is None or b is None:
        return None
    return LinkKind.SAME_NODE if a == b else LinkKind.SYSTEM


def with_moved(links: tuple[Link, ...], moved: frozenset[str], nodes: Mapping[str, int | None]) -> tuple[Link, ...]:
    """Choose NODE or SYS again for the links of moved devices; the words for nearer paths do not depend on nodes."""
    return tuple(link if moved.isdisjoint((link.a, link.b)) else _moved(link, nodes) for link in links)


def _moved(link: Link, nodes: Mapping[str, int | None]) -> Link:
    if link.kind not in (LinkKind.SAME_NODE, LinkKind.SYSTEM):
        return link
    return replace(link, kind=_by_nodes(nodes.get(link.a), nodes.get(link.b)) or link.kind)
