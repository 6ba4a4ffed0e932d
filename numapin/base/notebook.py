"""Drawings of objects for notebooks. Pure.

Comes in: an object, and the name of a function in `view.notebook`. Goes out: SVG or HTML, or None if there is nothing
to draw.

A notebook asks the object itself, and `view`, which makes the drawing, is above the object's module: so `view` is
imported by name, and only when a notebook asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def drawing(name: str, thing: object) -> str | None:
    """Return what the function `name` of `numapin.view.notebook` makes of an object."""
    draw: Callable[[object], str | None] = getattr(import_module("numapin.view.notebook"), name)
    return draw(thing)
