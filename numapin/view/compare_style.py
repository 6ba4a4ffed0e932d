"""The style and the fixed words of the page of `numapin compare`. Pure.

Comes in: nothing. Goes out: CSS, and what the figures do not show.
"""

from __future__ import annotations

from typing import Final

CAVEATS: Final = (
    "A run is one observation. The variants run in turn, every other round backwards, and the ratio of each round is "
    "taken, so that a machine that slows down affects all of them.",
    "Only this script, on this machine, with this number of ranks, was measured: neither convergence, nor "
    "checkpoints or evaluations that the measured steps do not reach.",
    "A difference says which command is faster, not why: torchrun gives a rank one thread, numapin one per core of its "
    "share. torchrun-threads is torchrun with numapin's number of threads.",
)

# The colors of the outcomes are told apart by any color vision, and each one is written out as well.
STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--dim:#5c656e;--line:#d5dae0;--band:#eef1f4;
--faster:#00795a;--slower:#b8460b;--same:#0067a3;--unknown:#7a6a00}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e3e7eb;--dim:#98a2ad;--line:#333a42;--band:#22272e;
--faster:#3fc79c;--slower:#ff9a52;--same:#6cb8f0;--unknown:#d8c34a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:74rem;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;
overflow-wrap:anywhere}
h1{font-size:1.15rem;margin:0 0 .3rem}h2{font-size:1rem;margin:1.6rem 0 .2rem}
p{margin:.2rem 0}.dim{color:var(--dim)}
ul{padding-left:1.2rem;max-width:60rem}li{margin:.3rem 0}
.outcomes{list-style:none;padding:0}.outcomes li{border-left:4px solid var(--line);padding:.1rem 0 .1rem .7rem}
.outcomes .faster{border-color:var(--faster)}.outcomes .slower{border-color:var(--slower)}
.outcomes .same{border-color:var(--same)}.outcomes .unknown{border-color:var(--unknown)}
.row{margin:.5rem 0}.row p{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1rem}
.row span{color:var(--dim);font-variant-numeric:tabular-nums}
svg{display:block;width:100%}
.grid{stroke:var(--line)}.band{fill:var(--band)}.one{stroke:var(--dim);stroke-dasharray:3 3}
.interval{stroke-width:3}
line.faster{stroke:var(--faster)}line.slower{stroke:var(--slower)}line.same{stroke:var(--same)}
line.unknown{stroke:var(--unknown)}
circle.faster{fill:var(--faster)}circle.slower{fill:var(--slower)}circle.same{fill:var(--same)}
circle.unknown{fill:var(--unknown)}
.run{fill:var(--same);fill-opacity:.55}.median{stroke:var(--fg);stroke-width:2}
.trace{height:48px;background:var(--band)}
.trace polyline{fill:none;stroke:var(--same);stroke-width:1.2px;vector-effect:non-scaling-stroke}
.axis text{font:12px system-ui,sans-serif;fill:var(--dim)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left;padding-left:0}
pre{margin:.2rem 0;white-space:pre-wrap;font-size:13px}
"""
