"""`scripts/test.sh`: tests that fail beside others but pass alone are named and do not fail the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Fails unless a file of its name is there, which it makes.
UNSTEADY_TEST = """
import pathlib, pytest
@pytest.mark.xdist_group("two words")
@pytest.mark.parametrize("name", NAMES)
def test_once(name):
    path = pathlib.Path(name)
    seen = path.exists()
    path.touch()
    assert seen
"""


def _unsteady(*names: str) -> str:
    return UNSTEADY_TEST.replace("NAMES", repr(names))


def _run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group: x\n")
    (folder / "test_it.py").write_text(code)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}  # plugins take 1 s in each run
    common = ["-p", "xdist", "--import-mode=importlib", f"--basetemp={folder / 'base'}"]
    command = ["sh", str(ROOT / "scripts/test.sh"), sys.executable, *common, *options]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_passed_alone(tmp_path: Path) -> None:
    """The run passes and names these tests, without xdist's groups, also for CI. Tests in VMs count as one."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_logreport\n")
    (tmp_path / "tests" / "vm").mkdir(parents=True)
    (tmp_path / "tests" / "vm" / "test_it.py").write_text(_unsteady("e", "f", "g"))
    done = _run(tmp_path, _unsteady("a", "b@c") + "\ndef test_other(): pass\n", "--numprocesses=1", "--dist=loadgroup")
    tests = [f"test_it.py::test_once[{name}]" for name in ("a", "b@c")]
    tests += [f"tests/vm/test_it.py::test_once[{name}]" for name in "efg"]
    report = [f"failed beside the others, passed alone: {test}" for test in tests]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "once more, alone: 5 that failed" in done.stdout
    assert "5 passed" in done.stdout
    assert "assert seen" in done.stdout
    assert done.stdout.splitlines()[-5:] == report
    assert (tmp_path / ".cache/unsteady").read_text().splitlines() == report


@pytest.mark.parametrize(
    "code",
    [_unsteady(*"abcd"), _unsteady("a") + "\ndef test_always(): assert 0"],
    ids=["too many", "one of two always"],
)
def test_failed(tmp_path: Path, code: str) -> None:
    """If too many fail, or one of two fails alone, the run fails, and no test is reported to have passed alone."""
    done = _run(tmp_path, code)
    assert done.returncode == 1, done.stdout
    assert "passed alone" not in done.stdout
    assert not (tmp_path / ".cache/unsteady").exists()
