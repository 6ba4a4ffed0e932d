"""In a real browser: the positions of text in the picture, its colors and scripts, and the documentation site.

The site adds to its theme a search that works from files, and what the copy button takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any, Final

import pytest

from numapin import Bind, Request, make_plan
from tests.browser.seam import COLORS, page
from tests.pictures import golden_machine
from tests.policies import FOREIGN, HAS_EFFECT, LOOK, allowing, without_policy

ASSETS = Path(__file__).resolve().parents[2] / "docs" / "assets"
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM: Final = next((path for path in map(shutil.which, _PROGRAMS) if path), "")
pytestmark = pytest.mark.skipif(not _CHROMIUM, reason="no chromium on PATH; type: apt-get install chromium")
LARGE, SMALL = "2pkg-8node-smt2-8gpu-pairs", "1node-16cpu-1gpu-vm"

# Runs in the page after layout.
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
document.title=JSON.stringify(result);
</script>
"""


def _opened(file: Path, text: str, *options: str) -> Any:
    """Open a page from a file, as a user does; return the JSON that its script wrote into the title."""
    file.write_text(text, encoding="utf-8")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    common = ("--headless", "--disable-gpu", f"--user-data-dir={file.with_name('profile')}", *sandbox)
    command = [_CHROMIUM, *common, *options, "--dump-dom", file.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    title = shown.partition("<title>")[2].partition("</title>")[0]
    assert title, shown[-2000:]
    return json.loads(unescape(title))


def _picture(folder: Path, text: str, *, dark: bool = False) -> dict[str, Any]:
    """Open a page, light or dark, and return what a script of it found."""
    options = ("--window-size=1500,1000", f"--blink-settings=preferredColorScheme={int(not dark)}")
    found: dict[str, Any] = _opened(folder / "page.html", text, *options)
    return found


def _probed(folder: Path, text: str, *, dark: bool = False) -> dict[str, Any]:
    return _picture(folder, allowing(text, PROBE.strip()).replace("</body>", PROBE + "</body>"), dark=dark)


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
    tmp_path: Path,
) -> None:
    """No text overlaps another or leaves its box; colors follow the system; the page is no wider than the window."""
    topology = golden_machine(name)
    result = _probed(tmp_path, page(topology, make_plan(topology, Request(bind=bind))), dark=dark)
    assert result["count"] > len(topology.cpus)
    assert (result["overlaps"], result["outside"], result["wide"] <= 0) == ([], [], True)
    assert result["fill"] == _rgb("page", dark=dark)


def test_the_probe_sees_overlaps(tmp_path: Path) -> None:
    """The probe finds texts on each other and outside of their boxes, so the test above can fail."""
    result = _probed(tmp_path, re.sub(r"(<text [^>]*font-size=\")[\d.]+", r"\g<1>99", page(golden_machine(SMALL))))
    assert result["overlaps"]
    assert result["outside"]


def test_nothing_but_the_page_itself_acts(tmp_path: Path) -> None:
    """A script, handler or style that a name carries into the page has no effect; without the policy it has."""
    text = page(golden_machine(SMALL)).replace("</body>", f"{FOREIGN}{LOOK}</body>")
    assert _picture(tmp_path, without_policy(text)) == HAS_EFFECT
    kept = _picture(tmp_path, allowing(text, LOOK))
    assert kept["ran"] == []
    assert kept["outline"] != HAS_EFFECT["outline"]


def _said(tmp_path: Path, page: str) -> Any:
    text = f"<!DOCTYPE html><html><body>{page}</body></html>"
    return _opened(tmp_path / "page.html", text, "--virtual-time-budget=5000")


def test_a_worker_of_a_page_that_is_a_file(tmp_path: Path) -> None:
    """A script that answers messages runs beside a page that was opened from a file: the search is one."""
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async ({ data }) => {"
        " await null; postMessage([data, 'IFrameWorker' in parent, document.querySelector('script[src]').src]); });"
    )
    shutil.copy(ASSETS / "iframe-worker.js", tmp_path)
    answers = _said(
        tmp_path,
        """<script src="iframe-worker.js"></script><script>
        const worker = new Worker("worker.js"), heard = [];
        worker.addEventListener("message", ({ data }) => {
          heard.push(data);
          if (heard.length == 2) document.title = JSON.stringify(heard);
        });
        worker.postMessage({ query: 1 });
        worker.postMessage({ query: 2 });
        </script>""",
    )
    script = (tmp_path / "worker.js").as_uri()
    assert answers == [[{"query": 1}, True, script], [{"query": 2}, True, script]]


def test_the_copy_button_takes_the_command_only(tmp_path: Path) -> None:
    """The text that the theme copies has neither the prompt nor the output; a block of output only is copied whole.

    The theme marks the block with data-md-copying while it takes its text.
    """
    blocks = (
        '<span class="gp">$ </span>numapin<span class="w"> </span>topo\n<span class="go">2 nodes</span>\n',
        '<span class="go">2 nodes</span>\n',
        "numapin topo\n",
    )
    shutil.copy(ASSETS / "site.css", tmp_path)
    shown = "".join(f"<pre><code data-md-copying>{block}</code></pre>" for block in blocks)
    taken = _said(
        tmp_path,
        f"""<link rel="stylesheet" href="site.css">{shown}<script>
        addEventListener("load", () => {{
          const texts = [...document.querySelectorAll("code")].map((code) => code.innerText.trimEnd());
          document.title = JSON.stringify(texts);
        }});
        </script>""",
    )
    assert taken == ["numapin topo", "2 nodes", "numapin topo"]
