"""What a job does now, as a table. Pure.

Comes in: a `Top`. Goes out: a row a rank, a legend, and what the machine swaps; 80 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.text import Text

from numapin.view.plan_table import gpu_cell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from numapin.observe.top import Top, TopRank

_HEADINGS: Final = ("rank", "GPU", "node", "CPUs", "off", "remote", "pinned", "wait", "H2D", "busy")
_LEFT: Final = ("GPU", "CPUs")
_CPUS_WIDTH: Final = 12
_LEGEND: Final = (
    "off: threads that may leave the CPUs / all; remote: of its pages; pinned: MiB",
    "wait: of a step, for the next batch of numapin.DataLoader; H2D: GB/s; busy: GPU",
)


def top_table(top: Top) -> RenderableType:
    """Return the table, the legend and the swap line; ranks that are gone or off their CPUs are marked.

    Texts and no rich table: eight ranks take 8 ms of CPU as a table, which is too much every second.
    """
    rows = [_HEADINGS, *(_cells(rank) for rank in top.ranks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[Text] = []
    styles = ["bold", *("bold red" if rank.is_gone or rank.num_off_plan else "" for rank in top.ranks)]
    for row, style in zip(rows, styles, strict=True):
        cells = zip(_HEADINGS, row, widths, strict=True)
        line = "  ".join(cell.ljust(width) if name in _LEFT else cell.rjust(width) for name, cell, width in cells)
        lines.append(_line(line.rstrip(), style))
    # In a group, because a console that prints a text alone drops its no_wrap.
    return Group(*lines, *(_line(line, "dim") for line in _LEGEND), _swap(top))


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _cells(rank: TopRank) -> tuple[str, ...]:
    node = "-" if rank.plan.node is None else str(rank.plan.node)
    cpus = str(rank.plan.cpus)
    cpus = cpus if len(cpus) <= _CPUS_WIDTH else f"{cpus[: _CPUS_WIDTH - 1]}…"
    head = (str(rank.plan.local_rank), gpu_cell(rank.plan.gpu), node, cpus)
    if rank.is_gone:
        return (*head, "gone", "", "", "", "", "")
    pinned, h2d = rank.pinned_bytes, rank.load.h2d_gbps
    return (
        *head,
        f"{rank.num_off_plan}/{rank.num_threads}",
        _percent(rank.remote_share, digits=1),
        "-" if pinned is None else f"{pinned / 2**20:.0f}",
        _percent(rank.wait_share),
        "-" if h2d is None else f"{h2d:.1f}",
        _percent(rank.load.busy_share),
    )


def _percent(share: float | None, *, digits: int = 0) -> str:
    return "-" if share is None else f"{share:.{digits}%}"


def _swap(top: Top) -> Text:
    if top.swap_per_s is None:
        return _line("swap: the kernel does not say", "")
    swapped_in, swapped_out = top.swap_per_s
    style = "bold yellow" if swapped_in or swapped_out else "dim"
    return _line(f"swap: {swapped_in:.0f} pages/s in, {swapped_out:.0f} out (whole machine)", style)
