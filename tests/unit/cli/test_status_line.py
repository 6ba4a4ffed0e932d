"""The line of a terminal that shows progress: as wide as the terminal, with the time that is left."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.seam import left_in_words, show_status

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("columns", "shown"), [(20, 19), (200, 100), (0, 100)])
def test_the_line_fits_the_terminal(columns: int, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut before the last column; a terminal of unknown width gets the whole line."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        show_status("x" * 100)
        terminal.flush()
        assert os.read(master, 1000) == b"\r\033[K" + b"x" * shown
    os.close(master)


def test_a_file_gets_no_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a terminal shows it."""
    path = tmp_path / "log"
    with path.open("w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        show_status("x")
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("done", "planned", "elapsed_s", "words"),
    [(0, 10, 5.0, ""), (2, 10, 20.0, "about 80 s left"), (1, 721, 5.0, "about 1 h 00 min left")],
)
def test_time_left(done: int, planned: int, elapsed_s: float, words: str) -> None:
    """It is unknown before the first run has ended; then the runs to come take as long as those before, on average."""
    assert left_in_words(done, planned, elapsed_s) == words
