"""The plot of a benchmark in a browser: readable, nothing overlaps, and lines that coincide are told apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

from numapin.bench.cases.transfer import MEMORIES
from numapin.bench.model import Benchmark, BenchReport, Case, Peer, Run, summarize
from numapin.view.bench_layouts import TRANSFER
from numapin.view.bench_plot import bench_figure
from numapin.view.chart import svg

if TYPE_CHECKING:
    from pathlib import Path

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH; type: apt-get install chromium")

PROBE = """<script>
addEventListener("load", () => {
const box = (e) => e.getBoundingClientRect(), all = (s) => [...document.querySelectorAll(s)];
const around = box(document.querySelector("svg")), texts = all("svg text").filter((e) => e.textContent);
const outside = texts.filter((e) => box(e).left < around.left || box(e).right > around.right);
const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
const pairs = texts.flatMap((a, i) => texts.slice(i + 1).filter((b) => overlap(box(a), box(b))).map((b) => [a, b]));
document.title = JSON.stringify({
  texts: texts.map((e) => e.textContent), outside: outside.map((e) => e.textContent),
  overlaps: pairs.map((pair) => pair.map((e) => e.textContent)),
  strokes: all("polyline").map((e) => getComputedStyle(e).strokeDasharray + getComputedStyle(e).stroke),
}); });
</script>"""


def plot() -> str:
    """Return the plot of four kinds of memory that are all equally fast."""
    peers = tuple(Peer(name=name, specs=()) for name in MEMORIES)
    cases = tuple(
        Case(name=f"h2d {size}", about="", group="h2d gpu0 node0", num_bytes=size, peers=peers)
        for size in (4096, 65536, 1 << 20, 1 << 24, 1 << 27, 1 << 30)
    )
    runs = [
        Run(case=case.name, peer=peer.name, repeat=i, figures={"gbps": 50.0 + i, "us": 1234.5, "host_us": 0.5})
        for case in cases
        for peer in peers
        for i in range(5)
    ]
    found = summarize(Benchmark(name="transfer", module="", cases=cases), runs)
    machine = {"num_cpus": 128, "gpus": ["NVIDIA H200"] * 8, "versions": {"torch": "2.13.0"}}
    settings = {"peers_are": MEMORIES}
    report = BenchReport(benchmark="transfer", command=(), machine=machine, settings=settings, cases=found)
    return svg(bench_figure(report, TRANSFER))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Open the plot; return what a script saw of it."""
    folder: Path = tmp_path_factory.mktemp("plot")
    (folder / "page.html").write_text(f"<html><body>{plot()}{PROBE}")
    command = [
        *(CHROMIUM, "--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        *("--virtual-time-budget=2000", "--dump-dom", (folder / "page.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(unescape(done.stdout.partition("<title>")[2].partition("</title>")[0]))


def test_texts_are_inside_and_apart(seen: Any) -> None:
    """No label leaves the picture or covers another one."""
    assert (seen["outside"], seen["overlaps"]) == ([], [])


def test_axes_and_legend_explain_themselves(seen: Any) -> None:
    """Axes have units, each line its description, and the marks a sentence."""
    assert {"bandwidth in GB/s", "time of one copy in us", "size of the memory, logarithmic"} <= set(seen["texts"])
    assert {f"{name}: {about}" for name, about in MEMORIES.items()} <= set(seen["texts"])
    assert any("median over the repeats" in text for text in seen["texts"])


def test_lines_that_coincide_differ(seen: Any) -> None:
    """Each line of a panel has its own dashes and color, so that the lower one shows in the gaps of the upper one."""
    first_panel = seen["strokes"][: len(MEMORIES)]
    assert len(set(first_panel)) == len(MEMORIES)
    assert len({stroke.partition("rgb")[0] for stroke in first_panel}) == len(MEMORIES)
