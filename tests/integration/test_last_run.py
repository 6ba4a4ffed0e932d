"""The newest run by its name @last, and the folder that `run --verbose` shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.launching import forked, numapin, script
from tests.integration.seam import run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def last(tmp_path: Path) -> Iterator[Path]:
    """Give the folder of an active run, which has the plan of one rank. Other tests' runs are elsewhere, in /tmp."""
    with run_folder.run_directory({"NUMAPIN_RUN_DIR": str(tmp_path)}) as folder:
        plan = forked("plan", "--nproc-per-node", "1", "--json", CUDA_VISIBLE_DEVICES="")
        Path(folder, "plan.json").write_text(plan.out)
        yield Path(folder)


def test_plans_of_runs(last: Path, tmp_path: Path) -> None:
    """`topo --plan` and `exec --plan` take @last, the end of a run's name, and its folder."""
    rank = ("--local-rank", "0", "--local-size", "1", "--verbose")
    for named in ("@last", last.name[-8:], str(last)):
        done = forked("exec", "--plan", named, *rank, "--", sys.executable, "-c", "", NUMAPIN_RUN_DIR=str(tmp_path))
        assert f"the plan: {last}/plan.json" in done.err
    done = forked("topo", "--plan", "@last", NUMAPIN_RUN_DIR=str(tmp_path))
    assert done.status == 0
    assert "rank 0" in done.out
    done = forked("exec", "--plan", "@first", *rank, "--", "true", NUMAPIN_RUN_DIR=str(tmp_path))
    assert (done.status, done.err.splitlines()[0]) == (2, "numapin: error: @first is not a run")


def test_verbose(tmp_path: Path) -> None:
    """`run --verbose` says where its files are, which place was passed over, and why there is one rank."""
    path = script(tmp_path, "import os; print(os.environ['NUMAPIN_RUN_DIR'])")
    places = {"TMPDIR": str(tmp_path / "none"), "TEMP": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = numapin("run", "--verbose", "--quiet", path, cwd=None, **places)
    assert f"files of this run: {done.out.strip()}\n" in done.err
    assert f"skipped for the run's folder: {tmp_path}/none: No such file or directory\n" in done.err
    assert re.search("1 rank on this host: no GPU is visible\n.*meet without a rendezvous", done.err)
