"""The HTML page around the picture.

The page can be read without its script.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import TYPE_CHECKING, Final

from numapin.view.marks import marks_of
from numapin.view.picture.layout import lay_out
from numapin.view.picture.nodes import NARROW
from numapin.view.picture.style import button_rules, look_of, pattern_rules, rules, variables
from numapin.view.picture.svg import definitions, element, looks_in
from numapin.view.picture.tables import node_details, nodes_table, plan_table, text_of
from numapin.view.words import ranks_of

if TYPE_CHECKING:
    from numapin.plan.model import Plan
    from numapin.topology.model import Topology

_LEAST_WIDE: Final = 1080
_STYLE: Final = """
body{margin:0 auto;padding:1rem 1.5rem 3rem;max-width:1448px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.3rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
header{display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:baseline;justify-content:space-between}
.scroll{overflow-x:auto}.np{display:block;max-width:100%;height:auto}
.defs{position:absolute}.narrow{display:none}
@media(max-width:900px){body{padding:.5rem .5rem 2rem}.wide{display:none}.narrow{display:block}
.narrow .np{width:100%;max-width:560px;margin:auto}.scroll table{min-width:48rem}}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--dim);padding-bottom:.3rem}
th,td{text-align:left;vertical-align:top;padding:.25rem .9rem .25rem 0;
border-bottom:1px solid var(--line);max-width:70ch;overflow-wrap:break-word}
thead th{white-space:nowrap}
summary{cursor:pointer;padding:.2rem 0}details{border-bottom:1px solid var(--line)}
button{font:inherit;font-size:.85rem;color:var(--ink);background:var(--package);border:1px solid var(--edge);
border-radius:5px;padding:.15rem .6rem;cursor:pointer}
button.rank{color:var(--on)}button[aria-pressed=true]{outline:3px solid var(--ink);outline-offset:1px}
:focus-visible{outline:3px solid var(--heat);outline-offset:2px}
.ranks{display:flex;flex-wrap:wrap;gap:.5rem;margin:.4rem 0 .8rem}
.np.only [data-ranks]:not(.on){opacity:.18}
"""

_SCRIPT: Final = """
const root=document.documentElement,pictures=[...document.querySelectorAll("svg.np")];
const theme=document.getElementById("theme"),ranks=[...document.querySelectorAll("button.rank")];
for(const button of document.querySelectorAll("button"))button.hidden=false;
theme.onclick=()=>{const dark=getComputedStyle(root).getPropertyValue("--scheme").trim()==="dark";
root.dataset.theme=dark?"light":"dark"};
let kept=null;
function highlight(rank){for(const picture of pictures)picture.classList.toggle("only",rank!==null);
for(const part of document.querySelectorAll("svg.np [data-ranks]"))
part.classList.toggle("on",rank!==null&&part.dataset.ranks.split(" ").includes(rank))}
for(const button of ranks){const rank=button.dataset.rank;
button.onclick=()=>{kept=kept===rank?null:rank;highlight(kept);
for(const other of ranks)other.setAttribute("aria-pressed",String(other.dataset.rank===kept))};
button.onmouseenter=()=>highlight(rank);button.onmouseleave=()=>highlight(kept)}
"""


def page(topology: Topology, plan: Plan | None = None) -> str:
    """Return the page. Raises UsageError for a plan of another machine."""
    picture, narrow = lay_out(topology, plan), lay_out(topology, plan, page_width=NARROW)
    marks = marks_of(topology, plan)
    title = escape(picture.title)
    looks = looks_in(picture)
    least = f".wide .np{{min-width:{min(_LEAST_WIDE, picture.box.width):g}px}}\n"  # else text gets too small
    style = "".join((_themes(), _STYLE, least, button_rules(looks), rules(), pattern_rules(looks)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{_policy_element(style=style, script=_SCRIPT)}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button" hidden>Light or dark</button></header>
{_rank_buttons(plan)}<main>
<svg class="np defs" width="0" height="0" aria-hidden="true">{definitions(looks)}</svg>
<div class="wide scroll">
{element(picture)}
</div>
<div class="narrow">
{element(narrow, name="np-narrow")}
</div>
{_warnings(topology, plan)}{nodes_table(topology, marks)}
{plan_table(plan)}{node_details(topology, marks)}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _themes() -> str:
    """Return the colors: the system's scheme, until the button sets one."""
    light, dark = (
        f"--scheme:{name};color-scheme:{name};{variables(dark=name == 'dark')}" for name in ("light", "dark")
    )
    return (
        f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f':root[data-theme="light"]{{{light}}}\n:root[data-theme="dark"]{{{dark}}}'
    )


def _rank_buttons(plan: Plan | None) -> str:
    buttons = [
        f'<button class="rank c{look_of(rank.local_rank)}" type="button" hidden aria-pressed="false" '
        f'data-rank="{rank.local_rank}">rank {rank.local_rank}</button>'
        for rank in ranks_of(plan)
    ]
    if not buttons:
        return ""
    return f'<div class="ranks" role="group" aria-label="Highlight a rank">{"".join(buttons)}</div>\n'


def _warnings(topology: Topology, plan: Plan | None) -> str:
    texts = plan.warnings if plan else topology.warnings
    items = "".join(f"<li>{text_of(text)}</li>" for text in texts)
    return f"<h2>Warnings</h2>\n<ul>{items}</ul>\n" if items else ""


def _policy_element(*, style: str, script: str) -> str:
    """Return the Content-Security-Policy: the page uses its own style and script, and nothing injected.

    It belongs into the head of the page, before anything that could load or run. Style attributes, handlers such as
    onclick, images, and every other style or script are refused.
    """
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    style_hash, script_hash = (f"'sha256-{digits}'" for digits in hashes)
    content = (
        f"default-src 'none'; style-src {style_hash}; script-src {script_hash}; img-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'
