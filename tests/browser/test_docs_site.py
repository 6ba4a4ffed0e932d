"""What the documentation site adds to its theme, in a browser: search from files, and what the copy button takes."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import document, needs_chromium

ASSETS = Path(__file__).resolve().parents[2] / "docs" / "assets"
pytestmark = needs_chromium


def said(tmp_path: Path, page: str) -> Any:
    """Open a page from a file, as a user does; return the JSON that its script wrote into the title."""
    (tmp_path / "page.html").write_text(f"<!DOCTYPE html><html><body>{page}</body></html>")
    shown = document(tmp_path / "page.html", "--virtual-time-budget=5000")
    title = shown.partition("<title>")[2].partition("</title>")[0]
    assert title, shown
    return json.loads(unescape(title))


def test_a_worker_of_a_page_that_is_a_file(tmp_path: Path) -> None:
    """A script that answers messages runs beside a page that was opened from a file: the search is one."""
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async ({ data }) => {"
        " await null; postMessage([data, 'IFrameWorker' in parent, document.querySelector('script[src]').src]); });"
    )
    shutil.copy(ASSETS / "iframe-worker.js", tmp_path)
    answers = said(
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


@pytest.mark.parametrize(
    ("block", "copied"),
    [
        (
            '<span class="gp">$ </span>numapin<span class="w"> </span>topo\n<span class="go">2 nodes</span>\n',
            "numapin topo",
        ),
        ('<span class="go">2 nodes</span>\n', "2 nodes"),
        ("numapin topo\n", "numapin topo"),
    ],
    ids=["command and output", "output", "neither"],
)
def test_the_copy_button_takes_the_command_only(tmp_path: Path, block: str, copied: str) -> None:
    """The text that the theme copies has neither the prompt nor the output; a block of output only is copied whole.

    The theme marks the block with data-md-copying while it takes its text.
    """
    shutil.copy(ASSETS / "site.css", tmp_path)
    taken = said(
        tmp_path,
        f"""<link rel="stylesheet" href="site.css"><pre><code data-md-copying>{block}</code></pre><script>
        addEventListener("load", () => {{
          document.title = JSON.stringify(document.querySelector("code").innerText.trimEnd());
        }});
        </script>""",
    )
    assert taken == copied
