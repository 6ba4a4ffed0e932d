"""Each folder of tests imports numapin's internals in one file, its seam: merged modules change one file a folder.

Where only some tests of a folder need torch, seam_torch.py has what imports it. Every file may import the public names:
those of `numapin`, and the two modules that docs/reference documents by name, numapin.errors and numapin.pinned.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
SEAMS = sorted([*TESTS.rglob("seam.py"), *TESTS.rglob("seam_torch.py")])
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path not in SEAMS]
MODULES = {
    ".".join(path.relative_to(TESTS.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in TESTS.with_name("numapin").rglob("*.py")
}
INTERNALS = MODULES - {"numapin", "numapin.errors", "numapin.pinned"}


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def _imported(path: Path) -> set[str]:
    """Return what a file imports, inside functions too: modules, and names with their module in front."""
    names: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_seams_import_internals() -> None:
    """All other files import public names only."""
    internal = {
        path for path in (*SEAMS, *FILES) if any({n, n.rpartition(".")[0]} & INTERNALS for n in _imported(path))
    }
    assert internal == set(SEAMS)


def test_each_test_states_its_behaviour() -> None:
    """Each test has a docstring; for helpers, names are enough, so ruff does not ask for any below tests/."""
    tests = [
        node
        for path in FILES
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    ]
    assert len(tests) > 1000
    assert [test.name for test in tests if not ast.get_docstring(test)] == []
