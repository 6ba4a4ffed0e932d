"""A signal ends a measuring block early; later ones wait for the report; the line of progress."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from numapin.errors import Stopped
from tests.terminals import opened
from tests.unit.cli.seam import EarlyEnd, left_in_words, show_status

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_are_restored() -> Iterator[None]:
    """Fail if a test leaves other handlers than it found."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block(number: signal.Signals) -> None:
    """What the block did until then stays; `leave` raises the error with the status of the signal.

    Code that catches all errors does not catch it.
    """
    done = []
    with EarlyEnd() as end:
        for step in range(3):
            done.append(step)
            if step == 1:
                with suppress(Exception):  # as careless code does
                    os.kill(os.getpid(), number)
    assert (done, end.came) == ([0, 1], True)
    with pytest.raises(Stopped, match=rf"stopped by {number.name}; two steps") as raised:
        end.leave("two steps")
    assert raised.value.exit_code == 128 + number


def test_later_signals_do_not_disturb_the_report() -> None:
    """They are ignored while the block cleans up, and until `leave`."""
    cleaned = False
    with EarlyEnd() as end:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned = True
    os.kill(os.getpid(), signal.SIGHUP)
    assert cleaned
    with pytest.raises(Stopped, match="SIGTERM"):
        end.leave("")


def test_without_a_signal() -> None:
    """The previous handlers are restored, and `leave` does nothing; an error of the block is raised as it is."""
    before = signal.getsignal(signal.SIGTERM)
    with EarlyEnd() as end:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    end.leave("all of it")
    assert not end.came
    with pytest.raises(KeyError), EarlyEnd():
        raise KeyError("x")


def test_a_signal_that_is_ignored_stays_so() -> None:
    """Under nohup, SIGHUP ends nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EarlyEnd() as end:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not end.came
    finally:
        signal.signal(signal.SIGHUP, before)


# --- the line of a terminal that shows progress: as wide as the terminal, with the time that is left -----------------


@pytest.mark.parametrize(("columns", "shown"), [(20, 19), (200, 100), (0, 100)])
def test_the_line_fits_the_terminal(columns: int, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut before the last column; a terminal of unknown width gets the whole line."""
    master, slave = opened(columns)
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
    [(0, 10, 5.0, ""), (10, 10, 5.0, ""), (2, 10, 20.0, "about 80 s left"), (1, 721, 5.0, "about 1 h 00 min left")],
)
def test_time_left(done: int, planned: int, elapsed_s: float, words: str) -> None:
    """It is unknown before the first run has ended; then the runs to come take as long as those before, on average.

    After the last one it is not mentioned.
    """
    assert left_in_words(done, planned, elapsed_s) == words
