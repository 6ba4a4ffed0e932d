"""The report of `numapin attach`: a row per process, what could not be done, and how to undo it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.attach.report import FUTURE_MEMORY
from numapin.base.formats import render_size
from numapin.base.text import counted
from numapin.view.machine import known
from numapin.view.plan_table import gpu_cell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from numapin.attach.report import Attached

_MOST_ROWS: Final = 512  # more take a second to draw
_LEFT: Final = ("process", "GPU", "CPUs before", "CPUs")
_HEADINGS: Final = ("rank", "pid", "process", "GPU", "node", "threads", "CPUs before", "CPUs", "elsewhere", "moved")
_LEGEND: Final = (
    "threads: changed / found; elsewhere: memory outside the planned nodes / all memory, without file pages"
)


def attach_table(done: Attached) -> RenderableType:
    """Return the table of processes, its legend, what could not be done, and the commands that undo it."""
    headings = _HEADINGS if done.migrate and not done.dry_run else _HEADINGS[:-1]
    rows = [(rank, process) for rank in done.ranks for process in rank.processes]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", overflow="fold")
    for rank, process in rows[:_MOST_ROWS]:
        plan, pages, is_first = rank.requested, process.pages, process.pid == rank.pid
        cells = (
            str(plan.local_rank),
            str(process.pid),
            process.name,
            gpu_cell(plan.gpu) if is_first else "",
            known(plan.node, unknown="-") if is_first else "",
            f"{process.changed}/{process.threads}",
            str(process.cpus_before),
            str(process.cpus),
            f"{render_size(pages.far_bytes)} / {render_size(sum(pages.before.values()))}" if pages else "?",
            render_size(pages.moved_bytes) if pages else "?",
        )
        table.add_row(*cells[: len(headings)])

    lines = [f"{counted(len(rows) - _MOST_ROWS, 'row')} more: numapin attach --json"] if len(rows) > _MOST_ROWS else []
    with_gpu = [rank for rank in done.ranks if rank.requested.gpu is not None]
    lines += [f"rank {rank.requested.local_rank}: GPU known by: {rank.gpu_source}" for rank in with_gpu]
    for rank in done.ranks:
        name = f"rank {rank.requested.local_rank}"
        if rank.problem is not None:
            lines.append(f"{name}: process {rank.pid} was not bound: {rank.problem}")
        elif not rank.requested.exact:
            lines.append(f"{name}: the plan is not exact: {rank.requested.reason}")
        for process in rank.processes:
            lines += [f"{name}: process {process.pid}: {text}" for text in process.shortfalls]
        narrower = sum(process.narrower for process in rank.processes)
        if narrower:
            left = f"{counted(narrower, 'thread')} left on fewer CPUs than planned; --widen binds them to all"
            lines.append(f"{name}: {left}")
    lines.append(f"memory: {FUTURE_MEMORY}")
    if done.interrupted:
        lines.append("interrupted: the table shows what was done so far")
    if done.dry_run:
        lines.append("dry run: nothing was changed")
    if done.undo:
        lines.append("undo with (pages stay where they are; processes that start later keep the new CPUs):")
    undo = [Text(f"  {command}", overflow="ignore", no_wrap=True) for command in done.undo]
    return Group(table, Text(_LEGEND, style="dim"), *map(Text, lines), *undo)
