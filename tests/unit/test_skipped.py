"""The table of what was skipped, over several runs of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests import skipped
from tests.conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_the_most_frequent_reason_is_first() -> None:
    """A line a reason, with its number of tests."""
    assert skipped.table(["no GPU", "no Slurm", "no GPU"]).splitlines() == [
        "skipped  why",
        "      2  no GPU",
        "      1  no Slurm",
    ]
    assert skipped.table([]) == "nothing was skipped\n"


def test_runs_add_up(tmp_path: Path) -> None:
    """What each run skipped is counted once, with and without xdist: by a mark, in a test or as a whole file."""
    (tmp_path / "test_marks.py").write_text(
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='no GPU')\n"
        "def test_mark(): pass\n"
        "def test_call(): pytest.skip('no GPU')\n"
        "def test_that_runs(): pass\n"
    )
    (tmp_path / "test_file.py").write_text("import pytest\npytest.skip('no browser', allow_module_level=True)\n")
    (tmp_path / "conftest.py").write_text("from tests.skipped import pytest_terminal_summary\n")
    found = tmp_path / "found"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {skipped.VARIABLE: str(found), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    base = f"--basetemp={tmp_path / 'base'}"  # the common one has the large folders of other runs to clear away
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "no:cacheprovider", base, str(tmp_path)]
    for options in ([], ["--numprocesses=1"]):
        subprocess.run([*command, *options], env=environ, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    printed = subprocess.run(
        [sys.executable, "-m", "tests.skipped", found], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout.splitlines() == ["skipped  why", "      4  no GPU", "      2  no browser"]
