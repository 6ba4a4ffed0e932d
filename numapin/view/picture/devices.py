"""GPUs and network devices as boxes, with how they are linked. Pure.

Comes in: the devices of a node, the links, and the ranks of each GPU. Goes out: one box a device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.topology.model import LinkKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text, width_of
from numapin.view.words import pcie_link

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numapin.topology.model import Gpu, Link, Nic, Topology
    from numapin.view.marks import Marks

_LEAST: Final = 148
_MOST: Final = 226
_SIZE: Final = 9.5
_NEAR: Final = (LinkKind.SAME_BOARD, LinkKind.ONE_SWITCH, LinkKind.SWITCHES)


Links: TypeAlias = "Mapping[str, Sequence[Link]]"
"""The links of each device, by its name."""


def links_of(topology: Topology) -> Links:
    """Return the links of each device."""
    found: dict[str, list[Link]] = {}
    for link in topology.links:
        found.setdefault(link.a, []).append(link)
        found.setdefault(link.b, []).append(link)
    return found


def device_rows(topology: Topology, marks: Marks, links: Links, node: int | None, *, width: float) -> list[list[Box]]:
    """Return the GPUs and the network devices of a node, or those of no known node, in columns that fill the width."""
    gpus = [gpu for gpu in topology.gpus if gpu.node == node]
    nics = [nic for nic in topology.nics if nic.node == node]
    one = columns(max(len(gpus), len(nics), 1), _LEAST, width=width, most=_MOST)
    return [[_gpu(gpu, links, marks, one) for gpu in gpus], [_nic(nic, topology, links, one) for nic in nics]]


def chip(rank: int) -> Box:
    """Return a rank's name in its colour."""
    text = f"rank {rank}"
    box = cell(BoxKind.CHIP, width_of(text, 10) + 10, 16, text, size=10, ink=Ink.ON_RANK)
    return replace(box, ranks=(rank,), key=f"rank{rank}")


def short_pci(address: str | None) -> str:
    """Return a PCI address without the domain that most machines have only one of."""
    return (address or "").removeprefix("0000:")


def _gpu(gpu: Gpu, links: Links, marks: Marks, width: float) -> Box:
    cuda = f"cuda:{gpu.cuda_index}" if gpu.cuda_index is not None else "" if gpu.visible else "hidden from CUDA"
    link, nvlink = pcie_link(gpu.pcie), _nvlink(links.get(gpu.label, ()))
    mig = f"{len(gpu.mig)} MIG instances" if gpu.mig else ""
    source = f"node from {gpu.node_source}" if gpu.node_source else "node unknown"
    bus = _lines(short_pci(gpu.pci), link, width=width - 2 * PAD)
    facts = ((gpu.name or "").removeprefix("NVIDIA "), *bus, nvlink, mig)
    return frame(
        BoxKind.GPU,
        [[chip(rank) for rank in marks.gpus.get(gpu.index, ())]],
        headings=[Heading(name=gpu.label, facts=cuda, size=11), *(_fact(fact) for fact in facts if fact)],
        width=width - 2 * PAD,
        gap=4,
        least=width,
        title=title_text(
            _joined(gpu.label, cuda), gpu.name or "", gpu.pci or "", gpu.uuid or "", link, nvlink, mig, source
        ),
        key=gpu.label,
        off=not gpu.visible,
    )


def _nic(nic: Nic, topology: Topology, links: Links, width: float) -> Box:
    near = _near(nic.name, topology, links.get(nic.name, ()))
    return frame(
        BoxKind.NIC,
        [],
        headings=[
            Heading(name=nic.name, facts=nic.kind.value, size=11),
            *(_fact(fact) for fact in (short_pci(nic.pci), near) if fact),
        ],
        width=width - 2 * PAD,
        least=width,
        title=title_text(nic.name, nic.kind.value, nic.pci or "", near),
        key=f"nic:{nic.name}",
    )


def _nvlink(links: Sequence[Link]) -> str:
    """Return how many NVLinks go to how many GPUs."""
    words = Counter(link.kind for link in links if link.kind.startswith("NV"))
    return ", ".join(f"{word} to {count} GPU{'s' if count > 1 else ''}" for word, count in words.items())


def _near(name: str, topology: Topology, links: Sequence[Link]) -> str:
    """Return the GPUs that the device reaches without a host bridge, by the shortest such way."""
    others = {link.b if link.a == name else link.a: link.kind for link in links}
    for word in _NEAR if others else ():
        names = [gpu.label for gpu in topology.gpus if others.get(gpu.label) == word]
        if names:
            return f"{word} to {', '.join(names)}"
    return ""


def _fact(text: str) -> Heading:
    return Heading(facts=text, size=_SIZE)


def _lines(*facts: str, width: float) -> tuple[str, ...]:
    """Return the facts in one line where that is wide enough, else in a line each."""
    line = _joined(*facts)
    return (line,) if width_of(line, _SIZE) <= width else facts


def _joined(*facts: str) -> str:
    return " · ".join(fact for fact in facts if fact)
