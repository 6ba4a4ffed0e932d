"""GPUs and network devices as boxes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.topology.model import LinkKind
from numapin.topology.nics import adapters
from numapin.view.picture.boxes import PAD, Box, BoxKind, CellSize, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text, width_of
from numapin.view.structure import gpu_link
from numapin.view.words import (
    address,
    joined,
    known,
    model_name,
    node_source,
    on_node,
    own_nic,
    pcie_link,
    short_pci,
    torch_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numapin.topology.model import Gpu, Link
    from numapin.topology.nics import Adapter
    from numapin.view.picture.drawing import Drawing

_LEAST: Final = 148
_MOST: Final = 226
_SIZE: Final = 9.5
_NEAR: Final = (LinkKind.SAME_BOARD, LinkKind.ONE_SWITCH, LinkKind.SWITCHES)


def device_rows(drawing: Drawing, node: int | None) -> list[list[Box]]:
    """Return the GPUs and the network devices of a node in columns that fill the width; None: of unknown node."""
    topology = drawing.topology
    gpus, nics = on_node(topology.gpus, node), on_node(adapters(topology.nics), node)
    one = columns(max(len(gpus), len(nics), 1), _LEAST, width=drawing.width, most=_MOST)
    return [[_gpu(drawing, gpu, one) for gpu in gpus], [_nic(drawing, nic, one) for nic in nics]]


def chip(rank: int) -> Box:
    """Return a rank's name in its color."""
    text = f"rank {rank}"
    size = CellSize(width=width_of(text, 10) + 10, height=16, font=10)
    box = cell(BoxKind.CHIP, size, text, ink=Ink.ON_RANK)
    return replace(box, ranks=(rank,), key=f"rank{rank}")


def _gpu(drawing: Drawing, gpu: Gpu, width: float) -> Box:
    links = drawing.links
    in_torch, pcie, own_links = torch_name(gpu), pcie_link(gpu.pcie), _own_links(links.of.get(gpu.label, ()))
    model, mig = model_name(gpu), _mig(gpu)
    nearest = links.nearest_nics.get(gpu.index)
    nic = own_nic(nearest)
    bus = _lines(address(gpu, short=True), pcie, width=width - 2 * PAD)
    return frame(
        BoxKind.GPU,
        [list(map(chip, drawing.marks.gpus.get(gpu.index, ())))],
        headings=[
            Heading(name=gpu.label, facts=in_torch, size=11),
            *_facts(model, *bus, own_links, nic, mig),
        ],
        width=width - 2 * PAD,
        gap=4,
        least=width,
        title=title_text(
            *(_dotted(gpu.label, in_torch), model, address(gpu), known(gpu.uuid), pcie, own_links),
            *(_dotted(nic, nearest.reason if nearest else ""), mig, node_source(gpu)),
        ),
        key=gpu.label,
        off=not gpu.visible,
    )


def _mig(gpu: Gpu) -> str:
    return counted(len(gpu.mig), "MIG instance") if gpu.mig else ""


def _nic(drawing: Drawing, nic: Adapter, width: float) -> Box:
    near, pci = _near(drawing, nic), known(nic.pci)
    return frame(
        BoxKind.NIC,
        [],
        headings=[Heading(name=nic.name, facts=nic.kind.value, size=11), *_facts(short_pci(pci), near)],
        width=width - 2 * PAD,
        least=width,
        title=title_text(nic.name, nic.kind.value, pci, near),
        key=f"nic:{nic.name}",
    )


def _own_links(links: Sequence[Link]) -> str:
    """Return the GPUs' own links to the other GPUs, such as NVLink: "NV12 to 7 GPUs"."""
    words = Counter(link.kind for link in links if gpu_link(link.kind))
    return ", ".join(f"{word} to {counted(num_gpus, 'GPU')}" for word, num_gpus in words.items())


def _link_kinds(drawing: Drawing, nic: Adapter) -> dict[str, str]:
    """Return the kind of the link to each device that has one to this NIC, by the device's name."""
    own = [(name, link) for name in nic.names for link in drawing.links.of.get(name, ())]
    return {link.b if link.a == name else link.a: link.kind for name, link in own}


def _near(drawing: Drawing, nic: Adapter) -> str:
    """Return the GPUs that the device reaches without a host bridge, by the shortest such path."""
    kinds = _link_kinds(drawing, nic)
    for kind in _NEAR:
        gpus = [gpu.label for gpu in drawing.topology.gpus if kinds.get(gpu.label) == kind]
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
