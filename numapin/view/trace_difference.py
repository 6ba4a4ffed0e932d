"""The difference between two traced runs as a table. Pure.

Comes in: a `TraceDifference`. Goes out: one row for the whole step and for each part, and a verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from numapin.trace.difference import PartDifference, TraceDifference

_VERDICTS: Final = {True: "", False: "within the spread of the steps", None: "one step only"}


def difference_table(found: TraceDifference) -> RenderableType:
    """Return the runs' names, the table in seconds a step, the verdict and the notes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("s a step", no_wrap=True)
    for heading in ("A", "B", "B - A", "+-"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part in found.parts:
        table.add_row(*_cells(part))
    names = [Text(f"{label}: {name}") for label, name in zip("AB", found.names, strict=True)]
    notes = [Text(f"note: {note}") for note in found.notes]
    return Group(*names, Text(), table, Text(), Text(found.verdict, style="bold"), *notes)


def _cells(part: PartDifference) -> tuple[str, ...]:
    margin = "-" if part.margin_s is None else f"{part.margin_s:.4f}"
    change = f"{part.change_s:+.4f}"
    return part.part, f"{part.a_s:.4f}", f"{part.b_s:.4f}", change, margin, _VERDICTS[part.differs]
