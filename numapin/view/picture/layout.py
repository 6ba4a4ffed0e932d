"""The whole picture as boxes. Pure.

Comes in: a `Topology`, and a `Plan` or none. Goes out: a `Picture`: packages with their nodes, what has no known place,
distances, links and a legend, with a title and a description in words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from numapin.errors import UsageError
from numapin.view.marks import marks_of
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, flow, frame, right_end
from numapin.view.picture.legend import legend
from numapin.view.picture.matrix import distance_panel, link_panel
from numapin.view.picture.nodes import WIDE_GAP, WIDTH, Drawing, elsewhere, package_boxes
from numapin.view.picture.text import title_text
from numapin.view.words import machine_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_LEAST: Final = 480
_MOST_NODES: Final = 256  # more are seconds of work, and too small to see
_MOST_RANKS: Final = 256  # each CPU names those that may use it, for the buttons that bring out a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The outermost box, at the origin, and what it shows in words."""

    box: Box
    title: str
    description: str


def lay_out(topology: Topology, plan: Plan | None = None) -> Picture:
    """Return the picture. Raises UsageError for a plan of another machine, and for one of too many ranks."""
    if len(topology.nodes) > _MOST_NODES:
        raise UsageError(
            f"a machine of {len(topology.nodes)} nodes does not fit into a picture, which shows {_MOST_NODES} at most",
            "show it with: numapin topo --format tree",
        )
    if plan is not None and len(plan.ranks) > _MOST_RANKS:
        raise UsageError(
            f"a plan of {len(plan.ranks)} ranks does not fit into a picture, which shows {_MOST_RANKS} at most",
            "show it as a tree: numapin topo --plan FILE",
        )
    drawing = Drawing.of(topology, marks_of(topology, plan))
    nodes = [node for node in topology.nodes if node.id not in drawing.empty_nodes]
    packages = package_boxes(drawing)
    width = max(_LEAST, _width(packages, WIDTH))
    others, panels = elsewhere(drawing, width=width), [*distance_panel(nodes), *link_panel(topology)]
    rows = [packages, *others, panels]
    width = max(width, _width(panels, WIDTH), *(_width(row, width) for row in others))
    name, facts, planned = topology.host or topology.source, size_in_words(topology), plan_in_words(plan)
    named = any(part.kind is BoxKind.CORE and part.children[0].kind is BoxKind.PLAIN for part in _parts(rows))
    signs = legend(topology, plan, width=width - 2 * PAD, named_cores=named)
    box = frame(
        BoxKind.MACHINE,
        [*(_filled(row, width) for row in rows), [replace(signs, width=width)]],
        headings=[Heading(name=name, facts=facts, size=16), *([Heading(facts=planned, size=11)] if planned else [])],
        width=width,
        gap=WIDE_GAP,
    )
    description = f"{facts}. {planned}".strip()
    return Picture(box=box, title=title_text(f"Topology of {name}"), description=description)


def size_in_words(topology: Topology) -> str:
    """Return how many of everything the machine has."""
    counts = ((len(topology.packages), "package"), (len(topology.nodes), "NUMA node"), (len(topology.gpus), "GPU"))
    return ", ".join(
        [*(f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts), machine_size(topology)]
    )


def plan_in_words(plan: Plan | None) -> str:
    """Return what was asked of the plan."""
    if plan is None:
        return ""
    ranks = len(plan.ranks)
    return f"Plan: {ranks} rank{'' if ranks == 1 else 's'}, bind {plan.bind.value}, memory {plan.memory.value}"


def _width(row: list[Box], most: float) -> float:
    """Return how wide a row is that is wrapped at `most`."""
    return right_end(flow(row, width=most, gap=WIDE_GAP))


def _parts(rows: Iterable[Iterable[Box]]) -> Iterator[Box]:
    return (part for row in rows for box in row for part in box.walk())


def _filled(row: list[Box], width: float) -> list[Box]:
    """Widen packages that have a row each to the whole width."""
    alone = len(row) == 1 or sum(box.width for box in row[:2]) + WIDE_GAP > width
    return [replace(box, width=width) if alone and box.kind is BoxKind.PACKAGE else box for box in row]
