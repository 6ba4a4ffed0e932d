"""Run numapin's command lines on terminals of 80 columns, and compare what they show with recorded files."""

from __future__ import annotations

import difflib
import io
import os
import re
import selectors
import shlex
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console, RenderableType

from numapin import __version__
from tests.integration.forking import CommandLine, Forker
from tests.terminals import opened, read

HERE: Final = Path(__file__).parent
_WIDTH: Final = 80
_LIMIT_S: Final = 60
_COMMANDS: Final = "run exec attach topo plan verify top doctor bench job compare trace completion"
_IMPORTED: Final = (*(f"numapin.cli.{name}" for name in _COMMANDS.split()), "numapin.cli.entry", "rich.tree")
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")


class Screens:
    """A process that has numapin imported, and runs each command line in a fork of itself, in one folder."""

    def __init__(self, folder: Path) -> None:
        """Start the process with few variables, so that nothing depends on those of the test run."""
        self.folder = folder
        self._environ = {
            **{name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "NUMAPIN_RUN_DIR": str(folder / "runs"),  # active runs elsewhere are not seen
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "PYTHONUTF8": "1",
        }
        self.forker = Forker(self._environ, _IMPORTED)

    def write(self, name: str, content: str | bytes) -> None:
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def run(self, words: Sequence[str]) -> tuple[int, str, str]:
        """Run a command, and return its status, stdout and stderr. Both are terminals."""
        command = CommandLine(
            module="numapin", arguments=words, environ=self._environ, cwd=str(self.folder), new_session=True
        )
        (out, out_end), (err, err_end) = _terminal(), _terminal()
        process = self.forker.start(command, out=out_end, err=err_end)
        os.close(out_end)
        os.close(err_end)
        shown, complained = map(self._settled, _read((out, err)))
        return process.wait(_LIMIT_S), shown, complained

    def _settled(self, raw: bytes) -> str:
        """Return output without colors, and without what differs between machines and versions."""
        text = _STYLE.sub("", raw.decode()).replace(str(self.folder), "/FOLDER")
        text = text.replace(f"version {__version__}", "version VERSION")
        text = text.replace(f"Written by numapin {__version__}", "Written by numapin VERSION")
        return text if text.endswith("\n") or not text else f"{text}\n"

    def record(self, words: Sequence[str]) -> str:
        """Run a command, and return its command line and what it shows, as the recorded files hold it."""
        status, out, err = self.run(words)
        line = f"=== {shlex.join(['numapin', *words])}\n{out}"
        assert "Traceback (most recent call last)" not in out + err, f"{line}{err}"
        return line + (f"--- stderr\n{err}" if err else "") + (f"--- status {status}\n" if status else "")


def compare(text: str, name: str) -> None:
    """Fail with the difference if a recorded file does not hold this text; NUMAPIN_UPDATE_GOLDEN=1 records it."""
    file = HERE / name
    if os.environ.get("NUMAPIN_UPDATE_GOLDEN"):
        file.write_text(text)
    recorded = file.read_text() if file.exists() else ""
    if text != recorded:
        lines = recorded.splitlines(), text.splitlines()
        difference = "\n".join(difflib.unified_diff(*lines, f"recorded: {name}", "now", lineterm=""))
        pytest.fail(f"record it, if it is right, with: NUMAPIN_UPDATE_GOLDEN=1\n{difference}", pytrace=False)


def compare_answers(file: Path, answer: Callable[[str], str]) -> None:
    """Answer each line of a file that begins with "$ ", and compare the answers with those recorded below the lines.

    A line that begins with "# " says what the answers below it must show, and stays.
    """
    text, num_answers = "", 0
    for line in file.read_text().splitlines():
        if line.startswith("$ "):
            answered = answer(line[2:])
            text += f"{line}\n{answered}\n" if answered else f"{line}\n"
            num_answers += 1
        elif line.startswith("# "):
            text += f"{line}\n"
    assert num_answers
    compare(text, str(file))


def rendered(renderable: RenderableType, width: int, **options: Any) -> str:
    """Return what rich prints on a terminal of this width, without trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False, emoji=False, markup=False, **options).print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _terminal() -> tuple[int, int]:
    """Return both ends of a terminal that leaves line ends as they are."""
    ours, theirs = opened(_WIDTH)
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    return ours, theirs


def _read(terminals: tuple[int, int]) -> list[bytes]:
    """Return the output on each terminal, until no process has it open, and close it."""
    seen = dict.fromkeys(terminals, b"")
    with selectors.DefaultSelector() as selector:
        for terminal in terminals:
            selector.register(terminal, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                part = read(key.fd)
                seen[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [*seen.values()]
