"""The state of a running job as a table. Pure.

Comes in: a `Top`. Goes out: one row per rank, a legend, and the machine's swapping, in 80 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.text import Text

from numapin.view.plan_table import gpu_cell
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from numapin.observe.top import Top, TopRank
    from numapin.plan.model import RankPlan

_HEADINGS: Final = ("rank", "GPU", "node", "CPUs", "off", "remote", "pinned", "wait", "H2D", "busy")
_LEFT: Final = ("GPU", "CPUs")
_CPUS_WIDTH: Final = 12
_MIB: Final = 2**20
_LEGEND: Final = (
    "off: threads that may leave the CPUs / all; remote: share of pages; pinned: MiB",
    "wait: share of a step, for numapin.DataLoader; H2D: GB/s to the GPU; busy: GPU",
)


def top_table(top: Top) -> RenderableType:
    """Return the table, the legend and the swap line; ranks that are gone or off their CPUs are red.

    The table is plain text: as a rich table, eight ranks take 8 ms of CPU time, too much for every second.
    """
    rows = [_HEADINGS, *map(_cells, top.ranks)]
    styles = ["bold", *map(_style, top.ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(_padded(row, widths), style) for row, style in zip(rows, styles, strict=True)]
    # In a group, because a console that prints a text alone drops its no_wrap.
    return Group(*lines, *(_line(line, "dim") for line in _LEGEND), _swap(top))


def _style(rank: TopRank) -> str:
    return "bold red" if rank.is_gone or rank.num_off_plan else ""


def _padded(row: Iterable[str], widths: Iterable[int]) -> str:
    cells = zip(_HEADINGS, row, widths, strict=True)
    return "  ".join(cell.ljust(width) if name in _LEFT else cell.rjust(width) for name, cell, width in cells).rstrip()


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _cells(rank: TopRank) -> tuple[str, ...]:
    if rank.is_gone:
        return (*_planned_cells(rank.plan), "gone", "", "", "", "", "")
    pinned_mib = None if rank.pinned_bytes is None else rank.pinned_bytes / _MIB
    return (
        *_planned_cells(rank.plan),
        f"{rank.num_off_plan}/{rank.num_threads}",
        known(rank.remote_share, ".1%", unknown="-"),
        known(pinned_mib, ".0f", unknown="-"),
        known(rank.wait_share, ".0%", unknown="-"),
        known(rank.load.h2d_gbps, ".1f", unknown="-"),
        known(rank.load.busy_share, ".0%", unknown="-"),
    )


def _planned_cells(plan: RankPlan) -> tuple[str, ...]:
    cpus = str(plan.cpus)
    if len(cpus) > _CPUS_WIDTH:
        cpus = f"{cpus[: _CPUS_WIDTH - 1]}…"
    return str(plan.local_rank), gpu_cell(plan.gpu), known(plan.node, unknown="-"), cpus


def _swap(top: Top) -> Text:
    if top.swap_per_s is None:
        return _line("swap: unknown", "")
    swapped_in, swapped_out = top.swap_per_s
    style = "bold yellow" if swapped_in or swapped_out else "dim"
    return _line(f"swap: {swapped_in:.0f} pages/s in, {swapped_out:.0f} out (whole machine)", style)
