"""Bars and curves that fit into a table's cell. Pure.

Comes in: shares and values. Goes out: rich texts of an exact width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence


class Glyphs(NamedTuple):
    """The characters of gauges: they differ, because a terminal may have no colors."""

    compute: str
    copy: str
    wait: str
    curve: str
    ellipsis: str


BLOCKS: Final = Glyphs(compute="█", copy="▓", wait="░", curve="▁▂▃▄▅▆▇█", ellipsis="…")
ASCII: Final = Glyphs(compute="#", copy="=", wait=".", curve="_.-=+*#@", ellipsis="~")

COMPUTE_STYLE: Final = "green"
COPY_STYLE: Final = "cyan"
WAIT_STYLE: Final = "yellow"


def bar(*, wait_share: float | None, copy_share: float | None, width: int, glyphs: Glyphs) -> Text:
    """Return the time of a step as a bar: computation, the part of it beside a copy to the GPU, and waiting.

    A share that is not 0 gets a column if there is room. Without a known share, the bar is empty.
    """
    if wait_share is None:
        return Text("-".ljust(width))
    num_wait = _columns(wait_share, width)
    num_copy = min(_columns(copy_share or 0.0, width), width - num_wait)
    num_compute = width - num_wait - num_copy
    parts = (
        (glyphs.compute * num_compute, COMPUTE_STYLE),
        (glyphs.copy * num_copy, COPY_STYLE),
        (glyphs.wait * num_wait, WAIT_STYLE),
    )
    return Text.assemble(*(part for part in parts if part[0]))


def _columns(share: float, width: int) -> int:
    """Return the columns of a share; only a whole one fills the width, and a small one is still seen."""
    if not 0 < share < 1:
        return round(share) * width
    return min(max(round(share * width), 1 if share >= 0.01 else 0), width - 1)


def curve(values: Sequence[float], *, width: int, glyphs: Glyphs) -> Text:
    """Return the last values as columns from 0 to the largest of them, the latest at the right."""
    shown = values[-width:] if width else ()
    top = max(shown, default=0.0)
    highest = len(glyphs.curve) - 1
    text = "".join(glyphs.curve[round(value / top * highest) if top > 0 else 0] for value in shown)
    return Text(text.rjust(width), style=COPY_STYLE)
