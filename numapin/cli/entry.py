"""Where the program `numapin` starts. Edge.

Comes in: sys.argv. Goes out: an exit status, or the command that `numapin exec` becomes. Importing click takes longer
than all else that `exec` does with a plan that is there already: such a line is read here, and any other by click.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS: Final = ("--local-rank", "--local-size")
_FLAGS: Final = ("--strict", "--verbose")
_PLAN: Final = "--plan"


class Line(NamedTuple):
    """What a line of `numapin exec` says that needs no click."""

    options: dict[str, str]
    command: tuple[str, ...]

    def number(self, option: str) -> int | None:
        """Return the value of an option that is a number, None where it was not given."""
        return int(self.options[option]) if option in self.options else None


def main() -> None:
    """Become the command of a plain `numapin exec`, or run the command line."""
    if sys.argv[1:2] == ["exec"]:
        _exec(sys.argv[2:])
    from numapin.cli.main import main as run_command_line

    run_command_line()


def read_line(arguments: Sequence[str]) -> Line | None:
    """Read the options of `exec` that come without binding options. None: click must read, or refuse, the line."""
    options: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-"):
            command = words if word == "--" else [word, *words]
            return Line(options, tuple(command)) if command else None
        name, equals, value = word.partition("=")
        if name in _FLAGS and not equals:
            options[name] = ""
            continue
        if not equals and words:
            value = words.pop(0)
        is_number = value.isascii() and value.isdecimal() and len(value) < 7
        if not (is_number if name in _NUMBERS else name == _PLAN and value and not value.startswith("-")):
            return None
        options[name] = value
    return None


def _exec(arguments: Sequence[str]) -> None:
    """Become the command where a plan is there; return where there is none, or where click must read the line."""
    line = read_line(arguments)
    if line is None:
        return
    gc.disable()  # collections would take 10 ms of the imports; the command replaces this process
    from numapin.errors import NumapinError
    from numapin.execute import enter, find_slice, has_plan
    from numapin.tasks import find_task

    file = line.options.get(_PLAN)
    try:
        if file is None and not has_plan(os.environ):
            return
        task = find_task(os.environ, rank=line.number("--local-rank"), size=line.number("--local-size"))
        part = find_slice(task, os.environ, file=file)
        if part is not None:
            enter(part, task, line.command, strict="--strict" in line.options, verbose="--verbose" in line.options)
    except NumapinError as error:
        from numapin.cli.main import fail

        fail(error)


if __name__ == "__main__":
    main()
