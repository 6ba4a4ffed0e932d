"""The boxes as SVG. Pure.

Comes in: a `Picture`. Goes out: an SVG element; or a file with its own style, which follows the reader's light or dark
scheme.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from numapin.view.picture.boxes import BoxKind
from numapin.view.picture.style import RANK_COLORS, rules, variables
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    BoxKind.L3: 3,
}


def svg(picture: Picture) -> str:
    """Return the text of an SVG file."""
    light, dark = (f".np{{{variables(dark=dark)}}}" for dark in (False, True))
    style = f"<style>{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n{rules()}{striped(picture)}</style>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{element(picture, style=style)}\n'


def element(picture: Picture, *, style: str = "") -> str:
    """Return the SVG element; a page that has the rules of its own needs no `style`."""
    box = picture.box
    width, height = _number(box.width), _number(box.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="np" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="np-title np-desc">'
        f'<title id="np-title">{escape(picture.title)}</title><desc id="np-desc">{escape(picture.description)}</desc>'
    )
    return "\n".join((head, style, _definitions(box), *_drawn(box), "</svg>"))


def striped(picture: Picture) -> str:
    """Return the rules that fill boxes of several ranks with stripes; a page need not allow style attributes."""
    names = map(_stripes_name, _sharing(picture.box))
    return "".join(f"\n.np .{name}{{fill:url(#np-{name})}}" for name in names)


def _sharing(box: Box) -> list[tuple[int, ...]]:
    """Return every set of ranks that shares a box."""
    return sorted({part.ranks for part in box.walk() if len(part.ranks) > 1})


def _definitions(box: Box) -> str:
    """Return the hatch of CPUs that are not allowed, and a striped fill for every set of ranks that shares a box."""
    hatch = (
        '<pattern id="np-off" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="hatched" width="4" height="4"/><path class="hatch" d="M0 0V4"/></pattern>'
    )
    return f"<defs>{hatch}{''.join(map(_stripes, _sharing(box)))}</defs>"


def _stripes(ranks: tuple[int, ...]) -> str:
    step = 1 / len(ranks)
    edges = ((rank, offset) for i, rank in enumerate(ranks) for offset in (i * step, (i + 1) * step))
    stops = "".join(f'<stop offset="{_number(offset, 4)}" stop-color="{_color(rank)}"/>' for rank, offset in edges)
    return f'<linearGradient id="np-{_stripes_name(ranks)}">{stops}</linearGradient>'


def _drawn(box: Box) -> Iterator[str]:
    place = f"translate({_number(box.x)} {_number(box.y)})" if box.x or box.y else ""
    attributes = _attributes(("transform", place), ("data-ranks", " ".join(map(str, box.ranks))))
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    yield f"<g{attributes}>{title}{_rectangle(box)}{''.join(map(_text, box.labels))}"
    for child in box.children:
        yield from _drawn(child)
    yield "</g>"


def _rectangle(box: Box) -> str:
    if box.kind is BoxKind.PLAIN:
        return ""
    classes = filter(None, (box.kind.value, "off" if box.off else "", _fill(box.ranks)))
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
    """Return the class for the color of one rank, or for the stripes of several."""
    if len(ranks) == 1:
        return f"c{ranks[0] % len(RANK_COLORS)}"
    return _stripes_name(ranks) if ranks else ""


def _text(label: Label) -> str:
    classes = f"{label.ink.value} mid" if label.centered else label.ink.value
    place = f'x="{_number(label.x)}" y="{_number(label.y)}" font-size="{_number(label.size)}"'
    return f'<text class="{classes}" {place}>{escape(label.text)}</text>'


def _stripes_name(ranks: tuple[int, ...]) -> str:
    return "r" + "-".join(map(str, ranks))


def _color(rank: int) -> str:
    return RANK_COLORS[rank % len(RANK_COLORS)]


def _number(value: float, digits: int = 1) -> str:
    return f"{round(value, digits):g}"
