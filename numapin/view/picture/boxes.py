"""Boxes in boxes, with text of known place and size. Pure.

Comes in: sizes and texts. Goes out: a `Box`, and functions that arrange boxes in rows and draw frames around them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.view.picture.text import fit, width_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PAD: Final = 8
GAP: Final = 8
_BELOW_HEADINGS: Final = 4
_ROUNDING: Final = 0.01  # the parts of a divided width may add up to a little more


class BoxKind(StrEnum):
    """The meaning of a box; in SVG, its class."""

    MACHINE = "machine"
    PACKAGE = "package"
    NODE = "node"
    MEMORY_NODE = "memnode"
    L3 = "l3"
    CORE = "core"
    CPU = "cpu"
    GPU = "gpu"
    NIC = "nic"
    MEMORY = "memory"
    USED = "used"
    PANEL = "panel"
    HEAT = "heat"
    CHIP = "chip"
    PLAIN = "plain"


class Ink(StrEnum):
    """The look of a label; in SVG, its class."""

    STRONG = "strong"
    PLAIN = "text"
    DIM = "dim"
    ON_RANK = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One line of text. `x` is its left end, or its middle if `centered`; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    ink: Ink = Ink.PLAIN
    centered: bool = False

    @property
    def width(self) -> float:
        """The width that the text needs at most."""
        return width_of(self.text, self.size, bold=self.ink is Ink.STRONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle in its parent. `ranks` color it; `off`: may not be used; `heat` is the strength of its color."""

    kind: BoxKind
    width: float
    height: float
    x: float = 0
    y: float = 0
    key: str = ""
    labels: tuple[Label, ...] = ()
    children: tuple[Box, ...] = ()
    title: str = ""
    ranks: tuple[int, ...] = ()
    off: bool = False
    heat: float | None = None

    def walk(self) -> Iterator[Box]:
        """Yield the box and all boxes inside."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A line at the top of a frame: a name, then facts, which are cut if they do not fit."""

    name: str = ""
    facts: str = ""
    size: float = 10

    @property
    def line(self) -> float:
        """The height of the line."""
        return self.size * 1.35


def flow(boxes: Iterable[Box], *, width: float, x: float = 0, y: float = 0, gap: float = GAP) -> tuple[Box, ...]:
    """Put boxes side by side, and start a new row where the width ends. The boxes of a row get the same height.

    A box that is wider than the width has a row of its own.
    """
    placed: list[Box] = []
    for row in _rows(boxes, width=width, gap=gap):
        height = max(box.height for box in row)
        left = x
        for box in row:
            placed.append(replace(box, x=left, y=y, height=height))
            left += box.width + gap
        y += height + gap
    return tuple(placed)


def _rows(boxes: Iterable[Box], *, width: float, gap: float) -> list[list[Box]]:
    rows: list[list[Box]] = []
    right = 0.0
    for box in boxes:
        right += gap + box.width
        if not rows or right > width + _ROUNDING:
            rows.append([])
            right = box.width
        rows[-1].append(box)
    return rows


def frame(  # noqa: PLR0913 - a dataclass for these would only repeat Box
    kind: BoxKind,
    rows: Iterable[Iterable[Box]],
    *,
    headings: Sequence[Heading] = (),
    width: float,
    gap: float = GAP,
    least: float = 0,
    pad: float = PAD,
    title: str = "",
    key: str = "",
    off: bool = False,
) -> Box:
    """Return a box around its headings and rows of boxes, which wrap at `width`; it is at least `least` wide."""
    y = pad + sum(heading.line for heading in headings) + (_BELOW_HEADINGS if headings else 0)
    children: list[Box] = []
    for row in rows:
        placed = flow(row, width=width, x=pad, y=y, gap=gap)
        children += placed
        y = bottom(placed, default=y - gap) + gap
    outer = max(right_end(children) + pad, least)
    return Box(
        kind=kind,
        width=outer,
        height=bottom(children, default=y - _BELOW_HEADINGS) + pad,
        labels=_heading_labels(headings, pad, outer - 2 * pad),
        children=tuple(children),
        title=title,
        key=key,
        off=off,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSize:
    """The size of a cell, and of the text in it; a font of 0 means no text."""

    width: float
    height: float
    font: float


def cell(kind: BoxKind, size: CellSize, text: str, *, ink: Ink = Ink.PLAIN) -> Box:
    """Return a box with a short text in its middle; a text that does not fit is left out."""
    box = Box(kind=kind, width=size.width, height=size.height)
    shown = fit(text, size.width - 2, size.font, bold=ink is Ink.STRONG) if size.font else ""
    if not shown:
        return box
    x, y = size.width / 2, size.height / 2 + size.font * 0.36
    return replace(box, labels=(Label(x=x, y=y, text=shown, size=size.font, ink=ink, centered=True),))


def columns(count: int, least: float, *, width: float, gap: float = GAP, most: float) -> float:
    """Return the width of each of `count` boxes that fill their rows evenly, between `least` and `most`."""
    fit_in = max(1, int((width + gap) // (least + gap)))
    rows = -(-count // fit_in)
    return min(most, (width + gap) / -(-count // rows) - gap)


def bottom(boxes: Iterable[Box], *, default: float = 0) -> float:
    """Return the lowest edge."""
    return max((box.y + box.height for box in boxes), default=default)


def right_end(boxes: Iterable[Box]) -> float:
    """Return the rightmost edge."""
    return max((box.x + box.width for box in boxes), default=0)


def _heading_labels(headings: Sequence[Heading], pad: float, width: float) -> tuple[Label, ...]:
    labels: list[Label] = []
    top = pad
    for heading in headings:
        labels += _labels_of(heading, left=pad, top=top, width=width)
        top += heading.line
    return tuple(label for label in labels if label.text)


def _labels_of(heading: Heading, *, left: float, top: float, width: float) -> tuple[Label, Label]:
    """Return the name and, in the rest of the line, the facts."""
    size, y = heading.size, top + heading.size
    name = Label(x=left, y=y, text=fit(heading.name, width, size, bold=True), size=size, ink=Ink.STRONG)
    start = name.width + (size * 0.6 if name.text else 0)
    facts_size = min(size, 11)
    text = fit(heading.facts, width - start, facts_size)
    return name, Label(x=left + start, y=y, text=text, size=facts_size, ink=Ink.DIM)
