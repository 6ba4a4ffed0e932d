"""The page of `numapin compare` in a browser: readable on a desktop and on a telephone, and it runs nothing foreign."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

from numapin.view.compare_page import compare_page
from tests.policies import FOREIGN, HAS_EFFECT, LOOK, allowing, without_policy
from tests.unit.compare.test_report import report

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH; type: apt-get install chromium")

# The page is shown in a frame of the wanted width, because a headless window has a least one.
PROBE = """<script>
addEventListener("load", () => {
const seen = { width: innerWidth, wide: document.documentElement.scrollWidth - innerWidth };
const box = (e) => e.getBoundingClientRect(), all = (s) => [...document.querySelectorAll(s)];
const shown = all("h1,h2,p,li,th,td,text,pre").filter((e) => box(e).width);
seen.smallest = Math.min(...shown.map((e) => parseFloat(getComputedStyle(e).fontSize)));
seen.plots = all("svg").map((e) => Math.round(box(e).width));
seen.outside = all("svg circle, svg text").filter((e) => {
  const own = box(e), around = box(e.closest("svg"));
  return own.left < around.left - 1 || own.right > around.right + 1; }).length;
const labels = all(".axis").map((axis) => [...axis.querySelectorAll("text")].map(box));
seen.overlaps = labels.flatMap((row) => row.slice(1).filter((b, i) => b.left < row[i].right)).length;
seen.fill = getComputedStyle(document.body).backgroundColor;
parent.document.title = JSON.stringify(seen); });
</script>"""


def opened(tmp_path: Path, page: str, *, width: int = 1280, dark: bool = False) -> Any:
    """Show the page in a frame of this width; return what its script wrote into the title."""
    (tmp_path / "page.html").write_text(page)
    frame = f'<html><body style="margin:0"><iframe src="page.html" width="{width}" height="900" style="border:0">'
    (tmp_path / "frame.html").write_text(frame)
    command = [
        *(
            CHROMIUM,
            "--headless",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1500,1000",
        ),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *("--allow-file-access-from-files", "--virtual-time-budget=2000", "--dump-dom"),
        (tmp_path / "frame.html").as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(unescape(shown.partition("<title>")[2].partition("</title>")[0]))


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_it_is_readable_at_any_width(tmp_path: Path, width: int, dark: bool) -> None:  # noqa: FBT001 - a parameter
    """No part is wider than the window, text keeps its size, plots fill the width, and no label covers another."""
    page = compare_page(report())
    seen = opened(tmp_path, allowing(page, PROBE).replace("</body>", f"{PROBE}</body>"), width=width, dark=dark)
    assert seen["width"] == width
    assert seen["wide"] <= 0
    assert seen["smallest"] >= 12
    assert min(seen["plots"]) > 0.85 * min(width, 1180)
    assert (seen["outside"], seen["overlaps"]) == (0, 0)
    assert seen["fill"] == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_what_a_script_printed_does_not_run(tmp_path: Path) -> None:
    """Elements in names and output are escaped; even one that was not would be refused by the page's policy."""
    made = report()
    look = LOOK.replace("document.title", "parent.document.title")
    for variant in (replace(made.variants[-1], failure=FOREIGN), replace(made.variants[-1], name=FOREIGN)):
        assert FOREIGN not in compare_page(replace(made, variants=(*made.variants[:-1], variant)))
    page = compare_page(made).replace("</body>", f"{FOREIGN}{look}</body>")
    assert opened(tmp_path, allowing(page, look)) != HAS_EFFECT
    assert opened(tmp_path, without_policy(page)) == HAS_EFFECT
