"""`python -m tests.twice`: tests that fail beside others but pass alone are reported and do not fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from scripts.release import PASSED_ALONE
from tests.conftest import ROOT
from tests.twice import MOST, UNSTEADY, name_and_group

if TYPE_CHECKING:
    from pathlib import Path

# Fails unless a file of its name is there, which it makes.
UNSTEADY_TEST = """
import pathlib, pytest
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize("name", NAMES)
def test_once(name):
    path = pathlib.Path(name)
    seen = path.exists()
    path.touch()
    assert seen
"""


SKIPPED_THEN = """
import pathlib, pytest
def test_skips():
    path = pathlib.Path("skips")
    if path.exists():
        pytest.skip("not here")
    path.touch()
    assert 0
"""


def _unsteady(names: str, group: str = "vm-two nodes") -> str:
    return UNSTEADY_TEST.replace("NAMES", names).replace("GROUP", repr(group))


def _run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group: x\n")
    (folder / "test_it.py").write_text(code)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.twice import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--import-mode=importlib", *options]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take 1 s in each run
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_passed_alone(tmp_path: Path) -> None:
    """The run passes; the failures and the tests' names are shown, and kept for CI. A machine's tests count as one."""
    xdist = ("-p", "xdist", "--numprocesses=1", "--dist=loadgroup")
    names = [f"{number}@b" for number in range(MOST + 1)]
    done = _run(tmp_path, _unsteady(str(names)), *xdist)
    told = "".join(f"{PASSED_ALONE}test_it.py::test_once[{name}]\n" for name in names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout
    assert "assert seen" in done.stdout
    assert (tmp_path / UNSTEADY).read_text() == told


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError",
        _unsteady(f"map(str, range({MOST + 1}))", "no machine"),
        _unsteady('["once"]') + "\ndef test_always(): assert 0",
        SKIPPED_THEN,
    ],
    ids=["cannot be read", "too many", "one of two always", "skipped then"],
)
def test_failed(tmp_path: Path, code: str) -> None:
    """The run fails, and no test is reported to have passed alone."""
    done = _run(tmp_path, code)
    assert done.returncode not in (0, 5), done.stdout
    assert "passed alone" not in done.stdout
    assert not (tmp_path / UNSTEADY).exists()


@pytest.mark.parametrize(
    ("name", "plain", "group"),
    [
        ("tests/a.py::test_b@group", "tests/a.py::test_b", "group"),
        ("tests/a.py::test_b[x@y]@two words", "tests/a.py::test_b[x@y]", "two words"),
        ("tests/a.py::test_b[x@y]", "tests/a.py::test_b[x@y]", ""),
        ("tests/a.py::test_b", "tests/a.py::test_b", ""),
        ("a@b/test_c.py::test_d", "a@b/test_c.py::test_d", ""),
    ],
)
def test_names(name: str, plain: str, group: str) -> None:
    """The group that xdist appends is told apart from an @ elsewhere."""
    assert name_and_group(name) == (plain, group)


def test_not_all_ran(tmp_path: Path) -> None:
    """If pytest stopped at the first failure, a second run cannot show that all pass."""
    done = _run(tmp_path, _unsteady('["once"]') + "\ndef test_other(): assert 0", "-x")
    assert done.returncode != 0
    assert "passed alone" not in done.stdout
