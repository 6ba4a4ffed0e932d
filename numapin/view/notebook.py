"""A machine and a plan as a notebook shows them. Pure.

Comes in: a `Topology` or a `Plan`. Goes out: SVG or an HTML fragment; None if it cannot be drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numapin.errors import UsageError
from numapin.view.picture.layout import lay_out, plan_in_words
from numapin.view.picture.svg import svg
from numapin.view.picture.tables import ranks_table, text_of

if TYPE_CHECKING:
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology


def machine_svg(topology: Topology) -> str | None:
    """Return the picture; None for a machine too large for one, of which the notebook then shows the text."""
    try:
        return svg(lay_out(topology)).partition("\n")[2]  # without the XML declaration, which HTML does not have
    except UsageError:
        return None


def plan_html(plan: Plan) -> str:
    """Return the ranks as a table, and the warnings."""
    warnings = "".join(f"<li>{text_of(text)}</li>" for text in plan.warnings)
    notes = f"<ul>{warnings}</ul>" if warnings else ""
    return f"<p>{text_of(plan_in_words(plan))}</p>\n{ranks_table(plan)}{notes}"
