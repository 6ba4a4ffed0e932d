"""Drawings of objects for notebooks.

A notebook asks the object itself, and `view`, which makes the drawing, is above the object's module: so `view` is
imported by name, and only when a notebook asks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def drawing(module: str, name: str, thing: object) -> str | None:
    """Return what a function of a module of `numapin.view` makes of an object."""
    draw: Callable[[object], str | None] = getattr(import_module(f"numapin.view.{module}"), name)
    return draw(thing)
