"""A plan as a table."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from numapin.view.machine import known, own_nic_name, policy, rank_names, short_pci, shortened

_MOST: Final = 512  # rows: more take a second to draw

_GAP: Final = 2  # columns between columns
_LEAST_CPUS: Final = 6  # characters of the CPUs in a line
_HEADINGS: Final = ("rank", "GPU", "node", "CPUs", "memory", "threads", "NIC")
_CPUS: Final = _HEADINGS.index("CPUs")
_LEFT: Final = ("GPU", "CPUs", "memory", "NIC")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Column

    from numapin.plan.model import GpuRef, Plan, RankPlan


class _PlanTable(Table):
    """A table of ranks whose CPUs are folded first where the width is small; other cells have whole words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich yields, with a width for the CPUs if the rest then fits."""
        cpus = self.columns[_CPUS]
        left = options.max_width - sum(_width(column) + _GAP for column in self.columns if column is not cpus)
        cpus.width = left if _LEAST_CPUS <= left < _width(cpus) else None
        yield from super().__rich_console__(console, options)


class _CpuList(Text):
    """A list of CPUs that is broken after commas."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:  # noqa: ANN401 - rich's own options
        """Return lines that fit; a number is broken only where it is wider than the column.

        A comma that would be alone in a line is left out.
        """
        broken = (line[:width] if line[width:] == "," else line for line in _broken(self.plain, width))
        lines = (Text(line).wrap(console, width, **options) for line in broken)
        return Lines(chain.from_iterable(lines))


def _broken(text: str, width: int) -> Iterator[str]:
    """Yield a list in lines of at most this width, if each number fits."""
    line = ""
    for part in re.findall(r"[^,]+,?", text):
        if line and len(line) + len(part) > width:
            yield line
            line = ""
        line += part
    yield line


def plan_table(plan: Plan) -> Table:
    """Return a table of rank, GPU, node, CPUs, memory and threads; a star marks ranks that are not exact.

    If the nearest NIC of any rank is known, there is a column of these.
    """
    num_ranks, legend = len(plan.ranks), []
    if not all(rank.exact for rank in plan.ranks[:_MOST]):
        legend.append("* not exact")
    if num_ranks > _MOST:
        legend.append(f"the first {_MOST} of {num_ranks} ranks; all of them: numapin plan --json")
    caption = "\n".join(legend) or None
    table = _PlanTable(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    headings = _HEADINGS if any(rank.nics for rank in plan.ranks) else _HEADINGS[:-1]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", overflow="fold")
    for rank in plan.ranks[:_MOST]:
        cells = (
            str(rank.local_rank) + ("" if rank.exact else "*"),
            gpu_cell(rank.gpu),
            known(rank.node, unknown="-"),
            _CpuList(str(rank.cpus)),
            policy(rank),
            str(rank.num_threads),
            own_nic_name(rank),
        )
        table.add_row(*cells[: len(headings)])
    return table


def _width(column: Column) -> int:
    """Return the width that no cell of a column is folded in."""
    return max(len(str(cell)) for cell in (column.header, *column.cells))


def explained_plan(plan: Plan) -> Group:
    """Return the table, and below it the reasons; ranks with the same reason share a line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    ranks_with: dict[tuple[str, ...], list[int]] = {}  # by the parts of their reasons
    for rank in plan.ranks[:_MOST]:
        ranks_with.setdefault(_parts(rank), []).append(rank.local_rank)
    if not ranks_with:
        return Group(plan_table(plan))
    # What holds for all ranks comes last, if each has more.
    common = [part for part in next(iter(ranks_with)) if all(part in own for own in ranks_with)]
    if len(ranks_with) == 1 or not all(set(own) - set(common) for own in ranks_with):
        common = []
    for own, ranks in ranks_with.items():
        reason = "; ".join(part for part in own if part not in common)
        table.add_row(Text(rank_names(ranks)), Text(shortened(reason)))
    if common:
        table.add_row(Text("all ranks"), Text(shortened("; ".join(common))))
    return Group(plan_table(plan), Text(""), table)


def _parts(rank: RankPlan) -> tuple[str, ...]:
    """Return the parts of a reason without the GPU's name, which the table has, so that ranks of a node share them."""
    reason, nic = rank.reason, f"NIC: {rank.nics_reason}" if rank.nics_reason else ""
    if rank.gpu is not None:
        pci = f" ({rank.gpu.pci})" if rank.gpu.pci else ""
        name = f"GPU {rank.gpu.index}{pci} "
        reason = f"its GPU {reason.removeprefix(name)}" if reason.startswith(name) else reason
    return (*filter(None, reason.split("; ")), *([nic] if nic else []))


def other_warnings(plan: Plan) -> list[str]:
    """Return the warnings that the reasons below the table do not have."""
    known = {part for rank in plan.ranks for part in rank.reason.split("; ")}
    return [
        text
        for text in plan.warnings
        if not (text.startswith("rank") and known.issuperset(text.partition(": ")[2].split("; ")))
    ]


def gpu_cell(gpu: GpuRef | None) -> str:
    """Return a GPU's index and its PCI address without the usual domain."""
    if gpu is None:
        return "-"
    return f"{gpu.index} {short_pci(gpu.pci)}" if gpu.pci else str(gpu.index)
