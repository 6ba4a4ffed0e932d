"""A running job on a terminal's screen. Pure.

Comes in: a `Top`, its `History`, a `TopView`, and the size of the screen. Goes out: at most as many lines as fit, none
of them wider than the screen.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from rich.text import Text

from numapin.base.plural import counted
from numapin.base.printable import printable
from numapin.base.sizes import render
from numapin.view.gauges import COMPUTE_STYLE, COPY_STYLE, WAIT_STYLE, Glyphs
from numapin.view.plan_table import gpu_cell
from numapin.view.top_columns import COLUMNS, GAP, RED, fitting, gpu_memory, number
from numapin.view.top_view import TopView, ordered
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numapin.observe.history import History
    from numapin.observe.top import Top, TopRank
    from numapin.view.top_columns import ScreenColumn

_SELECTED: Final = ">"
_LEGEND: Final = (
    "steps/s, wait: of numapin.DataLoader's loop, last 10 intervals; off: threads that may leave the CPUs / all",
    "remote: share of pages; CPU: 100% is one CPU; GPU: busy; GiB: GPU memory; H2D, data: GB/s; pinned: GiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopScreen:
    """All that a screen shows.

    Attributes:
        top: The job now.
        history: Its recent past.
        view: The choices of the person who looks.
        glyphs: The characters to draw with.
    """

    top: Top
    history: History
    view: TopView
    glyphs: Glyphs

    @property
    def rows(self) -> tuple[TopRank, ...]:
        """The ranks from top to bottom."""
        return ordered(self.top.ranks, self.history, self.view.order)

    def lines(self, *, width: int, height: int) -> list[Text]:
        """Return the lines of a screen of this size."""
        head, foot = list(self._head()), list(self._foot(width))
        columns = fitting(COLUMNS, width)
        below = self._details() if self.view.shows_details else []
        num_rows = max(height - len(head) - len(foot) - 1, 1)
        below = below[: max(num_rows - 1, 0)]  # one rank is shown in any case
        rows = list(self._rows(columns, max(num_rows - len(below), 1)))
        heading = Text("  ").join(column.heading(self.glyphs) for column in columns)
        heading.stylize("bold")
        lines = [*head, heading, *rows, *below]
        lines += [Text("")] * (height - len(lines) - len(foot))
        return [self._cut(line, width) for line in [*lines, *foot][:height]]

    def final(self, *, width: int) -> list[Text]:
        """Return the lines that stay when the screen is left: the head and all ranks."""
        columns = fitting(COLUMNS, width)
        heading = Text("  ").join(column.heading(self.glyphs) for column in columns)
        lines = [*self._head(), heading, *self._rows(columns, len(self.top.ranks))]
        return [self._cut(line, width) for line in lines]

    def _head(self) -> Iterator[Text]:
        ranks = self.top.ranks
        up_s = max((rank.up_s for rank in ranks if rank.up_s is not None), default=None)
        num_gone = sum(rank.is_gone for rank in ranks)
        title = Text(f"numapin top: {printable(self.top.run)}", style="bold")
        title.append(f"  up {known_time(up_s)}  {counted(len(ranks), 'rank')}", style="not bold")
        if num_gone:
            title.append(f", {num_gone} gone", style=RED)
        if self.view.is_paused:
            title.append("  PAUSED", style="bold yellow")
        yield title
        yield self._totals()

    def _totals(self) -> Text:
        """Return the job's totals, and the machine's swapping."""
        ranks = self.top.ranks
        cpu, power = _sum(rank.cpu_share for rank in ranks), _sum(_power_of(ranks).values())
        text = Text(f"CPU {known(cpu, '.0%', unknown='-')}  GPU power {known(power, '.0f', unknown='-')} W  ")
        if self.top.swap_per_s is None:
            return text.append("swap: unknown")
        swapped_in, swapped_out = self.top.swap_per_s
        style = "bold yellow" if swapped_in or swapped_out else ""
        return text.append(f"swap: {swapped_in:.0f} pages/s in, {swapped_out:.0f} out (whole machine)", style=style)

    def _foot(self, width: int) -> Iterator[Text]:
        bars = Text(f"step: {self.glyphs.compute} compute ", style=COMPUTE_STYLE)
        bars.append(f" {self.glyphs.copy} copy to the GPU meanwhile ", style=COPY_STYLE)
        bars.append(f" {self.glyphs.wait} wait for a batch", style=WAIT_STYLE)
        yield bars
        if width >= max(map(len, _LEGEND)):
            yield from (Text(line, style="dim") for line in _LEGEND)
        yield Text(f"q quit  s sort by: {self.view.order.value}  p pause  up/down select  d details", style="dim")

    def _rows(self, columns: Sequence[ScreenColumn], num: int) -> Iterator[Text]:
        """Yield the rows that fit, the selected one among them, and how many do not."""
        ranks = self.rows
        if len(ranks) <= num:
            yield from (self._row(rank, columns) for rank in ranks)
            return
        num_shown = max(num - 1, 1)
        at = next((i for i, rank in enumerate(ranks) if rank.plan.local_rank == self.view.selected), 0)
        first = min(max(at - num_shown + 1, 0), len(ranks) - num_shown)
        yield from (self._row(rank, columns) for rank in islice(ranks, first, first + num_shown))
        if num > 1:
            yield Text(f"{counted(len(ranks) - num_shown, 'more rank')}: up and down move", style="dim")

    def _row(self, rank: TopRank, columns: Sequence[ScreenColumn]) -> Text:
        row = Text(" " * GAP).join(self._cells(rank, columns))
        if rank.is_gone:
            row = Text(row.plain.rstrip(), style=RED)
        if rank.plan.local_rank != self.view.selected:
            return row
        marked = Text(_SELECTED, style=row.style)
        marked.append_text(row[len(_SELECTED) :])  # the first column is aligned to the right
        marked.stylize("bold")
        return marked

    def _cells(self, rank: TopRank, columns: Sequence[ScreenColumn]) -> Iterator[Text]:
        """Yield the cells of a rank; of one that is gone, only its place in the plan."""
        pace = self.history.pace(rank.plan.local_rank)
        for column in columns:
            if rank.is_gone and not column.stays:
                yield Text(("gone" if column is columns[1] else "").ljust(column.width))  # where the bar was
            else:
                yield column.cell(rank, pace, self.glyphs)

    def _details(self) -> list[Text]:
        """Return the lines on the selected rank."""
        found = [rank for rank in self.top.ranks if rank.plan.local_rank == self.view.selected]
        if not found:
            return []
        pairs = _facts(found[0], self.history)
        title = Text(f"rank {found[0].plan.local_rank}", style="bold")
        return [Text(""), title, *(Text(f"{name:<10}{printable(value)}") for name, value in pairs)]

    def _cut(self, line: Text, width: int) -> Text:
        if line.cell_len > width:
            line.truncate(max(width - 1, 0))
            line.append(self.glyphs.ellipsis[:width])
        return line


def _facts(rank: TopRank, history: History) -> list[tuple[str, str]]:
    plan, load, pace = rank.plan, rank.load, history.pace(rank.plan.local_rank)
    pinned = "-" if rank.pinned_bytes is None else render(rank.pinned_bytes)
    steps = "-" if rank.loop is None or not rank.loop.num_steps else f"{rank.loop.num_steps:,}"
    return [
        ("process", f"{rank.pid}, up {known_time(rank.up_s)}{', gone' if rank.is_gone else ''}"),
        ("GPU", f"{gpu_cell(plan.gpu)} {known(plan.gpu.uuid if plan.gpu else None)}".strip()),
        (
            "GPU load",
            f"{known(load.busy_share, '.0%', unknown='-')} busy, {gpu_memory(rank)} GiB, "
            f"{known(load.power_w, '.0f', unknown='-')} W, {number(load.h2d_gbps)} GB/s received",
        ),
        (
            "CPUs",
            f"{plan.cpus} (node {known(plan.node, unknown='-')}); {rank.num_off_plan} of "
            f"{counted(rank.num_threads, 'thread')} may leave them",
        ),
        (
            "memory",
            f"{plan.memory.value} {plan.nodes}; {known(rank.remote_share, '.1%', unknown='-')} of the pages on "
            f"other nodes; {pinned} pinned",
        ),
        (
            "loader",
            f"{pace.state.value}; {steps} steps, {number(pace.steps_per_s)} steps/s, "
            f"{known(pace.wait_share, '.0%', unknown='-')} waiting",
        ),
        ("plan", plan.reason),
    ]


def _power_of(ranks: Sequence[TopRank]) -> dict[object, float | None]:
    """Return the power of each GPU once: ranks may share one."""
    return {rank.plan.gpu and rank.plan.gpu.uuid: rank.load.power_w for rank in ranks}


def _sum(values: Iterable[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return sum(known_values) if known_values else None


def known_time(seconds: float | None) -> str:
    """Return a duration as 1:02:03, or with days; a dash if it is unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}d ' if days else ''}{hours}:{minutes:02}:{rest:02}"
