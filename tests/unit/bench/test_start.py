"""`python -m bench.start` as a developer runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bench import start

if TYPE_CHECKING:
    from pathlib import Path


def test_a_table_of_real_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has both launchers' medians, the file each run, and a failed run gives no figure but its error."""
    measure, launchers = start.measure, []

    def measured(launcher: str, script: Path, num_ranks: int, **hosts: Any) -> dict[str, float]:
        launchers.append(launcher)
        return measure("numapin", script, num_ranks, **hosts)  # torchrun's start takes ten times as long

    monkeypatch.setattr(start, "measure", measured)
    start.main(["--script", "print", "--ranks", "2", "--repeats", "1", "--json", str(tmp_path / "start.json")])
    heading, columns, last_line, total = capsys.readouterr().out.splitlines()
    assert heading.startswith("print, 2 ranks, 1 repeats")
    assert columns.split()[:2] == ["torchrun", "numapin"]
    assert {*launchers} == {"torchrun", "numapin"}
    assert (last_line.split()[0], total.split()[0]) == ("last_line_s", "total_s")
    runs = json.loads((tmp_path / "start.json").read_text())["runs"]
    assert all(0 < run["last_line_s"] <= run["total_s"] for name in ("torchrun", "numapin") for run in runs[name])
    script = tmp_path / "script.py"
    script.write_text(f"{start.SCRIPTS['print']}\nif os.environ['RANK'] == '1':\n    raise SystemExit('out of luck')\n")
    with pytest.raises(RuntimeError, match=r"(?s)numapin ended with status 1 .*out of luck"):
        measure("numapin", script, 2)
