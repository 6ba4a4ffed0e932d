"""Machines to draw, and checks of a drawing, for tests of the picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from numapin import Link, Nic, Topology
from tests.machines.grids import grid
from tests.machines.roots import HERE
from tests.seam import NicKind, read_example

if TYPE_CHECKING:
    from tests.seam import Box, BoxKind, Picture

_TOLERANCE = 0.2  # of a pixel, for rounding

# Names that a user or a broken driver may have put into a machine file.
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><svg onload=alert(1)>&amp;]]>",
    "a\x00b\x1b[31mc\x7f\u2028d",
    "\u202egnp.exe\ufffe\ufeff",
    "W" * 10_000,
    "\U0001f4a9 名前 ﷽" * 50,
    "",
)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - not from outside


def golden_machine(name: str) -> Topology:
    golden = json.loads((HERE / "golden" / f"{name}.json").read_text())
    return Topology.from_json(json.dumps(golden["topology"]))


def many_nics(num_nics: int = 16) -> Topology:
    machine = Topology.from_json(read_example("example:dgx-h100"))
    names = [(f"mlx5_{i}", f"ib{i}") for i in range(num_nics)]
    nics = [
        Nic(name=name, pci=f"0000:{i + 0x20:02x}:00.0", node=i // 8, kind=NicKind.INFINIBAND)
        for i, pair in enumerate(names)
        for name in pair
    ]
    links = [
        Link(a=f"gpu{g}", b=nic.name, kind="PXB" if nic.node == g // 4 else "SYS") for g in range(8) for nic in nics
    ]
    return replace(machine, nics=tuple(sorted(nics, key=lambda nic: nic.name)), links=(*machine.links, *links))


def snc4() -> Topology:
    machine = grid(packages=2, nodes=4, cores=4)
    cores = tuple(replace(core, l3=0 if core.package == 0 else 16) for core in machine.cores)
    return replace(machine, cores=cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    what: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area) -> bool:
        return (
            min(self.right, other.right) - max(self.left, other.left) > _TOLERANCE
            and min(self.bottom, other.bottom) - max(self.top, other.top) > _TOLERANCE
        )

    def holds(self, other: Area) -> bool:
        return (
            other.left >= self.left - _TOLERANCE
            and other.top >= self.top - _TOLERANCE
            and other.right <= self.right + _TOLERANCE
            and other.bottom <= self.bottom + _TOLERANCE
        )


def problems(picture: Picture) -> list[str]:
    """Return the faults of a picture: parts outside their parent, and siblings, texts or lines that overlap."""
    texts: list[Area] = []
    found = list(_problems(picture.box, 0, 0, texts))
    by_top = sorted(texts, key=lambda area: area.top)
    for i, text in enumerate(by_top):
        for other in by_top[i + 1 :]:
            if other.top >= text.bottom:
                break
            if text.meets(other):
                found.append(f"{text.what} on {other.what}")
    for x, top, bottom in picture.lines:
        line = Area(what="a line", left=x - 1.5, top=top, right=x + 1.5, bottom=bottom)
        found += [f"a line on {text.what}" for text in texts if line.meets(text) and " of bus" not in text.what]
    return found


def _problems(box: Box, left: float, top: float, texts: list[Area]) -> Iterator[str]:
    left, top = left + box.x, top + box.y
    mine = Area(what=box.key or box.kind, left=left, top=top, right=left + box.width, bottom=top + box.height)
    children = [_area(child, left, top) for child in box.children]
    labels = list(_label_areas(box, left, top))
    yield from (f"{child.what} outside {mine.what}" for child in (*children, *labels) if not mine.holds(child))
    yield from (f"{a.what} on {b.what}" for a, b in _near(children) if a.meets(b))
    yield from (f"{label.what} on {child.what}" for label in labels for child in children if label.meets(child))
    texts += labels
    for child in box.children:
        yield from _problems(child, left, top, texts)


def _area(box: Box, left: float, top: float) -> Area:
    x, y = left + box.x, top + box.y
    return Area(what=box.key or box.kind, left=x, top=y, right=x + box.width, bottom=y + box.height)


def _label_areas(box: Box, left: float, top: float) -> Iterator[Area]:
    for label in box.labels:
        x = left + label.x - (label.width / 2 if label.centered else 0)
        y = top + label.y
        yield Area(
            what=f"text {label.text!r} of {box.key or box.kind}",
            left=x,
            top=y - label.size * 0.8,
            right=x + label.width,
            bottom=y + label.size * 0.24,
        )


def _near(areas: list[Area]) -> Iterator[tuple[Area, Area]]:
    """Yield all pairs of a few areas; of many areas, only neighbors in rows and in columns."""
    if len(areas) < 200:
        yield from combinations(areas, 2)
        return
    yield from pairwise(sorted(areas, key=lambda area: (area.top, area.left)))
    yield from pairwise(sorted(areas, key=lambda area: (area.left, area.top)))


def keys(box: Box, *kinds: BoxKind) -> list[str]:
    return [part.key for part in boxes(box) if part.kind in kinds]


def boxes(box: Box) -> list[Box]:
    return [part for part, _, _ in box.walk()]


def assert_drawn_once(picture: Picture, topology: Topology) -> None:
    drawn = sorted(part.key for part in boxes(picture.box) if part.kind in ("core", "cpu", "gpu", "nic") and part.key)
    assert drawn == sorted(
        (
            *(f"core{core.id}" for core in topology.cores),
            *(f"cpu{cpu}" for cpu in topology.cpus),
            *(gpu.label for gpu in topology.gpus),
            *(f"nic:{nic.name}" for nic in topology.nic_devices),
        )
    )
