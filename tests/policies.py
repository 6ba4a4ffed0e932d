"""Tests of pages with a Content-Security-Policy: allow a test's own scripts, and insert ones that must not run."""

from __future__ import annotations

import base64
import hashlib
import re

_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"/>\n')

FOREIGN = """<script>window.ran = ["script"];</script>
<button id="foreign" onclick="(window.ran ||= []).push('handler')" style="outline-color: rgb(1, 2, 3)">x</button>"""
"""The content of a name that a page would include without escaping."""

LOOK = """<script>
document.getElementById("foreign").click();
document.title = JSON.stringify({ran: window.ran || [], outline: getComputedStyle(
document.getElementById("foreign")).outlineColor});
</script>"""
"""A script that writes into the page's title which parts of FOREIGN had an effect."""
HAS_EFFECT = {"ran": ["script", "handler"], "outline": "rgb(1, 2, 3)"}


def policy_of(page: str) -> dict[str, list[str]]:
    """Return the sources of each directive of the page's only policy, which precedes everything that could load."""
    (content,) = _POLICY.findall(page)
    before = page[: page.index(content)]
    assert re.findall(r"<(\w+)", before) == ["html", "head", "meta", "meta"]
    words = [directive.split() for directive in content.split("; ")]
    return {name: sources for name, *sources in words}


def allowing(page: str, *scripts: str) -> str:
    """Allow the test's own scripts, each `<script>…</script>`, under the page's policy."""
    hashes = " ".join(f"'sha256-{_hash(re.sub('</?script>', '', script))}'" for script in scripts)
    return page.replace("script-src ", f"script-src {hashes} ", 1)


def without_policy(page: str) -> str:
    return _POLICY.sub("", page)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
