"""The legend of colors and signs. Pure.

Comes in: a `Topology`, and optionally a `Plan`. Goes out: a panel that explains the colors and signs in this picture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.view.picture.boxes import Box, BoxKind, CellSize, Heading, Ink, Label, cell, frame
from numapin.view.picture.devices import chip
from numapin.view.picture.text import fit, title_text
from numapin.view.words import known, policy, ranks_of

if TYPE_CHECKING:
    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Topology

_ENTRY: Final = 338
_SIZE: Final = 10
_SAMPLE: Final = 32


def legend(topology: Topology, plan: Plan | None, *, width: float, named_cores: bool) -> Box:
    """Return the panel, at most `width` wide; `named_cores`: cores name their ranks."""
    ranks = [_entry(chip(rank.local_rank), rank_in_words(rank)) for rank in ranks_of(plan)]
    return frame(
        BoxKind.PANEL,
        [ranks, _signs(topology, plan, named_cores=named_cores)],
        headings=[Heading(name="Legend", size=12)],
        width=width,
        gap=4,
    )


def rank_in_words(rank: RankPlan) -> str:
    """Return a rank's binding in short; a star marks a rank that gets less than requested."""
    gpu = f"gpu{rank.gpu.index}" if rank.gpu else "no GPU"
    node = f"node {known(rank.node, unknown='unknown')}"
    star = "" if rank.exact else " *"
    return f"{gpu}, {node}, {len(rank.cpus)} CPUs, memory {policy(rank)}{star}"


def _signs(topology: Topology, plan: Plan | None, *, named_cores: bool) -> list[Box]:
    """Return an entry for each sign that the picture has."""
    cpu = cell(BoxKind.CPU, CellSize(width=_SAMPLE, height=14, font=9), "0")
    name = cell(BoxKind.PLAIN, CellSize(width=_SAMPLE, height=14, font=9), "r0", ink=Ink.STRONG)
    star = cell(BoxKind.PLAIN, CellSize(width=_SAMPLE, height=16, font=12), "*")
    used = Box(kind=BoxKind.MEMORY, width=_SAMPLE, height=10, children=(Box(kind=BoxKind.USED, width=12, height=10),))
    shows_free_memory = any(node.free_bytes is not None for node in topology.nodes)
    signs = (
        (True, cpu, "hardware thread (CPU number) in its core"),
        (shows_free_memory, used, "memory: used and free"),
        (topology.cpus - topology.allowed.cpus, replace(cpu, off=True), "not allowed to this process"),
        (named_cores, name, "rank 0 has this core"),
        (plan and not plan.exact, star, "less than requested: see numapin plan"),
    )
    return [_entry(sign, text) for is_used, sign, text in signs if is_used]


def _entry(sign: Box, text: str) -> Box:
    x = max(sign.width, _SAMPLE) + 8
    label = Label(x=x, y=12, text=fit(text, _ENTRY - x, _SIZE), size=_SIZE)
    placed = replace(sign, y=(16 - sign.height) / 2)
    return Box(kind=BoxKind.PLAIN, width=_ENTRY, height=16, labels=(label,), children=(placed,), title=title_text(text))
