"""Whatever names say, a table shows them and does nothing else. Pure.

Comes in: what the other modules of `view` made. Goes out: the same, with visible characters only, before rich lays it
out. A string or `Text` is one line: what has several is a `Group` of them, so that no name can begin a line of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from numapin.base.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def visible(renderable: RenderableType) -> RenderableType:
    """Return the renderable, in which every invisible character was replaced; all but a string is changed in place.

    Raises TypeError for a kind of renderable that no view has used so far: it must be added here.
    """
    if isinstance(renderable, str):
        return printable(renderable)
    if isinstance(renderable, Text):
        renderable.plain = printable(renderable.plain)  # as long as before: its styles stay where they are
    elif isinstance(renderable, Group):
        renderable.renderables[:] = map(visible, renderable.renderables)
    elif isinstance(renderable, Constrain):
        renderable.renderable = visible(renderable.renderable)
    elif isinstance(renderable, Table):
        for column in renderable.columns:
            column.header = visible(column.header)
            column._cells[:] = map(visible, column.cells)  # noqa: SLF001 - rich has no other way to change a cell
    elif isinstance(renderable, Tree):
        renderable.label = visible(renderable.label)
        for child in renderable.children:
            visible(child)
    else:
        raise TypeError(f"{type(renderable).__name__} may have text that this does not reach")
    return renderable
