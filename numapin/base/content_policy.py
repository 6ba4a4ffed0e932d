"""A Content-Security-Policy for our HTML pages: a page uses its own style and script, and nothing injected. Pure.

Comes in: the text of the page's style and of its script. Goes out: the meta element with the policy.
"""

from __future__ import annotations

import base64
import hashlib


def policy_element(*, style: str, script: str | None = None, images: str = "'none'") -> str:
    """Return the element. It belongs into the head of the page, before anything that could load or run.

    Style attributes, handlers such as onclick, and every other style or script are refused. `images` is 'none', or
    data: for an icon.
    """
    scripts = "'none'" if script is None else _hash(script)
    content = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {scripts}; img-src {images}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
