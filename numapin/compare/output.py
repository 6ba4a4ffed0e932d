"""The output of a run: a file that stays small. Edge.

Comes in: the file that the run's processes append to. Goes out: its last lines.

A script that prints without end would fill the temporary directory, which may be memory. Cutting the file does not
disturb its writers, because they append.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

from numapin.base.printable import printable
from numapin.base.redact import without_secrets

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES: Final = 32 << 20
_SHOWN_LINES: Final = 12
_TAIL_BYTES: Final = 8000


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The output of a run in the file `path`."""

    path: Path

    def open(self) -> IO[bytes]:
        """Make the file, and open it for the run's processes."""
        self.path.unlink(missing_ok=True)
        return self.path.open("ab")

    def bound(self) -> None:
        """Keep only the last lines of a file that has become too large."""
        with suppress(OSError):
            if self.path.stat().st_size > MOST_BYTES:
                kept = self._last()
                os.truncate(self.path, 0)
                with self.path.open("ab") as file:
                    file.write(b"[numapin: earlier output was dropped]\n" + kept)

    def tail(self) -> str:
        """Return the last lines without secrets, each indented and on a line of its own."""
        lines: list[str] = []
        with suppress(OSError):
            lines = [line for line in self._last().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {printable(without_secrets([line])[0])}" for line in lines[-_SHOWN_LINES:])

    def _last(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - _TAIL_BYTES))
            return file.read()
