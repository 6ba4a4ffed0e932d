"""The timeline in a browser: it loads without an error, shows lanes and batches, and zooms."""

from __future__ import annotations

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import numapin
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report
from numapin.trace.timeline import timeline
from tests.policies import FOREIGN, HAS_EFFECT, LOOK, allowing, without_policy
from tests.trace.made import loop

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
TEMPLATE = (Path(numapin.__file__).parent / "trace" / "timeline.html").read_text()

# Inserted before and after the page's own script: a record of errors, and the actions of a user.
WATCH = """<script>window.wrong = []; addEventListener("error", (e) => wrong.push(e.message));
addEventListener("securitypolicyviolation", (e) => wrong.push(`${e.violatedDirective}: ${e.blockedURI}`));
console.error = (text) => wrong.push(String(text));</script>"""
ACT = """<script>
const seen = {}, one = document.querySelector("svg"), box = () => one.getAttribute("viewBox").split(" ").map(Number);
const press = (key) => one.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
seen.lanes = [...one.querySelectorAll("g.lane")].map((lane) => lane.dataset.lane);
seen.charts = document.querySelectorAll("svg").length;
seen.batches = one.querySelectorAll("rect.wait").length;
seen.steps = one.querySelectorAll("rect.step").length;
seen.whole = box();
press("+"); press("+"); seen.zoomed = box();
press("ArrowRight"); seen.moved = box();
press("-"); press("0"); seen.back = box();
const rect = one.getBoundingClientRect();
const wheel = (ctrlKey) => one.dispatchEvent(
  new WheelEvent("wheel", { deltaY: -1, clientX: rect.left, ctrlKey, bubbles: true, cancelable: true }));
seen.scrolls = wheel(false); seen.scrolled = box();
seen.zooms = !wheel(true); seen.wheeled = box();
press("0");
for (let i = 0; i < 100; i += 1) press("+");
seen.deepest = box();
press("0");
const bar = one.querySelector("rect.pageable");
bar.dispatchEvent(new PointerEvent("pointermove", { clientX: 200, clientY: 200, bubbles: true }));
seen.tip = document.getElementById("tip").textContent;
seen.width = rect.width; seen.bar = bar.getBoundingClientRect().width;
seen.legend = [...document.querySelectorAll(".legend i")].map((e) => getComputedStyle(e).backgroundColor);
seen.marks = document.querySelectorAll(".axis span").length;
seen.rows = document.querySelectorAll("tbody tr").length;
seen.wrong = wrong;
document.title = JSON.stringify(seen);
</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Load the page of two ranks in Chromium, act like a user, and return what the page shows then."""
    if not CHROMIUM:
        pytest.skip("no Chromium on PATH; type: apt-get install chromium")
    ranks = [loop(steps=6, wait=300, copy=200, compute=500, memory="Pageable"), loop(steps=3, copy=200, compute=500)]
    analyses = [analyze(read_trace(made.content(rank=i), source="x")) for i, made in enumerate(ranks)]
    text = allowing(timeline(make_report(analyses), TEMPLATE), WATCH, ACT).replace("<style>", f"{WATCH}<style>", 1)
    return _told(text.replace("</body>", f"{ACT}</body>"), tmp_path_factory.mktemp("page"))


def _told(text: str, folder: Path) -> Any:
    """Load a page that puts JSON into its title, and return that JSON."""
    page = folder / "timeline.html"
    page.write_text(text)
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom")
    done = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=200, check=False)
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("{"), done.stderr
    return json.loads(unescape(title))


def test_it_loads(seen: Any) -> None:
    """The page loads without an error and has both ranks, five lanes in order, six batches, six steps and nine rows."""
    assert seen["wrong"] == []
    assert seen["charts"] == 2
    assert seen["lanes"] == ["load", "wait", "pin", "transfer", "compute"]
    assert (seen["batches"], seen["steps"], seen["rows"]) == (6, 6, 9)
    assert seen["marks"] > 4
    assert len(set(seen["legend"])) == 9


def test_a_bar_is_as_wide_as_what_it_shows(seen: Any) -> None:
    """The bar of a copy of 200 us has its share of the picture's width."""
    assert seen["bar"] == pytest.approx(seen["width"] * 200 / seen["whole"][2], rel=0.1, abs=2)


def test_keyboard(seen: Any) -> None:
    """Plus zooms in around the middle, arrows move, 0 shows everything again, and the zoom has a limit."""
    whole, zoomed, moved = seen["whole"], seen["zoomed"], seen["moved"]
    assert zoomed[2] == pytest.approx(whole[2] / 2.25)
    assert zoomed[0] + zoomed[2] / 2 == pytest.approx(whole[0] + whole[2] / 2)
    assert moved[0] > zoomed[0]
    assert moved[2] == pytest.approx(zoomed[2])
    assert seen["back"] == pytest.approx(whole)
    assert 0 < seen["deepest"][2] < whole[2] / 1000


def test_wheel(seen: Any) -> None:
    """The wheel alone is left to the page; with Ctrl it zooms in at the pointer, here at the left end."""
    assert (seen["scrolls"], seen["zooms"]) == (True, True)
    assert seen["scrolled"] == pytest.approx(seen["whole"])
    assert seen["wheeled"][2] == pytest.approx(seen["whole"][2] / 1.25)
    assert seen["wheeled"][0] == pytest.approx(seen["whole"][0], abs=1)


def test_details(seen: Any) -> None:
    """Pointing at a bar shows its details."""
    assert "Pageable to Device, 1.000 MB" in seen["tip"]


def test_nothing_but_the_page_itself_acts(tmp_path: Path) -> None:
    """A script, handler or style that a name carries into the page has no effect; without the policy it has."""
    if not CHROMIUM:
        pytest.skip("no Chromium on PATH; type: apt-get install chromium")
    report = make_report([analyze(read_trace(loop(steps=2, compute=500).content(rank=0), source="x"))])
    text = timeline(report, TEMPLATE).replace("<h1>", f"{FOREIGN}<h1>").replace("</body>", f"{LOOK}</body>")
    assert _told(without_policy(text), tmp_path) == HAS_EFFECT
    kept = _told(allowing(text, LOOK), tmp_path)
    assert kept["ran"] == []
    assert kept["outline"] != HAS_EFFECT["outline"]
