"""docs/checks.md has all checks of the doctor, in its own words. NUMAPIN_UPDATE_GOLDEN=1 writes it."""

from __future__ import annotations

import inspect
import os
import textwrap

from tests.docs.pages import DOCS
from tests.docs.seam import CHECKS

HEAD = """\
# The checks of numapin doctor

`numapin doctor` makes these checks, in this order, and prints for each fault the command that fixes it. It changes
nothing.
On a capture (`--root DIR`), it leaves out the checks that need the running machine, and says so.
"""


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def test_the_page_has_all_checks() -> None:
    """Each check is a section with what it finds, what the fault costs, and where it is read."""
    sections = [HEAD]
    for check in CHECKS:
        finds = (inspect.getdoc(check.run) or "").partition("\n")[0]
        needs = " Needs the running machine." if check.is_live else ""
        paragraphs = f"{finds} {check.why}", f"Read from: `{check.where}`.{needs}"
        sections += [f"## {check.name}\n", *(f"{_wrapped(paragraph)}\n" for paragraph in paragraphs)]
    text = "\n".join(sections)
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        (DOCS / "checks.md").write_text(text)
    assert (DOCS / "checks.md").read_text() == text
