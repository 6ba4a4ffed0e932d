"""Colors and style rules. Pure.

Comes in: nothing. Goes out: CSS for the SVG and the page. Every color is a variable with a light and a dark value; the
light value is the fallback for programs without CSS variables.
"""

from __future__ import annotations

from typing import Final

# Paul Tol's "light" scheme (https://personal.sron.nl/~pault/) without its gray: for black text on color, and for any
# color vision. Of all orders, this one makes neighbors, which mostly share a node, differ most.
RANK_COLORS: Final = ("#77aadd", "#ee8866", "#ffaabb", "#bbcc33", "#eedd88", "#99ddff", "#44bb99", "#aaaa00")

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
    "l3": ("l3", None),
    "core": ("cpu", "edge"),
    "cpu": ("cpu", "edge"),
    "gpu": ("gpu", "gpuline"),
    "nic": ("nic", "nicline"),
    "memory": ("node", "edge"),
    "used": ("used", None),
    "panel": ("package", "line"),
    "heat": ("heat", None),
    "chip": ("cpu", "edge"),
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
        ".np .cpu.off{fill:url(#np-off)}",
        f".np .node.off,.np .memnode.off,.np .gpu.off{{{_color('fill', 'l3')}}}",
        f".np .hatch{{{_color('stroke', 'used')}}}",
        f".np .hatched{{{_color('fill', 'l3')}}}",
    )
    return "\n".join((*more, *boxes, *inks, *ranks))


def _stroke(name: str | None) -> str:
    return _color("stroke", name) if name else "stroke:none"


def _color(what: str, name: str) -> str:
    return f"{what}:{COLORS[name][0]};{what}:var(--{name})"
