"""What `numapin attach` did, as a table. Pure.

Comes in: `Attached` or `Restored`. Goes out: one row per process, then what could not be done, and how to undo it.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from numapin.attach.changes import FUTURE_MEMORY
from numapin.base.plural import counted
from numapin.base.sizes import render
from numapin.view.plan_table import gpu_cell
from numapin.view.words import known

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from numapin.attach.changes import Attached, AttachedRank, BoundProcess, ProcessPages, Restored, RestoredProcess

_MOST: Final = 512  # rows: more take a second to draw
_LEFT: Final = ("process", "GPU", "CPUs before", "CPUs")
_HEADINGS: Final = ("rank", "pid", "process", "GPU", "node", "threads", "CPUs before", "CPUs", "elsewhere", "moved")
_LEGEND: Final = (
    "threads: changed / found; elsewhere: memory outside the planned nodes / all memory, without file pages"
)


def attach_table(done: Attached, *, place: str | None = None) -> RenderableType:
    """Return the table of processes, its legend, what could not be done, and the next commands.

    `place` is the temporary directory that `--restore` has to be given. None: it looks there anyway.
    """
    has_moved = done.migrate and not done.dry_run
    rows = [(rank, process) for rank in done.ranks for process in rank.processes]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in _HEADINGS if has_moved else _HEADINGS[:-1]:
        table.add_column(heading, justify="left" if heading in _LEFT else "right", overflow="fold")
    for rank, process in rows[:_MOST]:
        cells = _cells(rank, process)
        table.add_row(*(cells if has_moved else cells[:-1]))
    left = [f"{counted(len(rows) - _MOST, 'row')} more: numapin attach --json"] if len(rows) > _MOST else []
    return Group(table, Text(_LEGEND, style="dim"), *map(Text, [*left, *_lines(done, place)]))


def restore_table(done: Restored) -> RenderableType:
    """Return a line per process, and what stays as it is."""
    lines = [line for process in done.processes for line in _restored(process, dry_run=done.dry_run)]
    return Group(*map(Text, [*lines, "pages stay where they are; new ones go to the node that first touches them"]))


def _cells(rank: AttachedRank, process: BoundProcess) -> tuple[str, ...]:
    """Return the cells of a process, one for each of the headings."""
    is_first = process.pid == rank.pid
    plan = rank.requested
    return (
        str(plan.local_rank),
        str(process.pid),
        process.name,
        gpu_cell(plan.gpu) if is_first else "",
        known(plan.node, unknown="-") if is_first else "",
        f"{process.changed}/{process.threads}",
        str(process.cpus_before),
        str(process.cpus),
        *_memory_cells(process.pages),
    )


def _memory_cells(pages: ProcessPages | None) -> tuple[str, str]:
    """Return the memory elsewhere, of all, and the part that was moved."""
    if pages is None:
        return "?", "?"
    return f"{render(pages.far_bytes)} / {render(sum(pages.before.values()))}", render(pages.moved_bytes)


def _lines(done: Attached, place: str | None) -> Iterator[str]:
    with_gpu = [rank for rank in done.ranks if rank.requested.gpu is not None]
    yield from (f"rank {rank.requested.local_rank}: GPU known by: {rank.gpu_source}" for rank in with_gpu)
    for rank in done.ranks:
        yield from _problems(rank)
    yield f"memory: {FUTURE_MEMORY}"
    if done.interrupted:
        yield "interrupted: the table shows what was done so far"
    if done.dry_run:
        yield "dry run: nothing was changed"
    elif done.records and any(map(_has_changed, done.ranks)):
        pids = ",".join(str(rank.pid) for rank in done.ranks if rank.processes)
        variable = "" if place is None else f"TMPDIR={quote(place)} "
        yield f"undo with: {variable}numapin attach --restore --pid {pids}"


def _has_changed(rank: AttachedRank) -> bool:
    return any(process.changed for process in rank.processes)


def _problems(rank: AttachedRank) -> Iterator[str]:
    """Yield the deviations from the request."""
    number = rank.requested.local_rank
    if rank.problem is not None:
        yield f"rank {number}: process {rank.pid} was not bound: {rank.problem}"
    elif not rank.requested.exact:
        yield f"rank {number}: the plan is not exact: {rank.requested.reason}"
    for process in rank.processes:
        yield from (f"rank {number}: process {process.pid}: {text}" for text in process.shortfalls)
    narrower = sum(process.narrower for process in rank.processes)
    if narrower:
        hint = "; --widen binds them to all" if rank.requested.roles is None else ""
        yield f"rank {number}: {counted(narrower, 'thread')} left on fewer CPUs than planned{hint}"


def _restored(process: RestoredProcess, *, dry_run: bool) -> Iterator[str]:
    verb, whose = ("has", "its") if process.threads == 1 else ("have", "their")
    would = f"would get {whose} former CPUs" if dry_run else f"{verb} {whose} former CPUs again"
    since = f", {process.started_since} of them started since" if process.started_since else ""
    ended = f"; {process.ended} ended since" if process.ended else ""
    yield f"process {process.pid} ({process.name}): {counted(process.threads, 'thread')} {would}{since}{ended}"
    if process.left:
        yield f"  {counted(process.left, 'thread')} moved to other CPUs by the program since, and left there"
    yield from (f"  {text}" for text in process.shortfalls)
