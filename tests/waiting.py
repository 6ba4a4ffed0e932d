"""Waiting for other processes and threads, so that no test depends on the speed of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeVar

import pytest

T = TypeVar("T")

_PAUSE_S: Final = 0.02


def wait_until(condition: Callable[[], T], *, limit_s: float) -> T:
    """Return the result of `condition` as soon as it is true, or its last result when the time is up."""
    end = time.monotonic() + limit_s
    while not (got := condition()) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return got


def joins_in_vain(monkeypatch: pytest.MonkeyPatch) -> list[BaseProcess]:
    """Return a list that gets each process for whose end a `join` waits in vain, from now on."""
    found: list[BaseProcess] = []
    own = BaseProcess.join

    def join(self: BaseProcess, timeout: float | None = None) -> None:
        own(self, timeout)
        if self.is_alive():
            found.append(self)

    monkeypatch.setattr(BaseProcess, "join", join)
    return found


def gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
