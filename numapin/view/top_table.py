"""A running job as a table that fits a width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from rich.console import Group
from rich.text import Text

from numapin.base.text import counted, not_none
from numapin.observe.top import LoopPace
from numapin.view.machine import known
from numapin.view.plan_table import gpu_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

    from numapin.observe.top import Top, TopRank

_MOST_CHARS: Final = 12  # of a list of CPUs
_MANY_REMOTE: Final = 0.05  # more is red, as in `numapin verify`
_LEGEND: Final = (
    "off: threads off their CPUs / all; remote: share of pages; pinned: GiB",
    "steps/s, wait: of loops over DataLoaders; H2D: GB/s to the GPU; busy: GPU",
)


class _TopColumn(NamedTuple):
    """A column; where the width is too small, those of the highest `order` are left out first."""

    name: str
    order: int
    cell: Callable[[TopRank, LoopPace], str]
    is_planned: bool = False  # whether a rank that is gone has it
    is_left: bool = False


def _cpus(rank: TopRank) -> str:
    cpus = str(rank.plan.cpus)
    return cpus if len(cpus) <= _MOST_CHARS else f"{cpus[: _MOST_CHARS - 1]}…"


def _rate(value: float | None) -> str:
    """Return a rate with three digits or so, or a dash if it is unknown."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _gib(rank: TopRank) -> str:
    used, size = rank.load.used_bytes, rank.load.memory_bytes
    return "-" if used is None or size is None else f"{used / 2**30:.1f}/{size / 2**30:.0f}"


_COLUMNS: Final = (
    _TopColumn("rank", 0, lambda rank, _: str(rank.plan.local_rank), is_planned=True),
    _TopColumn("GPU", 9, lambda rank, _: gpu_cell(rank.plan.gpu), is_planned=True, is_left=True),
    _TopColumn("node", 10, lambda rank, _: known(rank.plan.node, unknown="-"), is_planned=True),
    _TopColumn("CPUs", 8, lambda rank, _: _cpus(rank), is_planned=True, is_left=True),
    _TopColumn("off", 1, lambda rank, _: f"{rank.num_off_plan}/{rank.num_threads}"),
    _TopColumn("remote", 2, lambda rank, _: known(rank.remote_share, ".1%", unknown="-")),
    _TopColumn("pinned", 11, lambda rank, _: "-" if rank.pinned_bytes is None else f"{rank.pinned_bytes / 2**30:.1f}"),
    _TopColumn("steps/s", 3, lambda _, pace: _rate(pace.steps_per_s)),
    _TopColumn("wait", 4, lambda _, pace: known(pace.wait_share, ".0%", unknown="-")),
    _TopColumn("CPU", 6, lambda rank, _: known(rank.cpu_share, ".0%", unknown="-")),
    _TopColumn("H2D", 7, lambda rank, _: known(rank.load.h2d_gbps, ".1f", unknown="-")),
    _TopColumn("busy", 5, lambda rank, _: known(rank.load.busy_share, ".0%", unknown="-")),
    _TopColumn("GiB", 12, lambda rank, _: _gib(rank)),
    _TopColumn("W", 13, lambda rank, _: known(rank.load.power_w, ".0f", unknown="-")),
    _TopColumn("pid", 14, lambda rank, _: str(rank.pid), is_planned=True),
)


def top_table(top: Top, paces: Mapping[int, LoopPace], *, width: int) -> RenderableType:
    """Return the job in lines of at most this width; ranks that are gone or off their plan are red.

    The table is plain text: as a rich table, eight ranks take 8 ms of CPU time, too much for every second.
    """
    rows = []
    for rank in top.ranks:
        pace = paces.get(rank.plan.local_rank, LoopPace(wait_share=rank.wait_share))
        cells = {
            column.name: "" if rank.is_gone and not column.is_planned else column.cell(rank, pace)
            for column in _COLUMNS
        }
        rows.append(cells | {"off": "gone"} if rank.is_gone else cells)
    widths = {column.name: max([len(column.name), *(len(row[column.name]) for row in rows)]) for column in _COLUMNS}
    left, chosen = width + 2, set()
    for column in sorted(_COLUMNS, key=lambda column: column.order):
        left -= widths[column.name] + 2
        if left < 0:
            break  # a less important column must not take the place of a more important one
        chosen.add(column.name)
    columns = [column for column in _COLUMNS if column.name in chosen]
    lines = []
    for cells in ({column.name: column.name for column in columns}, *rows):
        texts = (
            cells[column.name].ljust(widths[column.name])
            if column.is_left
            else cells[column.name].rjust(widths[column.name])
            for column in columns
        )
        lines.append("  ".join(texts).rstrip())
    are_red = (rank.is_gone or rank.num_off_plan or (rank.remote_share or 0.0) > _MANY_REMOTE for rank in top.ranks)
    styles = ["bold", *("bold red" if is_red else "" for is_red in are_red)]
    return Group(
        *_title(top),
        *(_line(line, style) for line, style in zip(lines, styles, strict=True)),
        *(_line(line, "dim") for line in _LEGEND),
    )


def _title(top: Top) -> tuple[Text, Text]:
    up_s = int(max((rank.up_s for rank in top.ranks if rank.up_s is not None), default=0))
    age = f"{up_s // 3600}:{up_s // 60 % 60:02}:{up_s % 60:02}" if up_s else "-"
    num_gone = sum(rank.is_gone for rank in top.ranks)
    gone = f", {num_gone} gone" if num_gone else ""
    title = _line(f"{top.run}  up {age}  {counted(len(top.ranks), 'rank')}{gone}", "bold red" if num_gone else "bold")
    cpu = sum(rank.cpu_share or 0.0 for rank in top.ranks)
    powers = {rank.plan.gpu.uuid: rank.load.power_w for rank in top.ranks if rank.plan.gpu}  # ranks may share a GPU
    known_w = not_none(powers.values())
    totals = f"CPU {cpu:.0%}  GPU power {sum(known_w):.0f} W  " if known_w else f"CPU {cpu:.0%}  "
    if top.swap_per_s is None:
        return title, _line(f"{totals}swap: unknown", "")
    swapped_in, swapped_out = top.swap_per_s
    swap = f"swap: {swapped_in:.0f} pages/s in, {swapped_out:.0f} out (whole machine)"
    return title, _line(f"{totals}{swap}", "bold yellow" if swapped_in or swapped_out else "")


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
