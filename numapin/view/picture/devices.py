"""GPUs and network devices as boxes. Pure.

Comes in: the devices of a node, their links, and the ranks of each GPU. Goes out: one box per device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from numapin.topology.model import LinkKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, CellSize, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text, width_of
from numapin.view.words import counted, cuda_name, joined, node_source, pcie_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    """Return the GPUs and the network devices of a node in columns that fill the width; None: of unknown node."""
    gpus = [gpu for gpu in topology.gpus if gpu.node == node]
    nics = [nic for nic in topology.nics if nic.node == node]
    one = columns(max(len(gpus), len(nics), 1), _LEAST, width=width, most=_MOST)
    return [[_gpu(gpu, links, marks, one) for gpu in gpus], [_nic(nic, topology, links, one) for nic in nics]]


def chip(rank: int) -> Box:
    """Return a rank's name in its colour."""
    text = f"rank {rank}"
    size = CellSize(width=width_of(text, 10) + 10, height=16, font=10)
    box = cell(BoxKind.CHIP, size, text, ink=Ink.ON_RANK)
    return replace(box, ranks=(rank,), key=f"rank{rank}")


def short_pci(address: str | None) -> str:
    """Return a PCI address without domain 0000, the only one on most machines."""
    return (address or "").removeprefix("0000:")


def _gpu(gpu: Gpu, links: Links, marks: Marks, width: float) -> Box:
    cuda, link, nvlink = cuda_name(gpu), pcie_link(gpu.pcie), _nvlink(links.get(gpu.label, ()))
    mig = f"{len(gpu.mig)} MIG instances" if gpu.mig else ""
    model, pci = gpu.name or "", gpu.pci or ""
    bus = _lines(short_pci(gpu.pci), link, width=width - 2 * PAD)
    return frame(
        BoxKind.GPU,
        [list(map(chip, marks.gpus.get(gpu.index, ())))],
        headings=[
            Heading(name=gpu.label, facts=cuda, size=11),
            *_facts(model.removeprefix("NVIDIA "), *bus, nvlink, mig),
        ],
        width=width - 2 * PAD,
        gap=4,
        least=width,
        title=title_text(_dotted(gpu.label, cuda), model, pci, gpu.uuid or "", link, nvlink, mig, node_source(gpu)),
        key=gpu.label,
        off=not gpu.visible,
    )


def _nic(nic: Nic, topology: Topology, links: Links, width: float) -> Box:
    near = _near(nic.name, topology, links.get(nic.name, ()))
    return frame(
        BoxKind.NIC,
        [],
        headings=[Heading(name=nic.name, facts=nic.kind.value, size=11), *_facts(short_pci(nic.pci), near)],
        width=width - 2 * PAD,
        least=width,
        title=title_text(nic.name, nic.kind.value, nic.pci or "", near),
        key=f"nic:{nic.name}",
    )


def _nvlink(links: Sequence[Link]) -> str:
    """Return the number of NVLinks to the other GPUs: "NV12 to 7 GPUs"."""
    words = Counter(link.kind for link in links if link.kind.startswith("NV"))
    return ", ".join(f"{word} to {counted(num_gpus, 'GPU')}" for word, num_gpus in words.items())


def _near(name: str, topology: Topology, links: Sequence[Link]) -> str:
    """Return the GPUs that the device reaches without a host bridge, by the shortest such path."""
    kinds = {link.b if link.a == name else link.a: link.kind for link in links}
    near = {gpu.label: kinds[gpu.label] for gpu in topology.gpus if kinds.get(gpu.label) in _NEAR}
    if not near:
        return ""
    shortest = next(kind for kind in _NEAR if kind in near.values())
    return f"{shortest} to {', '.join(label for label, kind in near.items() if kind == shortest)}"


def _facts(*texts: str) -> Iterator[Heading]:
    """Yield a line for each fact that is known."""
    yield from (Heading(facts=text, size=_SIZE) for text in texts if text)


def _lines(*facts: str, width: float) -> tuple[str, ...]:
    """Return the facts in one line if they fit, else in one line each."""
    line = _dotted(*facts)
    return (line,) if width_of(line, _SIZE) <= width else facts


def _dotted(*facts: str) -> str:
    return joined(*facts, separator=" · ")
