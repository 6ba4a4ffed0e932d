"""The timeline of `numapin trace` in a browser, on a desktop and on a telephone: keys, touch, tooltips, measuring."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import numapin
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report
from numapin.trace.timeline import timeline
from tests.browser.test_compare_page import CHROMIUM, opened
from tests.policies import allowing
from tests.trace.made import loop

if TYPE_CHECKING:
    from tests.trace.made import Made

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH; type: apt-get install chromium")
TEMPLATE = (Path(numapin.__file__).parent / "trace" / "timeline.html").read_text()

PROBE = """<script>
addEventListener("load", () => {
const seen = { width: innerWidth, wide: document.documentElement.scrollWidth - innerWidth, wrong: [] };
const svg = document.querySelector("svg"), tip = document.getElementById("tip");
const boxOf = (e) => e.getBoundingClientRect(), all = (s) => [...document.querySelectorAll(s)];
const view = () => svg.getAttribute("viewBox").split(" ").map(Number).filter((_, i) => i % 2 === 0);
const press = (key) => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const point = (name, target, x, more) => target.dispatchEvent(new PointerEvent(name, { clientX: x,
  clientY: boxOf(svg).top + 5, pointerId: 1, bubbles: true, ...more }));
const drag = (from, to, more) => { point("pointerdown", svg, from, more); point("pointermove", svg, to, more);
  point("pointerup", svg, to, more); };
addEventListener("error", (e) => seen.wrong.push(e.message));
seen.smallest = Math.min(...all("h1,h2,p,li,button").filter((e) => boxOf(e).width).map(
  (e) => parseFloat(getComputedStyle(e).fontSize)));
seen.marks = all(".axis").map((line) => [...line.querySelectorAll("span")].map(boxOf)).flatMap(
  (row) => row.slice(1).filter((b, i) => b.left < row[i].right)).length;
seen.kinds = [...new Set(all("g.lane rect").map((e) => e.getAttribute("class")))];
seen.legend = all(".legend i").map((e) => e.className);
seen.touch = getComputedStyle(svg).touchAction;
seen.whole = view();
press("w"); seen.w = view(); press("D"); seen.d = view(); press("a"); seen.a = view(); press("s"); seen.s = view();
press("0");
const area = boxOf(svg), at = (share) => area.left + area.width * share;
const bar = document.querySelector("rect.wait"), other = document.querySelector("rect.compute");
point("pointerdown", bar, at(.2)); point("pointerup", bar, at(.2));
point("pointermove", other, at(.5));
seen.kept = [tip.hidden, tip.textContent, boxOf(tip).right <= innerWidth];
press("Escape"); seen.gone = tip.hidden;
drag(at(.25), at(.75), { shiftKey: true });
seen.measured = document.getElementById("measured").textContent;
seen.span = boxOf(document.querySelector("rect.span")).width / area.width;
press("Escape"); seen.spans = all("rect.span").length;
document.getElementById("measure").click();
drag(at(.5), at(.25));
seen.byButton = document.getElementById("measured").textContent;
document.getElementById("measure").click(); press("Escape");
press("w"); press("w"); const before = view(); drag(at(.5), at(.6)); seen.dragged = [before, view()];
press("0");
point("pointerdown", svg, at(.4), { pointerType: "touch" });
point("pointerdown", svg, at(.6), { pointerId: 2, pointerType: "touch" });
point("pointermove", svg, at(.61), { pointerId: 2, pointerType: "touch" });
point("pointermove", svg, at(.81), { pointerId: 2, pointerType: "touch" });
point("pointerup", svg, at(.4)); point("pointerup", svg, at(.81), { pointerId: 2 });
seen.pinched = view();
parent.document.title = JSON.stringify(seen); });
</script>"""


def page() -> str:
    """Return the page of two ranks, which has every kind of bar."""
    first = loop(steps=6, wait=300, copy=200, compute=500, memory="Pageable")
    first.noted_at("epochs", 1000, 200)
    first.noted |= {"script": "train <b>.py", "host": "node7", "date": "2026-11-23 07:00"}
    second = loop(steps=6, copy=200, compute=500)
    second.kernel(600, 100, name="ncclDevKernel_AllReduce")
    second.event("cpu_op", "aten::pin_memory", 0, 100)
    return timeline(make_report([_analyzed(first, 0), _analyzed(second, 1)]), TEMPLATE)


def _analyzed(made: Made, rank: int) -> Any:
    return analyze(read_trace(made.content(rank=rank), source="x"))


@pytest.fixture(scope="module", params=[1280, 390])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Open the page in a window of this width, act like a user, and return what the page showed."""
    text = allowing(page(), PROBE).replace("</body>", f"{PROBE}</body>")
    return opened(tmp_path_factory.mktemp("page"), text, width=request.param) | {"asked": request.param}


def test_it_fits_the_window(seen: Any) -> None:
    """No part is wider than the window, text keeps its size, marks of the axis do not touch, nothing fails."""
    assert seen["width"] == seen["asked"]
    assert seen["wide"] <= 0
    assert seen["smallest"] >= 12
    assert (seen["marks"], seen["wrong"]) == (0, [])


def test_the_legend_is_complete(seen: Any) -> None:
    """Each kind of bar is in the legend, and the bands of the steps."""
    assert set(seen["kinds"]) == {"load", "wait", "epoch", "pin", "transfer", "pageable", "compute", "communication"}
    assert set(seen["legend"]) == {*seen["kinds"], "step"}


def test_letters_zoom_and_move(seen: Any) -> None:
    """W zooms in, D moves right, A moves back, S zooms out."""
    assert seen["w"][1] == pytest.approx(seen["whole"][1] / 1.5)
    assert seen["d"][0] > seen["w"][0]
    assert seen["a"] == pytest.approx(seen["w"])
    assert seen["s"] == pytest.approx(seen["whole"])


def test_a_click_keeps_the_tooltip(seen: Any) -> None:
    """A kept tooltip stays inside the window while the pointer moves on, until Escape."""
    hidden, text, is_inside = seen["kept"]
    assert (hidden, is_inside, seen["gone"]) == (False, True, True)
    assert "the loop waits" in text


def test_measuring(seen: Any) -> None:
    """Shift and drag measures a span, as does dragging after the button; Escape removes it."""
    half_ms = seen["whole"][1] / 2000
    assert seen["measured"] == f"measured: {half_ms:.3f} ms"
    assert seen["span"] == pytest.approx(0.5, abs=0.01)
    assert seen["spans"] == 0
    assert seen["byButton"] == f"measured: {half_ms / 2:.3f} ms"


def test_dragging_and_touch(seen: Any) -> None:
    """Dragging moves; two fingers zoom; the page still scrolls up and down under one finger."""
    before, after = seen["dragged"]
    assert after[0] == pytest.approx(before[0] - 0.1 * before[1], rel=0.02)
    assert seen["pinched"][1] < 0.6 * seen["whole"][1]
    assert seen["touch"] == "pan-y"


def test_the_title() -> None:
    """Title and heading name script, host, date and ranks, escaped."""
    titles = re.findall(r"<(?:title|h1)>(.*?)</(?:title|h1)>", page())
    assert [unescape(title) for title in titles] == [
        "numapin trace: train <b>.py, on node7, 2026-11-23 07:00, ranks 0, 1"
    ] * 2
