"""The legend of colors and signs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.base.cpu_set import CpuSet
from numapin.base.plural import counted
from numapin.view.picture.boxes import Box, BoxKind, CellSize, Heading, Ink, cell, frame, paragraph
from numapin.view.picture.cores import share_band
from numapin.view.picture.devices import chip
from numapin.view.picture.text import title_text
from numapin.view.words import known, policy, ranks_of

if TYPE_CHECKING:
    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Topology
    from numapin.view.marks import Marks, Ranks

_ENTRY: Final = 338
_SIZE: Final = 10
_SAMPLE: Final = 32
_CELL: Final = CellSize(width=_SAMPLE, height=14, font=9)


def legend(topology: Topology, plan: Plan | None, marks: Marks, *, width: float, named_cores: bool) -> Box:
    """Return the panel, at most `width` wide; `named_cores`: cores name their ranks."""
    entry = min(_ENTRY, width)
    ranks = [_entry(chip(rank.local_rank), rank_in_words(rank), entry) for rank in ranks_of(plan)]
    signs = _signs(topology, plan, marks, named_cores=named_cores)
    return frame(
        BoxKind.PANEL,
        [ranks, [_entry(sign, text, entry) for sign, text in signs]],
        headings=[Heading(name="Legend", size=12)],
        width=width,
        gap=4,
    )


def rank_in_words(rank: RankPlan) -> str:
    """Return a rank's binding in short; a star marks a rank that is not exact."""
    gpu = f"gpu{rank.gpu.index}" if rank.gpu else "no GPU"
    node = f"node {known(rank.node, unknown='unknown')}"
    star = "" if rank.exact else " *"
    return f"{gpu}, {node}, {counted(len(rank.cpus), 'CPU')}, memory {policy(rank)}{star}"


def _signs(topology: Topology, plan: Plan | None, marks: Marks, *, named_cores: bool) -> list[tuple[Box, str]]:
    """Return each sign that the picture has, with its meaning."""
    used = Box(kind=BoxKind.MEMORY, width=_SAMPLE, height=10, children=(Box(kind=BoxKind.USED, width=12, height=10),))
    shows_free_memory = any(node.free_bytes is not None for node in topology.nodes)
    signs = (
        (True, _cpu(), "hardware thread (CPU number) in its core"),
        (shows_free_memory, used, "memory: used and free"),
        (topology.cpus - topology.allowed.cpus, replace(_cpu(), off=True), "not allowed to this process"),
        (named_cores, cell(BoxKind.PLAIN, _CELL, "r0", ink=Ink.STRONG), "rank 0 has this core"),
        (plan and not plan.exact, _star(), "not exact: see numapin plan"),
    )
    return [*((sign, text) for is_used, sign, text in signs if is_used), *_cpu_signs(topology, plan, marks)]


def _cpu_signs(topology: Topology, plan: Plan | None, marks: Marks) -> list[tuple[Box, str]]:
    """Return the signs for CPUs of several ranks and of none."""
    shared = _shared_sign(marks)
    idle = (topology.cpus & topology.allowed.cpus) - CpuSet(marks.cpus)
    if plan is None or not idle or not marks.cpus:
        return shared
    return [*shared, (replace(_cpu(ink=Ink.DIM), idle=True), f"idle: no rank may use it ({counted(len(idle), 'CPU')})")]


def _shared_sign(marks: Marks) -> list[tuple[Box, str]]:
    sharers = next((ranks for ranks in marks.cpus.values() if len(ranks) > 1), None)
    return [] if sharers is None else [(_shared(sharers), "shared by the ranks whose colors are in the band")]


def _cpu(*, ink: Ink = Ink.PLAIN) -> Box:
    return cell(BoxKind.CPU, _CELL, "0", ink=ink)


def _star() -> Box:
    return cell(BoxKind.PLAIN, CellSize(width=_SAMPLE, height=16, font=12), "*")


def _shared(ranks: Ranks) -> Box:
    """Return a CPU below the band of two of its ranks."""
    (band,) = share_band(ranks[:2], width=_SAMPLE)
    cpu = replace(cell(BoxKind.CPU, replace(_CELL, height=10), ""), y=6)
    return Box(kind=BoxKind.PLAIN, width=_SAMPLE, height=16, children=(band, cpu))


def _entry(sign: Box, text: str, width: float) -> Box:
    x = max(sign.width, _SAMPLE) + 8
    words = paragraph(text, width=width, size=_SIZE, x=x)
    placed = replace(sign, y=(16 - sign.height) / 2)
    return replace(words, width=width, children=(placed,), title=title_text(text))
