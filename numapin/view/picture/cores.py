"""Cores and their L3 groups as boxes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text
from numapin.view.words import rank_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Core
    from numapin.view.marks import Marks, Ranks
    from numapin.view.picture.boxes import CellSize
    from numapin.view.picture.drawing import Drawing

_CELL_GAP: Final = 4
_BAND: Final = 5


def core_groups(drawing: Drawing, cores: Sequence[Core], *, spanned: bool = False) -> list[Box]:
    """Return the L3 groups, the cores of unknown L3 last, in columns that fill the width.

    With `spanned`, the L3 cache is drawn around the node, and its cores are a group without a cache. Ranks are named
    where they differ: on groups of different ranks, and on cores if the cores of a group differ.
    """
    groups = [list(cores)] if spanned and cores else _l3_groups(cores)
    if not groups:
        return []
    scale = drawing.scale
    num_columns = _num_columns(max(map(len, groups)), scale, drawing.width)
    least = num_columns * (scale.width + _CELL_GAP) - _CELL_GAP + 2 * PAD
    inner = columns(len(groups), least, width=drawing.width, most=drawing.width) - 2 * PAD
    core_width = min(2 * scale.width, (inner + _CELL_GAP) / num_columns - _CELL_GAP)
    one = replace(drawing, width=inner, scale=replace(scale, width=core_width))
    distinct_ranks = {drawing.marks.on(_cpus(group)) for group in groups}
    return [_group(one, group, spanned=spanned, named=len(distinct_ranks) > 1) for group in groups]


def _l3_groups(cores: Sequence[Core]) -> list[list[Core]]:
    groups: dict[int | None, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.l3, []).append(core)
    unknown = groups.pop(None, [])
    known = [group for _, group in sorted(groups.items(), key=itemgetter(0))]
    return [*known, unknown] if unknown else known


def _num_columns(num_cores: int, scale: CellSize, width: float) -> int:
    """Return the number of cores side by side: up to four, else half of them, at most what fits."""
    most = max(1, int((width - 2 * PAD + _CELL_GAP) // (scale.width + _CELL_GAP)))
    return min(most, max(4, -(-num_cores // 2)), num_cores)


def _group(drawing: Drawing, cores: list[Core], *, spanned: bool, named: bool) -> Box:
    marks, inner = drawing.marks, drawing.width
    ranks = marks.on(_cpus(cores))
    mixed = any(marks.on(core.cpus) != ranks for core in cores)
    kind, name = (BoxKind.CORES, "cores") if spanned or cores[0].l3 is None else (BoxKind.L3, "L3")
    cpus = str(_cpus(cores))
    rank_heading = [Heading(facts=rank_names(ranks))] if named and not mixed else []
    band = [] if mixed else share_band(ranks, width=inner)
    return frame(
        kind,
        [band, [_core(drawing, core, named=mixed) for core in cores]],
        headings=[Heading(name=name, facts=cpus), *rank_heading],
        width=inner,
        gap=_CELL_GAP,
        least=inner + 2 * PAD,
        title=title_text(f"{name}: {counted(len(cores), 'core')}, CPUs {cpus}", rank_names(ranks)),
    )


def _cpus(cores: Sequence[Core]) -> CpuSet:
    return CpuSet(cpu for core in cores for cpu in core.cpus)


def _core(drawing: Drawing, core: Core, *, named: bool) -> Box:
    """Return the core, with one row per CPU; if `named`, the first row has the names of its ranks."""
    marks, scale = drawing.marks, drawing.scale
    ranks = marks.on(core.cpus)
    banned = core.cpus - drawing.topology.allowed.cpus
    rows = [_cpu_row(cpu, marks, scale, off=cpu in banned) for cpu in sorted(core.cpus)]
    if named:
        rows = [_name_row(ranks, scale), *rows, *share_band(ranks, width=scale.width)]
    not_allowed = f"not allowed: CPUs {banned}" if banned else ""
    return Box(
        kind=BoxKind.CORE,
        width=scale.width,
        height=sum(row.height for row in rows),
        children=tuple(row.placed(x=row.x, y=y, height=row.height) for row, y in zip(rows, _tops(rows), strict=True)),
        title=title_text(f"core {core.id}: CPUs {core.cpus}", rank_names(ranks), not_allowed),
        key=f"core{core.id}",
    )


def _tops(rows: Sequence[Box]) -> list[float]:
    """Return the upper edge of each row."""
    return list(accumulate((row.height for row in rows), initial=0))[:-1]


def share_band(ranks: Ranks, *, width: float) -> list[Box]:
    """Return a band with the color of each rank that shares the cores below or above it; none for a single rank."""
    if len(ranks) < 2:
        return []
    one = width / len(ranks)
    parts = tuple(
        Box(kind=BoxKind.SHARE, width=one, height=_BAND, x=one * place, ranks=(rank,))
        for place, rank in enumerate(ranks)
    )
    title = title_text(f"shared by {rank_names(ranks)}")
    return [Box(kind=BoxKind.PLAIN, width=width, height=_BAND, children=parts, title=title)]


def _name_row(ranks: Ranks, scale: CellSize) -> Box:
    return cell(BoxKind.PLAIN, scale, f"r{cpu_set.render(ranks)}" if ranks else "", ink=Ink.STRONG)


def _cpu_row(cpu: int, marks: Marks, scale: CellSize, *, off: bool) -> Box:
    ranks = marks.cpus.get(cpu, ())
    is_idle = bool(marks.cpus) and not ranks and not off
    row = cell(BoxKind.CPU, scale, str(cpu), ink=_ink(ranks, idle=is_idle))
    return replace(row, key=f"cpu{cpu}", ranks=ranks, off=off, idle=is_idle)


def _ink(ranks: Ranks, *, idle: bool) -> Ink:
    if len(ranks) == 1:
        return Ink.ON_RANK
    return Ink.DIM if idle else Ink.PLAIN
