"""The picture as an HTML page with the same facts as tables, and a plan as a table; no script."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base import cpu_set
from numapin.base.text import printable
from numapin.topology.model import Gpu
from numapin.view.machine import (
    devices_on,
    empty_nodes,
    joined,
    kind_of,
    known,
    own_nic_name,
    policy,
    rank_places,
    size_of,
)
from numapin.view.picture import COLORS, element, lay_out, plan_in_words, style

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_LONGEST: Final = 500  # characters of a cell
_STYLE: Final = """
body{{background:{page};color:{ink}}}caption{{color:{dim}}}th,td{{border-bottom:1px solid {line}}}
"""
_SHAPES: Final = """:root{color-scheme:light dark}
body{margin:0 auto;padding:1rem 1.5rem 3rem;max-width:1448px;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.3rem;margin:.2rem 0}.scroll{overflow-x:auto;margin-top:1.6rem}.np{display:block}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}caption{text-align:left}
th,td{text-align:left;vertical-align:top;padding:.25rem .9rem .25rem 0;max-width:70ch;overflow-wrap:break-word}
@media print{@page{size:landscape;margin:1cm}body{padding:0}.scroll{overflow:visible}tr{break-inside:avoid}
.np{width:100%;height:auto;max-height:85vh}}"""


def page(topology: Topology, plan: Plan | None = None) -> str:
    """Return the page. Raises UsageError for a plan of another machine, or a machine too large for a picture."""
    picture = lay_out(topology, plan)
    light, dark = (_STYLE.format(**{name: pair[at] for name, pair in COLORS.items()}) for at in (0, 1))
    rules = f"{_SHAPES}{light}@media screen and (prefers-color-scheme:dark){{{dark}}}\n{style()}"
    # The policy refuses whatever a name in the machine file might inject.
    own_style = base64.b64encode(hashlib.sha256(rules.encode()).digest()).decode()
    title = escape(picture.title)
    warnings = "".join(f"<li>{_text(warning)}</li>" for warning in (plan or topology).warnings)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'sha256-{own_style}'; \
script-src 'none'; img-src 'none'; base-uri 'none'; form-action 'none'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{rules}</style>
</head>
<body>
<h1>{title}</h1>
<div class="scroll">
{element(picture)}
</div>
{_nodes_table(topology, plan)}{_ranks_table(plan) if plan else ""}{f"<ul>{warnings}</ul>" if warnings else ""}
</body>
</html>
"""


def _ranks_table(plan: Plan) -> str:
    """Return a row for each rank with its reasons, below what was requested."""
    headings = ("rank", "GPU", "NIC", "node", "CPUs", "memory", "threads", "as requested", "reason")
    rows = [
        (
            str(rank.local_rank),
            f"gpu{rank.gpu.index}" if rank.gpu else "",
            joined(own_nic_name(rank), rank.nics_reason or "", separator=": "),
            known(rank.node),
            str(rank.cpus),
            policy(rank),
            str(rank.num_threads),
            "yes" if rank.exact else "no",
            rank.reason,
        )
        for rank in plan.ranks
    ]
    return f"<p>{_text(plan_in_words(plan))}</p>\n{_table('The binding of each rank, and why', headings, rows)}"


def _nodes_table(topology: Topology, plan: Plan | None) -> str:
    """Return a row for each node, one for all empty nodes, and one for devices of unknown node."""
    headings = ("node", "kind", "socket", "CPUs", "memory", "free", "devices", "ranks on CPUs", "ranks in memory")
    places, empty = rank_places(topology, plan), empty_nodes(topology)

    def names(node: int | None) -> str:
        devices = devices_on(topology, node)
        return ", ".join(device.label if isinstance(device, Gpu) else device.name for device in devices)

    rows = [
        (
            str(node.id),
            kind_of(topology, node) or "CPUs",
            known(node.package),
            str(node.cpus),
            size_of(node.memory_bytes),
            size_of(node.free_bytes),
            names(node.id),
            cpu_set.render(places.on(node.cpus)),
            cpu_set.render(places.memory.get(node.id, ())),
        )
        for node in topology.nodes
        if node.id not in empty
    ]
    if empty:
        rows.append((str(empty), "empty", "", "", size_of(0), "", "", "", ""))
    if lost := names(None):
        rows.append(("unknown", "", "", "", "", "", lost, "", ""))
    return _table("The parts of each NUMA node", headings, rows)


def _table(caption: str, headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{_text(first)}</th>{"".join(f"<td>{_text(text)}</td>" for text in rest)}</tr>\n'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def _text(text: str) -> str:
    """Return any text as HTML; a very long one is cut."""
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"))
