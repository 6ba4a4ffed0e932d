"""The boxes as SVG."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from numapin.view.picture.boxes import BoxKind
from numapin.view.picture.style import look_of, pattern_of, pattern_rules, pattern_tile, rules, variables
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.view.picture.boxes import Box, Label
    from numapin.view.picture.layout import Picture

_ROUND: Final = {
    BoxKind.PACKAGE: 6,
    BoxKind.NODE: 5,
    BoxKind.MEMORY_NODE: 5,
    BoxKind.PANEL: 6,
    BoxKind.GPU: 4,
    BoxKind.NIC: 4,
    BoxKind.CHIP: 3,
    BoxKind.CACHE: 5,
    BoxKind.L3: 3,
    BoxKind.CORES: 3,
}


def svg(picture: Picture) -> str:
    """Return the text of an SVG file."""
    light, dark = (f".np{{{variables(dark=dark)}}}" for dark in (False, True))
    looks = looks_in(picture)
    style = f"<style>{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n{rules()}{pattern_rules(looks)}</style>"
    drawn = element(picture, inside=f"{style}\n{definitions(looks)}")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn}\n'


def element(picture: Picture, *, inside: str = "", name: str = "np") -> str:
    """Return the SVG element. A page with rules and definitions of its own needs none `inside`.

    `name` begins the ids of the title and the description, which a page with two pictures must not repeat.
    """
    box = picture.box
    width, height = _number(box.width), _number(box.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="np" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(picture.title)}</title>'
        f'<desc id="{name}-desc">{escape(picture.description)}</desc>'
    )
    lines = [head, inside]
    _draw(box, lines)
    return "\n".join((*lines, "</svg>"))


def looks_in(picture: Picture) -> list[int]:
    """Return the looks of all ranks in the picture, in order."""
    return sorted({look_of(rank) for part in picture.box.walk() for rank in part.ranks})


def definitions(looks: Iterable[int]) -> str:
    """Return the hatch of CPUs that are not allowed, and the patterns of these looks."""
    hatch = (
        '<pattern id="np-off" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="hatched" width="4" height="4"/><path class="hatch" d="M0 0V4"/></pattern>'
    )
    patterns = ((look, pattern_of(look)) for look in looks)
    return f"<defs>{hatch}{''.join(pattern_tile(look, found) for look, found in patterns if found)}</defs>"


def _draw(box: Box, lines: list[str]) -> None:
    """Append the lines of a box and of all boxes inside."""
    place = f"translate({_number(box.x)} {_number(box.y)})" if box.x or box.y else ""
    attributes = _attributes(("transform", place), ("data-ranks", " ".join(map(str, box.ranks))))
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    lines.append(f"<g{attributes}>{title}{_rectangle(box)}{''.join(map(_text, box.labels))}")
    for child in box.children:
        _draw(child, lines)
    lines.append("</g>")


def _rectangle(box: Box) -> str:
    if box.kind is BoxKind.PLAIN:
        return ""
    states = (("off", box.off), ("idle", box.idle))
    classes = filter(None, (box.kind.value, *(name for name, holds in states if holds), _fill(box.ranks)))
    attributes = _attributes(
        ("class", " ".join(classes)),
        ("width", _number(box.width)),
        ("height", _number(box.height)),
        ("rx", known(_ROUND.get(box.kind))),
        ("fill-opacity", "" if box.heat is None else _number(box.heat, 2)),
    )
    return f"<rect{attributes}/>"


def _attributes(*pairs: tuple[str, str]) -> str:
    """Return the attributes that have a value."""
    return "".join(f' {name}="{value}"' for name, value in pairs if value)


def _fill(ranks: tuple[int, ...]) -> str:
    """Return the class for the color and the pattern of one rank; several ranks have a band of their own."""
    return f"c{look_of(ranks[0])}" if len(ranks) == 1 else ""


def _text(label: Label) -> str:
    classes = f"{label.ink.value} mid" if label.centered else label.ink.value
    place = f'x="{_number(label.x)}" y="{_number(label.y)}" font-size="{_number(label.size)}"'
    return f'<text class="{classes}" {place}>{escape(label.text)}</text>'


def _number(value: float, digits: int = 1) -> str:
    return f"{round(value, digits):g}"
