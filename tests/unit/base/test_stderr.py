"""Lines on stderr, in whatever state stderr is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.unit.base.seam import say

if TYPE_CHECKING:
    import pytest


def test_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the program."""
    say("rank 1: text")
    assert capsys.readouterr().err == "numapin: rank 1: text\n"


def test_a_stderr_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing, closed or full stderr is ignored."""
    monkeypatch.setattr(sys, "stderr", None)
    say("lost")
    with Path(os.devnull).open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stderr", file)
    say("lost")
    with Path("/dev/full").open("w", encoding="ascii", buffering=1) as file:
        monkeypatch.setattr(sys, "stderr", file)
        say("lost")
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), file.fileno())  # for what the buffer still has
