"""The picture as an HTML page with a plan as a table; no script."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base.text import printable
from numapin.view.machine import joined, known, own_nic_name, policy
from numapin.view.picture import COLORS, element, lay_out, plan_in_words, style

if TYPE_CHECKING:
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
{_ranks_table(plan) if plan else ""}{f"<ul>{warnings}</ul>" if warnings else ""}
</body>
</html>
"""


def _ranks_table(plan: Plan) -> str:
    """Return a row for each rank with its reasons, below what was requested."""
    headings = ("rank", "GPU", "NIC", "node", "CPUs", "memory", "threads", "as requested", "reason")
    caption, body = "The binding of each rank, and why", ""
    for rank in plan.ranks:
        cells = (
            f"gpu{rank.gpu.index}" if rank.gpu else "",
            joined(own_nic_name(rank), rank.nics_reason or "", separator=": "),
            known(rank.node),
            str(rank.cpus),
            policy(rank),
            str(rank.num_threads),
            "yes" if rank.exact else "no",
            rank.reason,
        )
        row = "".join(f"<td>{_text(text)}</td>" for text in cells)
        body += f'<tr><th scope="row">{rank.local_rank}</th>{row}</tr>\n'
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return (
        f"<p>{_text(plan_in_words(plan))}</p>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n"
    )


def _text(text: str) -> str:
    """Return any text as HTML; a very long one is cut."""
    return escape(printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"))
