"""`python -m bench.start` as a developer runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from bench.start import SCRIPTS, main, measure

if TYPE_CHECKING:
    from pathlib import Path


def test_both_launchers_start_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has both launchers' medians; the file has each run."""
    main(["--script", "print", "--ranks", "2", "--repeats", "1", "--json", str(tmp_path / "start.json")])
    heading, columns, last_line, total = capsys.readouterr().out.splitlines()
    assert heading.startswith("print, 2 ranks, 1 repeats")
    assert columns.split()[:2] == ["torchrun", "numapin"]
    assert (last_line.split()[0], total.split()[0]) == ("last_line_s", "total_s")
    runs = json.loads((tmp_path / "start.json").read_text())["runs"]
    assert all(0 < run["last_line_s"] <= run["total_s"] for name in ("torchrun", "numapin") for run in runs[name])


def test_a_rank_that_prints_nothing_is_an_error(tmp_path: Path) -> None:
    """A failed run gives no figure; its error is shown."""
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPTS['print']}\nif os.environ['RANK'] == '1':\n    raise SystemExit('out of luck')\n")
    with pytest.raises(RuntimeError, match=r"(?s)numapin ended with status 1 .*out of luck"):
        measure("numapin", script, 2)
