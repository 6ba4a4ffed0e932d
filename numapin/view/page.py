"""The picture as an HTML page, with the plan and its reasons as text; no script."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.base.text import printable
from numapin.view.machine import shortened
from numapin.view.picture import COLORS, element, lay_out, style

if TYPE_CHECKING:
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_RULES: Final = """:root{color-scheme:light dark}
body{margin:0 auto;padding:1rem 1.5rem 3rem;max-width:1448px;overflow-wrap:break-word;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.3rem;margin:.2rem 0}.scroll{overflow-x:auto;margin-top:1.6rem}.np{display:block}pre{white-space:pre-wrap}
@media print{@page{size:landscape;margin:1cm}body{padding:0}.scroll{overflow:visible}
.np{width:100%;height:auto;max-height:85vh}}"""


def page(topology: Topology, plan: Plan | None = None) -> str:
    """Return the page. Raises UsageError for a plan of another machine, or a machine too large for a picture."""
    picture = lay_out(topology, plan)
    light, dark = (f"body{{background:{COLORS['page'][at]};color:{COLORS['ink'][at]}}}" for at in (0, 1))
    rules = f"{_RULES}\n{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n{style()}"
    # The policy refuses whatever a name in the machine file might inject.
    own_style = base64.b64encode(hashlib.sha256(rules.encode()).digest()).decode()
    title = escape(picture.title)
    plan_text = ""
    if plan is not None:
        reasons = (f"rank {rank.local_rank}: {shortened(rank.reason)}" for rank in plan.ranks)
        plan_text = "\n".join([str(plan), "", *map(printable, reasons)])
    warnings = "".join(f"<li>{escape(printable(shortened(text)))}</li>" for text in (plan or topology).warnings)
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
{f"<pre>{escape(plan_text)}</pre>" if plan_text else ""}{f"<ul>{warnings}</ul>" if warnings else ""}
</body>
</html>
"""
