"""The picture in a real browser: the positions of text, and light, dark and printed colors."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

from numapin import Bind, Request, make_plan
from tests.browser.chromium import document, needs_chromium
from tests.browser.seam import COLORS, page
from tests.pictures import golden_machine
from tests.policies import FOREIGN, HAS_EFFECT, LOOK, allowing, without_policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = needs_chromium
LARGE, SMALL = "2pkg-8node-smt2-8gpu-pairs", "1node-16cpu-1gpu-vm"

# Runs in the page after layout; its result is read from the document that the browser prints.
PROBE = """
<script>
const area=e=>{const r=e.getBoundingClientRect();return [r.left,r.top,r.right,r.bottom]};
const texts=[...document.querySelectorAll("svg.np text")];
const areas=texts.map(area);
const shapes=[...document.querySelectorAll("svg.np rect,svg.np path.cpu")].map(area).filter(s=>s[2]-s[0]>20);
const overlaps=[],outside=[];
for(let i=0;i<texts.length;i++){
 for(let j=i+1;j<texts.length;j++){const a=areas[i],b=areas[j];
  if(Math.min(a[2],b[2])-Math.max(a[0],b[0])>1&&Math.min(a[3],b[3])-Math.max(a[1],b[1])>3)
   overlaps.push(texts[i].textContent+" on "+texts[j].textContent)}
 const x=(areas[i][0]+areas[i][2])/2,y=(areas[i][1]+areas[i][3])/2;
 const around=shapes.filter(s=>s[0]<x&&x<s[2]&&s[1]<y&&y<s[3]);
 const box=around.length?around.reduce((a,b)=>a[2]-a[0]<b[2]-b[0]?a:b):[x,y,x,y];
 if(areas[i][0]<box[0]-1||areas[i][2]>box[2]+1)outside.push(texts[i].textContent)}
const fill=()=>getComputedStyle(document.querySelector("svg.np rect.machine")).fill;
const result={count:texts.length,overlaps,outside,fill:fill(),wide:document.body.scrollWidth-innerWidth};
const out=document.createElement("pre");out.id="result";out.textContent=JSON.stringify(result);
document.body.append(out);
</script>
"""


@pytest.fixture
def probed(opened: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Return a function that opens a page, light or dark, and returns the probe's findings."""

    def probe(text: str, *, dark: bool = False, width: int = 1500) -> dict[str, Any]:
        shown = opened(allowing(text, PROBE.strip()).replace("</body>", PROBE + "</body>"), dark=dark, width=width)
        found = re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
        assert found, shown[-2000:]
        result: dict[str, Any] = json.loads(unescape(found[1]))
        return result

    return probe


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., str]:
    """Return a function that opens a page, light or dark, and returns the resulting document."""

    def open_page(text: str, *, dark: bool = False, width: int = 1500) -> str:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        return document(file, f"--window-size={width},1000", f"--blink-settings=preferredColorScheme={int(not dark)}")

    return open_page


def _rgb(name: str, *, dark: bool) -> str:
    color = COLORS[name][dark]
    return f"rgb({', '.join(str(int(color[at : at + 2], 16)) for at in (1, 3, 5))})"


@pytest.mark.parametrize(
    ("name", "bind", "dark"), [(LARGE, Bind.NODE, False), (LARGE, Bind.EXCLUSIVE, True), (SMALL, Bind.NODE, True)]
)
def test_text_is_where_it_belongs_in_light_and_dark(
    name: str,
    bind: Bind,
    dark: bool,  # noqa: FBT001 - a parameter of the test
    probed: Callable[..., dict[str, Any]],
) -> None:
    """No text overlaps another or leaves its box; colors follow the system; the page is no wider than the window."""
    topology = golden_machine(name)
    result = probed(page(topology, make_plan(topology, Request(bind=bind))), dark=dark)
    assert result["count"] > len(topology.cpus)
    assert (result["overlaps"], result["outside"], result["wide"] <= 0) == ([], [], True)
    assert result["fill"] == _rgb("page", dark=dark)


def test_the_probe_sees_overlaps(probed: Callable[..., dict[str, Any]]) -> None:
    """The probe finds texts that were put on each other, so the test above can fail."""
    text = page(golden_machine(SMALL))
    moved = re.sub(r'(<text class="strong" x=")[\d.]+(" y=")[\d.]+', r"\g<1>0\g<2>0", text)
    result = probed(moved)
    assert result["overlaps"]
    assert probed(re.sub(r"(<text [^>]*font-size=\")[\d.]+", r"\g<1>99", text))["outside"]


def test_nothing_but_the_page_itself_acts(opened: Callable[..., str]) -> None:
    """A script, handler or style that a name carries into the page has no effect; without the policy it has."""
    text = page(golden_machine(SMALL)).replace("</body>", f"{FOREIGN}{LOOK}</body>")
    seen = json.loads(unescape(_title(opened(without_policy(text)))))
    assert seen == HAS_EFFECT
    kept = json.loads(unescape(_title(opened(allowing(text, LOOK)))))
    assert kept["ran"] == []
    assert kept["outline"] != HAS_EFFECT["outline"]


def _title(text: str) -> str:
    return text.partition("<title>")[2].partition("</title>")[0]
