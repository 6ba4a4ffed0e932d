"""The package writes to a terminal in few places, which let only visible characters through."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numapin

PACKAGE = Path(numapin.__file__).parent
_WRITES = re.compile(
    r"\bprint\(|\becho\(|\bsecho\(|std(?:out|err)\.write\(|os\.write\([12],|\bConsole\(|\bLive\(console|\bwarnings\.warn\((?!printable\()"
)
# Before a new place is added here, it must clean its text, and tests/integration/test_hostile_names.py must test it.
_PLACES = {
    "cli/main.py",  # tracebacks
    "cli/output.py",
    "cli/top.py",  # the live display
    "rank/hook/numapin_hook_parts.py",
    "base/stderr.py",
}


def test_nothing_else_writes() -> None:
    """All other modules pass their text to one of these."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings hold examples
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        if any(_WRITES.search(line.partition("#")[0]) for line in lines):
            found.add(str(path.relative_to(PACKAGE)))
    assert found == _PLACES
