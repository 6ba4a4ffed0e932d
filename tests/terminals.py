"""A terminal for commands under test, and a check for harmful output."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration.launching import environment

WIDTH = 160

FORGED = "numapin: error: forged"
HOSTILE = (
    "<b>a\x1b[38;5;196mr\x1b]0;owned\x07\x9b2J\x85\x7f\t\x08\u202egnp.exe\u2066\u200e\u200f\u061c\u2028\u2029\x1b[2J\x1b[7m\r"
    f"\n{FORGED}\n\x9d0;title\x9c[/b]\ufeff"
)
"""Text that a terminal interprets: CSI, OSC and C1 sequences, direction marks, line breaks, a forged message."""

# Colors and weights that rich and click write for us; 38, 48, 7, 8 and all other sequences are not ours.
_STYLE = re.compile(r"\x1b\[(?:(?:0|1|2|22|3[0-79]|9[0-7])(?:;(?=\d)|(?=m)))*m")
_LIVE = re.compile(r"\x1b\[(?:\?25[lh]|\?1049[lh]|1A|2[JK]|[0-9]{1,2};1H|J)|\r(?=\x1b)")
"""The sequences by which rich and `numapin top` redraw: cursor off and on, the other screen, move, erase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    status: int
    raw: bytes

    @property
    def text(self) -> str:
        return _STYLE.sub("", self.raw.decode(errors="replace"))

    def problems(self, *, live: bool = False) -> list[str]:
        """Return the harmful output: control sequences, invisible characters, forged lines."""
        try:
            text = _STYLE.sub("", self.raw.decode())
        except UnicodeDecodeError as error:
            return [str(error)]
        text = (_LIVE.sub("", text) if live else text).replace("\r\n", "\n")
        found = [f"{char!r} in {line!r}" for line in text.split("\n") for char in line if not char.isprintable()]
        return found + [line for line in text.split("\n") if line.startswith(FORGED)]


def on_terminal(
    command: Sequence[str],
    changes: Mapping[str, str] | None = None,
    *,
    cwd: Path | None = None,
    typed: Callable[[bytes], bytes] = lambda _: b"",
) -> Shown:
    """Run a command on its own terminal, in the environment with `changes`."""
    master, slave = opened(WIDTH)
    environ = environment(**{"TERM": "xterm", "PYTHONUTF8": "1", **(changes or {})})
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environ, cwd=cwd) as process:
        os.close(slave)
        seen = b""
        try:
            while part := read(master):
                seen += part
                if keys := typed(seen):
                    os.write(master, keys)
        finally:
            os.close(master)
            process.wait(timeout=60)
    return Shown(status=process.returncode, raw=seen)


def opened(num_columns: int) -> tuple[int, int]:
    """Return both ends of a terminal of this width."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, num_columns, 0, 0))
    return master, slave


def read(master: int) -> bytes:
    """Read the next output; b"" after all processes have closed the terminal."""
    try:
        return os.read(master, 65536)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
