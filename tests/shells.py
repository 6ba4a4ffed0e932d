"""Interactive shells on a terminal, for tests of completion."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Final, Self

_SHELLS: Final = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(numapin completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(numapin completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "numapin completion fish | source"),
}
_WITH_TERMINAL: Final = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
"""A program that becomes the shell, with its stdin as its controlling terminal."""
_LIMIT_S: Final = 60
_QUERIES: Final = {b"\x1b[c": b"\x1b[?62;c", b"\x1b[0c": b"\x1b[?62;c", b"\x1b[6n": b"\x1b[1;1R"}
"""Questions to the terminal, and the answers of one."""


class Shell:
    """A shell that has loaded numapin's completion; a context manager."""

    def __init__(self, name: str, folder: Path, **environment: str) -> None:
        program, load = _SHELLS[name]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        environ = {"PATH": path, "TERM": "xterm", "HOME": str(folder), "LC_ALL": "C.UTF-8", "PS1": "$ ", **environment}
        self._terminal, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 300, 0, 0))
        command = [sys.executable, "-Sc", _WITH_TERMINAL, *program]
        self._process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, cwd=folder, env=environ)
        os.close(own)
        self._type(f"{load}; echo LOAD''ED\r", until="LOADED")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._terminal)
        self._process.kill()
        self._process.wait()

    def completed(self, line: str) -> str:
        """Return the line after the Tab key: it is moved into an argument of `echo`, and printed."""
        shown = self._type(f"{line}\t\x01echo 'NOW''{{\x05}}'\r", until=r"[\r\n]NOW\{.*\}")
        *_, last = re.finditer(r"[\r\n]NOW\{(.*)\}", shown)
        return last[1].rstrip()

    def _type(self, keys: str, *, until: str) -> str:
        os.write(self._terminal, keys.encode())
        shown = b""
        end_s = time.monotonic() + _LIMIT_S
        while not re.search(until, shown.decode(errors="replace")):
            if not select.select([self._terminal], [], [], max(0, end_s - time.monotonic()))[0]:
                raise TimeoutError(shown)
            part = os.read(self._terminal, 65536)
            for question, answer in _QUERIES.items():
                if question in part:
                    os.write(self._terminal, answer)
            shown += part
        return shown.decode(errors="replace")
