"""Visible characters only in tables and trees, so that names cannot control a terminal.

A string or `Text` is one line, and several lines are a `Group`, so that no name can start a new line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from numapin.base.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def visible(renderable: RenderableType) -> RenderableType:
    """Return the renderable with every invisible character replaced. A string is copied; others change in place.

    Raises TypeError for a kind of renderable that no view uses so far: it must be added here.
    """
    match renderable:
        case str():
            return printable(renderable)
        case Text():
            renderable.plain = printable(renderable.plain)  # of the same length, so styles stay in place
        case Group():
            renderable.renderables[:] = map(visible, renderable.renderables)
        case Tree():
            renderable.label = visible(renderable.label)
            for child in renderable.children:
                visible(child)
        case _:
            # A table, or what is constrained in width: importing these costs `numapin topo` a few milliseconds.
            from rich.constrain import Constrain
            from rich.table import Table

            if isinstance(renderable, Constrain):
                renderable.renderable = visible(renderable.renderable)
            elif isinstance(renderable, Table):
                for column in renderable.columns:
                    column.header = visible(column.header)
                    column._cells[:] = map(visible, column.cells)  # noqa: SLF001 - rich has no other way to change a cell
            else:
                raise TypeError(f"{type(renderable).__name__} may have text that is not cleaned")
    return renderable
