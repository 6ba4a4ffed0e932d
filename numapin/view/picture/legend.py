"""What the colours and signs mean. Pure.

Comes in: a `Topology`, and a `Plan` or none. Goes out: a panel that explains what this picture has, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from numapin.view.picture.boxes import Box, BoxKind, Heading, Ink, Label, cell, frame
from numapin.view.picture.devices import chip
from numapin.view.picture.text import fit, title_text
from numapin.view.words import policy

if TYPE_CHECKING:
    from numapin.plan.model import Plan, RankPlan
    from numapin.topology.model import Topology

_ENTRY: Final = 338
_SIZE: Final = 10
_SAMPLE: Final = 32


def legend(topology: Topology, plan: Plan | None, *, width: float, named_cores: bool) -> Box:
    """Return the panel; `width` is its greatest, `named_cores` says that cores name their ranks."""
    ranks = [_entry(chip(rank.local_rank), rank_in_words(rank)) for rank in ([] if plan is None else plan.ranks)]
    return frame(
        BoxKind.PANEL,
        [ranks, _signs(topology, plan, named_cores=named_cores)],
        headings=[Heading(name="Legend", size=12)],
        width=width,
        gap=4,
    )


def rank_in_words(rank: RankPlan) -> str:
    """Return what a rank gets, in short; a star marks one that gets less than asked."""
    gpu = "no GPU" if rank.gpu is None else f"gpu{rank.gpu.index}"
    node = "node unknown" if rank.node is None else f"node {rank.node}"
    star = "" if rank.exact else " *"
    return f"{gpu}, {node}, {len(rank.cpus)} CPUs, memory {policy(rank)}{star}"


def _signs(topology: Topology, plan: Plan | None, *, named_cores: bool) -> list[Box]:
    thread = cell(BoxKind.CPU, _SAMPLE, 14, "0", size=9)
    used = Box(kind=BoxKind.MEMORY, width=_SAMPLE, height=10, children=(Box(kind=BoxKind.USED, width=12, height=10),))
    off = topology.cpus - topology.allowed.cpus
    starred = plan is not None and not plan.exact
    return [
        _entry(thread, "hardware thread (CPU number) in its core"),
        *([_entry(used, "memory: used and free")] if any(n.free_bytes is not None for n in topology.nodes) else []),
        *([_entry(replace(thread, off=True), "not allowed to this process")] if off else []),
        *(
            [_entry(cell(BoxKind.PLAIN, _SAMPLE, 14, "r0", size=9, ink=Ink.STRONG), "rank 0 has this core")]
            if named_cores
            else []
        ),
        *(
            [_entry(cell(BoxKind.PLAIN, _SAMPLE, 16, "*", size=12), "less than was asked: see numapin plan")]
            if starred
            else []
        ),
    ]


def _entry(sign: Box, text: str) -> Box:
    x = max(sign.width, _SAMPLE) + 8
    label = Label(x=x, y=12, text=fit(text, _ENTRY - x, _SIZE), size=_SIZE)
    placed = replace(sign, y=(16 - sign.height) / 2)
    return Box(kind=BoxKind.PLAIN, width=_ENTRY, height=16, labels=(label,), children=(placed,), title=title_text(text))
