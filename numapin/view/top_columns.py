"""The columns of the live screen, and which of them fit. Pure.

Comes in: a rank, its pace, and a width. Goes out: cells as rich texts, each as wide as its column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.text import Text

from numapin.observe.history import LoaderState
from numapin.view.gauges import WAIT_STYLE, Glyphs, bar, curve
from numapin.view.plan_table import gpu_cell
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numapin.observe.history import RankPace
    from numapin.observe.top import TopRank

GAP: Final = 2
RED: Final = "bold red"
_GIB: Final = 2**30
_REMOTE_SHARE: Final = 0.05  # more is red, as in `numapin verify`


class Cell(NamedTuple):
    """What a cell shows: the rank, its pace, the width of the column, and the characters to draw with."""

    rank: TopRank
    pace: RankPace
    width: int
    glyphs: Glyphs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenColumn:
    """One column.

    Attributes:
        name: Its heading.
        width: Its least width.
        importance: Columns of higher numbers are dropped first.
        show: Returns a cell.
        is_left: Whether cells are aligned to the left.
        max_width: The width that it takes if there is room. 0: `width`.
        stays: Whether it has something to show for a rank that is gone.
    """

    name: str
    width: int
    importance: int
    show: Callable[[Cell], Text]
    is_left: bool = False
    max_width: int = 0
    stays: bool = False

    def cell(self, rank: TopRank, pace: RankPace, glyphs: Glyphs) -> Text:
        """Return the cell of a rank, exactly as wide as the column."""
        return self._fitted(self.show(Cell(rank, pace, self.width, glyphs)), glyphs)

    def heading(self, glyphs: Glyphs) -> Text:
        """Return the heading."""
        return self._fitted(Text(self.name), glyphs)

    def _fitted(self, text: Text, glyphs: Glyphs) -> Text:
        missing = self.width - text.cell_len
        if missing < 0:
            text.right_crop(len(text) - max(self.width - 1, 0))
            text.append(glyphs.ellipsis)
        elif self.is_left:
            text.pad_right(missing)
        else:
            text.pad_left(missing)
        return text


def fitting(columns: Iterable[ScreenColumn], width: int) -> tuple[ScreenColumn, ...]:
    """Return the most important columns that fit into a width, in their order; the wide ones share what is left."""
    chosen: list[ScreenColumn] = []
    left = width + GAP
    for column in sorted(columns, key=lambda column: column.importance):
        if column.width + GAP > left:
            break  # a less important column must not take the place of a more important one
        left -= column.width + GAP
        chosen.append(column)
    return _widened([column for column in columns if column in chosen], left)


def _widened(columns: list[ScreenColumn], left: int) -> tuple[ScreenColumn, ...]:
    num_wide = sum(column.max_width > column.width for column in columns)
    widened = []
    for column in columns:
        if column.max_width <= column.width:
            widened.append(column)
            continue
        extra = min(left // num_wide, column.max_width - column.width)
        widened.append(replace(column, width=column.width + extra))
        left, num_wide = left - extra, num_wide - 1
    return tuple(widened)


def _bar(cell: Cell) -> Text:
    pace = cell.pace
    return bar(wait_share=pace.wait_share, copy_share=pace.copy_share, width=cell.width, glyphs=cell.glyphs)


def _curve(cell: Cell) -> Text:
    return curve(cell.pace.curve, width=cell.width, glyphs=cell.glyphs)


def number(value: float | None) -> str:
    """Return a rate with three digits or so, or a dash if it is unknown."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> Text:
    return Text(known(value, ".0%", unknown="-"))


def _off(cell: Cell) -> Text:
    rank = cell.rank
    text = f"{rank.num_off_plan}/{rank.num_threads}"
    return Text(text if len(text) <= cell.width else str(rank.num_off_plan), style=RED if rank.num_off_plan else "")


def _remote(cell: Cell) -> Text:
    share = cell.rank.remote_share
    return Text(known(share, ".1%", unknown="-"), style=RED if (share or 0.0) > _REMOTE_SHARE else "")


def _wait(cell: Cell) -> Text:
    is_behind = cell.pace.state is LoaderState.BEHIND
    return Text(known(cell.pace.wait_share, ".0%", unknown="-"), style=WAIT_STYLE if is_behind else "")


def _loader(cell: Cell) -> Text:
    state = cell.pace.state
    return Text(state.value, style=WAIT_STYLE if state is LoaderState.BEHIND else "")


def gpu_memory(rank: TopRank) -> str:
    """Return the GPU's memory in use and in all, in GiB."""
    used, size = rank.load.used_bytes, rank.load.memory_bytes
    if used is None or size is None:
        return "-"
    in_use = used / _GIB
    return f"{in_use:.1f}/{size / _GIB:.0f}" if in_use < 100 else f"{in_use:.0f}/{size / _GIB:.0f}"


def _power(cell: Cell) -> Text:
    return Text(known(cell.rank.load.power_w, ".0f", unknown="-"))


def _pinned(cell: Cell) -> Text:
    pinned = cell.rank.pinned_bytes
    return Text("-" if pinned is None else f"{pinned / _GIB:.1f}")


def _data(cell: Cell) -> Text:
    rate = cell.pace.bytes_per_s
    return Text("-" if rate is None else number(rate / 1e9))


COLUMNS: Final = (
    ScreenColumn(
        name="rank", width=4, importance=0, show=lambda cell: Text(str(cell.rank.plan.local_rank)), stays=True
    ),
    ScreenColumn(name="step", width=7, importance=1, show=_bar, is_left=True, max_width=40),
    ScreenColumn(name="wait", width=4, importance=12, show=_wait),
    ScreenColumn(name="steps/s", width=7, importance=2, show=lambda cell: Text(number(cell.pace.steps_per_s))),
    ScreenColumn(name="trend", width=5, importance=9, show=_curve, max_width=40),
    ScreenColumn(name="loader", width=6, importance=8, show=_loader, is_left=True),
    ScreenColumn(name="CPU", width=5, importance=4, show=lambda cell: _percent(cell.rank.cpu_share)),
    ScreenColumn(name="off", width=5, importance=3, show=_off),
    ScreenColumn(name="remote", width=6, importance=5, show=_remote),
    ScreenColumn(name="GPU", width=4, importance=6, show=lambda cell: _percent(cell.rank.load.busy_share)),
    ScreenColumn(name="GiB", width=7, importance=7, show=lambda cell: Text(gpu_memory(cell.rank))),
    ScreenColumn(name="W", width=4, importance=10, show=_power),
    ScreenColumn(name="H2D", width=5, importance=11, show=lambda cell: Text(number(cell.rank.load.h2d_gbps))),
    ScreenColumn(name="data", width=5, importance=14, show=_data),
    ScreenColumn(name="pinned", width=6, importance=13, show=_pinned),
    ScreenColumn(
        name="node", width=4, importance=15, show=lambda cell: Text(known(cell.rank.plan.node, unknown="-")), stays=True
    ),
    ScreenColumn(
        name="CPUs", width=12, importance=16, show=lambda cell: Text(str(cell.rank.plan.cpus)), is_left=True, stays=True
    ),
    ScreenColumn(
        name="device",
        width=11,
        importance=17,
        show=lambda cell: Text(gpu_cell(cell.rank.plan.gpu)),
        is_left=True,
        stays=True,
    ),
    ScreenColumn(name="pid", width=7, importance=18, show=lambda cell: Text(str(cell.rank.pid)), stays=True),
)
"""From left to right. `step` is the time from batch to batch; the rest is explained below the rows."""
