"""A Content-Security-Policy for our HTML pages: a page uses its own style and script, and nothing injected."""

from __future__ import annotations

import base64
import hashlib


def policy_element(*, style: str, script: str) -> str:
    """Return the element. It belongs into the head of the page, before anything that could load or run.

    Style attributes, handlers such as onclick, images, and every other style or script are refused.
    """
    content = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
