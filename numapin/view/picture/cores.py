"""Cores and their L3 groups as boxes. Pure.

Comes in: the cores of a node and the ranks on their CPUs. Goes out: one frame an L3 group, in it one box a core, in it
one row a hardware thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.cpu_set import CpuSet
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, Ink, cell, columns, frame
from numapin.view.picture.text import title_text
from numapin.view.words import rank_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numapin.topology.model import Core, Topology
    from numapin.view.marks import Marks

_CELL_GAP: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a thread's row is drawn, and its text; 0 is no text."""

    width: float
    height: float
    font: float


def scale_of(num_cpus: int) -> Scale:
    """Return the scale for a machine: the more CPUs, the smaller; beyond 640 they are too small for text."""
    if num_cpus <= 64:
        return Scale(width=46, height=18, font=11)
    if num_cpus <= 640:
        return Scale(width=32, height=14, font=9)
    return Scale(width=14, height=6, font=0)


def core_groups(cores: Sequence[Core], topology: Topology, marks: Marks, scale: Scale, *, width: float) -> list[Box]:
    """Return the L3 groups, those of unknown L3 last, in columns that fill the width.

    Ranks are named where they differ: on groups of different ranks, on the cores of a group whose cores differ.
    """
    ids = sorted({core.l3 for core in cores}, key=lambda l3: (l3 is None, l3 or 0))
    groups = [(l3, [core for core in cores if core.l3 == l3]) for l3 in ids]
    if not groups:
        return []
    in_row = _in_row(max(len(group) for _, group in groups), scale, width)
    least = in_row * (scale.width + _CELL_GAP) - _CELL_GAP + 2 * PAD
    one = columns(len(groups), least, width=width, most=width)
    style = _Style(topology=topology, marks=marks, scale=scale, in_row=in_row, width=one)
    ranks = {tuple(marks.on(_cpus(group))) for _, group in groups}
    return [_group(style, l3, group, named=len(ranks) > 1) for l3, group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """What the groups of one node have in common: `in_row` cores side by side in a frame of that width."""

    topology: Topology
    marks: Marks
    scale: Scale
    in_row: int
    width: float


def _in_row(count: int, scale: Scale, width: float) -> int:
    """Return how many of a group's cores stand side by side: up to four, else two rows of them, or what fits."""
    most = max(1, int((width - 2 * PAD + _CELL_GAP) // (scale.width + _CELL_GAP)))
    return min(most, max(4, -(-count // 2)), count)


def _group(style: _Style, l3: int | None, cores: list[Core], *, named: bool) -> Box:
    marks, inner = style.marks, style.width - 2 * PAD
    ranks = marks.on(_cpus(cores))
    mixed = any(marks.on(core.cpus) != ranks for core in cores)
    name, cpus = "L3" if l3 is not None else "cores", str(_cpus(cores))
    one = min(2 * style.scale.width, (inner + _CELL_GAP) / style.in_row - _CELL_GAP)
    scale = replace(style.scale, width=one)
    return frame(
        BoxKind.L3,
        [[_core(core, style.topology, marks, scale, named=mixed) for core in cores]],
        headings=[Heading(name=name, facts=cpus), *([Heading(facts=rank_names(ranks))] if named and not mixed else [])],
        width=inner,
        gap=_CELL_GAP,
        least=style.width,
        title=title_text(f"{name}: {len(cores)} cores, CPUs {cpus}", rank_names(ranks)),
    )


def _cpus(cores: Sequence[Core]) -> CpuSet:
    return CpuSet(cpu for core in cores for cpu in core.cpus)


def _core(core: Core, topology: Topology, marks: Marks, scale: Scale, *, named: bool) -> Box:
    """Return the core; where its group's cores differ in their ranks it names its own."""
    ranks = marks.on(core.cpus)
    name = f"r{cpu_set.render(ranks)}" if ranks else ""
    rows = [cell(BoxKind.PLAIN, scale.width, scale.height, name, size=scale.font, ink=Ink.STRONG)] if named else []
    rows += [
        replace(
            cell(
                BoxKind.CPU, scale.width, scale.height, str(cpu), size=scale.font, ink=Ink.ON_RANK if on else Ink.PLAIN
            ),
            key=f"cpu{cpu}",
            ranks=on,
            off=cpu not in topology.allowed.cpus,
        )
        for cpu in sorted(core.cpus)
        for on in [marks.cpus.get(cpu, ())]
    ]
    banned = core.cpus - topology.allowed.cpus
    return Box(
        kind=BoxKind.CORE,
        width=scale.width,
        height=scale.height * len(rows),
        children=tuple(replace(row, y=scale.height * i) for i, row in enumerate(rows)),
        title=title_text(
            f"core {core.id}: CPUs {core.cpus}",
            rank_names(ranks),
            f"not allowed: CPUs {banned}" if banned else "",
        ),
        key=f"core{core.id}",
    )
