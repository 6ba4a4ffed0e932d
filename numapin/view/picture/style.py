"""Colors and style rules.

Every color is a variable with a light and a dark value; the light value is the fallback for programs without CSS
variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# Paul Tol's "light" scheme (https://personal.sron.nl/~pault/) without its gray: for black text on color, and for any
# color vision. Of all orders, this one makes neighbors, which mostly share a node, differ most.
RANK_COLORS: Final = ("#77aadd", "#ee8866", "#ffaabb", "#bbcc33", "#eedd88", "#99ddff", "#44bb99", "#aaaa00")

PATTERN_INK: Final = "#00000030"  # so faint that text on a pattern stays readable
_TILE: Final = 7  # marks are in its middle, so that they are above and below the text in a cell 14 high
_STROKE: Final = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Marks over a color, as an SVG path in a tile of 7 x 7 and as a CSS background. `filled`: not only its outline."""

    path: str
    css: str
    filled: bool = False


def _lines_at(degrees: int) -> str:
    return f"repeating-linear-gradient({degrees}deg,{PATTERN_INK} 0 1.4px,transparent 1.4px 5px)"


# The first eight ranks have plain colors; each further eight have a pattern over them.
PATTERNS: Final = (
    Pattern(path="M-1 1L1 -1M0 7L7 0M6 8L8 6", css=_lines_at(135)),
    Pattern(
        path="M3.5 2A1.5 1.5 0 1 1 3.5 5A1.5 1.5 0 1 1 3.5 2Z",
        css=f"radial-gradient(circle,{PATTERN_INK} 1.5px,transparent 1.7px) 0 0/7px 7px",
        filled=True,
    ),
    Pattern(path="M-1 6L1 8M0 0L7 7M6 -1L8 1", css=_lines_at(45)),
    Pattern(path="M3.5 0V7", css=_lines_at(90)),
    Pattern(path="M0 3.5H7", css=_lines_at(0)),
    Pattern(path="M0 3.5H7M3.5 0V7", css=f"{_lines_at(0)},{_lines_at(90)}"),
    Pattern(
        path="M0 0H3.5V3.5H0ZM3.5 3.5H7V7H3.5Z",
        css=f"repeating-conic-gradient({PATTERN_INK} 0 25%,transparent 0 50%) 0 0/7px 7px",
        filled=True,
    ),
)
NUM_LOOKS: Final = len(RANK_COLORS) * (1 + len(PATTERNS))


def look_of(rank: int) -> int:
    """Return the number of a rank's color and pattern; after 64 ranks they repeat."""
    return rank % NUM_LOOKS


def color_of(look: int) -> str:
    """Return the color below the pattern."""
    return RANK_COLORS[look % len(RANK_COLORS)]


def pattern_of(look: int) -> Pattern | None:
    """Return the pattern; None: the color is plain."""
    number = look // len(RANK_COLORS)
    return PATTERNS[number - 1] if number else None


# name -> light, dark
COLORS: Final = {
    "page": ("#ffffff", "#12161c"),
    "ink": ("#1a212b", "#e9edf2"),
    "dim": ("#4d5866", "#aab5c2"),
    "on": ("#10151b", "#10151b"),
    "package": ("#f3f5f8", "#1a2028"),
    "node": ("#ffffff", "#222a34"),
    "l3": ("#edf1f5", "#2c3541"),
    "cpu": ("#dbe4ee", "#3d4958"),
    "gpu": ("#e9f4ec", "#1f3529"),
    "nic": ("#f3edf8", "#31273d"),
    "line": ("#bfc8d2", "#404c5a"),
    "edge": ("#8593a3", "#6b7b8d"),
    "gpuline": ("#4f9563", "#5aa070"),
    "nicline": ("#9272ad", "#9a7fb3"),
    "used": ("#7d8fa3", "#8799ad"),
    "heat": ("#5b9bd0", "#3f7fb5"),
}

# class -> fill, stroke
_FILLS: Final = {
    "machine": ("page", None),
    "package": ("package", "line"),
    "node": ("node", "edge"),
    "memnode": ("node", "edge"),
    "cache": ("l3", "edge"),
    "l3": ("l3", None),
    "cores": ("l3", None),
    "core": ("cpu", "edge"),
    "cpu": ("cpu", "edge"),
    "gpu": ("gpu", "gpuline"),
    "nic": ("nic", "nicline"),
    "memory": ("node", "edge"),
    "used": ("used", None),
    "panel": ("package", "line"),
    "heat": ("heat", None),
    "chip": ("cpu", "edge"),
    "share": ("cpu", None),
}
_INKS: Final = {"strong": "ink", "text": "ink", "dim": "dim", "on": "on"}


def variables(*, dark: bool) -> str:
    """Return the declarations of all color variables."""
    return ";".join(f"--{name}:{pair[dark]}" for name, pair in COLORS.items())


def rules() -> str:
    """Return the rules for the classes of the picture, below the class np."""
    boxes = [f".np .{name}{{{_color('fill', fill)};{_stroke(stroke)}}}" for name, (fill, stroke) in _FILLS.items()]
    inks = [f".np text.{name}{{{_color('fill', color)}}}" for name, color in _INKS.items()]
    ranks = [f".np .c{i}{{fill:{color}}}" for i, color in enumerate(RANK_COLORS)]
    more = (
        '.np{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}',
        ".np .strong{font-weight:600}",
        ".np .mid{text-anchor:middle}",
        ".np .memnode{stroke-dasharray:5 3}",
        ".np .cpu{stroke-width:.5}",
        f".np .cpu.idle{{{_color('fill', 'l3')};stroke-dasharray:2 2}}",
        ".np .cpu.off{fill:url(#np-off)}",
        f".np .node.off,.np .memnode.off,.np .gpu.off{{{_color('fill', 'l3')}}}",
        f".np .hatch{{{_color('stroke', 'used')}}}",
        f".np .hatched{{{_color('fill', 'l3')}}}",
    )
    return "\n".join((*more, *boxes, *inks, *ranks))


def pattern_rules(looks: Iterable[int]) -> str:
    """Return the rules for the looks that have a pattern; the pattern's definition is that of `svg`."""
    return "".join(f"\n.np .c{look}{{fill:url(#{pattern_name(look)})}}" for look in looks if pattern_of(look))


def pattern_name(look: int) -> str:
    """Return the name of a look's pattern in SVG."""
    return f"np-c{look}"


def pattern_tile(look: int, pattern: Pattern) -> str:
    """Return the definition of a look's pattern in SVG."""
    ink = f'fill="{PATTERN_INK}"' if pattern.filled else f'fill="none" stroke="{PATTERN_INK}" stroke-width="{_STROKE}"'
    return (
        f'<pattern id="{pattern_name(look)}" width="{_TILE}" height="{_TILE}" patternUnits="userSpaceOnUse">'
        f'<rect width="{_TILE}" height="{_TILE}" fill="{color_of(look)}"/><path d="{pattern.path}" {ink}/></pattern>'
    )


def button_rules(looks: Iterable[int]) -> str:
    """Return the backgrounds of the buttons that highlight a rank."""
    return "".join(f"button.c{look}{{background:{_button_background(look)}}}\n" for look in looks)


def _button_background(look: int) -> str:
    pattern, color = pattern_of(look), color_of(look)
    return color if pattern is None else f"{pattern.css},{color}"


def _stroke(name: str | None) -> str:
    return _color("stroke", name) if name else "stroke:none"


def _color(what: str, name: str) -> str:
    return f"{what}:{COLORS[name][0]};{what}:var(--{name})"
