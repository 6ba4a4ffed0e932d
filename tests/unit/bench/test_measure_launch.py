"""The process of `bench launch` that runs a launcher."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from numapin.bench.cases.launch import _PRINTS
from numapin.bench.measure import launch
from numapin.errors import NumapinError

if TYPE_CHECKING:
    from pathlib import Path

_MARKS = "import sys, time; print('MARK', time.monotonic()); sys.exit(not sys.dont_write_bytecode and 3)"


def test_launchers_cache_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers write bytecode as by default, even if it is turned off where the benchmark is started."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with pytest.raises(NumapinError, match="exited with status 3"):
        launch.run((sys.executable, "-c", _MARKS))


def test_a_launcher_that_prints_nothing(tmp_path: Path) -> None:
    """A launcher whose ranks print nothing is an error with the last line of its own."""
    script = tmp_path / "silent.py"
    script.write_text("import sys; sys.exit('no ranks')")
    with pytest.raises(NumapinError, match="no ranks"):
        launch.run((sys.executable, str(script)))


def test_a_clock_that_is_set_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the launcher and of its ranks are of one clock, which is never set."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    found = launch.run((sys.executable, "-c", _PRINTS))
    assert 0 < found["first_s"] <= found["last_s"] <= found["total_s"] < time.monotonic()
