"""GPUs and network devices as boxes. Pure.

Comes in: the devices of a node, their links, and the ranks of each GPU. Goes out: one box per device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from numapin.topology.adapters import adapters
from numapin.topology.model import LinkKind
from numapin.view.picture.boxes import PAD, Box, BoxKind, CellSize, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text, width_of
from numapin.view.structure import gpu_link
from numapin.view.words import counted, cuda_name, joined, known, model_name, node_source, on_node, own_nic, pcie_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numapin.topology.adapters import Adapter
    from numapin.topology.model import Gpu, Link, Topology
    from numapin.topology.nearest_nics import NearestNics
    from numapin.view.marks import Marks

_LEAST: Final = 148
_MOST: Final = 226
_SIZE: Final = 9.5
_NEAR: Final = (LinkKind.SAME_BOARD, LinkKind.ONE_SWITCH, LinkKind.SWITCHES)


class Links(NamedTuple):
    """The links of each device by its name, and the nearest NICs of each GPU by its index."""

    of: Mapping[str, Sequence[Link]]
    nearest_nics: Mapping[int, NearestNics]


def links_of(topology: Topology) -> Links:
    """Return the links of each device, and the nearest NICs of each GPU."""
    found: dict[str, list[Link]] = {}
    for link in topology.links:
        found.setdefault(link.a, []).append(link)
        found.setdefault(link.b, []).append(link)
    return Links(of=found, nearest_nics=topology.nearest_nics)


def device_rows(topology: Topology, marks: Marks, links: Links, node: int | None, *, width: float) -> list[list[Box]]:
    """Return the GPUs and the network devices of a node in columns that fill the width; None: of unknown node."""
    gpus, nics = on_node(topology.gpus, node), on_node(adapters(topology.nics), node)
    one = columns(max(len(gpus), len(nics), 1), _LEAST, width=width, most=_MOST)
    return [[_gpu(gpu, links, marks, one) for gpu in gpus], [_nic(nic, topology, links, one) for nic in nics]]


def chip(rank: int) -> Box:
    """Return a rank's name in its color."""
    text = f"rank {rank}"
    size = CellSize(width=width_of(text, 10) + 10, height=16, font=10)
    box = cell(BoxKind.CHIP, size, text, ink=Ink.ON_RANK)
    return replace(box, ranks=(rank,), key=f"rank{rank}")


def short_pci(address: str) -> str:
    """Return a PCI address without domain 0000, the only one on most machines."""
    return address.removeprefix("0000:")


def _gpu(gpu: Gpu, links: Links, marks: Marks, width: float) -> Box:
    cuda, link, nvlink = cuda_name(gpu), pcie_link(gpu.pcie), _nvlink(links.of.get(gpu.label, ()))
    model, pci, mig = model_name(gpu), known(gpu.pci), _mig(gpu)
    nearest = links.nearest_nics.get(gpu.index)
    nic = own_nic(nearest)
    bus = _lines(short_pci(pci), link, width=width - 2 * PAD)
    return frame(
        BoxKind.GPU,
        [list(map(chip, marks.gpus.get(gpu.index, ())))],
        headings=[
            Heading(name=gpu.label, facts=cuda, size=11),
            *_facts(model.removeprefix("NVIDIA "), *bus, nvlink, nic, mig),
        ],
        width=width - 2 * PAD,
        gap=4,
        least=width,
        title=title_text(
            *(_dotted(gpu.label, cuda), model, pci, known(gpu.uuid), link, nvlink),
            *(_dotted(nic, nearest.reason if nearest else ""), mig, node_source(gpu)),
        ),
        key=gpu.label,
        off=not gpu.visible,
    )


def _mig(gpu: Gpu) -> str:
    return counted(len(gpu.mig), "MIG instance") if gpu.mig else ""


def _nic(nic: Adapter, topology: Topology, links: Links, width: float) -> Box:
    near, pci = _near(nic, topology, links), known(nic.pci)
    return frame(
        BoxKind.NIC,
        [],
        headings=[Heading(name=nic.name, facts=nic.kind.value, size=11), *_facts(short_pci(pci), near)],
        width=width - 2 * PAD,
        least=width,
        title=title_text(nic.name, nic.kind.value, pci, near),
        key=f"nic:{nic.name}",
    )


def _nvlink(links: Sequence[Link]) -> str:
    """Return the GPUs' own links to the other GPUs, such as NVLink: "NV12 to 7 GPUs"."""
    words = Counter(link.kind for link in links if gpu_link(link.kind))
    return ", ".join(f"{word} to {counted(num_gpus, 'GPU')}" for word, num_gpus in words.items())


def _near(nic: Adapter, topology: Topology, links: Links) -> str:
    """Return the GPUs that the device reaches without a host bridge, by the shortest such path."""
    own = [(name, link) for name in nic.names for link in links.of.get(name, ())]
    kinds = {link.b if link.a == name else link.a: link.kind for name, link in own}
    for kind in _NEAR:
        gpus = [gpu.label for gpu in topology.gpus if kinds.get(gpu.label) == kind]
        if gpus:
            return f"{kind} to {', '.join(gpus)}"
    return ""


def _facts(*texts: str) -> Iterator[Heading]:
    """Yield a line for each fact that is known."""
    yield from (Heading(facts=text, size=_SIZE) for text in texts if text)


def _lines(*facts: str, width: float) -> tuple[str, ...]:
    """Return the facts in one line if they fit, else in one line each."""
    line = _dotted(*facts)
    return (line,) if width_of(line, _SIZE) <= width else facts


def _dotted(*facts: str) -> str:
    return joined(*facts, separator=" · ")
