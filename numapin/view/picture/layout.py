"""The whole picture as boxes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from numapin.base.plural import counted
from numapin.errors import UsageError
from numapin.view.marks import marks_of
from numapin.view.picture.boxes import PAD, Box, BoxKind, Heading, flow, frame, right_end
from numapin.view.picture.drawing import Drawing
from numapin.view.picture.legend import legend
from numapin.view.picture.matrix import distance_panel, link_panel
from numapin.view.picture.nodes import WIDE, WIDE_GAP, boxes_without_package, package_boxes
from numapin.view.picture.text import title_text
from numapin.view.words import joined, machine_size, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_LEAST: Final = 480
_MOST_NODES: Final = 256  # more take seconds, and are too small to see
_MOST_RANKS: Final = 256  # each CPU lists its ranks, for the buttons that highlight a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The outermost box, at the origin, with a title and a description in words."""

    box: Box
    title: str
    description: str


def lay_out(topology: Topology, plan: Plan | None = None, *, page_width: float = WIDE) -> Picture:
    """Return the picture in a width of `WIDE` or `NARROW`, or any between.

    Raises UsageError for a plan of another machine, or too many nodes or ranks.
    """
    _require_drawable(topology, plan)
    drawing = Drawing.of(topology, marks_of(topology, plan), page_width=page_width)
    rows, width = _rows(drawing)
    name, size, planned = topology.host or topology.source, size_in_words(topology), plan_in_words(plan)
    named = _has_named_cores(rows)
    signs = legend(topology, plan, drawing.marks, width=width - 2 * PAD, named_cores=named)
    box = frame(
        BoxKind.MACHINE,
        [*(_filled(row, width) for row in rows), [replace(signs, width=width)]],
        headings=[Heading(name=name, facts=size, size=16), *([Heading(facts=planned, size=11)] if planned else [])],
        width=width,
        gap=WIDE_GAP,
    )
    return Picture(box=box, title=title_text(f"Topology of {name}"), description=f"{size}. {planned}".strip())


def _require_drawable(topology: Topology, plan: Plan | None) -> None:
    """Raise UsageError if the nodes or the ranks are too many for a picture."""
    num_nodes, num_ranks = len(topology.nodes), len(ranks_of(plan))
    if num_nodes > _MOST_NODES:
        raise UsageError(
            f"a machine of {num_nodes} nodes does not fit into a picture, which shows {_MOST_NODES} at most",
            "show it with: numapin topo --format tree",
        )
    if num_ranks > _MOST_RANKS:
        raise UsageError(
            f"a plan of {num_ranks} ranks does not fit into a picture, which shows {_MOST_RANKS} at most",
            "show it as a tree: numapin topo --plan FILE",
        )


def _rows(drawing: Drawing) -> tuple[list[list[Box]], float]:
    """Return the rows of the picture without the legend, and the width of the widest."""
    topology, most = drawing.topology, drawing.page_width
    packages = package_boxes(drawing)
    width = max(min(_LEAST, most), _width(packages, most))
    others = boxes_without_package(drawing, width=width)
    panels = [*distance_panel(drawing.drawn(topology.nodes), width=most), *link_panel(topology, width=most)]
    widest = max(width, _width(panels, most), *(_width(row, width) for row in others))
    return [packages, *others, panels], widest


def size_in_words(topology: Topology) -> str:
    """Return the number of packages, nodes, GPUs, cores and CPUs."""
    return joined(
        counted(len(topology.packages), "package") if topology.packages else "",
        counted(len(topology.nodes), "NUMA node"),
        counted(len(topology.gpus), "GPU"),
        machine_size(topology),
    )


def plan_in_words(plan: Plan | None) -> str:
    """Return what was requested of the plan; "" without a plan."""
    if plan is None:
        return ""
    return f"Plan: {counted(len(plan.ranks), 'rank')}, bind {plan.bind.value}, memory {plan.memory.value}"


def _width(row: list[Box], most: float) -> float:
    """Return the width of a row that wraps at `most`."""
    return right_end(flow(row, width=most, gap=WIDE_GAP))


def _has_named_cores(rows: Iterable[Iterable[Box]]) -> bool:
    parts = (part for box in chain.from_iterable(rows) for part in box.walk())
    return any(part.kind is BoxKind.CORE and part.children[0].kind is BoxKind.PLAIN for part in parts)


def _filled(row: list[Box], width: float) -> list[Box]:
    """Widen packages to the whole width if each has a row of its own."""
    two_fit = len(row) > 1 and row[0].width + row[1].width + WIDE_GAP <= width
    if two_fit:
        return row
    return [replace(box, width=width) if box.kind is BoxKind.PACKAGE else box for box in row]
