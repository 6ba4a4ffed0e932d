"""Boxes in boxes, with text of known place and size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from numapin.view.picture.text import fit, width_of, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PAD: Final = 8
GAP: Final = 8
_BELOW_HEADINGS: Final = 4
_LINE: Final = 1.35  # the height of a line of text, in its font's size
_ROUNDING: Final = 0.01  # the parts of a divided width may add up to a little more


class BoxKind(StrEnum):
    """The meaning of a box; in SVG, its class."""

    MACHINE = "machine"
    PACKAGE = "package"
    NODE = "node"
    MEMORY_NODE = "memnode"
    CACHE = "cache"
    """An L3 cache around the nodes that share it."""
    L3 = "l3"
    CORES = "cores"
    """Cores of unknown L3 cache, or of one that spans nodes."""
    CORE = "core"
    CPU = "cpu"
    GPU = "gpu"
    NIC = "nic"
    MEMORY = "memory"
    USED = "used"
    PANEL = "panel"
    HEAT = "heat"
    CHIP = "chip"
    SHARE = "share"
    """One rank's part of a band over cores that several ranks share."""
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
    """A rectangle in its parent.

    One rank colors it, `off` means that it may not be used, `idle` that no rank has it, and `heat` is the strength of
    its color.
    """

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
    idle: bool = False
    heat: float | None = None

    def walk(self) -> Iterator[Box]:
        """Yield the box and all boxes inside."""
        yield self
        for child in self.children:
            yield from child.walk()

    def placed(self, *, x: float, y: float, height: float) -> Box:
        """Return the box at this place of its parent, with this height."""
        # dataclasses.replace took a fifth of the time of drawing a machine with thousands of cores.
        return Box(
            kind=self.kind,
            width=self.width,
            height=height,
            x=x,
            y=y,
            key=self.key,
            labels=self.labels,
            children=self.children,
            title=self.title,
            ranks=self.ranks,
            off=self.off,
            idle=self.idle,
            heat=self.heat,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A line at the top of a frame: a name, then facts; it continues on further lines if it is too long."""

    name: str = ""
    facts: str = ""
    size: float = 10

    @property
    def line(self) -> float:
        """The height of the line."""
        return self.size * _LINE

    @property
    def facts_size(self) -> float:
        """The size of the facts."""
        return min(self.size, 11)


def flow(boxes: Iterable[Box], *, width: float, x: float = 0, y: float = 0, gap: float = GAP) -> tuple[Box, ...]:
    """Put boxes side by side, and start a new row where the width ends. The boxes of a row get the same height.

    A box that is wider than the width has a row of its own.
    """
    placed: list[Box] = []
    for row in _rows(boxes, width=width, gap=gap):
        height = max(box.height for box in row)
        left = x
        for box in row:
            placed.append(box.placed(x=left, y=y, height=height))
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


def frame(
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
    placed = _stacked(rows, width=width, x=pad, gap=gap)
    outer = max(right_end(placed) + pad, least)
    labels, below = _heading_labels(headings, pad, outer - 2 * pad)
    top = below + (_BELOW_HEADINGS if headings else 0)
    children = tuple(child.placed(x=child.x, y=child.y + top, height=child.height) for child in placed)
    return Box(
        kind=kind,
        width=outer,
        height=bottom(children, default=below) + pad,
        labels=labels,
        children=children,
        title=title,
        key=key,
        off=off,
    )


def _stacked(rows: Iterable[Iterable[Box]], *, width: float, x: float, gap: float) -> list[Box]:
    """Return the boxes of all rows, which wrap at the width, one row below the other."""
    placed: list[Box] = []
    y = 0.0
    for row in rows:
        now = flow(row, width=width, x=x, y=y, gap=gap)
        placed += now
        y = bottom(now, default=y - gap) + gap
    return placed


def paragraph(text: str, *, width: float, size: float, x: float = 0, ink: Ink = Ink.PLAIN) -> Box:
    """Return a text that starts at `x` and wraps at the width."""
    lines = wrapped(text, width - x, size)
    step = size * _LINE
    labels = tuple(
        Label(x=x, y=12 + step * number, text=line, size=size, ink=ink) for number, line in enumerate(lines) if line
    )
    right = max((label.x + label.width for label in labels), default=0)
    return Box(kind=BoxKind.PLAIN, width=right, height=16 + step * max(0, len(lines) - 1), labels=labels)


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


def _heading_labels(headings: Sequence[Heading], pad: float, width: float) -> tuple[tuple[Label, ...], float]:
    """Return the texts of the headings, and the lower end of the last one."""
    labels: list[Label] = []
    top = pad
    for heading in headings:
        for line in _lines_of(heading, width):
            labels += [replace(label, x=label.x + pad, y=top + heading.size) for label in line if label.text]
            top += heading.line
    return tuple(labels), top


def _lines_of(heading: Heading, width: float) -> Iterator[list[Label]]:
    """Yield the texts of each line: the name, then the facts in the rest of its line and on further lines."""
    size, facts_size = heading.size, heading.facts_size
    names = wrapped(heading.name, width, size, bold=True) if heading.name else []
    lines = [[Label(x=0, y=0, text=text, size=size, ink=Ink.STRONG)] for text in names]
    start = lines[-1][0].width + size * 0.6 if lines else 0
    facts = _fact_lines(heading, width, width - start)
    if lines and facts:
        lines[-1].append(Label(x=start, y=0, text=facts.pop(0), size=facts_size, ink=Ink.DIM))
    yield from lines
    yield from ([Label(x=0, y=0, text=text, size=facts_size, ink=Ink.DIM)] for text in facts if text)


def _fact_lines(heading: Heading, width: float, rest: float) -> list[str]:
    """Return the lines of the facts, the first one for the rest of the name's last line; it may be empty."""
    if not heading.facts:
        return []
    would_look_lost = rest < width / 2 and width_of(heading.facts, heading.facts_size) > rest  # beside a long name
    return wrapped(heading.facts, width, heading.facts_size, first=0 if would_look_lost else rest)
