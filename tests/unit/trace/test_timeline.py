"""The timeline: its bars, their number, and protection from names that are HTML or script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import numapin
from numapin.trace.analysis import analyze
from numapin.trace.reading import read_trace
from numapin.trace.report import make_report
from numapin.trace.timeline import timeline
from tests.policies import policy_of
from tests.trace.made import Made, loop

TEMPLATE = (Path(numapin.__file__).parent / "trace" / "timeline.html").read_text()


def page(*made: Made) -> str:
    """Return the page of synthetic ranks."""
    analyses = [analyze(read_trace(one.content(rank=i), source="x")) for i, one in enumerate(made)]
    return timeline(make_report(analyses), TEMPLATE)


def bars(text: str, kind: str) -> int:
    """Return the number of bars of a kind."""
    return text.count(f'<rect class="{kind}"')


def test_lanes() -> None:
    """Each rank has five lanes, with a bar for every load, wait, copy and kernel, and a band for every step."""
    text = page(loop(steps=7, wait=10, copy=20, compute=70), loop(steps=3, copy=20, compute=70, memory="Pageable"))
    assert re.findall(r'data-lane="(\w+)"', text) == ["load", "wait", "pin", "transfer", "compute"] * 2
    counted = {kind: bars(text, kind) for kind in ("load", "wait", "pin", "transfer", "pageable", "compute")}
    assert counted == {"load": 7, "wait": 7, "pin": 0, "transfer": 7, "pageable": 3, "compute": 10}
    assert len(re.findall(r'class="step s[01]"', text)) == 10
    assert "pin <small>none</small>" in text


def test_communication_has_a_row_of_its_own() -> None:
    """Kernels of NCCL are drawn below the others."""
    made = loop(steps=1, compute=100)
    made.kernel(50, 50, name="ncclKernel_AllReduce")
    tops = re.findall(r'<rect class="(?:compute|communication)" x="[\d.]+" y="([\d.]+)"', page(made))
    assert len(set(tops)) == 2


def test_large_traces_are_drawn_with_few_bars() -> None:
    """200,000 kernels become a few thousand bars, labeled with the number merged and as faint as they are sparse."""
    made = Made()
    for i in range(20):
        made.step(i, i * 10_000, 10_000)
        for k in range(10_000):
            made.kernel(i * 10_000 + k, 0.4)
    text = page(made)
    assert 300 < bars(text, "compute") <= 4000
    assert sum(map(int, re.findall(r"(\d+) merged, 4\d% filled", text))) == 200_000
    faint = re.findall(r'<rect class="compute"[^>]* opacity="([\d.]+)"', text)
    assert len(faint) == bars(text, "compute")
    assert all(0.4 <= float(opacity) < 0.45 for opacity in faint)
    spans = [
        (float(x), float(w)) for x, w in re.findall(r'class="compute" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', text)
    ]
    assert spans[0][0] == 0
    assert max(x + w for x, w in spans) == pytest.approx(199_999.4, abs=0.1)


def test_no_external_files_and_a_table() -> None:
    """The page loads nothing; its table has a row per step and a column per part that took time."""
    text = page(loop(steps=3, wait=100, compute=900))
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert re.findall(r'scope="col">([^<]+)', text) == ["step", "all", "compute", "waiting for data"]
    assert len(re.findall(r'<tr><th scope="row">\d', text)) == 3
    assert "<td>0.100</td>" in text


def test_content_policy() -> None:
    """The policy allows one style and one script by hash, and the empty icon; no element has a style attribute."""
    text = page(loop(steps=3, wait=100, compute=900))
    policy = policy_of(text)
    assert (policy["default-src"], policy["img-src"], policy["base-uri"]) == (["'none'"], ["data:"], ["'none'"])
    for name in ("style-src", "script-src"):
        (source,) = policy[name]
        assert source.startswith("'sha256-")
    assert " style=" not in text


def test_names_are_text() -> None:
    """HTML in names of kernels and files stays text."""
    made = loop(steps=1, compute=50, idle=50)
    made.kernel(60, 5, name='<script>alert("x")</script>')
    analysis = analyze(read_trace(made.content(rank=None), source="</script><b>file"))
    text = timeline(make_report([analysis], ["<i>note</i>"]), TEMPLATE)
    assert "<script>alert" not in text
    assert "<b>file" not in text
    assert "<i>note" not in text
    assert "&lt;script&gt;alert" in text


def test_invisible_characters_are_replaced() -> None:
    """The page has no control characters and no direction marks, whatever the names contain."""
    bad = "a\x1b[31m\x9b2J\u202eb\x7f\ud800<!--tables-->"
    analysis = analyze(read_trace(loop(steps=1, compute=50).content(rank=None), source=bad))
    text = timeline(make_report([analysis], [bad]), TEMPLATE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    assert text.count("<table>") == 1
