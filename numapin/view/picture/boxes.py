"""The layout: boxes in boxes, with text of which the place and the size are known. Pure.

Comes in: nothing. Goes out: `Box`, and the arithmetic that puts boxes into rows and frames around them.
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
_ROUNDING: Final = 0.01  # a width that was divided need not add up to the last digit


class BoxKind(StrEnum):
    """What a box stands for; the renderer's class name."""

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
    """How a label looks; the renderer's class name."""

    STRONG = "strong"
    PLAIN = "text"
    DIM = "dim"
    ON_RANK = "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One line of text; `x` is its left end, or its middle where `centred`; `y` its base line."""

    x: float
    y: float
    text: str
    size: float
    ink: Ink = Ink.PLAIN
    centred: bool = False

    @property
    def width(self) -> float:
        """Return the width it needs at most."""
        return width_of(self.text, self.size, bold=self.ink is Ink.STRONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle in its parent. `ranks` colour it; `off` is what may not be used; `heat` is a share of a colour."""

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
        """Yield the box and all that is in it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A line at the top of a frame: a name, and facts that may be cut."""

    name: str = ""
    facts: str = ""
    size: float = 10

    @property
    def line(self) -> float:
        """Return the height of the line."""
        return self.size * 1.35


def flow(boxes: Iterable[Box], *, width: float, x: float = 0, y: float = 0, gap: float = GAP) -> tuple[Box, ...]:
    """Put boxes side by side, and on a new row where the width ends; those of a row get one height.

    A box that is wider than the width has a row of its own.
    """
    rows: list[list[Box]] = []
    right = 0.0
    for box in boxes:
        if not rows or right + gap + box.width > width + _ROUNDING:
            rows.append([])
            right = -gap
        rows[-1].append(replace(box, x=x + right + gap))
        right += gap + box.width
    placed: list[Box] = []
    for row in rows:
        height = max(box.height for box in row)
        placed += (replace(box, y=y, height=height) for box in row)
        y += height + gap
    return tuple(placed)


def frame(  # noqa: PLR0913 - a frame has these parts
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
    ranks: tuple[int, ...] = (),
    off: bool = False,
) -> Box:
    """Return a box around rows of boxes, each wrapped at `width`, below its headings; `least` wide at least."""
    y = pad + sum(heading.line for heading in headings) + (_BELOW_HEADINGS if headings else 0)
    children: list[Box] = []
    for row in rows:
        placed = flow(row, width=width, x=pad, y=y, gap=gap)
        children += placed
        y = max((bottom(placed) + gap) if placed else y, y)
    outer = max(right_end(children) + pad, least)
    return Box(
        kind=kind,
        width=outer,
        height=(bottom(children) if children else y - _BELOW_HEADINGS) + pad,
        labels=_heading_labels(headings, pad, outer - 2 * pad),
        children=tuple(children),
        title=title,
        key=key,
        ranks=ranks,
        off=off,
    )


def cell(  # noqa: PLR0913 - a cell has these parts
    kind: BoxKind, width: float, height: float, text: str, *, size: float, ink: Ink = Ink.PLAIN
) -> Box:
    """Return a box with a short text in its middle, or with none if that does not fit."""
    shown = fit(text, width - 2, size, bold=ink is Ink.STRONG) if size else ""
    label = Label(x=width / 2, y=height / 2 + size * 0.36, text=shown, size=size, ink=ink, centred=True)
    return Box(kind=kind, width=width, height=height, labels=(label,) if shown else ())


def columns(count: int, least: float, *, width: float, gap: float = GAP, most: float) -> float:
    """Return the width of one of `count` boxes that fill rows evenly: `least` at least, `most` at most."""
    fit_in = max(1, int((width + gap) // (least + gap)))
    rows = -(-count // fit_in)
    return min(most, (width + gap) / -(-count // rows) - gap)


def bottom(boxes: Iterable[Box]) -> float:
    """Return the lowest edge."""
    return max((box.y + box.height for box in boxes), default=0)


def right_end(boxes: Iterable[Box]) -> float:
    """Return the rightmost edge."""
    return max((box.x + box.width for box in boxes), default=0)


def _heading_labels(headings: Sequence[Heading], pad: float, width: float) -> tuple[Label, ...]:
    labels: list[Label] = []
    y = pad
    for heading in headings:
        base = y + heading.size
        y += heading.line
        name = Label(
            x=pad, y=base, text=fit(heading.name, width, heading.size, bold=True), size=heading.size, ink=Ink.STRONG
        )
        start = name.width + (heading.size * 0.6 if name.text else 0)
        size = min(heading.size, 11)
        facts = Label(x=pad + start, y=base, text=fit(heading.facts, width - start, size), size=size, ink=Ink.DIM)
        labels += (label for label in (name, facts) if label.text)
    return tuple(labels)
