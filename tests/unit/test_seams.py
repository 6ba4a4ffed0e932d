"""Each folder of tests imports numapin's internals in one file, its seam: merged modules change one file a folder.

Where only some tests of a folder need torch, seam_torch.py has what imports it. Every file may import the public names:
those of `numapin`, and the two modules that docs/reference documents by name, numapin.errors and numapin.pinned.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEAMS = sorted([*TESTS.rglob("seam.py"), *TESTS.rglob("seam_torch.py")])
FILES = [path for path in sorted(TESTS.rglob("*.py")) if path not in SEAMS]
MODULES = {
    ".".join(path.relative_to(TESTS.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in TESTS.with_name("numapin").rglob("*.py")
}
INTERNALS = MODULES - {"numapin", "numapin.errors", "numapin.pinned"}
STRINGS = {
    "contract": "test_processes test_torch_names",
    "cuda": "test_gpu",
    ".": "hostile",
    "integration": (
        "forking launching staying test_attach test_cli "
        "test_compare test_completion test_dataloader_option test_direct "
        "test_exec test_faults test_gpu_bench test_gpu_loader test_hostile_names test_init "
        "test_job test_loader_exit test_loader_forks test_planted_modules test_security_folders "
        "test_share test_spawn test_trace_job test_verify test_without_torch warm_ranks"
    ),
    "recorded": "screens",
    "topology": "test_nvml",
    "unit/base": "test_files",
    "unit/bench": "test_process",
    "unit/children": "test_command test_own",
    "unit/data": "test_forking",
    "unit/doctor": "test_nvidia",
    "unit/steps": "test_totals",
    "unit/launcher": "test_store",
    "unit/observe": "test_verify",
    "unit/rank": "test_shim test_signals",
    "unit/system": "test_cuda",
    "unit": "test_layout",
    "vm": "conftest",
}
"""Files whose strings name internals, by folder. Nearly all are code that a child process runs, or modules that it must
import before it forks, or must not import: a seam there would import all that its folder uses."""


def _relative(path: Path) -> str:
    return str(path.relative_to(TESTS))


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


def test_strings_that_name_internals() -> None:
    """A new use of an internal module by its name in a string is a decision."""
    found = set()
    for path in FILES:
        docstrings = {node.value for node in _nodes(path) if isinstance(node, ast.Expr)}
        for node in _nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                # "numapin.plan/1" is a schema's name
                named = {name.rstrip(".") for name in re.findall(r"\bnumapin\.[a-z_.]+\b(?!/)", node.value)}
                if named & INTERNALS:
                    found.add(_relative(path))
    assert found == {str(Path(folder, f"{name}.py")) for folder, names in STRINGS.items() for name in names.split()}


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


@pytest.mark.parametrize("seam", SEAMS, ids=_relative)
def test_a_seam_has_what_its_folder_uses(seam: Path) -> None:
    """Another file of the folder imports each name of a seam, or reads it as an attribute of the seam."""
    module = ".".join(seam.relative_to(TESTS.parent).with_suffix("").parts)
    imports = [node for node in _nodes(seam) if isinstance(node, ast.ImportFrom) and node.module in MODULES]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    others = [path for path in FILES if path.parent == seam.parent]
    used = {name.rpartition(".")[2] for path in others for name in _imported(path) if name.startswith(f"{module}.")}
    used |= {name for path in others for name in re.findall(rf"\b{seam.stem}\.(\w+)", path.read_text())}
    assert names - used == set()
